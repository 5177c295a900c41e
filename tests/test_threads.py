"""Threads that use one layer at the same time get what each of them gets alone, to the bit."""

import contextlib
import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import fmoe_ext
from fmoe_ext import FMoETransformerMLP, RoutingReplay, batch_invariant, ops, tokens, use_batch_invariant
from fmoe_ext.adapters import Lora, given
from fmoe_ext.gates import WholeBatch, all_forwards_first, total_loss
from fmoe_ext.tokens import batch_is, current_batch, valid_tokens, with_valid
from tests.forked import run_python

D, E = 16, 8


def make_layer(gate="softmax", **options):
    torch.manual_seed(0)
    return FMoETransformerMLP(E, D, 24, "swiglu", gate=gate, bias=False, **options)


def batch_of(number, size):
    return torch.randn(size, D, generator=torch.Generator().manual_seed(number))


def gradients(layer, forward, x):
    x = x.clone().requires_grad_()
    out = forward(x)
    loss = out.square().mean() + 0.1 * total_loss(layer)
    wanted = [x, layer.gate.gate.weight, layer.experts.htoh4.weight]
    return [out.detach(), *torch.autograd.grad(loss, wanted)]


def training(layer, x):
    return gradients(layer, layer, x)


def checkpointed(layer, x):
    return gradients(layer, lambda x: checkpoint(layer, x, use_reentrant=False), x)


def reentrant(layer, x):
    """backward() instead of grad(), which a reentrant checkpoint refuses."""
    leaf = x.clone().requires_grad_()
    found = []

    def forward(x):
        out = layer(x)
        if torch.is_grad_enabled():
            loss = total_loss(layer)
            found[:] = torch.autograd.grad(loss, [layer.gate.gate.weight], retain_graph=True)
        return out

    out = checkpoint(forward, leaf, use_reentrant=True)
    out.square().mean().backward()
    return [out.detach(), leaf.grad, *found]


def evaluating(layer, x):
    with torch.no_grad():
        return [layer(x), total_loss(layer)]


def padded(layer, x):
    with valid_tokens(torch.arange(len(x)) % 3 > 0), torch.no_grad():
        return [layer(x)]


def recording(layer, x):
    replay = RoutingReplay(layer)
    with replay.record(), torch.no_grad():
        out = layer(x)
    (choices,) = replay.choices["gate"]
    return [out, choices.selected]


def playing(layer, x):
    replay = RoutingReplay(layer)
    order = torch.arange(len(x))[:, None] + torch.arange(2)
    replay.choices = {"gate": [fmoe_ext.balance.replay.Choices(order % E, order % E)]}
    with replay.play():
        return training(layer, x)


def invariant(layer, x):
    with batch_invariant():
        loss = layer(leaf := x.clone().requires_grad_())
    return [loss.detach(), torch.autograd.grad(loss, leaf, torch.ones_like(loss))[0]]


def whole_batch(layer, x):
    whole, found = WholeBatch(layer), []
    parts = x.chunk(2)
    with whole.first_pass():
        for part in parts:
            layer(part)
    with whole.second_pass():
        for part in parts:
            found += training(layer, part)
    return found


def adapted(layer, x):
    """A weight with an adapter that belongs to this call, as lora.fuse() hands it over."""
    generator = torch.Generator().manual_seed(len(x))
    a, b = torch.randn(E, 2, D, generator=generator), torch.randn(E, 48, 2, generator=generator)
    counts = torch.bincount(torch.arange(len(x)) % E, minlength=E)
    with given(layer.experts.htoh4, "weight", Lora(a, b.requires_grad_())):
        out = layer.experts.htoh4(x, counts)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [b])]


ROLES = (
    adapted, training, checkpointed, reentrant, evaluating, padded, recording, playing, invariant, whole_batch
)  # fmt: skip
MIXES = [(role,) for role in ROLES] + [
    (checkpointed, evaluating),
    (adapted, training),
    (training, playing),
    (checkpointed, reentrant, recording),
    (invariant, training),
    (whole_batch, training, evaluating),
    ROLES,
]


