import torch
from torch import nn

from fmoe_ext import ops


class OneWorker:
    """What a gate asks about all workers that share its experts, answered for a single worker.

    Given another object with these methods, a gate counts tokens, losses and capacities over several workers.
    """

    def num_tokens(self, num_local_tokens):
        """Tokens of all workers."""
        return num_local_tokens

    def sum(self, x):
        """Sum of x over the workers, differentiable."""
        return x

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

    def forward(self, x):
        raise NotImplementedError(
            f"{type(self).__name__} must define forward(inp) -> (topk_idx, topk_weights)"
        )

    def set_loss(self, loss):
        if not torch.compiler.is_exporting():
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

    def __getstate__(self):
        return {**self.__dict__, "loss": None}
