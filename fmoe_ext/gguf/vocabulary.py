"""Translate a Transformers tokenizer into the vocabulary of a GGUF file, by which llama.cpp turns text into token ids.

A fast tokenizer is a chain of steps: a normalizer changes the text, special tokens are cut out, a pre-tokenizer cuts
the rest into words, and byte-pair merges build tokens from the characters of each word. llama.cpp has such chains in
its code. A file picks one by two names, and brings the tokens:

    tokenizer.ggml.model   how words become tokens
        gpt2     bytes are written as letters; merges by their rank
        llama    SentencePiece: merges by the score of the token that they make; bytes of unknown characters are <0x00>
        gemma4   merges by their rank; bytes of unknown characters are <0x00> to <0xFF>
    tokenizer.ggml.pre     the regular expressions that cut text into words, named after the first model that had them

llama.cpp's converter recognises a pre-tokenizer by a hash of the ids that it gives to a sample text, so every new
vocabulary needs an entry. Here the expressions themselves are compared (PRE_TOKENIZERS). gguf.SpecialVocab guesses
where special tokens go; here the tokenizer is run and its output looked at. Text that llama.cpp would cut otherwise is
refused with the reason, before anything is written; where only spaces, or tokens around a text, are treated otherwise,
a warning says so. read_vocabulary() is the entry.
"""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.model_folder import local_path

_SPACE = "▁"  # stands for a space in SentencePiece's tokens
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # tokens for characters that have none
# Added tokens of chat templates count as special although they do not say so: llama.cpp's converter does the same
_FOR_TEMPLATES = re.compile(r"<\|.*\|>|<\uff5c.*\uff5c>", re.DOTALL)

