"""balance_loss: E sum_e f_e p_e, f_e an expert's share of the choices, p_e its mean probability (Switch Transformer).

Its gradient is computed from logits and counts alone, so that no probabilities [T, E] are kept.
"""

from typing import Any

import torch
import torch.nn.functional as F

from fmoe_ext.ops._autograd import (
    as_node,
    call,
    call_functional,
    is_transformed,
    register_autograd,
    register_fake,
    register_second_derivative,
)

SCORES = ("softmax", "sigmoid")  # an operator names a score by its place


def balance_loss(logits: torch.Tensor, counts: torch.Tensor, score: str = "softmax") -> torch.Tensor:
    """Compute E * sum_e f_e * p_e: f_e the share of the choices of expert e, p_e its mean probability over tokens.

    logits [T, E]; counts [E] int64, the choices of each expert, without gradient -> scalar of the dtype of logits, 1
    where experts are chosen equally often. A probability is the score, softmax(logits) or sigmoid(logits), divided by
    the sum of the token's scores. Shazeer et al. 2017, the Switch Transformer (2021).
    On the CPU, in float32 and float64, this is one operator, which keeps logits and counts alone for the backward.
    Raises RuntimeError for another score or for counts of another shape or dtype.
    Equivalent to: E * (counts / counts.sum() * logits.softmax(-1).mean(0)).sum().

    Example:

        >>> balance_loss(torch.zeros(4, 2), torch.tensor([2, 2]))
        tensor(1.)
    """
    if score not in SCORES:
        raise RuntimeError(f'score must be "softmax" or "sigmoid", but got "{score}"')
    # Elsewhere than on the CPU, in 16 bits and for subclasses: in plain PyTorch.
    is_plain = type(logits) is torch.Tensor and logits.dtype in (torch.float32, torch.float64)
    if not is_plain or logits.device.type != "cpu":
        # Refuse what the operator refuses. torch would broadcast, or name its own operands in the error.
        if logits.dim() != 2:
            raise RuntimeError(f"logits must have shape [T, E], but got shape {list(logits.shape)}")
        if counts.dtype != torch.int64:
            raise RuntimeError(f"counts must be int64, but got {counts.dtype}")
        if counts.shape != logits.shape[1:]:
            raise RuntimeError(
                f"counts must have shape [E] with size {logits.shape[1]}, but got shape {list(counts.shape)}"
            )
        return balance_loss_ref(logits, counts, score)
    # the operator alone, torch.func's form, or our node, which takes half of the host time (_autograd.py)
    number = SCORES.index(score)
    loss: torch.Tensor
    if (
        torch.compiler.is_dynamo_compiling()
        or torch.compiler.is_exporting()
        or not (torch.is_grad_enabled() and logits.requires_grad)
    ):
        return torch.ops.fmoe_ext.balance_loss(logits, counts, number)
    if is_transformed(logits, counts):
        loss = call_functional("fmoe_ext::balance_loss", logits, counts, number)
        return loss
    loss = _Node.apply(logits, counts, number)
    return loss


def balance_loss_ref(logits: torch.Tensor, counts: torch.Tensor, score: str = "softmax") -> torch.Tensor:
    """Compute balance_loss in plain PyTorch: its oracle."""
    num_tokens, num_experts = logits.shape
    # softmax(log(sigmoid)) = sigmoid / sum(sigmoid), where every sigmoid underflows too
    probabilities = (logits if score == "softmax" else F.logsigmoid(logits)).softmax(-1)
    share = counts.to(logits.dtype) / counts.sum().clamp(min=1)
    return num_experts * (share * probabilities.sum(0) / max(num_tokens, 1)).sum()


@register_fake("fmoe_ext::balance_loss", logits=2, counts=1)
def _(logits: torch.Tensor, counts: torch.Tensor, score: int) -> torch.Tensor:
    return logits.new_empty(())


@register_fake("fmoe_ext::balance_loss_backward", grad=0, logits=2, counts=1)
def _(grad: torch.Tensor, logits: torch.Tensor, counts: torch.Tensor, score: int) -> torch.Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    logits, counts, ctx.score = inputs
    ctx.save_for_backward(logits, counts)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return call("fmoe_ext::balance_loss_backward", grad, *ctx.saved_tensors, ctx.score), None, None


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.score = inputs
    ctx.save_for_backward(*tensors)


def _backward_backward(ctx: Any, grad_grad_logits: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate in plain PyTorch: it is rare."""
    grad, logits, counts = ctx.saved_tensors
    with torch.enable_grad():
        grad, logits = grad.detach().requires_grad_(), logits.detach().requires_grad_()
        loss = balance_loss_ref(logits, counts, SCORES[ctx.score])
        (grad_logits,) = torch.autograd.grad(loss, logits, grad, create_graph=True)
        of_grad, of_logits = torch.autograd.grad(grad_logits, (grad, logits), grad_grad_logits)
    return of_grad, of_logits, None, None


register_autograd("fmoe_ext::balance_loss", _backward, _setup, places=(0,))
_Node = as_node("fmoe_ext::balance_loss", _backward, _setup)
register_second_derivative("fmoe_ext::balance_loss_backward", _backward_backward, _backward_setup)
