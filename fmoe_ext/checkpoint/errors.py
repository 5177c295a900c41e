"""CheckpointError, and together(), by which all ranks raise the same one.

A rank that raised alone would leave the others waiting in the next collective call. So what may fail on some ranks runs
in `with together(...)`: the ranks exchange what failed, and all of them raise or none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read: the text names files, tensors and layers, and what was expected."""


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank, in the order of ranks; [value] without process group. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise CheckpointError(f"another rank does not answer, it may have died: {error}") from error
    return values


@contextmanager
def together(action: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the body on every rank; if it fails on any, all raise CheckpointError with the texts of all. Collective."""
    failure: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        failure = error
    texts = gather(None if failure is None else text_of(failure), group)
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    if not failed:
        return
    if len(set(texts)) == 1:  # all ranks say the same: once is enough
        raise CheckpointError(f"{action}: {texts[0]}") from failure
    lines = "".join(f"\n  rank {rank}: {text}" for rank, text in failed.items())
    raise CheckpointError(f"{action}: failed on {len(failed)} of {len(texts)} ranks{lines}") from failure


def text_of(error: BaseException) -> str:
    """Return the text of an error, the same on all ranks."""
    if isinstance(error, CheckpointException):  # of torch.distributed.checkpoint, for several ranks
        return "; ".join(
            f"rank {rank}: {text_of(cause)}" for rank, (cause, _) in sorted(error.failures.items())
        )
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
