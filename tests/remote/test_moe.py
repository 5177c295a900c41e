"""Mixtures of remote experts: what they compute, what they learn, and that they go on without those that are gone."""

import pytest
import torch

from fmoe_ext import FMoE, NaiveGate
from fmoe_ext.remote import (
    Client,
    Credentials,
    ExpertGone,
    LiveGate,
    RemoteExpert,
    RemoteExperts,
    RemoteMixtureOfExperts,
    RemoteSwitchMixtureOfExperts,
    SchemaError,
    Security,
    Settings,
    StaticList,
    Training,
    loop,
    make_expert,
    register_expert_class,
)
from fmoe_ext.remote.beam_search import beam_search
from fmoe_ext.remote.expert_classes import find_expert_class, find_schema

D = 16
FROZEN = Training("none")


def uids(count, prefix="expert"):
    return tuple(f"{prefix}.{n}" for n in range(count))


def test_mixture_equals_the_formula(serve):
    """Outputs, gradients of the input and of the gate, against the same experts here."""
    _, directory = serve(expert_uids=uids(5), training=FROZEN)
    torch.manual_seed(0)
    moe = RemoteMixtureOfExperts(D, (5,), directory, "expert", k_best=2)
    x = torch.randn(12, D, requires_grad=True)
    y = moe(x)
    y.pow(2).sum().backward()

    x2 = x.detach().clone().requires_grad_()
    proj = moe.proj.weight.detach().clone().requires_grad_()
    logits = x2 @ proj.t() + moe.proj.bias.detach()
    best = logits.topk(2, dim=1)
    local = [make_expert("ffn", D, uid=uid) for uid in uids(5)]
    every = torch.stack([expert(x2) for expert in local], dim=1)  # [T, E, D]
    chosen = every.gather(1, best.indices[..., None].expand(-1, -1, D))
    truth = (best.values.softmax(-1)[..., None] * chosen).sum(1)
    truth.pow(2).sum().backward()
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(x.grad, x2.grad)
    torch.testing.assert_close(moe.proj.weight.grad, proj.grad)


def test_one_call_an_expert_and_batch(serve):
    server, directory = serve(expert_uids=uids(4), training=FROZEN)
    moe = RemoteMixtureOfExperts(D, (4,), directory, "expert", k_best=4)
    for step in range(1, 11):
        moe(torch.randn(64, D)).sum().backward()
        assert server.metrics.count("calls_total", method="forward") == 4 * step
        assert server.metrics.count("calls_total", method="backward") == 4 * step
        if server.compute.num_batches < 8 * step:
            return  # those that wait go together; on a busy machine they may come one by one
    raise AssertionError("no two calls went together in ten steps")


def test_training_goes_on_without_a_server(serve):
    discovery = StaticList()
    one, directory = serve(discovery=discovery, expert_uids=uids(2))
    two, _ = serve(discovery=discovery, expert_uids=("expert.2", "expert.3"))
    moe = RemoteMixtureOfExperts(D, (4,), directory, "expert", k_best=3, forward_timeout=3)
    moe.client.settings = Settings(forward_timeout=3, patience=0.0)
    x = torch.randn(8, D)
    moe(x).sum().backward()
    discovery.withdraw = None  # it dies without a word: the records stay
    two.placement.stop = one.placement.stop = _nothing
    two.stop()
    y = moe(x)
    assert torch.isfinite(y).all()
    y.sum().backward()
    assert moe.client.counts["failures"] > 0
    found = moe._search(moe._scores(x))
    assert {r.uid for r in found.records} == {
        "expert.0",
        "expert.1",
    }  # the dead are asked no more for a while
    one.stop()
    with pytest.raises(ExpertGone, match="k_min=1"):
        moe(x)
    moe.allow_zero_outputs = True
    assert torch.equal(moe(x), torch.zeros(8, D))


async def _nothing():
    pass


