"""Wrong build environments stop with one sentence that says what to do; the report for bugs is complete."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import fmoe_ext
from fmoe_ext import info
from fmoe_ext.layers import keywords_of
from fmoe_ext.models.fmoefy import MoEOptions
from fmoe_ext.transformer import MLPOptions
from tests.forked import run_python

ROOT = Path(__file__).parent.parent


def run_setup(**env):
    """setup.py --version: runs every check of the environment and builds nothing."""
    asked = ("FMOE_CUDA", "USE_NCCL", "CUDA_HOME", "NCCL_HOME", "CXX")
    clean = {name: value for name, value in os.environ.items() if name not in asked}
    program = "import runpy, sys; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py', None, '__main__')"
    if "PYTHONPATH" in env:  # in the place of torch
        command = [sys.executable, "setup.py", "--version"]
        result = subprocess.run(command, cwd=ROOT, env={**clean, **env}, capture_output=True, text=True)
    else:
        result = run_python(program, cwd=ROOT, env={**clean, **env})
    return result.returncode, result.stdout + result.stderr


def module_that(tmp_path, source):
    """A folder that, on PYTHONPATH, replaces torch by a module with this source."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    (tmp_path / "torch" / "utils").mkdir()
    (tmp_path / "torch" / "utils" / "__init__.py").write_text(
        "from types import SimpleNamespace as cpp_extension\n"
    )
    return str(tmp_path)


def test_right_environment():
    code, text = run_setup(FMOE_CUDA="0")
    assert code == 0, text
    assert "building fmoe_ext._C for torch" in text
    assert fmoe_ext.__version__ in text.splitlines()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("raise ImportError('gone')", "PyTorch is needed to build: run `pip install torch` first"),
        ("__version__ = '2.10.1'", "torch 2.10.1 is too old: version 2.11 or newer is needed"),
    ],
)
def test_torch_missing_or_too_old(tmp_path, source, sentence):
    code, text = run_setup(PYTHONPATH=module_that(tmp_path, source))
    assert code == 1
    assert sentence in text
    assert "Traceback" not in text


def test_compiler_without_cxx20(tmp_path):
    compiler = tmp_path / "old-c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    code, text = run_setup(CXX=str(compiler))
    assert code == 1
    assert "does not know C++20: install gcc >= 11" in text


def test_compiler_missing():
    code, text = run_setup(CXX="no-such-compiler")
    assert code == 1
    assert "'no-such-compiler' was not found, install gcc >= 11" in text


def run_in_setup(preparation, *arguments, **env):
    """setup.py with these arguments after some lines of Python that prepare what it finds."""
    script = f"import runpy, sys; sys.argv = ['setup.py', *{arguments!r}]\n{preparation}\nrunpy.run_path('setup.py')"
    result = run_python(script, cwd=ROOT, env={**os.environ, "FMOE_CUDA": "0", **env})
    return result.returncode, result.stdout + result.stderr


def test_python_too_old():
    """Said before anything about torch, which there is none of for that Python."""
    code, text = run_in_setup("sys.version_info = (3, 9, 20); sys.modules['torch'] = None", "--version")
    assert code == 1
    assert "is too old: version 3.10 or newer is needed" in text and "torch" not in text


@pytest.mark.parametrize(
    ("platform", "code", "sentence"),
    [("win32", 1, "install and build in WSL 2"), ("darwin", 1, "macOS was not tried"), ("linux", 1, "")],
)
def test_other_systems_than_linux_are_told_what_works(platform, code, sentence):
    preparation = (
        f"import setuptools.command.build_py; sys.platform = {platform!r}; sys.modules['torch'] = None"
    )
    ended, text = run_in_setup(preparation, "--version")
    assert ended == code and sentence in text
    assert ("PyTorch is needed" in text) == (platform != "win32")


@pytest.mark.parametrize(
    ("given", "built"),
    [
        ("", "8.0+PTX;9.0a"),
        ("9.0", "9.0;9.0a"),
        ("8.0;9.0+PTX", "8.0;9.0+PTX;9.0a"),
        ("Hopper", "Hopper;9.0a"),
        ("8.0 9.0 12.0+PTX", "8.0;9.0;12.0+PTX;9.0a"),
        ("9.0a", "9.0a"),
        ("8.0 9.0a 9.0", "8.0;9.0a;9.0"),
        ("8.0;12.0", "8.0;12.0"),
    ],
)
def test_hopper_kernels_are_built_wherever_9_0_is(tmp_path, given, built):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    say = "import atexit, os; atexit.register(lambda: print('archs', os.environ['TORCH_CUDA_ARCH_LIST']))"
    env = {"FMOE_CUDA": "1", "CUDA_HOME": str(tmp_path), "TORCH_CUDA_ARCH_LIST": given}
    code, text = run_in_setup(say, "--version", **env)
    assert code == 0 and f"archs {built}" in text.splitlines(), text


