"""The documentation: its code runs as it stands, its links lead somewhere, and every public name has a docstring."""

import doctest
import functools
import importlib.util
import inspect
import json
import re
import statistics
import types

import pytest
import torch

import fmoe_ext
import fmoe_ext_command
from benchmarks import gpu_sentences
from tests.pages import PAGES, ROOT, blocks, commands_of, name_of, run_command, run_python

TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))
API = {path: path.read_text() for path in ROOT.glob("docs/api/*.md")}
DOCUMENTED = {
    module: path for path, text in API.items() for module in re.findall(r"automodule:: (fmoe_ext\S*)", text)
}


def mark_long(path):
    return pytest.param(path, marks=pytest.mark.long) if path.stem in ("processes", "shrink") else path


@pytest.mark.parametrize("path", [mark_long(path) for path in TUTORIALS], ids=name_of)
def test_tutorial_runs(path, clean_state, capfd):
    """Python blocks share one program; one that begins with "# name.py" is that file, which sh blocks start."""
    names = {"__name__": "__main__"}
    for language, code, line in blocks(path):
        file = re.match(r"# (\w+\.py)\n", code)
        if language == "python" and file:
            clean_state.joinpath(file[1]).write_text(code)
        elif language == "python":
            run_python(code, path, line, names)
        elif language == "sh":
            for command, status in commands_of(code):
                run_command(command, clean_state, status)
    printed = capfd.readouterr().out.split("\n")
    assert sum(bool(line) for line in printed) >= 2, f"{name_of(path)} shows its reader nothing"


def test_tutorial_of_balance_keeps_its_runs_apart(clean_state):
    page = ROOT / "docs/tutorials/balance.md"
    for _ in range(2):  # a second reading starts again
        names = {"__name__": "__main__"}
        for _, code, line in blocks(page):
            run_python(code, page, line, names)
    for run in ("unbalanced", "balanced", "by_bias"):
        records = clean_state.joinpath(f"{run}.jsonl").read_text().splitlines()
        assert [json.loads(record)["step"] for record in records] == [20, 40, 60], run
        assert clean_state.joinpath(f"{run}.png").stat().st_size > 0


def test_tutorial_of_processes_refuses_ranks_that_do_not_divide_the_experts(clean_state):
    page = ROOT / "docs/tutorials/processes.md"
    names = {"__name__": "experts"}
    run_python(next(code for _, code, _ in blocks(page) if code.startswith("# experts.py")), page, 1, names)
    group = types.SimpleNamespace(size=lambda: 3)
    with pytest.raises(ValueError, match=r"num_experts=8 .* it must be a multiple of the 3 ranks"):
        names["make_model"](types.SimpleNamespace(ep=group, world=group))


def test_first_example():
    """README and the site begin with the same program, and it runs."""
    first = [
        next(code for language, code, _ in blocks(ROOT / page) if language == "python")
        for page in ("README.md", "docs/index.md")
    ]
    assert first[0] == first[1]
    names = {}
    run_python(first[0], "README.md", 1, names)
    assert names["y"].shape == names["x"].shape
    assert names["balance_loss"] > 0 and names["mlp"].gate.gate.weight.grad.abs().sum() > 0


def test_readme_is_short():
    assert len((text := (ROOT / "README.md").read_text()).split()) <= 1200 and text.count("\n") <= 120


# Words that a sentence about speed or quality beside others has.
COMPARES = re.compile(
    r"equal (seconds|steps)|after the same steps|bits a byte|times the speed|of the time that|tokens/s|faster than"
)
QUOTING = ("README.md", "docs/index.md", "docs/when_not.md", "docs/install.md", "docs/troubleshooting.md")


