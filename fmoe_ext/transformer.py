"""FMoETransformerMLP: FMoE with FusedExperts, which replaces a transformer's MLP; what most users and fmoefy() make."""

from collections.abc import Callable, Mapping
from typing import Any, TypedDict

import torch
from typing_extensions import Unpack

from fmoe_ext.ep.process_groups import Group
from fmoe_ext.experts import FusedExperts, LatentProjections, SharedExperts
from fmoe_ext.gates import NaiveGate
from fmoe_ext.layers import Device, FMoE, GateMaker, ParallelLayout, unknown_keywords
from fmoe_ext.linear import check_sizes
from fmoe_ext.tokens import check_tensor


class MLPOptions(TypedDict, total=False):
    """Keywords that FMoETransformerMLP passes to FMoE."""

    world_size: int
    mp_group: Group
    slice_group: Group
    moe_group: Group
    gate_group: Group
    overlap_degree: int | str
    max_rows_per_rank: int | None
    exchange: str
    wire: str
    gate_hook: Callable[..., Any] | None
    mask: torch.Tensor | None
    mask_dict: Mapping[int, Any] | None
    gate_bias: bool
    renormalize: bool
    device: Device
    dtype: torch.dtype | None


class FMoETransformerMLP(FMoE):
    """FMoE whose experts are two-layer MLPs d_model -> d_hidden -> d_model, computed by one operator.

    Called on x [..., d_model], for example [batch, sequence, d_model] -> the same shape, without residual.

    num_experts: experts of all ranks, which they divide. num_expert: experts of this rank, E, as in FastMoE; 32 if
      both are left out. d_model: width of a token, which must be given. d_hidden: width inside an expert,
      4 * d_model if it is left out (fmoe_ext.compat keeps FastMoE's 4096).
      Their weights are experts.htoh4.weight [E, d_hidden, d_model], with a gated activation
      [E, 2 * d_hidden, d_model], and experts.h4toh.weight [E, d_model, d_hidden].
    activation: "gelu", "gelu_tanh", "relu", "silu", "relu2" (relu(h) ** 2), the gated "swiglu", "geglu", "geglu_tanh",
      "clamped_swiglu" (ClampedSwiGLU), the modules and functions of PyTorch for the first four, or any callable
      (slower, see FusedExperts).
    expert_dp_comm: tag of the experts' parameters (FMoE.mark_parallel_comm). expert_rank is accepted and ignored.
    top_k: experts of a token. gate: a name in gates.GATES ("naive", "softmax", "sigmoid", "switch", ...), a class, a
      function called as gate(d_model, num_expert, world_size, top_k), or a module: x [T, d_model] -> topk_idx,
      topk_weights [T, top_k].
    bias: of the experts' linear layers.
    parallel: how the layer is spread over ranks (ParallelLayout). Its fields are also keywords, as in FastMoE: the
      world_size ranks of moe_group share num_experts experts.
    shared_expert_hidden: hidden units of an MLP that every token passes besides, with the same activation and bias,
      computed while the tokens are on their way to the other ranks; shared_expert_gate: experts.SharedExperts.
    latent_size: width of the experts' input and output, between projections of their own (experts.LatentProjections).
    gradient_accumulation_fusion: the experts' weights have main gradients (FusedExperts).
    device, dtype: of the parameters.
    options: gate_hook, mask, mask_dict, gate_bias, renormalize (FMoE), and the fields of parallel.

    Example:

        >>> mlp = FMoETransformerMLP(num_experts=4, d_model=8, d_hidden=16, activation="swiglu", gate="softmax")
        >>> y = mlp(torch.randn(2, 5, 8))  # [batch, sequence, d_model]
        >>> y.shape
        torch.Size([2, 5, 8])
        >>> (y.square().mean() + 0.01 * fmoe_ext.gates.total_loss(mlp)).backward()
    """

    def __init__(
        self,
        num_expert: int | None = None,
        d_model: int | None = None,
        d_hidden: int | None = None,
        activation: str | Callable[..., Any] = "gelu",
        expert_dp_comm: str = "none",
        expert_rank: int = 0,
        *,
        num_experts: int | None = None,
        top_k: int = 2,
        gate: GateMaker = NaiveGate,
        bias: bool = True,
        parallel: ParallelLayout | None = None,
        shared_expert_hidden: int | None = None,
        shared_expert_gate: bool = False,
        latent_size: int | None = None,
        gradient_accumulation_fusion: bool = False,
        **options: Unpack[MLPOptions],
    ):
        if d_model is None:
            name, unknown = type(self).__name__, [n for n in options if n not in MLPOptions.__annotations__]
            needed = f"{name} needs d_model, the width of a token: {name}(num_experts=8, d_model=512, d_hidden=1024)"
            # a keyword that nobody knows is d_model, misspelt
            raise TypeError(unknown_keywords(type(self), unknown) if unknown else needed)
        check_sizes(d_model=d_model, **({} if num_expert is None else {"num_expert": num_expert}))
        d_hidden = 4 * d_model if d_hidden is None else d_hidden
        check_sizes(d_hidden=d_hidden)
        # expert= is left out, so that FMoE makes no experts
        factory: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        counts: dict[str, Any] = {"num_expert": num_expert, "num_experts": num_experts}
        super().__init__(d_model=d_model, top_k=top_k, gate=gate, parallel=parallel, **counts, **options)
        self.d_hidden = d_hidden
        # gate and shared experts keep d_model, the experts get latent_size
        if latent_size is not None:
            check_sizes(latent_size=latent_size)
            if self.mask is not None:
                raise ValueError(
                    "mask= and latent_size= exclude each other: a masked token has no latent output"
                )
            self.latent = LatentProjections(d_model, latent_size, bias, **factory)
        self.experts = FusedExperts(
            self.num_local_experts,
            d_model if latent_size is None else latent_size,
            d_hidden,
            activation,
            bias=bias,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            rank=self.ep_rank,
            **factory,
        )
        if shared_expert_hidden is not None:
            shared = shared_expert_hidden, activation, bias, shared_expert_gate
            self.shared_experts = SharedExperts(d_model, *shared, **factory)
        elif shared_expert_gate:
            raise ValueError(
                "shared_expert_gate=True needs shared_expert_hidden, the width of the shared experts"
            )
        # last: it tags all parameters that are there
        self.mark_parallel_comm(expert_dp_comm)

    def forward(
        self, inp: torch.Tensor, valid: torch.Tensor | None = None, gate_inp: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute inp [..., d_model] -> [..., d_model], without residual; ValueError for another last dimension.

        valid [...]: the tokens that are not padding. gate_inp [..., d_model]: what the gate sees (FMoE.forward).
        """
        for name, x in (("inp", inp),) if gate_inp is None else (("inp", inp), ("gate_inp", gate_inp)):
            if type(x) is not torch.Tensor:
                check_tensor(name, x)
            if x.dim() == 0 or x.shape[-1] != self.d_model:
                raise ValueError(
                    f"{name} must have shape [..., d_model={self.d_model}], but got {list(x.shape)}"
                )
        # reshape also what is a matrix: at its node the gradients of gate and experts are summed, before a residual's
        of_gate = None if gate_inp is None else gate_inp.reshape(-1, gate_inp.shape[-1])
        out = super().forward(inp.reshape(-1, self.d_model), valid, of_gate)
        return out if inp.dim() == 2 else out.reshape(inp.shape)
