"""FMoETransformerMLP: a Mixture-of-Experts layer in the place of a transformer's MLP."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fmoe_ext.ep.exchange import Group
from fmoe_ext.experts import FusedExperts, LatentProjections, SharedExperts
from fmoe_ext.gates import NaiveGate
from fmoe_ext.layers import Device, FMoE, GateMaker
from fmoe_ext.linear import check_sizes


class FMoETransformerMLP(FMoE):
    """FMoE whose experts are two-layer MLPs d_model -> d_hidden -> d_model, computed by one operator.

    activation: "gelu", "gelu_tanh", "relu", "silu", "relu2" (relu(h) ** 2), the gated "swiglu", "geglu", "geglu_tanh",
    "clamped_swiglu" (ClampedSwiGLU), the modules and functions of PyTorch for the first four, or any callable (slower,
    see FusedExperts).
    expert_dp_comm: tag of the experts' parameters (FMoE.mark_parallel_comm). expert_rank is accepted and ignored.
    gradient_accumulation_fusion: the experts' weights have main gradients (FusedExperts).
    shared_expert_hidden: hidden units of an MLP that every token passes besides, with the same activation and bias,
    computed while the tokens are on their way to the other ranks; shared_expert_gate: experts.SharedExperts.
    latent_size: width of the experts' input and output, between projections of their own (experts.LatentProjections).
    Other arguments: FMoE.

    Example:

        >>> mlp = FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, activation="swiglu", gate="softmax")
        >>> y = mlp(torch.randn(2, 5, 8))  # [batch, sequence, d_model]
        >>> y.shape
        torch.Size([2, 5, 8])
        >>> (y.square().mean() + 0.01 * fmoe_ext.gates.total_loss(mlp)).backward()
    """

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        d_hidden: int = 4096,
        activation: str | Callable[..., Any] = "gelu",
        expert_dp_comm: str = "none",
        expert_rank: int = 0,
        *,
        world_size: int = 1,
        mp_group: Group = None,
        slice_group: Group = None,
        moe_group: Group = None,
        top_k: int = 2,
        gate: GateMaker = NaiveGate,
        gate_hook: Callable[..., Any] | None = None,
        mask: torch.Tensor | None = None,
        mask_dict: Mapping[int, Any] | None = None,
        gate_bias: bool = True,
        renormalize: bool = False,
        gate_group: Group = None,
        overlap_degree: int | str = 1,
        max_rows_per_rank: int | None = None,
        exchange: str = "choice",
        bias: bool = True,
        gradient_accumulation_fusion: bool = False,
        shared_expert_hidden: int | None = None,
        shared_expert_gate: bool = False,
        latent_size: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ):
        check_sizes(num_expert=num_expert, d_model=d_model, d_hidden=d_hidden)
        super().__init__(
            num_expert=num_expert,
            d_model=d_model,
            world_size=world_size,
            mp_group=mp_group,
            slice_group=slice_group,
            moe_group=moe_group,
            top_k=top_k,
            gate=gate,
            gate_hook=gate_hook,
            mask=mask,
            mask_dict=mask_dict,
            gate_bias=gate_bias,
            renormalize=renormalize,
            gate_group=gate_group,
            overlap_degree=overlap_degree,
            max_rows_per_rank=max_rows_per_rank,
            exchange=exchange,
            device=device,
            dtype=dtype,
            **unknown,
        )
        self.d_hidden = d_hidden
        if latent_size is not None:
            check_sizes(latent_size=latent_size)
            if mask is not None:
                raise ValueError(
                    "mask= and latent_size= exclude each other: a masked token has no latent output"
                )
            self.latent = LatentProjections(d_model, latent_size, bias, device=device, dtype=dtype)
        self.experts = FusedExperts(
            num_expert,
            d_model if latent_size is None else latent_size,
            d_hidden,
            activation,
            bias=bias,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            rank=self.ep_rank,
            device=device,
            dtype=dtype,
        )
        if shared_expert_hidden is not None:
            self.shared_experts = SharedExperts(
                *(d_model, shared_expert_hidden, activation, bias, shared_expert_gate),
                device=device,
                dtype=dtype,
            )
        elif shared_expert_gate:
            raise ValueError(
                "shared_expert_gate=True needs shared_expert_hidden, the width of the shared experts"
            )
        self.mark_parallel_comm(expert_dp_comm)

    def forward(self, inp: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """inp [..., d_model] -> [..., d_model], without residual; ValueError for another last dimension.

        valid [...]: the tokens that are not padding (FMoE.forward).
        """
        if inp.dim() == 0 or inp.shape[-1] != self.d_model:
            raise ValueError(f"inp must have shape [..., d_model={self.d_model}], but got {list(inp.shape)}")
        # a view of a matrix too, so that gate and experts sum their gradients before a residual joins them
        out = super().forward(inp.reshape(-1, self.d_model), valid)
        return out if inp.dim() == 2 else out.reshape(inp.shape)
