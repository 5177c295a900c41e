"""Find a schedule of torch.distributed.pipelining by its name: which rank has which stages, how many microbatches.

A schedule is the order in which a rank runs forwards (F) and backwards (B) of microbatches. Two ranks, four
microbatches; a dot is a bubble, in which a rank waits:

    gpipe   F0 F1 F2 F3 .  .  B0 B1 B2 B3    all F, then all B: simple, keeps the activations of all microbatches
            .  F0 F1 F2 F3 B0 B1 B2 B3 .
    1f1b    F0 F1 .  B0 F2 B1 F3 B2 .  B3    a B as soon as it can be: a rank keeps no more microbatches than there are
            .  F0 B0 F1 B1 F2 B2 F3 B3 .     stages from it to the end

interleaved    gives a rank several stages, stage s to rank s % ranks: shorter waits at both ends
zero_bubble    splits a B into the gradient of inputs, for which the rank before waits, and of weights, which fills gaps
zero_bubble_v  the same with stages in a V: the first rank has the last stage too
dualpipe_v     in a V, runs an F of one microbatch together with a B of another, whose exchanges hide behind it

check_compiled_blocks() explains an error of torch about compiled blocks, which the zero bubbles and dualpipe_v meet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)


def _any_number(chunks: int, ranks: int, stages: int) -> int:
    return chunks


# torch's schedule refuses fewer microbatches than stages
def _one_a_stage(chunks: int, ranks: int, stages: int) -> int:
    return max(chunks, stages)


def _equal_rounds(chunks: int, ranks: int, stages: int) -> int:
    # torch runs microbatches in chunks // ranks rounds, which must be equal
    while chunks % max(1, chunks // ranks):
        chunks += 1
    return chunks


@dataclass(frozen=True)
class Kind:
    """Facts of a schedule that Pipeline must know."""

    make: Callable[..., Any]  # torch's class
    takes_list: bool  # its constructor takes a list of this rank's stages, not one stage
    is_v: bool  # stages are placed in a V
    # (chunks, ranks, stages) -> the number of microbatches that it runs, at least chunks
    microbatches: Callable[[int, int, int], int]
    overlaps: bool = False  # a forward and a backward are one action

    def places(self, ranks: int, stages: int) -> list[list[int]]:
        """List the stages of each rank: one after the other, or in a V, where the first rank has the last stage too."""
        if self.is_v:
            return [[rank, stages - 1 - rank] for rank in range(ranks)]
        return [list(range(rank, stages, ranks)) for rank in range(ranks)]


SCHEDULES = MappingProxyType(
    {
        "gpipe": Kind(ScheduleGPipe, takes_list=False, is_v=False, microbatches=_any_number),
        "1f1b": Kind(Schedule1F1B, takes_list=False, is_v=False, microbatches=_one_a_stage),
        "interleaved": Kind(ScheduleInterleaved1F1B, takes_list=True, is_v=False, microbatches=_equal_rounds),
        "zero_bubble": Kind(
            ScheduleInterleavedZeroBubble, takes_list=True, is_v=False, microbatches=_equal_rounds
        ),
        "zero_bubble_v": Kind(ScheduleZBVZeroBubble, takes_list=True, is_v=True, microbatches=_any_number),
        "dualpipe_v": Kind(
            ScheduleDualPipeV, takes_list=True, is_v=True, microbatches=_one_a_stage, overlaps=True
        ),
    }
)


def find_schedule(name: str, ranks: int, stages: int, chunks: int) -> Kind:
    """Find the schedule of a name; ValueError for an unknown one, and for stages or chunks that it cannot run."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, but got {name!r}")
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"chunks must be a whole number of at least 1, but got {chunks!r}")
    # stages of a rank: two in a V, one where torch takes no list, else any number, equal on all ranks
    kind = SCHEDULES[name]
    if kind.is_v and stages != 2 * ranks:
        raise ValueError(
            f"schedule {name!r} has two stages a rank: split the model into {2 * ranks} stages for {ranks} ranks, not "
            f"{stages}"
        )
    if not kind.takes_list and stages != ranks:
        raise ValueError(
            f"schedule {name!r} has one stage a rank: split the model into {ranks} stages, not {stages}, or use "
            "'interleaved' or 'zero_bubble'"
        )
    if stages % ranks:
        raise ValueError(f"the number of stages must be a multiple of the {ranks} ranks, but is {stages}")
    return kind


def check_compiled_blocks(error: BaseException) -> None:
    """Raise RuntimeError that says what to do if error comes from a compiled block whose backward ran in parts."""
    cause: BaseException | None = error
    while cause is not None:
        if "donated buffers" in str(cause):
            raise RuntimeError(
                "a block that torch.compile compiled frees memory in the first part of a backward in two that its "
                "second part still needs: set torch._functorch.config.donated_buffer = False before the first step, as "
                "torch says above, or use schedule 'gpipe', '1f1b' or 'interleaved'"
            ) from error
        cause = cause.__cause__
