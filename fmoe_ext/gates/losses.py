"""Balance losses: how unevenly experts are used, as numbers that training can lower.

    f_e    share of the choices that are expert e    counts, so it has no gradient
    p_e    mean score of expert e                    has one; where f_e is large the loss pushes it down

E sum_e f_e p_e is 1 when both are even (Shazeer et al., 2017; Switch Transformer, 2021). Gates call the losses and keep
them; total_loss() sums what the gates of a model have kept.

scores [T, E] are probabilities of the experts, topk_idx [T, K] the choices; ranks answers for all ranks whose
tokens count together (OneRank for one). A loss that several ranks compute is the loss of all their tokens together.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import ops
from fmoe_ext.gates.accumulation import spans_calls
from fmoe_ext.gates.base_gate import OneRank, Ranks, gates_of
from fmoe_ext.gates.scores import probabilities_of
from fmoe_ext.ops.balance_loss import SCORES
from fmoe_ext.step import count_choices

ONE_RANK = OneRank()


def balance_loss(scores: torch.Tensor, topk_idx: torch.Tensor, ranks: Ranks = ONE_RANK) -> torch.Tensor:
    """Compute E * sum_e f_e * p_e over all tokens: f_e the share of the choices of expert e, p_e its mean score.

    scores [T, E], topk_idx [T, K] (-1 counts for nobody) -> scalar of the dtype of scores, 1 when balanced.
    Shazeer et al. 2017 and the Switch Transformer (2021), with K > 1 as in Qwen3; over the global batch instead of each
    rank's part: "Demons in the Detail" (2025).
    Equivalent to: E * (topk_idx.flatten().bincount(minlength=E) / topk_idx.numel() * scores.mean(0)).sum().

    Example:

        >>> scores = torch.full((4, 2), 0.5)  # 4 tokens, 2 experts
        >>> balance_loss(scores, topk_idx=torch.tensor([[0], [1], [0], [1]]))
        tensor(1.)
    """
    return balance_of_sums(*sum_over_ranks(scores, topk_idx, ranks))


def balance_loss_of_logits(
    logits: torch.Tensor, topk_idx: torch.Tensor, score: str = "softmax", ranks: Ranks = ONE_RANK
) -> torch.Tensor:
    """Compute balance_loss of the probabilities of logits [T, E], by one operator where tokens are on one rank.

    Equivalent to: balance_loss(probabilities_of(logits, score), topk_idx, ranks).
    """
    if type(ranks) is OneRank and score in SCORES:
        return ops.balance_loss(logits, count_choices(topk_idx, logits.shape[1]), score)
    return balance_loss(probabilities_of(logits, score), topk_idx, ranks)


def balance_of_sums(
    num_choices: torch.Tensor, score_sum: torch.Tensor, num_tokens: int | torch.Tensor
) -> torch.Tensor:
    """Compute balance_loss of sum_over_ranks()'s results; num_choices [E] may count more tokens than score_sum [E].

    So "running" has the choices of many forwards and the scores of one.
    """
    # counts have no gradient, but a sum over ranks gives them one; clamped for a forward without tokens
    num_choices = num_choices.detach()
    share = num_choices / num_choices.sum().clamp(min=1)  # [E], f_e
    tokens = num_tokens.detach().clamp(min=1) if isinstance(num_tokens, torch.Tensor) else max(num_tokens, 1)
    return (share * (len(score_sum) / tokens) * score_sum).sum()


def sum_over_ranks(
    scores: torch.Tensor, topk_idx: torch.Tensor, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor, int | torch.Tensor]:
    """Sum choices [E], scores [E] and numbers of tokens over all ranks, in one exchange."""
    num_local_tokens, num_experts = scores.shape
    num_choices = count_choices(topk_idx, num_experts).to(scores.dtype)
    if type(ranks) is OneRank:
        return num_choices, scores.sum(0), num_local_tokens
    # [2 E + 1] numbers in one message
    mine = torch.cat((num_choices, scores.sum(0), scores.new_full((1,), num_local_tokens)))
    num_choices, score_sum, num_tokens = ranks.sum(mine).split((num_experts, num_experts, 1))
    return num_choices, score_sum, num_tokens.squeeze(0)


def _mean_over_ranks(value_sum: torch.Tensor, count: int | torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Divide the sum of value_sum over the ranks by the sum of count, in one exchange."""
    counted = torch.as_tensor(count, dtype=value_sum.dtype, device=value_sum.device)
    total, count_of_all = ranks.sum(torch.stack((value_sum, counted))).unbind()
    return total / count_of_all.clamp(min=1)


