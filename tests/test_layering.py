"""The import rules of docs/design.md and what else the source text must hold, each rule over every file.

A rule takes a Source and yields (line, what to do). RULES says which files each one reads; PLANTED has a source text
that breaks each of them, so that a rule which has stopped looking fails too.
"""

import ast
import fnmatch
import functools
import graphlib
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

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
    "optimizer_steps": 0,
    "adapters": 1,
    "ops": 1,
    "recompute": 1,
    "tokens": 1,
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
    "checkpoint": ("frozen",),
    "compat": ("pipeline", "planning"),  # FairScale's Pipe cuts and measures as split() does
    "compress": ("balance", "checkpoint", "finetune", "model_files"),
    "cpu": (),
    "doctor": ("audit", "checkpoint", "model_files"),
    "finetune": ("checkpoint", "frozen", "gguf", "huggingface", "model_files"),
    "formats": ("checkpoint", "finetune", "frozen", "gguf", "huggingface", "model_files"),
    "frozen": (),
    "gguf": ("checkpoint", "frozen"),
    "gpu": ("frozen", "testing"),
    "huggingface": ("balance", "checkpoint", "frozen"),
    "info": ("checkpoint", "finetune", "gpu", "model_files", "planning"),
    "lora": ("finetune",),
    "megatron": (),
    "model_files": ("checkpoint", "gguf"),
    "pipeline": ("planning",),  # split() cuts as the planner does
    "planning": ("checkpoint", "model_files"),  # a config.json that may be hostile has one reader
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


