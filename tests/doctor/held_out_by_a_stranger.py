"""Mistakes by someone who had not read the checks, which the doctor missed at first; each has a healthy twin.

TWINS[name] = (invariant that must be named, make); make(wrong) returns the Subject with or without the mistake.
"""

import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext.doctor import Subject
from fmoe_ext.doctor.subject import train_step


class Mlp(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def combined(x, experts, index, weights):
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, slot = torch.where(index == number)
        y = y.index_add(0, token, expert(x[token]) * weights[token, slot, None])
    return y


class Centroids(nn.Module):
    """The router is a distance to a parameter of no usual name. Wrong: the farthest are chosen."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.centroids = nn.Parameter(torch.randn(6, 10))
        self.w1 = nn.Parameter(torch.randn(6, 10, 16) / 4)
        self.b1 = nn.Parameter(torch.randn(6, 16) / 4)
        self.w2 = nn.Parameter(torch.randn(6, 16, 10) / 4)

    def forward(self, x):
        distance = torch.cdist(x, self.centroids)
        affinity = (-distance).softmax(-1)
        index = distance.topk(2, -1, largest=self.wrong).indices
        weights = torch.zeros_like(affinity).scatter(-1, index, affinity.gather(-1, index))
        hidden = F.relu(torch.einsum("td,edh->teh", x, self.w1) + self.b1)
        return torch.einsum("teh,ehd,te->td", hidden, self.w2, weights)


class Axis(nn.Module):
    """Stacked experts behind a linear of no usual name. Wrong: the softmax goes over the tokens."""

    def __init__(self, wrong):
        super().__init__()
        self.axis = 1 if wrong else -1
        self.to_scores = nn.Linear(10, 4, bias=False)
        self.w_in = nn.Parameter(torch.randn(4, 10, 16) / 3)
        self.w_out = nn.Parameter(torch.randn(4, 16, 10) / 3)

    def forward(self, x):
        best, index = self.to_scores(x).softmax(self.axis).topk(2, dim=-1)
        weights = (F.one_hot(index, 4) * best[..., None]).sum(-2)
        hidden = torch.einsum("bnd,edh->bneh", x, self.w_in).relu()
        return torch.einsum("bneh,ehd,bne->bnd", hidden, self.w_out, weights)


class Shared(nn.Module):
    """Wrong: the shared expert is added before the router's weight is multiplied."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.router = nn.Linear(10, 4, bias=False)
        self.experts = nn.ModuleList(Mlp(10, 16) for _ in range(4))
        self.shared_expert = Mlp(10, 16)

    def forward(self, x):
        weights, index = self.router(x).sigmoid().topk(1, -1)
        routed = combined(x, self.experts, index, torch.ones_like(weights))
        if self.wrong:
            return (routed + self.shared_expert(x)) * weights
        return routed * weights + self.shared_expert(x)


class Slots(nn.Module):
    """Dispatch by einsum with a declared capacity. Wrong: second choices take the slots of first ones."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.capacity_factor = wrong, 2.0
        self.wg = nn.Linear(10, 4, bias=False)
        self.experts = nn.ModuleList(Mlp(10, 16) for _ in range(4))

    def forward(self, x):
        capacity = int(self.capacity_factor * 2 * len(x) / 4)
        scores = self.wg(x).softmax(-1)
        first, second = (F.one_hot(chosen, 4) for chosen in scores.topk(2, -1).indices.unbind(-1))
        places = [first.cumsum(0) - 1, second.cumsum(0) - 1 + (0 if self.wrong else first.sum(0))]
        combine = x.new_zeros(len(x), 4, capacity)
        for chosen, place in zip((first, second), places, strict=True):
            kept = chosen * (place < capacity)
            slot = F.one_hot((place * kept).sum(-1), capacity).to(x.dtype)
            combine = combine + (scores * kept)[..., None] * slot[:, None]
        inputs = torch.einsum("tec,td->ecd", (combine > 0).to(x.dtype), x)
        rows = torch.stack([expert(part) for expert, part in zip(self.experts, inputs, strict=True)])
        return torch.einsum("tec,ecd->td", combine, rows)


class Groups(nn.Module):
    """A token's experts are of two of four groups. Wrong: 0, which beats negative scores, masks the other groups."""

    def __init__(self, wrong):
        super().__init__()
        self.masked = 0.0 if wrong else -torch.inf
        self.gate = nn.Linear(10, 8, bias=False)
        self.experts = nn.ModuleList(Mlp(10, 16) for _ in range(8))

    def forward(self, x):
        scores = self.gate(x)
        best = scores.view(-1, 4, 2).amax(-1)
        groups = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(2, -1).indices, True)
        allowed = groups.repeat_interleave(2, 1)
        index = scores.masked_fill(~allowed, self.masked).topk(3, -1).indices
        return combined(x, self.experts, index, scores.softmax(-1).gather(1, index))


