"""Find the MLPs of dense Hugging Face models for fmoefy by the structure of their layers, without a list of models.

fmoefy asks find() and after_replacing() (models/target.py says what they owe it). A function for each of three
structures reads it or returns None:

    _read_module  an MLP module (Llama, Qwen3, Mistral, Gemma, Phi, GPT-2, ViT, T5, ...), which may add the residual
                  itself (BLOOM, MPT)
    _read_bert    `intermediate` and `output` side by side, the second with dropout, residual and LayerNorm (BERT, ...)
    _read_fc      fc1 and fc2 in the layer itself (OPT, BART, Whisper, ...)

What the linear layers compute is not assumed from the structure: read_mlp() and read_pair() run the module, or the
whole layer around the pair, and compare. A layer runs on tokens alone for that; where it asks for masks, caches or
another sequence, a stand-in returns what its attention gets.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.huggingface.record import note
from fmoe_ext.huggingface.saving import save_as_fmoefied
from fmoe_ext.layers import FMoE
from fmoe_ext.models.recognize import is_linear, read_mlp, read_pair, weight_shape
from fmoe_ext.models.target import Options, Target

KIND = "Hugging Face Transformers"
LOOKED_FOR = (
    "modules of the transformers package inside numbered layers: an MLP of two or three linear layers, "
    "`intermediate` and `output`, or `fc1` and `fc2` beside an attention (what is MoE already stays: "
    "fmoe_ext.huggingface runs its experts)"
)
# The gates of Transformers' own MoE models have no bias either, so that the layers can become theirs.
_target = functools.partial(Target, is_candidate=True, moe_kwargs=MappingProxyType({"gate_bias": False}))


def find(model: nn.Module, options: Options) -> list[Target]:
    """Find the MLPs of a Transformers model that is dense, in the order of the model."""
    return list(_walk(model, "", None, "", options.activation))


def after_replacing(model: Any, kind: str, targets: Any, layers: Any, options: Options) -> str:
    """Note in the model's configuration what fmoefy did -> the formats that it can be written in, for the report."""
    ways_out = note(model, kind, targets, layers, options)
    save_as_fmoefied(model)
    return ways_out


def _walk(module: nn.Module, path: str, parent: Any, attribute: str, activation: Any) -> Iterator[Target]:
    """Yield the targets in a module, which is parent.attribute at path, depth first."""
    if isinstance(module, FMoE) or hasattr(module, "experts"):
        return  # an MoE layer, or one with shared experts
    in_layers = any(name.isdigit() for name in path.split("."))
    if in_layers and any(c.__module__.startswith("transformers") for c in type(module).__mro__):
        # BERT and OPT first: their layers are more than an MLP, whose shapes they have as well
        target = (
            _read_bert(path, module)
            or _read_fc(path, module)
            or _read_module(path, module, parent, attribute, activation)
        )
        if target is not None:
            yield target
            return
    for name, child in module.named_children():
        yield from _walk(child, f"{path}.{name}" if path else name, module, name, activation)


def _read_module(path: str, module: nn.Module, parent: Any, attribute: str, activation: Any) -> Target | None:
    """Make the target for an MLP module: linear layers d -> H or 2H, H -> d, or d -> H, d -> H, H -> d in any order."""
    # by its names: the linear layers of an attention can have the shapes of an MLP
    names = f"{attribute} {type(module).__name__}".lower()
    if "attn" in names or "attention" in names:
        return None
    shapes = [weight_shape(m) for m in module.children() if is_linear(m)]
    if len(shapes) == 2:  # [H or 2 H, d] and [d, H]
        (rows, d_model), (d_out, d_hidden) = shapes
        is_mlp = d_out == d_model and rows in (d_hidden, 2 * d_hidden)
    else:  # two [H, d] and one [d, H]
        orders = ((0, 1, 2), (0, 2, 1), (1, 2, 0))
        is_mlp = len(shapes) == 3 and any(shapes[i] == shapes[j] == shapes[k][::-1] for i, j, k in orders)
    if not is_mlp:
        return None
    adds_residual = list(inspect.signature(module.forward).parameters)[1:] == ["residual"]
    reading = read_mlp(_WithoutResidual(module) if adds_residual else module, activation)

    def wrap(moe: nn.Module) -> nn.Module:
        return AddsResidual(reading.wrap(moe)) if adds_residual else reading.wrap(moe)

    return _target(path, parent, attribute, reading.dense, wrap=wrap, notes=reading.notes)


class _WithoutResidual(nn.Module):
    """Calls mlp(x, residual) with a residual of zeros, so that it can be read like any other MLP."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, torch.zeros_like(x))


class AddsResidual(nn.Module):
    """An MoE layer that replaces an MLP which is called with the residual and adds it."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        return residual + self.moe(hidden_states)