def sequence_balance_loss(
    scores: torch.Tensor,
    topk_idx: torch.Tensor,
    seq_len: int | None = None,
    ranks: Ranks = ONE_RANK,
    *,
    sequences: torch.Tensor | None = None,
    parts: Ranks = ONE_RANK,
) -> torch.Tensor:
    """Average each sequence's own balance_loss over sequences (DeepSeek-V2 and V3, with weight 1).

    scores [T, E], topk_idx [T, K], T = sequences * seq_len, one sequence after the other -> scalar. Where lengths
    differ: sequences [T] int64, the number of each token's sequence instead of seq_len; a number without tokens
    counts for nothing. parts: the ranks that have parts of the same sequences, in one order; seq_len is then the length
    of a part.
    Raises ValueError if seq_len does not divide T.
    Equivalent to: mean of balance_loss(s, i) for s, i in zip(scores.split(seq_len), topk_idx.split(seq_len)).

    Example:

        >>> scores = torch.full((4, 2), 0.5)
        >>> topk_idx = torch.tensor([[0], [1], [0], [0]])  # two sequences of two tokens
        >>> sequence_balance_loss(scores, topk_idx, seq_len=2)
        tensor(1.)
    """
    num_tokens, num_experts = scores.shape
    if sequences is None:
        if seq_len is None or seq_len < 1 or num_tokens % seq_len != 0:
            raise ValueError(f"seq_len must divide the {num_tokens} tokens of the batch, but is {seq_len}")
        if type(parts) is not OneRank:
            sequences = torch.arange(num_tokens, device=scores.device) // seq_len
    elif len(sequences) != num_tokens:
        raise ValueError(
            f"there are {len(sequences)} tokens in sequences, but the gate has {num_tokens}: a loss of each sequence "
            'needs whole sequences on every rank, which slice_group cuts; take balance_loss="global" there'
        )
    # 1 where a token chose an expert
    chosen_TE = torch.zeros_like(scores).scatter_add(
        1, topk_idx.clamp(min=0).long(), (topk_idx >= 0).to(scores.dtype)
    )
    num_sequences: int | torch.Tensor
    # B sequences: choices of each expert and its mean score in each, [B, E]
    if sequences is None:  # all of one length and whole: by a view
        assert seq_len is not None
        num_choices_BE = chosen_TE.unflatten(0, (-1, seq_len)).sum(1)
        mean_score_BE = scores.unflatten(0, (-1, seq_len)).mean(1)
        num_sequences = num_tokens // seq_len
    else:
        num_numbers = int(F.pad(sequences, (0, 1), value=-1).max()) + 1
        if type(parts) is not OneRank:  # another part may have later sequences, where this one has no token
            mine = torch.tensor([num_numbers], device=scores.device)
            num_numbers = max(int(count) for count in parts.gather(mine))
        # summed by the number of the sequence, then over the ranks that have parts of it
        zeros_BE = scores.new_zeros(num_numbers, num_experts)
        num_choices_BE = zeros_BE.index_add(0, sequences, chosen_TE)
        score_sum_BE = zeros_BE.index_add(0, sequences, scores)
        lengths_B = sequences.new_zeros(num_numbers).index_add(0, sequences, torch.ones_like(sequences))
        if type(parts) is not OneRank:
            sums = parts.sum(
                torch.cat((num_choices_BE, score_sum_BE, lengths_B.to(scores.dtype)[:, None]), 1)
            )
            num_choices_BE, score_sum_BE, lengths_B1 = sums.split((num_experts, num_experts, 1), 1)
            num_choices_BE, lengths_B = num_choices_BE.detach(), lengths_B1.detach()[:, 0]
        mean_score_BE = score_sum_BE / lengths_B.clamp(min=1)[:, None]
        num_sequences = (lengths_B > 0).sum()
    share_BE = num_choices_BE / num_choices_BE.sum(1, keepdim=True).clamp(min=1)
    return _mean_over_ranks(num_experts * (share_BE * mean_score_BE).sum(), num_sequences, ranks)