def test_grid_of_two_dimensions_with_missing_prefixes(serve):
    alive = ("grid.0.1", "grid.0.3", "grid.2.0")
    _, directory = serve(expert_uids=alive, training=FROZEN)
    moe = RemoteMixtureOfExperts(D, (3, 4), directory, "grid.", k_best=3)
    x = torch.randn(6, D)
    found = moe._search(moe._scores(x))
    assert sorted(r.uid for r in found.records) == sorted(alive)
    a, b = moe._scores(x)
    totals = {uid: a[:, int(uid.split(".")[1])] + b[:, int(uid.split(".")[2])] for uid in alive}
    truth = torch.stack([totals[r.uid] for r in found.records], dim=1)
    order = truth.argsort(dim=1, descending=True)
    assert torch.equal(found.topk_idx, order)
    moe(x).sum().backward()
    assert torch.isfinite(moe.proj.weight.grad).all()


def test_beam_search_on_a_cube():
    directory = StaticList({f"cube.{i}.{j}.{k}": "a:1" for i in range(3) for j in range(3) for k in range(3)})
    scores = [torch.randn(5, 3) for _ in range(3)]
    found = loop.run(beam_search(directory, "cube", scores, beam_size=27), 60)
    total = scores[0][:, :, None, None] + scores[1][:, None, :, None] + scores[2][:, None, None, :]
    best = total.flatten(1).argsort(dim=1, descending=True)
    for t in range(5):
        names = [found.records[n].uid for n in found.topk_idx[t].tolist()]
        assert names == [f"cube.{n // 9}.{n // 3 % 3}.{n % 3}" for n in best[t].tolist()]


def test_beam_search_with_nobody_alive():
    found = loop.run(beam_search(StaticList(), "expert", [torch.randn(3, 4)], 2), 60)
    assert found.records == []
    assert (found.topk_idx == -1).all()


def test_switch_learns_balance_and_leaves_its_input(serve):
    _, directory = serve(expert_uids=uids(3), training=FROZEN)
    torch.manual_seed(0)
    moe = RemoteSwitchMixtureOfExperts(D, (3,), directory, "expert")
    x = torch.randn(32, D)
    before = x.clone()
    y, loss = moe(x)
    assert torch.equal(x, before)
    assert loss.item() > 1 - 1e-6
    (gradient,) = torch.autograd.grad(loss, moe.proj.weight, retain_graph=True)
    assert gradient.norm() > 0
    (gradient,) = torch.autograd.grad(y.sum(), moe.proj.weight)
    assert gradient.norm() > 0


def test_switch_weighs_by_the_expert_that_is_chosen(serve):
    """It weighed by the best place, also where no expert lives there."""
    _, directory = serve(expert_uids=("grid.0.1", "grid.1.2"), training=FROZEN, expert_cls="nop")
    moe = RemoteSwitchMixtureOfExperts(D, (3, 3), directory, "grid", jitter_eps=0)
    bias = torch.tensor([0.5, 1.0, 3.0, 2.0, 0.0, 1.0])  # the best place of both dimensions is empty
    with torch.no_grad():
        moe.proj.weight.zero_()
        moe.proj.bias.copy_(bias)
    x = torch.randn(4, D)
    y, _ = moe(x)
    weight = bias[:3].softmax(0)[1] * bias[3:].softmax(0)[2]
    torch.testing.assert_close(y, x * weight)
    (gradient,) = torch.autograd.grad((y * x).sum(), moe.proj.bias)
    assert gradient[1] > 0 and gradient[5] > 0, "the gate learns from the expert that computed"


def test_switch_counts_the_utilization_of_its_grid(serve):
    _, directory = serve(expert_uids=("grid.0.0", "grid.1.2"), training=FROZEN)
    moe = RemoteSwitchMixtureOfExperts(
        D, (2, 3), directory, "grid", jitter_eps=0, utilization_alpha=0.25, allow_zero_outputs=True
    )
    assert [u.tolist() for u in moe.grid_utilization] == [[0.5, 0.5], pytest.approx([1 / 3] * 3)]
    x = torch.randn(8, D)
    with torch.no_grad():
        moe.proj.bias.copy_(torch.tensor([0.0, 100.0, 0.0, 0.0, 100.0]))
    moe(x)
    assert moe.grid_utilization[0].tolist() == pytest.approx([0.375, 0.625])
    assert moe.grid_utilization[1].tolist() == pytest.approx([0.25, 0.25, 0.5])
    moe.eval()(x)
    assert moe.grid_utilization[0].tolist() == pytest.approx([0.375, 0.625])
    assert "_utilization_1" in moe.state_dict()
    with pytest.raises(ValueError, match="utilization_alpha must be above 0"):
        RemoteSwitchMixtureOfExperts(D, (2, 3), directory, "grid", utilization_alpha=0)


