"""Mistakes that outputs, choices or weights show, and healthy models beside them.

MISTAKES[name] = (invariants of which one must be named, subject); HEALTHY[name] = subject.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.doctor import Subject
from fmoe_ext.doctor.subject import train_step
from fmoe_ext.gates import SoftmaxGate
from tests.doctor.museum import moe_with, normalised, router_with, subject
from tests.doctor.plain import EXPERTS, HIDDEN, D, Expert, Model, MoE, parts

MISTAKES, HEALTHY = {}, {}


def mistake(*invariants):
    def register(function):
        MISTAKES[function.__name__] = (set(invariants), function)
        return function

    return register


def healthy(function):
    HEALTHY[function.__name__] = function
    return function


def mixed(change):
    return subject(moe_with(mix=change))


def choosing(choose, **methods):
    """A MoE whose router returns choose(router, scores): weights, index."""

    def forward(self, x):
        scores = self.scores(x)
        return scores, *choose(self, scores)

    return subject(moe_with(router_with(forward=forward), **methods))


def without_balance(moe, **changed):
    return subject(moe, parts=None, padded=None, loss=lambda model, batch: parts(model, batch)[0], **changed)


def linear(router, x):
    return F.linear(x, router.weight)


# Rows


@mistake("own-row", "batch")
def rows_in_another_order():
    return mixed(lambda self, x, w, i: MoE.mix(self, x, w, i).flip(0))


@mistake("causality")
def load_divides_by_the_tokens_of_an_idle_expert():
    """An expert without tokens makes its factor 0 / 0, and the output NaN."""

    def mix(self, x, w, i):
        load = F.one_hot(i, EXPERTS).sum((0, 1))
        return MoE.mix(self, x, w, i) * (load / load).mean()

    return mixed(mix)


@mistake("own-row")
def rows_of_the_next_token():
    return mixed(lambda self, x, w, i: MoE.mix(self, x, w, i).roll(1, 0))


@mistake("own-row")
def weights_over_the_mean_of_the_batch():
    return mixed(lambda self, x, w, i: MoE.mix(self, x, w / w.mean(), i))


@mistake("causality")
def mean_of_the_sequence_is_added():
    def mix(self, x, w, i):
        y = MoE.mix(self, x, w, i).view(-1, 6, D)
        return (y + 0.1 * y.mean(1, keepdim=True)).reshape(-1, D)

    return mixed(mix)


@mistake("causality")
def shared_expert_is_added_for_each_expert_with_tokens():
    def mix(self, x, w, i):
        return MoE.mix(self, x, w, i) + 0.1 * len(i.unique()) * x

    return mixed(mix)


@mistake("own-row", "weights")
def experts_read_rows_of_other_tokens():
    return subject(moe_with(part=lambda self, expert, x, weight, number: expert(x.flip(0)) * weight))


@mistake("drops", "own-row")
def stacked_experts_drop_in_silence():
    return stacked(keep=10)


@mistake("drops")
def second_expert_overwrites_the_first():
    def mix(self, x, w, i):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(i == number)
            y = y.index_copy(0, token, expert(x[token]) * w[token, slot, None])
        return y

    return mixed(mix)


@mistake("history")
def routing_of_the_previous_batch():
    def choose(self, scores):
        index = scores.topk(self.top_k, dim=-1).indices
        old, self.old = getattr(self, "old", index), index
        index = old if old.shape == index.shape else index
        return scores.gather(-1, index), index

    return choosing(choose)


@mistake("history")
def load_of_the_previous_batch_in_the_balance_loss():
    def balance_loss(self, scores, index, valid):
        keep = slice(None) if valid is None else valid.flatten()
        load = F.one_hot(index[keep], EXPERTS).to(scores).mean((0, 1))
        old, self.old = getattr(self, "old", load), load
        return EXPERTS * (old * scores[keep].mean(0)).sum()

    return subject(moe_with(balance_loss=balance_loss))


@mistake("evaluation")
def weights_are_normalised_in_training_alone():
    def weights(self, chosen):
        return normalised(self, chosen) if self.training else chosen

    return subject(moe_with(router_with(weights=weights)))


# Choices


@mistake("choice")
def worst_experts():
    def choose(self, scores):
        index = scores.topk(self.top_k, dim=-1, largest=False).indices
        return scores.gather(-1, index), index

    return choosing(choose)


@mistake("choice")
def first_of_an_ascending_order():
    def choose(self, scores):
        index = scores.argsort(-1)[:, : self.top_k]
        return scores.gather(-1, index), index

    return choosing(choose)


@mistake("choice")
def next_expert_computes():
    return mixed(lambda self, x, w, i: MoE.mix(self, x, w, (i + 1) % EXPERTS))


@mistake("choice")
def best_expert_twice():
    def choose(self, scores):
        index = scores.argmax(-1, keepdim=True).expand(-1, 2)
        return scores.gather(-1, index), index

    return choosing(choose)


@mistake("top-k")
def one_expert_where_the_option_says_two():
    def init(self, top_k=2, bias=False):
        MoE.__init__(self, 1, bias)
        self.num_experts_per_tok = top_k

    return subject(moe_with(__init__=init))


# Weights


@mistake("weights")
def weights_of_the_other_choice():
    return subject(moe_with(router_with(weights=lambda self, chosen: chosen.flip(-1))))


@mistake("weights")
def weights_of_the_other_choice_in_our_layer():
    class Gate(SoftmaxGate):
        def forward(self, inp, *args, **options):
            index, weights = super().forward(inp, *args, **options)[:2]
            return index, weights.flip(-1)

    torch.manual_seed(0)
    layer = FMoETransformerMLP(num_expert=4, d_model=12, d_hidden=10, gate=Gate, top_k=2)
    return Subject(layer, torch.randn(16, 12))


@mistake("weights")
def scores_are_added():
    return subject(moe_with(part=lambda self, expert, x, weight, number: expert(x) + weight))


@mistake("weights")
def weights_count_twice():
    return subject(moe_with(part=lambda self, expert, x, weight, number: expert(x) * weight * weight))


@mistake("weights")
def softmax_of_a_softmax():
    return subject(moe_with(router_with(weights=lambda self, chosen: chosen.softmax(-1))))


@mistake("weights")
def logits_are_weights():
    def forward(self, x):
        index = self.scores(x).topk(self.top_k, dim=-1).indices
        return self.scores(x), linear(self, x).gather(-1, index), index

    return subject(moe_with(router_with(forward=forward)))


@mistake("weights", "own-row")
def weights_in_the_order_of_tokens_for_sorted_rows():
    return stacked(sort_weights=False)


@mistake("normalised")
def option_of_normalised_weights_is_not_read():
    def init(self, top_k=2, bias=False):
        MoE.__init__(self, top_k, bias)
        self.norm_topk_prob = True

    return subject(moe_with(__init__=init))


# Balance, biases and steps


def with_moving_bias(sign, other=False):
    class Counts(MoE):
        def __init__(self, top_k=2, bias=True):
            super().__init__(top_k, True)

        def balance_loss(self, scores, index, valid):
            self.index = index[valid.flatten()]  # padding is no load
            return MoE.balance_loss(self, scores, index, valid)

    def step(model, optimizer, batches, loss):
        train_step(model, optimizer, batches, loss)
        blocks = list(model.blocks)
        for block, counted in zip(blocks, reversed(blocks) if other else blocks, strict=True):
            load = counted.index.flatten().bincount(minlength=EXPERTS).double()
            block.router.expert_bias += sign * 0.01 * (load - load.mean()).sign()

    return subject(Counts, step=step)


@mistake("bias-direction")
def bias_moves_with_the_load():
    return with_moving_bias(1)


@mistake("bias-direction")
def bias_moves_by_the_load_of_another_layer():
    return with_moving_bias(-1, other=True)


@mistake("accumulation")
def balance_loss_is_not_divided_in_accumulation():
    def step(model, optimizer, batches, loss):
        optimizer.zero_grad()
        for batch in batches:
            task, balance = parts(model, batch)
            (task / len(batches) + 0.1 * balance).backward()
        optimizer.step()

    return subject(step=step)


@mistake("accumulation")
def gradients_are_cleared_in_each_microbatch():
    def step(model, optimizer, batches, loss):
        for batch in batches:
            optimizer.zero_grad()
            (loss(model, batch) / len(batches)).backward()
        optimizer.step()

    return subject(step=step)


@mistake("balance-cost")
def softmax_twice_in_the_balance_loss():
    def balance_loss(self, scores, index, valid):
        return MoE.balance_loss(self, scores.softmax(-1), index, valid)

    return subject(moe_with(balance_loss=balance_loss))


@mistake("balance-cost")
def balance_loss_of_the_other_sign():
    def balance_loss(self, scores, index, valid):
        return -MoE.balance_loss(self, scores, index, valid)

    return subject(moe_with(balance_loss=balance_loss))


@mistake("balance-in-loss")
def balance_loss_of_the_last_layer_alone():
    def last(model, batch):
        return parts(model, batch)[0], model.blocks[-1].balance

    def loss(model, batch):
        task, balance = last(model, batch)
        return task + 0.1 * balance

    return subject(parts=last, loss=loss)


# Models without a mistake


class Stacked(nn.Module):
    """Experts in two stacked matrices, rows sorted by expert. keep: rows of an expert; the others are 0."""

    def __init__(self, sort_weights=True, keep=1000):
        super().__init__()
        self.gate = nn.Linear(D, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8, D, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(8, HIDDEN, D) / 3)
        self.sort_weights, self.keep = sort_weights, keep

    def forward(self, x, valid=None):
        flat = x.reshape(-1, D)
        weights, index = self.gate(flat).softmax(-1).topk(2, -1)
        order = index.flatten().argsort(stable=True)
        weights = weights.flatten()[order] if self.sort_weights else weights.flatten()
        sizes = index.flatten().bincount(minlength=8).tolist()
        rows = [
            (F.silu(part @ up) @ down) * (torch.arange(len(part)) < self.keep)[:, None]
            for part, up, down in zip(flat[order // 2].split(sizes), self.up, self.down, strict=True)
        ]
        y = torch.zeros_like(flat).index_add(0, order // 2, torch.cat(rows) * weights[:, None])
        self.balance = y.sum() * 0
        return y.view_as(x)


@healthy
def stacked(**options):
    return without_balance(None, model=lambda: Model(lambda: Stacked(**options)))


@healthy
def bias_moves_against_the_load():
    return with_moving_bias(-1)


@healthy
def three_samples():
    made = subject()
    return replace(made, batch={name: value[:3] for name, value in made.batch.items()}, padded=None)


@healthy
def one_sample():
    made = subject()
    return replace(made, batch={name: value[:1] for name, value in made.batch.items()}, padded=None)


@healthy
def experts_choose_tokens():
    class Layer(MoE):
        def forward(self, x, valid=None):
            flat = x.reshape(-1, D)
            weights, token = self.router.scores(flat).topk(len(flat) * 2 // EXPERTS, dim=0)
            y = torch.zeros_like(flat)
            for e, expert in enumerate(self.experts):
                y = y.index_add(0, token[:, e], expert(flat[token[:, e]]) * weights[:, e, None])
            self.balance = y.sum() * 0
            return y.view_as(x)

    return without_balance(Layer)


@healthy
def declared_capacity():
    class Layer(MoE):
        capacity_factor = 1.0

        def __init__(self, top_k=2, bias=False):
            super().__init__(top_k, bias)
            self.capacity = 24

        def mix(self, x, w, i):
            y = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                token, slot = (places[: self.capacity] for places in torch.where(i == number))
                y = y.index_add(0, token, expert(x[token]) * w[token, slot, None])
            return y

    return subject(Layer, padded=None)


@healthy
def soft_mixture():
    class Layer(MoE):
        def forward(self, x, valid=None):
            scores = F.linear(x, self.router.weight)
            slots = torch.einsum("bse,bsd->bed", scores.softmax(1), x)
            rows = torch.stack([expert(slots[:, e]) for e, expert in enumerate(self.experts)], 1)
            y = torch.einsum("bse,bed->bsd", scores.softmax(-1), rows)
            self.balance = y.sum() * 0
            return y

    return without_balance(Layer)


class WithAttention(Model):
    """Attention before the MoE layers."""

    def __init__(self, causal):
        super().__init__()
        self.attention, self.causal = nn.MultiheadAttention(D, 2, batch_first=True), causal

    def forward(self, tokens, valid=None):
        x = self.embed(tokens)
        mask = torch.full((x.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1) if self.causal else None
        x = x + self.attention(x, x, x, attn_mask=mask)[0]
        for block in self.blocks:
            x = x + block(x, valid)
        return self.head(x)


@healthy
def encoder():
    return subject(model=lambda: WithAttention(causal=False), padded=None)


@healthy
def decoder():
    return subject(model=lambda: WithAttention(causal=True), padded=None)


@healthy
def scores_are_distances():
    return subject(moe_with(router_with(scores=lambda self, x: (-linear(self, x)).softmax(-1))))


@healthy
def choice_by_a_share_of_the_probability():
    def choose(self, scores):
        weights, index = scores.sort(-1, descending=True)
        keep = weights.cumsum(-1) - weights < 0.6
        return weights * keep, torch.where(keep, index, EXPERTS)

    made = choosing(choose, balance_loss=lambda self, scores, index, valid: scores.sum() * 0)
    return replace(made, parts=None, padded=None)


@healthy
def normalised_sigmoids():
    def balance_loss(self, scores, index, valid):
        return MoE.balance_loss(self, scores / scores.sum(-1, keepdim=True), index, valid)

    router = router_with(scores=lambda self, x: linear(self, x).sigmoid(), weights=normalised)
    return subject(moe_with(router, balance_loss=balance_loss, norm_topk_prob=True))


@healthy
def softmax_of_the_chosen_scores():
    def forward(self, x):
        scores, index = linear(self, x).topk(self.top_k, dim=-1)
        return linear(self, x).softmax(-1), scores.softmax(-1), index

    return subject(moe_with(router_with(forward=forward)))


@healthy
def variance_as_balance_loss():
    def balance_loss(self, scores, index, valid):
        mean = scores[slice(None) if valid is None else valid.flatten()].mean(0)
        return mean.var() / mean.mean().square()

    return subject(moe_with(balance_loss=balance_loss))


@healthy
def z_loss_beside_the_balance_loss():
    def forward(self, x, valid=None):
        y = MoE.forward(self, x, valid)
        scores = linear(self.router, x if valid is None else x[valid])
        self.balance = self.balance + 0.01 * scores.logsumexp(-1).square().mean()
        return y

    return subject(moe_with(forward=forward))


@healthy
def one_choice_for_a_sequence():
    class Layer(MoE):
        def forward(self, x, valid=None):
            scores, weights, index = self.router(x.mean(1))
            self.balance = self.balance_loss(scores, index, None)
            rows = [[self.experts[int(e)](x[b]) for e in index[b]] for b in range(len(x))]
            return torch.stack(
                [sum(y * w for y, w in zip(r, weights[b], strict=True)) for b, r in enumerate(rows)]
            )

    return subject(Layer, padded=None)


@healthy
def all_experts_are_chosen():
    return subject(model=lambda: Model(top_k=EXPERTS))


@healthy
def weights_on_inputs():
    return without_balance(moe_with(part=lambda self, expert, x, weight, number: expert(x * weight)))


@healthy
def scale_of_each_expert():
    class Layer(MoE):
        def __init__(self, top_k=2, bias=False):
            super().__init__(top_k, bias)
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, EXPERTS))

        def mix(self, x, w, i):
            return MoE.mix(self, x, w * self.scale[i], i)

    return subject(Layer)


@healthy
def noise_and_dropout():
    def scores(self, x):
        logits = linear(self, x)
        return (logits + torch.randn_like(logits) * self.training).softmax(-1)

    def part(self, expert, x, weight, number):
        return F.dropout(expert(x), 0.1, self.training) * weight

    return subject(moe_with(router_with(scores=scores), part=part), padded=None)


@healthy
def shared_expert_with_a_gate():
    class Layer(MoE):
        def __init__(self, top_k=2, bias=False):
            super().__init__(top_k, bias)
            self.shared, self.shared_gate = Expert(), nn.Linear(D, 1)

        def mix(self, x, w, i):
            return MoE.mix(self, x, w, i) + self.shared_gate(x).sigmoid() * self.shared(x)

    return subject(Layer)
