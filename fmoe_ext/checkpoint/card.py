"""Write a model card, README.md as the Hugging Face hub reads it: what a folder was made from, how, what was measured.

export(), save_pretrained() of our models, `fmoe export`, `fmoe prune` and `fmoe adapter` put one into a folder that has
none. Its head is YAML between two lines of dashes. JSON's texts and lists are YAML, too, so no package is needed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fmoe_ext.checkpoint.files import atomic_file

_CARD = "README.md"
_IN_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/")  # of the hub's cache: owner and name
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # not ../base, which is a path


def hub_name(model: str | Path | None) -> str | None:
    """Return a model's name on the hub, from a path in the hub's cache or the name itself; None for other folders."""
    if model is None:
        return None
    if cached := _IN_CACHE.search(Path(model).absolute().as_posix() + "/"):
        return f"{cached[1]}/{cached[2]}"
    text = str(model)
    # what exists here is a folder, even if it could be a name on the hub
    return text if isinstance(model, str) and _NAME.fullmatch(text) and not Path(text).exists() else None


def shown(model: str | Path | None) -> str:
    """Return a model's name for a card: on the hub, or its folder's without the path, which tells of the machine."""
    return "not known" if model is None else hub_name(model) or Path(model).name


def render_card(
    title: str,
    what: str,
    base: str | Path | None,
    facts: Mapping[str, Any],
    command: str,
    *,
    library: str = "transformers",
    pipeline: str | None = "text-generation",
    tags: Sequence[str] = (),
) -> str:
    """Return the text of a card.

    what: a sentence. base: the folder or name of the model that it was made from. facts: further lines of a table;
    those that are None are left out. command: in Python or of the shell. library, pipeline, tags: the hub's terms.
    """
    # the hub's own keys
    head: dict[str, Any] = {
        "base_model": hub_name(base),
        "library_name": library,
        "pipeline_tag": pipeline,
        "tags": ["fmoe_ext", "mixture-of-experts", *tags],
    }
    # the table under the title: a value of several lines, or with a bar, would break its row
    rows = {"base model": shown(base), **facts}
    cells = {
        key: " ".join(str(v).splitlines()).replace("|", r"\|") for key, v in rows.items() if v is not None
    }
    return "\n".join(
        [
            "---",
            *(f"{key}: {json.dumps(value)}" for key, value in head.items() if value is not None),
            "---",
            "",
            f"# {title}",
            "",
            what,
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {cell} |" for key, cell in cells.items()),
            "",
            "```",
            command,
            "```",
            "",
        ]
    )


def write_card(folder: Path, text: str, kept: Path | None = None) -> None:
    """Write a card into a folder, unless it has one, or `kept` has, the folder that it will replace."""
    if not any((place / _CARD).exists() for place in (folder, kept) if place is not None):
        with atomic_file(folder / _CARD) as file:
            file.write(text.encode())