@pytest.mark.parametrize("value", ["", "  "])
def test_empty_compiler_means_unset(value):
    code, text = run_setup(CXX=value, FMOE_CUDA="0")
    assert code == 0, text


@pytest.fixture
def toolkit(tmp_path):
    """A folder that looks like a CUDA toolkit, for CUDA_HOME."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    return str(tmp_path / "toolkit")


@pytest.mark.parametrize(
    "cuda_of_torch, setting, modules, reason",
    [
        (None, "", "_C", "has no CUDA; FMOE_CUDA=1 builds them anyway"),
        (None, "1", "_C, fmoe_ext._C_cuda", "3 minutes"),
        ("13.0", "", "_C, fmoe_ext._C_cuda", "3 minutes"),
        ("13.0", "0", "_C", "without CUDA kernels (FMOE_CUDA=0)"),
    ],
)
def test_cuda_is_built_for_a_torch_that_has_cuda_or_on_request(
    toolkit, cuda_of_torch, setting, modules, reason
):
    code, text = run_in_setup(
        f"import torch; torch.version.cuda = {cuda_of_torch!r}",
        "--version",
        FMOE_CUDA=setting,
        CUDA_HOME=toolkit,
    )
    assert code == 0, text
    assert f"building fmoe_ext.{modules} for torch" in text and reason in text


def test_cuda_torch_without_nvcc_builds_the_cpu_kernels_and_says_so(tmp_path):
    code, text = run_in_setup(
        "import torch; torch.version.cuda = '13.0'; import shutil; which = shutil.which;"
        "shutil.which = lambda name, **kw: None if name == 'nvcc' else which(name, **kw)",
        "--version",
        FMOE_CUDA="",
    )
    assert code == 0, text
    assert "building fmoe_ext._C for torch" in text and "without CUDA kernels (nvcc was not found" in text


@pytest.fixture
def checkout(tmp_path):
    """A checkout without native modules."""
    no_modules = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "fmoe_ext", tmp_path / "checkout" / "fmoe_ext", ignore=no_modules)
    return tmp_path / "checkout"


def import_in(folder, **env):
    """The last line of an import of fmoe_ext by a Python started in a folder."""
    program = (  # without the package under test, which is installed by a path or by a finder
        "import os, sys; sys.path = [p for p in sys.path if not p or os.path.realpath(p) != sys.argv[1]];"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')];"
        "import fmoe_ext"
    )
    command = [sys.executable, "-c", program, str(ROOT.resolve())]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_checkout_without_native_module_says_how_to_build_it(checkout):
    error = import_in(checkout, PYTHONPATH="")
    assert "checkout without its native module fmoe_ext._C: run `pip install -e . --no-build-iso" in error
    assert f"in {checkout}" in error


def test_checkout_that_hides_an_installed_package_names_both(checkout, tmp_path):
    installed = tmp_path / "site" / "fmoe_ext"
    installed.mkdir(parents=True)
    (installed / "_C.abi3.so").touch()
    error = import_in(checkout, PYTHONPATH=str(installed.parent))
    assert f"{checkout}/fmoe_ext is a checkout without its native module, and Python found it before" in error
    assert f"installed in {installed}: start Python in another folder than {checkout}, or build" in error


def test_native_module_that_cannot_be_loaded_is_to_be_built_again(checkout):
    (checkout / "fmoe_ext" / "_C.abi3.so").touch()
    error = import_in(checkout, PYTHONPATH="")
    assert f"the native module in {checkout}/fmoe_ext could not be loaded" in error
    assert "build fmoe_ext again for the torch that is installed" in error


def test_earlier_builds_leave_nothing(tmp_path):
    """Neither a module that was deleted since, nor a native module that this build leaves out."""
    package = tmp_path / "fmoe_ext"
    package.mkdir()
    for name in ("deleted.py", "_C.abi3.so", "_C_cuda.abi3.so", "_C_nccl.so"):
        (package / name).touch()
    code, text = run_in_setup("", "build_py", "--build-lib", str(tmp_path))
    assert code == 0, text
    assert (package / "layers.py").exists() and not (package / "deleted.py").exists()
    nothing = "from torch.utils import cpp_extension; cpp_extension.BuildExtension.run = lambda self: None"
    code, text = run_in_setup(nothing, "build_ext", "--build-lib", str(tmp_path))
    assert code == 0, text
    assert [path.name for path in package.glob("_C*")] == ["_C.abi3.so"]


def test_cuda_demanded_without_nvcc(tmp_path):
    for tool in ("c++", "g++", "sh", "ninja"):
        found = subprocess.run(["which", tool], capture_output=True, text=True).stdout.strip()
        if found:
            (tmp_path / tool).symlink_to(found)
    if Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("the CUDA toolkit lies at its default place, so nvcc cannot be hidden")
    code, text = run_setup(FMOE_CUDA="1", PATH=str(tmp_path))
    assert code == 1
    assert "FMOE_CUDA=1 but nvcc was not found: install the CUDA toolkit, or set CUDA_HOME" in text


def test_nccl_demanded_without_headers():
    if any((Path(p) / "include" / "nccl.h").exists() for p in ("/usr", "/usr/local")):
        pytest.skip("a system NCCL is installed, so its headers cannot be hidden")
    if any((Path(p) / "nvidia" / "nccl" / "include" / "nccl.h").exists() for p in sys.path):
        pytest.skip("pip's NCCL is installed in this environment, so its headers cannot be hidden")
    code, text = run_setup(USE_NCCL="1", FMOE_CUDA="0")
    assert code == 1
    assert "nccl.h was not found: run `pip install nvidia-nccl-cu13`" in text


def test_flag_that_is_neither_on_nor_off():
    code, text = run_setup(FMOE_CUDA="maybe")
    assert code == 1
    assert "FMOE_CUDA='maybe' is not understood: set it to 1 or 0" in text


def test_info_names_versions_modules_and_variables():
    text = info.report()
    assert torch.__version__ in text
    for module in ("fmoe_ext._C ", "fmoe_ext._C_cuda", "fmoe_ext._C_nccl"):
        assert module in text
    for variable in info._env.VARIABLES:
        assert f"{variable.name}={os.environ.get(variable.name, '')}" in text
    assert "built with torch" in text


def test_environment_variables_are_checked(monkeypatch):
    monkeypatch.setenv("FMOE_DEBUG", "on")
    assert info._env.get("FMOE_DEBUG") is True
    monkeypatch.setenv("FMOE_DEBUG", "perhaps")
    with pytest.raises(ValueError, match="FMOE_DEBUG must be 1 or 0, but is 'perhaps'"):
        info._env.get("FMOE_DEBUG")
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(ValueError, match="MAX_JOBS must be of type int"):
        info._env.get("MAX_JOBS")


def test_version_is_written_once():
    """In fmoe_ext/__init__.py, from where pyproject.toml takes it; what others read is the same."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version", ' in project and 'version = { attr = "fmoe_ext.__version__" }' in project
    assert f'"{fmoe_ext.__version__}"' not in project + (ROOT / "setup.py").read_text()
    code, text = run_in_setup("", "--version")
    assert code == 0 and text.splitlines()[-1] == fmoe_ext.__version__, text
    assert f"\nversion: {fmoe_ext.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "CHANGELOG.md").read_text().startswith(f"# Changelog\n\n## {fmoe_ext.__version__}, ")


