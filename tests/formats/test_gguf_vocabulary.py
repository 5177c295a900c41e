"""tokenizer= of export() as GGUF: llama.cpp reads text as Transformers does, or the tokenizer is refused by name."""

import json
import re
import unicodedata
import warnings

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

import fmoe_ext
from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.gguf.vocabulary import PRE_TOKENIZERS, read_vocabulary
from tests.formats.test_gguf import llama_cpp_or_skip
from tests.formats.trained_tokenizers import SPECIAL, byte_level, sentencepiece, texts, wrapped
from tests.sweeps import one_is_long

KINDS = {name: steps for steps, names in PRE_TOKENIZERS.items() for name in names if name}
QWEN2 = KINDS["qwen2"]
# llama.cpp writes these expressions with ASCII's cases, and without marks (\p{M}): it cuts a few words of other letters
# elsewhere
INEXACT = ("gpt-4o", "tekken", "kimi-k2")
CASED = ("Lu", "Ll", "Lt", "Mn", "Mc", "Me")


def make_model(rows, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": None, "head_dim": 16}
    config = MixtralConfig(vocab_size=rows, bos_token_id=None, eos_token_id=None, **sizes, **heads, **options)
    return fmoe_ext.import_model(MixtralForCausalLM(config))


def written(tokenizer, folder, rows=1024, model=None):
    fmoe_ext.export(model or make_model(rows), folder, "gguf", tokenizer=tokenizer)
    return folder / "model.gguf"


def fields(file):
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def trained(name):
    return byte_level(KINDS[name], ignore_merges=name in ("llama-bpe", "tekken"))


def assert_llama_cpp_reads(tokenizer, file, count, seed=0):
    """The same ids of texts, the same bytes of ids."""
    llama_cpp = llama_cpp_or_skip()
    given = texts(count, seed)
    with llama_cpp.Vocabulary(file) as vocabulary:
        expected = tokenizer(given, add_special_tokens=False)["input_ids"]
        assert len({i for ids in expected for i in ids}) > min(300, count)
        differ = [text for text, ids in zip(given, expected, strict=True) if vocabulary.encode(text) != ids]
        if file.parent.name in INEXACT:
            assert len(differ) < count // 20
            cased = [any(c > "\x7f" and unicodedata.category(c) in CASED for c in text) for text in differ]
            differ = [text for text, is_cased in zip(differ, cased, strict=True) if not is_cased]
        if file.parent.name == "deepseek-llm":
            # llama.cpp ends white space before an ideographic space elsewhere
            assert len(differ) <= count // 1000
            differ = [text for text in differ if not re.search("\\s\u3000", text)]
        assert not differ
        assert vocabulary.encode("a b", special=True) == tokenizer("a b")["input_ids"]
        backend = tokenizer.backend_tokenizer
        for i in range(len(tokenizer)):
            assert vocabulary.piece(i).decode(errors="replace") == backend.decode(
                [i], skip_special_tokens=False
            ), i
        assert vocabulary.ends(tokenizer.eos_token_id)


@pytest.mark.parametrize("name", KINDS)
def test_byte_level(name, tmp_path):
    """Each pre-tokenizer that has a name: the keys, llama.cpp's ids of 300 texts, the bytes of each token."""
    tokenizer = trained(name)
    file = written(tokenizer, tmp_path / name)
    found = fields(file)
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == name
    vocab = tokenizer.get_vocab()
    assert found["tokenizer.ggml.tokens"][: len(vocab)] == sorted(vocab, key=vocab.get)
    assert found["tokenizer.ggml.token_type"][len(vocab) - 3 :] == [3] * 3 + [5] * (1024 - len(vocab))
    assert found["tokenizer.ggml.eos_token_id"] == vocab["<|im_end|>"]
    assert found["tokenizer.ggml.padding_token_id"] == vocab["<|endoftext|>"]
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    assert_llama_cpp_reads(tokenizer, file, 300)


@pytest.mark.parametrize("name", one_is_long([*KINDS, "sentencepiece", "gemma4"]))
def test_ten_thousand_texts(name, tmp_path):
    tokenizer = {"sentencepiece": sentencepiece, "gemma4": gemma}.get(name, lambda: trained(name))()
    count = 3_000 if name in INEXACT else 10_000  # llama.cpp takes ten times as long for these
    assert_llama_cpp_reads(tokenizer, written(tokenizer, tmp_path / name), count, seed=3)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix, tmp_path):
    """Scores instead of merges, bytes, and the space before a text."""
    tokenizer = sentencepiece(prefix)
    file = written(tokenizer, tmp_path / "out")
    found = fields(file)
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.pre"] == "default"
    assert found["tokenizer.ggml.add_space_prefix"] is prefix and "tokenizer.ggml.merges" not in found
    assert found["tokenizer.ggml.bos_token_id"] == 1 and found["tokenizer.ggml.add_bos_token"] is False
    types = found["tokenizer.ggml.token_type"]
    assert types[:3] == [2, 3, 3] and types[3:259] == [6] * 256 and types[259] == 1
    assert_llama_cpp_reads(tokenizer, file, 300)


