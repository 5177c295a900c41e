"""Hand low-rank adapters to experts for one call, which then computes them beside their frozen weights.

    lora.fuse() wraps a module:      with given(experts, "htoh4.weight", Lora(a, b, scale)):
                                         experts(x)
    experts that can compute it:     adapters = take(self)    # in their forward

An adapter that nobody takes raises when the block ends: a model that silently leaves its adapters out would train
nothing. An adapter waits for the thread that gave it, since several threads may run one model.

torch.compile cannot ask which thread runs a graph, and need not where one graph has both the block and the call: what
was given to the tracer is taken by the tracer (_TRACED). Where something between them breaks the graph, given() runs
outside of graphs, and take(), in a graph of its own, must leave it to ask for the thread.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from fmoe_ext.ops.outside_graphs import outside_graphs

# In a module's __dict__. {thread: {name of the parameter: adapter that waits for this thread's call of the module}},
# there only while a thread has given one: a graph is guarded by that
_WAITING = "_fmoe_ext_adapters"
_TRACED = "_fmoe_ext_traced_adapters"  # {name of the parameter: adapter} while a graph is traced, else empty
_lock = threading.Lock()  # of _WAITING


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
    if torch.compiler.is_dynamo_compiling() and module.__dict__.get(_TRACED):
        traced: dict[str, Lora] = module.__dict__[_TRACED]
        taken = dict(traced)
        traced.clear()
        return taken
    return _of_thread(module) if _WAITING in module.__dict__ else {}


@outside_graphs("an adapter was given outside of this graph, by a thread that no graph knows")
def _of_thread(module: nn.Module) -> dict[str, Lora]:
    with _lock:
        waiting: dict[str, Lora] = module.__dict__.get(_WAITING, {}).get(threading.get_ident(), {})
        taken = dict(waiting)
        waiting.clear()
    return taken


# A generator, which the compiler traces inside of a graph or not at all: a function of its own, called from here
# outside of a graph, would be compiled by itself, and take itself for a part of one.
@contextmanager
def given(module: nn.Module, name: str, adapter: Lora) -> Iterator[None]:
    """Give a parameter of a module an adapter; RuntimeError if the call in the block does not take it."""
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced:
        left: dict[str, Lora] = module.__dict__.setdefault(_TRACED, {})
        left[name] = adapter
    else:
        with _lock:
            left = module.__dict__.setdefault(_WAITING, {}).setdefault(threading.get_ident(), {})
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
        if not is_traced and not left:  # no adapter of this thread waits any more
            with _lock:
                waiting = module.__dict__.get(_WAITING, {})
                waiting.pop(threading.get_ident(), None)
                if not waiting:
                    module.__dict__.pop(_WAITING, None)
