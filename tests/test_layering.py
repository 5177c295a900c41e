"""The import rules of docs/design.md, checked on the source text."""

import ast
import fnmatch
import functools
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted(ROOT.glob("fmoe_ext/**/*.py"))
NATIVE = sorted(
    path
    for folder in ("csrc", "cuda")
    for path in (ROOT / folder).rglob("*.*")
    if "__pycache__" not in path.parts
)

# The core: a module imports only modules of its own level or below, and no room.
CORE = {
    "_C": 0,
    "_C_cuda": 0,
    "_C_nccl": 0,
    "_env": 0,
    "_fastmoe_names": 0,
    "_cli": 0,
    "memory": 0,
    "_require": 0,
    "_sharded": 0,
    "adapters": 0,
    "optimizer_steps": 0,
    "tokens": 0,
    "ops": 1,
    "recompute": 1,
    "routing": 2,
    "linear": 2,
    "step": 2,
    "ep": 3,
    "experts": 3,
    "gates": 4,
    "dispatch": 4,
    "expert_kinds": 4,
    "spread": 4,
    "layers": 5,
    "transformer": 6,
    "distributed": 7,
    "optim": 7,
    "models": 8,
}
# Rooms, opened on demand: each imports the core and these other rooms.
ROOMS = {
    "audit": ("checkpoint", "testing"),
    "balance": (),
    "checkpoint": ("frozen", "planning"),
    "compat": ("pipeline",),  # FairScale's Pipe cuts and measures as split() does
    "compress": ("balance", "checkpoint", "finetune"),
    "cpu": (),
    "doctor": ("audit", "checkpoint"),
    "finetune": ("checkpoint", "frozen", "huggingface"),
    "formats": ("checkpoint", "huggingface"),
    "frozen": (),
    "gpu": ("frozen", "testing"),
    "huggingface": ("balance", "checkpoint", "frozen"),
    "info": ("gpu",),
    "lora": ("finetune",),
    "megatron": (),
    "pipeline": ("checkpoint",),  # a config.json that may be hostile has one reader
    "planning": (),
    "remote": (),
    "testing": (),
    "torchtitan": (),
    "": (
        "audit",
        "balance",
        "checkpoint",
        "finetune",
        "formats",
        "frozen",
    ),  # types of what is imported on demand
}
# The rest may use torch.distributed.
WITHOUT_DISTRIBUTED = """
    _cli _env _fastmoe_names _require _sharded adapters balance cpu dispatch expert_kinds experts frozen info layers
    linear lora memory ops optimizer_steps planning recompute remote routing spread step tokens transformer
""".split()  # noqa: SIM905 - a list of 26 names is 26 lines
MAY_IMPORT_NATIVE = {"_C": "ops/__init__.py", "_C_cuda": "ops/__init__.py", "_C_nccl": "ep/exchange.py"}
IMMUTABLE = (
    ast.Compare,
    ast.Constant,
    ast.Tuple,
    ast.Name,
    ast.Attribute,
    ast.JoinedStr,
    ast.BinOp,
    ast.UnaryOp,
    ast.Lambda,
)


def relative(path):
    return path.relative_to(ROOT / "fmoe_ext").as_posix()


def part(path):
    """First component of a module's name inside fmoe_ext; "" for fmoe_ext/__init__.py."""
    first = Path(relative(path)).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


text_of = functools.cache(Path.read_text)


@functools.cache
def tree_of(path):
    return ast.parse(text_of(path))


class _DropTypes(ast.NodeTransformer):
    """Leaves out what is imported for annotations alone, `if TYPE_CHECKING:`."""

    def visit_If(self, node):
        self.generic_visit(node)
        return node.orelse if dotted(node.test).endswith("TYPE_CHECKING") else node


@functools.cache
def imports(path):
    """Every module that a file imports when it runs, `from a import b` as both a and a.b."""
    return tuple(_imports(path, _DropTypes().visit(ast.parse(text_of(path)))))


