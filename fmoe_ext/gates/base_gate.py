import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import ops

_COMPILING_IS_NOT_EXPORTING = torch.__version__ >= (2, 13)  # 2.11 calls every function it compiles exported


def _is_exporting():
    compiling = not _COMPILING_IS_NOT_EXPORTING and torch.compiler.is_dynamo_compiling()
    return torch.compiler.is_exporting() and not compiling


class OneWorker:
    """What a gate asks about all workers that share its experts, answered for a single worker.

    Given another object with these methods, a gate counts tokens, losses and capacities over several workers.
    """

    rank = 0

    def num_tokens(self, num_local_tokens):
        """Tokens of all workers."""
        return num_local_tokens

    def first_token(self, num_local_tokens):
        """Number of this worker's first token among those of all workers."""
        return 0

    def sum(self, x):
        """Sum of x over the workers, differentiable."""
        return x

    def gather(self, x):
        """x of every worker, in the order of their ranks, not differentiable; dimension 0 may differ."""
        return [x]

    def apply_capacity(self, topk_idx, num_experts, capacity):
        """topk_idx with -1 for all but the first `capacity` choices of each expert, over the workers."""
        return ops.apply_capacity(topk_idx, num_experts, capacity)


class BaseGate(nn.Module):
    """What every gate has: tot_expert (experts of all workers) and the balance loss of its last forward.

    The loss is state of the module: the last of several forwards wins, a copy (deepcopy, pickle, a
    DataParallel replica, torch.export) does not carry it. torch.utils.checkpoint sets it a second time when
    the backward runs the forward again; with use_reentrant=True it has no gradient.
    """

    def __init__(self, num_expert, world_size):
        super().__init__()
        if num_expert < 1 or world_size < 1:
            raise ValueError(
                f"num_expert and world_size must be at least 1, but got {num_expert} and {world_size}"
            )
        self.num_expert = num_expert
        self.world_size = world_size
        self.tot_expert = num_expert * world_size
        self.loss = None
        self.tape = None  # RoutingReplay, while it records or plays

    def forward(self, x):
        raise NotImplementedError(
            f"{type(self).__name__} must define forward(inp) -> (topk_idx, topk_weights)"
        )

    def set_loss(self, loss):
        if not _is_exporting():
            self.loss = loss

    def get_loss(self, clear=True):
        """The balance loss of the last forward, or None; clear=True forgets it and frees its graph."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    @property
    def has_loss(self):
        return self.loss is not None

    def topk(self, logits, top_k, score="softmax", normalize=True, scale=1.0, **options):
        """ops.topk_gate; while choices are played back: those, with the weights that the logits give them now."""
        if self.tape is None:
            return ops.topk_gate(logits, top_k, score, normalize, scale=scale, **options)
        topk_idx = self.choose(
            lambda: ops.topk_gate(logits, top_k, score, normalize, scale=scale, **options)[0]
        )
        return topk_idx, weights_of(logits, topk_idx, score, normalize, scale)

    def choose(self, pick):
        """pick(), the choices of this forward; while choices are played back: those."""
        return pick() if self.tape is None else self.tape.choose(pick)

    def __getstate__(self):
        return {**self.__dict__, "loss": None, "tape": None}


def weights_of(logits, topk_idx, score="softmax", normalize=True, scale=1.0):
    """The topk_weights that ops.topk_gate would give to choices made elsewhere; 0 for dropped ones (-1).

    logits [T, E], topk_idx [T, K] -> [T, K]; normalize divides by the sum over the choices that are not dropped.
    Raises ValueError for another number of tokens.
    """
    if topk_idx.shape[0] != logits.shape[0]:
        raise ValueError(f"the choices are for {topk_idx.shape[0]} tokens, but there are {logits.shape[0]}")
    dropped = topk_idx < 0
    log_scores = logits.log_softmax(-1) if score == "softmax" else F.logsigmoid(logits)
    chosen = log_scores.gather(1, topk_idx.clamp(min=0).long())
    chosen = chosen.masked_fill(dropped, torch.finfo(chosen.dtype).min)
    weights = (chosen.softmax(-1) if normalize else chosen.exp()) * scale
    return weights.masked_fill(dropped, 0)