def gemma():
    """Merges that SentencePiece's scores cannot say, a bos token before each text."""
    tokenizer = sentencepiece(prefix=False, complete=False)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def test_merges_of_gemma(tmp_path):
    tokenizer = gemma()
    file = written(tokenizer, tmp_path / "out")
    found = fields(file)
    assert found["tokenizer.ggml.model"] == found["tokenizer.ggml.pre"] == "gemma4"
    assert len(found["tokenizer.ggml.merges"]) > 100 and "tokenizer.ggml.scores" not in found
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert_llama_cpp_reads(tokenizer, file, 300)


def test_folder_and_tokenizer_are_one(tmp_path):
    """A folder's tokenizer.json is taken as it is, whatever class tokenizer_config.json names."""
    tokenizer = byte_level(QWEN2)
    tokenizer.save_pretrained(tmp_path / "folder")
    config = json.loads((tmp_path / "folder/tokenizer_config.json").read_text())
    config["tokenizer_class"] = "LlamaTokenizer"  # as DeepSeek's folders say, with bytes as letters
    (tmp_path / "folder/tokenizer_config.json").write_text(json.dumps(config))
    first = fields(written(tokenizer, tmp_path / "a"))
    second = fields(written(tmp_path / "folder", tmp_path / "b"))
    assert {k: v for k, v in first.items() if "tokenizer" in k} == {
        k: v for k, v in second.items() if "tokenizer" in k
    }


def test_ignore_merges_is_told_apart_where_it_counts():
    """A token that no merges make is found by one of the two alone."""
    config = MixtralConfig(vocab_size=1024)
    steps = KINDS["llama-bpe"]
    assert read_vocabulary(byte_level(steps, ignore_merges=True), config).pre == "llama-bpe"
    assert read_vocabulary(byte_level(steps), config).pre == "dbrx"
    # Qwen's expressions have no name with ignore_merges, but here merges make each token
    assert read_vocabulary(byte_level(QWEN2, ignore_merges=True), config).pre == "qwen2"
    tokenizer = byte_level(QWEN2, ignore_merges=True)
    chain = json.loads(tokenizer.backend_tokenizer.to_str())
    chain["model"]["merges"].pop()
    lacking = wrapped(Tokenizer.from_str(json.dumps(chain)))
    with pytest.raises(
        CheckpointError, match=r"qwen2 but for ignore_merges=True, and merges do not make 1 of"
    ):
        read_vocabulary(lacking, config)


def test_added_tokens(tmp_path):
    """Tokens of the template are hidden, others shown; further ends of an answer and named templates are written."""
    tokenizer = byte_level(QWEN2)
    tokenizer.add_tokens(["<tool_call>", "<|User|>"])
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    model = make_model(1024)
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>", "<tool_call>"])
    model.generation_config.eos_token_id = ids
    found = fields(written(tokenizer, tmp_path / "out", model=model))
    types = found["tokenizer.ggml.token_type"]
    assert types[len(tokenizer) - 2 : len(tokenizer)] == [4, 3]
    assert found["tokenizer.ggml.eot_token_id"] == ids[1] and found["tokenizer.ggml.eom_token_id"] == ids[2]
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert found["tokenizer.chat_template.tool_use"] == "{{ tools }}"
    with pytest.warns(UserWarning, match=r"three tokens at which an answer ends: \[9\] of generation_config"):
        read_vocabulary(tokenizer, model.config, [ids[0], 7, 8, 9])


def test_ids_at_which_an_answer_ends():
    """By the configuration where the tokenizer has none; what is no token is left out."""
    tokenizer = byte_level(QWEN2)
    tokenizer.eos_token = None
    config = MixtralConfig(vocab_size=1024, eos_token_id=[5, 6])
    assert (
        read_vocabulary(tokenizer, config, [-1, 1024, 8]).ids.items()
        >= {"eos": 5, "eot": 6, "eom": 8}.items()
    )
    config.eos_token_id = []
    with pytest.raises(CheckpointError, match="has no eos token"):
        read_vocabulary(tokenizer, config)


