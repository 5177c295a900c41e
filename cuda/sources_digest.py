"""Digests of the sources of the GPU kernels, which say whether a proof of `fmoe gpu prove` is about these kernels.

One for each file of Hopper kernels and one for all portable kernels, so that an edit voids the proofs of what it
reaches and no others. A digest is of the words of a file and of the headers that it includes, and of the compiler's
options; the compiler's version does not count, and neither do select.h and products.h, which choose a kernel and
compute nothing. setup.py puts the digests into the module (ops_select.cpp hands them out).
"""

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
INCLUDE = re.compile(r'#include "([^"]+)"')
PROTOTYPE = re.compile(r"^\w[\w:<>* ]* \*?\w+\([^;{}]*\);", re.MULTILINE)  # of another file's launcher
PORTABLE = "portable"


def digests(options: Sequence[str] = (), root: Path = ROOT) -> dict[str, str]:
    """{file of Hopper kernels, or "portable": 16 hexadecimal digits}.

    options: of the compiler, which decide the code. Comments, prototypes, and how much white space there is between
    words do not count.
    """
    hopper = sorted(Path(root, "cuda").glob("sm90_*.cu"))
    others = [path for path in Path(root, "cuda").glob("*.cu") if path not in hopper]
    return {
        PORTABLE: _digest(others, options, root),
        **{path.stem: _digest([path], options, root) for path in hopper},
    }


def _digest(files: list[Path], options: Sequence[str], root: Path) -> str:
    found = hashlib.sha256(" ".join(options).encode())
    for path in reached(files, root):
        text = COMMENT.sub(" ", path.read_text(encoding="utf-8"))
        words = PROTOTYPE.sub(" ", text).split()
        found.update(f"{path.name}\n{' '.join(words)}\n".encode())
    return found.hexdigest()[:16]


def reached(files: list[Path], root: Path = ROOT) -> list[Path]:
    """Return these files and every header of cuda/ and csrc/ that they reach by includes, sorted by name and folder."""
    todo, seen = [*files], set[Path]()
    while todo:
        path = todo.pop()
        seen.add(path)
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            inside = (folder / name for folder in (path.parent, root / "cuda", root / "csrc"))
            header = next((file for file in inside if file.exists()), None)
            if header is not None and header not in seen:
                todo.append(header)
    return sorted(seen, key=lambda path: (path.name, path))


if __name__ == "__main__":
    print("/".join(f"{name}:{digest}" for name, digest in digests(sys.argv[1:]).items()))
