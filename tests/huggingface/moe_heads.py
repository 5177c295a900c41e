"""Folders of small models with heads for the tokens after the next (MTP), as published ones have them."""

import json
import re

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.huggingface.moe_architectures import architectures

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
LAYER = re.compile(r"(.*?layers\.)(\d+)\.(.+)")


def pattern_of(name):
    """The pattern of the names of heads that a class ignores in its files; None without."""
    said = getattr(transformers, name)._keys_to_ignore_on_load_unexpected or ()
    return next((pattern for pattern in said if "mtp" in pattern or r"layers\." in pattern), None)


def with_heads():
    return [name for name in architectures() if pattern_of(name)]


def add_heads(model, folder, depth=None):
    """Saves a model with a head made of its last layer that has experts -> {name: tensor} of the head.

    depth: the number of the head's layer, where it is one behind the others; by default the first free one.
    """
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    text = model.config.get_text_config()
    matches = {key: LAYER.fullmatch(key) for key in tensors if "visual" not in key and "vision" not in key}
    numbers = [int(m[2]) for key, m in matches.items() if m and "experts" in key and "shared" not in key]
    last = max(numbers)
    pattern = pattern_of(type(model).__name__)
    stem = next(m[1] for m in matches.values() if m)
    if "mtp" not in pattern:
        begin = f"{stem}{text.num_hidden_layers if depth is None else depth}."
    else:
        names = ("mtp.layers.0.", "model.mtp.layers.0.", "model.mtp_layers.0.", "mtp_dspark.layers.0.")
        begin = next(name for name in names if re.search(pattern, name))
    generator = torch.Generator().manual_seed(1)
    head = {
        f"{begin}{m[3]}": _noisy(tensors[key], generator)
        for key, m in matches.items()
        if m and int(m[2]) == last
    }
    D = text.hidden_size
    dtype = model.dtype
    head |= {
        f"{begin}{key}.weight": torch.ones(D, dtype=dtype) for key in ("enorm", "hnorm", "shared_head.norm")
    }
    head[f"{begin}eh_proj.weight"] = torch.randn(D, 2 * D, dtype=dtype, generator=generator)
    save_file(tensors | head, file, {"format": "pt"})
    say_heads(folder, text)
    return head


def _noisy(tensor, generator):
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor + 0.1 * torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)


def say_heads(folder, text):
    """Writes into config.json that there is one head, by the key that the class knows."""
    config = json.loads((folder / "config.json").read_text())
    part = config.get("text_config", config)
    known = [key for key in COUNTS if key in part]
    for key in known or ["mtp_num_hidden_layers"]:
        part[key] = 1
    (folder / "config.json").write_text(json.dumps(config))
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(folder)  # with what follows from it