def z_loss(logits: torch.Tensor, ranks: Ranks = ONE_RANK) -> torch.Tensor:
    """Average logsumexp(logits)^2 over tokens, which keeps logits small (ST-MoE, 2022).

    logits [T, E] -> scalar. Equivalent to: logits.logsumexp(1).square().mean().

    Example:

        >>> round(z_loss(torch.zeros(5, 4)).item(), 4)  # log(4)^2
        1.9218
    """
    return _mean_over_ranks(logits.logsumexp(1).square().sum(), logits.shape[0], ranks)


def cv_squared(x: torch.Tensor) -> torch.Tensor:
    """Compute the unbiased variance / mean^2 of x [E], 0 for one expert (Shazeer et al. 2017)."""
    if x.numel() == 1:
        return x.new_zeros(())
    return x.var() / (x.mean().square() + 1e-10)


def total_loss(model: nn.Module) -> torch.Tensor:
    """Sum the losses that the gates of a model have from its last forward.

    -> scalar, to train with `loss + weight * total_loss(model)`. Zero before the first forward. The same value at each
    call until the next forward. Of a forward under no_grad in evaluation: the value, without a gradient.
    Warns once, outside of compiled programs, if no gate of a model in training balances the experts, and for a layer
    that was called several times in training since the last call here: the loss is of its last forward alone.
    Raises ValueError for a model without gates of fmoe_ext, RuntimeError for losses without a gradient (BaseGate).
    Equivalent to: sum(gate.get_loss(clear=False) for gate in the model's gates).

    Example:

        >>> model = fmoe_ext.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16, gate="softmax")
        >>> loss = model(torch.randn(10, 8)).square().mean() + 0.01 * total_loss(model)
        >>> loss.backward()
        >>> model.gate.gate.weight.grad.shape
        torch.Size([4, 8])
    """
    gates = gates_of(model)
    if not gates:
        raise ValueError(
            f"{type(model).__name__} has no gate of fmoe_ext (a module that is a BaseGate), so no loss of one. "
            "Models of Transformers keep their own routers: output_router_logits=True adds "
            "router_aux_loss_coef times their loss"
        )
    # 1. Warn of a model whose gates balance nothing.
    warns = model.training and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting())
    if warns and not any(gate.balances or "no balance" in gate.warned for gate in gates):
        for gate in gates:
            gate.warned.add("no balance")
        classes = ", ".join(sorted({type(gate).__name__ for gate in gates}))
        warnings.warn(
            f"{type(model).__name__} trains with {classes} only, which has no balance loss: total_loss() is zero, and "
            'tokens may crowd at a few experts. A gate with a loss is gate="softmax"; "sigmoid" balances by a bias',
            stacklevel=2,
        )
    # 2. The losses of the last forward: those that were not read yet. If all were, this is a second call for them.
    new = [gate for gate in gates if gate.loss is not None and not gate.loss_is_read]
    if new:
        for gate in gates:
            if gate.loss_is_read:
                gate.set_loss(None)  # the last forward did not reach it
    losses = [gate.get_loss(clear=False) for gate in (new or gates)]
    # 3. Warn of layers that were called several times, of which the last call's loss is left.
    for gate in new:
        num_calls = gate.note_read()
        # inside all_forwards_first() the loss is of all calls
        if num_calls < 2 or "calls" in gate.warned or spans_calls(gate):
            continue
        gate.warned.add("calls")
        name = next(name for name, module in model.named_modules() if module is gate)
        warnings.warn(
            f"the gate {name!r} ({type(gate).__name__}) was called {num_calls} times in training since its loss was "
            "last read, which is the loss of its last call alone. Where one step calls a layer several times (tied "
            "layers), add total_loss(layer) after each call, or take gates.all_forwards_first(model) for the loss of "
            "all calls together",
            stacklevel=2,
        )
    # 4. Sum in float32 or wider, on the device of the gates.
    like = next((p for gate in gates for p in gate.parameters()), torch.zeros((), device="cpu"))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    zero = torch.zeros((), dtype=dtype, device=like.device)
    total = sum((loss.sum() for loss in losses if loss is not None), zero)
    # 5. A loop may call backward() on it, also where it is constant; a graph cannot return such a tensor.
    is_constant = model.training and torch.is_grad_enabled() and not total.requires_grad
    if is_constant and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()):
        total.requires_grad_()
    return total
