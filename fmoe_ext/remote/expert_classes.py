"""Define the classes of experts that servers can host, and compute many experts of one class together.

An ExpertClass has a name (--expert_cls): ffn, transformer, nop, det_dropout, or a registered one. A *stack* holds all
experts of a server, each at a *place*, a number from 0 on. ExpertHost gives it a batch as one Part per expert, and
gets outputs or Gradients back, one per part; a part's tensors may be on the CPU, the results are on the stack's device:
    _GroupedStack   every parameter has dimension 0 for the places, [places, ...], so that all experts with rows compute
                    as one grouped product (ffn)
    _ModuleStack    one nn.Module per expert, called one after the other (any class)
Gradients do not depend on which experts share a batch, to the last bit: replicas repeat an update in other batches.
Shapes: R rows of a batch, D hidden_dim, E experts; B, S, D of a transformer's batch, sequence and width.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.experts import FusedExperts
from fmoe_ext.remote.schema import Schema

_DROPOUT_SHARE = 0.2  # of hidden values that a det_dropout mask drops; the others are scaled up by 1 / 0.8


class _StackedFfn(nn.Module):
    """E feed-forward blocks layer_norm(x + w2 @ gelu(w1 @ x + b1) + b2) of width D and 4D, in grouped products.

    forward(rows [R, D] sorted by expert, tokens_per_expert [E]) -> [R, D]; called with rows alone, E must be 1.
    Dimension 0 of every parameter is the expert, so compute() can take a range of the experts: p[first:end] of each.
    """

    def __init__(self, num_experts: int, hidden_dim: int):
        super().__init__()
        self.mlp = FusedExperts(num_experts, hidden_dim, 4 * hidden_dim, "gelu")
        for linear in (self.mlp.htoh4, self.mlp.h4toh):  # nn.Linear's default initialisation
            bound = linear.in_feat**-0.5
            nn.init.uniform_(linear.weight, -bound, bound)
            assert linear.bias is not None
            nn.init.uniform_(linear.bias, -bound, bound)
        self.norm_weight = nn.Parameter(torch.ones(num_experts, hidden_dim))
        self.norm_bias = nn.Parameter(torch.zeros(num_experts, hidden_dim))

    def forward(self, rows: torch.Tensor, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor:
        return self.compute(tuple(self.parameters()), rows, tokens_per_expert)

    def compute(
        self,
        parameters: Sequence[torch.Tensor],
        rows: torch.Tensor,
        tokens_per_expert: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """forward() with the parameters of some experts, in the order of self.parameters()."""
        norm_weight, norm_bias, w1, b1, w2, b2 = parameters
        if tokens_per_expert is None:
            tokens_per_expert = torch.tensor([rows.shape[0]], device="cpu")
        y = rows + self.mlp(rows, tokens_per_expert, weights=(w1, b1, w2, b2))
        y = F.layer_norm(y, y.shape[-1:])
        # expert by expert: an expert's gradients must not depend, to the last bit, on the rest of the batch
        parts = zip(y.split(tokens_per_expert.tolist()), norm_weight, norm_bias, strict=True)
        return torch.cat([part * weight + bias for part, weight, bias in parts])


class _TransformerBlock(nn.Module):
    """PyTorch's nn.TransformerEncoderLayer over [B, S, D], without dropout: backward repeats forward exactly."""

    def __init__(self, hidden_dim: int):
        super().__init__()
        heads = next(heads for heads in (16, 8, 4, 2, 1) if hidden_dim % heads == 0)
        self.layer = nn.TransformerEncoderLayer(
            hidden_dim, heads, 4 * hidden_dim, dropout=0.0, activation="gelu", batch_first=True
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class _Nop(nn.Module):
    """Return the input: an expert without work, to measure what calls alone take."""

    def __init__(self, hidden_dim: int):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()), requires_grad=False)  # an optimizer needs one parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class _DeterministicDropout(nn.Module):
    """A linear block whose dropout mask is the client's second input, so that backward drops what forward dropped."""

    def __init__(self, hidden_dim: int):
        super().__init__()
        self.linear_in = nn.Linear(hidden_dim, 2 * hidden_dim)
        self.activation = nn.ReLU()
        self.linear_out = nn.Linear(2 * hidden_dim, hidden_dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.activation(self.linear_in(x))
        return self.linear_out(h * mask / (1 - _DROPOUT_SHARE))


@dataclass(frozen=True)
class ExpertClass:
    """A kind of expert that servers can host."""

    name: str
    make: Callable[[int], nn.Module]  # (hidden_dim) -> one expert
    sample: Callable[[int], tuple[torch.Tensor, ...]]  # (hidden_dim) -> one row of each input
    # (num_experts, hidden_dim) -> experts that compute together; None: one module per expert
    make_stacked: Callable[[int, int], _StackedFfn] | None = None
    keywords: tuple[str, ...] = ()  # names of the last inputs, if forward takes them by keyword

    def call(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the outputs of one expert, always as a tuple."""
        count = len(inputs) - len(self.keywords)
        keywords = dict(zip(self.keywords, inputs[count:], strict=True))
        y: torch.Tensor | Sequence[torch.Tensor] = module(*inputs[:count], **keywords)
        return (y,) if isinstance(y, torch.Tensor) else tuple(y)

    def compute(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the output of one expert; several are flattened and joined to one, [B, sum of their sizes]."""
        outputs = self.call(module, inputs)
        return outputs[0] if len(outputs) == 1 else torch.cat([y.flatten(1) for y in outputs], dim=1)


def _one_row(hidden_dim: int) -> tuple[torch.Tensor, ...]:
    return (torch.empty(hidden_dim, device="cpu"),)


_BUILT_IN = (
    ExpertClass("ffn", lambda hidden_dim: _StackedFfn(1, hidden_dim), _one_row, _StackedFfn),
    ExpertClass(
        "transformer",
        _TransformerBlock,
        lambda hidden_dim: (torch.empty(0, hidden_dim, device="cpu"),),  # a size of 0 stands for any size
    ),
    ExpertClass("nop", _Nop, _one_row),
    ExpertClass(
        "det_dropout",
        _DeterministicDropout,
        # the mask is as wide as the hidden layer
        lambda hidden_dim: (*_one_row(hidden_dim), *_one_row(2 * hidden_dim)),
    ),
)
_CLASSES = {kind.name: kind for kind in _BUILT_IN}  # register_expert_class() adds to it


def find_expert_class(name: str) -> ExpertClass:
    """Return the expert class of a name; ValueError, which lists the known ones, for any other."""
    if name not in _CLASSES:
        raise ValueError(f"unknown expert class {name!r}: choose one of {', '.join(_CLASSES)}")
    return _CLASSES[name]


def register_expert_class(
    name: str, sample: Callable[[int], torch.Tensor | tuple[torch.Tensor, ...]], keywords: Sequence[str] = ()
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator: let servers host a module as --expert_cls name; it is made as cls(hidden_dim).

    sample(hidden_dim) -> one row of each input of its forward, without the batch dimension; a size of 0 stands for
    any size. All inputs and outputs must have the batch in dimension 0, and rows must not depend on each other.
    keywords: the names of the last inputs, if forward takes them by keyword. Several outputs must have one dtype and
    fixed sizes.
    """

    def as_tuple(hidden_dim: int) -> tuple[torch.Tensor, ...]:
        inputs = sample(hidden_dim)
        return inputs if isinstance(inputs, tuple) else (inputs,)

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        if name in _CLASSES:
            raise ValueError(f"an expert class {name!r} is registered already")
        _CLASSES[name] = ExpertClass(name, cls, as_tuple, keywords=tuple(keywords))
        return cls

    return register


def initial_state(
    expert_class: ExpertClass, hidden_dim: int, uid: str, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return the weights and buffers that an expert starts from: a function of class, width, uid and seed alone."""
    # a seed of its own, so that the weights are the same on every server and whatever was made before
    digest = hashlib.sha256(f"{seed} {uid}".encode()).digest()
    # fork_rng: the program's own random numbers go on as if none had been drawn here
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(int.from_bytes(digest[:7], "big"))
        module = expert_class.make(hidden_dim)
    return {name: x.detach() for name, x in (*module.named_parameters(), *_kept_buffers(module).items())}


def _kept_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a module: those that its state dict has."""
    kept = module.state_dict().keys()
    return {name: x for name, x in module.named_buffers() if name in kept}


def make_expert(name: str, hidden_dim: int, uid: str = "", seed: int = 0) -> nn.Module:
    """Make a local expert of a registered class, with the weights from which a server would start `uid`."""
    expert_class = find_expert_class(name)
    module = expert_class.make(hidden_dim)
    module.load_state_dict(initial_state(expert_class, hidden_dim, uid, seed), strict=False)
    return module


def find_schema(expert_class: ExpertClass, hidden_dim: int) -> Schema:
    """Return the schema of a class: its inputs as it declares them, its outputs as found by calling one expert."""
    samples = expert_class.sample(hidden_dim)
    has_any_size = any(0 in x.shape for x in samples)
    # one row of zeros; a free size is 1 here and then 2: sizes of the output that change with it are free, too
    rows, longer = (
        [torch.zeros(1, *(size or n for size in x.shape), dtype=x.dtype, device="cpu") for x in samples]
        for n in (1, 2)
    )
    with torch.no_grad(), torch.device("cpu"):
        module = expert_class.make(hidden_dim)
        outputs = expert_class.call(module, rows)
        other = expert_class.call(module, longer) if has_any_size else outputs
    if not all(part.dim() and part.shape[0] == 1 for part in outputs):
        shapes = [list(part.shape) for part in outputs]
        raise ValueError(f"{expert_class.name} must return one row for each row, but returned {shapes}")
    if len(outputs) == 1:
        sizes = [a if a == b else 0 for a, b in zip(outputs[0].shape[1:], other[0].shape[1:], strict=True)]
        y = torch.empty(sizes, dtype=outputs[0].dtype, device="cpu")
        return Schema.of(samples, y, expert_class.keywords)
    if len({part.dtype for part in outputs}) != 1 or has_any_size:
        raise ValueError(f"the outputs of {expert_class.name} must have one dtype and fixed sizes")
    if any(0 in part.shape for part in outputs):
        shapes = [list(part.shape) for part in outputs]
        raise ValueError(f"several outputs of {expert_class.name} must have no size of 0, but are {shapes}")
    flat = torch.cat([part.flatten(1) for part in outputs], dim=1)
    parts = [tuple(part.shape[1:]) for part in outputs]
    return Schema.of(samples, flat[0], expert_class.keywords, parts)


Tensors: TypeAlias = "tuple[torch.Tensor, ...]"


@dataclass(frozen=True)
class Part:
    """The rows of one expert in a batch."""

    place: int  # of the expert in its stack
    inputs: Tensors
    grad: torch.Tensor | None = None  # of its output, in a backward


@dataclass(frozen=True)
class Gradients:
    """Gradients of a part."""

    inputs: tuple[torch.Tensor | None, ...]  # None for integer inputs
    parameters: dict[str, torch.Tensor]  # by name, of those in Stack.views() that are trained


def make_stack(expert_class: ExpertClass, hidden_dim: int, device: torch.device) -> "Stack":
    """Make an empty stack: grouped if the class can compute so, otherwise of one module per expert."""
    if expert_class.make_stacked is not None:
        with torch.device("cpu"):
            module = expert_class.make_stacked(1, hidden_dim)
        return _GroupedStack(module.to(device))
    return _ModuleStack(expert_class, hidden_dim, device)


class _GroupedStack:
    """Experts whose parameters lie side by side, [places, ...], and which compute as one grouped product.

    The parts of a call must have ascending places, each at most once.
    """

    def __init__(self, module: _StackedFfn):
        # for its compute() alone; its own parameters are not used
        self._module = module.requires_grad_(False)
        self._names = [name for name, _ in module.named_parameters()]
        self._parameters = [p.detach().new_empty((0, *p.shape[1:])) for p in module.parameters()]

    def resize(self, num_places: int) -> None:
        """Change the number of places and keep the experts. views() made before still point to the old memory."""
        for n, old in enumerate(self._parameters):
            kept = min(num_places, old.shape[0])
            self._parameters[n] = old.new_zeros((num_places, *old.shape[1:]))
            self._parameters[n][:kept] = old[:kept]

    def views(self, place: int) -> dict[str, torch.Tensor]:
        """Return the parameters of one expert by name, [1, *] each, as views of the stack."""
        return {n: p[place : place + 1] for n, p in zip(self._names, self._parameters, strict=True)}

    def buffers(self, place: int) -> dict[str, torch.Tensor]:
        """Return {}: these experts have no buffers."""
        return {}

    def forward(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        with torch.no_grad():
            rows, counts, parameters, _ = self._gather(parts)
            y = self._module.compute(parameters, rows, counts)
        return list(y.split([part.inputs[0].shape[0] for part in parts]))

    def backward(self, parts: Sequence[Part]) -> list[Gradients]:
        # parameters: [places, ...] each, new leaves of autograd that share the stack's memory
        rows, counts, parameters, first = self._gather(parts)
        leaves = [rows.requires_grad_(), *(p.requires_grad_() for p in parameters)]
        y = self._module.compute(leaves[1:], rows, counts)
        grad = _cat([part.grad for part in parts if part.grad is not None])
        d_rows, *d_parameters = torch.autograd.grad(y, leaves, grad.to(y.device))
        by_part = d_rows.split([part.inputs[0].shape[0] for part in parts])
        found = []
        for part, d_inputs in zip(parts, by_part, strict=True):
            grads = zip(self._names, d_parameters, strict=True)
            found.append(Gradients((d_inputs,), {name: d[part.place - first, None] for name, d in grads}))
        return found

    def _gather(self, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], int]:
        """Return rows, counts and parameters for all places from the first part's to the last part's, and the first.

        A place between them without a part has a count of 0.
        """
        first, end = parts[0].place, parts[-1].place + 1
        counts = torch.zeros(end - first, dtype=torch.int64, device="cpu")
        for part in parts:
            counts[part.place - first] = part.inputs[0].shape[0]
        rows = _cat([part.inputs[0] for part in parts])
        device = self._parameters[0].device
        return rows.to(device), counts.to(device), [p[first:end].detach() for p in self._parameters], first


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].detach() if len(parts) == 1 else torch.cat(list(parts))


class _ModuleStack:
    """Experts of any class: one module an expert, called one after the other. Its methods are _GroupedStack's."""

    def __init__(self, expert_class: ExpertClass, hidden_dim: int, device: torch.device):
        self._expert_class, self._hidden_dim = expert_class, hidden_dim
        self._compute = expert_class.compute
        self._device = device
        self._modules: list[nn.Module] = []

    def resize(self, num_places: int) -> None:
        while len(self._modules) < num_places:
            with torch.device("cpu"):
                module = self._expert_class.make(self._hidden_dim)
            self._modules.append(module.to(self._device).train())
        del self._modules[num_places:]

    def views(self, place: int) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self._modules[place].named_parameters()}

    def buffers(self, place: int) -> dict[str, torch.Tensor]:
        return _kept_buffers(self._modules[place])

    def forward(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self._compute(self._modules[part.place], self._to_device(part.inputs)) for part in parts]

    def backward(self, parts: Sequence[Part]) -> list[Gradients]:
        found = []
        for part in parts:
            module, tensors = self._modules[part.place], self._to_device(part.inputs)
            inputs = [x.requires_grad_() if x.is_floating_point() else x for x in tensors]
            trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
            leaves = [x for x in inputs if x.requires_grad] + list(trained.values())
            y, grad = self._compute(module, inputs), part.grad
            grad = None if grad is None else grad.to(y.device)
            given = torch.autograd.grad(y, leaves, grad, allow_unused=True)
            # in the order of `leaves`, inputs first; zeros for what the output does not use
            queue = iter(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, given, strict=True))
            d_inputs = tuple(next(queue) if x.requires_grad else None for x in inputs)
            found.append(Gradients(d_inputs, dict(zip(trained, queue, strict=True))))
        return found

    def _to_device(self, tensors: Tensors) -> list[torch.Tensor]:
        return [x.detach().to(self._device) for x in tensors]


Stack: TypeAlias = _GroupedStack | _ModuleStack
