"""Reads a dense MLP out of a module by watching it compute: its linear maps, its activation, its dropout."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext import ops
from fmoe_ext.experts import GatedActivation, activation_name
from fmoe_ext.integrations.target import DenseMLP

PLAIN = ("gelu", "gelu_tanh", "relu", "silu")
GATED = MappingProxyType({"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"})
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class UnreadableError(Exception):
    """What keeps a module from being read as an MLP."""


@dataclass(frozen=True)
class Reading:
    """What read_mlp() found: the MLP, the dropout modules behind it, and what the MoE layer will not have."""

    dense: DenseMLP
    after: tuple[nn.Module, ...] = ()
    notes: tuple[str, ...] = ()

    def wrap(self, moe: nn.Module) -> nn.Module:
        """The MoE layer with the dropout that follows the MLP."""
        return nn.Sequential(moe, *self.after) if self.after else moe


def is_linear(module: Any) -> bool:
    """nn.Linear, or the Conv1D of Transformers (GPT-2), whose weight is transposed."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: Any) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def weight_and_bias(linear: Any) -> tuple[Tensor, Tensor | None]:
    """weight [out, in] and bias [out] or None, detached; UnreadableError for quantised weights."""
    weight, bias = linear.weight.detach(), linear.bias
    if not weight.is_floating_point():
        raise UnreadableError(f"its weights are {weight.dtype}")
    return weight.t() if _is_conv1d(linear) else weight, None if bias is None else bias.detach()


def simplify(activation: str | Callable) -> str | Callable:
    """The name of ops.expert_mlp for an activation that computes the same; the activation itself if there is none."""
    name = activation_name(activation)
    if name is not None:
        return name
    if isinstance(activation, nn.Module) and (
        list(activation.parameters()) or any(isinstance(m, DROPOUTS) for m in activation.modules())
    ):
        return activation
    probe = torch.linspace(-6, 6, 97, dtype=torch.float64)
    value = _value(activation, probe)
    if value is not None:
        for name in PLAIN:
            if (value - ops.ACTIVATIONS[name](probe)).abs().max() <= 1e-13:
                return name
    return activation


def pair(first: nn.Module, second: nn.Module, activation: str | Callable) -> DenseMLP:
    """The DenseMLP of two linear modules with an activation between them."""
    try:
        (w1, b1), (w2, b2) = weight_and_bias(first), weight_and_bias(second)
    except UnreadableError as why:
        return DenseMLP(None, None, simplify(activation), why_unreadable=str(why))
    return DenseMLP(w1.shape[1], w2.shape[1], simplify(activation), w1, b1, w2, b2)


def read_mlp(module: nn.Module, activation: str | Callable | None = None) -> Reading:
    """The Reading of a module that maps [..., d_model] to itself through two linear maps, or three if gated.

    The module is called on a few random tokens, with hooks on its linear layers: what goes into the last one must be
    the activation of what came out of the others: one that the module has, one of PLAIN or GATED, or the given one.
    A module that does anything else gets a Reading whose dense.why_unreadable says what; if that is the activation
    alone and one is given, dense has the sizes and weights all the same.
    """
    linears = [m for m in module.modules() if is_linear(m)]
    try:
        return _read(module, linears, activation)
    except UnreadableError as why:
        d_model = weight_shape(linears[0])[1] if linears else None
        return Reading(DenseMLP(d_model, None, None, why_unreadable=str(why)))


def weight_shape(linear: Any) -> tuple[int, ...]:
    """(out, in) of a linear module."""
    return tuple(linear.weight.shape)[:: -1 if _is_conv1d(linear) else 1]


def _read(module: nn.Module, linears: list[nn.Module], given: str | Callable | None) -> Reading:
    if len(linears) not in (2, 3):
        raise UnreadableError(f"it has {len(linears)} linear layers, where an MLP has 2, or 3 if it is gated")
    weights = {m: weight_and_bias(m) for m in linears}
    like = weights[linears[0]][0]
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, 3, like.shape[1], device="cpu", generator=generator).to(like)
    with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []), _modes_kept(module):
        module.eval()
        x = x * (2 / _watch(module, x).linears[0][2].float().std().clamp(min=1e-6)).to(x)
        run = _watch(module, x)
        _check_structure(run, x, linears)
        *first, (last, hidden, _) = run.linears
        activation, gate_first, why = _activation_or_why(module, [h for _, _, h in first], hidden, given)
        module.train()
        train = _watch(module, x)
    if not gate_first:
        first.reverse()
    w1: Any = tuple(weights[m][0] for m, _, _ in first)
    biases: list[Any] = [weights[m][1] for m, _, _ in first]
    b1 = None if biases[0] is None else torch.cat(biases)
    w2, b2 = weights[last]
    d_hidden = w2.shape[1]
    if len(first) == 1:
        w1 = w1[0]
        if not gate_first:
            up, gate = w1.split(d_hidden)
            w1 = (gate, up)
            b1 = None if b1 is None else b1.roll(d_hidden)
    dense = DenseMLP(like.shape[1], d_hidden, activation, w1, b1, w2, b2, why_unreadable=why)
    return Reading(dense, train.dropouts_after, _dropout_notes(run, train))


@dataclass
class _Run:
    linears: list  # (module, input, output) in the order of the calls
    dropouts: list  # (module, number of linear layers called before it)
    output: Any = None

    @property
    def dropouts_after(self) -> tuple[nn.Module, ...]:
        return tuple(m for m, num_before in self.dropouts if num_before == len(self.linears))


