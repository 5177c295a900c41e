"""FusedExperts: the two-layer MLPs of all experts, as one operator (ops.expert_mlp) where that is possible.

FusedExperts.forward takes the first of these ways that gives the right result:
    ops.expert_mlp       gathers, multiplies, activates and sums in one operator, which keeps its inputs and h alone
    two grouped GEMMs    with any callable as the activation between them
    the modules          htoh4 and h4toh are called, because a hook or an adapter waits for the call (must_be_called)

expert_kinds.Fused calls it with tokens and a handle that says where their rows are; FastMoE's callers with rows that
are sorted by expert. Here are also the activations that the operators know as modules, SharedExperts (an MLP for all
tokens), LatentProjections (narrower experts), and FastMoE's layout of a state dict, one entry an expert.
"""

import math
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import ops
from fmoe_ext.adapters import Lora
from fmoe_ext.linear import FMoELinear, WideLinear, adapted_gemm, cast_to_weight, check_plain, cumulative_ends
from fmoe_ext.ops.activations import GATED_ACTIVATIONS, clamp_above, clamp_both
from fmoe_ext.routing import DispatchHandle, unpermute_rows, widen

# w1, b1 or None, w2, b2 or None
Weights: TypeAlias = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
MainGrads: TypeAlias = tuple[ops.MainGrad | None, ops.MainGrad | None]


def activation_name(activation: str | Callable[..., Any]) -> str | None:
    """Return the name under which ops.expert_mlp computes an activation; None for a callable that it does not know.

    activation: a name of ops.ACTIVATIONS, nn.GELU / nn.ReLU / nn.SiLU, SquaredReLU, ClampedSwiGLU, F.gelu / F.relu /
        F.silu, or any callable.
    Raises ValueError for another name, TypeError for what is neither a string nor callable.
    """
    if isinstance(activation, str):
        if activation not in ops.ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ops.ACTIVATIONS)} or a callable, but got {activation!r}"
            )
        return activation
    if not callable(activation):
        raise TypeError(f"activation must be a name or a callable, but got {activation!r}")
    if type(activation) is nn.GELU:
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if activation is F.gelu:
        return "gelu"
    if type(activation) is nn.ReLU or activation in (F.relu, torch.relu):
        return "relu"
    if type(activation) is nn.SiLU or activation is F.silu:
        return "silu"
    if type(activation) is ClampedSwiGLU and (activation.alpha, activation.limit) == (1.702, 7.0):
        return "clamped_swiglu"
    return "relu2" if type(activation) is SquaredReLU else None


def is_gated(activation: Any) -> bool:
    """Return whether an activation takes 2H values and gives H: one of GATED_ACTIVATIONS, or one with is_gated."""
    return (
        activation in GATED_ACTIVATIONS
        if isinstance(activation, str)
        else getattr(activation, "is_gated", False)
    )


# weak, so that the list keeps no layer alive
_gated: weakref.WeakSet["FusedExperts"] = weakref.WeakSet()


def weights_of_two() -> list[torch.Tensor]:
    """List the weights of all gated layers, in which a gate and an up matrix lie one below the other; for Muon.

    The layers are listed, rather than the parameters marked: fully_shard and copies replace parameters by others.
    """
    weights = [getattr(experts.htoh4, "weight", None) for experts in list(_gated)]
    return [weight for weight in weights if weight is not None]


