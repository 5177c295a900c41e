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


class Shard(nn.Module):
    """Two experts of eight, as a rank has them. Wrong: ids of other shards become its first expert, not nobody."""

    def __init__(self, wrong, rank):
        super().__init__()
        self.wrong, self.rank = wrong, rank
        self.w_in = nn.Parameter(torch.randn(2, 10, 16) / 3)
        self.w_out = nn.Parameter(torch.randn(2, 16, 10) / 4)

    def forward(self, x, index, weights):
        local = torch.where(index % 4 == self.rank, index // 4, 0 if self.wrong else 2)
        y = torch.zeros_like(x)
        for number, (w_in, w_out) in enumerate(zip(self.w_in, self.w_out, strict=True)):
            token, slot = torch.where(local == number)
            y = y.index_add(0, token, F.relu(x[token] @ w_in) @ w_out * weights[token, slot, None])
        return y


class Shards(nn.Module):
    """Experts dealt in turn to four shards, whose outputs are summed."""

    def __init__(self, wrong):
        super().__init__()
        self.router = nn.Linear(10, 8, bias=False)
        self.shards = nn.ModuleList(Shard(wrong, rank) for rank in range(4))

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2, -1)
        return sum(shard(x, index, weights) for shard in self.shards)


class LastAreIdentities(nn.Module):
    """The last two experts return their input. Wrong: the first of them takes the rows of the second one, too."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.router = nn.Linear(10, 6, bias=False)
        self.experts = nn.ModuleList([*(Mlp(10, 16) for _ in range(4)), nn.Identity(), nn.Identity()])

    def forward(self, x):
        scores, index = self.router(x).topk(2, -1)
        chosen = index.roll(1, 0) if self.wrong else index
        return combined(x, self.experts, chosen, scores.softmax(-1))


class ProbabilityInside(nn.Module):
    """Stacked experts with biases, weighed before the second product. Wrong: so that the last bias is not."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.router = nn.Linear(10, 6)
        self.up_proj, self.down_proj = (nn.Parameter(torch.randn(6, *s) / 3) for s in ((10, 16), (16, 10)))
        self.up_proj_bias, self.down_proj_bias = (nn.Parameter(torch.randn(6, n) / 4) for n in (16, 10))

    def forward(self, x):
        scores, index = self.router(x).topk(3, -1)
        y = torch.zeros_like(x)
        for number in range(6):
            token, slot = torch.where(index == number)
            weight = scores.softmax(-1)[token, slot, None]
            a = F.silu(x[token] @ self.up_proj[number] + self.up_proj_bias[number]) * weight
            bias = self.down_proj_bias[number] * (1 if self.wrong else weight)
            y = y.index_add(0, token, a @ self.down_proj[number] + bias)
        return y


class Buffers(nn.Module):
    """Rows of an expert's buffer in order, as many as its share of the tokens. Wrong: tokens overwrite each other."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.router = nn.Linear(10, 2, bias=False)
        self.wi, self.wo = (nn.Parameter(torch.randn(2, *s) / 3) for s in ((10, 16), (16, 10)))

    def forward(self, x):
        weights, expert = self.router(x).softmax(-1).max(-1)
        most = -(-9 * len(x) // 20)
        mask = F.one_hot(expert, 2).to(torch.bfloat16 if self.wrong else x.dtype)
        place = ((mask.cumsum(0) * mask).sum(-1) - 1).long()
        token = torch.where(place < most)[0]
        expert, place = expert[token], place[token]
        buffer = x.new_zeros(2, most, 10).index_put((expert, place), x[token])
        rows = F.relu(buffer @ self.wi) @ self.wo
        return torch.zeros_like(x).index_copy(0, token, rows[expert, place] * weights[token, None])


class Room(nn.Module):
    """A model of tokens whose experts have room for their share. Wrong: padding takes room, too."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.embed, self.head = nn.Embedding(30, 10), nn.Linear(10, 30)
        self.router = nn.Linear(10, 4, bias=False)
        self.experts = nn.ModuleList(Mlp(10, 16) for _ in range(4))

    def forward(self, ids, mask):
        x, real = self.embed(ids).flatten(0, 1), mask.flatten().bool()
        most = -(-2 * int(real.sum()) // 4)
        scores, index = self.router(x).softmax(-1).topk(2, -1)
        if not self.wrong:
            index = index.masked_fill(~real[:, None], 4)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (found[:most] for found in torch.where(index == number))
            y = y.index_add(0, token, expert(x[token]) * scores[token, slot, None])
        return self.head(x + y).view(*ids.shape, -1)


def padded_tokens(wrong):
    torch.manual_seed(1)
    ids = torch.randint(1, 30, (3, 11))

    def loss(model, batch):
        found = model(batch["ids"], batch["mask"])
        return F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    batch = {"ids": ids[:, :-1], "mask": torch.ones(3, 10, dtype=torch.int64), "labels": ids[:, 1:]}
    fill = {"ids": 0, "mask": 0, "labels": -100}
    return Subject(
        Room(wrong), batch, loss=loss, padded={n: F.pad(v, (0, 6), value=fill[n]) for n, v in batch.items()}
    )


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
    # of a third one
    "ids_of_other_shards_become_the_first_expert": ("choice", with_layer(Shards, 48)),
    "choices_of_other_tokens_beside_identities": ("own-row", with_layer(LastAreIdentities, 48)),
    "bias_behind_the_probability": ("weighted", with_layer(ProbabilityInside, 36)),
    "places_in_buffers_are_rounded": ("own-row", with_layer(Buffers, 700)),
    "padding_takes_room": ("balance-padding", padded_tokens),
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
