"""The command `fmoe`, its subcommands, their exit statuses and their errors."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fmoe_ext
import fmoe_ext_command
from fmoe_ext import info
from fmoe_ext.audit.cases import AuditError, Layout, parse_layout
from fmoe_ext.audit.cli import main as audit
from fmoe_ext.gpu.cli import main as gpu
from fmoe_ext.planning.simulate import read_loads
from tests.forked import run_python

ROOT = Path(__file__).resolve().parent.parent
# fmoe_ext/_cli.py by itself: a process that need not import torch
PROGRAM = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("cli", {str(ROOT / "fmoe_ext" / "_cli.py")!r})
cli = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cli)
"""
INTERRUPTED = "def main(): raise KeyboardInterrupt"


@pytest.mark.parametrize(
    "body, status, message",
    [
        ("def main(): print('read by nobody')", 128 + signal.SIGPIPE, b""),
        ("def main(): print('help'); sys.exit(0)", 128 + signal.SIGPIPE, b""),
        (INTERRUPTED, 128 + signal.SIGINT, b"interrupted\n"),
        ("def main(): return 2", 2, b""),
        ("def main(): sys.exit('error: why')", 2, b"error: why\n"),
    ],
)
def test_ends_without_a_traceback(body, status, message):
    command = [sys.executable, "-c", f"{PROGRAM}\n{body}\ncli.run(main)"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    program.stdout.close()
    with program.stderr:
        assert program.stderr.read() == message
    assert program.wait() == status


@pytest.mark.parametrize(
    "main, arguments, message",
    [
        (audit, ["m:f", "--steps", "0"], "argument --steps: 0 is not a positive number"),
        (audit, ["m:f", "--timeout", "-1"], "argument --timeout: -1 is not a positive number"),
        (gpu, ["prove", "--limit", "nan"], "argument --limit: nan is not a positive number"),
        (gpu, ["prove", "--budget", "-1"], "argument --budget: -1 is not a positive number"),
    ],
)
def test_numbers_that_cannot_be(main, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_layout_without_number_is_refused():
    """ "x" was one process."""
    for layout in ("x", "dp2x", "xep2"):
        with pytest.raises(AuditError, match=f"dp2xep2 or the like, but got '{layout}'"):
            parse_layout(layout)
    assert parse_layout("dp2xep3") == Layout(2, 3) and parse_layout("ep3") == Layout(1, 3)


def test_info_of_two_things_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        info.main(["model", "unknown"])
    assert "unrecognized arguments: unknown" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        info.main(["model", "--cmake"])
    assert "--cmake is of this installation" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        info.main(["--length", "64"])
    assert "--length is of a model: name one" in capsys.readouterr().err


def command(*arguments, setup="", cwd=ROOT):
    """`fmoe arguments` in a process of its own; after some lines of Python, in a new interpreter."""
    program = f"{setup}\nimport fmoe_ext_command; fmoe_ext_command.main({list(arguments)!r})"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not setup:
        return run_python(program, cwd=cwd, env=env)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def test_help_lists_every_command_without_importing_torch():
    watch = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules))"
    done = command("--help", setup=watch)
    assert done.returncode == 0 and done.stdout.endswith("False\n"), done.stdout + done.stderr
    page = (ROOT / "docs/commands.md").read_text()
    for name, (_, sentence) in fmoe_ext_command.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(sentence)}$", done.stdout, re.MULTILINE), name
        assert f"`fmoe {name}" in page, f"docs/commands.md leaves out {name}"


def test_version_is_that_of_the_package():
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"fmoe_ext {fmoe_ext.__version__}\n"), done.stderr


