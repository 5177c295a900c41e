"""Every Python and sh block of every page runs, in order and from an empty folder, or says here why not.

Nothing is given but what the page gives. The tutorials are in tests/test_docs.py.
"""

import re
from types import MappingProxyType

import pytest

from tests.pages import PAGES, ROOT, blocks, commands_of, name_of, run_command, run_python

WITH_COMMANDS = [*PAGES, *sorted(ROOT.glob("examples/*/README.md"))]
# What a command begins with -> the test that runs it.
COVERED = MappingProxyType(
    {
        r"fmoe-server |fmoe-dht ": "tests/remote/test_page.py",
        r"cmake |\./build/first|.*examples/cpp/": "tests/test_cpp.py",
        r"fmoe audit examples/lm/audit.py:recipe|fmoe info": "tests/test_commands.py",
        r"python -m fmoe_ext.audit examples/lm/audit.py:recipe": "tests/test_commands.py",
        r"python -m fmoe_ext.checkpoint .*deepspeed_folder": "tests/checkpoint/test_deepspeed.py",
        r"python -m fmoe_ext.info": "tests/test_commands.py",
        r"pip install .*(numpy|-e|\.) |pip install \. ": "tests/test_wheel.py",
        r"cd / && fmoe info": "tests/test_wheel.py",
        r"fmoe adapter merge adapter --base Qwen/Qwen3-30B-A3B|fmoe export merged": "tests/finetune/test_recipe.py",
        r"fmoe export mixtral .* --text notes.txt": "tests/formats/test_export_calibrated.py",
        r"make finetune($| ARGS=.--limit)": "tests/finetune/test_example_finetune.py",
        r"make compress$": "tests/compress/test_example_compress.py",
        r"make grpo": "tests/huggingface/test_example_grpo.py",
        r"make train-cpp": "tests/test_cpp.py",
        r"make train-remote": "tests/remote/test_example_remote.py",
        r"fmoe doctor examples/doctor/": "tests/doctor/test_doctor.py",
        r"python examples/transformers/(peft|qwen3)_": "tests/huggingface/test_examples_transformers.py",
        r"python examples/transformers/upcycle_and_export.py": "tests/huggingface/test_example_transformers_export.py",
        r"torchrun .*examples/several_gpus.py .*--cpu": "tests/distributed/test_example_several_gpus.py",
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
# What a command begins with -> why no test runs it.
EXCEPTED = MappingProxyType(
    {
        r".*--device cuda|.*fmoe_ext.gpu prove|torchrun --nproc-per-node 4 examples/several_gpus": "needs GPUs",
        r"sbatch |torchrun --nnodes 4": "needs several machines",
        r".*megatron-0\.19\.2|.*build/torchtitan": "needs a download",
        r"here=\$PWD|PYTHONPATH=<checkout of Megatron-LM>": "needs a checkout of Megatron-LM",
        r"hf download ": "downloads 61 GB",
        r"pip install huggingface_hub transformers": "the tests have these packages",
        r"vllm serve ": "needs a GPU and vLLM",
        r"make finetune ARGS=.--model": "needs a model of the reader's",
        r"python -m benchmarks.bench_remote": "measures for minutes, partly with hivemind",
    }
)
# Page: a line of a Python block -> the test that runs it, or why none does.
BLOCKS = MappingProxyType(
    {
        ("fmoefy", "AutoModelForCausalLM.from_pretrained("): "downloads 60 GB",
        ("formats", "mtp_loss=0.3"): "tests/formats/test_formats_mtp.py",
        ("README", "GPTModel(...)"): "tests/megatron_lm/test_megatron_core.py",
        ("fmoefy", "GPTModel(...)"): "tests/megatron_lm/test_megatron_core.py",
        ("from_deepspeed", "world_size=4"): "needs four processes",
        ("megatron", "use_transformer_engine=True"): "Transformer Engine needs a GPU",
        ("megatron", "load_dense=load"): "tests/megatron_lm/test_megatron_core.py",
        **dict.fromkeys(
            (
                *(("recipe", "turns = [("), ("recipe", "def examples"), ("recipe", "def ask")),
                *(("recipe", "trainer.train()"), ("recipe", "xllamacpp.Server")),
            ),
            "tests/finetune/test_recipe.py",
        ),
        ("remote", "DHT(initial_peers"): "tests/remote/test_page.py",
        ("remote", "RemoteMixtureOfExperts("): "tests/remote/test_page.py",
        ("several_processes", "init_groups(ep=4)"): "needs four processes",
        ("several_processes", "mlp.spread("): "needs four processes",
        ("transformers", "huggingface.expert_parallel("): "tests/huggingface/test_huggingface_ep.py",
    }
)
LONG = (
    *("adapters", "audit", "checkpoints", "compress", "doctor", "finetune", "formats", "pipeline"),
    *("telemetry", "transformers"),
)
NEEDS_THE_CLONE = re.compile(
    r"make |.*\b(examples|benchmarks|tests)/|.*-m benchmarks\.|pip install (-e )?'?\."
)


def known_of(command):
    """The entries of EXCEPTED and COVERED that a command matches, the first one counts."""
    return [pattern for pattern in (*EXCEPTED, *COVERED) if re.match(pattern, command)]


def listed_of(page, code):
    return [key for key in BLOCKS if key[0] == page and key[1] in code]


def has_code(path):
    return path.parent.name != "tutorials" and any(
        (language == "python" and not listed_of(path.stem, code))
        or (language in ("sh", "bash") and any(not known_of(command) for command, _ in commands_of(code)))
        for language, code, _ in blocks(path)
    )


def mark(path):
    marks = [pytest.mark.long] if path.stem in LONG else []
    return pytest.param(path, marks=marks, id=name_of(path))


@pytest.mark.parametrize("path", [mark(path) for path in WITH_COMMANDS if has_code(path)])
def test_page_runs_from_an_empty_folder(path, clean_state):
    """A block that begins with "# name.py" is that file."""
    names = {"__name__": "__main__"}
    for language, code, line in blocks(path):
        if language == "python" and not listed_of(path.stem, code):
            if file := re.match(r"# (\w+\.py)\n", code):
                clean_state.joinpath(file[1]).write_text(code)
            else:
                run_python(code, path, line, names)
        for command, status in commands_of(code) if language in ("sh", "bash") else []:
            if not known_of(command):
                run_command(command, clean_state, status)


def test_list_of_what_does_not_run_names_tests_that_exist():
    used = set()
    for path in WITH_COMMANDS:
        for language, code, _ in blocks(path):
            if language == "python":
                used.update(listed_of(path.stem, code)[:1])
            elif language in ("sh", "bash") and path.parent.name != "tutorials":
                used.update(known_of(command)[0] for command, _ in commands_of(code) if known_of(command))
    assert used == {*EXCEPTED, *COVERED, *BLOCKS}, "no page has these any more"
    for test in (*COVERED.values(), *BLOCKS.values()):
        assert not test.startswith("tests/") or ROOT.joinpath(test).exists(), test


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=name_of)
def test_page_says_which_commands_need_the_clone(path):
    text = path.read_text()
    for language, code, line in blocks(path):
        before = "\n".join(text.splitlines()[: line - 1])
        for command, _ in commands_of(code) if language in ("sh", "bash") else []:
            assert not NEEDS_THE_CLONE.match(command) or re.search(r"\bclone\b", before), (
                f"{name_of(path)}:{line} does not say that {command!r} runs in the clone"
            )


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=name_of)
def test_blocks_of_commands_are_marked_as_such(path):
    """A block without a language is output; the tests would not see its commands."""
    for language, code, line in blocks(path):
        first = re.match(
            r"(?:\w+=\S+ )*(?:fmoe|fmoe-\w+|python|pip|pytest|make|torchrun|\.venv/\S+) \S", code
        )
        assert language or not first, f"{name_of(path)}:{line} is no sh block"
