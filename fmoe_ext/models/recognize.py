"""Read a dense MLP out of a module of any class by watching it compute: its weights, its activation, its dropout.

read_mlp() must know that a module computes  y = act(x @ w1^T + b1) @ w2^T + b2,  plain or gated, and nothing else. A
probe calls it on random x while each of its linear layers returns random numbers h instead of its product:

    x --> [linear] h --?--> hidden --> [linear] y --?--> output

Then the steps marked ? are seen alone: hidden must be the activation of h, for one of the activations that are known,
and output must be y. h is in float64, which decides that to 13 digits whatever dtype the weights have; a module that
fails with it is probed in its own dtype. A second probe in training mode shows the dropout. That a linear layer
computes its weight and bias, and no adapter or scale beside them, is checked on its own (_weight_and_bias).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmoe_ext import ops
from fmoe_ext.experts import GatedActivation, SquaredReLU, activation_name
from fmoe_ext.linear import DTYPES
from fmoe_ext.models.target import DenseMLP
from fmoe_ext.ops.activations import KINDS, PLAIN_ACTIVATIONS

# {plain activation: the name of the gated one, which the operators fuse}
GATED = MappingProxyType(
    {kind.curve: kind.name for kind in KINDS if kind.gated and kind.curve in PLAIN_ACTIVATIONS}
)
# modules of those that have no fused gated form, for experts.GatedActivation
_UNFUSED_GATES = MappingProxyType({"relu": nn.ReLU, "relu2": SquaredReLU})
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class _UnreadableError(Exception):
    """Ends the reading of a module: str() is the reason, which follows "but" in the errors of fmoefy."""


class _EnoughError(BaseException):
    """Ends a probe at its last linear layer; a BaseException, which no `except Exception` of a model stops."""


@dataclass(frozen=True)
class Reading:
    """The MLP that read_mlp() found, the dropout modules after it, and notes on what the MoE layer will not have."""

    dense: DenseMLP
    after: tuple[nn.Module, ...] = ()
    notes: tuple[str, ...] = ()

    def wrap(self, moe: nn.Module) -> nn.Module:
        """Return the MoE layer, followed by the dropout that follows the MLP."""
        return nn.Sequential(moe, *self.after) if self.after else moe


def is_linear(module: Any) -> bool:
    """Return True for nn.Linear and for the Conv1D of Transformers (GPT-2), whose weight is [in, out]."""
    return isinstance(module, nn.Linear) or _is_conv1d(module)


def _is_conv1d(module: Any) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def weight_shape(linear: Any) -> tuple[int, ...]:
    """Return (out, in) of a linear module."""
    return tuple(linear.weight.shape)[:: -1 if _is_conv1d(linear) else 1]


def simplify(activation: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Return the name that ops.expert_mlp has for what an activation computes; the activation itself if it has none."""
    name = activation_name(activation)
    if name is not None:
        return name
    # a trained or random activation is no function of its input alone, even if it starts as a known one
    if isinstance(activation, nn.Module) and (
        list(activation.parameters()) or any(isinstance(m, _DROPOUTS) for m in activation.modules())
    ):
        return activation
    probe = torch.linspace(-60, 60, 961, dtype=torch.float64, device="cpu")  # wide: some activations clip
    value = _value(activation, probe)
    if value is not None:
        for name in PLAIN_ACTIVATIONS:
            if (value - ops.ACTIVATIONS[name](probe)).abs().max() <= 1e-13:
                return name
    return activation


def read_mlp(module: nn.Module, activation: str | Callable[..., Any] | None = None) -> Reading:
    """Read a module that maps [..., d_model] to itself through two linear maps, or three if gated -> Reading.

    The activation is one that the module holds, one of PLAIN_ACTIVATIONS or GATED, or the given one. For a module that
    computes anything else dense.why_unreadable has the reason; if the activation alone is unknown and one is given,
    dense has the sizes and weights beside it.
    """
    linears = [m for m in module.modules() if is_linear(m)]
    try:
        return _read(module, linears, activation)
    except _UnreadableError as why:
        d_model = weight_shape(linears[0])[1] if linears else None
        return Reading(DenseMLP(d_model, None, None, why_unreadable=str(why)))


