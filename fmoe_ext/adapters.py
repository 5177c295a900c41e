"""Hand low-rank adapters to experts for one call, which then computes them beside their frozen weights.

    lora.fuse() wraps a module:      with given(experts, "htoh4.weight", Lora(a, b, scale)):
                                         experts(x)
    experts that can compute it:     adapters = take(self)    # in their forward

An adapter that nobody takes raises when the block ends: a model that silently leaves its adapters out would train
nothing. An adapter waits for the thread that gave it, since several threads may run one model.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import NamedTuple

import torch
from torch import nn

# in a module's __dict__: {thread: {name of the parameter: adapter that waits for this thread's call of the module}}
_KEY = "_fmoe_ext_adapters"


class Lora(NamedTuple):
    """The adapter of a weight [E, out, in]: weight + scale * b @ a, with a [E, rank, in] and b [E, out, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float = 1.0


class OnLattice(Lora):
    """An adapter that is rounded together with its weight, to the values that the packed weight can take."""

    __slots__ = ()


def change_of(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute scale * b @ a of one expert in float32 or wider, a [rank, in], b [out, rank], alike for all strides."""
    wide = torch.promote_types(a.dtype, torch.float32)
    # contiguous: torch's product may have other bits for other strides
    return b.to(wide).contiguous() @ a.to(wide).contiguous() * scale


def take(module: nn.Module) -> Mapping[str, Lora]:
    """Take the adapters that this call of a module must compute, by the parameter's name; compute all of them."""
    waiting: dict[str, Lora] = module.__dict__.get(_KEY, {}).get(_thread(), {})
    taken = dict(waiting)
    waiting.clear()
    return taken


def _thread() -> int:
    """Return the number of the calling thread; a compiled graph is the same for all."""
    return 0 if torch.compiler.is_compiling() else get_ident()


@contextmanager
def given(module: nn.Module, name: str, adapter: Lora) -> Iterator[None]:
    """Give a parameter of a module an adapter; RuntimeError if the call in the block does not take it."""
    left: dict[str, Lora] = module.__dict__.setdefault(_KEY, {}).setdefault(_thread(), {})
    left[name] = adapter
    try:
        yield
        if name in left:
            raise RuntimeError(
                f"the adapter of {name} was left out: {type(module).__name__} is not computed by fmoe_ext any more. "
                'For a model of Transformers call set_experts_implementation("fmoe") before the forward'
            )
    finally:
        left.pop(name, None)
