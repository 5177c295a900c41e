"""Digest of the sources of the GPU kernels, which a proof of `fmoe gpu prove` is about."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
INCLUDE = re.compile(r'#include "([^"]+)"')


def digest(root: Path = ROOT) -> str:
    """16 hexadecimal digits that change with any word of the kernels, their headers and the table that selects them.

    Comments and white space do not count.
    """
    found = hashlib.sha256()
    for path in reached(root):
        words = COMMENT.sub(" ", path.read_text(encoding="utf-8")).split()
        found.update(f"{path.name}\n{' '.join(words)}\n".encode())
    return found.hexdigest()[:16]


def reached(root: Path) -> list[Path]:
    """cuda/*.cu, select.h and every header of cuda/ and csrc/ that they include, by name."""
    todo = [*Path(root, "cuda").glob("*.cu"), Path(root, "cuda", "select.h")]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        seen.add(path)
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            inside = (folder / name for folder in (path.parent, root / "cuda", root / "csrc"))
            header = next((file for file in inside if file.exists()), None)
            if header is not None and header not in seen:
                todo.append(header)
    return sorted(seen, key=lambda path: path.name)


if __name__ == "__main__":
    print(digest())