# Parts that the expressions of tokenizer.json files share: English contractions in any case, runs of white space,
# letters by their case. They must be those files' text to the letter, because expressions are compared as text
_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_HAN = r"&&[^\p{Han}]"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_CASED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = rf"{_CASED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CASED}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CASED}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]*[{_LOWER}{_NOT_HAN}]+{_CASED}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]+[{_LOWER}{_NOT_HAN}]*{_CASED}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_CJK_OF_DEEPSEEK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with a case, as escapes: some look like others
_CASED_LETTERS = (
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[A-Za-z{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK_OF_DEEPSEEK,
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
# {expressions of a pre-tokenizer, in order: its two names in llama.cpp}. The first name is for a tokenizer that merges
# the letters of every word, the second for one that takes a word whole if it is a token (ignore_merges); "" if none
PRE_TOKENIZERS: Mapping[tuple[str, ...], tuple[str, str]] = MappingProxyType(
    {
        (_GPT2,): ("gpt-2", ""),
        (r"\p{N}", _GPT2): ("starcoder", ""),
        (_LLAMA3,): ("dbrx", "llama-bpe"),
        (_QWEN2,): ("qwen2", ""),
        (_QWEN35,): ("qwen35", ""),
        (_GPT4O,): ("gpt-4o", ""),
        (_TEKKEN,): ("", "tekken"),
        (_KIMI,): ("kimi-k2", ""),
        (_BAILING,): ("bailingmoe", ""),
        _DEEPSEEK_LLM: ("deepseek-llm", ""),
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OF_DEEPSEEK, r"\p{N}"): ("deepseek-coder", ""),
        _DEEPSEEK_V3: ("deepseek-v3", ""),
    }
)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a GGUF file, in llama.cpp's terms."""

    model: str  # the kind of tokenizer: gpt2, llama or gemma4
    pre: str  # the name of its pre-tokenizer
    tokens: Sequence[str]  # a token for each row of the embeddings
    types: Sequence[int]  # gguf.TokenType of each
    scores: Sequence[float]  # of each, by which SentencePiece merges; empty for other kinds
    merges: Sequence[str]  # "left right", the first to merge first; empty for SentencePiece
    ids: Mapping[str, int]  # of special tokens: bos, eos, unk, pad, ...
    adds: Mapping[str, bool]  # bos, eos: put before or behind a text; space_prefix
    chat_template: str | Sequence[Mapping[str, str]] | None

    def write(self, writer: Any) -> None:
        """Add all keys under tokenizer. to a gguf.GGUFWriter."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, number in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(number)
        for name, value in self.adds.items():
            # keys of special tokens are named after the token, this one is not
            if name == "space_prefix":
                writer.add_add_space_prefix(value)
            else:
                getattr(writer, f"add_add_{name}_token")(value)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def read_vocabulary(tokenizer: Any, config: Any, stops: Iterable[int] = ()) -> Vocabulary:
    """Describe a tokenizer for llama.cpp.

    tokenizer: of Transformers, fast (with a tokenizer.json); or a folder or name of one, whose tokenizer.json is taken
    as it is. config: the model's, for the number of rows of its embeddings. stops: further ids at which the model ends
    an answer, as generation_config.json has them.
    Raises CheckpointError for words that llama.cpp makes otherwise; warns of other spaces or tokens around a text.
    """
    # The chain of steps, as tokenizer.json has it
    tokenizer, name = _open_tokenizer(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise CheckpointError(
            f"{name} is {type(tokenizer).__name__}, which has no tokenizer.json: load it by "
            "transformers.PreTrainedTokenizerFast, or give a folder that has one"
        )
    chain: dict[str, Any] = json.loads(backend.to_str())
    model = chain["model"]
    if model["type"] != "BPE":
        raise _refusal(name, f"its model is {model['type']}, and llama.cpp's for such models is BPE")
    odd = [key for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model.get(key)]
    if odd:
        raise _refusal(name, f"{odd[0]}={model[odd[0]]!r} of its BPE model has no key in GGUF")
    # "left right" in older files, [left, right] in newer ones
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    # Which of llama.cpp's kinds it is: gpt2 works on bytes; llama if scores can stand for the merges; else gemma4
    adds: dict[str, bool] = {}
    scores: dict[str, float] = {}
    steps = _flat(chain["pre_tokenizer"], "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if is_byte_level:
        kind, pre = "gpt2", _name_of(name, backend, chain, steps)
    else:
        adds["space_prefix"] = _adds_space(name, chain, steps)
        scores = _scores_of(model["vocab"], merges)
        kind, pre = "llama", "default"
        if scores:
            merges = []
        elif adds.pop("space_prefix"):
            raise _refusal(name, "its merges are not in the order of SentencePiece's scores")
        else:
            kind = pre = "gemma4"
            # its words end at line breaks, and a merge is written as two tokens with a space between
            if odd := [a + b for a, b in merges if " " in a + b or ("\n" in a + b and (a + b).strip("\n"))]:
                raise _refusal(name, f"{odd[0]!r} is made of parts that its kind of merges keeps apart")

    # The tokens, and what is put around a text
    tokens, types = _tokens(name, chain, config.vocab_size, is_byte_level)
    ids = _special_ids(name, tokenizer, config, stops)
    adds |= _around(name, tokenizer, ids)
    if kind == "gemma4" and not adds["bos"]:
        raise _refusal(
            name, "llama.cpp puts a bos token before each text for its kind of merges, and it does not"
        )
    template = tokenizer.chat_template
    # several templates by name
    if isinstance(template, Mapping):
        template = [{"name": key, "template": text} for key, text in template.items()]
    return Vocabulary(
        model=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=[scores.get(token, 0.0) for token in tokens] if scores else (),
        merges=[" ".join(pair) for pair in merges],
        ids=ids,
        adds=adds,
        chat_template=template,
    )


def _open_tokenizer(tokenizer: Any) -> tuple[Any, str]:
    """Open a tokenizer -> (it, its name for errors), from a folder, a name in the hub's cache, or itself."""
    if hasattr(tokenizer, "save_pretrained"):
        return tokenizer, getattr(tokenizer, "name_or_path", "") or "the tokenizer"
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = local_path(tokenizer, ())
    # AutoTokenizer would build the chain of the class that tokenizer_config.json names, perhaps not the file's
    has_chain = (folder / "tokenizer.json").is_file()
    loader: Any = PreTrainedTokenizerFast if has_chain else AutoTokenizer
    try:
        return loader.from_pretrained(folder, local_files_only=True), str(folder)
    except Exception as error:  # of any class, by the kind of tokenizer
        raise CheckpointError(
            f"{folder} has no tokenizer that Transformers reads ({type(error).__name__}: {error})"
        ) from error


def _scores_of(vocab: Mapping[str, int], merges: Sequence[tuple[str, ...]]) -> dict[str, float]:
    """Compute scores of tokens with which SentencePiece merges in the order of a list of merges; {} if there are none.

    SentencePiece joins the neighbours whose joined token has the best score, whichever pair makes it: "abc" is as good
    from "a", "bc" as from "ab", "c". So all pairs of tokens that make a token must be merges, and stand together.
    """
    scores: dict[str, float] = {}
    pairs: dict[str, int] = {}  # {token: number of merges that make it}
    last = ""
    for left, right in merges:
        token = left + right
        if token != last and token in scores:  # another token's merges stand between two of this one
            return {}
        last = token
        scores.setdefault(token, -float(len(scores) + 1))  # earlier merges have the higher score
        pairs[token] = pairs.get(token, 0) + 1
    # Every way to split a token in two tokens must be a merge
    for token in vocab:
        splits = sum(token[:i] in vocab and token[i:] in vocab for i in range(1, len(token)))
        if splits != pairs.get(token, 0) and token not in _BYTES:
            return {}
    return scores


def _refusal(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"llama.cpp cannot read text as {name} does: {why}. Export without tokenizer=, or train with another tokenizer"
    )


def _flat(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Flatten a normalizer or pre-tokenizer -> its steps; `inner` is the key of a Sequence's steps."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [one for part in step[inner] for one in _flat(part, inner)]
    return [step]


def _name_of(name: str, backend: Any, chain: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    """Find llama.cpp's name of a pre-tokenizer of kind gpt2, by its regular expressions."""
    for step in _flat(chain["normalizer"], "normalizers"):
        if step["type"] != "NFC":  # which llama.cpp leaves out for Qwen too: text comes in NFC
            raise _refusal(name, f"its normalizer has {step['type']}, and llama.cpp's has none")
    # Write each step as one regular expression
    expressions = []
    for step in steps:
        if step["type"] == "Split" and "Regex" in step["pattern"]:
            # "Isolated" keeps matches and what lies between. Inverted "Removed" drops what lies between, which is
            # the same for an expression that matches everything, as those do that end in _SPACES
            way = step["behavior"], step["invert"]
            if way == ("Isolated", False) or (
                way == ("Removed", True) and step["pattern"]["Regex"].endswith(_SPACES)
            ):
                expressions.append(step["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n"))
                continue
        elif step["type"] == "Digits":
            expressions.append(r"\p{N}" if step["individual_digits"] else r"\p{N}+")
            continue
        elif step["type"] == "ByteLevel":
            if step["add_prefix_space"]:
                raise _refusal(name, "it puts a space before each text (add_prefix_space)")
            expressions += [_GPT2] if step["use_regex"] else []
            continue
        expressions.append(json.dumps(step, ensure_ascii=False))
    # Compare them with those that llama.cpp has
    found = PRE_TOKENIZERS.get(tuple(expressions))
    if found is None:
        known = ", ".join(other for names in PRE_TOKENIZERS.values() for other in names if other)
        raise _refusal(name, f"its pre-tokenizer {expressions} is none of {known}")
    takes_whole = bool(chain["model"].get("ignore_merges"))
    if found[takes_whole]:
        return found[takes_whole]
    # llama.cpp has the other kind only. Both agree if merges build every token from its letters
    if unmade := _tokens_not_made(backend, chain):
        raise _refusal(
            name,
            f"its pre-tokenizer is {found[not takes_whole]} but for ignore_merges={takes_whole}, and merges do not "
            f"make {len(unmade)} of its tokens, as {unmade[0]!r}",
        )
    return found[not takes_whole]


def _tokens_not_made(backend: Any, chain: Mapping[str, Any]) -> list[str]:
    """Return the tokens that merging their letters does not build: only ignore_merges finds them."""
    # the merges alone: the tokens of the vocabulary are in its letters already
    bare = dict(
        chain, normalizer=None, pre_tokenizer=None, post_processor=None, decoder=None, added_tokens=[]
    )
    bare["model"] = dict(chain["model"], ignore_merges=False)
    added = {token["content"] for token in chain["added_tokens"]}
    tokens = [token for token in chain["model"]["vocab"] if token not in added]
    made = type(backend).from_str(json.dumps(bare)).encode_batch_fast(tokens)
    return [token for token, one in zip(tokens, made, strict=True) if len(one.ids) > 1]


def _adds_space(name: str, chain: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """True if a chain of SentencePiece's kind puts a space before a text; CheckpointError for other chains.

    Spaces become "▁" either in the normalizer (Prepend, Replace) or in the pre-tokenizer (Metaspace).
    """
    normal = _flat(chain["normalizer"], "normalizers")
    # By the normalizer: Prepend puts one before a text, Replace writes the others
    adds = {"type": "Prepend", "prepend": _SPACE} in normal
    replaces = any(
        step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _SPACE
        for step in normal
    )
    others = [step["type"] for step in normal if step["type"] not in ("Prepend", "Replace")]
    for step in steps:
        if step["type"] == "Metaspace" and step["replacement"] == _SPACE and not step["split"] and not normal:
            replaces, adds = True, step["prepend_scheme"] != "never"
            if adds:
                warnings.warn(
                    f"{name} puts no space before a text that begins with one"
                    + (", nor behind a special token" if step["prepend_scheme"] == "first" else "")
                    + "; llama.cpp does",
                    stacklevel=2,
                )
        elif not (step["type"] == "Split" and step["pattern"] == {"String": " "} and replaces):
            others.append(step["type"])  # a text without spaces has nothing to split at
    # Any other step would change text in a way that llama.cpp does not
    if others or not replaces or len(normal) > 1 + adds:
        raise _refusal(
            name, f"it is neither of GPT-2's kind nor of SentencePiece's ({', '.join(others) or 'no spaces'})"
        )
    vocab = chain["model"]["vocab"]
    if not chain["model"].get("byte_fallback") or not vocab.keys() >= set(_BYTES):
        raise _refusal(
            name, "it has no tokens <0x00> to <0xFF> for the bytes of unknown characters (byte_fallback)"
        )
    return adds


def _tokens(
    name: str, chain: Mapping[str, Any], rows: int, is_byte_level: bool
) -> tuple[list[str], list[int]]:
    """Return (texts, gguf.TokenTypes), one for each row of the embeddings; rows without a token are unused."""
    from gguf import TokenType

    vocab = chain["model"]["vocab"]
    added = {token["id"]: token for token in chain["added_tokens"]}
    highest = max([*vocab.values(), *added])
    if highest >= rows:
        raise CheckpointError(
            f"{name} has token {highest}, but the model {rows} embeddings: call model.resize_token_embeddings(), or "
            "give the tokenizer that it was trained with"
        )
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [TokenType.UNUSED] * rows
    unknown = chain["model"].get("unk_token")
    for token, i in vocab.items():
        tokens[i], types[i] = token, TokenType.NORMAL
    # After the others: added tokens may be in the vocabulary too, and their type counts
    for i, token in added.items():
        text = token["content"]
        is_control = token["special"] or _FOR_TEMPLATES.fullmatch(text)
        # llama.cpp looks for these in the text as it is, before its spaces are written as SentencePiece's
        tokens[i] = text if is_byte_level else text.replace(_SPACE, " ")
        types[i] = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
        if text == unknown:
            types[i] = TokenType.UNKNOWN
    if not is_byte_level:
        for byte in _BYTES:
            types[vocab[byte]] = TokenType.BYTE
    # What llama.cpp does otherwise: a warning, or an error
    stripped = [token["content"] for token in added.values() if token["lstrip"] or token["rstrip"]]
    if stripped:
        warnings.warn(
            f"{name} drops spaces beside {', '.join(stripped[:5])}{' and others' if len(stripped) > 5 else ''}; "
            "llama.cpp keeps them: write none there",
            stacklevel=2,
        )
    if len(set(tokens)) < rows:
        twice = Counter(tokens).most_common(1)[0][0]
        raise _refusal(name, f"it has two tokens {twice!r}")
    return tokens, [int(kind) for kind in types]


def _special_ids(name: str, tokenizer: Any, config: Any, stops: Iterable[int]) -> dict[str, int]:
    # {kind: token id}, by the tokenizer, or else by the configuration
    ids: dict[str, int] = {}
    for kind in ("bos", "eos", "unk", "sep", "pad", "mask"):
        number = getattr(tokenizer, f"{kind}_token_id", None)
        if number is None and kind in ("bos", "eos", "pad"):
            number = getattr(config, f"{kind}_token_id", None)
        if isinstance(number, list):  # a configuration's list: the others end an answer, too
            number, *more = number or [None]
            stops = [*stops, *more]
        if number is not None and 0 <= number < config.vocab_size:
            ids[kind] = int(number)
    if "eos" not in ids:
        raise CheckpointError(
            f"{name} has no eos token, and a server would not know where an answer ends: set tokenizer.eos_token"
        )
    # Without the key llama.cpp would take token 11 (gpt2) or 1 (llama), whatever they are here
    ids.setdefault("bos", ids["eos"])
    # Other ids that end an answer become eot and eom, the two further keys that end one
    further = sorted(n for n in {*stops} - {ids["eos"]} if 0 <= n < config.vocab_size)
    for kind, number in zip(("eot", "eom"), further, strict=False):
        ids[kind] = int(number)
    if further[2:]:  # a warning only: llama.cpp finds some by their texts
        warnings.warn(
            f"GGUF has keys for three tokens at which an answer ends: {further[2:]} of generation_config have none",
            stacklevel=2,
        )
    return ids


def _around(name: str, tokenizer: Any, ids: Mapping[str, int]) -> dict[str, bool]:
    """Return {"bos": is it put before each text, "eos": is it put behind each}, for add_bos_token and add_eos_token."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    # find the text's own tokens: the tokenizer adds those around them to every text
    begin = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    before, behind = whole[:begin], whole[begin + len(bare) :]
    for where, found, kind in (("before", before, "bos"), ("behind", behind, "eos")):
        if found not in ([], [ids[kind]]):
            warnings.warn(
                f"{name} puts {''.join(tokenizer.convert_ids_to_tokens(found))} {where} each text, which llama.cpp "
                "does not: a chat template has to",
                stacklevel=2,
            )
    return {"bos": before == [ids["bos"]], "eos": behind == [ids["eos"]]}