@pytest.mark.parametrize("num_threads", [2, 6])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "+".join(role.__name__ for role in mix))
def test_as_alone(mix, num_threads):
    layer = make_layer()
    work = [(mix[i % len(mix)], batch_of(i, 5 + (i * 7) % 40)) for i in range(max(num_threads, len(mix)) * 2)]
    check_as_alone(layer, work, num_threads, 3)


class Adapted(torch.nn.Module):
    """A layer between a wrapper as lora.fuse() makes it and something that breaks the graph, compiled."""

    def __init__(self, inner, breaks):
        super().__init__()
        self.inner, self.breaks = inner, breaks

    def forward(self, x, counts, a, b):
        with given(self.inner, "weight", Lora(a, b)):
            if self.breaks:
                torch._dynamo.graph_break()
            return self.inner(x, counts)


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "broken graph"])
def test_compiled_threads_have_their_own_adapters(breaks):
    """A frame that is compiled by itself took adapters of other threads; also while one of them compiles."""
    model = Adapted(make_layer().experts.htoh4, breaks)
    compiled = torch.compile(model, backend="eager", fullgraph=not breaks)
    counts = torch.full((E,), 2)

    def inputs(number):
        generator = torch.Generator().manual_seed(number)
        sizes = ((2 * E, D), (E, 2, D), (E, 48, 2))
        x, a, b = (torch.randn(*size, generator=generator) for size in sizes)
        return x, counts, a, b

    expected = [model(*inputs(number)) for number in range(4)]
    begin = threading.Barrier(4)

    def run(number):
        begin.wait()
        return all(torch.equal(compiled(*inputs(number)), expected[number]) for _ in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4))) == [True] * 4
    assert not model.inner.__dict__.keys() & {"_fmoe_ext_adapters"}  # nothing waits


@contextlib.contextmanager
def compilation_elsewhere():
    """Hold another thread inside torch.compile, which sets a flag of the process."""
    torch.compiler.reset()  # nothing is compiled after some compilations of one function
    begun, may_end = threading.Event(), threading.Event()

    def backend(graph, _):
        begun.set()
        may_end.wait()
        return graph

    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(torch.compile(lambda x: x.sin(), backend=backend), torch.ones(1, device="cpu"))
        try:
            assert begun.wait(300)
            yield
        finally:
            may_end.set()
        compiled.result()


@pytest.mark.parametrize("part", ["forward", "backward", "step"])
@pytest.mark.parametrize(
    "gate, has_group",
    [
        ("gshard", True),
        ("quantile", True),
        ("sigmoid", False),
        ("sinkhorn", True),
        ("softmax", False),
        ("switch", True),
    ],
)
def test_step_while_another_thread_compiles(part, gate, has_group):
    """An eager step took the branches for graphs: it counted repetitions, and drew other losses and routes."""
    if has_group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def train(during):
        layer = make_layer(gate, moe_group=dist.group.WORLD if has_group else None)
        monitor = fmoe_ext.balance.watch(layer)
        torch.manual_seed(1)  # GShard drops second choices at random
        x = batch_of(0, 40).requires_grad_()
        with contextlib.ExitStack() as stack:
            if during in ("forward", "step"):
                stack.enter_context(compilation_elsewhere())
            out = checkpoint(layer, x, use_reentrant=False)
            loss = out.square().mean() + total_loss(layer)
            if during == "forward":
                stack.close()
            if during == "backward":
                stack.enter_context(compilation_elsewhere())
            loss.backward()
        counts = monitor.collect()["layers"]["gate"]["tokens_per_expert"]
        gradients = (p.grad for p in layer.parameters() if p.grad is not None)
        return out, loss, x.grad, torch.tensor(counts, device="cpu"), *layer.buffers(), *gradients

    try:
        expected = train(None)
        for ours, theirs in zip(train(part), expected, strict=True):
            assert torch.equal(ours, theirs)
    finally:
        if has_group:
            dist.destroy_process_group()