def sentences(text):
    """Sentences and cells of a page's prose on one line each, without the marks of lists."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(
        r"\s+", " ", re.sub(r"^\s*[*|] |\|", "\n\n", text, flags=re.MULTILINE).replace("\n\n", " ¶ ")
    )
    return [s.strip(" ¶*") for s in re.split(r"(?<=[.:])\*{0,2} (?=[A-Z*\[`!])|¶", text) if s.strip(" ¶*")]


@pytest.mark.parametrize("name", QUOTING)
def test_comparisons_are_quoted_from_the_measurements(name):
    """when_not.md said that the dense model leads at equal seconds, README the opposite."""
    measured = (ROOT / "docs/measurements.md").read_text()
    quotable = set(sentences(measured.partition("## In short\n")[2].partition("\n## ")[0]))
    said = [s for s in sentences((ROOT / name).read_text()) if COMPARES.search(s)]
    assert set(said) <= quotable, "\n".join(sorted(set(said) - quotable))
    assert len(quotable) >= 6 and (name != "README.md" or len(said) >= 2)


def _processors(text, *columns):
    """These columns of the rows of the first table of processors, and the commit."""
    rows = text.partition("| processor |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return {tuple(row[column] for column in columns) for row in cells}


def test_figures_in_short_are_those_of_the_tables():
    """The ranges of the first section, taken from the tables of the others."""
    text = (ROOT / "docs/measurements.md").read_text()
    short, _, tables = text.partition("## In short\n")[2].partition("\n## ")

    def column(head, number):
        rows = tables.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
        return [float(row.split("|")[number].replace(",", "")) for row in rows]

    assert _processors(text, 2, 3) <= _processors(text.partition("## Your processor")[2], 3, 5) | {
        ("1.12, 1.48", "1.73, 1.97"),  # of bench_layer, below
        ("0.87, 1.07", "not measured"),
        ("not measured in hardware", "not measured in hardware"),
    }
    float32, bfloat16 = (column("| (T, d, n, E, K), Intel | dtype |", 5)[first::2] for first in (0, 1))
    assert f"{min(float32):.2f}, {statistics.median(float32):.2f} | {min(bfloat16):.2f}, " in short
    readme = (ROOT / "README.md").read_text()
    assert _processors(readme, 1, 2) <= _processors(text, 1, 2)
    ours, theirs = (column("| case | p50 ms, ours |", number) for number in (2, 3))
    shares = [a / b for a, b in zip(ours[:4], theirs[:4], strict=True)]
    assert f"takes {min(shares):.2f} to {max(shares):.2f} of the time that hivemind" in short
    results = ROOT / "benchmarks" / "results"
    of_gpu = (gpu_sentences.load(results, name) for name in ("gpu", "gpu_peers"))
    assert gpu_sentences.bullet(*of_gpu) in short.splitlines()
    bits = [
        re.findall(r"\d\.\d{3}", row) for row in tables.splitlines() if row.startswith(("| MoE", "| dense"))
    ]
    assert (
        f"reaches {float(bits[0][0]):.2f} bits a byte" in short
        and f"reaches {float(bits[1][0]):.2f} af" in short
    )


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert path.parent.joinpath(target).exists(), f"{name_of(path)} links to {target}"
    for target in re.findall(r"`((?:docs|examples|benchmarks|tests|fmoe_ext|csrc|cuda)/[\w/.]+\.\w+)`", text):
        assert ROOT.joinpath(target).exists(), f"{name_of(path)} names {target}"


# What a new user wants to do -> the page that answers, and what it answers with.
TASKS = {
    "a model of mine with experts": ("docs/fmoefy.md", "model = fmoefy(model, num_experts=8"),
    "a 30B model on a laptop, then vLLM": ("docs/finetune.md", "vllm serve merged"),
    "four GPUs": ("docs/several_processes.md", "torchrun --nproc-per-node 4 examples/several_gpus.py"),
    "who got which token": ("docs/telemetry.md", "fmoe balance report out/choices.log"),
    "Mixtral to GGUF": ("docs/formats.md", 'fmoe_ext.export(model, "for_llama_cpp", "gguf")'),
    "Mixtral to Megatron": ("docs/formats.md", "fmoe_ext.checkpoint.to_megatron_core(model.state_dict()"),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("first", ["README.md", "docs/index.md"])
def test_task_is_answered_two_links_from_the_first_page(first, task):
    """Links in the text count; the site's contents at its left name every page."""
    page, answer = TASKS[task]
    reached = pages = {ROOT / first}
    for _ in range(2):
        pages = {
            target
            for path in pages
            for link in re.findall(r"\]\(([^)#\s:]+\.md)[^)]*\)", path.read_text())
            if (target := path.parent.joinpath(link).resolve()).exists()
        }
        reached = reached | pages
    assert ROOT / page in reached
    assert answer in (ROOT / page).read_text()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_exist(path):
    """Targets of make, modules that are run, and example programs."""
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    code = "\n".join([*re.findall(r"`([^`]+)`", prose), *(block for _, block, _ in blocks(path))])
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z0-9-]+)", code, re.MULTILINE):
        assert f"\n{target}:" in makefile, f"{name_of(path)} says make {target}"
    for module in re.findall(r"python -m ((?:fmoe_ext|benchmarks)[\w.]*)", code):
        assert importlib.util.find_spec(module), f"{name_of(path)} says python -m {module}"
    shell = "\n".join(block for language, block, _ in blocks(path) if language == "sh")
    for command in re.findall(
        r"^`?fmoe ([a-z]+)\b(?! \d)", "\n".join(re.findall(r"`fmoe [^`]+`", prose)) + shell, re.MULTILINE
    ):
        assert command in fmoe_ext_command.COMMANDS, f"{name_of(path)} says fmoe {command}"
    for program in re.findall(r"(?:^|\s)(examples/[\w/]+\.py)", code):
        assert ROOT.joinpath(program).exists(), f"{name_of(path)} runs {program}"