def test_layer_of_remote_and_local_experts(ends, serve):
    server, _ = serve(training=FROZEN)
    client = ends(Client(settings=Settings(forward_timeout=3, patience=0.0)))
    torch.manual_seed(0)
    local = [torch.nn.Linear(D, D), torch.nn.Linear(D, D)]
    remote = [RemoteExpert(uid, server.endpoint, client) for uid in ("expert.0", "expert.1")]
    layer = FMoE(num_expert=4, d_model=D, top_k=2, gate=NaiveGate, renormalize=True)
    layer.experts = RemoteExperts([local[0], remote[0], local[1], remote[1]])
    layer.gate = LiveGate(layer.gate, layer.experts)
    x = torch.randn(10, D, requires_grad=True)
    y = layer(x)
    y.sum().backward()

    idx, weights = layer.gate(x)
    twins = [local[0], make_expert("ffn", D, uid="expert.0"), local[1], make_expert("ffn", D, uid="expert.1")]
    every = torch.stack([expert(x) for expert in twins], dim=1)
    truth = (weights[..., None] * every.gather(1, idx[..., None].expand(-1, -1, D))).sum(1)
    torch.testing.assert_close(y, truth.to(y.dtype))
    assert x.grad.norm() > 0

    server.stop()
    layer(x)  # finds out
    assert layer.experts.is_gone().tolist() == [False, True, False, True]
    assert set(layer.experts.last_failed) == {"expert.0", "expert.1"}
    chosen, _ = layer.gate(x)
    assert set(chosen.flatten().tolist()) <= {-1, 0, 2}
    layer(x).sum().backward()  # the local ones go on


def test_layer_calls_each_expert_with_its_own_client(ends, serve):
    """The first one's client called all: servers that ask for another token refused, and gave rows of zeros."""
    experts, timeouts = [], []
    for n, name in enumerate(("alice", "bob")):
        security = Security(tokens={f"of {name}": name})
        server, _ = serve(training=FROZEN, expert_uids=(f"expert.{n}",), security=security)
        settings = Settings(forward_timeout=50.0 + n, backward_timeout=60.0 + n)
        client = ends(Client(settings=settings, credentials=Credentials(token=f"of {name}")))

        def timed(method):
            async def call(*arguments):
                timeouts.append(arguments[-1])
                return await method(*arguments)

            return call

        client.forward, client.backward = timed(client.forward), timed(client.backward)
        experts.append(RemoteExpert(f"expert.{n}", server.endpoint, client))
    x = torch.randn(5, D, requires_grad=True)
    layer = RemoteExperts(experts)
    y = layer(x, torch.tensor([2, 3]))
    y.sum().backward()
    local = [make_expert("ffn", D, uid=f"expert.{n}") for n in range(2)]
    x2 = x.detach().clone().requires_grad_()
    truth = torch.cat([local[0](x2[:2]), local[1](x2[2:])])
    truth.sum().backward()
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(x.grad, x2.grad)
    assert timeouts == [50.0, 51.0, 60.0, 61.0]
    shared = RemoteExperts(experts, experts[0].client)  # calls all, where it is given
    shared(x, torch.tensor([2, 3]))
    assert shared.last_failed.keys() == {"expert.1"} and "another token" in shared.last_failed["expert.1"]


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_compression_changes_little(serve, codec):
    _, directory = serve(Settings(compression=codec), training=FROZEN)
    (expert,) = directory.get_experts(["expert.0"])
    torch.manual_seed(0)
    x = torch.randn(8, D, requires_grad=True)
    y = expert(x)
    y.pow(2).sum().backward()
    x2 = x.detach().clone().requires_grad_()
    truth = make_expert("ffn", D, uid="expert.0")(x2)
    truth.pow(2).sum().backward()
    assert 0 < (y - truth).norm() / truth.norm() < 0.02
    assert 0 < (x.grad - x2.grad).norm() / max(x2.grad.norm(), 1) < 0.3


