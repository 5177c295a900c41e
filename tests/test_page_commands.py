"""Every command of every page runs, in the order of its page and from an empty folder, or says here why not.

The tutorials are in tests/test_docs.py.
"""

import re
from types import MappingProxyType

import pytest

from tests.pages import PAGES, ROOT, blocks, name_of, run_python, run_shell

WITH_COMMANDS = [*PAGES, *sorted(ROOT.glob("examples/*/README.md"))]
# These pages are run whole.
RUN = ("adapters", "audit", "checkpoints", "doctor", "pipeline", "telemetry")
# The commands of all other pages: what begins so -> the test that runs it, or why none does.
COVERED = MappingProxyType(
    {
        r"fmoe-server |fmoe-dht ": "tests/remote/test_page.py",
        r"cmake |\./build/first|.*examples/cpp/": "tests/test_cpp.py",
        r"fmoe audit examples/lm/audit.py:recipe|fmoe info": "tests/test_commands.py",
        r"python -m fmoe_ext.checkpoint .*deepspeed_folder": "tests/checkpoint/test_deepspeed.py",
        r"python -m fmoe_ext.info": "tests/test_commands.py",
        r"pip install .*(numpy|-e|\.) |pip install \. ": "tests/test_wheel.py",
        r"cd / && fmoe info": "tests/test_wheel.py",
        r"fmoe prune ": "tests/compress/test_prune_command.py",
        r"fmoe adapter merge adapter --base packed": "tests/checkpoint/test_adapter_repack.py",
        r"make finetune$": "tests/finetune/test_example_finetune.py",
        r"make train-ep": "tests/distributed/test_train_ep.py",
        r"make train-pipeline": "tests/test_example_pipeline_lm.py",
        r"make train-pipe ": "tests/test_example_pipe_images.py",
        r"make train$|python examples/lm/train.py": "tests/test_example_lm.py",
        r"make test$": "tests/test_workflows.py",
        r"torchrun .*examples/lm/train.py": "tests/distributed/test_example_lm_ranks.py",
        r"(python|torchrun .*) examples/megatron/train.py": "tests/megatron_lm/test_example_megatron.py",
        r"python examples/speedrun/speedrun.py": "tests/test_example_speedrun.py",
        r"PYTHONPATH=examples/megatron torchrun .* pretrain_gpt.py": "tests/megatron_lm/test_megatron_arguments.py",
    }
)
EXCEPTED = MappingProxyType(
    {
        r".*--device cuda|.*fmoe_ext.gpu prove": "needs a GPU",
        r"sbatch |torchrun --nnodes 4": "needs several machines",
        r".*megatron-0\.19\.2|.*build/torchtitan": "needs a download",
        r"here=\$PWD|PYTHONPATH=<checkout of Megatron-LM>": "needs a checkout of Megatron-LM",
        r"make finetune ARGS": "needs a model of the reader's",
        r"python -m benchmarks.bench_remote": "measures for minutes, partly with hivemind",
    }
)


def commands_of(code):
    """The commands of a block: lines without comments, continued ones joined."""
    lines = code.replace("\\\n", " ").splitlines()
    stripped = (re.sub(r"\s+", " ", re.sub(r"\s+#.*", "", line)).strip() for line in lines)
    return [line for line in stripped if line and not line.startswith("#")]


def shell_blocks(path):
    return [code for language, code, _ in blocks(path) if language in ("sh", "bash")]


@pytest.mark.long
@pytest.mark.parametrize("page", RUN)
def test_page_runs_from_an_empty_folder(page, clean_state):
    """A block that begins with "# name.py" is that file; a comment says the exit code that is not 0."""
    path = ROOT / "docs" / f"{page}.md"
    if page != "doctor":  # which gives all that its commands need
        clean_state.joinpath("examples").symlink_to(ROOT / "examples")
    names, ran = {"__name__": "__main__"}, 0
    for language, code, line in blocks(path):
        file = re.match(r"# (\w+\.py)\n", code)
        if language == "python" and file:
            clean_state.joinpath(file[1]).write_text(code)
        elif language == "python" and page != "pipeline":  # which has parts of programs
            run_python(code, path, line, names)
        for command in code.splitlines() if language == "sh" else []:
            expected = re.search(r"# exit code (\d)", command)
            status = 0 if expected is None else expected[1]
            run_shell(f"code=0\n{{ {command}\n}} || code=$?\n[ $code = {status} ]", clean_state)
            ran += 1
    assert ran


def test_every_command_is_run_or_says_why_not():
    used = set()
    for path in WITH_COMMANDS:
        if path.parent.name == "tutorials" or path.stem in RUN:
            continue
        for command in (line for code in shell_blocks(path) for line in commands_of(code)):
            known = [p for p in (*EXCEPTED, *COVERED) if re.match(p, command)]
            assert known, f"{name_of(path)}: no test runs {command!r}"
            used.add(known[0])
    assert used == {*EXCEPTED, *COVERED}, "no page has these commands any more"
    for test in COVERED.values():
        assert ROOT.joinpath(test).exists(), test


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=name_of)
def test_blocks_of_commands_are_marked_as_such(path):
    """A block without a language is output; the tests would not see its commands."""
    for language, code, line in blocks(path):
        first = re.match(
            r"(?:\w+=\S+ )*(?:fmoe|fmoe-\w+|python|pip|pytest|make|torchrun|\.venv/\S+) \S", code
        )
        assert language or not first, f"{name_of(path)}:{line} is no sh block"