def _watch(module: nn.Module, x: Tensor) -> _Run:
    """Calls module(x) and notes what its linear layers and dropouts are given."""
    run = _Run([], [])
    hooks = []
    for m in module.modules():
        if is_linear(m):
            hooks.append(
                m.register_forward_hook(
                    lambda m, args, out: run.linears.append((m, args[0].clone(), out.clone()))
                )
            )
        elif isinstance(m, DROPOUTS):
            hooks.append(m.register_forward_hook(lambda m, *_: run.dropouts.append((m, len(run.linears)))))
    try:
        run.output = module(x)
    except Exception as error:  # whatever a module of which nothing is known may raise
        raise UnreadableError(f"calling it with one tensor {list(x.shape)} fails: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
    if not run.linears:
        raise UnreadableError("it does not call its linear layers")
    return run


@contextlib.contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


def _check_structure(run: _Run, x: Tensor, linears: list[nn.Module]) -> None:
    if len(run.linears) != len(linears) or {m for m, _, _ in run.linears} != set(linears):
        raise UnreadableError(f"it calls linear layers {len(run.linears)} times, but has {len(linears)}")
    *first, (_, _, y) = run.linears
    for _, inp, _ in first:
        if inp.numel() != x.numel() or not torch.equal(inp.reshape(x.shape), x):
            raise UnreadableError("its first linear layer is not applied to its input")
    if not isinstance(run.output, torch.Tensor) or run.output.shape != x.shape:
        raise UnreadableError("it does not return one tensor of the shape of its input")
    if not torch.equal(run.output.reshape(y.shape), y):
        raise UnreadableError("something other than dropout follows its last linear layer")


def _activation_or_why(
    module: nn.Module, first: list[Tensor], hidden: Tensor, given: str | Callable | None
) -> tuple[str | Callable | None, bool, str]:
    """(activation, whether the gate comes before up, ""); where none fits the given one: (None, True, why)."""
    try:
        return *_find_activation(module, first, hidden, given), ""
    except UnreadableError as why:
        if given is None:
            raise
        return None, True, str(why)


def _find_activation(
    module: nn.Module, first: Sequence[Tensor], hidden: Tensor, given: str | Callable | None
) -> tuple[str | Callable, bool]:
    """(activation, whether the gate comes before up), such that hidden is the activation of the first maps' results."""
    if len(first) == 1 and first[0].shape[-1] == 2 * hidden.shape[-1]:
        first = first[0].chunk(2, -1)
    if any(h.shape != hidden.shape for h in first):
        raise UnreadableError(
            "what goes into its last linear layer has another shape than what its first give"
        )
    limit = 64 * torch.finfo(hidden.dtype).eps * hidden.abs().max()
    of_module = [*_own(module), *(() if given is None else (_ungated(given),))]
    own = [(_error(act, first, hidden, order), act, order) for act in of_module for order in (True, False)]
    named = [(_error(act, first, hidden, order), act, order) for act in PLAIN for order in (True, False)]
    fitting = [entry for entry in own if entry[0] <= limit] or sorted(
        (entry for entry in named if entry[0] <= limit), key=lambda entry: entry[0]
    )
    if not fitting:
        raise UnreadableError(
            f"between its linear layers it computes none of {', '.join(PLAIN)}, plain or gated"
        )
    _, activation, gate_first = fitting[0]
    if len(first) == 1:
        return activation, True
    if isinstance(activation, str) and activation in GATED:
        return GATED[activation], gate_first
    return GatedActivation(nn.ReLU() if isinstance(activation, str) else activation), gate_first


def _ungated(activation: str | Callable) -> str | Callable:
    """What a gated activation of GATED applies to its gate; another one itself."""
    plain = {gated: plain for plain, gated in GATED.items()}
    return plain[activation] if isinstance(activation, str) and activation in plain else simplify(activation)


def _own(module: nn.Module) -> Iterator[str | Callable]:
    """The activations that a module holds, as submodules or as functions with `act` in their names."""
    for m in module.modules():
        if m is not module and not list(m.children()) and not is_linear(m) and not isinstance(m, DROPOUTS):
            yield simplify(m)
        for name, value in vars(m).items():
            if "act" in name and callable(value) and not isinstance(value, (nn.Module, type)):
                yield simplify(value)


def _error(activation: Any, first: Sequence[Tensor], hidden: Tensor, gate_first: bool) -> float:
    gate, *up = first if gate_first else first[::-1]
    value = _value(
        ops.ACTIVATIONS.get(activation, activation) if isinstance(activation, str) else activation, gate
    )
    if value is None:
        return float("inf")
    return (value * up[0] if up else value).sub(hidden).abs().max().item()


def _value(function: Any, x: Tensor) -> Tensor | None:
    """function(x), None if it cannot be called so or gives something else than a tensor of that shape."""
    try:
        with torch.no_grad():
            value = function(x)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None
    return value if isinstance(value, torch.Tensor) and value.shape == x.shape else None


def _dropout_notes(run: _Run, train: _Run) -> tuple[str, ...]:
    """What dropout the module has that the MoE layer will not have: what differs in training."""
    notes = []
    if not torch.equal(train.linears[-1][1], run.linears[-1][1]):
        notes.append("its dropout between the linear layers is left out")
    y = train.linears[-1][2]
    if not train.dropouts_after and not torch.equal(train.output.reshape(y.shape), y):
        notes.append("its dropout after the last linear layer is left out")
    return tuple(notes)