class TwoArgmax(nn.Module):
    """The top 2 are two argmax, all tokens have slots. Wrong: second choices take the slots of first ones."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.wg = nn.Linear(10, 4, bias=False)
        self.w_in = nn.Parameter(torch.randn(4, 10, 16) / 3)
        self.w_out = nn.Parameter(torch.randn(4, 16, 10) / 3)

    def forward(self, x):
        scores = self.wg(x).softmax(-1)
        first = F.one_hot(scores.argmax(-1), 4)
        second = F.one_hot(scores.masked_fill(first.bool(), -1).argmax(-1), 4)
        places = [first.cumsum(0) - 1, second.cumsum(0) - 1 + (0 if self.wrong else first.sum(0))]
        combine = x.new_zeros(len(x), 4, len(x))
        for chosen, place in zip((first, second), places, strict=True):
            slot = F.one_hot((place * chosen).sum(-1), len(x)).to(x.dtype)
            combine = combine + (scores * chosen)[..., None] * slot[:, None]
        inputs = torch.einsum("tec,td->ecd", (combine > 0).to(x.dtype), x)
        return torch.einsum("tec,ecd->td", combine, (inputs @ self.w_in).relu() @ self.w_out)


class TwoOfGroups(Groups):
    """Two experts in place of three, so that few tokens meet the mask. Wrong: as above."""

    def forward(self, x):
        scores = self.gate(x)
        best = scores.view(-1, 4, 2).amax(-1)
        groups = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(2, -1).indices, True)
        index = scores.masked_fill(~groups.repeat_interleave(2, 1), self.masked).topk(2, -1).indices
        return combined(x, self.experts, index, scores.softmax(-1).gather(1, index))


class Jitter(nn.Module):
    """Training adds noise before the router. Wrong: in place, so that the experts have it, too."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.gate = nn.Linear(10, 4, bias=False)
        self.experts = nn.ModuleList(Mlp(10, 16) for _ in range(4))

    def forward(self, x):
        routed = x
        if self.training:
            noise = torch.empty_like(x).uniform_(0.9, 1.1)
            routed = routed.mul_(noise) if self.wrong else routed * noise
        weights, index = self.gate(routed).topk(2, -1)
        return combined(x, self.experts, index, weights.softmax(-1))


def jittered(wrong):
    torch.manual_seed(1)
    return Subject(nn.Sequential(nn.Linear(10, 10), Jitter(wrong), nn.Linear(10, 5)), torch.randn(24, 10))


class Counted(nn.Module):
    """A bias of the choice follows the sign of a count of tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(10, 4, bias=False)
        self.experts = nn.ModuleList(Mlp(10, 16) for _ in range(4))
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("count", torch.zeros(4), persistent=False)

    def forward(self, x):
        scores = self.router(x).sigmoid()
        index = (scores + self.expert_bias).topk(2, -1).indices
        if self.training:
            self.count += F.one_hot(index, 4).sum((0, 1))
        return combined(x, self.experts, index, scores.gather(1, index))


def counted(wrong):
    """Wrong: the step does not clear the count."""

    def step(model, optimizer, batches, loss):
        train_step(model, optimizer, batches, loss)
        count = model.moe.count
        model.moe.expert_bias += 0.01 * (count.mean() - count).sign()
        if not wrong:
            count.zero_()

    torch.manual_seed(1)
    return Subject(Net(Counted()), torch.randn(24, 10), step=step)


class Net(nn.Module):
    """A layer between projections, with a residual."""

    def __init__(self, layer):
        super().__init__()
        self.before, self.moe, self.after = nn.Linear(10, 10), layer, nn.Linear(10, 5)

    def forward(self, x):
        x = self.before(x).tanh()
        return self.after(x + self.moe(x))


def with_layer(layer, *shape):
    def make(wrong):
        torch.manual_seed(1)
        return Subject(Net(layer(wrong)), torch.randn(*shape, 10))

    return make


TWINS = {
    "farthest_centroids": ("weights", with_layer(Centroids, 24)),
    "softmax_over_the_tokens": ("own-row", with_layer(Axis, 3, 8)),
    "shared_expert_is_weighed_by_the_router": ("weights", with_layer(Shared, 24)),
    "second_choices_in_slots_of_first_ones": ("own-row", with_layer(Slots, 24)),
    "groups_are_masked_by_zero": ("choice", with_layer(Groups, 24)),
    # of a second stranger
    "slots_of_two_argmax": ("own-row", with_layer(TwoArgmax, 24)),
    "two_of_groups_that_are_masked_by_zero": ("choice", with_layer(TwoOfGroups, 64)),
    "jitter_is_written_into_the_input": ("own-row", jittered),
    "count_is_not_cleared": ("bias-once", counted),
}


def dense_with_a_head_of_as_many_classes():
    """No MoE: as many equal layers as classes, and a head whose name is not a router's."""
    torch.manual_seed(0)

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Mlp(10, 16) for _ in range(4))
            self.head = nn.Linear(10, 4)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)

    return Dense(), torch.randn(24, 10)
