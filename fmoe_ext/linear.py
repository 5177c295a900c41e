"""FMoELinear: one linear map per expert, applied to rows that are sorted by expert."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fmoe_ext import ops
from fmoe_ext._fastmoe_names import Alias
from fmoe_ext.adapters import adapted_gemm, take

# Between the seeds of neighbours: odd and without a pattern in its bits, so that no two layers share experts.
_NEXT_EXPERT = 0x9E3779B97F4A7C15


def cumulative_ends(
    fwd_expert_count: torch.Tensor | Sequence[int], num_experts: int, device: torch.device
) -> torch.Tensor:
    """offs [E] int32 on device for row counts [E], wherever those are."""
    counts = torch.as_tensor(fwd_expert_count)
    if counts.shape != (num_experts,):
        raise ValueError(f"fwd_expert_count must have shape [{num_experts}], but got {list(counts.shape)}")
    counts = counts.to(device, torch.int32)
    # Inductor of torch 2.13 makes int64 of the sums of one number.
    return counts if num_experts == 1 else counts.cumsum(0, dtype=torch.int32)


def check_sizes(**sizes: int) -> None:
    """TypeError or ValueError that names the first size that is no whole number, or below 1."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__"):
            raise TypeError(f"{name} must be a whole number, but got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, but got {size}")


# The dtypes of weights that experts compute with.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, nn.Parameter)


def check_plain(weight: torch.Tensor) -> None:
    """TypeError for a weight of a tensor subclass (quantized, distributed) or of a dtype that is not of DTYPES."""
    if weight.dtype not in DTYPES:
        raise TypeError(
            f"an expert's weight is {weight.dtype}, and experts compute with float64, float32, bfloat16 or float16: "
            "put weight.to(torch.bfloat16), times its scale if it has one, in its place"
        )
    if type(weight) not in _PLAIN and hasattr(weight, "__tensor_flatten__"):
        raise TypeError(
            f"an expert's weight is a {type(weight).__name__}, and experts compute with plain tensors: leave "
            "FMoELinear out of the quantization (quantize_(model, config, filter_fn=...)) or of the sharding, or put "
            "weight.dequantize() or weight.full_tensor() in its place"
        )


