"""fmoe.transformer."""

from collections.abc import Callable
from typing import Any

from fmoe_ext.compat.gates.naive_gate import NaiveGate
from fmoe_ext.compat.layers import FMoE
from fmoe_ext.compat.linear import draw_as_fastmoe
from fmoe_ext.experts import FusedExperts
from fmoe_ext.transformer import FMoETransformerMLP as _FMoETransformerMLP

Activation = str | Callable[..., Any]


class FMoETransformerMLP(_FMoETransformerMLP, FMoE):
    """FMoETransformerMLP with FastMoE's initial values, which are near zero: its own programs draw them anew."""

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


__all__ = ["FMoETransformerMLP"]