def test_every_page_is_in_the_contents():
    """Sphinx says the same, but only make docs runs it: this test finds it earlier."""
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


WITH_EXAMPLES = (
    "balance.decode_routed_experts",
    "balance.load_routed_experts",
    "balance.log_choices",
    "balance.read_log",
    "balance.routed_experts",
    "balance.summarize",
    "balance.watch",
    "balance.write",
    "batch_invariant",
    "checkpoint.export_safetensors",
    "checkpoint.from_huggingface",
    "checkpoint.from_megatron_core",
    "checkpoint.load",
    "checkpoint.save",
    "checkpoint.to_huggingface",
    "checkpoint.to_megatron_core",
    "compat.fairscale.Pipe",
    "compat.FMoE",
    "compat.FMoETransformerMLP",
    "cpu.keep_memory",
    "dispatch.dispatch",
    "distributed.clip_grad_norm_",
    "distributed.DistributedGroupedDataParallel",
    "distributed.fully_shard_experts",
    "distributed.init_groups",
    "doctor.check",
    "experts.FusedExperts",
    "FMoE",
    "fmoefy",
    "FMoELinear",
    "FMoETransformerMLP",
    "frozen.frozen_gemm",
    "frozen.frozen_mlp",
    "frozen.quantize",
    "gates.all_forwards_first",
    "gates.balance_loss",
    "gates.BaseGate",
    "gates.BiasedSoftmaxGate",
    "gates.DCGate",
    "gates.ExpertChoiceGate",
    "gates.find_gate",
    "gates.gen_faster_gate",
    "gates.GShardGate",
    "gates.NaiveGate",
    "gates.NoisyGate",
    "gates.NormedGate",
    "gates.QuantileGate",
    "gates.sequence_balance_loss",
    "gates.SinkhornGate",
    "gates.SqrtSoftplusGate",
    "gates.SwipeGate",
    "gates.SwitchGate",
    "gates.total_loss",
    "gates.UniformGate",
    "gates.WholeBatch",
    "gates.z_loss",
    "gates.ZeroGate",
    "HashGate",
    "ops.apply_capacity",
    "ops.count_tokens",
    "ops.expert_mlp",
    "ops.grouped_gemm",
    "ops.newton_schulz",
    "ops.permute",
    "ops.sort_tokens",
    "ops.topk_gate",
    "ops.unpermute",
    "optim.Muon",
    "packed_sequences",
    "ParallelLayout",
    "pipeline.split",
    "planning.placement.plan",
    "routing.permute_rows",
    "routing.unpermute_rows",
    "RoutingReplay",
    "SigmoidGate",
    "SoftmaxGate",
    "testing.assert_close",
    "token_ids",
    "valid_tokens",
)
OF_TRANSFORMERS = (
    "audit.audit",
    "compress.measure",
    "compress.prune",
    "export",
    "huggingface.add_balance_loss",
    "huggingface.from_pretrained",
    "huggingface.register",
    "huggingface.use",
    "import_model",
    "lora.fuse",
    "stream",
)


@pytest.mark.parametrize(
    "name", [*WITH_EXAMPLES, *(pytest.param(name, marks=pytest.mark.long) for name in OF_TRANSFORMERS)]
)
def test_example_in_docstring_runs(name, clean_state):
    """The names that programs, pages and examples call most, and routing by hand."""
    module, _, attribute = f"fmoe_ext.{name}".rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    names = {"torch": torch, "fmoe_ext": fmoe_ext, "partial": functools.partial, value.__name__: value}
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(value), names, name, None, None)
    assert test.examples, f"{name} has no example"
    said = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(
        test, out=said.append
    )
    assert result.failed == 0, "".join(said)


def test_names_in_docstrings_are_links():
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    assert docstrings.escape("FMoE, see valid_tokens() and d_model; e.g. FastMoE's") == (
        ":py:obj:`FMoE <fmoe_ext.FMoE>`, see :py:obj:`valid_tokens() <fmoe_ext.tokens.valid_tokens>` and ``d_model``;"
        " e.g. FastMoE's"
    )
    assert "compat" in docstrings.places()["compat.FMoE"] and len(docstrings.places()) > 500


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


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_code_is_not_clipped_beside_the_navigation(path):
    """At 1280 px a block of the site is 88 columns wide."""
    for language, code, line in blocks(path):
        for number, text in enumerate(code.splitlines() if language else (), line):
            assert len(text) <= 88, f"{name_of(path)}:{number} has {len(text)} columns: {text}"