@pytest.mark.parametrize("name", ["transformer", "nop", "det_dropout"])
def test_other_expert_classes(serve, name):
    _, directory = serve(expert_cls=name, training=Training("sgd", 0.1))
    (expert,) = directory.get_experts(["expert.0"])
    local = make_expert(name, D, uid="expert.0")
    x = torch.randn(3, 5, D) if name == "transformer" else torch.randn(3, D)
    mask = () if name != "det_dropout" else ((torch.rand(3, 2 * D) > 0.2).float(),)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, truth = expert(x1, *mask), local(x2, *mask)
    torch.testing.assert_close(y, truth)
    y.sum().backward()
    truth.sum().backward()
    torch.testing.assert_close(x1.grad, x2.grad)


def test_registered_class(serve):
    @register_expert_class("test_double", lambda hidden_dim: torch.empty(hidden_dim))
    class Double(torch.nn.Module):
        def __init__(self, hidden_dim):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((hidden_dim,), 2.0))

        def forward(self, x):
            return x * self.scale

    server, directory = serve(expert_cls="test_double", training=Training("sgd", 0.5))
    (expert,) = directory.get_experts(["expert.0"])
    x = torch.ones(3, D)
    assert torch.equal(expert(x), 2 * x)
    expert(x).sum().backward()
    assert torch.equal(expert(x), x * 0.5)  # 2 - 0.5 * 3
    with pytest.raises(ValueError, match="registered already"):
        register_expert_class("test_double", lambda hidden_dim: torch.empty(1))(Double)


def test_registered_class_with_sequences_of_any_length(serve):
    """Its schema said sequences of length 1, where the output is not as wide as the input."""

    @register_expert_class("test_wider", lambda hidden_dim: torch.empty(0, hidden_dim))
    class Wider(torch.nn.Linear):
        def __init__(self, hidden_dim):
            super().__init__(hidden_dim, 2 * hidden_dim)

    @register_expert_class("test_summary", lambda hidden_dim: torch.empty(0, hidden_dim))
    class Summary(torch.nn.Module):
        def __init__(self, hidden_dim):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(hidden_dim))

        def forward(self, x):
            return (x * self.scale).sum(1, keepdim=True)

    x = torch.randn(3, 5, D)
    for name, output in (("test_wider", (0, 2 * D)), ("test_summary", (1, D))):
        _, directory = serve(expert_cls=name)
        (expert,) = directory.get_experts(["expert.0"])
        assert expert.schema().output == ("F32", output)
        torch.testing.assert_close(expert(x), make_expert(name, D, uid="expert.0")(x))


def test_experts_with_keywords_and_several_outputs(serve):
    def sample(hidden_dim):
        return torch.empty(hidden_dim), torch.empty(3), torch.empty(2, 2)

    @register_expert_class("test_several", sample, keywords=("scale", "shift"))
    class Several(torch.nn.Module):
        def __init__(self, hidden_dim):
            super().__init__()
            self.linear = torch.nn.Linear(hidden_dim, 4)

        def forward(self, x, *, shift, scale):
            return self.linear(x), scale * 2, (x.sum(1)[:, None, None] + shift)

    server, directory = serve(expert_cls="test_several", training=Training("sgd", 0.5))
    (expert,) = directory.get_experts(["expert.0"])
    local = make_expert("test_several", D, uid="expert.0")
    torch.manual_seed(0)
    given = torch.randn(5, D), torch.randn(5, 3), torch.randn(5, 2, 2)
    ours, theirs = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    outputs = expert(ours[0], shift=ours[2], scale=ours[1])
    truth = local(theirs[0], shift=theirs[2], scale=theirs[1])
    assert [y.shape for y in outputs] == [(5, 4), (5, 3), (5, 2, 2)]
    for y, z in zip(outputs, truth, strict=True):
        torch.testing.assert_close(y, z)
    for some in (outputs, truth):
        (some[0].pow(2).sum() + some[2].sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, torch.zeros_like(a) if b.grad is None else b.grad)
    assert server.host.experts["expert.0"].version == 1
    with pytest.raises(SchemaError, match="takes the keywords scale, shift; missing: shift, unknown: offset"):
        expert(ours[0], scale=ours[1], offset=ours[2])
    plain, _ = serve()
    with pytest.raises(SchemaError, match=r"expert\.0 takes no keywords, but got shift$"):
        RemoteExpert("expert.0", plain.endpoint)(ours[0], shift=ours[2])