@functools.cache
def imports_with_types(path):
    """With those for annotations alone."""
    return tuple(_imports(path, tree_of(path)))


def _imports(path, tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: write imports in full, not relative"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner_imports(path):
    """Parts of fmoe_ext that a file imports."""
    for name in imports(path):
        components = name.split(".")
        if components[0] == "fmoe_ext" and len(components) > 1:
            yield components[1] if components[1] in CORE or components[1] in ROOMS else ""


def dotted(node):
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def uses(path, name):
    nodes = ast.walk(tree_of(path))
    return any(isinstance(node, ast.Attribute) and dotted(node) == name for node in nodes)


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text_of(path), re.MULTILINE)


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_python_module(path):
    own = part(path)
    assert own in CORE or own in ROOMS, f"{own} is no part: add it to CORE or ROOMS and to docs/design.md"
    for target in inner_imports(path):
        if own in CORE:
            assert target in CORE, f"the core's {own} imports the room {target or 'fmoe_ext'}"
            assert CORE[target] <= CORE[own], f"{own} imports {target}, which lies above it"
        else:
            assert target in ("", own) or target in CORE or target in ROOMS[own], (
                f"{own} imports the room {target}"
            )
        if target in MAY_IMPORT_NATIVE:
            assert relative(path) == MAY_IMPORT_NATIVE[target], (
                f"only {MAY_IMPORT_NATIVE[target]} loads {target}"
            )
    names = set(imports(path))
    if own in WITHOUT_DISTRIBUTED:
        assert not any(name.startswith("torch.distributed") for name in names), "imports torch.distributed"
        assert not uses(path, "torch.distributed"), "uses torch.distributed"
    if own not in ("ops", "frozen", "gpu"):
        assert not uses(path, "torch.ops.fmoe_ext"), (
            "torch.ops.fmoe_ext is spelled only in ops, frozen and gpu"
        )
    if own != "_env":
        assert not uses(path, "os.environ") and not uses(path, "os.getenv"), (
            "reads the environment: use _env.get"
        )


def module_name(path):
    return ".".join(["fmoe_ext", *Path(relative(path)).with_suffix("").parts]).removesuffix(".__init__")


def test_no_import_circle():
    """Between files, annotations counted; files may import the __init__ of the package that they are in."""
    files = {module_name(path): path for path in PACKAGE}
    graph = {
        name: {t for t in imports_with_types(path) if t in files and t != name}
        for name, path in files.items()
    }
    graph = {name: {t for t in targets if not name.startswith(f"{t}.")} for name, targets in graph.items()}
    done, trail = set(), []

    def visit(name):
        assert name not in trail, f"an import circle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            trail.append(name)
            for target in sorted(graph[name]):
                visit(target)
            done.add(trail.pop())

    for name in sorted(graph):
        visit(name)