class SquaredReLU(nn.Module):
    """ReLU^2 (So et al. 2021; Nemotron, nanochat), which the operators compute as "relu2". Shapes as nn.ReLU.

    Equivalent to: F.relu(x).square().
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x).square()


class ClampedSwiGLU(nn.Module):
    """The gated activation of GPT-OSS: x [..., 2H], gate before up -> [..., H].

    The operators compute it as "clamped_swiglu" if alpha is 1.702 and limit 7.
    Equivalent to: gate, up = x.chunk(2, -1); gate = gate.clamp(max=limit); (up.clamp(-limit, limit) + 1) * gate *
    sigmoid(alpha * gate).
    """

    is_gated = True

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        gate = clamp_above(gate, self.limit)
        return (clamp_both(up, self.limit) + 1) * gate * torch.sigmoid(self.alpha * gate)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, limit={self.limit}"


class GatedActivation(nn.Module):
    """Any activation, gated: x [..., 2H], gate before up -> [..., H].

    limit: clamps gate from above and up on both sides; offset is added to up (Megatron's activation_func_clamp_value
    and glu_linear_offset). Equivalent to: activation(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + offset).
    """

    is_gated = True

    def __init__(
        self,
        activation: Callable[[torch.Tensor], torch.Tensor],
        limit: float | None = None,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation, self.limit, self.offset = activation, limit, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = clamp_above(gate, self.limit), clamp_both(up, self.limit)
        return self.activation(gate) * (up + self.offset if self.offset else up)

    def __repr__(self) -> str:
        clamp = "" if self.limit is None else f", limit={self.limit}"
        return f"GatedActivation({self.activation}{clamp}{f', offset={self.offset}' if self.offset else ''})"


class SoftcappedSwiGLU(nn.Module):
    """SwiGLU of Inkling 2, both factors bounded by tanh: x [..., 2H], gate before up -> [..., H].

    Equivalent to: cap(gate, gate_softcap) * sigmoid(gate) * cap(up, up_softcap), with cap(x, c) = c * tanh(x / c).
    """

    is_gated = True

    def __init__(self, gate_softcap: float, up_softcap: float) -> None:
        super().__init__()
        if not min(gate_softcap, up_softcap) > 0:
            raise ValueError(f"softcaps must be positive, but got {gate_softcap} and {up_softcap}")
        self.gate_softcap, self.up_softcap = gate_softcap, up_softcap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # in float32 or wider, and rounded once
        gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        bounded = (gate / self.gate_softcap).tanh() * self.gate_softcap * gate.sigmoid()
        return (bounded * (up / self.up_softcap).tanh() * self.up_softcap).to(x.dtype)


class FusedExperts(nn.Module):
    """E experts y = act(x @ w1[e]^T + b1[e]) @ w2[e]^T + b2[e], computed together.

    Parameters: htoh4.weight [E, H, D], htoh4.bias [E, H], h4toh.weight [E, D, H], h4toh.bias [E, D], without
    the biases if bias=False. A gated activation (GATED_ACTIVATIONS, or a callable with is_gated=True, as
    GatedActivation) has 2H rows in htoh4: gate, then up. An activation that activation_name() maps runs inside one
    operator; any other callable runs between two grouped GEMMs, which is slower and keeps more for the backward, the
    clamped SwiGLUs of GatedActivation as one operator each way on CPUs.
    gradient_accumulation_fusion: backward adds the gradients of both weights, not rounded, to their main_grad
    (ops.MainGrad) and leaves grad alone; biases get grad as ever. As in Megatron-LM, whose
    DistributedDataParallel reduces main_grad; RuntimeError in backward for a weight without one.
    rank: which of the ranks that share the experts this is, for their draw (FMoELinear), device, dtype likewise.
    A state dict with one expert per entry ("<e>.htoh4.weight" [1, H, D]) loads as well.

    Example:

        >>> from fmoe_ext.experts import FusedExperts
        >>> experts = FusedExperts(num_experts=4, d_model=8, d_hidden=16, activation="swiglu")
        >>> experts.htoh4.weight.shape, experts.h4toh.weight.shape
        (torch.Size([4, 32, 8]), torch.Size([4, 8, 16]))
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        activation: str | Callable[..., Any] = "gelu",
        bias: bool = True,
        *,
        gradient_accumulation_fusion: bool = False,
        rank: int = 0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.fused_activation = activation_name(activation)
        self.activation = activation
        num_hidden_rows = 2 * d_hidden if is_gated(activation) else d_hidden
        options: dict[str, Any] = {
            "bias": bias,
            "rank": rank,
            "gradient_accumulation_fusion": gradient_accumulation_fusion,
            "device": device,
            "dtype": dtype,
        }
        self.htoh4 = FMoELinear(num_experts, d_model, num_hidden_rows, **options)
        self.h4toh = FMoELinear(num_experts, d_hidden, d_model, **options)
        self.register_load_state_dict_pre_hook(_fuse_per_expert_layout)
        if is_gated(activation):
            _gated.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy (deepcopy, pickle) does not pass __init__
        super().__setstate__(state)
        if is_gated(self.activation):
            _gated.add(self)

    @property
    def must_be_called(self) -> bool:
        """Return whether htoh4 and h4toh have to be called, instead of computing with their weights in one operator.

        So it is where one of them has hooks (offloading, sharding) or is another module than FMoELinear (an adapter
        around it). It is slower, and keeps more for the backward.
        """
        return _must_be_called(self.htoh4) or _must_be_called(self.h4toh)

    @property
    def weights(self) -> Weights:
        """The tensors that forward computes with: w1, b1 or None, w2, b2 or None, one entry an expert."""
        return self.htoh4.weight, self.htoh4.bias, self.h4toh.weight, self.h4toh.bias

    @property
    def main_grads(self) -> MainGrads:
        """Tensors to which backward adds the gradients of w1 and w2; None without gradient_accumulation_fusion."""
        return self.htoh4.main_grad, self.h4toh.main_grad

    def forward(
        self,
        inp: torch.Tensor,
        fwd_expert_count: torch.Tensor,
        handle: DispatchHandle | None = None,
        topk_weights: torch.Tensor | None = None,
        weights: Weights | None = None,
        main_grads: MainGrads = (None, None),
    ) -> torch.Tensor:
        """Compute the experts on rows, or with a handle on tokens.

        Without handle, FastMoE's call: inp [R, D] sorted by expert, fwd_expert_count [E] -> [R, D].
        With a DispatchHandle: inp [T, D] in the order of the tokens, topk_weights [T, K] -> [T, D], the
        weighted sum of each token's experts; where ops.expert_mlp computes it, the sorted rows are not kept.
        weights: of other experts of the same shape, or of a part of these, instead of self.weights;
        main_grads: theirs, instead of self.main_grads.
        """
        # 1. The weights; or call the modules, if one must be called and its adapter is none that the operators take.
        adapters: tuple[Lora | None, Lora | None] = (None, None)
        if weights is None:
            up, down = self.htoh4, self.h4toh  # once: a module's attributes take long to read
            if _must_be_called(up) or _must_be_called(down):
                # lora.fuse gives a module an adapter that one operator takes beside its weight
                adapters = getattr(up, "fused_adapter", None), getattr(down, "fused_adapter", None)
                if any(
                    adapter is None and _must_be_called(m)
                    for m, adapter in zip((up, down), adapters, strict=True)
                ):
                    rows = inp if handle is None else ops.permute(inp, handle.row_idx, handle.inverse)
                    rows = down(self._activation(up(rows, fwd_expert_count)), fwd_expert_count)
                    return rows if handle is None else unpermute_rows(rows, handle, topk_weights)
            weights = up.weight, up.bias, down.weight, down.bias
            main_grads = up.main_grad, down.main_grad
        w1, b1, w2, b2 = weights
        check_plain(w1)
        check_plain(w2)
        inp = cast_to_weight(inp, w1)
        offs = cumulative_ends(fwd_expert_count, w1.shape[0], inp.device) if handle is None else handle.offs
        # 2. An activation that the operator does not know runs between two grouped GEMMs.
        if self.fused_activation is None:
            rows = inp if handle is None else ops.permute(inp, handle.row_idx, handle.inverse)
            up_rows = adapted_gemm(rows, w1, offs, b1, adapters[0], main_grad=main_grads[0])
            hidden = self._activation(up_rows)
            rows = adapted_gemm(hidden, w2, offs, b2, adapters[1], main_grad=main_grads[1])
            return rows if handle is None else unpermute_rows(rows, handle, topk_weights)
        # 3. Everything in one operator. Without a handle every row is its own token, with K = 1.
        if handle is None:
            row = torch.arange(inp.shape[0], dtype=torch.int32, device=inp.device)
            row_idx = torch.where(row < offs[-1], row, -1)
            routing = row_idx, row_idx[:, None], offs
        else:
            routing = handle.row_idx, handle.inverse, offs
        topk_weights = widen(topk_weights, inp.dtype)
        mlp = (inp, *routing, w1, b1, w2, b2, topk_weights, self.fused_activation, handle is not None)
        if any(adapters):
            with_adapters: Any = (up if adapters[0] else down).mlp_with_adapters
            return with_adapters(*mlp, *adapters)
        return ops.expert_mlp(*mlp, main_grads)

    def _activation(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the activation outside the operator."""
        name, activation = self.fused_activation, self.activation
        if name is not None:
            return ops.ACTIVATIONS[name](hidden)
        assert callable(activation)
        # types, not isinstance: a subclass may compute something else
        if type(activation) is ClampedSwiGLU:
            return ops.clamped_glu(hidden, activation.alpha, activation.limit, 1.0)
        if type(activation) is GatedActivation and activation_name(activation.activation) == "silu":
            limit = math.inf if activation.limit is None else activation.limit
            return ops.clamped_glu(hidden, 1.0, limit, activation.offset)
        return activation(hidden)


def _must_be_called(module: nn.Module) -> bool:
    return not isinstance(module, FMoELinear) or module.must_be_called


class SharedExperts(nn.Module):
    """Experts that compute every token beside its chosen ones (DeepSeekMoE, Dai et al. 2024): one MLP for all.

    x [T, d_model] -> [T, d_model]. has_gate: the result is multiplied by sigmoid(x @ gate.weight^T), a number a token
    (Qwen2-MoE; Megatron's moe_shared_expert_gate). Several shared experts are one of their widths together.
    Equivalent to: sigmoid(gate(x)) * mlp(x).
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        activation: Any = "gelu",
        bias: bool = True,
        has_gate: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mlp = FusedExperts(1, d_model, d_hidden, activation, bias=bias, **factory)
        self.gate = WideLinear(d_model, 1, bias=False, **factory) if has_gate else None

    @torch.no_grad()
    def begin_with_zero(self) -> None:
        """Make the result zero until training changes it."""
        for p in self.mlp.h4toh.parameters():
            p.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x, torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device))
        return out if self.gate is None else out * ops.sigmoid(self.gate(x)).to(out.dtype)


