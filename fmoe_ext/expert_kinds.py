"""The kinds of experts that a layer can have, a class each: how they are called, and what they can do.

    Fused         FusedExperts: tokens are read through an index, one operator
    Separate      a module for each expert, called in turn; the host must know their numbers of rows
    OneModule     a user's module for all experts: module(rows sorted by expert, tokens_per_expert)
    OwnExpertFn   a subclass of FMoE with an expert_fn of its own (layers.py asks for this one itself)

A fifth one, FusedByWidth, is Megatron's (megatron/core/expert_tensor.py). FMoE.forward calls compute() for each chunk
of experts. A new kind is a class here and an entry in KINDS, before OneModule, which fits all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.shadowing import fetch
from fmoe_ext.experts import FusedExperts
from fmoe_ext.ops.outside_graphs import is_exporting, outside_graphs
from fmoe_ext.routing import ExpertInput, permute_rows, sort_choices, unpermute_rows
from fmoe_ext.tokens import Nest, leaves_of, map_structure


class _HasExperts(Protocol):
    """Attributes of a layer that the kinds use."""

    @property
    def experts(self) -> Any: ...

    @property
    def experts_fused(self) -> bool: ...

    def expert_fn(self, inp: Nest, fwd_expert_count: torch.Tensor) -> Nest: ...

    def expert_fn_single(self, inp: Nest, fwd_expert_count: int | torch.Tensor, idx: int) -> Nest: ...


class ExpertKind:
    """The experts of one layer, as its forward calls them.

    has_whole_experts: False if other ranks have parts of these experts, as FusedByWidth.
    """

    has_whole_experts = True

    def __init__(self, layer: _HasExperts):
        self.layer = layer

    @staticmethod
    def fits(layer: _HasExperts) -> bool:
        """Return whether layer.experts are of this kind."""
        raise NotImplementedError

    @property
    def can_be_divided(self) -> bool:
        """Return whether some experts can compute without the others, as overlap_degree > 1 needs."""
        return False

    @property
    def can_be_shadowed(self) -> bool:
        """Return whether a rank can compute experts of another with parameters that it fetches."""
        return False

    @property
    def depends_on_batch(self) -> str | None:
        """Why a row's result may depend on the other rows, and what to do; None where it does not."""
        return None

    def compute(
        self, x: Nest, topk_idx: torch.Tensor, topk_weights: torch.Tensor, first: int, end: int
    ) -> Nest:
        """Compute the experts [first, end) on tokens: x [N, *] or a nest -> [N, *], weighted and summed over K.

        topk_idx [N, K] counts experts from first and is -1 for no expert of these; topk_weights [N, K].
        """
        rows, handle = permute_rows(x, topk_idx, end - first)
        results = self.on_rows(rows, handle.tokens_per_expert, first)
        num_rows = len(leaves_of(rows)[0])
        for result in leaves_of(results):
            # experts may leave out the rows of dropped choices, which come last; only a wrong result is counted for
            if result.shape[:1] != (num_rows,) and result.shape[:1] != (
                needed := int(handle.tokens_per_expert.sum()),
            ):
                raise _other_rows("the experts", f"{num_rows}, or {needed} without dropped choices", result)
        return unpermute_rows(results, handle, topk_weights)

    def on_rows(self, rows: Nest, tokens_per_expert: torch.Tensor, first: int = 0) -> Nest:
        """Compute the experts from first on, as many as have counts, on rows [R, *] sorted by expert -> [R, *]."""
        raise NotImplementedError

    def divided(self, chunk_ends: Sequence[int]) -> ExpertKind:
        """Return these experts, ready to compute the ranges that end at chunk_ends; RuntimeError if they cannot."""
        if len(chunk_ends) > 1 and not self.can_be_divided:
            raise RuntimeError(
                f"overlap_degree={len(chunk_ends)} computes some experts at a time, which this layer's experts cannot "
                "do: use FusedExperts (without hooks on or wrappers around htoh4 and h4toh) or separate experts, or "
                "overlap_degree=1"
            )
        return self

    def fetched(self, tokens: ExpertInput, expert_parallel: ExpertParallel) -> ExpertKind:
        """Return an ExpertKind of the experts tokens.shadows, fetched from their ranks; RuntimeError if it cannot."""
        raise RuntimeError(
            f"the experts of {type(self.layer).__name__} cannot be shadowed, only FusedExperts without an expert_fn "
            "of their own, hooks or wrappers: clear layer.expert_parallel.shadows"
        )


