"""Options of train.py from a YAML file: expand() puts those of --config FILE in front of the command line's."""

import difflib
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path


class SettingsFileError(Exception):
    """A file of options cannot be used; the message names the file, its line and the option."""


def expand(parser: ArgumentParser, arguments: list[str]) -> list[str]:
    """The arguments with those of --config's file before them: the command line wins.

    Keys are options without the two hyphens, with - or _ between words; a switch is true or false.
    Raises SettingsFileError for a file that is no mapping, an unknown key, and a value that the option does not take.
    """
    finder = ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(arguments)[0].config
    if path is None:
        return arguments
    read: dict[str, list[str]] = {}
    for line, key, value in _read(path):
        try:
            option, some = _as_arguments(parser, key, value)
            if option in read:
                raise ValueError(f"{key} is given twice")
        except ValueError as error:
            raise SettingsFileError(f"{path}:{line}: {error}") from None
        read[option] = some
    return [*(part for some in read.values() for part in some), *arguments]


def _read(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """(line, key, value) of each entry; values are text, None for what is no text."""
    try:
        import yaml
    except ImportError as error:
        raise SettingsFileError(f"--config: {error}; pip install pyyaml") from error
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.BaseLoader)
    except FileNotFoundError:
        raise SettingsFileError(f"{path} does not exist") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsFileError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode):
        raise SettingsFileError(f"{path} must hold `option: value` lines")
    for key, value in root.value:
        text = value.value if isinstance(value, yaml.ScalarNode) else None
        yield key.start_mark.line + 1, str(key.value), text


def _as_arguments(parser: ArgumentParser, key: str, value: str | None) -> tuple[str, list[str]]:
    """(the option, the arguments that an entry stands for); ValueError if it takes no such value."""
    actions = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    name = key.replace("-", "_")
    if name not in actions:
        near = difflib.get_close_matches(name, actions, 1)
        raise ValueError(
            f"unknown option {key}" + (f"; do you mean {near[0].replace('_', '-')}?" if near else "")
        )
    action = actions[name]
    flag = action.option_strings[0]
    if value is None:
        raise ValueError(f"{key} takes one value, no list or mapping")
    if action.nargs == 0:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{key} is true or false, but got {value!r}")
        return name, [flag] if value.lower() == "true" else []
    try:
        converted = parser._get_value(action, value)
        parser._check_value(action, converted)
    except Exception as error:  # argparse.ArgumentError
        raise ValueError(getattr(error, "message", str(error)) + f" for {key}") from None
    return name, [f"{flag}={value}"]
