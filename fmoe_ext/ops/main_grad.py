"""Add weight gradients to a main gradient in backward, instead of returning them to autograd.

    usual                kernel -> gradient, rounded to the weight's dtype -> a second pass adds it to weight.grad
    with a main gradient kernel adds to weight.main_grad, float32, not rounded: one pass (Megatron)

The kernel writes during backward, which autograd does not see. So such a product cannot be in a compiled graph or a
transform of torch.func, nor be differentiated twice, and gradients of its inputs alone must leave main_grad as it is
(_split.py).
"""

from collections.abc import Iterable
from itertools import accumulate, pairwise

import torch

NO_GRAPH = "the gradient of a weight is added to weight.main_grad by code that a compiled graph cannot hold"
TRANSFORMED_MAIN_GRAD = "torch.func cannot transform experts with gradient_accumulation_fusion=True"


class MainGrad:
    """Tensor to which a backward adds the gradient of experts [first, end) of a parameter: parameter.main_grad.

    main_grad has the shape and device of the parameter and is float32, float64 for a float64 parameter: what
    Megatron-core's DistributedDataParallel gives parameters, or what the user sets. It is looked up in backward
    and increased by the gradient before that is rounded to a 16-bit dtype; experts without rows leave it alone.
    parameter.grad stays as it is, unless the parameter has Megatron's attribute grad_added_to_main_grad: that
    becomes True, and what autograd gets is memory without meaning, for which Megatron's hook waits.
    Equivalent to: parameter.main_grad[first:end] += the gradient of parameter[first:end].
    Follows Megatron-LM's gradient_accumulation_fusion.
    """

    def __init__(self, parameter: torch.nn.Parameter, first: int = 0, end: int | None = None):
        self.parameter = parameter
        self.first, self.end = first, parameter.shape[0] if end is None else end

    def split(self, sizes: Iterable[int]) -> "tuple[MainGrad, ...]":
        """Split into parts of sizes experts each, as Tensor.split splits the parameter."""
        bounds = accumulate(sizes, initial=self.first)
        return tuple(MainGrad(self.parameter, first, end) for first, end in pairwise(bounds))

    def find(self) -> torch.Tensor:
        """Return the main gradient of these experts; RuntimeError if there is none, or one that does not fit."""
        weight = self.parameter
        main_grad = getattr(weight, "main_grad", None)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        wanted = (dtype, weight.shape, weight.device)
        described = f"{dtype}, shape {list(weight.shape)}, on {weight.device}"
        if main_grad is None:
            raise RuntimeError(
                f"gradient_accumulation_fusion adds the gradient of a weight to weight.main_grad ({described}), but "
                "this weight has none: wrap the model in Megatron-core's DistributedDataParallel, or set "
                f"weight.main_grad = torch.zeros_like(weight, dtype={dtype})"
            )
        if (main_grad.dtype, main_grad.shape, main_grad.device) != wanted:
            raise RuntimeError(
                f"weight.main_grad must be {described}, but it is {main_grad.dtype}, shape {list(main_grad.shape)}, "
                f"on {main_grad.device}; Megatron-core keeps float32 ones with "
                "DistributedDataParallelConfig(grad_reduce_in_fp32=True); or pass gradient_accumulation_fusion=False"
            )
        return main_grad[self.first : self.end]

    def added(self) -> torch.Tensor | None:
        """Note that the gradient is added -> what autograd gets for it: None, or with Megatron a tensor to wait for."""
        weight = self.parameter
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        # with zero_out_wgrad, Megatron adds even so what autograd gets: zeros
        new = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return new(weight[self.first : self.end])