def cast_to_weight(inp: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """inp in the dtype of weight, which is that of the result; as it is under autocast, where operators choose it.

    FastMoE's rule. Its one exception: TypeError for float64 tokens of other weights, which would lose half of their
    digits.
    """
    device = inp.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # which raises for "meta"
        return inp
    if inp.dtype == torch.float64 != weight.dtype:
        raise TypeError(
            f"tokens are torch.float64, but the weights of their experts {weight.dtype}: give them "
            f"layer.double(), or tokens x.to({weight.dtype})"
        )
    return inp if inp.dtype == weight.dtype else inp.to(weight.dtype)


@torch.no_grad()
def _draw_experts(params: Sequence[torch.Tensor], bound: float, seed: int, first_expert: int = 0) -> None:
    """Fills params, each [E, *], from the uniform distribution on [-bound, bound].

    What expert e gets depends on seed and on first_expert + e, its number in the whole layer: not on how many of
    the experts are here, nor on PyTorch's generator, which is left alone. CPU and GPU draw different numbers.
    """
    if params[0].is_meta:
        return
    generator = torch.Generator(params[0].device)
    for e, parts in enumerate(zip(*params, strict=True), first_expert):
        generator.manual_seed((seed + e * _NEXT_EXPERT) % 2**63)
        for part in parts:
            part.uniform_(-bound, bound, generator=generator)


class NotesHooks(nn.Module):
    """A module that knows whether it has hooks; PyTorch has no public way to ask."""

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._note(super().register_forward_pre_hook(*args, **kwargs))

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._note(super().register_forward_hook(*args, **kwargs))

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._note(super().register_full_backward_pre_hook(*args, **kwargs))

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._note(super().register_full_backward_hook(*args, **kwargs))

    def _note(self, handle: RemovableHandle) -> RemovableHandle:
        handles = self.__dict__.get("_hook_handles", ())
        self.__dict__["_hook_handles"] = [*filter(_is_active, handles), handle]
        return handle

    @property
    def must_be_called(self) -> bool:
        """True if something waits for this module's call: a hook, or a forward put in the place of its own.

        Otherwise callers may compute with its weight and bias directly, as FusedExperts does.
        """
        own = self.__dict__
        handles = own.get("_hook_handles")
        return "forward" in own or (handles is not None and any(map(_is_active, handles)))


class FMoELinear(NotesHooks):
    """A linear layer for each of num_expert experts, computed by one grouped GEMM.

    weight [E, out_feat, in_feat], bias [E, out_feat] or None; every expert is drawn as nn.Linear is, uniform in
    [-1 / sqrt(in_feat), 1 / sqrt(in_feat)]. rank: which of the ranks that share the experts this is. Ranks with
    the same seed draw different experts, those that one process with all of them would draw.
    gradient_accumulation_fusion: backward adds the gradient of weight to weight.main_grad (ops.MainGrad) instead
    of weight.grad. device, dtype: of the parameters, as in nn.Linear.

    Example:

        >>> linear = FMoELinear(num_expert=3, in_feat=8, out_feat=4)
        >>> rows = torch.randn(6, 8)  # sorted by expert: two rows of expert 0, four of expert 2
        >>> linear(rows, torch.tensor([2, 0, 4])).shape
        torch.Size([6, 4])
    """

    num_expert = Alias("num_local_experts")

    def __init__(
        self,
        num_expert: int,
        in_feat: int,
        out_feat: int,
        bias: bool = True,
        rank: int = 0,
        *,
        gradient_accumulation_fusion: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_expert=num_expert)
        self.num_local_experts = num_expert
        self.in_feat = in_feat
        self.out_feat = out_feat
        self.rank = rank
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.weight = nn.Parameter(torch.empty(num_expert, out_feat, in_feat, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(num_expert, out_feat, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws all experts anew with a seed from PyTorch's generator."""
        params = [self.weight] if self.bias is None else [self.weight, self.bias]
        bound = 1 / math.sqrt(self.in_feat) if self.in_feat > 0 else 0.0
        if type(self.weight.data) is torch.Tensor:
            seed = int(torch.randint(2**62, (), device="cpu"))
            _draw_experts(params, bound, seed, self.rank * self.num_local_experts)
        else:  # a shard of FSDP, or a fake tensor: these draw as a whole
            for param in params:
                param.uniform_(-bound, bound)

    @property
    def main_grad(self) -> ops.MainGrad | None:
        """Tensor to which backward adds the gradient of weight; None without gradient_accumulation_fusion."""
        return ops.MainGrad(self.weight) if self.gradient_accumulation_fusion else None

    def forward(self, inp: torch.Tensor, fwd_expert_count: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Applies the weight of expert e to its rows.

        inp [R, in_feat], sorted by expert, of a floating dtype (cast to that of the weight);
        fwd_expert_count [E] integer rows per expert, on the CPU or the device of inp -> [R, out_feat]; rows
        past the last expert's are zero.
        Raises ValueError for counts of another shape, TypeError for float64 rows and other weights, RuntimeError
        for another in_feat or more counted rows than R.
        Equivalent to: torch.cat([F.linear(x, w, b) for x, w, b in zip(inp.split(counts), weight, bias)]).
        """
        check_plain(self.weight)
        offs = cumulative_ends(fwd_expert_count, self.num_local_experts, inp.device)
        inp = cast_to_weight(inp, self.weight)
        adapter = take(self).get("weight")
        return adapted_gemm(inp, self.weight, offs, self.bias, adapter, main_grad=self.main_grad)

    def extra_repr(self) -> str:
        return (
            f"num_expert={self.num_local_experts}, in_features={self.in_feat}, out_features={self.out_feat}, "
            f"bias={self.bias is not None}"
        )


def _is_active(handle: RemovableHandle) -> bool:
    """True if a hook has not been removed."""
    return handle.id in (handle.hooks_dict_ref() or ())