def read_pair(
    module: nn.Module,
    pair: tuple[nn.Module, nn.Module],
    activation: Callable[..., Any],
    call: Callable[[Tensor], Any],
) -> tuple[DenseMLP, bool]:
    """Read two linear layers inside a larger module -> (MLP, True if the first one's input is the argument of call).

    call(x [2, 3, d_model]) runs the part of the module that has both. Only the activation may lie between them. What
    comes before the first and after the second is not checked: the caller leaves it in its place.
    """
    try:
        (w1, b1), (w2, b2) = map(_weight_and_bias, pair)
        with _probing(module, w1) as x:
            module.eval()
            run = _watch(module, pair, call, x, to_the_end=False)
            # each is called once, in this order, with the activation alone between them
            if [m for m, _, _ in run.linears] != list(pair):
                raise _UnreadableError("it does not call its two linear layers one after the other")
            (_, entering, h), (_, hidden, _) = run.linears
            if _misfit(activation, [h], hidden, True) > 1:
                raise _UnreadableError("more than the activation lies between its two linear layers")
    except _UnreadableError as why:
        return DenseMLP(None, None, simplify(activation), why_unreadable=str(why)), False
    dense = DenseMLP(w1.shape[1], w2.shape[1], simplify(activation), w1, b1, w2, b2)
    return dense, _is_same(entering, x)


