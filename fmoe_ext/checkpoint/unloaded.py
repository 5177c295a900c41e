"""Find the tensors of a folder that Transformers does not load: heads for the tokens after the next (MTP), and others.

Heads lie in layers behind the last one (DeepSeek-V3, GLM-4.5), or under `mtp` (Qwen3-Next, MiMo, Mellum). A model in
memory does not have them; generate(use_mtp=True) reads them from the folder again. So the writers of formats/ copy them
from the folder that the model came from, where the format has a place for them.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

# Keys of configurations for the number of heads
_NUMBERS_OF_HEADS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_HEAD = re.compile(r"(?:.*\.)?mtp(?:_\w+)?\.|(?:.*\.)?layers\.(\d+)\.")


def heads_in(names: Iterable[str], config: Any) -> list[str]:
    """Select the names of heads for the tokens after the next. names: tensors that the model does not load."""
    depth = int(getattr(config.get_text_config(), "num_hidden_layers", 0))
    matches = {name: _HEAD.match(name) for name in names}
    return [name for name, match in matches.items() if match and (not match[1] or int(match[1]) >= depth)]


def worded(names: Iterable[str], config: Any) -> str:
    """Write for a message how many of the tensors are in which head, and the first three other names."""
    names = sorted(names)
    heads = {*heads_in(names, config)}
    layers = Counter(re.sub(r"(.*\blayers\.\d+)\..*|(.*\bmtp(?:_\w+)?)\..*", r"\1\2", name) for name in heads)
    found = [f"{count} of {layer}" for layer, count in sorted(layers.items())]
    text = f"heads for the tokens after the next ({', '.join(found)})" if found else ""
    others = [name for name in names if name not in heads]
    more = f"and {len(others) - 3} more" if len(others) > 3 else ""
    return ", ".join(filter(None, [text, *others[:3], more]))


def without_heads(config: Any) -> None:
    """Say in a configuration of Transformers, in place, that there are no heads."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for key in _NUMBERS_OF_HEADS:
            if getattr(part, key, None):
                setattr(part, key, 0)
