"""topk_gate: choose a token's experts from its logits, and weigh them by their scores.

    logits [T, E]  ->  topk_idx [T, K], the best K experts of each token  ->  topk_weights [T, K], their scores

The choice has no gradient. The weights have one, which a backward computes from logits, choices and weights, so that
the scores of all E experts need not be kept. Where logits order experts as their scores would, experts are compared by
logit: two large logits may have the same softmax after rounding, and the better one has to win all the same.

Three forms, with equal bits for equal choices:

* topk_gate is the operator, with its gradient as a node of autograd;
* topk_gate_of_linear is a gate's linear layer, choice and balance loss as one node: in a small layer each node and
  operator costs the host more than its work;
* topk_gate_again weighs the choices of an earlier forward by present logits, for forwards that activation checkpointing
  repeats: logits that differ in their last bit must not send a token to another expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.func import vjp

from fmoe_ext.ops._autograd import (
    as_node,
    below,
    call,
    call_functional,
    is_transformed,
    no_forward_mode,
    refuse_tangents,
    register_autograd,
    register_fake,
    register_not_differentiable,
    register_second_derivative,
)
from fmoe_ext.ops.balance_loss import SCORES, balance_loss
from fmoe_ext.ops.sort_tokens import count_tokens


def topk_gate(
    logits: torch.Tensor,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top_k experts of each token by score, best first, with their scores as weights.

    logits [T, E] float64, float32, bfloat16 or float16 (the dtype is left alone under autocast); bias [E] is
    added to the scores for the selection only
    -> topk_idx [T, K] int64, topk_weights [T, K] of the dtype of logits.
    Scores are softmax(logits) or sigmoid(logits), in float32 (float64 for float64); normalize divides the
    chosen ones by their sum; scale multiplies them. Of equal scores the lower index comes first; without
    a bias experts are compared by logit, which orders them as either score does. NaN ranks above everything,
    and a NaN score makes the weight NaN (for softmax, and with normalize, all weights of that token).
    With num_groups > 1 only the experts of each token's topk_groups best groups of E / num_groups neighbours
    can be chosen; a group ranks by its best logit, or, with sigmoid or a bias, by the sum of its two best
    (biased) scores.
    Raises RuntimeError unless 1 <= top_k <= the experts in the kept groups and num_groups divides E.
    Equivalent to: values, topk_idx = logits.topk(top_k); topk_weights = values.softmax(-1).

    Example:

        >>> topk_idx, topk_weights = topk_gate(torch.tensor([[0.0, 2.0, 2.0]]), top_k=2)
        >>> topk_idx, topk_weights
        (tensor([[1, 2]]), tensor([[0.5000, 0.5000]]))
    """
    if score not in SCORES:
        raise RuntimeError(f'score must be "softmax" or "sigmoid", but got "{score}"')
    number = SCORES.index(score)
    args = (logits, top_k, number, normalize, bias, num_groups, topk_groups, scale)
    # the operator alone, torch.func's form, or our node, which takes half of the host time (_autograd.py)
    has_gradient = torch.is_grad_enabled() and isinstance(logits, torch.Tensor) and logits.requires_grad
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or not has_gradient:
        return torch.ops.fmoe_ext.topk_gate(*args)
    if is_transformed(logits, bias):
        topk_idx, topk_weights = call_functional("fmoe_ext::topk_gate", *args)
    else:
        topk_idx, topk_weights = _Node.apply(*args)
    return topk_idx, topk_weights


