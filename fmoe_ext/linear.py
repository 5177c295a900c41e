"""FMoELinear: a linear layer for each expert, over rows sorted by expert. WideLinear: the scores of a gate, in float32.

Both are modules that are asked whether they must be called (NotesHooks): FusedExperts and gates compute with their
weights directly, which is faster, unless a hook, an adapter or a replaced forward waits for the call.
"""

import contextlib
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from fmoe_ext import ops
from fmoe_ext._fastmoe_names import Alias
from fmoe_ext.adapters import Lora, take

# Distance between the seeds of neighbouring experts: odd and without a pattern in its bits (2^64 / golden ratio), so
# that no two layers share experts.
_NEXT_EXPERT = 0x9E3779B97F4A7C15


def cumulative_ends(
    fwd_expert_count: torch.Tensor | Sequence[int], num_experts: int, device: torch.device
) -> torch.Tensor:
    """Return offs [E] int32, the ends of the experts' rows, for row counts [E] on any device."""
    counts = torch.as_tensor(fwd_expert_count, device=device)
    if counts.shape != (num_experts,):
        raise ValueError(f"fwd_expert_count must have shape [{num_experts}], but got {list(counts.shape)}")
    counts = counts.to(device, torch.int32)
    # Inductor of torch 2.13 makes the cumsum of one number int64.
    return counts if num_experts == 1 else counts.cumsum(0, dtype=torch.int32)


def check_sizes(**sizes: int) -> None:
    """Raise TypeError or ValueError that names the first size that is no whole number, or below 1."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__"):
            raise TypeError(f"{name} must be a whole number, but got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, but got {size}")


# The dtypes of weights that experts compute with.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, nn.Parameter)


def check_plain(weight: torch.Tensor) -> None:
    """Raise TypeError for a weight of a tensor subclass (quantized, distributed) or of a dtype outside DTYPES."""
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


_noted_casts: set[tuple[torch.dtype, torch.dtype]] = set()  # (of tokens, of weights) that a warning has named


def cast_to_weight(inp: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Cast inp to the dtype of weight, which the result has too; leave it under autocast, where operators choose.

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
    # nn.Linear refuses such tokens: say once what happens here
    pair = inp.dtype, weight.dtype
    if inp.dtype == weight.dtype:
        return inp
    if (
        not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
        and pair not in _noted_casts
    ):  # once a pair
        _noted_casts.add(pair)
        warnings.warn(
            f"tokens are {pair[0]} and are cast to {pair[1]}, the dtype of their experts' weights, which is that of "
            f"the result too (nn.Linear refuses such tokens): cast the layer with layer.to({pair[0]}) or the tokens "
            f"with x.to({pair[1]}), or run under torch.autocast, which chooses the dtype of each product",
            stacklevel=3,
        )
    return inp.to(weight.dtype)


class NotesHooks(nn.Module):
    """A module that knows whether it has hooks; PyTorch has no public way to ask.

    It keeps the handle of each forward and full backward hook, and asks the handle whether the hook is still there.
    """

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
        """Return whether something waits for this module's call: a hook, or a forward that replaced its own.

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
        """Draw all experts anew with a seed from PyTorch's generator."""
        params = [self.weight] if self.bias is None else [self.weight, self.bias]
        bound = 1 / math.sqrt(self.in_feat) if self.in_feat > 0 else 0.0
        if type(self.weight.data) is torch.Tensor:
            # An expert's numbers depend on one seed and on its number in the whole layer: not on how many experts are
            # here. Only the seed is drawn from PyTorch's generator. CPU and GPU draw different numbers.
            seed = int(torch.randint(2**62, (), device="cpu"))
            if self.weight.is_meta:
                return
            generator, first = torch.Generator(self.weight.device), self.rank * self.num_local_experts
            for expert, parts in enumerate(zip(*params, strict=True), first):
                generator.manual_seed((seed + expert * _NEXT_EXPERT) % 2**63)
                for part in parts:
                    part.uniform_(-bound, bound, generator=generator)
        else:  # a shard of FSDP, or a fake tensor: these draw as a whole
            for param in params:
                param.uniform_(-bound, bound)

    @property
    def main_grad(self) -> ops.MainGrad | None:
        """Tensor to which backward adds the gradient of weight; None without gradient_accumulation_fusion."""
        return ops.MainGrad(self.weight) if self.gradient_accumulation_fusion else None

    def forward(self, inp: torch.Tensor, fwd_expert_count: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Apply the weight of expert e to its rows.

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
    """Return whether a hook has not been removed."""
    return handle.id in (handle.hooks_dict_ref() or ())


def adapted_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    adapter: Lora | None,
    **options: Any,
) -> torch.Tensor:
    """Multiply by weight and add the adapter's part. The adapter of a transposed weight [E, in, out] fits its .mT."""
    return with_adapter(ops.grouped_gemm(rows, weight, offs, bias, **options), rows, offs, adapter)


