"""The sources that C++ programs and clang-tidy last passed with: they take minutes, and C++ seldom changes.

Where a source is another one the programs are marked long, and .ci/run runs them and `make tidy`; else slow, for
make test-all. Once all have passed: python -m tests.sanitized
"""

import hashlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".txt")
FOLDERS = ("csrc", "cuda", "fmoe_ext/include", "tests/cpp", "tests/emulator")
SUFFIXES = (".cpp", ".h", ".inc", ".cu", ".cuh")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def digest(root=ROOT):
    """Of all C++ and CUDA sources, whose comments and white space do not count."""
    files = (file for folder in FOLDERS for file in (root / folder).rglob("*.*") if file.suffix in SUFFIXES)
    found = hashlib.sha256()
    for file in sorted(files):
        words = COMMENT.sub(" ", file.read_text(encoding="utf-8")).split()
        found.update(f"{file.relative_to(root).as_posix()}\n{' '.join(words)}\n".encode())
    return found.hexdigest()


def long_unless_passed():
    """Return the mark of a test of such programs."""
    return pytest.mark.slow if digest() == RECORD.read_text().strip() else pytest.mark.long


if __name__ == "__main__":
    if "--passed" in sys.argv[1:]:
        sys.exit(digest() != RECORD.read_text().strip())
    RECORD.write_text(digest() + "\n")
