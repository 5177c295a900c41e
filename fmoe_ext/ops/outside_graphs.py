"""Ask the compiler, without importing it: outside_graphs() keeps a function out of graphs, is_exporting() asks.

`import fmoe_ext` must not import torch._dynamo, which takes seconds.

Whether this thread traces a graph, by torch.compile or torch.export, is asked in place:

    torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()

The compiler reads the first as True where it traces, and Python computes it as False. The second is for torch.export
with strict=False, which runs Python; its flag is of the process, so train no layer beside an export. Do not ask
torch.compiler.is_compiling(): while one thread compiles, it is True in all of them, and one that trains eagerly would
take the branches for graphs. Nor write a function of your own for the two: where a frame is not compiled, the compiler
compiles that function by itself, and it answers True.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
# torch 2.11 calls every function that it compiles exported
_COMPILING_IS_NOT_EXPORTING = torch.__version__ >= "2.13"


def is_exporting() -> bool:
    """Return whether torch.export traces, in every version of torch."""
    compiling = not _COMPILING_IS_NOT_EXPORTING and torch.compiler.is_dynamo_compiling()
    return torch.compiler.is_exporting() and not compiling


def outside_graphs(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate as torch.compiler.disable(reason=reason) does, which would import torch._dynamo at once."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        late = _Late(function, reason)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if (
                torch.compiler.is_dynamo_compiling()
                or torch.compiler.is_exporting()
                or "torch._dynamo" in sys.modules
            ):
                return late.disabled(*args, **kwargs)
            return function(*args, **kwargs)

        return call

    return decorate


class _Late(ModuleType):
    """Disables a function at its first call in a graph, or after torch._dynamo was imported.

    It is a module because the compiler reads attributes of modules as they are, and traces those of other objects.
    """

    def __init__(self, function: Callable[..., Any], reason: str):
        super().__init__(function.__qualname__)
        self._function, self._reason = function, reason

    @functools.cached_property
    def disabled(self) -> Callable[..., Any]:
        return torch.compiler.disable(self._function, reason=self._reason)