# The state that modules have, by name; what other modules call at their top makes something immutable.
MODULE_STATE = {
    "ep/exchange.py": {"_nccl"},  # per process group, weak
    # per process group, weak
    "ep/process_groups.py": {"_agreed", "_groups", "_layers", "_timeouts", "_timeouts_in_use"},
    "distributed/groups.py": {"_of_reductions"},  # per process group, weak
    "remote/expert_classes.py": {"_REGISTRY"},  # the kinds of experts that a server may be asked for
    "remote/loop.py": {"_LOOPS"},  # of a process and its forked children
    "ep/placement.py": {"_of_nodes"},  # per process group, weak
    "ep/wrappers.py": {"WATCH"},  # the handle of a hook on all modules, there to be removed
    "gates/losses.py": {"ONE_RANK"},
    "huggingface/training.py": {"_added_to"},  # the loss that is added to a gate's model, weak
    "optimizer_steps.py": {"FOLLOWERS", "HOOKS"},  # weak, and the handles of two hooks
    "ops/chooser.py": {"_CHOOSERS"},  # gpu registers itself
    "tokens.py": {"_open"},  # the innermost open block, which torch.compile can read, unlike a ContextVar
    "ops/_autograd.py": {
        "NODE",
        "_libraries",
        "_functional",
    },  # of a thread; registrations, while they live
    "ops/batch_invariant.py": {
        "_switch",
        "_thread",
    },  # of the process and of a thread, as the native kernels have it
    "experts.py": {"_gated"},  # layers of gated experts, which an optimizer asks, weak
    "linear.py": {"_noted_casts"},  # pairs of dtypes of which a warning was given
    "gpu/kernels.py": {"SELECTION", "SM_MARGIN"},  # the kernels chosen for each device; who asks for SMs
    "ops/__init__.py": {"cuda_module_missing"},  # why there are no CUDA kernels, set once by loading
}
MAKES_IMMUTABLE = (
    "frozenset", "tuple", "MappingProxyType", "re.compile", "logging.getLogger", "namedtuple", "TypeVar",
    "ParamSpec", "struct.Struct", "torch.library.Library", "functools.partial",
    "Limits",  # a frozen dataclass of remote/wire.py
    "Family", "Layout", "Gguf", "replace",  # frozen dataclasses of checkpoint/families/family.py
    "Format", "Kind",  # of frozen/formats/base.py and checkpoint/methods/base.py, frozen
    "threading.Lock",  # holds nothing that a forward could read
    "ContextVar",  # whose values belong to a context, and end with it
)  # fmt: skip


# compat has the module state that FastMoE's programs read and set.
@pytest.mark.parametrize("path", [path for path in PACKAGE if part(path) != "compat"], ids=relative)
def test_module_state_is_named(path):
    tree, state = tree_of(path), set()
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        makes = isinstance(node.value, ast.Call) and dotted(node.value.func) in MAKES_IMMUTABLE
        is_type = isinstance(node, ast.AnnAssign) and dotted(node.annotation) == "TypeAlias"
        if not (makes or is_type or isinstance(node.value, IMMUTABLE)):
            state |= {dotted(target) for target in targets} - {"__all__"}
    assert state <= MODULE_STATE.get(relative(path), set())
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), "uses `global`"


# torch.set_default_device() moves what these make, torch.Generator aside, whose device theirs must be.
FACTORIES = """
    arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand randint randn randperm
    scalar_tensor tensor tril_indices triu_indices zeros Generator
""".split()  # noqa: SIM905


def without_device(node, function=""):
    """Lines that make a tensor on the default device, but for parameters and buffers of a constructor."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            name = dotted(child.func)
            if function == "__init__" and name in ("nn.Parameter", "self.register_buffer"):
                continue  # they follow the default, as those of torch's modules do
            is_named = name == "torch.Generator" and child.args
            is_named = is_named or any(keyword.arg in ("device", None) for keyword in child.keywords)
            if name in {f"torch.{factory}" for factory in FACTORIES} and not is_named:
                yield f"{child.lineno}: {name}"
        yield from without_device(child, getattr(child, "name", function))


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_tensors_are_made_on_a_named_device(path):
    assert not list(without_device(tree_of(path)))


# Parts whose public functions have no types yet; the list only gets shorter.
WITHOUT_TYPES = ()


def unannotated(node, inside=""):
    """Public functions and methods under a node whose arguments or results have no type."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from unannotated(child, f"{child.name}.")
        if isinstance(child, ast.FunctionDef) and (
            not child.name.startswith("_") or child.name == "__init__"
        ):
            args = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
            args = [a for a in args if a.arg not in ("self", "cls", "ctx")]
            args += [a for a in (child.args.vararg, child.args.kwarg) if a is not None]
            if (child.returns is None and child.name != "__init__") or any(
                a.annotation is None for a in args
            ):
                yield f"{inside}{child.name}"


