"""Muon for parameters that hold the matrices of many experts: each matrix is orthogonalised by itself, all at once.

    momentum   buffer = m * buffer + (1 - m) * grad;  update = grad + m * (buffer - grad) with nesterov
    direction  update [E, M, N] -> near U V^T of each matrix, whose singular values are 1, by Newton-Schulz iterations
    step       weight -= lr * ratio(M, N) * direction, after weight decay

torch.optim.Muon does the same for parameters of one matrix.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import Optimizer, ParamsT

from fmoe_ext import ops
from fmoe_ext.experts import weights_of_two

__all__ = ["Muon", "orthogonalize"]

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(Optimizer):
    """Momentum orthogonalised by Newton-Schulz iterations, for matrices [M, N] and stacks of them [E, M, N].

    Each matrix of a stack is orthogonalised by itself, so a layer's experts get the same update whether they are one
    parameter or many, on one rank or many; nothing travels. lr, weight_decay, momentum, nesterov, ns_coefficients,
    eps, ns_steps, adjust_lr_fn: as torch.optim.Muon's, also by parameter group. matrices: how many matrices lie one
    below the other in M; None asks the layer, which says 2 for htoh4.weight of a gated activation (gate and up), and
    takes 1 for parameters of other modules.

    Parameters of FSDP2 (DTensor) must be sharded by expert or not at all. Raises ValueError for other shapes and
    options, and in step() for a parameter whose gradient is in main_grad. Muon: Jordan et al. 2024; learning rates:
    "Muon is Scalable for LLM Training" (2025).
    Equivalent to: torch.optim.Muon over one parameter [M / matrices, N] a matrix.

    Example:

        >>> mlp = fmoe_ext.FMoETransformerMLP(4, 8, 16, activation="swiglu", bias=False)
        >>> optimizer = Muon([mlp.experts.htoh4.weight, mlp.experts.h4toh.weight], lr=0.02)
        >>> mlp(torch.randn(10, 8)).square().mean().backward()
        >>> optimizer.step()
    """

    _of_two: set[int]  # ids of parameters that a layer has said to be gate and up

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        matrices: int | None = None,
    ):
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, but got {value}")
        if len(ns_coefficients) != 3 or not 0 <= ns_steps < 100:
            raise ValueError(
                f"ns_coefficients must be 3 numbers and ns_steps in [0, 100), but got {ns_coefficients}, {ns_steps}"
            )
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        options |= {
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
        }
        super().__init__(params, {**options, "adjust_lr_fn": adjust_lr_fn, "matrices": matrices})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch.optim.Optimizer does; ValueError for a shape or option that Muon cannot take."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group["adjust_lr_fn"] not in _ADJUSTMENTS:
                raise ValueError(
                    f"adjust_lr_fn must be one of {_ADJUSTMENTS}, but got {group['adjust_lr_fn']!r}"
                )
            for param in group["params"]:
                _check(param, 1 if group["matrices"] is None else group["matrices"])
        except ValueError:
            self.param_groups.pop()  # or the next step would take it
            raise
        self._ask_layers()

    def _ask_layers(self) -> None:
        """Note which parameters hold two matrices.

        What a layer has said stays: after a forward, a layer of fully_shard may have its gathered parameters, which are
        other objects than the optimizer's.
        """
        of_two = self.__dict__.setdefault("_of_two", set())  # a pickled optimizer has none
        of_two |= {id(weight) for weight in weights_of_two()} & {
            id(param) for group in self.param_groups for param in group["params"]
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients in p.grad -> what closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ask_layers()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group, 2 if id(param) in self._of_two else 1)
                elif getattr(param, "main_grad", None) is not None:
                    raise ValueError(
                        "a parameter has its gradient in main_grad, which Muon does not read: "
                        "copy it to grad, or build the experts without gradient_accumulation_fusion"
                    )
        return loss

    def _update(self, param: Tensor, group: dict[str, Any], of_layer: int) -> None:
        """Step one parameter. of_layer: how many matrices lie one below the other in it, as its layer says."""
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        # of a DTensor this rank's shard, which has whole matrices (_check): nothing needs the other ranks
        tensors: Any = param, param.grad, state["momentum_buffer"]
        weight, grad, buffer = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
        buffer.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        matrices = of_layer if group["matrices"] is None else group["matrices"]  # one below the other
        stack = update.reshape(-1, update.shape[-2] // matrices, update.shape[-1])
        stack = orthogonalize(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
        # "match_rms_adamw" gives the update AdamW's RMS, so that lr and weight_decay tuned for AdamW can be used
        rows, columns = stack.shape[1:]
        ratio = math.sqrt(max(1, rows / columns))
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        lr = float(group["lr"])
        if group["weight_decay"]:
            weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(stack.reshape(weight.shape), alpha=-lr * ratio)


def orthogonalize(
    stack: Tensor,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
    ns_steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Move the singular values of every matrix of stack [E, M, N] near 1 (Newton-Schulz, in bfloat16) -> [E, M, N].

    Equivalent to: U @ V^T of each matrix's singular value decomposition, roughly.
    """
    # the iteration multiplies by x x^T, which is small if x is wide; and it needs singular values of at most 1, which a
    # division by the Frobenius norm gives
    x = stack.bfloat16()
    if is_tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    x = ops.newton_schulz(x, ns_coefficients, ns_steps)
    return x.mT if is_tall else x


def _check(param: Tensor, matrices: int) -> None:
    """Raise ValueError unless Muon can take a parameter in which `matrices` matrices lie one below the other."""
    if param.dim() not in (2, 3) or not param.is_floating_point():
        raise ValueError(
            "Muon is for matrices [M, N] and stacks of them [E, M, N], but got a parameter "
            f"{list(param.shape)} {param.dtype}: give it to AdamW"
        )
    if matrices < 1 or param.shape[-2] % matrices:
        raise ValueError(f"matrices={matrices} must divide the {param.shape[-2]} rows of {list(param.shape)}")
    if isinstance(param, DTensor):
        for placement in param.placements:
            if isinstance(placement, Shard) and (placement.dim != 0 or param.dim() == 2):
                raise ValueError(
                    f"a parameter {list(param.shape)} is sharded along dimension {placement.dim}, which cuts its "
                    "matrices; Muon needs whole ones: shard stacked experts along dimension 0"
                )