def test_container_runs_the_commands_of_the_readme():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    commands = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1].splitlines()
    assert commands[0].startswith("pip install torch ") and len(commands) == 3
    assert [line for line in lines if line.startswith("RUN ") and line.endswith(commands[0])]
    assert f"RUN {commands[1]}" in lines and f"CMD {json.dumps(commands[2].split())}" in lines


def test_metadata_agrees_with_the_citation():
    project = (ROOT / "pyproject.toml").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    authors = ", ".join(f'{{ name = "{author["name"]}" }}' for author in citation["authors"])
    assert f"authors = [{authors}]" in project
    assert f"keywords = {json.dumps(citation['keywords'])}" in project
    assert f'license = "{citation["license"]}"' in project
    description = re.search(r'^description = "(.*)"$', project, re.MULTILINE)[1]
    assert (
        citation["title"].removeprefix("fmoe_ext: ").replace(", the same", ", with the same") == description
    )
    assert ("repository-code" in citation) == ("Repository = " in project)
    assert citation["version"] == fmoe_ext.__version__


def test_long_description_has_no_relative_pictures_or_links():
    code, text = run_in_setup("", "--long-description")
    assert code == 0 and "# fmoe_ext\n\nMixture-of-Experts layers" in text, text
    assert re.findall(r"\]\((?!https:)[^)]*\)", text) == [] and "![" not in text
    assert "Fine-tune a model larger than your memory" in text and "https://arxiv.org/abs/2103.13262" in text


