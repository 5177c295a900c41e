"""The model kind of plain PyTorch: nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, and what match= points at.

fmoefy asks it after all others, and with match= it alone (target.py says what a kind is). Torch's layers have their MLP
inline, as linear1, activation, dropout, linear2: linear1 becomes the MoE layer and the other three do nothing. A module
that match= points at must be an MLP by itself (recognize.read_mlp).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.layers import FMoE
from fmoe_ext.models.recognize import read_mlp, read_pair
from fmoe_ext.models.target import Options, Target

KIND = "plain PyTorch"
LOOKED_FOR = "nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, or the modules that match= points at"
LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def find(model: nn.Module, options: Options) -> list[Target]:
    """Find PyTorch's Transformer layers, or what match= points at, in the order of the model."""
    matches = _matcher(LAYERS if options.match is None else options.match)
    encoders = [m for m in model.modules() if isinstance(m, nn.TransformerEncoder)]
    return list(_walk(model, matches, encoders, "", None, "", options.activation))


def _walk(
    module: nn.Module,
    matches: Callable[[str, nn.Module], bool],
    encoders: list[nn.TransformerEncoder],
    path: str,
    parent: Any,
    attribute: str,
    activation: Any,
) -> Iterator[Target]:
    """Yield the targets below a module, in order; do not look inside a match or an MoE layer."""
    if isinstance(module, FMoE):
        return
    if matches(path, module):
        if isinstance(module, LAYERS):  # the MLP is not a module of its own
            yield _of_torch_layer(path, module, encoders)
            return
        if parent is None:
            raise ValueError("match= points at the model itself, which cannot be replaced inside itself")
        reading = read_mlp(module, activation)
        yield Target(path, parent, attribute, reading.dense, reading.wrap, notes=reading.notes)
        return
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        yield from _walk(child, matches, encoders, inside, module, name, activation)


def _matcher(match: Any) -> Callable[[str, nn.Module], bool]:
    """Make a function (path, module) -> bool of a class, a tuple of classes, a pattern of paths or such a function."""
    if isinstance(match, str):
        return lambda path, module: fnmatch.fnmatchcase(path, match)
    if isinstance(match, (type, tuple)):
        return lambda path, module: isinstance(module, match)
    if callable(match):
        return match
    raise TypeError(
        f"match must be a class, a pattern of paths or a function (path, module), but got {match!r}"
    )


def _of_torch_layer(path: str, layer: Any, encoders: list[nn.TransformerEncoder]) -> Target:
    """Make the target of a torch layer: linear1, which becomes the MoE layer; finish() turns off what follows it."""

    def finish() -> None:
        layer.linear2 = nn.Identity()
        layer.activation = nn.Identity()
        layer.dropout = nn.Identity()
        if isinstance(layer, nn.TransformerEncoderLayer):
            # Evaluation must not take torch's fused path, which reads linear1.weight.
            layer.activation_relu_or_gelu = 0  # neither: no fused path
            for encoder in encoders:
                if any(m is layer for m in encoder.layers):
                    encoder.use_nested_tensor = False

    def call(x: Tensor) -> Any:
        # torch's fused path calls no linear layer: turn it off while the layer is watched
        was_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return layer(x) if isinstance(layer, nn.TransformerEncoderLayer) else layer(x, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(was_enabled)

    dense, _ = read_pair(layer, (layer.linear1, layer.linear2), layer.activation, call)
    if dense.why_unreadable:
        raise ValueError(
            f"{path or type(layer).__name__} is no MLP between its norms: {dense.why_unreadable}"
        )
    # the dropout after linear2 is a module of its own and stays
    p = layer.dropout.p
    notes = (f"its dropout ({p}) between the linear layers is left out",) if p > 0 else ()
    return Target(f"{path}.linear1".lstrip("."), layer, "linear1", dense, finish=finish, notes=notes)