def _weight_and_bias(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight [out, in] and bias [out] or None, detached; _UnreadableError if the layer computes more."""
    weight, bias = linear.weight.detach(), linear.bias
    # __tensor_flatten__: a tensor subclass, as quantized weights are
    if hasattr(weight, "__tensor_flatten__") or weight.dtype not in DTYPES:
        kind = weight.dtype if type(weight) in (Tensor, nn.Parameter) else type(weight).__name__
        raise _UnreadableError(f"its weights are {kind}")
    weight = weight.t() if _is_conv1d(linear) else weight
    bias = None if bias is None else bias.detach()
    with _probing(linear, weight) as x:
        linear.eval()
        value, expected = _run(linear, x), F.linear(x, weight, bias)
        # Sums are float32 (or float64) and then rounded: an error of the result's eps, and one of the summands' sizes.
        eps = torch.finfo(x.dtype).eps
        sizes = float(x.norm(dim=-1).max() * weight.norm(dim=-1).max())
        limit = 4 * eps * expected.abs() + 16 * min(eps, torch.finfo(torch.float32).eps) * sizes
    is_tensor = isinstance(value, Tensor) and value.shape == expected.shape
    if not is_tensor or bool(((value - expected).abs() > limit).any()):
        raise _UnreadableError(f"a {type(linear).__name__} in it computes more than its weight and bias")
    return weight, bias


def _read(module: nn.Module, linears: list[nn.Module], given: str | Callable[..., Any] | None) -> Reading:
    if len(linears) not in (2, 3):
        raise _UnreadableError(
            f"it has {len(linears)} linear layers, where an MLP has 2, or 3 if it is gated"
        )
    # 1. each linear layer alone
    weights = {m: _weight_and_bias(m) for m in linears}
    # 2. all of them called once, the first ones on x, and nothing after the last
    with _probing(module, weights[linears[0]][0]) as x:
        module.eval()
        run = _watch(module, linears, module, x)
        if len(run.linears) != len(linears) or {m for m, _, _ in run.linears} != set(linears):
            raise _UnreadableError(f"it calls linear layers {len(run.linears)} times, but has {len(linears)}")
        *first, (last, hidden, y) = run.linears
        if not all(_is_same(entering, x) for _, entering, _ in first):
            raise _UnreadableError("its first linear layer is not applied to its input")
        if not isinstance(run.output, Tensor) or run.output.shape != x.shape:
            raise _UnreadableError("it does not return one tensor of the shape of its input")
        if not _is_same(run.output, y):
            raise _UnreadableError("something other than dropout follows its last linear layer")
        # 3. the activation between them
        activation: str | Callable[..., Any] | None = None
        gate_first, why = True, ""
        try:
            activation, gate_first = _find_activation(module, [h for _, _, h in first], hidden, given)
        except _UnreadableError as error:
            if given is None:
                raise
            why = str(error)  # the weights are good all the same, for the activation that the user gives
        # 4. a second probe, in training, shows the dropout
        module.train()
        train = run if why else _watch(module, linears, module, x)
    # 5. w1 and b1 with the gate before up, be they two layers or the halves of one
    if not gate_first:
        first.reverse()
    w1: Any = tuple(weights[m][0] for m, _, _ in first)
    biases: list[Any] = [weights[m][1] for m, _, _ in first]
    if len({b is None for b in biases}) > 1:
        raise _UnreadableError("one of its first linear layers has a bias and the other has none")
    b1 = None if biases[0] is None else torch.cat(biases)
    w2, b2 = weights[last]
    d_hidden = w2.shape[1]
    if len(first) == 1:
        w1 = w1[0]
        if not gate_first:
            up, gate = w1.split(d_hidden)
            w1 = (gate, up)
            b1 = None if b1 is None else b1.roll(d_hidden)
    dense = DenseMLP(w2.shape[0], d_hidden, activation, w1, b1, w2, b2, why_unreadable=why)
    # dropout moves what it passes: between the layers it cannot stay, after the last one a module can
    notes = []
    if not torch.equal(train.linears[-1][1], run.linears[-1][1]):
        notes.append("its dropout between the linear layers is left out")
    if not train.dropouts_after and not _is_same(train.output, train.linears[-1][2]):
        notes.append("its dropout after the last linear layer is left out")
    return Reading(dense, train.dropouts_after, tuple(notes))


@dataclass
class _Run:
    """One call of a module whose linear layers return random numbers."""

    linears: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)  # (module, input, output)
    # (module, number of linears before it)
    dropouts: list[tuple[nn.Module, int]] = field(default_factory=list)
    output: Any = None

    @property
    def dropouts_after(self) -> tuple[nn.Module, ...]:
        return tuple(m for m, num_before in self.dropouts if num_before == len(self.linears))


@contextlib.contextmanager
def _probing(module: nn.Module, weight: Tensor) -> Iterator[Tensor]:
    """Yield random tokens [2, 3, in] like weight [out, in]; restore modes and random generators afterwards."""
    generator = torch.Generator("cpu").manual_seed(0)
    # drawn on the CPU: the same numbers on every device
    x = torch.randn(2, 3, weight.shape[1], device="cpu", generator=generator).to(weight)
    modes = [(m, m.training) for m in module.modules()]  # the caller chooses eval() or train()
    try:
        with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
            yield x
    finally:
        for m, training in modes:
            m.training = training


def _watch(
    module: nn.Module,
    linears: Sequence[nn.Module],
    call: Callable[[Tensor], Any],
    x: Tensor,
    to_the_end: bool = True,
) -> _Run:
    """Call call(x) while the linear layers return random numbers, and note their inputs; see _watch_in()."""
    try:
        return _watch_in(torch.float64, module, linears, call, x, to_the_end)
    except _UnreadableError:  # a layer between them may take the dtype of the model only
        return _watch_in(x.dtype, module, linears, call, x, to_the_end)


def _watch_in(
    dtype: torch.dtype,
    module: nn.Module,
    linears: Sequence[nn.Module],
    call: Callable[[Tensor], Any],
    x: Tensor,
    to_the_end: bool,
) -> _Run:
    """Note one call in a _Run. All linear layers but the last return this dtype, the last one that of its weight."""
    run, generator = _Run(), torch.Generator("cpu").manual_seed(1)
    hooks = [
        m.register_forward_hook(lambda m, *_: run.dropouts.append((m, len(run.linears))))
        for m in module.modules()
        if isinstance(m, _DROPOUTS)
    ]

    # in place of a linear layer's forward
    def answer(m: Any, x: Tensor) -> Tensor:
        size = weight_shape(m)[0]
        y = 2 * torch.randn(*x.shape[:-1], size, dtype=torch.float64, device="cpu", generator=generator)
        y[..., ::8] *= 8  # some are large: activations may clip
        is_last = len(run.linears) == len(linears) - 1
        y = y.to(x.device, m.weight.dtype if is_last else dtype)
        run.linears.append((m, x.clone(), y))
        if is_last and not to_the_end:
            raise _EnoughError
        return y.clone()  # the module may change it in place

    try:
        with _forwards_by(answer, linears), contextlib.suppress(_EnoughError):
            run.output = _run(call, x)
    finally:
        for hook in hooks:
            hook.remove()
    if not run.linears:
        raise _UnreadableError("it does not call its linear layers")
    return run


@contextlib.contextmanager
def _forwards_by(answer: Callable[[Any, Tensor], Tensor], modules: Sequence[Any]) -> Iterator[None]:
    """Replace the forwards of modules by answer(module, x) inside the block."""
    own_forwards = {m: vars(m).get("forward") for m in modules}  # set on the instance, as accelerate does
    try:
        for m in modules:
            m.forward = functools.partial(answer, m)
        yield
    finally:
        for m, forward in own_forwards.items():
            vars(m).pop("forward", None)
            if forward is not None:
                m.forward = forward


def _run(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return call(x)
    except Exception as error:  # an unknown module may raise anything
        raise _UnreadableError(f"calling it with one tensor {list(x.shape)} fails: {error}") from error


def _is_same(value: Any, x: Tensor) -> bool:
    """Return True if value holds the numbers of x; shape and dtype may differ."""
    return (
        isinstance(value, Tensor)
        and value.numel() == x.numel()
        and torch.equal(value.reshape(x.shape), x.to(value.dtype))
    )


def _find_activation(
    module: nn.Module, first: Sequence[Tensor], hidden: Tensor, given: str | Callable[..., Any] | None
) -> tuple[str | Callable[..., Any], bool]:
    """Find the activation that makes hidden of first -> (activation, True if the gate comes before up)."""
    if len(first) == 1 and first[0].shape[-1] == 2 * hidden.shape[-1]:
        first = first[0].chunk(2, -1)
    if any(h.numel() != hidden.numel() for h in first):
        raise _UnreadableError(
            "what goes into its last linear layer has another shape than what its first give"
        )
    candidates = [*_own(module)]
    if given is not None:  # a gated activation by the plain one that it applies to its gate
        plain = {gated: plain for plain, gated in GATED.items()}
        candidates.append(plain[given] if isinstance(given, str) and given in plain else simplify(given))
    candidates += PLAIN_ACTIVATIONS
    # the best fit, not the first: GELU and its tanh form differ by less than 16 bits round
    pairs = [(act, order) for act in candidates for order in (True, False)]
    misfits = [_misfit(act, first, hidden, order) for act, order in pairs]
    best = min(range(len(pairs)), key=misfits.__getitem__)
    if not misfits[best] <= 1:
        raise _UnreadableError(
            f"between its linear layers it computes none of {', '.join(PLAIN_ACTIVATIONS)}, plain or gated"
        )
    activation, gate_first = pairs[best]
    if len(first) == 1:  # plain
        return activation, True
    if isinstance(activation, str) and activation in GATED:
        return GATED[activation], gate_first
    if isinstance(activation, str):
        make = _UNFUSED_GATES.get(activation)
        activation = ops.ACTIVATIONS[activation] if make is None else make()
    return GatedActivation(activation), gate_first


def _own(module: nn.Module) -> Iterator[str | Callable[..., Any]]:
    """Yield the activations that a module holds, as submodules or as functions with `act` in their names."""
    for m in module.modules():
        if m is not module and not list(m.children()) and not is_linear(m) and not isinstance(m, _DROPOUTS):
            yield simplify(m)
        for name, value in vars(m).items():
            if "act" in name and callable(value) and not isinstance(value, (nn.Module, type)):
                yield simplify(value)


def _misfit(activation: Any, first: Sequence[Tensor], hidden: Tensor, gate_first: bool) -> float:
    """Return the largest error of the activation of first against hidden, over what rounding explains."""
    gate, *up = first if gate_first else first[::-1]
    value = _value(
        ops.ACTIVATIONS.get(activation, activation) if isinstance(activation, str) else activation, gate
    )
    if value is None or value.numel() != hidden.numel():
        return float("inf")
    # float64: 64 units in the last place. Other dtypes round the activation's input and result by themselves.
    value = (value * up[0] if up else value).reshape(hidden.shape).double()
    size = value.abs()
    if gate.dtype == torch.float64:
        limit = 64 * torch.finfo(torch.float64).eps * size.max()
    else:
        limit = (
            4
            * torch.finfo(gate.dtype).eps
            * (size + (gate * up[0] if up else gate).abs().reshape(size.shape))
        )
    if hidden.dtype != gate.dtype:  # the module has cast it
        limit = limit + 4 * torch.finfo(hidden.dtype).eps * size
    return ((value - hidden.double()).abs() / limit.clamp(min=torch.finfo(torch.float32).tiny)).max().item()


def _value(function: Any, x: Tensor) -> Tensor | None:
    """Return function(x); None if it cannot be called so, or returns anything else than a tensor of x's shape."""
    try:
        with torch.no_grad():
            value = function(x.clone())
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return None
    return value if isinstance(value, Tensor) and value.shape == x.shape else None