def test_several_outputs_without_a_size_are_refused():
    """The rows that are sent could not be split into them."""

    @register_expert_class("test_empty_output", lambda hidden_dim: torch.empty(hidden_dim))
    class Empty(torch.nn.Linear):
        def __init__(self, hidden_dim):
            super().__init__(hidden_dim, 4)

        def forward(self, x):
            return super().forward(x), x[:, :0]

    with pytest.raises(ValueError, match=r"no size of 0, but are \[\[1, 4\], \[1, 0\]\]"):
        find_schema(find_expert_class("test_empty_output"), D)


@pytest.mark.parametrize("row", [(), (7,)], ids=["a number a row", "a sequence a row"])
def test_experts_of_integers(serve, row):
    name = f"test_tokens_{len(row)}"

    @register_expert_class(name, lambda hidden_dim: torch.empty(row, dtype=torch.int64))
    class Tokens(torch.nn.Module):
        def __init__(self, hidden_dim):
            super().__init__()
            self.embedding = torch.nn.Embedding(10, hidden_dim)

        def forward(self, tokens):
            y = self.embedding(tokens)
            return y.mean(1) if y.dim() == 3 else y

    server, directory = serve(expert_cls=name, training=Training("sgd", 1.0))
    expert = directory.get_experts(["expert.0"])[0]
    tokens = torch.randint(0, 10, (4, *row))
    before = expert(tokens)
    assert before.shape == (4, D)
    before.sum().backward()
    assert server.host.experts["expert.0"].version == 1
    assert (expert(tokens) < before).all()


def test_learning_rate_follows_its_schedule_over_a_restart(serve, tmp_path):
    """hivemind's linear schedule: the rate of update n is that of torch's LambdaLR, after a restart too."""
    steps, warmup, total = 9, 3, 8
    schedule = Training("adam", 0.1, scheduler="linear", num_warmup_steps=warmup, num_training_steps=total)
    local = make_expert("ffn", D, uid="expert.0")
    optimizer = torch.optim.Adam(local.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: n / warmup if n < warmup else max(0.0, (total - n) / (total - warmup))
    )
    x = torch.randn(4, D)
    outputs = []
    for half in range(2):
        options = {"training": schedule, "checkpoint_dir": tmp_path, "expert_uids": ("expert.0",)}
        server, directory = serve(**options)
        (expert,) = directory.get_experts(["expert.0"])
        for _ in range(steps // 2 + half):
            y, truth = expert(x), local(x)
            torch.testing.assert_close(y, truth)
            outputs.append(y.detach())
            y.pow(2).sum().backward()
            optimizer.zero_grad()
            truth.pow(2).sum().backward()
            optimizer.step()
            scheduler.step()
        server.stop()
    assert torch.equal(outputs[0], outputs[1])  # the first update has a rate of 0
    assert not torch.equal(outputs[1], outputs[2])
    assert [schedule.lr_at(n) for n in (0, 1, 3, 7, 8, 20)] == pytest.approx([0, 0.1 / 3, 0.1, 0.02, 0, 0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_training_steps": 5}, "need scheduler='linear'"),
        ({"scheduler": "linear"}, "needs num_training_steps"),
        (
            {"scheduler": "linear", "num_training_steps": 5, "num_warmup_steps": 5},
            "between 0 and num_training_steps=5",
        ),
        ({"scheduler": "cosine"}, "scheduler must be one of none, linear"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Training(**options)