class Fused(ExpertKind):
    """FusedExperts: they read tokens through an index and sum results themselves, so that neither is kept."""

    def __init__(self, layer: _HasExperts):
        super().__init__(layer)
        # _weights(end): the arguments weights and main_grads of FusedExperts for the chunk that ends there; none here,
        # so that it uses its own
        self._weights: Callable[[int], tuple[Any, ...]] = lambda end: ()

    @staticmethod
    def fits(layer: _HasExperts) -> bool:
        return isinstance(layer.experts, FusedExperts)

    @property
    def can_be_divided(self) -> bool:
        return not self.layer.experts.must_be_called

    @property
    def can_be_shadowed(self) -> bool:
        return not self.layer.experts.must_be_called

    @property
    def depends_on_batch(self) -> str | None:
        experts = self.layer.experts
        if experts.fused_activation is not None and not experts.must_be_called:
            return None
        return "their activation is torch's, whose bits depend on places; use one of ops.ACTIVATIONS, without hooks"

    def compute(
        self, x: Nest, topk_idx: torch.Tensor, topk_weights: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        handle = sort_choices(topk_idx, end - first)
        return self.layer.experts(x, handle.tokens_per_expert, handle, topk_weights, *self._weights(end))

    def on_rows(self, rows: Nest, tokens_per_expert: torch.Tensor, first: int = 0) -> torch.Tensor:
        return self.layer.experts(rows, tokens_per_expert)

    def divided(self, chunk_ends: Sequence[int]) -> ExpertKind:
        """Split the weights once for all chunks, so that autograd joins their gradients once."""
        super().divided(chunk_ends)
        if len(chunk_ends) == 1:
            return self
        experts = self.layer.experts
        sizes = [end - first for first, end in zip((0, *chunk_ends), chunk_ends, strict=False)]
        whole = (*experts.weights, *experts.main_grads)  # w1, b1, w2, b2, main_grad of w1, of w2
        parts = [[None] * len(sizes) if w is None else w.split(sizes) for w in whole]
        by_end = dict(zip(chunk_ends, zip(*parts, strict=True), strict=True))
        divided = self._again()
        divided._weights = lambda end: (by_end[end][:4], by_end[end][4:])
        return divided

    def fetched(self, tokens: ExpertInput, expert_parallel: ExpertParallel) -> ExpertKind:
        if not self.can_be_shadowed:
            return super().fetched(tokens, expert_parallel)
        experts = self.layer.experts
        if any(experts.main_grads):
            raise RuntimeError(
                "experts with gradient_accumulation_fusion=True cannot be shadowed: their owner would get a part of "
                "the gradient in weight.grad; clear the shadows, or pass gradient_accumulation_fusion=False"
            )
        num_local, group = expert_parallel.num_local_experts, expert_parallel.group
        # topk_weights: what a compiled graph must have computed before this collective, on every rank
        weights = fetch(experts.weights, tokens.shadows, num_local, group, tokens.topk_weights)
        fetched = self._again()
        fetched._weights = lambda end: (weights,)
        return fetched

    def _again(self) -> Fused:
        """Make one of the same layer, whose _weights can be set; Dynamo of torch 2.11 cannot trace copy.copy."""
        return Fused(self.layer)


class SeparateExperts(nn.ModuleList):
    """Modules, one an expert, each called with its number of rows or without."""

    def __init__(self, modules: Iterable[nn.Module] | None = None):
        super().__init__(modules)
        self._asked: dict[int, tuple[nn.Module, bool]] = {}  # by number: signatures are slow to read

    def takes_count(self, idx: int, expert: nn.Module) -> bool:
        """Return whether expert, which is self[idx], is called with its number of rows; asks a new module anew."""
        asked = self._asked.get(idx)
        if asked is None or asked[0] is not expert:
            asked = self._asked[idx] = expert, _takes_count(expert)
        return asked[1]


_SEPARATE = (
    "separate experts, whose numbers of rows are read on the host: use experts in one module, as FMoETransformerMLP "
    "has"
)


# Dynamo of torch 2.11 mixes up the experts' numbers of rows if they are symbols of a graph.
@outside_graphs(f"no graph has {_SEPARATE}")
def _on_the_host(tokens_per_expert: torch.Tensor) -> list[int]:
    return torch.as_tensor(tokens_per_expert, device="cpu").tolist()


class Separate(ExpertKind):
    """A module for each expert, called one after the other."""

    @property
    def depends_on_batch(self) -> str | None:
        return (
            "torch's products sum by the number of rows; use FMoETransformerMLP, or FMoELinear in one module"
        )

    @staticmethod
    def fits(layer: _HasExperts) -> bool:
        return not layer.experts_fused

    @property
    def can_be_divided(self) -> bool:
        return True

    def on_rows(self, rows: Nest, tokens_per_expert: torch.Tensor, first: int = 0) -> Nest:
        if torch.jit.is_tracing():
            raise RuntimeError(
                "torch.jit.trace (and torch.onnx.export with dynamo=False) would keep for all inputs how many rows "
                "each expert has of this one: use torch.compile, or experts in one module, as FMoETransformerMLP has"
            )
        if is_exporting():
            raise RuntimeError(f"torch.export cannot trace {_SEPARATE}")
        outputs, counts = [], _on_the_host(tokens_per_expert)
        # unsafe_split: views that autograd takes for tensors of their own, since an expert may change its rows in place
        parts = map_structure(
            lambda x: torch.unsafe_split_with_sizes(x, [*counts, len(x) - sum(counts)]), rows
        )
        for number, count in enumerate(counts):
            own = map_structure(lambda _, part, number=number: part[number], rows, parts)
            result = self.layer.expert_fn_single(own, count, first + number)
            if wrong := [x for x in leaves_of(result) if x.shape[:1] != (count,)]:
                raise _other_rows(f"expert {first + number}", str(count), wrong[0])
            outputs.append(result)
        return map_structure(lambda *parts: torch.cat(parts), *outputs)

    def call_one(self, rows: Nest, count: int | torch.Tensor, idx: int) -> Nest:
        """Compute expert idx on all rows."""
        # an nn.ModuleList of the user's own is called as FastMoE calls it, with the count
        experts = self.layer.experts
        expert = experts[idx]
        if isinstance(experts, SeparateExperts) and not experts.takes_count(idx, expert):
            return expert(rows)
        counts = count if isinstance(count, torch.Tensor) else torch.tensor(count, device="cpu")
        return expert(rows, counts.to(torch.int64).reshape(1))


class OneModule(ExpertKind):
    """One module for all experts, called with rows sorted by expert and their numbers; batch_invariant() trusts it."""

    @staticmethod
    def fits(layer: _HasExperts) -> bool:
        return True

    def on_rows(self, rows: Nest, tokens_per_expert: torch.Tensor, first: int = 0) -> Nest:
        if self.layer.experts is None:
            raise RuntimeError("this FMoE has no experts: pass expert=, or set self.experts in the subclass")
        return self.layer.experts(rows, tokens_per_expert)


class OwnExpertFn(ExpertKind):
    """The expert_fn of a subclass of FMoE, whatever it does with self.experts; batch_invariant() trusts it."""

    def on_rows(self, rows: Nest, tokens_per_expert: torch.Tensor, first: int = 0) -> Nest:
        return self.layer.expert_fn(rows, tokens_per_expert)


KINDS = (Fused, Separate, OneModule)


def kind_of(layer: _HasExperts) -> ExpertKind:
    """Return the first of KINDS that fits layer.experts."""
    for kind in KINDS[:-1]:
        if kind.fits(layer):
            return kind(layer)
    return KINDS[-1](layer)


def _other_rows(who: str, expected: str, result: torch.Tensor) -> ValueError:
    return ValueError(
        f"{who} must return one row for each row of the input, here {expected}, but returned {list(result.shape)}"
    )


def _takes_count(expert: nn.Module) -> bool:
    """Return whether an expert is called with its number of rows.

    So it is if its forward cannot be called without a second argument, or names it fwd_expert_count, as FastMoE does.
    A wrapper (torch.compile, checkpoint_wrapper, DistributedDataParallel) hands on *args to its only child.
    """
    parameters = list(inspect.signature(expert.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        children = list(expert.children())
        return len(children) == 1 and _takes_count(children[0])
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    return second is not None and (
        second.default is inspect.Parameter.empty or second.name == "fwd_expert_count"
    )