def check_as_alone(shared, work, num_threads, num_rounds):
    """Each thread does its share of the work, [(role, input)], all at the same time, on what they share."""
    alone = [role(shared, x) for role, x in work]
    begin = threading.Barrier(num_threads)
    share = [list(range(i, len(work), num_threads)) for i in range(num_threads)]

    def run(numbers):
        begin.wait()
        return {n: work[n][0](shared, work[n][1]) for _ in range(num_rounds) for n in numbers}

    with ThreadPoolExecutor(num_threads) as pool:
        found = {n: values for part in pool.map(run, share) for n, values in part.items()}
    for n, expected in enumerate(alone):
        for ours, theirs in zip(found[n], expected, strict=True):
            assert torch.equal(ours, theirs), f"{work[n][0].__name__} of batch {n} differs among threads"


class Models:
    """Small models of Transformers in one folder: streamed with adapters on all experts, in memory, imported."""

    def __init__(self, folder):
        from tests.finetune import streamed_models as made

        made.save(folder / "moe", dtype=torch.float32, num_hidden_layers=3)
        self.layer = make_layer()
        self.resident = made.with_adapters(made.resident(folder / "moe"))
        room = 4 * made.bytes_of_adapters(self.resident)  # with their gradients and two moments
        # two buffers for three layers; and four parts of one layer, with inputs of layers on disk
        self.streamed = made.with_adapters(made.streamed(folder / "moe", 2, room))
        self.in_parts = made.with_adapters(made.streamed(folder / "moe", 1, room, activations=folder))
        made.checkpoint_layers(self.in_parts)
        self.in_parts.train()
        self.checkpointed = made.with_adapters(made.streamed(folder / "moe", 2, room))
        made.checkpoint_layers(self.checkpointed)
        self.checkpointed.train()
        self.roomy = made.with_adapters(made.streamed(folder / "moe", 3, room))
        self.imported = fmoe_ext.import_model(folder / "moe").eval()
        sizes = {"vocab_size": 64, "hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 2}
        config = made.transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
        dense = made.transformers.LlamaForCausalLM(config)
        self.fmoefied = fmoe_ext.fmoefy(dense, num_experts=4, top_k=2, gate="softmax").eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    pytest.importorskip("transformers", reason="pip install transformers")
    pytest.importorskip("peft", reason="pip install peft")
    return Models(tmp_path_factory.mktemp("threads"))


def ids_of(x):
    """[1, T] ids, as many as a batch has tokens."""
    return torch.randint(3, 60, (1, len(x)), generator=torch.Generator().manual_seed(len(x)))


def logits_of(name):
    def role(models, x):
        with torch.no_grad():
            return [getattr(models, name)(input_ids=ids_of(x)).logits]

    role.__name__ = f"forward_of_{name}"
    return role


def generated_by(name):
    def role(models, x):
        out = getattr(models, name).generate(input_ids=ids_of(x)[:, :2], max_new_tokens=3, do_sample=False)
        return [out]

    role.__name__ = f"generation_of_{name}"
    return role


def adapters_of(name):
    """Gradients of adapters, by autograd.grad, for the weights are those of all threads."""

    def role(models, x):
        model, ids = getattr(models, name), ids_of(x)
        loss = model(input_ids=ids, labels=ids).loss
        trained = [p for p in model.parameters() if p.requires_grad]
        return [loss.detach(), *torch.autograd.grad(loss, trained)]

    role.__name__ = f"training_of_{name}"
    return role


def layer_too(models, x):
    return checkpointed(models.layer, x)


STREAMED = (logits_of("streamed"), generated_by("streamed"), adapters_of("streamed"))
IN_PARTS = (logits_of("in_parts"), adapters_of("in_parts"))
RESIDENT = (logits_of("resident"), generated_by("resident"), adapters_of("resident"))
OURS = (generated_by("imported"), generated_by("fmoefied"))
MODEL_MIXES = [
    STREAMED[:1],
    STREAMED,
    IN_PARTS,
    (adapters_of("checkpointed"), logits_of("checkpointed")),
    RESIDENT,
    OURS,
    (*STREAMED, *IN_PARTS, *RESIDENT, *OURS, layer_too),
]


@pytest.mark.parametrize("num_threads", [2, 6])
@pytest.mark.parametrize("mix", MODEL_MIXES, ids=lambda mix: "+".join(role.__name__ for role in mix))
def test_models_as_alone(models, mix, num_threads):
    count = max(num_threads, len(mix))
    check_as_alone(models, [(mix[i % len(mix)], batch_of(i, 9 + i)) for i in range(count)], num_threads, 2)


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


class Repeating(torch.nn.Module):
    """A layer whose gate lets another thread run while a checkpoint repeats it."""

    def __init__(self, meanwhile):
        super().__init__()
        self.layer, self.meanwhile, self.num_calls = make_layer(), meanwhile, 0
        self.layer.gate.gate.register_forward_pre_hook(self.before)

    def before(self, *_):
        if fmoe_ext.recompute.is_repeated():
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                self.found = in_thread(lambda: meanwhile(self.layer))

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("size", [10, 7])
def test_another_thread_during_a_repetition_chooses_by_itself(size):
    """Without a race: the other thread runs in the middle of the repetition."""
    other = batch_of(1, size)
    model = Repeating(lambda layer: layer(other).detach())
    expected = make_layer()(other).detach()
    model(batch_of(0, 10)).sum().backward()
    assert torch.equal(model.found, expected)


def test_loss_is_of_the_thread():
    layer = make_layer()
    x, y = batch_of(0, 10), batch_of(1, 12)
    layer(x)
    mine = total_loss(layer)
    theirs = in_thread(lambda: (layer(y), total_loss(layer))[1])
    assert torch.equal(total_loss(layer), mine) and not torch.equal(mine, theirs)
    assert torch.equal(in_thread(lambda: total_loss(layer)), theirs), (
        "a thread without a forward: of the last one"
    )


def test_counts_of_threads_add_up():
    layer = make_layer("sigmoid")
    monitor = fmoe_ext.balance.watch(layer)
    batches = [batch_of(i, 16) for i in range(6)]

    def run(x):
        for _ in range(40):
            layer(x)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run, batches))
    num = 6 * 40 * 16 * 2
    assert layer.gate.pending_load.sum() == num
    assert sum(monitor.collect()["layers"]["gate"]["tokens_per_expert"]) == num


