"""The commands `fmoe`, `fmoe-server` and `fmoe-dht`.

The entry points of pyproject.toml are main(), serve() and dht(); _run() imports the module of one command and ends the
process with its status. A module beside the package: importing fmoe_ext takes more than a second, and `fmoe --help`
must not wait for it.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from types import MappingProxyType, ModuleType
from typing import Any

# command: (module with main(arguments), one line of help)
COMMANDS = MappingProxyType(
    {
        "adapter": ("fmoe_ext.finetune.adapters.cli", "check, convert and merge LoRA adapters of experts"),
        "audit": ("fmoe_ext.audit.cli", "compare a training in every layout with one process"),
        "balance": ("fmoe_ext.balance.cli", "write an HTML page about which tokens chose which expert"),
        "checkpoint": ("fmoe_ext.checkpoint.cli", "inspect, merge and convert checkpoints"),
        "dht": ("fmoe_ext.remote.dht.main", "run a node of the DHT without experts (also fmoe-dht)"),
        "doctor": ("fmoe_ext.doctor.cli", "check the invariants of a MoE model, ours or not"),
        "export": ("fmoe_ext.formats.cli", "write a float model in packed weights, for llama.cpp or vLLM"),
        "gpu": ("fmoe_ext.gpu.cli", "check and time every CUDA kernel on a GPU"),
        "info": ("fmoe_ext.info", "print versions, native modules and settings for a bug report"),
        "pipeline": ("fmoe_ext.planning.cli", "estimate which parallel layout suits a model"),
        "prune": ("fmoe_ext.compress.cli", "write a model without the experts that a text needs least"),
        "serve": ("fmoe_ext.remote.server.main", "host experts for other machines (also fmoe-server)"),
        "simulate": ("fmoe_ext.planning.simulate", "estimate step times of expert parallelism on many ranks"),
    }
)
STATUS = "Exit status: 0 done; 1 done, and something is wrong; 2 could not be done."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `fmoe COMMAND ...`."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    _run(_parser().parse_args(given[:1]).command, given[1:])


def serve() -> None:
    """Run `fmoe-server ...`."""
    _run("serve", sys.argv[1:])


def dht() -> None:
    """Run `fmoe-dht ...`."""
    _run("dht", sys.argv[1:])


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = (f"  {name:{width}}  {help}" for name, (_, help) in COMMANDS.items())
    result = argparse.ArgumentParser(
        prog="fmoe",
        usage="fmoe COMMAND [arguments]",
        description="\n".join(["Mixture-of-Experts training for PyTorch.\n", "commands:", *lines]),
        epilog=f"`fmoe COMMAND --help` lists the arguments of one. {STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    result.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    result.add_argument("--version", action=_Version, nargs=0, help=argparse.SUPPRESS)
    result.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return result


class _Version(argparse.Action):
    """Read the version only on --version: that searches the installed packages."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"fmoe_ext {importlib.metadata.version('fmoe-ext')}")
        parser.exit()


def _run(command: str, arguments: Sequence[str]) -> None:
    """Import a command's module, run its main(arguments) and exit with its status."""
    if not _HELP.isdisjoint(arguments):
        sys.meta_path.append(_StandIns())
    try:
        module = importlib.import_module(COMMANDS[command][0])
        cli = importlib.import_module("fmoe_ext._cli")
    except ImportError as error:  # torch, the native module or an optional package is missing
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    cli.run(lambda: module.main(arguments))


_HELP = frozenset({"-h", "--help"})
_OPTIONAL = ("cryptography", "grpc")  # packages that a command imports at once


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Fills the places of missing optional packages, so that --help, after which the program ends, needs none."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in _OPTIONAL:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = lambda name: _AnyClass(name, (Exception,), {})


class _AnyClass(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyClass(name, (Exception,), {})