class LatentProjections(nn.Module):
    """Linear layers around narrower experts (LatentMoE of Nemotron 3, 2025; Megatron's moe_latent_size).

    The gate and the shared experts see d_model, the experts and the exchange between ranks latent_size.
    narrow: x [T, d_model] -> [T, latent_size]; widen: the experts' sums [T, latent_size] -> [T, d_model]; each in the
    dtype of its weight. Equivalent to: widen(moe(narrow(x), gate(x))).
    """

    def __init__(
        self,
        d_model: int,
        latent_size: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.narrow = nn.Linear(d_model, latent_size, bias, device=device, dtype=dtype)
        self.widen = nn.Linear(latent_size, d_model, bias, device=device, dtype=dtype)

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """Project the tokens x [T, d_model], which the experts get."""
        narrow: torch.Tensor = self.narrow(cast_to_weight(x, self.narrow.weight))
        return narrow

    def after(self, out: torch.Tensor) -> torch.Tensor:
        """Return the results of the tokens whose experts' sums are out [T, latent_size]."""
        wide: torch.Tensor = self.widen(cast_to_weight(out, self.widen.weight))
        return wide


def to_per_expert_layout(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a copy of a state dict in FastMoE's layout since 2023: one entry for each expert.

    `experts.htoh4.weight` [E, H, D] becomes `experts.<e>.htoh4.weight` [1, H, D], biases and h4toh likewise;
    other entries are kept. What is split is copied.
    """
    # only below a module named "experts", as FastMoE's layers have it
    fused = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<name>(?:htoh4|h4toh)\.(?:weight|bias))")
    split = {}
    for key, value in state_dict.items():
        match = fused.fullmatch(key)
        if match is None:
            split[key] = value
            continue
        for e, part in enumerate(value.split(1)):
            split[f"{match['experts']}.{e}.{match['name']}"] = part.clone()
    return split


def _fuse_per_expert_layout(module: FusedExperts, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in ("htoh4.weight", "htoh4.bias", "h4toh.weight", "h4toh.bias"):
        # [1, H, D] each, in the order of the experts
        keys = [f"{prefix}{e}.{name}" for e in range(module.num_experts)]
        if all(key in state_dict for key in keys):
            state_dict[prefix + name] = torch.cat([state_dict.pop(key) for key in keys])
