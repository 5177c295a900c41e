"""Declare the flags of fmoe-server and fmoe-dht as fields of dataclasses; read them from arguments or a YAML file.

    @dataclass
    class Options:
        lr: float = flag(0.01, "learning rate", type=NOT_NEGATIVE)
    values = Parser("fmoe-server", Options, description=...).read(arguments, "config")
    options = build(Options, values)
server/options.py and dht/main.py do so. An option of the Python class and its flag are one line, and differ only where
that says so (name=, command_default=). A line of the YAML file stands for arguments of the command line and is checked
in the same way.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
_TRUE, _FALSE = frozenset(("true", "yes", "on")), frozenset(("false", "no", "off"))
UNSET = frozenset(("", "null", "~"))
LOG_FORMAT = "[%(asctime)s.%(msecs)03d][%(levelname)s][%(module)s.%(funcName)s:%(lineno)d] %(message)s"
DATE_FORMAT = "%Y/%m/%d %H:%M:%S"


@dataclass(frozen=True)
class _Flag:
    """A flag, as metadata of its field."""

    name: str  # "": the field's
    default: Any  # of the command
    needs: Sequence[str]  # flags, of which one must be given too
    excludes: Sequence[str]  # flags that must not be given with it
    group: str | None  # title in --help
    short: str  # another spelling, such as -c
    arguments: Mapping[str, Any]  # of argparse.add_argument


def flag(
    default: Any,
    help: str = "",
    *,
    name: str = "",
    command_default: Any = dataclasses.MISSING,
    needs: Sequence[str] = (),
    excludes: Sequence[str] = (),
    group: str | None = None,
    short: str = "",
    **arguments: Any,
) -> Any:
    """Make a dataclass field that is a flag of a command too; further arguments are those of argparse.add_argument.

    name, command_default: the flag's, if they are not the field's. needs, excludes: other flags, of which one must, or
    none may, be given too.
    """
    shown = default if command_default is dataclasses.MISSING else command_default
    described = _Flag(name, shown, needs, excludes, group, short, {**arguments, "help": help or None})
    return dataclasses.field(default=default, metadata={"flag": described})


_NETWORK, _ADMISSION = "how others find it", "who may call"
network_flag, admission_flag = partial(flag, group=_NETWORK), partial(flag, group=_ADMISSION)


def flags_of(*kinds: type) -> Iterator[tuple[str, _Flag]]:
    """Yield (field name, flag) for every flag of dataclasses; fields of type Path | None become paths."""
    for kind in kinds:
        for field in dataclasses.fields(kind):
            if (declared := field.metadata.get("flag")) is not None:
                arguments = declared.arguments | ({"type": Path} if field.type == Path | None else {})
                name = declared.name or field.name
                yield field.name, dataclasses.replace(declared, name=name, arguments=arguments)


def build(kind: Callable[..., T], values: argparse.Namespace, **others: Any) -> T:
    """Make a dataclass from the values of its flags; others: values of fields that are no flags."""
    given = {field: getattr(values, declared.name) for field, declared in flags_of(kind)}  # type: ignore[arg-type]
    return kind(**given, **others)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser of the flags of dataclasses. foreign: other programs' flags, and what to write instead."""

    def __init__(
        self,
        prog: str,
        *kinds: type,
        description: str,
        usage: str | None = None,
        foreign: Mapping[str, str] | None = None,
    ):
        super().__init__(prog, usage, description, allow_abbrev=False)
        self._foreign, self._flags = foreign or {}, [declared for _, declared in flags_of(*kinds)]
        self._place = ""  # "file:line" of the flag that is being read; "" on the command line
        groups: dict[str, argparse._ArgumentGroup] = {}
        for one in self._flags:
            if one.group is not None and one.group not in groups:
                groups[one.group] = self.add_argument_group(one.group)
            target: Any = self if one.group is None else groups[one.group]
            spellings = [*filter(None, [one.short]), f"--{one.name}"]
            target.add_argument(*spellings, default=one.default, **one.arguments)

    def error(self, message: str) -> NoReturn:
        """End the program with status 2; name the line of the file if the flag comes from one."""
        super().error(f"{self._place}: {message}" if self._place else message)

    def read(self, arguments: Sequence[str] | None, config: str = "") -> argparse.Namespace:
        """Return the values of all flags; config: the flag that names a YAML file, over which arguments win."""
        # 1. the file's lines as arguments before the given ones: argparse takes the last value of a flag
        values = self._parse(arguments)
        if config and getattr(values, config) is not None:
            own = list(sys.argv[1:] if arguments is None else arguments)
            arguments = [*self._configured(getattr(values, config)), *own]
            values = self._parse(arguments)
        # 2. which flags were given, be it with their defaults: parsed again over a default that no flag can have
        unset = object()
        blank = argparse.Namespace(**{one.name: unset for one in self._flags})
        parsed = vars(self._parse(arguments, blank))
        given = {name for name, value in parsed.items() if value is not unset and value is not None}
        # 3. refuse flags that would be ignored
        for one in self._flags:
            if one.name in given and (both := [other for other in one.excludes if other in given]):
                self.error(f"--{one.name} excludes --{', --'.join(both)}: leave one or the other out")
        for one in self._flags:
            if one.name in given and one.needs and not given & set(one.needs):
                self.error(f"--{one.name} means nothing without --{' or --'.join(one.needs)}")
        return values

    def _parse(
        self, arguments: Sequence[str] | None, values: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        found, unknown = self.parse_known_args(arguments, values)
        for text in unknown:
            name = text.removeprefix("--").partition("=")[0]
            if text.startswith("--") and name in self._foreign:
                self.error(f"--{name} means nothing here: {self._foreign[name]}")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found

    def _configured(self, path: Path) -> list[str]:
        """Return the arguments that a YAML file stands for, each checked as on the command line."""
        import yaml  # only files of flags need it

        # compose() gives nodes with line numbers, for errors; BaseLoader leaves all values as text, as argparse wants
        try:
            root = yaml.compose(path.read_text(), Loader=yaml.BaseLoader)
        except FileNotFoundError:
            raise SystemExit(f"{path} does not exist") from None
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            raise SystemExit(f"{path} cannot be read: {error}") from None
        except yaml.YAMLError as error:
            raise SystemExit(f"{path} is no YAML: {error}") from None
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise SystemExit(f"{path} must hold `flag: value` lines")
        arguments: list[str] = []
        seen: set[str] = set()
        for key, value in () if root is None else root.value:
            self._place = f"{path}:{key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                raise SystemExit(f"{self._place}: write each flag once, as `flag: value`")
            seen.add(key.value)
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            if not all(isinstance(part, yaml.ScalarNode) for part in parts):
                raise SystemExit(f"{self._place}: {key.value} must be a value or a list of values")
            texts = [part.value for part in parts]
            some = self._as_arguments(key.value, texts if parts is value.value else texts[0])
            self._parse(some)  # so that an error names this line
            arguments += some
        self._place = ""
        return arguments

    def _as_arguments(self, key: str, value: str | list[str]) -> list[str]:
        """Return the arguments of one line of a file: --flag, --flag=value, --flag value value, or none if unset."""
        actions = {action.dest: action for action in self._actions}
        if key in self._foreign:
            self.error(f"{key} means nothing here: {self._foreign[key]}")
        if key not in actions or key in ("help", "config"):
            self.error(f"unknown flag {key}")
        if actions[key].nargs == 0:  # a switch (store_true)
            if not isinstance(value, str) or value.lower() not in _TRUE | _FALSE:
                self.error(f"{key} must be true or false, but is {value}")
            return [f"--{key}"] if value.lower() in _TRUE else []
        if isinstance(value, str) and value.lower() in UNSET:
            return []
        if isinstance(value, str) and actions[key].nargs is None:
            return [f"--{key}={value}"]  # in one piece, because a value may begin with "-"
        if isinstance(value, list) and actions[key].nargs is None:
            self.error(f"{key} takes one value, but the file has a list of {len(value)}")
        return [f"--{key}", *([value] if isinstance(value, str) else value)]


# -------------------------------------------------------------------- types of values


def _number(kind: type[int] | type[float], least: float, may_be_least: bool) -> Callable[[Any], float]:
    """Make a type of argparse: numbers of at least `least`, or above it."""

    def read(text: Any) -> float:
        value = kind(text)
        if not (value > least or (may_be_least and value == least)):
            raise argparse.ArgumentTypeError(
                f"must be {'at least' if may_be_least else 'more than'} {least}, but is {text}"
            )
        return value

    read.__name__ = kind.__name__  # argparse names the type in its errors
    return read


POSITIVE, POSITIVE_INT = _number(float, 0, False), _number(int, 1, True)
NOT_NEGATIVE, NOT_NEGATIVE_INT = _number(float, 0, True), _number(int, 0, True)


def endpoint(text: Any) -> str:
    """A type of argparse: host:port or [IPv6]:port. Checks the range of the port: gRPC wraps 70000 to 4464."""
    host, colon, number = str(text).rpartition(":")
    if not (host and colon and number.isdecimal() and int(number) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be host:port or [IPv6]:port, but is {text}")
    return str(text)


def etcd_address(text: Any) -> str:
    """A type of argparse: host:port[,host:port...] of etcd://host:port[,host:port...]."""
    if not str(text).startswith("etcd://"):
        raise argparse.ArgumentTypeError(f"must be etcd://host:port, but is {text}")
    return str(text).removeprefix("etcd://")


def port(text: Any) -> int:
    """A type of argparse: 0 (any) to 65535."""
    if not (str(text).isdecimal() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, but is {text}")
    return int(text)