def topk_gate_of_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    normalize: bool = True,
    num_counted: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute topk_gate of a linear layer's logits by softmax as one node of autograd: the same bits in less host time.

    x [T, D] contiguous, weight [E, D], bias [E] or None, all float32 and plain tensors, outside of autocast and of
    compiled graphs; num_counted: how many choices of each token a balance loss counts, on the CPU; 0: there is none
    -> topk_idx, topk_weights [T, K], counts [E] int64 or None, the loss or None. It saves other tensors than the
    separate calls. Use those under activation checkpointing.
    Equivalent to: logits = F.linear(x, weight, bias); topk_gate(logits, top_k, normalize=normalize), and
    balance_loss(logits, counts) with counts = count_tokens(topk_idx[:, :num_counted], E).
    """
    if is_transformed(x, weight, bias):
        logits = F.linear(x, weight, bias)
        topk_idx, topk_weights = topk_gate(logits, top_k, normalize=normalize)
        if num_counted == 0:
            return topk_idx, topk_weights, None, None
        counts = count_tokens(topk_idx[:, :num_counted], logits.shape[1])
        return topk_idx, topk_weights, counts, balance_loss(logits, counts)
    return _TopkGateOfLinear.apply(x, weight, bias, top_k, normalize, num_counted)


def topk_gate_again(
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    score: str = "softmax",
    normalize: bool = True,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh the choices of an earlier topk_gate, whatever these logits prefer; it keeps the same tensors.

    For forwards that activation checkpointing repeats. topk_idx [T, K] int64 without -1; other arguments: topk_gate
    -> topk_idx, topk_weights [T, K]; a token that would choose the same has the weights of topk_gate to the bit.
    """
    refuse_tangents("topk_gate_again", logits)
    options = (score, normalize, bias, num_groups, topk_groups, scale)
    if is_transformed(logits):  # torch.func differentiates the parts, but not the node below
        now = topk_gate(logits, topk_idx.shape[1], *options)
        is_same = (now[0] == topk_idx).all(1, keepdim=True)
        return topk_idx, torch.where(is_same, now[1], weights_ref(logits, topk_idx, score, normalize, scale))
    now = topk_gate(logits.detach(), topk_idx.shape[1], *options)
    return topk_idx, _WeightsOfChoices.apply(logits, topk_idx, now, score, normalize, scale)


def topk_gate_ref(
    logits: torch.Tensor,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute topk_gate in plain PyTorch: its oracle."""
    # values: what experts are compared by; the logits, or with a bias the biased scores
    values = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    scores = values.softmax(-1) if score == "softmax" else values.sigmoid()
    if bias is not None:
        values = scores = scores + bias.to(scores.dtype)
    # Only the experts of each token's best groups are candidates.
    if topk_groups < num_groups:
        two_best = bias is not None or score == "sigmoid"  # as DeepSeek-V3 ranks groups, else as DeepSeek-V2
        groups = (scores if two_best else values).unflatten(1, (num_groups, -1))
        rank = groups.topk(min(2 if two_best else 1, groups.shape[2]), dim=-1).values.sum(-1)  # [T, groups]
        kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, _stable_topk(rank, topk_groups), True)
        kept = kept.repeat_interleave(groups.shape[2], dim=1)
        # each token has as many candidates, so that the list of them is a matrix; in ascending order, for stable ties
        candidates = kept.nonzero()[:, 1].view(len(logits), topk_groups * groups.shape[2])
        topk_idx = candidates.gather(1, _stable_topk(values.gather(1, candidates), top_k))
    else:
        topk_idx = _stable_topk(values, top_k)
    return topk_idx, weights_ref(logits, topk_idx, score, normalize, scale)


def _stable_topk(values: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest in each row, of equal ones the lower index first; NaN ranks first."""
    # CUDA sorts a NaN with a minus sign below everything
    values = values.masked_fill(values.isnan(), torch.nan)
    return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :k]


def weights_ref(
    logits: torch.Tensor, topk_idx: torch.Tensor, score: str, normalize: bool, scale: float
) -> torch.Tensor:
    """Compute the weights of choices [T, K], differentiable; by logarithms, so that scores near 0 keep their ratios."""
    logits_wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_scores = logits_wide.log_softmax(-1) if score == "softmax" else F.logsigmoid(logits_wide)
    chosen = log_scores.gather(1, topk_idx)
    return ((chosen.softmax(-1) if normalize else chosen.exp()) * scale).to(logits.dtype)