def test_blocks_of_tokens_end_in_any_order():
    first, second = (
        with_valid(current_batch(), torch.tensor([1, 0])),
        with_valid(current_batch(), torch.ones(3)),
    )
    a, b = batch_is(first), batch_is(second)
    a.__enter__()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(b.__enter__).result()
        a.__exit__(None, None, None)
        assert tokens._open.batch is second
        pool.submit(b.__exit__, None, None, None).result()
    assert tokens._open.batch is tokens._nothing[0] and not tokens.is_inside_a_block()


def test_mode_is_of_the_thread():
    with batch_invariant():
        assert ops.is_batch_invariant() and not in_thread(ops.is_batch_invariant)
        with ThreadPoolExecutor(1) as pool:
            block = batch_invariant()
            pool.submit(block.__enter__).result()
            pool.submit(block.__exit__, None, None, None).result()
        assert ops.is_batch_invariant()
    assert not ops.is_batch_invariant()
    use_batch_invariant(True)
    assert in_thread(ops.is_batch_invariant)
    use_batch_invariant(False)


def test_blocks_of_the_mode_end_in_any_order():
    first, second = batch_invariant(), batch_invariant()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert ops.is_batch_invariant()
    second.__exit__(None, None, None)
    assert not ops.is_batch_invariant()


