"""Scores of experts from their logits, and the weights of choices from scores; for the gates that have logits.

score is "softmax", "sigmoid" or "sqrtsoftplus"; logits are [T, E]. A score is divided by a sum of scores to become a
weight or a probability, and that sum underflows to 0 where every score does (logits of -100 under a sigmoid). So the
division is done to logarithms, which stay finite, by a softmax: softmax(log s) = s / sum(s).
"""

import torch
import torch.nn.functional as F

from fmoe_ext import ops


def scores_of(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Compute the scores [T, E] of logits [T, E]."""
    if score == "softmax":
        return logits.softmax(-1)
    return ops.sigmoid(logits) if score == "sigmoid" else _log_scores(logits, score).exp()


def probabilities_of(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Divide the scores [T, E] of logits [T, E] by their sum; numbers also where all scores of a token underflow.

    Equivalent to: scores_of(logits, score) / scores_of(logits, score).sum(-1, keepdim=True).
    """
    return (logits if score == "softmax" else _log_scores(logits, score)).softmax(-1)


def weights_of(
    logits: torch.Tensor,
    topk_idx: torch.Tensor,
    score: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
) -> torch.Tensor:
    """Weigh choices made elsewhere as ops.topk_gate would; 0 for dropped ones (-1).

    logits [T, E], topk_idx [T, K] -> [T, K]; normalize divides by the sum over the choices that are not dropped.
    Raises ValueError for another number of tokens.
    """
    if topk_idx.shape[0] != logits.shape[0]:
        raise ValueError(f"the choices are for {topk_idx.shape[0]} tokens, but there are {logits.shape[0]}")
    dropped_TK = topk_idx < 0
    chosen_TK = topk_idx.clamp(min=0).long()
    if not normalize:
        return (scores_of(logits, score).gather(1, chosen_TK) * scale).masked_fill(dropped_TK, 0)
    logs_TK = _log_scores(logits, score).gather(1, chosen_TK)
    # not -inf: the softmax of a token whose choices are all dropped would be NaN
    logs_TK = logs_TK.masked_fill(dropped_TK, torch.finfo(logs_TK.dtype).min)
    return (logs_TK.softmax(-1) * scale).masked_fill(dropped_TK, 0)


def _log_scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Compute log(scores_of(logits, score)) [T, E], finite with its gradient where a score rounds to 0."""
    if score == "softmax":
        return logits.log_softmax(-1)
    if score == "sigmoid":
        if not ops.is_batch_invariant():
            return F.logsigmoid(logits)
        # a softmax of two, whose bits do not depend on where an element stands (ops.sigmoid)
        return torch.stack((logits, torch.zeros_like(logits)), -1).log_softmax(-1)[..., 0]
    low = -20.0  # below it log(softplus(x)) is x: softplus(x) = exp(x) * (1 - exp(x) / 2 + ...)
    log_softplus = F.softplus(logits.clamp(min=low)).log()
    return 0.5 * torch.where(logits < low, logits, log_softplus)
