"""Balance losses: how unevenly experts are used, as numbers that training can lower.

scores [T, E] are probabilities of the experts, topk_idx [T, K] the choices; workers answers for all workers that
share the experts (OneWorker for one). A loss that several workers compute is the loss of all their tokens together.
"""

import torch

from fmoe_ext import ops
from fmoe_ext.gates.base_gate import OneWorker

ONE_WORKER = OneWorker()


def balance_loss(scores, topk_idx, workers=ONE_WORKER):
    """E * sum_e f_e * p_e over all tokens: f_e the share of the choices of expert e, p_e its mean score.

    scores [T, E], topk_idx [T, K] (-1 counts for nobody) -> scalar of the dtype of scores, 1 when balanced.
    Shazeer et al. 2017 and the Switch Transformer (2021), with K > 1 as in Qwen3; over the global batch instead of each
    worker's part: "Demons in the Detail" (2025).
    Equivalent to: E * (topk_idx.flatten().bincount(minlength=E) / topk_idx.numel() * scores.mean(0)).sum().
    """
    num_experts = scores.shape[1]
    num_choices = workers.sum(ops.count_tokens(topk_idx, num_experts)).to(scores.dtype)  # [E]
    score_sum = workers.sum(scores.sum(0))  # [E]
    num_tokens = max(workers.num_tokens(scores.shape[0]), 1)
    return num_experts * (num_choices / num_choices.sum().clamp(min=1) * (score_sum / num_tokens)).sum()


def sequence_balance_loss(scores, topk_idx, seq_len, workers=ONE_WORKER):
    """The mean over sequences of each sequence's own balance_loss (DeepSeek-V2 and V3, with weight 1).

    scores [T, E], topk_idx [T, K], T = sequences * seq_len, one sequence after the other -> scalar.
    Raises ValueError if seq_len does not divide T.
    Equivalent to: mean of balance_loss(s, i) for s, i in zip(scores.split(seq_len), topk_idx.split(seq_len)).
    """
    num_tokens, num_experts = scores.shape
    if seq_len < 1 or num_tokens % seq_len != 0:
        raise ValueError(f"seq_len must divide the {num_tokens} tokens of the batch, but is {seq_len}")
    chosen = torch.zeros_like(scores).scatter_add(
        1, topk_idx.clamp(min=0).long(), (topk_idx >= 0).to(scores.dtype)
    )
    num_choices = chosen.unflatten(0, (-1, seq_len)).sum(1)  # [B, E]
    share = num_choices / num_choices.sum(1, keepdim=True).clamp(min=1)
    mean_score = scores.unflatten(0, (-1, seq_len)).mean(1)  # [B, E]
    num_sequences = max(workers.num_tokens(num_tokens) // seq_len, 1)
    return num_experts * workers.sum((share * mean_score).sum()) / num_sequences


def z_loss(logits, workers=ONE_WORKER):
    """The mean over tokens of logsumexp(logits)^2, which keeps logits small (ST-MoE, 2022).

    logits [T, E] -> scalar. Equivalent to: logits.logsumexp(1).square().mean().
    """
    num_tokens = max(workers.num_tokens(logits.shape[0]), 1)
    return workers.sum(logits.logsumexp(1).square().sum()) / num_tokens


def cv_squared(x):
    """Unbiased variance / mean^2 of x [E], 0 for one expert (Shazeer et al. 2017)."""
    if x.numel() == 1:
        return x.new_zeros(())
    return x.var() / (x.mean().square() + 1e-10)
