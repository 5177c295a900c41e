"""The experts of one device as parameters that compute together (grouped products) or one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import nn

from fmoe_ext.remote.expert_classes import ExpertClass, StackedFfn

Tensors: TypeAlias = "tuple[torch.Tensor, ...]"


@dataclass(frozen=True)
class Part:
    """The rows of one expert in a batch; grad: of its output, in a backward."""

    place: int
    inputs: Tensors
    grad: torch.Tensor | None = None


@dataclass(frozen=True)
class Gradients:
    inputs: tuple[torch.Tensor | None, ...]  # None for integer inputs
    parameters: dict[str, torch.Tensor]  # one entry for each of Stack.views


class Stack(Protocol):
    """Experts at places 0, 1, ...; parts of a call have ascending places, each at most once."""

    def resize(self, num_places: int) -> None: ...
    def views(self, place: int) -> dict[str, torch.Tensor]: ...
    def forward(self, parts: Sequence[Part]) -> list[torch.Tensor]: ...
    def backward(self, parts: Sequence[Part]) -> list[Gradients]: ...


def make_stack(expert_class: ExpertClass, hidden_dim: int, device: torch.device) -> Stack:
    """Grouped where the class can, otherwise one module an expert."""
    if expert_class.make_stacked is not None:
        return GroupedStack(expert_class.make_stacked(1, hidden_dim).to(device))
    return ModuleStack(expert_class, hidden_dim, device)


class GroupedStack:
    """All experts in one product: every parameter has an entry for each place in dimension 0."""

    def __init__(self, module: StackedFfn):
        self._module = module.requires_grad_(False)  # for its compute(); its own parameters are not used
        self._names = [name for name, _ in module.named_parameters()]
        self._parameters = [p.detach().new_empty((0, *p.shape[1:])) for p in module.parameters()]

    def resize(self, num_places: int) -> None:
        """Keeps what is there. All views are made anew: ask for them again."""
        for n, old in enumerate(self._parameters):
            kept = min(num_places, old.shape[0])
            self._parameters[n] = old.new_zeros((num_places, *old.shape[1:]))
            self._parameters[n][:kept] = old[:kept]

    def views(self, place: int) -> dict[str, torch.Tensor]:
        """The parameters of one expert, [1, *] each, sharing memory with those of all."""
        return {n: p[place : place + 1] for n, p in zip(self._names, self._parameters, strict=True)}

    def forward(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        with torch.no_grad():
            rows, counts, parameters, _ = self._gather(parts)
            y = self._module.compute(parameters, rows, counts)
        return list(y.split([part.inputs[0].shape[0] for part in parts]))

    def backward(self, parts: Sequence[Part]) -> list[Gradients]:
        rows, counts, parameters, first = self._gather(parts)
        leaves = [rows.requires_grad_(), *(p.requires_grad_() for p in parameters)]
        y = self._module.compute(leaves[1:], rows, counts)
        grad = _cat([part.grad for part in parts if part.grad is not None])
        d_rows, *d_parameters = torch.autograd.grad(y, leaves, grad)
        by_part = d_rows.split([part.inputs[0].shape[0] for part in parts])
        return [
            Gradients(
                (d_inputs,),
                {
                    name: d[part.place - first, None]
                    for name, d in zip(self._names, d_parameters, strict=True)
                },
            )
            for part, d_inputs in zip(parts, by_part, strict=True)
        ]

    def _gather(self, parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor], int]:
        """Rows, counts and parameters of the places from the first to the last that are needed."""
        first, end = parts[0].place, parts[-1].place + 1
        counts = torch.zeros(end - first, dtype=torch.int64)
        for part in parts:
            counts[part.place - first] = part.inputs[0].shape[0]
        rows = _cat([part.inputs[0] for part in parts])
        device = self._parameters[0].device
        return rows.to(device), counts.to(device), [p[first:end].detach() for p in self._parameters], first


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0].detach() if len(parts) == 1 else torch.cat(list(parts))


class ModuleStack:
    """A module an expert, called one after the other."""

    def __init__(self, expert_class: ExpertClass, hidden_dim: int, device: torch.device):
        self._make = lambda: expert_class.make(hidden_dim).to(device).train()
        self._compute = expert_class.compute
        self._device = device
        self._modules: list[nn.Module] = []

    def resize(self, num_places: int) -> None:
        while len(self._modules) < num_places:
            self._modules.append(self._make())
        del self._modules[num_places:]

    def views(self, place: int) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self._modules[place].named_parameters()}

    def forward(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self._compute(self._modules[part.place], self._to_device(part.inputs)) for part in parts]

    def backward(self, parts: Sequence[Part]) -> list[Gradients]:
        return [self._backward(part) for part in parts]

    def _backward(self, part: Part) -> Gradients:
        module = self._modules[part.place]
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in self._to_device(part.inputs)]
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        leaves = [x for x in inputs if x.requires_grad] + list(trained.values())
        given = torch.autograd.grad(self._compute(module, inputs), leaves, part.grad, allow_unused=True)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, given, strict=True)]
        queue = iter(grads)
        d_inputs = tuple(next(queue) if x.requires_grad else None for x in inputs)
        return Gradients(d_inputs, dict(zip(trained, queue, strict=True)))

    def _to_device(self, tensors: Tensors) -> list[torch.Tensor]:
        return [x.detach().to(self._device) for x in tensors]
