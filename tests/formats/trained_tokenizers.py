"""Small tokenizers of every kind that GGUF has, trained here, and texts in many scripts."""

import random
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SCRIPTS = (  # ranges of code points
    ((0x20, 0x7E), (0xA1, 0x24F)),  # Latin
    ((0x370, 0x3FF), (0x400, 0x52F), (0x531, 0x58F), (0x10A0, 0x10FF)),  # Greek, Cyrillic, Armenian, Georgian
    ((0x5D0, 0x5EA), (0x620, 0x6D3)),  # Hebrew, Arabic
    ((0x900, 0x97F), (0x980, 0x9FE), (0xB82, 0xBFA)),  # Devanagari, Bengali, Tamil
    ((0xE01, 0xE5B), (0xF00, 0xFDA), (0x1780, 0x17F9)),  # Thai, Tibetan, Khmer
    ((0xAC00, 0xD7A3), (0x3041, 0x30FF)),  # Hangul, Kana
    ((0x4E00, 0x9FFF), (0x20000, 0x2A6DF)),  # Han
    ((0x2200, 0x22FF), (0x1D400, 0x1D7FF)),  # mathematics
    ((0x1F300, 0x1F6FF), (0x1F900, 0x1F9FF), (0x1F1E6, 0x1F1FF)),  # emoji
    ((0x61, 0x7A), (0x300, 0x36F)),  # letters with marks
    ((0x2010, 0x205E), (0x3000, 0x303F), (0xFF01, 0xFF65)),  # punctuation
    ((0x30, 0x39), (0x660, 0x669), (0x2160, 0x2188)),  # digits
)
WORDS = """
    I'm don't We'Ve they'LL it's HELLO World camelCase snake_case 3.14159 1234567890 2026-11-28 naïve Straße 100%
    $5.00 @user #tag (x) [y] {z} ... !!! --> == != <= ``` '' "" \u2019s \u201c\u201d https://example.org/a?b=c#d
    if(x){y[i]*=2;} while True:
""".split()  # noqa: SIM905 - as a list it is 34 lines
SPACES = (
    *(" " * n for n in (1, 1, 1, 2, 4, 17)),
    *"\n\t",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    " \t ",
    "\u00a0",
    "\u3000",
)


def texts(count, seed=0, special=SPECIAL):
    """Words, code, runs of spaces, emoji and special tokens; in NFC, as llama.cpp takes text."""
    draw = random.Random(seed)

    def word():
        kind = draw.random()
        if kind < 0.4:
            return draw.choice(WORDS)
        if kind < 0.43 and special:
            return draw.choice(special)
        script = draw.choice(SCRIPTS)
        letters = (chr(draw.randint(*draw.choice(script))) for _ in range(draw.randint(1, 8)))
        return "".join(c for c in letters if unicodedata.category(c) not in ("Cn", "Co", "Cs"))

    def text():
        return "".join(word() + draw.choice(("", *SPACES)) for _ in range(draw.randint(1, 10)))

    return [unicodedata.normalize("NFC", text()) for _ in range(count)]


def wrapped(backend, **options):
    """The tokenizer of Transformers around one of the package tokenizers."""
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**names, **options})


def byte_level(expressions, size=600, ignore_merges=False, normalizer=None, **options):
    """Bytes as letters, cut into words by expressions one after the other."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts(300, seed=1, special=()), trainer)
    return wrapped(backend, **options)


def sentencepiece(prefix=True, complete=True, size=900):
    """Spaces as ▁ and unknown characters as bytes, without words.

    complete: with all merges that make a token, as Transformers has them of SentencePiece's files.
    """
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, limit_alphabet=200, show_progress=False, max_token_length=8
    )
    words = [text.replace("\n", " ").replace(" ", "▁") for text in texts(300, seed=1, special=())]
    backend.train_from_iterator(words, trainer)
    vocab, merges = backend.get_vocab(), []
    for token in sorted(vocab, key=vocab.get)[len(special) :]:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])) if complete else pairs[:1]
    made = {left + right for left, right in merges}
    vocab = {token: i for token, i in vocab.items() if len(token) == 1 or token in special or token in made}
    ids = {token: i for i, token in enumerate(sorted(vocab, key=vocab.get))}
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrapped(backend, bos_token="<s>", unk_token="<unk>")
