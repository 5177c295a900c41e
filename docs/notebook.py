"""Makes a notebook of a page: `python docs/notebook.py docs/recipe.md docs/recipe.ipynb`.

Text becomes Markdown cells, blocks of Python become code cells, and blocks of sh those that bash runs.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any


def convert(text: str) -> dict[str, Any]:
    """The notebook of a page's text, in Jupyter's format 4.5."""
    text = re.sub(r"<!--.*?-->\n*", "", text, flags=re.DOTALL)
    cells = []
    for i, part in enumerate(
        re.split(r"^```(python|sh)\n(.*?)^```\n", text, flags=re.MULTILINE | re.DOTALL)
    ):
        kind = ("markdown", "language", "code")[i % 3]
        if kind == "language":
            language = part
        elif kind == "code":
            cells.append(_cell("code", f"%%bash\n{part}" if language == "sh" else part))
        elif part.strip():
            cells.append(_cell("markdown", part))
    return {
        "cells": [{"id": f"cell-{i}", **cell} for i, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(kind: str, text: str) -> dict[str, Any]:
    rest = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {
        "cell_type": kind,
        "metadata": {},
        "source": text.strip("\n").splitlines(keepends=True),
        **rest,
    }


def as_text(notebook: dict[str, Any]) -> str:
    """The notebook as its file has it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    page, out = map(Path, sys.argv[1:])
    out.write_text(as_text(convert(page.read_text())))