def test_mode_ends_on_its_own_thread():
    code = """
from threading import Thread
from fmoe_ext import batch_invariant
block = batch_invariant()
thread = Thread(target=block.__enter__)
thread.start()
thread.join()
block.__exit__(None, None, None)
"""
    assert "began on another thread: end the block on the thread that began it" in run_python(code).stderr


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_backward_has_the_mode_of_its_forward(is_checkpointed):
    """Also after the block: gradients of a few rows are those that they have among many."""
    torch.manual_seed(0)
    layer = FMoETransformerMLP(4, 512, 1024, "swiglu", gate="softmax")
    x, grad = torch.randn(2, 140, 512)  # sums of which the parts depend on the rows

    def gradient(rows):
        leaf = x[rows].clone().requires_grad_()
        with batch_invariant():
            out = checkpoint(layer, leaf, use_reentrant=False) if is_checkpointed else layer(leaf)
        return torch.autograd.grad(out, leaf, grad[rows])[0]

    whole = gradient(slice(None))
    for size in (1, 5):
        assert torch.equal(gradient(slice(100, 100 + size)), whole[100 : 100 + size])


def test_mode_reaches_the_threads_of_a_kernel():
    layer, x = make_layer(), batch_of(0, 257)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with batch_invariant(), torch.no_grad():
            whole = layer(x)
            assert torch.equal(layer(x[:3]), whole[:3])
    finally:
        torch.set_num_threads(before)


def test_gate_copied_after_a_forward_has_no_loss():
    layer = make_layer()
    layer(batch_of(0, 10))
    copied = copy.deepcopy(layer)
    assert layer.gate.has_loss and not copied.gate.has_loss


def test_total_loss_warns_of_a_layer_that_a_step_calls_twice():
    layer, x = make_layer(), batch_of(0, 10)
    for _ in range(3):  # not of one call a step, nor of evaluation or repetition in between
        loss = checkpoint(layer, x.clone().requires_grad_(), use_reentrant=False).sum() + total_loss(layer)
        loss.backward()
        with torch.no_grad():
            layer(x), layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
        total_loss(layer)
        with all_forwards_first(layer):
            layer(x), layer(x)
            total_loss(layer)
    layer(layer(x))
    with pytest.warns(UserWarning, match="the gate 'gate' .SoftmaxGate. was called 2 times in training"):
        total_loss(layer)


class Meeting(int):
    """A count whose addition waits for that of another thread, so that one of two is lost unless they take turns."""

    met = threading.Barrier(2)

    def __add__(self, other):
        with contextlib.suppress(threading.BrokenBarrierError):
            self.met.wait(0.2)
        return Meeting(int(self) + other)


def test_counts_of_reads_add_up(models):
    """A thread that reads chosen experts and the one that reads ahead hold different locks."""
    stream = models.roomy.base_model.model.expert_stream
    pool = stream.pool
    Meeting.met.reset()
    stream.reset_statistics()
    stream.statistics.bytes_read = Meeting(0)
    reads = [threading.Thread(target=pool.count, kwargs={"bytes_read": n, "experts_read": 1}) for n in (3, 4)]
    for read in reads:
        read.start()
    for read in reads:
        read.join()
    assert (stream.statistics.bytes_read, stream.statistics.experts_read) == (7, 2)
    stream.reset_statistics()


@pytest.mark.parametrize("change", ["forget", "resize"])
def test_buffers_that_a_thread_computes_with_stay(models, change):
    """A forward without gradients takes no lease where all layers have a buffer."""
    pool = models.roomy.base_model.model.expert_stream.pool
    assert pool.holds_all
    with torch.no_grad(), pool.used():
        weights = [pool.whole(0, is_backward=False, is_training=False) for _ in range(2)][1]
        before = [w.clone() for w in weights]
        arguments = (pool.num_bytes // 2,) if change == "resize" else ()
        in_thread(lambda: getattr(pool, change)(*arguments))
        assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True)) and pool.holds_all
    num_buffers = pool.bytes_in_use
    in_thread(lambda: getattr(pool, change)(*arguments))
    assert pool.bytes_in_use < num_buffers
