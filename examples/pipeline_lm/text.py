"""Words of a text as numbers, for train.py: load_text() reads and splits it, get_batch() cuts the windows of a step.

A text of N words becomes batch_size rows, each a stretch of N // batch_size words (batchify), and a step takes the next
bptt words of every row.
"""

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "lm"))
from data import DataError, load_corpus

UNKNOWN = "<unk>"
PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Text:
    """The words of three parts as int64 tensors, the words themselves, and where they come from."""

    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor
    words: list[str]
    source: str


def load_text(path=None, most_words=None, megabytes=0):
    """The text at path: the folder of WikiText's three files (wiki.train.tokens, ...), or what examples/lm takes.

    Without path it is the sources of Python's standard library. Words that are not in the training part, or not among
    its most_words most frequent, become <unk>, and count in the perplexity as such. megabytes: of text other than
    WikiText, so much of the beginning is for training and a fifth as much for validation and test; 0: all.
    """
    files = wiki_files(path)
    if files:
        parts = [tokenize(file.read_text("utf-8")) for file in files]
        source = str(path)
    else:
        try:
            corpus = load_corpus(path)
        except DataError as error:
            raise SystemExit(f"train.py: {error}") from None
        most = int(1e6 * megabytes) or None
        read = corpus.train[:most], corpus.valid[: most and max(1, most // 5)]
        train, rest = (tokenize(bytes(part.tolist()).decode("utf-8", "replace")) for part in read)
        parts = [train, rest[: len(rest) // 2], rest[len(rest) // 2 :]]
        source = corpus.source
    counts = Counter(parts[0])
    counts.pop(UNKNOWN, None)
    words = [UNKNOWN, *(word for word, _ in counts.most_common(most_words and most_words - 1))]
    number = {word: i for i, word in enumerate(words)}
    return Text(*(torch.tensor([number.get(word, 0) for word in part]) for part in parts), words, source)


def wiki_files(path):
    folder = Path(path) if path else None
    if folder is None or not folder.is_dir():
        return []
    found = [sorted(folder.glob(f"wiki.{part}.*")) for part in PARTS]
    return [files[0] for files in found] if all(found) else []


def tokenize(text):
    return re.findall(r"<unk>|\w+|[^\w\s]", text.lower())


def batchify(words, batch_size):
    """[N] -> [batch_size, N // batch_size]: each row is a stretch of the text; what fills no column is left out."""
    length = len(words) // batch_size
    return words[: length * batch_size].view(batch_size, length)


def num_batches(source, bptt):
    return (source.shape[1] - 1) // bptt


def get_batch(source, number, bptt):
    """(words, next words) [B, bptt] of window number; a last window shorter than bptt is left out."""
    begin = number * bptt
    return source[:, begin : begin + bptt], source[:, begin + 1 : begin + 1 + bptt]