@register_fake("fmoe_ext::topk_gate", logits=2, bias=1)
def _(
    logits: torch.Tensor,
    top_k: int,
    score: int = 0,
    normalize: bool = True,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


@register_fake("fmoe_ext::_choose_experts", logits=2)
def _(
    logits: torch.Tensor, top_k: int, normalize: bool, num_counted: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    counts = logits.new_empty((logits.shape[1] if num_counted else 0,), dtype=torch.int64)
    loss = logits.new_empty(() if num_counted else (0,))
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape), counts, loss


@register_fake("fmoe_ext::topk_gate_backward", grad_weights=2, logits=2, topk_idx=2, topk_weights=2)
def _(
    grad_weights: torch.Tensor,
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    score: int,
    normalize: bool,
    scale: float,
) -> torch.Tensor:
    return logits.new_empty(logits.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, _, ctx.score, ctx.normalize, _, _, _, ctx.scale = inputs
    topk_idx, topk_weights = output
    ctx.mark_non_differentiable(topk_idx)
    ctx.set_materialize_grads(False)  # no zeros for topk_idx
    ctx.save_for_backward(logits, topk_idx, topk_weights)


def _backward(ctx: Any, _: None, grad_weights: torch.Tensor | None) -> tuple[Any, ...]:
    if grad_weights is None:  # nothing that was differentiated needs the weights
        return None, None, None, None, None, None, None, None
    logits, topk_idx, topk_weights = ctx.saved_tensors
    options = (ctx.score, ctx.normalize, ctx.scale)
    grad_logits = call("fmoe_ext::topk_gate_backward", grad_weights, logits, topk_idx, topk_weights, *options)
    return grad_logits, None, None, None, None, None, None, None


class _TopkGateOfLinear(torch.autograd.Function):
    """topk_gate_of_linear: on the CPU one operator chooses and computes the loss, from one pass over the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        top_k: int,
        normalize: bool,
        num_counted: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        logits = F.linear(x, weight, bias)  # [T, E]
        counts = loss = None  # [E], a scalar
        if logits.is_cuda:  # where no kernel counts as well, and num_counted is 0
            topk_idx, topk_weights = below(torch.ops.fmoe_ext.topk_gate, logits, top_k, 0, normalize)
        else:
            topk_idx, topk_weights, counts, loss = below(
                torch.ops.fmoe_ext._choose_experts, logits, top_k, normalize, num_counted
            )
            if num_counted == 0:
                counts = loss = None
        ctx.mark_non_differentiable(topk_idx, *(() if counts is None else (counts,)))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, logits, topk_idx, topk_weights, counts)
        ctx.normalize = normalize
        return topk_idx, topk_weights, counts, loss

    @staticmethod
    def backward(
        ctx: Any, _: None, grad_weights: torch.Tensor | None, __: None, grad_loss: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, logits, topk_idx, topk_weights, counts = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the graph of the gradients goes through the logits
            logits = F.linear(x, weight, bias)
        # the gradient of the logits [T, E], from the weights and from the loss; then through the linear layer
        grad = None
        if grad_weights is not None:
            options = (0, ctx.normalize, 1.0)
            grad = call(
                "fmoe_ext::topk_gate_backward", grad_weights, logits, topk_idx, topk_weights, *options
            )
        if grad_loss is not None:
            of_loss = call("fmoe_ext::balance_loss_backward", grad_loss, logits, counts, 0)
            grad = of_loss if grad is None else grad + of_loss
        if grad is None:
            return None, None, None, None, None, None
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        return (
            grad.mm(weight) if of_x else None,
            grad.t().mm(x) if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        raise no_forward_mode("topk_gate")


class _WeightsOfChoices(torch.autograd.Function):
    """topk_gate_again as a node; it saves what topk_gate saves, since a checkpoint compares both forwards' tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        topk_idx: torch.Tensor,
        now: tuple[torch.Tensor, torch.Tensor],
        score: str,
        normalize: bool,
        scale: float,
    ) -> torch.Tensor:
        # a token that chooses the same now gets the operator's bits; the others are rare, and get PyTorch's
        is_same = (now[0] == topk_idx).all(1, keepdim=True)
        topk_weights = torch.where(is_same, now[1], weights_ref(logits, topk_idx, score, normalize, scale))
        ctx.score, ctx.normalize, ctx.scale = SCORES.index(score), normalize, scale
        ctx.save_for_backward(logits, topk_idx, topk_weights)
        return topk_weights

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _backward(ctx, None, grads[0])[0], None, None, None, None, None


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad_weights, logits, topk_idx, _, ctx.score, ctx.normalize, ctx.scale = inputs
    ctx.save_for_backward(grad_weights, logits, topk_idx)


def _backward_backward(ctx: Any, grad_grad_logits: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate in plain PyTorch: it is rare. topk_weights counts as what it is, a function of logits."""
    grad_weights, logits, topk_idx = ctx.saved_tensors

    def gradient(grad_weights: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        options = (topk_idx, SCORES[ctx.score], ctx.normalize, ctx.scale)
        return vjp(lambda logits: weights_ref(logits, *options), logits)[1](grad_weights)[0]

    # of torch.func, since the tensors may be those of a transform
    grads = vjp(gradient, grad_weights, logits)[1](grad_grad_logits)
    return *grads, None, None, None, None, None


register_autograd("fmoe_ext::topk_gate", _backward, _setup, places=(0,))
_Node = as_node("fmoe_ext::topk_gate", _backward, _setup)
register_not_differentiable("fmoe_ext::_choose_experts", "use topk_gate, or the node of the gate")
register_second_derivative("fmoe_ext::topk_gate_backward", _backward_backward, _backward_setup)