def test_modules_need_no_import_of_their_own():
    program = (
        "import sys, fmoe_ext; functions = {'DistributedGroupedDataParallel', 'RoutingReplay', 'export', 'fmoefy',"
        "'import_model', 'stream'};"
        "rooms = sorted(set(dir(fmoe_ext)) - set(vars(fmoe_ext)) - functions);"
        "slow = {'grpc', 'sympy', 'torch._dynamo', 'torch.distributed.fsdp', 'torch.distributed.tensor'};"
        "slow &= set(sys.modules); assert not slow, slow; print(*rooms); fmoe_ext.cpu.can_keep_memory();"
        "fmoe_ext.pipeline.Pipeline;"
        "assert all(getattr(fmoe_ext, room).__name__ == 'fmoe_ext.' + room for room in rooms)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    expected = (
        "audit balance checkpoint compat compress cpu distributed doctor finetune formats frozen gpu huggingface lora "
        "megatron optim pipeline planning remote testing"
    )
    assert out.stdout.split() == expected.split()


def test_errors_name_no_folder_of_the_builder():
    (module,) = ROOT.glob("fmoe_ext/_C.*so")  # the line tables of _C_cuda name its sources, for profilers
    assert bytes(ROOT) not in module.read_bytes(), "built without -ffile-prefix-map"


USERS_FILE = """\
import fmoe_ext
from fmoe_ext import FMoETransformerMLP, fmoefy, gates
mlp = FMoETransformerMLP(num_experts=8, d_model=4, d_hidden=8)
reveal_type(mlp)
reveal_type(mlp.num_experts)
FMoETransformerMLP(n_experts=8)
gates.SoftmaxGate(4, 8, "1")
fmoe_ext.nothere
fmoefy(mlp, num_experts=8, nonsense=3)
reveal_type(fmoefy(mlp, num_experts=8, parallel=None))
reveal_type(fmoe_ext.lora.fuse(mlp))
"""
WITHOUT_EXTENSIONS = """
import setuptools
setup = setuptools.setup
setuptools.setup = lambda **options: setup(**{**options, "ext_modules": []})
"""


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_type_checkers_see_the_installed_package(tmp_path, kind):
    """mypy of a program in an environment with the package alone: torch's own types are not what this is about."""
    steps = {
        "editable": ("editable_wheel", "--dist-dir", str(tmp_path)),
        "wheel": (
            "build",
            "--build-base",
            str(tmp_path / "build"),
            "bdist_wheel",
            "--dist-dir",
            str(tmp_path),
        ),
    }[kind]
    code, text = run_in_setup(WITHOUT_EXTENSIONS, "-q", "egg_info", "--egg-base", str(tmp_path), *steps)
    assert code == 0, text
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    (built,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(built, packages, "zip")
    (tmp_path / "user.py").write_text(USERS_FILE)
    command = [
        sys.executable, "-m", "mypy", "--python-executable", tmp_path / "env" / "bin" / "python",
        "--ignore-missing-imports", "--cache-dir", tmp_path / "cache", "user.py",
    ]  # fmt: skip
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    revealed = dict(re.findall(r'user.py:(\d+): note: Revealed type is "([\w.]+)"', said))
    layer = "fmoe_ext.transformer.FMoETransformerMLP"
    assert revealed == {"4": layer, "5": "int", "10": layer, "11": layer}, said
    errors = dict(re.findall(r"user.py:(\d+): error: (.*?)  ", said))
    assert errors.keys() == {"6", "7", "8", "9"}, said
    assert 'Unexpected keyword argument "n_experts"' in errors["6"]
    assert 'Argument 3 to "SoftmaxGate" has incompatible type "str"' in errors["7"]
    assert 'Module has no attribute "nothere"' in errors["8"]
    assert 'Unexpected keyword argument "nonsense" for "fmoefy"' in errors["9"]


def test_type_checkers_know_what_is_imported_on_demand():
    """Else a checker takes fmoe_ext.NAME for a misspelling."""
    tree = ast.parse(Path(fmoe_ext.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != "types"]
    names = {name.asname or name.name for node in imports for name in node.names}
    assert names - {"TYPE_CHECKING", "Any"} == {*dir(fmoe_ext)} - {"__version__"}


def test_fmoefys_keywords_are_those_of_the_layer():
    others = {*inspect.signature(fmoe_ext.fmoefy).parameters, "num_expert", "d_hidden", "expert"}
    assert MoEOptions.__annotations__.keys() | MLPOptions.__annotations__.keys() == (
        set(keywords_of(fmoe_ext.FMoETransformerMLP)) - others
    )


def test_make_train_installs_what_training_needs_and_make_test_the_rest(tmp_path):
    def commands(target):
        done = subprocess.run(
            ["make", "-n", target, f"VENV={tmp_path}/env"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return re.findall(r"pip install .*-r (\S+)", done.stdout)

    assert commands("train") == ["requirements.txt"]
    assert commands("test") == ["requirements.txt", "requirements-test.txt"]