def _read_bert(path: str, layer: Any) -> Target | None:
    """Make the target for `intermediate`, or for its linear layer alone if something comes before that."""
    first: Any = getattr(layer, "intermediate", None)
    second: Any = getattr(layer, "output", None)
    if not (
        is_linear(getattr(first, "dense", None))
        and is_linear(getattr(second, "dense", None))
        and hasattr(first, "intermediate_act_fn")
    ):
        return None

    def call(x: Tensor) -> Any:
        needed, _ = _parameters(layer.output)
        return layer.output(layer.intermediate(x), **_stand_ins(needed, x))

    dense, is_plain = read_pair(layer, (first.dense, layer.output.dense), first.intermediate_act_fn, call)

    # The MoE layer takes the place of intermediate; of output, dropout, residual and LayerNorm stay. If something comes
    # before intermediate.dense, that alone is replaced, and the activation behind it becomes nothing.
    def finish() -> None:
        layer.output.dense = nn.Identity()
        if not is_plain:
            first.intermediate_act_fn = nn.Identity()

    path, parent, attribute = f"{path}.intermediate", layer, "intermediate"
    if not is_plain and not dense.why_unreadable:
        path, parent, attribute = f"{path}.dense", first, "dense"
    return _target(path, parent, attribute, dense, finish=finish)


def _read_fc(path: str, layer: Any) -> Target | None:
    """Make the target for fc1 beside an attention; the layer's forward stays, what follows fc1 in it does nothing."""
    if not (
        is_linear(getattr(layer, "fc1", None))
        and is_linear(getattr(layer, "fc2", None))
        and callable(getattr(layer, "activation_fn", None))
        and any("attn" in name or "attention" in name for name, _ in layer.named_children())
    ):
        return None
    # The layer calls activation_fn, dropout and fc2 on what fc1 returns. Behind the MoE layer, which takes fc1's place,
    # they must do nothing.
    p = getattr(layer, "activation_dropout", 0.0)

    def finish() -> None:
        layer.activation_fn = nn.Identity()
        layer.fc2 = nn.Identity()
        if p:
            layer.activation_dropout = 0.0

    dense, _ = read_pair(
        layer, (layer.fc1, layer.fc2), layer.activation_fn, functools.partial(_call_alone, layer)
    )
    notes = (f"its dropout ({p}) between the linear layers is left out",) if p else ()
    return _target(f"{path}.fc1", layer, "fc1", dense, finish=finish, notes=notes)


def _call_alone(layer: nn.Module, x: Tensor) -> Any:
    """Run a Transformer layer on tokens x and nothing else: no mask, no cache, no other sequence.

    Where its attention needs more, a stand-in returns its input: once, or as often as the layer unpacks it.
    """
    needed, optional = _parameters(layer)
    # plainly, then by stand-ins: for the arguments that it needs, and for the optional ones too
    try:
        return layer(x, **{p.name: None for p in needed})
    except Exception:  # an attention may raise anything
        for num_results, given in itertools.product((None, 2, 3), (needed, needed + optional)):
            with contextlib.suppress(Exception), _without_attention(layer, num_results):
                return layer(x, **_stand_ins(given, x))
        raise


def _parameters(module: nn.Module) -> tuple[list[inspect.Parameter], list[inspect.Parameter]]:
    """Return the parameters after the first that a forward needs, and those that are None by default."""
    _, *others = inspect.signature(module.forward).parameters.values()
    named = [p for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p for p in named if p.default is p.empty], [p for p in named if p.default is None]


def _stand_ins(parameters: list[inspect.Parameter], x: Tensor) -> dict[str, Any]:
    """Return x for each parameter, 0 for whole numbers."""
    return {p.name: 0 if "int" in str(p.annotation) else x for p in parameters}


@contextlib.contextmanager
def _without_attention(layer: nn.Module, num_results: int | None) -> Iterator[None]:
    """Let a layer's attention modules return the first tensor that they get, or a tuple of the first num_results."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return tensors[0] if num_results is None else (*tensors, *tensors[:1] * num_results)[:num_results]

    attentions = [
        m
        for name, m in layer.named_children()
        if ("attn" in name or "attention" in name) and any(map(is_linear, m.modules()))
    ]
    own_forwards = {
        m: vars(m).get("forward") for m in attentions
    }  # accelerate's hooks set one on the instance
    try:
        for m in attentions:
            m.forward = answer
        yield
    finally:
        for m, forward in own_forwards.items():
            del m.forward
            if forward is not None:
                m.forward = forward
