"""fmoe.layers, with the contents of fmoe.linear, fmoe.transformer, fmoe.distributed and fmoe.utils (see _TREE).

Subclasses of fmoe_ext's layers, with FastMoE's default gate, order of arguments and initial values.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fmoe_ext import ops
from fmoe_ext.compat._gates import NaiveGate
from fmoe_ext.compat.functions import MOEGather, MOEScatter, prepare_forward
from fmoe_ext.distributed import DistributedGroupedDataParallel as _DataParallel
from fmoe_ext.experts import FusedExperts
from fmoe_ext.layers import FMoE as _FMoE
from fmoe_ext.layers import mark_module_parallel_comm
from fmoe_ext.linear import FMoELinear as _FMoELinear
from fmoe_ext.linear import cast_to_weight, cumulative_ends
from fmoe_ext.tokens import map_structure
from fmoe_ext.transformer import FMoETransformerMLP as _FMoETransformerMLP

Activation = str | Callable[..., Any]
fmoe_faster_schedule = False  # a name of fmoe.layers that nothing here reads


class FMoE(_FMoE):
    """FMoE whose default gate is fmoe.gates.NaiveGate.

    Example:

        >>> layer = FMoE(num_expert=4, d_model=8, top_k=1, expert=lambda d_model: torch.nn.Linear(d_model, d_model))
        >>> layer(torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        world_size: int = 1,
        mp_group: Any = None,
        slice_group: Any = None,
        moe_group: Any = None,
        top_k: int = 2,
        gate: Any = NaiveGate,
        expert: Any = None,
        gate_hook: Callable[..., Any] | None = None,
        mask: torch.Tensor | None = None,
        mask_dict: dict[int, Any] | None = None,
        gate_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            num_expert, d_model, world_size, mp_group, slice_group, moe_group, top_k,
            gate, expert, gate_hook, mask, mask_dict, gate_bias,
            **options,
        )  # fmt: skip


def _fmoe_general_global_forward(inp, gate, expert_fn, num_expert, world_size, **kwargs):
    """Scatter inp to the experts, call expert_fn(rows, fwd_expert_count) and gather the results.

    inp [B, *] or a nest of such tensors, gate [B, K] or [B], -1 for dropped choices -> [B * K, *], row b * K + k for
    choice k of token b, zero if it was dropped.
    """
    # pos: choices sorted by expert; a choice's row is that of its token
    pos, local_expert_count, global_expert_count, fwd_expert_count, fwd_batch_size = prepare_forward(
        gate, num_expert, world_size
    )
    top_k = gate.shape[1] if gate.dim() == 2 else 1
    source = torch.div(pos, top_k, rounding_mode="floor")  # choice b K + k is of token b
    # every tensor of a nest goes the same way
    x = map_structure(
        lambda leaf: MOEScatter.apply(
            leaf, source, local_expert_count, global_expert_count, fwd_batch_size, world_size
        ),
        inp,
    )
    return map_structure(
        lambda leaf: MOEGather.apply(
            leaf, pos, local_expert_count, global_expert_count, gate.numel(), world_size
        ),
        expert_fn(x, fwd_expert_count),
    )


def draw_as_fastmoe(linear: _FMoELinear) -> None:
    """Draw FastMoE's initial values: kaiming_uniform with in_feat * out_feat for the fan-in, zero bias."""
    # torch takes the first dimension of [E, out, in] for the output and all others for the fan-in, as FastMoE lets it
    nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5))
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


class FMoELinear(_FMoELinear):
    """FMoELinear with FastMoE's initial values; rank is accepted and ignored."""

    def reset_parameters(self) -> None:
        draw_as_fastmoe(self)


class MOELinear:
    """Apply each expert's linear map to its rows, sorted by expert; called as MOELinear.apply(...), differentiable."""

    @staticmethod
    def apply(
        global_input_buf: torch.Tensor,
        fwd_expert_count: torch.Tensor | Sequence[int],
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """global_input_buf [R, in], fwd_expert_count [E], weight [E, out, in], bias [E, out] -> [R, out]."""
        offs = cumulative_ends(fwd_expert_count, weight.shape[0], global_input_buf.device)
        return ops.grouped_gemm(cast_to_weight(global_input_buf, weight), weight, offs, bias)


class FMoETransformerMLP(_FMoETransformerMLP, FMoE):
    """FMoETransformerMLP with FastMoE's initial values, which are near zero: its own programs draw them again.

    Example:

        >>> mlp = FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, top_k=2)
        >>> mlp(torch.randn(3, 8)).shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        d_hidden: int = 4096,
        activation: Activation = "gelu",
        expert_dp_comm: str = "none",
        expert_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("gate", NaiveGate)
        super().__init__(num_expert, d_model, d_hidden, activation, expert_dp_comm, expert_rank, **kwargs)
        _draw(self.experts)


class _Expert(FusedExperts):
    """num_expert two-layer MLPs as one module: called with rows sorted by expert and fwd_expert_count."""

    def __init__(
        self, num_expert: int, d_model: int, d_hidden: int, activation: Activation, rank: int = 0
    ) -> None:
        super().__init__(num_expert, d_model, d_hidden, activation)
        _draw(self)


def _draw(experts: FusedExperts) -> None:
    for linear in (experts.htoh4, experts.h4toh):
        draw_as_fastmoe(linear)


class DistributedGroupedDataParallel(_DataParallel):
    """fmoe_ext's, but a parameter outside of FMoE layers gets the mean of its gradient over the group of its tag."""

    def _follow_tags(self) -> None:
        # parameters of FMoE layers are fmoe_ext's matter, all others FastMoE's
        layers = [child for child in self.module.modules() if isinstance(child, _FMoE)]
        self._of_layers = {id(p) for layer in layers for p in layer.parameters()}
        super()._follow_tags()

    def _factor(self, p: nn.Parameter, tag: str) -> float:
        # the factor of the mean over the tag's group: 1 leaves it as it is
        is_dense = tag != "none" and id(p) not in self._of_layers
        return 1.0 if is_dense else super()._factor(p, tag)


def get_torch_default_comm() -> dist.ProcessGroup:
    """Return the default process group; RuntimeError if there is none."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise RuntimeError("there is no default process group: call torch.distributed.init_process_group()")
    return dist.group.WORLD


def get_rank_0_in_comm(comm: dist.ProcessGroup) -> int:
    """Return the rank in the whole job of a group's first member."""
    return dist.get_process_group_ranks(comm)[0]


__all__ = ["FMoE", "fmoe_faster_schedule", "mark_module_parallel_comm"]
