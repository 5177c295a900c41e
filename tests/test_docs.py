"""The documentation: its code runs as it stands, its links lead somewhere, and every public name has a docstring."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))
API = {path: path.read_text() for path in ROOT.glob("docs/api/*.md")}
DOCUMENTED = {
    module: path for path, text in API.items() for module in re.findall(r"automodule:: (fmoe_ext\S*)", text)
}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path):
    """(language, code, line number) of every fenced block of a page."""
    text = path.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2], text[: match.start()].count("\n") + 2


def run_python(code, path, line, names):
    exec(compile("\n" * (line - 1) + code, str(path), "exec"), names)  # so that a traceback names the line


def run_shell(code, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "TMPDIR": str(folder)}  # torchrun leaves its logs there
    done = subprocess.run(
        ["bash", "-euc", code], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def clean_state(tmp_path, monkeypatch):
    """A folder of its own, as a program started there has, and PyTorch's global state put back afterwards."""
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()
    yield tmp_path
    torch.set_rng_state(state)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("path", TUTORIALS, ids=name_of)
def test_tutorial_runs(path, clean_state):
    """Python blocks share one program; one that begins with "# name.py" is that file, which sh blocks start."""
    names = {"__name__": "__main__"}
    for language, code, line in blocks(path):
        file = re.match(r"# (\w+\.py)\n", code)
        if language == "python" and file:
            clean_state.joinpath(file[1]).write_text(code)
        elif language == "python":
            run_python(code, path, line, names)
        elif language == "sh":
            run_shell(code, clean_state)


def test_first_example():
    """README and the site begin with the same program, and it runs."""
    first = [
        next(code for language, code, _ in blocks(ROOT / page) if language == "python")
        for page in ("README.md", "docs/index.md")
    ]
    assert first[0] == first[1]
    names = {}
    run_python(first[0], "README.md", 1, names)
    assert names["y"].shape == names["x"].shape and names["x"].grad.abs().sum() > 0


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert path.parent.joinpath(target).exists(), f"{name_of(path)} links to {target}"
    for target in re.findall(r"`((?:docs|examples|benchmarks|tests|fmoe_ext|csrc|cuda)/[\w/.]+\.\w+)`", text):
        if path.parent.name != "history":  # names what there was
            assert ROOT.joinpath(target).exists(), f"{name_of(path)} names {target}"


@pytest.mark.parametrize("path", [page for page in PAGES if page.parent.name != "history"], ids=name_of)
def test_commands_exist(path):
    """Targets of make, modules that are run, and example programs; docs/history names what there was."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    code = "\n".join([*re.findall(r"`([^`]+)`", prose), *(block for _, block, _ in blocks(path))])
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z0-9-]+)", code, re.MULTILINE):
        assert f"\n{target}:" in makefile, f"{name_of(path)} says make {target}"
    for module in re.findall(r"python -m ((?:fmoe_ext|benchmarks)[\w.]*)", code):
        assert importlib.util.find_spec(module), f"{name_of(path)} says python -m {module}"
    for program in re.findall(r"(?:^|\s)(examples/[\w/]+\.py)", code):
        assert ROOT.joinpath(program).exists(), f"{name_of(path)} runs {program}"


def test_every_page_is_in_the_contents():
    """Sphinx says the same, but only make docs runs it: here it is found by whoever adds a page."""
    index = (ROOT / "docs/index.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        if page.name != "index.md":
            assert f"\n{page.stem}\n" in index, f"add {page.stem} to a toctree in docs/index.md"


def public_names(module):
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return names


def methods(cls):
    """Names of the public methods and properties that a class defines itself."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        own = inspect.isfunction(function) and function.__qualname__ == f"{cls.__qualname__}.{name}"
        if own and not name.startswith("_"):  # not the default of a dataclass's field
            yield name


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_public_names_have_docstrings(name):
    """Names, and methods unless a base class has said it."""
    module = importlib.import_module(name)
    assert module.__doc__, name
    for public in public_names(module):
        value = getattr(module, public)
        if inspect.isclass(value):
            assert vars(value).get("__doc__"), f"{name}.{public} has no docstring"
            missing = [method for method in methods(value) if not inspect.getdoc(getattr(value, method))]
            assert not missing, f"{name}.{public}: no docstring on {', '.join(missing)}"
        elif inspect.isfunction(value):
            assert value.__doc__, f"{name}.{public} has no docstring"


OPERATORS = (
    "apply_capacity",
    "count_tokens",
    "expert_mlp",
    "grouped_gemm",
    "permute",
    "sort_tokens",
    "topk_gate",
    "unpermute",
)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_say_what_they_are_in_pytorch(name):
    doc = getattr(importlib.import_module("fmoe_ext.ops"), name).__doc__
    assert "Equivalent to: " in doc and "Raises" in doc and "[" in doc, f"{name}: shapes, errors, equivalent"


def test_listed_classes_and_functions_have_docstrings():
    for path, text in API.items():
        for module, name in re.findall(r"auto(?:class|function):: ([\w.]+)\.(\w+)", text):
            assert getattr(importlib.import_module(module), name).__doc__, f"{name_of(path)}: {name}"


def test_every_public_module_is_in_the_api():
    """fmoe_ext's own names are on the pages of the modules they come from."""
    listed = "\n".join(API.values())
    for module in (
        "ops",
        "gates",
        "distributed",
        "checkpoint",
        "balance",
        "megatron",
        "pipeline",
        "remote",
        "audit",
        "optim",
        "cpu",
        "testing",
        "routing",
        "dispatch",
        "compat",
    ):
        assert f"fmoe_ext.{module}" in DOCUMENTED, f"docs/api has no automodule:: fmoe_ext.{module}"
    for name in importlib.import_module("fmoe_ext").__all__:
        module = importlib.import_module("fmoe_ext")
        value = getattr(module, name)
        home = any(name in public_names(importlib.import_module(known)) for known in DOCUMENTED)
        assert inspect.ismodule(value) or home or f"fmoe_ext.{name}" in listed, (
            f"docs/api does not show {name}"
        )