def test_pruned_file_keeps_its_vocabulary(tmp_path):
    """Keys, types and order of tokenizer.*, and llama.cpp's ids."""
    from fmoe_ext.compress import prune

    tokenizer = sentencepiece()
    file = written(tokenizer, tmp_path / "whole")
    ids = tokenizer(" ".join(texts(60)), return_tensors="pt")["input_ids"][0]
    prune(file, tmp_path / "out", ids, experts=2, seq_len=16)
    before, after = fields(file), fields(tmp_path / "out/model.gguf")
    assert after["llama.expert_count"] == 2 and len([key for key in after if "tokenizer." in key]) > 10
    assert {k: v for k, v in before.items() if "expert_count" not in k} == {
        k: v for k, v in after.items() if "expert_count" not in k
    }
    assert_llama_cpp_reads(tokenizer, tmp_path / "out/model.gguf", 50)


def test_next_tokens_and_an_answer(tmp_path):
    """Greedy text of llama.cpp's server, through the chat template, is Transformers'."""
    llama_cpp_or_skip()
    import xllamacpp

    tokenizer, model = byte_level(QWEN2), make_model(640).float().eval()
    file = written(tokenizer, tmp_path / "out", model=model)
    messages = [{"role": "user", "content": "Where is the 東京 tower?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    prompt = prompt if isinstance(prompt, torch.Tensor) else prompt["input_ids"]
    with torch.no_grad():
        whole = model.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=-1)
    expected = tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.cpuparams.n_threads = str(file), 256, 1
    server = xllamacpp.Server(params)
    answer = server.handle_chat_completions(
        {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    )
    assert answer["usage"]["prompt_tokens"] == prompt.shape[1]
    assert answer["choices"][0]["message"]["content"] == expected and len(expected) > 8


REFUSED = {
    "its model is Unigram": lambda: PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)), eos_token="<unk>"
    ),
    r"its pre-tokenizer \['\[a-z\]\+'\] is none of gpt-2, ": lambda: byte_level(["[a-z]+"]),
    "its normalizer has NFKC": lambda: byte_level(QWEN2, normalizer=normalizers.NFKC()),
    "its normalizer has Lowercase": lambda: byte_level(QWEN2, normalizer=normalizers.Lowercase()),
    "it puts a space before each text": lambda: with_prefix_space(byte_level(QWEN2)),
    "its merges are not in the order of": lambda: sentencepiece(complete=False),
    "puts a bos token before each text": lambda: sentencepiece(prefix=False, complete=False),
    "has no tokens <0x00> to <0xFF>": lambda: without_bytes(sentencepiece()),
    r"has token 1102, but the model 1024 embeddings: call model\.resize": lambda: byte_level(
        QWEN2, size=1100
    ),
    "has no eos token, and a server": lambda: byte_level(QWEN2, eos_token=None),
}


def with_prefix_space(tokenizer):
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(QWEN2[0]), "isolated"), pre_tokenizers.ByteLevel(True, use_regex=False)]
    )
    return tokenizer


def without_bytes(tokenizer):
    chain = json.loads(tokenizer.backend_tokenizer.to_str())
    chain["model"]["byte_fallback"] = False
    return wrapped(Tokenizer.from_str(json.dumps(chain)))


@pytest.mark.parametrize("reason", REFUSED)
def test_other_tokenizers_are_refused_by_name(reason, tmp_path):
    with pytest.raises(CheckpointError, match=reason):
        written(REFUSED[reason](), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_warnings_name_lost_parts(tmp_path):
    """Without a tokenizer, and where spaces or tokens around a text are lost."""
    with pytest.warns(
        UserWarning, match=r"no vocabulary, so servers of llama\.cpp refuse it: export\(model, folder"
    ):
        fmoe_ext.export(make_model(640), tmp_path / "none", "gguf")
    assert fields(tmp_path / "none/model.gguf")["tokenizer.ggml.model"] == "no_vocab"
    tokenizer = byte_level(QWEN2)
    first, second = tokenizer.convert_tokens_to_ids(SPECIAL[:2])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} {SPECIAL[1]} $A",
        pair="$A $B",
        special_tokens=[(SPECIAL[0], first), (SPECIAL[1], second)],
    )
    with pytest.warns(UserWarning, match=r"puts <\|endoftext\|><\|im_start\|> before each text"):
        file = written(tokenizer, tmp_path / "two")
    assert fields(file)["tokenizer.ggml.add_bos_token"] is False
    spaced = sentencepiece(prefix=False)
    spaced.backend_tokenizer.normalizer = None
    spaced.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    with pytest.warns(UserWarning, match="puts no space before a text that begins with one; llama.cpp does"):
        assert read_vocabulary(spaced, MixtralConfig(vocab_size=1024)).adds["space_prefix"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(byte_level(QWEN2), tmp_path / "quiet")
