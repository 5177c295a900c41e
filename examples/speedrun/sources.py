"""The text of a speedrun: sources of Python's library and the installed packages, split by package: nothing leaks.

speedrun.py calls load_text(installed_packages(), bytes), once for a folder. No package is on both sides, no file counts
twice, and runs of lines that both sides have are left out of validation.
"""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "lm"))
from data import SEPARATOR, Corpus, DataError, place_of_name

VALIDATION_SHARE = 0.08  # of the packages
LARGEST_SHARE = 1 / 12  # of a text that one package may have, so that none decides the loss
LARGEST_FILE = 200 << 10  # larger ones are tables
LEAST_RUN = 8  # lines that are not empty: a run of so many is not by chance in two packages

Packages = Mapping[str, list[Path]]


def installed_packages() -> dict[str, list[Path]]:
    """{name: Python files} of the environment's packages and the standard library, by their names at the top level."""
    paths = sysconfig.get_paths()
    installed = [Path(paths[key]) for key in ("purelib", "platlib")]
    packages: dict[str, list[Path]] = {}
    for root in dict.fromkeys((*installed, Path(paths["stdlib"]))):
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if not {"site-packages", "dist-packages"} & set(parts):
                packages.setdefault(parts[0].removesuffix(".py"), []).append(file)
    return packages


def load_text(packages: Packages, most_bytes: int) -> Corpus:
    """Training and validation text: whole packages on either side, at most most_bytes for training.

    A file that is in several packages counts once. What the validation text shares with the training text, LEAST_RUN
    lines or more, is left out of it: licences, and copies of other packages.
    """
    names = sorted(packages, key=place_of_name)
    is_valid = {name for name in names if place_of_name(name) < VALIDATION_SHARE} or set(names[:1])
    seen: set[bytes] = set()
    # Training first: a copy of its files is then not in the validation text.
    train = _take(packages, [name for name in names if name not in is_valid], most_bytes, seen)
    valid = _take(packages, [name for name in names if name in is_valid], most_bytes // 16, seen)
    pieces = list(without_shared_runs(valid, train))
    if not train or not pieces:
        raise DataError(
            f"{len(packages)} packages hold too little text to split: install more, or give a folder"
        )
    source = f"Python sources of {len(packages)} packages"
    return Corpus(*(as_tensor(SEPARATOR.join(texts)) for texts in (train, pieces)), source)


def _take(packages: Packages, names: list[str], most_bytes: int, seen: set[bytes]) -> list[bytes]:
    """Texts of the packages, those of each in an order that depends on their names only."""
    texts: list[bytes] = []
    total = 0
    for name in names:
        of_package = 0
        for file in sorted(packages[name], key=lambda file: place_of_name("/".join(file.parts[-3:]))):
            text = file.read_bytes().strip() if file.stat().st_size <= LARGEST_FILE else b""
            digest = hashlib.sha256(text).digest()
            if not text or SEPARATOR in text or digest in seen:
                continue
            seen.add(digest)
            texts.append(text)
            of_package += len(text)
            total += len(text)
            if of_package >= LARGEST_SHARE * most_bytes or total >= most_bytes:
                break
        if total >= most_bytes:
            break
    return texts


def runs_of(text: bytes) -> Iterator[tuple[int, int, int]]:
    """(hash, first line, end line) of each LEAST_RUN lines in succession that are not empty."""
    lines = [(i, line) for i, raw in enumerate(text.split(b"\n")) if (line := raw.strip())]
    for at in range(len(lines) - LEAST_RUN + 1):
        run = lines[at : at + LEAST_RUN]
        yield hash(tuple(line for _, line in run)), run[0][0], run[-1][0] + 1


def without_shared_runs(texts: list[bytes], others: list[bytes]) -> Iterator[bytes]:
    """The pieces of texts that are left without every run of lines that others have too."""
    own = {key for text in texts for key, _, _ in runs_of(text)}
    shared = {key for text in others for key, _, _ in runs_of(text) if key in own}
    for text in texts:
        lines = text.split(b"\n")
        is_shared = [False] * len(lines)
        for key, first, end in runs_of(text):
            if key in shared:
                is_shared[first:end] = [True] * (end - first)
        piece: list[bytes] = []
        for line, leave_out in zip([*lines, b""], [*is_shared, True], strict=True):
            if not leave_out:
                piece.append(line)
            elif piece:
                if joined := b"\n".join(piece).strip():
                    yield joined
                piece = []


def as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