def with_adapter(
    y: torch.Tensor, rows: torch.Tensor, offs: torch.Tensor, adapter: Lora | None
) -> torch.Tensor:
    """Add the adapter's part to y, the product of rows."""
    if adapter is None:
        return y
    thin = ops.grouped_gemm(rows, adapter.a.to(y.dtype), offs) * adapter.scale  # [R, rank]
    return y + ops.grouped_gemm(thin, adapter.b.to(y.dtype), offs)


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type)  # which raises for "meta"
    return torch.autocast(device_type, enabled=False) if is_on else contextlib.nullcontext()


class _WideLinear(torch.autograd.Function):
    """F.linear of wider copies of its arguments; it keeps the arguments, and backward makes the copies again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        wide_bias = None if bias is None else bias.to(dtype)
        if inp.is_cuda and dtype == torch.float32 and inp.dtype == weight.dtype != dtype:
            # products of 16-bit numbers are exact in float32, so that only the order of the sum differs
            out = torch.mm(inp, weight.t(), out_dtype=dtype)
            return out if wide_bias is None else out + wide_bias
        return F.linear(inp.to(dtype), weight.to(dtype), wide_bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        inp, weight, bias, ctx.dtype = inputs
        ctx.save_for_backward(inp, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inp, weight = ctx.saved_tensors
        needs_inp, needs_weight, needs_bias, _ = ctx.needs_input_grad
        with _without_autocast(grad.device.type):
            grad_inp = (grad @ weight.to(ctx.dtype)).to(inp.dtype) if needs_inp else None
            grad_weight = (grad.t() @ inp.to(ctx.dtype)).to(weight.dtype) if needs_weight else None
            grad_bias = grad.sum(0).to(ctx.bias_dtype) if needs_bias else None
        return grad_inp, grad_weight, grad_bias, None


def wide_linear(inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute F.linear in float32 or wider, whatever the dtypes and autocast: the scores of a gate.

    inp [T, D], weight [E, D], bias [E] or None -> [T, E] in the widest of float32 and the dtypes of inp and
    weight. Keeps these two as they are for backward; inside fmoe_ext.batch_invariant(), where our kernels compute it,
    wide copies.
    Raises RuntimeError for devices or widths that differ.
    Equivalent to: F.linear(inp.float(), weight.float(), bias.float()).
    """
    if inp.device != weight.device:
        raise RuntimeError(
            f"the tokens are on {inp.device}, but the gate's weight on {weight.device}: move the layer with "
            f"layer.to({str(inp.device)!r}), or the tokens with x.to({str(weight.device)!r})"
        )
    if is_plain(inp, weight, bias):
        return F.linear(inp, weight, bias)
    dtype = torch.promote_types(torch.promote_types(inp.dtype, weight.dtype), torch.float32)
    with _without_autocast(inp.device.type):
        if ops.is_batch_invariant():
            offs = torch.full((1,), inp.shape[0], dtype=torch.int32, device=inp.device)
            row = None if bias is None else bias.to(dtype)[None]
            return ops.grouped_gemm(inp.to(dtype), weight.to(dtype)[None], offs, row)
        if inp.dtype == weight.dtype == dtype:
            return F.linear(inp, weight, None if bias is None else bias.to(dtype))
        return _WideLinear.apply(inp, weight, bias, dtype)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether F.linear alone gives wide scores: all are float32, outside of autocast and batch_invariant()."""
    for t in tensors:
        if t is not None and t.dtype != torch.float32:
            return False
    if ops.is_batch_invariant():
        return False
    device = tensors[0].device.type if tensors[0] is not None else "meta"
    return device != "meta" and not torch.is_autocast_enabled(device)


class WideLinear(NotesHooks, nn.Linear):
    """nn.Linear computed by wide_linear: what a gate calls for its scores.

    inp [..., in_features] -> [..., out_features], float32 or wider. Being a module that is called, it takes hooks,
    parametrizations, adapters (LoRA) and offloading as any nn.Linear does; torch.ao's quantize_dynamic, which
    would change the choices, leaves it as it is. A weight of torchao counts by the values that it stands for.
    """

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        rows = inp if inp.dim() == 2 else inp.reshape(-1, inp.shape[-1])
        # a quantized subclass (torchao) does not multiply in other dtypes
        is_quantized = type(self.weight).dequantize is not torch.Tensor.dequantize  # a class with its own
        out = wide_linear(rows, self.weight.dequantize() if is_quantized else self.weight, self.bias)
        return out if inp.dim() == 2 else out.view(*inp.shape[:-1], out.shape[-1])
