"""See the gates of any model in one way: views_of() finds them, a GateView reads and tapes the choices of one.

The load monitor, the log of choices and RoutingReplay see gates by it.

A Tape stands between a gate and its choices: it records what the gate picks, or gives it other choices (replay.py).

    our gates (BaseGate)                    ask their tape themselves
    routers of Transformers, Megatron-core  know no tape. They choose by one torch.topk over their experts: hooks before
                                            and after the forward put a TorchFunctionMode around it, which hands this
                                            call to the tape. Scores, weights, losses and gradients stay the router's.

Routers are recognised by attributes and by the class's name, so that neither library is imported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from fmoe_ext.gates.base_gate import BaseGate, put_tape, tape_of_thread
from fmoe_ext.recompute import Forward, Forwards, Repeat, current_thread, is_repeated
from fmoe_ext.tokens import Batch, current_batch, leaves_of


class Tape(Protocol):
    """State of a gate while its choices are recorded or replayed: the gate asks it for them."""

    def choose(self, pick: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the choices that the forward uses [T, K]; pick() returns the gate's own."""
        ...

    def after_forward(self, view: GateView, output: Any) -> Any:
        """Return an output to replace the gate's own, or None."""
        ...


class GateView:
    """One gate of a model."""

    def __init__(self, module: nn.Module, num_experts: int, top_k: int | None):
        self.module = module
        self.num_experts = num_experts  # of all ranks
        self.top_k = top_k  # of the gate, None if it has none

    def read(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a forward's output -> topk_idx, topk_weights [T, K], -1 for dropped choices."""
        topk_idx, topk_weights = output[:2]
        topk_idx = topk_idx[:, None] if topk_idx.dim() == 1 else topk_idx.flatten(1)  # also of no tokens
        return topk_idx, topk_weights.reshape(topk_idx.shape)

    def read_real(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the choices of the tokens that are not padding (fmoe_ext.valid_tokens)."""
        return self.read(output)

    def with_kept(self, output: Any, kept: torch.Tensor) -> Any:
        """Replace the choices in output by kept [T, K]."""
        return (kept.to(output[0].device), *output[1:])

    @contextmanager
    def taped(self, tape: Tape) -> Iterator[None]:
        """Let the tape choose in every forward of this thread inside the block, instead of that of a block around."""
        gate: Any = self.module
        around = gate.tape

        # the tape gets the output behind the gate, once choices have been dropped
        def after(_: nn.Module, __: Any, output: Any) -> Any:
            return tape.after_forward(self, output) if gate.tape is tape else None

        hook = gate.register_forward_hook(after)
        gate.tape = tape
        try:
            yield
        finally:
            gate.tape = around
            hook.remove()

    def remove(self) -> None:
        """Leave the module as it was."""


class _Running(threading.local):
    """The forwards of a router that run on this thread, the innermost last."""

    forwards: list[tuple[_Topk, Forward | None]] = []  # noqa: RUF012 - never changed, only replaced

    def __reduce__(self) -> tuple[type[_Running], tuple[()]]:
        return _Running, ()  # a copy of a watched router runs nothing yet


class RouterView(GateView):
    """A router of another library, whose forward our hooks change.

    Under activation checkpointing the second forward, in the backward, gets the choices of the first. The backward may
    come after the block of taped(): the hooks stay until remove().
    """

    def __init__(self, module: nn.Module, num_experts: int, top_k: int):
        super().__init__(module, num_experts, top_k)
        self._tapes: dict[int, Any] = {}  # {thread: tape}: threads may share a model, and each plays its own
        self._hooks: list[RemovableHandle] = []
        self._forwards = Forwards()
        self._running = _Running()

    def read_real(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        topk_idx, topk_weights = self.read(output)
        # routers of other libraries get padding, too: its rows are left out here
        batch = current_batch()
        if batch.num_tokens != topk_idx.shape[0]:
            return topk_idx, topk_weights
        return batch.take(topk_idx), batch.take(topk_weights)

    def with_kept(self, output: Any, kept: torch.Tensor) -> Any:
        return None  # nothing was dropped, or it is dropped anew

    @contextmanager
    def taped(self, tape: Tape) -> Iterator[None]:
        if not self._hooks:
            self._hooks = [
                self.module.register_forward_pre_hook(self._before, with_kwargs=True),
                self.module.register_forward_hook(self._after, always_call=True),
            ]
        around = self._tapes.get(current_thread())
        put_tape(self._tapes, tape)
        try:
            yield
        finally:
            put_tape(self._tapes, around)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a repeated forward is known by its input: it repeats the choices that were kept for it, and tells no tape
        x = args[0] if args else next(iter(kwargs.values()))
        known = self._forwards.find(leaves_of(x)[0]) if is_repeated() else None
        if known is not None:
            assert known.selected is not None
            tape, forward = Repeat(known.selected.long(), is_fused=False), None
        else:
            tape, forward = tape_of_thread(self._tapes), self._forwards.begin(leaves_of(x)[0], Batch())
        # entered here and left in _after(): the mode spans the forward between the two hooks
        topk = _Topk(tape, self.num_experts, self.top_k)
        topk.__enter__()
        self._running.forwards = [*self._running.forwards, (topk, forward)]

    def _after(self, module: nn.Module, _: Any, output: Any) -> Any:
        *self._running.forwards, (topk, forward) = self._running.forwards
        topk.__exit__(None, None, None)
        if output is None or forward is None or topk.tape is None:
            return None  # the forward raised, or repeats another, or has no tape
        if topk.chosen is None:
            raise RuntimeError(
                f"{type(module).__name__} did not choose by torch.topk over its {self.num_experts} experts, so that "
                "its choices can be watched but neither recorded nor played (Megatron: moe_router_fusion=False)"
            )
        # kept for a second forward, then shown to the tape
        forward.choose(topk.chosen, topk.chosen, False, self.num_experts)
        tensors = [part for part in output if isinstance(part, torch.Tensor)]
        self._forwards.keep(forward, tensors, module.training)
        return topk.tape.after_forward(self, output)


class _Topk(TorchFunctionMode):
    """Let a tape choose in the first torch.topk over all experts; the values are the router's scores there."""

    def __init__(self, tape: Any, num_experts: int, top_k: int | None):
        super().__init__()
        self.tape = tape
        self.chosen: torch.Tensor | None = None
        self._sizes = (num_experts, top_k)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.tape is None or self.chosen is not None or func not in (torch.topk, torch.Tensor.topk):
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        # a topk over groups of experts, or with another K, is not the choice
        if (scores.shape[-1], result.indices.shape[-1]) != self._sizes:
            return result
        self.chosen = self.tape.choose(lambda: result.indices).to(scores.device)
        return torch.return_types.topk((scores.gather(-1, self.chosen), self.chosen))


class _TransformersRouter(RouterView):
    """A router of Transformers 5: its forward returns choices [T, K] and weights [T, K], among other tensors."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        sizes = (getattr(module, "num_experts", None), getattr(module, "top_k", None))
        return type(module).__name__.endswith("Router") and all(isinstance(n, int) for n in sizes)

    def read(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [part for part in output if isinstance(part, torch.Tensor)]
        # the first integers are the choices; their weights are the floats of the same shape (logits have E columns)
        topk_idx = next((part for part in parts if not part.is_floating_point()), None)
        for weights in parts:
            if topk_idx is not None and weights.is_floating_point() and weights.shape == topk_idx.shape:
                return topk_idx, weights
        raise TypeError(
            f"{type(self.module).__name__} returns {[list(part.shape) for part in parts]}, no choices [T, K] with "
            "weights of their shape; routers of Transformers 5 do"
        )


class _MegatronRouter(RouterView):
    """Megatron-core's TopKRouter: forward returns probabilities and a boolean map [T, E]; a replay drops anew."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return all(hasattr(module, name) for name in ("topk", "num_experts", "routing", "gating"))

    def read(self, output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # the K largest probabilities of the map; where a token has fewer choices, -1
        probabilities, routing_map = (part.flatten(0, -2) for part in output[:2])
        weights, topk_idx = probabilities.masked_fill(~routing_map, -1).topk(self.top_k, dim=-1)
        return topk_idx.masked_fill(weights < 0, -1), weights.clamp(min=0)

    @contextmanager
    def taped(self, tape: Tape) -> Iterator[None]:
        config = getattr(self.module, "config", None)
        if getattr(config, "moe_router_group_topk", None) is not None:
            raise ValueError(
                "Megatron's router gives choices outside of a token's best groups no weight, so that choices cannot be "
                "played with moe_router_group_topk; fmoe_ext.megatron.moe_layer_spec has a gate that can"
            )
        with super().taped(tape):
            yield


def views_of(model: nn.Module, purpose: str) -> dict[str, GateView]:
    """Find every gate of a model -> {name: GateView}; ValueError, which says for what, if there is none."""
    found: dict[str, GateView] = {}
    module: Any
    for name, module in model.named_modules():
        if isinstance(module, BaseGate):
            found[name] = GateView(module, module.num_experts, getattr(module, "top_k", None))
        elif _TransformersRouter.fits(module):
            found[name] = _TransformersRouter(module, module.num_experts, module.top_k)
        elif _MegatronRouter.fits(module):
            found[name] = _MegatronRouter(module, module.num_experts, module.topk)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no gate to {purpose}: no BaseGate, no router of Transformers 5 or of "
            "Megatron-core"
        )
    return found
