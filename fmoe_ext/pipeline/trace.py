"""TimedStage, the torch stage that Pipeline runs: it notes when it computes which microbatch; draw() draws that.

It also mends what torch before 2.13 does wrong. Times are noted in train_step(trace=True) alone.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from fmoe_ext.pipeline.stage import Stage

COLORS = ("#4c78a8", "#f58518", "#54a24b")  # of KINDS
KINDS = ("forward", "backward", "weights")
# torch 2.11 adds up the gradients of a node's outputs in the second part of a backward, and frees nodes before it.
IS_WRONG_IN_PARTS = torch.__version__ < "2.13"
_LEGEND = MappingProxyType({"weights": "backward of weights, split off"})


class Span(NamedTuple):
    """One computation of one microbatch; times in seconds since the step began."""

    rank: int
    stage: int
    microbatch: int
    kind: str  # "forward", "backward" (all of it, or the gradients of inputs), "weights" (the rest of a backward)
    begin: float
    end: float


class TimedStage(PipelineStage):
    """torch's stage, which also notes when it computes, and tells our Stage the number of each microbatch.

    An argument for the number would be cut, flattened and stored by torch for every microbatch.
    The first stage has no gradient of inputs: where a schedule splits the backward, its whole backward is in the
    second part, and recorded as "backward". With torch before 2.13 every backward is whole.
    """

    stage: Stage
    spans: list[Span] | None = None  # where computations are noted; None: nowhere
    began: float = 0.0  # when the step did

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole: set[int] = set()  # microbatches whose backward is not in parts

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return torch's first messages, to the neighbours; torch 2.11 has a rank send to itself, which gloo cannot."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.stage.number = fwd_chunk_id
        begin = time.perf_counter()
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._note("forward", fwd_chunk_id, begin)
        return result

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> None:
        if IS_WRONG_IN_PARTS and not full_backward:
            self._whole.add(bwd_chunk_id)
            full_backward = True
        begin = time.perf_counter()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward or not self.is_first:
            self._note("backward", bwd_chunk_id, begin)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        if bwd_chunk_id in self._whole:  # done already, in backward_one_chunk()
            self._whole.remove(bwd_chunk_id)
            return
        begin = time.perf_counter()
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._note("backward" if self.is_first else "weights", bwd_chunk_id, begin)

    def _note(self, kind: str, microbatch: int, begin: float) -> None:
        if self.spans is not None:
            times = begin - self.began, time.perf_counter() - self.began
            self.spans.append(Span(dist.get_rank(self.group), self.stage_index, microbatch, kind, *times))


def bubble_share(spans: Sequence[Span]) -> float:
    """Return the share of all ranks' time, from the first computation to the last, in which they compute nothing."""
    ranks = {span.rank for span in spans}
    length = max(span.end for span in spans) - min(span.begin for span in spans)
    busy = sum(span.end - span.begin for span in spans)
    return 1 - busy / (length * len(ranks))


def draw(spans: Sequence[Span], path: str | Path, title: str = "") -> None:
    """Draw a picture of the step: a row a rank, a box a computation with its microbatch's number; gaps are bubbles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    # without pyplot, which keeps figures and may want a display
    figure = Figure(figsize=(9, 1.6 + 0.7 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    step = max(span.end for span in spans) - min(span.begin for span in spans)
    first_of_rank = {rank: min(s.stage for s in spans if s.rank == rank) for rank in ranks}
    # stages of a V or a ring: a rank's first one in full colour, its others paler
    for span in spans:
        color = COLORS[KINDS.index(span.kind)]
        length = 1e3 * (span.end - span.begin)
        alpha = 1.0 if span.stage == first_of_rank[span.rank] else 0.6
        axes.barh(
            span.rank, length, left=1e3 * span.begin, color=color, alpha=alpha, edgecolor="white", height=0.8
        )
        if span.end - span.begin > 0.02 * step:  # otherwise the number is wider than its box
            middle = 1e3 * span.begin + length / 2
            axes.text(middle, span.rank, str(span.microbatch), ha="center", va="center", fontsize=9)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"{title} {bubble_share(spans):.0%} of the time idle".strip())
    used = [kind for kind in KINDS if any(span.kind == kind for span in spans)]
    figure.legend(
        [Patch(color=COLORS[KINDS.index(kind)]) for kind in used],
        [_LEGEND.get(kind, kind) for kind in used],
        ncols=len(used),
        loc="outside lower center",
    )
    figure.savefig(path, dpi=120)
