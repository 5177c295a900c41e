"""FasterGate: few first choices leave their node where many would, as links between nodes are slow (FasterMoE).

Where too many tokens have their first choice on another node, the best of these keep it, and all other choices stay on
the node of the gate, which therefore has to know its node (gen_faster_gate).
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

from fmoe_ext import _env, ops
from fmoe_ext.gates.base_gate import Ranks
from fmoe_ext.gates.losses import balance_loss_of_logits
from fmoe_ext.gates.naive_gate import GateOverRanks
from fmoe_ext.gates.scores import weights_of

Gate = TypeVar("Gate", bound="FasterGate")


class FasterGate(GateOverRanks):
    """The topology-aware gate of FasterMoE (He et al. 2022): few first choices leave their node.

    Each token takes its two best experts, unless more than int(outgoing_fraction * T) of the T local tokens have their
    first choice on another node. Then those with the highest score there, int(outgoing_fraction * T) of them, keep that
    first choice, and every other choice is made among the experts of this node, number node_rank, of gpus_per_node
    ranks. Second choices are limited only then. loss = E^2 * mean_e(c_e * m_e), as GShardGate. Where a node has all the
    experts this is top-2.
    gpus_per_node and outgoing_fraction: default FMOE_TOPO_GPUS_PER_NODE (8) and FMOE_TOPO_OUTGOING_FRACTION (0.14).
    FMoE(gate=gen_faster_gate(node_rank)) builds it.
    """

    is_local: torch.Tensor  # [E], whether an expert is in this node

    def __init__(
        self,
        d_model: int,
        n_expert: int,
        world_size: int,
        node_rank: int,
        gate_bias: bool = True,
        *,
        gpus_per_node: int | None = None,
        outgoing_fraction: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(d_model, n_expert, world_size, 2, gate_bias, ranks=ranks)
        if gpus_per_node is None:
            gpus_per_node = _env.get("FMOE_TOPO_GPUS_PER_NODE")
        if outgoing_fraction is None:
            outgoing_fraction = _env.get("FMOE_TOPO_OUTGOING_FRACTION")
        if gpus_per_node < 1:
            raise ValueError(f"gpus_per_node must be at least 1, but got {gpus_per_node}")
        if not 0 <= outgoing_fraction <= 1:
            raise ValueError(f"outgoing_fraction must be between 0 and 1, but got {outgoing_fraction}")
        num_nodes = -(-world_size // gpus_per_node)
        if not 0 <= node_rank < num_nodes:
            raise ValueError(
                f"node_rank must be in [0, {num_nodes}), the nodes of {world_size} ranks, but got {node_rank}; "
                "FMoE passes it only through gate=gen_faster_gate(node_rank)"
            )
        # the last node may have fewer ranks
        first = node_rank * gpus_per_node * n_expert
        self._local_experts = range(first, min(first + gpus_per_node * n_expert, self.num_experts))
        if len(self._local_experts) < 2:
            raise ValueError(f"FasterGate needs two experts in a node, but node {node_rank} has one")
        self.register_buffer("is_local", torch.zeros(self.num_experts, dtype=torch.bool), persistent=False)
        self.reset_parameters()
        self.outgoing_fraction = outgoing_fraction
        self.gpus_per_node = gpus_per_node

    def reset_parameters(self) -> None:
        """Note the experts of this node again; after .to_empty() of a gate made on the meta device."""
        self.is_local.zero_()
        self.is_local[self._local_experts.start : self._local_experts.stop] = True

    def check_spread(self, size: int) -> None:
        """Raise ValueError if size ranks are more than one node: only a gate that is made there knows its own."""
        if size > self.gpus_per_node:
            raise ValueError(
                f"a FasterGate made for one process takes all {size} ranks for one node of {self.gpus_per_node}: make "
                "the layer on its ranks, with world_size=, moe_group= and gate=gen_faster_gate(node_rank)"
            )

    @property
    def depends_on_batch(self) -> str | None:
        if bool(self.is_local.all()):
            return None
        return "how many tokens may leave their node is a share of the batch; NaiveGate limits none"

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """As NaiveGate.forward, with top_k = 2."""
        logits = self.logits(inp)
        best = ops.topk_gate(logits.detach(), self.top_k)[0]
        topk_idx = self.choose(lambda: self._stay_in_node(logits.detach(), best))
        topk_weights = weights_of(logits, topk_idx)
        loss = balance_loss_of_logits(logits, best[:, :1], ranks=self.ranks)
        self.set_loss(loss)
        return (topk_idx, topk_weights, logits) if return_all_scores else (topk_idx, topk_weights)

    def _stay_in_node(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        # 1. Who may leave: of the tokens whose best expert is on another node, those with the highest logits there.
        first = best[:, 0]  # [T], of all experts
        outgoing = ~self.is_local[first]  # [T]
        allowed = int(self.outgoing_fraction * first.shape[0])
        score = logits.gather(1, first[:, None]).squeeze(1).masked_fill(~outgoing, -torch.inf)
        # the place of each token among those that want to leave, by its score there
        place = score.argsort(descending=True, stable=True).argsort()
        leaves = outgoing & (place < allowed)
        # 2. The choices under that limit, [T, 2]: of the experts of this node, but the best of all first if it leaves.
        in_node = ops.topk_gate(logits.masked_fill(~self.is_local, -torch.inf), self.top_k)[0]
        limited = in_node.clone()
        limited[:, 0] = torch.where(leaves, first, in_node[:, 0])
        # a token that leaves has its best expert of this node second
        limited[:, 1] = torch.where(leaves, in_node[:, 0], in_node[:, 1])
        # 3. Unless too many want to leave, all take their two best. By torch.where: the host waits for no number.
        return torch.where(outgoing.sum() > allowed, limited, best)


def gen_faster_gate(rank: int) -> Callable[..., FasterGate]:
    """Return a gate for FMoE(gate=...): FasterGate on a node. rank: number of this rank's node (FastMoE's name for it).

    Example:

        >>> gate = gen_faster_gate(0)
        >>> mlp = fmoe_ext.FMoETransformerMLP(num_experts=4, d_model=8, d_hidden=16, gate=gate)
        >>> mlp(torch.randn(10, 8)).shape
        torch.Size([10, 8])
    """
    return functools.partial(make_faster_gate, FasterGate, rank)


def make_faster_gate(
    cls: type[Gate],
    rank: int,
    d_model: int,
    n_expert: int,
    world_size: int,
    top_k: int = 2,
    gate_bias: bool = True,
) -> Gate:
    """Make a cls, a FasterGate, on node number rank; ValueError for another top_k than 2."""
    if top_k != 2:
        raise ValueError(f"FasterGate chooses two experts: top_k must be 2, but got {top_k}")
    return cls(d_model, n_expert, world_size, rank, gate_bias)