@pytest.mark.parametrize("name", fmoe_ext_command.COMMANDS)
def test_help_of_a_command_exits_with_0(name, capsys):
    if name in ("serve", "dht"):
        pytest.importorskip("grpc", reason="remote experts need grpcio, which is in requirements-test.txt")
    main = importlib.import_module(fmoe_ext_command.COMMANDS[name][0]).main
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert re.match(rf"usage: (fmoe {name}|fmoe-server|fmoe-dht) ", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((), "required: COMMAND"),
        (("unknown",), "invalid choice: 'unknown'"),
        (("simulate", "--loads", "nofile"), "--loads: nofile does not exist"),
        (("simulate", "--loads", str(ROOT / "README.md")), "README.md has no recorded loads"),
        (("simulate", "--ranks", "0"), "argument --ranks: 0 is not a positive number"),
        (("balance", "report", "nofile"), "error: nofile does not exist"),
        (("checkpoint", "inspect", "nofile"), "error: nofile does not exist"),
        (("adapter", "check", "nofile"), "error: nofile does not exist"),
        (("prune", "nofile", "--keep", "0.5", "--text", "none", "--dry-run"), "error: none does not exist"),
        (
            ("pipeline", "plan", "--ranks", "2", "--model", "nofile.json"),
            "error: --model: nofile.json does not exist",
        ),
        (("audit", "nofile.py:recipe"), "error: nofile.py does not exist"),
        (("serve", "--config", "nofile.yml"), "nofile.yml does not exist"),
        (("gpu", "prove", "--device", "99"), "nothing was proved: "),
    ],
    ids=lambda value: "-".join(value[:1]) if isinstance(value, tuple) else None,
)
def test_command_that_cannot_be_done_exits_with_2(arguments, error, tmp_path):
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and error in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# as in an environment without them; the finders of an editable install call it too
WITHOUT_REMOTE = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_spec(cls, fullname, path=None, target=None):
    missing = fullname.partition(".")[0] in ("grpc", "aetcd", "cryptography", "safetensors", "yaml")
    return None if missing else find(fullname, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.mark.parametrize("arguments", [("serve", "status"), ("dht",)], ids=" ".join)
def test_help_of_a_remote_command_needs_no_package(arguments):
    done = command(*arguments, "--help", setup=WITHOUT_REMOTE)
    assert done.returncode == 0 and done.stdout.startswith("usage: fmoe"), done.stdout + done.stderr


def test_remote_command_without_grpc_names_the_extra():
    done = command("serve", setup=WITHOUT_REMOTE)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: fmoe_ext.remote needs grpcio: pip install grpcio")
    assert "pip install -e '.[remote]'" in done.stderr


@pytest.mark.parametrize(
    "text", ["{}", '{"layers": 3}', '{"layers": {}}', "[]", "[[]]", "[1]", "3", '[["a"]]']
)
def test_loads_of_another_form_are_refused(text, tmp_path):
    loads = tmp_path / "loads.json"
    loads.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(loads))):
        read_loads(loads)


JSON = {
    "info": ({"torch", "Python", "environment"}, ("info",)),
    "simulate": (
        {"ranks", "network", "seconds"},
        ("simulate", "--ranks", "8", "--network", "ib-ndr", "--steps", "2"),
    ),
    "plan": (
        {"layouts", "advice"},
        (
            "pipeline",
            "plan",
            "--ranks",
            "2",
            "--model",
            "d_model=8,num_layers=2,num_heads=2,d_hidden=8,vocabulary=9",
        ),
    ),
}


@pytest.mark.parametrize("name", JSON)
def test_json_has_the_facts_of_the_text(name, capsys):
    keys, (command, *arguments) = JSON[name]
    main = importlib.import_module(fmoe_ext_command.COMMANDS[command][0]).main
    assert not main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert keys <= set(found[0] if isinstance(found, list) else found)
    main(arguments)
    text = capsys.readouterr().out
    if name == "info":
        assert found["CPU kernels"] in text and found["environment"]["FMOE_CPU_ISA"]["value"] in text
    elif name == "simulate":
        assert f"{found[0]['seconds']['overlap'] * 1e3:10.3f}" in text and len(found) == 1
    else:
        best = found["layouts"][0]
        assert f"{best['layout']['schedule']:14}" in text and f"{best['seconds']:9.4f}" in text
        assert found["advice"] in text


def test_json_of_a_checkpoint_names_every_tensor(tmp_path, capsys):
    from fmoe_ext import FMoETransformerMLP, checkpoint
    from fmoe_ext.checkpoint.cli import main

    checkpoint.save(tmp_path, FMoETransformerMLP(2, 4, 6))
    main(["inspect", str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "fmoe_ext" and found["optimizer"] is None
    assert found["tensors"]["experts.htoh4.weight"]["shape"] == [2, 6, 4]
    assert found["layers"][""] == {"num_experts": 2, "d_model": 4, "d_hidden": 6}


def test_public_names_alone_are_listed():
    import fmoe_ext.pipeline

    names = set(dir(fmoe_ext))
    assert names == {*fmoe_ext.__all__, *fmoe_ext._MODULES_ON_DEMAND, "__version__"}
    assert not {"importlib", "Any", "MappingProxyType", "layers", "TYPE_CHECKING"} & names