@pytest.mark.parametrize(
    "path", [path for path in PACKAGE if not relative(path).startswith(WITHOUT_TYPES)], ids=relative
)
def test_public_functions_are_annotated(path):
    assert not list(unannotated(tree_of(path)))


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_native_source(path):
    text = text_of(path)
    if path.name != "python_module.cpp" and path.parent.name != "nccl":
        assert "#include <Python.h>" not in text, "libfmoe is built without Python: see python_module.cpp"
    if path.is_relative_to(ROOT / "csrc"):
        for name in includes(path):
            assert "cuda/" not in name and not (ROOT / "cuda" / name).exists(), (
                f"csrc/ includes {name} of cuda/"
            )
    assert not any(name.endswith(".cu") for name in includes(path)), "includes a .cu file"
    assert not re.search(r"\b(getenv|setenv)\b", text), "reads the environment"
    assert "StreamCreate" not in text, "creates a private stream"


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_users_import_public_names(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for name in imports(path):
            components = name.split(".")
            # FastMoE's programs import private names of its modules, so tests of compat do
            if components[0] == "fmoe_ext" and components[1:2] != ["compat"]:
                private = [c for c in components[1:] if c.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)} imports {name}"


FOLDERS_OF_DOCUMENTS = (".", "docs", "examples/*", "benchmarks/*", "tests/*")
DOCUMENTS = [path for folder in FOLDERS_OF_DOCUMENTS for path in sorted(ROOT.glob(f"{folder}/*.md"))]
HISTORY = ("tests/cuda/kernel_resources.md", "CHANGELOG.md")  # name what there was
# how paths of others begin, and of files that a reader makes
OF_OTHERS = ("torch/", "megatron/", "pretrain_gpt.py", "file.py", "llama.cpp", "layouts/", "qwen3_vl.py")
PATH = re.compile(r"(?<![\w./<*{}-])((?:[\w.*-]+/)*[\w.*-]*[\w*])\.(py|cpp|cu|h|cuh|inc|md|sh)\b(?![\w/])")
NO_MODULES = ("fmoe_ext.forward",)  # a key in autograd's metadata
NEEDS_OTHERS = ("fmoe_ext.torchtitan.routed_experts",)  # test_torchtitan.py has it by this name
NOT_YET = ()  # the list only gets shorter
NAME = re.compile(r"(?<![\w.])fmoe_ext(?:\.[A-Za-z_]\w*)+")


@pytest.fixture(scope="module")
def files():
    """Every file of the checkout, with a slash before its path."""
    folders = (
        *(f for f in ROOT.iterdir() if f.is_dir() and not f.name.startswith((".", "build"))),
        ROOT / ".ci",
    )
    return [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*")] + [
        f"/{path.name}" for path in ROOT.iterdir()
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_name_files_that_exist(path, files):
    """A path may leave out the folders that the reader is in: ep/plan.py is fmoe_ext/ep/plan.py."""
    text = re.sub(r"https?://\S+", "", text_of(path))
    names = {f"{stem}.{suffix}".removeprefix("../") for stem, suffix in PATH.findall(text)}
    names = {name for name in names if not name.startswith(OF_OTHERS)}
    if path.relative_to(ROOT).as_posix() in HISTORY:
        names = set()
    missing = sorted(name for name in names if not fnmatch.filter(files, f"*/{name}"))
    assert not missing, f"{path.name} names files that do not exist: {missing}"


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *PACKAGE, *NATIVE], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_names_of_the_package_exist(path):
    native = {"_C", "_C_cuda", "_C_nccl"}  # which not every build has
    for name in {n.rstrip(".") for n in NAME.findall(text_of(path))}:
        if (
            path.relative_to(ROOT).as_posix() in HISTORY
            or name.split(".")[1] in native
            or name in (*NO_MODULES, *NEEDS_OTHERS, *NOT_YET)
        ):
            continue
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            pytest.fail(f"{path.name} names {name}, which does not exist")
