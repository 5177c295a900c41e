"""Text as bytes: what to train on, what to validate on, and the batch of every step.

load_corpus() reads and splits it; Corpus.batch() is a function of seed and step alone, so that any rank, a resumed run
and another program have the same batches. The examples megatron, pipeline_lm, speedrun and cpp read their text by it.
"""

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VALIDATION_SHARE = 0.05
SEPARATOR = b"\0"  # between files, so that the model learns where a text begins
NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


class DataError(Exception):
    """The data cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Corpus:
    """Two texts as uint8 tensors, and one line that says where they come from."""

    train: torch.Tensor
    valid: torch.Tensor
    source: str

    def batch(
        self, step: int, batch_size: int, seq_len: int, seed: int, order: str = "random"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) [B, S] int64 of one training step, of all ranks: a function of seed and step alone.

        order: "random" draws each window's place in the text; "epochs" goes through the text without repeats, in
        another order and cut at other places in every epoch.
        """
        if order == "epochs":
            numbers = range((step - 1) * batch_size, step * batch_size)
            start = torch.tensor([[self.start_in_epoch(number, seq_len, seed)] for number in numbers])
        else:
            generator = torch.Generator().manual_seed(1_000_003 * seed + step)
            start = torch.randint(len(self.train) - seq_len, (batch_size, 1), generator=generator)
        return windows(self.train, start, seq_len)

    def start_in_epoch(self, number: int, seq_len: int, seed: int) -> int:
        """Start of the window with this number in a run."""
        per_epoch = max((len(self.train) - seq_len) // seq_len, 1)
        epoch, place = divmod(number, per_epoch)
        offset, order = order_of_epoch(epoch, per_epoch, min(seq_len, len(self.train) - seq_len), seed)
        return offset + seq_len * int(order[place])

    def validation_batches(self, batch_size, seq_len, num_windows):
        """(inputs, targets) over windows at even distances in the validation text, the same every time."""
        start = torch.linspace(0, len(self.valid) - seq_len - 1, num_windows, dtype=torch.float64).long()
        return [windows(self.valid, part[:, None], seq_len) for part in start.split(batch_size)]


@functools.lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
def order_of_epoch(epoch: int, num_windows: int, num_offsets: int, seed: int) -> tuple[int, torch.Tensor]:
    """(where the first window begins, the order of the windows)."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    offset = int(torch.randint(num_offsets, (), generator=generator))
    return offset, torch.randperm(num_windows, generator=generator)


def windows(text, start, seq_len):
    window = text[start + torch.arange(seq_len + 1)].long()  # [B, S + 1]
    return window[:, :-1], window[:, 1:]


def load_corpus(path=None, seq_len=1):
    """The corpus at `path`: a text file, a folder of text files, or None for Python's standard library.

    Files named as WikiText's are (`wiki.train.tokens`, `wiki.valid.tokens`; `path` is their folder or the
    training file) are split as they say. Any other folder is split by file (a hash of the name decides), and
    a single file by place (its end is for validation).
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in sorted(root.rglob("*.py")) if not NOT_PROSE & set(f.relative_to(root).parts)]
        source = "the sources of Python's standard library"
    else:
        root = Path(path).expanduser()
        source = str(root)
        if not root.exists():
            raise DataError(f"--data {root} does not exist: give a text file or a folder of text files")
        if root.is_dir():
            files = [f for f in sorted(root.rglob("*")) if f.is_file() and not hidden(f.relative_to(root))]
        else:
            files, root = [root], root.parent
    train, valid = named_split(files) or split_by_name_or_place(files, root, source)
    for name, text in (("training", train), ("validation", valid)):
        if len(text) < seq_len + 1:
            raise DataError(
                f"the {name} text of {source} has {len(text)} bytes, but one window needs {seq_len + 1}: "
                "give more text or a smaller --seq-len"
            )
    as_tensor = lambda text: torch.frombuffer(bytearray(text), dtype=torch.uint8)  # noqa: E731
    return Corpus(as_tensor(train), as_tensor(valid), source)


def hidden(path):
    return any(part.startswith(".") for part in path.parts)


def named_split(files):
    """(train, valid) bytes where the file names say which is which, otherwise None."""
    if len(files) == 1 and "train" in files[0].name:
        files = [file for file in sorted(files[0].parent.iterdir()) if file.is_file()]
    train = [file for file in files if "train" in file.name.split(".")]
    valid = [file for file in files if {"valid", "validation", "val"} & set(file.name.split("."))]
    if not train or not valid:
        return None
    return join_text(train), join_text(valid)


def split_by_name_or_place(files, root, source):
    texts = {file.relative_to(root).as_posix(): text for file in files if (text := read_text(file))}
    if not texts:
        raise DataError(f"{source} holds no text: every file is empty or binary, or there is none")
    if len(texts) == 1:
        (text,) = texts.values()
        cut = int(len(text) * (1 - VALIDATION_SHARE))
        return text[:cut], text[cut:]
    # A file larger than the whole validation text should be would alone decide the validation loss.
    most = VALIDATION_SHARE * sum(len(text) for text in texts.values())
    valid = {n for n, text in texts.items() if len(text) <= most and place_of_name(n) < VALIDATION_SHARE}
    if not valid:
        valid = {min(texts, key=place_of_name)}
    return (
        SEPARATOR.join(text for name, text in texts.items() if name not in valid),
        SEPARATOR.join(text for name, text in texts.items() if name in valid),
    )


def place_of_name(name):
    """A number in [0, 1) that depends on the name only: the same split on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32


def read_text(file):
    """The bytes of a text file; nothing for a binary one."""
    content = file.read_bytes()
    return b"" if SEPARATOR in content else content.strip()


def join_text(files):
    return SEPARATOR.join(text for file in files if (text := read_text(file)))