class Source:
    """A file under ROOT, read and parsed once; with `text`, a file that only the tests of the rules have."""

    def __init__(self, name, text=None):
        self.name = name
        self.path = Path(name)
        self.text = (ROOT / name).read_text() if text is None else text

    @property
    def inside(self):
        """Path inside fmoe_ext."""
        return self.name.removeprefix("fmoe_ext/")

    @property
    def part(self):
        """First component of a module's name inside fmoe_ext; "" for fmoe_ext/__init__.py."""
        first = Path(self.inside).parts[0]
        return "" if first == "__init__.py" else first.removesuffix(".py")

    @property
    def module(self):
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @functools.cached_property
    def tree(self):
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self):
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def imports(self):
        """(line, module) of what a file imports when it runs, `from a import b` as both a and a.b."""
        types = {
            id(inner)
            for node in self.nodes
            if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }
        return tuple(imported(node for node in self.nodes if id(node) not in types))

    @functools.cached_property
    def imports_with_types(self):
        """With those for annotations alone."""
        return tuple(imported(self.nodes))

    @functools.cached_property
    def attributes(self):
        """(line, dotted name) of every attribute that is read."""
        return tuple((n.lineno, dotted(n)) for n in self.nodes if isinstance(n, ast.Attribute))

    @functools.cached_property
    def includes(self):
        found = re.finditer(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', self.text, re.MULTILINE)
        return tuple((self.line(match), match[1]) for match in found)

    def line(self, match):
        return self.text.count("\n", 0, match.start(match.lastindex or 0)) + 1


def dotted(node):
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def imported(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def inner_imports(source):
    """(line, part) of the parts of fmoe_ext that a file imports."""
    for line, name in source.imports:
        components = name.split(".")
        if components[0] == "fmoe_ext" and len(components) > 1:
            yield line, components[1] if components[1] in CORE or components[1] in ROOMS else ""


def imports_in_full(source):
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "write imports in full, not relative"


def floors_and_rooms(source):
    own = source.part
    if own not in CORE and own not in ROOMS:
        yield 1, f"{own} is no part: add it to CORE or ROOMS and to docs/design.md"
        return
    for line, target in inner_imports(source):
        if own in CORE and target not in CORE:
            yield line, f"the core's {own} imports the room {target or 'fmoe_ext'}: let the room import it"
        elif own in CORE and CORE[target] > CORE[own]:
            yield line, f"{own} imports {target}, which lies above it: move what both need below"
        elif own in ROOMS and target not in ("", own) and target not in CORE and target not in ROOMS[own]:
            yield line, f"{own} imports the room {target}: add it to ROOMS, or put what both need in the core"


def native_modules(source):
    for line, target in inner_imports(source):
        if target in MAY_IMPORT_NATIVE and source.inside != MAY_IMPORT_NATIVE[target]:
            yield line, f"only {MAY_IMPORT_NATIVE[target]} loads {target}: call its operators"


def no_distributed(source):
    if source.part in WITHOUT_DISTRIBUTED:
        for line, name in source.imports:
            if name.startswith("torch.distributed"):
                yield line, "imports torch.distributed: leave that to ep, distributed or a room"
        for line, name in source.attributes:
            if name == "torch.distributed":
                yield line, "uses torch.distributed: leave that to ep, distributed or a room"


def operators_by_ops(source):
    if source.part not in ("ops", "frozen", "gpu"):
        for line, name in source.attributes:
            if name == "torch.ops.fmoe_ext":
                yield line, "torch.ops.fmoe_ext is spelled only in ops, frozen and gpu: call fmoe_ext.ops"


def no_environment(source):
    if source.part != "_env":
        for line, name in source.attributes:
            if name in ("os.environ", "os.getenv"):
                yield line, "reads the environment: use _env.get"


def compiler_asked_for_a_thread(source):
    for line, name in source.attributes:
        if name == "torch.compiler.is_compiling":
            yield line, "is true in every thread while one compiles: ask as ops/outside_graphs.py says"


def import_circle(sources):
    """Between files, annotations counted; files may import the __init__ of the package that they are in."""
    files = {source.module: source for source in sources}
    graph = {
        name: {t for _, t in source.imports_with_types if t in files and t != name}
        for name, source in files.items()
    }
    graph = {name: {t for t in targets if not name.startswith(f"{t}.")} for name, targets in graph.items()}
    done, trail, circles = set(), [], []

    def visit(name):
        if name in trail:
            circle = [*trail[trail.index(name) :], name]
            circles.append(
                f"{files[name].name}:1: an import circle: {' -> '.join(circle)}; "
                "move what two of them need into a file below both"
            )
        elif name not in done:
            trail.append(name)
            for target in sorted(graph[name]):
                visit(target)
            done.add(trail.pop())

    for name in sorted(graph):
        visit(name)
    return circles


# The state that modules have, by name; what other modules call at their top makes something immutable.
MODULE_STATE = {
    "ep/exchange.py": {"_nccl"},  # per process group, weak
    # per process group, weak
    "ep/process_groups.py": {"_agreed", "_groups", "_layers", "_timeouts", "_timeouts_in_use"},
    "distributed/groups.py": {"_of_reductions"},  # per process group, weak
    "remote/expert_classes.py": {"_CLASSES"},  # the kinds of experts that a server may be asked for
    "remote/loop.py": {"_LOOPS"},  # of a process and its forked children
    "ep/placement.py": {"_of_nodes"},  # per process group, weak
    # handles of hooks on all modules, there to be removed; wrappers that have run
    "ep/wrappers.py": {"WATCH", "_hooks", "_around"},
    "gates/losses.py": {"ONE_RANK"},
    "huggingface/training.py": {"_added_to"},  # the loss that is added to a gate's model, weak
    "optimizer_steps.py": {"FOLLOWERS", "HOOKS"},  # weak, and the handles of two hooks
    "ops/chooser.py": {"_CHOOSERS"},  # gpu registers itself
    "tokens.py": {"_open"},  # the innermost open block, which torch.compile can read, unlike a ContextVar
    "ops/_autograd.py": {
        "_below",
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
    "frozen/kept.py": {"KEPT"},  # decoded weights on each GPU that wait for their backward
    "ops/__init__.py": {"cuda_module_missing"},  # why there are no CUDA kernels, set once by loading
}
MAKES_IMMUTABLE = (
    "frozenset", "tuple", "MappingProxyType", "re.compile", "logging.getLogger", "namedtuple", "TypeVar",
    "ParamSpec", "struct.Struct", "torch.library.Library", "functools.partial",
    "Limits",  # a frozen dataclass of remote/wire.py
    "Family", "Layout", "replace",  # frozen dataclasses of checkpoint/families/family.py
    "as_node",  # a class
    "threading.Lock",  # holds nothing that a forward could read
    "ContextVar",  # whose values belong to a context, and end with it
)  # fmt: skip


def module_state(source):
    # compat has the module state that FastMoE's programs read and set
    if source.part == "compat":
        return
    for node in source.tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        makes = isinstance(node.value, ast.Call) and dotted(node.value.func) in MAKES_IMMUTABLE
        is_type = isinstance(node, ast.AnnAssign) and dotted(node.annotation) == "TypeAlias"
        if not (makes or is_type or isinstance(node.value, IMMUTABLE)):
            names = {dotted(target) for target in targets} - {"__all__"}
            for name in sorted(names - MODULE_STATE.get(source.inside, set())):
                yield (
                    node.lineno,
                    f"{name or 'this'} is state of a module: keep it in an object, or name it here",
                )
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield node.lineno, "uses `global`: keep it in an object"


# torch.set_default_device() moves what these make, torch.Generator aside, whose device theirs must be.
FACTORIES = """
    arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand randint randn randperm
    scalar_tensor tensor tril_indices triu_indices zeros Generator
""".split()  # noqa: SIM905


def named_device(source):
    """Calls that make a tensor on the default device, but for parameters and buffers of a constructor."""
    yield from without_device(source.tree)


def without_device(node, function=""):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            name = dotted(child.func)
            if function == "__init__" and name in ("nn.Parameter", "self.register_buffer"):
                continue  # they follow the default, as those of torch's modules do
            is_named = name == "torch.Generator" and child.args
            is_named = is_named or any(keyword.arg in ("device", None) for keyword in child.keywords)
            if name in {f"torch.{factory}" for factory in FACTORIES} and not is_named:
                yield child.lineno, f"{name} makes a tensor on the default device: pass device="
        yield from without_device(child, getattr(child, "name", function))


def annotated(source):
    """Public functions and methods have types on arguments and result."""
    yield from unannotated(source.tree)


def unannotated(node, inside=""):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from unannotated(child, f"{child.name}.")
        if isinstance(child, ast.FunctionDef) and (
            not child.name.startswith("_") or child.name == "__init__"
        ):
            args = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
            args = [a for a in args if a.arg not in ("self", "cls", "ctx")]
            args += [a for a in (child.args.vararg, child.args.kwarg) if a is not None]
            without_result = child.returns is None and child.name != "__init__"
            if without_result or any(a.annotation is None for a in args):
                yield child.lineno, f"{inside}{child.name} is public: write the types of arguments and result"


def python_only_in_its_module(source):
    if source.path.name != "python_module.cpp" and source.path.parent.name != "nccl":
        for match in re.finditer("#include <Python.h>", source.text):
            yield source.line(match), "libfmoe is built without Python: see python_module.cpp"


def csrc_without_cuda(source):
    for line, name in source.includes:
        if source.name.startswith("csrc/") and ("cuda/" in name or (ROOT / "cuda" / name).exists()):
            yield line, f"csrc/ includes {name} of cuda/: the CPU's sources build without it"
        if name.endswith(".cu"):
            yield line, f"includes {name}: put what both need in a .cuh"


def native_without_environment_or_streams(source):
    for match in re.finditer(r"\b(getenv|setenv)\b", source.text):
        yield source.line(match), "reads the environment: pass it as an argument from Python"
    for match in re.finditer("StreamCreate", source.text):
        yield source.line(match), "creates a private stream: use torch's current one"


def public_names_only(source):
    for line, name in source.imports:
        components = name.split(".")
        # FastMoE's programs import private names of its modules, so tests of compat do
        ours = components[0] == "fmoe_ext" and components[1:2] != ["compat"]
        if ours and any(c.startswith("_") for c in components[1:]):
            yield line, f"imports {name}, which is private: use a public name"


NAME_WHAT_THERE_WAS = ("tests/cuda/kernel_resources.md", "CHANGELOG.md")
# how paths of others begin, and of files that a reader makes
OF_OTHERS = ("torch/", "megatron/", "pretrain_gpt.py", "file.py", "llama.cpp", "layouts/")
PATH = re.compile(r"(?<![\w./<*{}-])((?:[\w.*-]+/)*[\w.*-]*[\w*])\.(py|cpp|cu|h|cuh|inc|md|sh)\b(?![\w/])")
NO_MODULES = ("fmoe_ext.forward",)  # a key in autograd's metadata
NEEDS_OTHERS = ("fmoe_ext.torchtitan.routed_experts",)  # test_torchtitan.py has it by this name
NAME = re.compile(r"(?<![\w.])fmoe_ext(?:\.[A-Za-z_]\w*)+")


@functools.cache
def ends_of_files():
    """Every file of the checkout with a slash before its path, and each end of a path: a/b.py has b.py too."""
    folders = (
        *(f for f in ROOT.iterdir() if f.is_dir() and not f.name.startswith((".", "build"))),
        ROOT / ".ci",
    )
    files = [path.relative_to(ROOT) for folder in folders for path in folder.rglob("*")]
    files += [path.relative_to(ROOT) for path in ROOT.iterdir()]
    ends = {"/".join(path.parts[i:]) for path in files for i in range(len(path.parts))}
    return [f"/{path}" for path in files], ends


def files_that_exist(source):
    """A path may leave out the folders that the reader is in: ep/plan.py is fmoe_ext/ep/plan.py."""
    text = re.sub(r"https?://\S+", lambda match: " " * len(match[0]), source.text)
    files, ends = ends_of_files()
    given = tuple(re.findall(r"^```python\n# (\w+\.py)$", text, re.MULTILINE))  # by a block of the page
    for match in PATH.finditer(text):
        name = re.sub(r"^(\.\./)+", "", f"{match[1]}.{match[2]}")
        exists = fnmatch.filter(files, f"*/{name}") if "*" in name else name in ends
        if not name.startswith((*OF_OTHERS, *given)) and not exists:
            yield (
                text.count("\n", 0, match.start()) + 1,
                f"names {name}, which does not exist: name its new place",
            )


@functools.cache
def resolves(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def names_that_exist(source):
    native = {"_C", "_C_cuda", "_C_nccl"}  # which not every build has
    for match in NAME.finditer(source.text):
        name = match[0].rstrip(".")
        known = name.split(".")[1] in native or name in (*NO_MODULES, *NEEDS_OTHERS)
        if not known and not resolves(name):
            yield source.line(match), f"names {name}, which does not exist: name its new place"


def sources(*patterns, left_out=()):
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    names = (path.relative_to(ROOT) for path in paths if path.is_file() and "__pycache__" not in path.parts)
    return [Source(name.as_posix()) for name in names if name.as_posix() not in left_out]


@functools.cache
def files_of(kind):
    if kind == "package":
        return sources("fmoe_ext/**/*.py")
    if kind == "native":
        return sources("csrc/**/*.*", "cuda/**/*.*")
    if kind == "users":
        return sources("tests/**/*.py", "benchmarks/**/*.py", "examples/**/*.py")
    folders = (".", "docs", "examples/*", "benchmarks/*", "tests/*")
    return sources(*(f"{folder}/*.md" for folder in folders), left_out=NAME_WHAT_THERE_WAS)


RULES = {
    imports_in_full: ("package", "users"),
    floors_and_rooms: ("package",),
    native_modules: ("package",),
    no_distributed: ("package",),
    operators_by_ops: ("package",),
    no_environment: ("package",),
    compiler_asked_for_a_thread: ("package",),
    module_state: ("package",),
    named_device: ("package",),
    annotated: ("package",),
    python_only_in_its_module: ("native",),
    csrc_without_cuda: ("native",),
    native_without_environment_or_streams: ("native",),
    public_names_only: ("users",),
    files_that_exist: ("documents",),
    names_that_exist: ("documents", "package", "native"),
}
LEAST = {"package": 300, "native": 100, "users": 300, "documents": 50}  # fewer files: a pattern has lost some


def broken(rule, files):
    found = (f"{source.name}:{line}: {what}" for source in files for line, what in rule(source))
    return list(dict.fromkeys(found))  # `from a import b, c` is one fault


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_every_file(rule):
    found = [line for kind in RULES[rule] for line in broken(rule, files_of(kind))]
    assert not found, "\n".join(["", *found])


def test_rooms_form_no_circle():
    """Each room can be read after the rooms that it imports."""
    imports = {room: [other for other in others if other in ROOMS] for room, others in ROOMS.items() if room}
    order = list(graphlib.TopologicalSorter(imports).static_order())
    assert sorted(order) == sorted(imports)
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports | {"frozen": ["formats"]}).prepare()


def test_no_import_circle():
    found = import_circle(files_of("package"))
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("kind", LEAST)
def test_rules_read_every_file(kind):
    assert len(files_of(kind)) >= LEAST[kind]


# (rule, file, its text): each breaks its rule once, in its last line, or in its first if the whole file is wrong.
PLANTED = [
    (imports_in_full, "fmoe_ext/gates/new.py", "import torch\nfrom . import losses"),
    (floors_and_rooms, "fmoe_ext/new_part.py", ""),
    (floors_and_rooms, "fmoe_ext/layers.py", "import torch\nfrom fmoe_ext import checkpoint"),
    (floors_and_rooms, "fmoe_ext/layers.py", "import torch\nfrom fmoe_ext import FMoE"),
    (
        floors_and_rooms,
        "fmoe_ext/linear.py",
        "if TYPE_CHECKING:\n    import fmoe_ext.gates\nfrom fmoe_ext import gates",
    ),
    (floors_and_rooms, "fmoe_ext/lora/new.py", "def f():\n    import fmoe_ext.remote"),
    (native_modules, "fmoe_ext/layers.py", "import torch\nfrom fmoe_ext import _C"),
    (native_modules, "fmoe_ext/ops/__init__.py", "from fmoe_ext import _C\nimport fmoe_ext._C_nccl"),
    (no_distributed, "fmoe_ext/routing.py", "import torch\nimport torch.distributed"),
    (no_distributed, "fmoe_ext/routing.py", "import torch\nx = torch.distributed.is_initialized"),
    (operators_by_ops, "fmoe_ext/layers.py", "import torch\ntorch.ops.fmoe_ext.permute()"),
    (no_environment, "fmoe_ext/layers.py", "import os\nx = os.environ"),
    (no_environment, "fmoe_ext/layers.py", "import os\nx = os.getenv('A')"),
    (compiler_asked_for_a_thread, "fmoe_ext/layers.py", "import torch\nx = torch.compiler.is_compiling()"),
    (module_state, "fmoe_ext/layers.py", "FACTOR = 2\n_seen = {}"),
    (module_state, "fmoe_ext/ops/chooser.py", "_CHOOSERS = []\n_OTHERS: list = make()"),
    (module_state, "fmoe_ext/layers.py", "def f():\n    global seen"),
    (named_device, "fmoe_ext/layers.py", "torch.empty(1, device=x.device)\ntorch.zeros(2)"),
    (named_device, "fmoe_ext/layers.py", "def __init__(self):\n    self.a = torch.Generator()"),
    (annotated, "fmoe_ext/layers.py", "def _private(x): ...\ndef f(x) -> int: ..."),
    (annotated, "fmoe_ext/layers.py", "def g(x: int) -> int: ...\ndef f(x: int): ..."),
    (annotated, "fmoe_ext/layers.py", "class A:\n    def __init__(self, x): ..."),
    (annotated, "fmoe_ext/layers.py", "def g(*, x: int) -> int: ...\ndef f(*args, x: int) -> int: ..."),
    (python_only_in_its_module, "csrc/ops.cpp", "#include <vector>\n#include <Python.h>"),
    (csrc_without_cuda, "csrc/ops.cpp", '#include "gemm/gemm.h"\n#include "../cuda/new.h"'),
    (csrc_without_cuda, "csrc/ops.cpp", '#include "gemm/gemm.h"\n#include "select.h"'),
    (csrc_without_cuda, "cuda/new.cu", '#include "select.h"\n#include "sm90_up.cu"'),
    (native_without_environment_or_streams, "csrc/ops.cpp", 'x\nauto a = getenv("A");'),
    (native_without_environment_or_streams, "cuda/new.cu", "x\ncudaStreamCreateWithFlags(&s, 0);"),
    (public_names_only, "tests/test_new.py", "from fmoe_ext.compat import _a\nfrom fmoe_ext.ep import _plan"),
    (files_that_exist, "docs/new.md", "see ep/plan.py and https://x.org/a/not_there.py\nsee ep/not_there.py"),
    (files_that_exist, "docs/new.md", "see docs/*.md\nsee docs/*_not_there.md"),
    (names_that_exist, "docs/new.md", "see fmoe_ext._C_nccl.x and fmoe_ext.FMoE.\nsee fmoe_ext.NotThere."),
]


@pytest.mark.parametrize(
    "rule, name, text", PLANTED, ids=[f"{rule.__name__}-{i}" for i, (rule, _, _) in enumerate(PLANTED)]
)
def test_rule_sees_what_breaks_it(rule, name, text):
    found = broken(rule, [Source(name, text)])
    assert len(found) == 1 and found[0].startswith(f"{name}:{text.count(chr(10)) + 1}: ")


def test_every_rule_has_a_planted_break():
    assert {rule for rule, _, _ in PLANTED} == set(RULES)


def test_import_circle_is_seen_through_annotations():
    """a imports b for its types alone; c may import the package that it is in."""
    texts = {
        "fmoe_ext/gates/__init__.py": "from fmoe_ext.gates.c import C",
        "fmoe_ext/gates/c.py": "import fmoe_ext.gates",
        "fmoe_ext/a.py": "if TYPE_CHECKING:\n    from fmoe_ext.b import B",
        "fmoe_ext/b.py": "import fmoe_ext.a",
    }
    found = import_circle([Source(name, text) for name, text in texts.items()])
    assert len(found) == 1 and "fmoe_ext.a -> fmoe_ext.b -> fmoe_ext.a" in found[0]
