"""Compute torchtitan's MoE layers with our dispatch and expert products: routed_experts().

With `--override.imports fmoe_ext.torchtitan.routed_experts` torchtitan builds its MoE layers from our configuration.
Suffixes of shapes are torchtitan's: B batch, L length, D width of a token, K choices, E experts, F width of an expert.
"""
# mypy: disable-error-code="misc, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fmoe_ext import ops
from fmoe_ext.dispatch import combine, dispatch
from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.routing import ExpertInput, permute_rows, unpermute_rows, widen

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
except ImportError as error:
    raise ImportError(
        f"fmoe_ext's experts for torchtitan need torchtitan 0.3.0 ({error}): pip install torchtitan==0.3.0"
    ) from error


class FMoERoutedExperts(RoutedExperts):
    """torchtitan's RoutedExperts, computed by fmoe_ext: its parameters, state dict and sharding are unchanged.

    Router, shared experts, balancing bias, FSDP, checkpoints and conversion from Hugging Face stay torchtitan's. The
    ranks of the mesh "ep" share the experts by fmoe_ext's exchange. Experts of another class than GroupedExperts
    (GPT-OSS's) are computed by their own module between our moves of tokens.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """dtype: what GroupedExperts compute in, "bfloat16" as torchtitan's do, or "input": the dtype of the input."""

        dtype: str = "bfloat16"

    def __init__(self, config: Config):
        if config.dtype not in ("bfloat16", "input"):
            raise ValueError(f'dtype must be "bfloat16" or "input", but got {config.dtype!r}')
        super().__init__(config)
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
        self.expert_parallel: ExpertParallel | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the parameters as torchtitan does, and note the ranks between which fmoe_ext exchanges the tokens."""
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            num_experts = self.inner_experts.num_experts
            self.expert_parallel = ExpertParallel(mesh.get_group(), num_experts // mesh.size())

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Compute x [B, L, D], scores and ids [B, L, K], all local tensors -> the experts' weighted sums [B, L, D].

        num_local_tokens_per_expert_E is not needed: dispatch() counts for itself.
        """
        x = x_BLD.flatten(0, 1)
        ids, scores = topk_expert_ids_BLK.flatten(0, 1), topk_scores_BLK.flatten(0, 1)
        if self.dtype is not None and type(self.inner_experts) is GroupedExperts:
            x = x.to(self.dtype)
        num_experts = self.inner_experts.num_experts
        dispatched = dispatch(x, ids, widen(scores, x.dtype), num_experts, self.expert_parallel)
        for chunk in dispatched.chunks:
            chunk.give_back(self._compute(chunk.receive()))
        out: Tensor = combine(dispatched)
        return out.to(x_BLD.dtype).view_as(x_BLD)

    def _compute(self, tokens: ExpertInput) -> Tensor:
        """Compute this rank's experts on the tokens it received -> the weighted sum of each token's experts here."""
        experts, num_experts = self.inner_experts, tokens.end - tokens.first
        if type(experts) is not GroupedExperts:
            rows, handle = permute_rows(tokens.x, tokens.topk_idx, num_experts)
            y = experts(rows, handle.tokens_per_expert)
            out: Tensor = unpermute_rows(y, handle, tokens.topk_weights)
            return out
        # this rank's shards: w1 is gate, w2 down, w3 up
        weights: Any = experts.w1_EFD, experts.w2_EDF, experts.w3_EFD
        local = (p.to_local() if isinstance(p, DTensor) else p for p in weights)
        gate, down, up = (p.to(tokens.x.dtype) for p in local)
        _, offs, row_idx, inverse = ops.sort_tokens(tokens.topk_idx, num_experts)
        # [E, 2 F, D], as expert_mlp wants it; torchtitan keeps two parameters
        w1 = torch.cat([gate, up], dim=1)
        return ops.expert_mlp(
            tokens.x, row_idx, inverse, offs, w1, None, down, None, tokens.topk_weights,
            activation="swiglu",
        )  # fmt: skip


@override(target=RoutedExperts.Config, exact=True, description="dispatch and experts of fmoe_ext")
def routed_experts(config: RoutedExperts.Config, *, dtype: str = "bfloat16") -> FMoERoutedExperts.Config:
    """Make our configuration from torchtitan's, as an override for its --override.imports.

    dtype: see FMoERoutedExperts.Config. Raises ValueError for a token dispatcher with options that fmoe_ext does not
    have (DeepEP, HybridEP, minimal_async_ep, padding for float8).
    """
    dispatcher = config.token_dispatcher
    if type(dispatcher) not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        raise ValueError(
            f"{type(dispatcher).__qualname__} is a token dispatcher that fmoe_ext does not replace: choose "
            'moe_comm_backend="standard" of torchtitan without float8 or MXFP8 experts, or leave this override out'
        )
    return derive(config, FMoERoutedExperts.Config, dtype=dtype)
