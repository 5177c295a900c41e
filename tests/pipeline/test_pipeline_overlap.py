"""dualpipe_v: one microbatch's exchange runs while another computes, and nothing else changes."""

import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fmoe_ext
from benchmarks.bench_pipeline import measure_overlap
from fmoe_ext.ep.exchange import Transfer, wait
from fmoe_ext.pipeline import Pipeline, init_groups, overlap, split
from fmoe_ext.pipeline.overlap import by_turns
from fmoe_ext.planning.layouts import SCHEDULE_COSTS

D, ROWS, CHUNKS = 8, 6, 5
share_in_pairs = SCHEDULE_COSTS["dualpipe_v"].in_pairs


class Waits:
    """A message that has come."""

    def wait(self):
        pass


def steps(name, log, count):
    """A computation that notes each of its steps, and waits between them."""
    for i in range(count):
        log.append((name, i, threading.current_thread() is threading.main_thread()))
        wait([Transfer(Waits())], "the group")


def test_turns(monkeypatch):
    monkeypatch.setattr("fmoe_ext.ep.exchange.find_group", lambda name: None)
    log = []
    by_turns(
        functools.partial(steps, "b", log, 4), functools.partial(steps, "f", log, 2), torch.device("cpu")
    )
    names = [(name, i) for name, i, _ in log]
    assert names == [("b", 0), ("f", 0), ("b", 1), ("f", 1), ("b", 2), ("b", 3)]
    assert all(in_main == (name == "f") for name, _, in_main in log)


def test_both_have_the_modes_of_the_caller():
    weight, seen = torch.ones(1, 1, requires_grad=True), []

    def cast():
        return (weight @ weight).grad_fn.next_functions[0][0]

    def note():
        seen.append((torch.empty(0).device.type, (weight @ weight).dtype))

    with torch.autocast("cpu", torch.float16), torch.device("meta"):
        node = cast()
        by_turns(note, note, torch.device("cpu"))
        assert cast() is node  # autocast's cache was not emptied
    assert seen == [("meta", torch.float16)] * 2


def test_random_numbers_are_those_of_one_after_the_other(monkeypatch):
    monkeypatch.setattr("fmoe_ext.ep.exchange.find_group", lambda name: None)

    def draw(into):
        for _ in range(3):
            into.append(torch.rand(()).item())
            wait([Transfer(Waits())], "the group")

    def repeated(into):
        """As activation checkpointing computes again what drew random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            draw(into)

    expected, drawn = ([], []), ([], [])
    torch.manual_seed(1)
    repeated(expected[0])
    draw(expected[1])
    after = torch.rand(())
    torch.manual_seed(1)
    by_turns(lambda: repeated(drawn[0]), lambda: draw(drawn[1]), torch.device("cpu"))
    assert drawn == expected and torch.rand(()) == after


def test_overlap_error_ends_both_threads(monkeypatch):
    monkeypatch.setattr("fmoe_ext.ep.exchange.find_group", lambda name: None)
    log = []

    def fails():
        wait([Transfer(Waits())], "the group")
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        by_turns(fails, functools.partial(steps, "b", log, 3), torch.device("cpu"))
    assert len(log) == 3
    with pytest.raises(KeyError, match="first"):
        by_turns(functools.partial(steps, "f", log, 3), fails, torch.device("cpu"))


def test_interrupt_lets_the_other_end(monkeypatch):
    """Ctrl-C while the caller's thread waits for its first turn."""
    monkeypatch.setattr("fmoe_ext.ep.exchange.find_group", lambda name: None)
    log, plain = [], overlap._Turns._await

    def interrupted(turns, me):
        if me == 1:
            raise KeyboardInterrupt
        plain(turns, me)

    monkeypatch.setattr(overlap._Turns, "_await", interrupted)
    with pytest.raises(KeyboardInterrupt):
        by_turns(functools.partial(steps, "b", log, 3), lambda: None, torch.device("cpu"))
    assert len(log) == 3


def test_interrupt_while_the_other_hands_over(monkeypatch):
    """The caller's thread ends after the other has seen that it has not, and before it is given a turn."""
    monkeypatch.setattr("fmoe_ext.ep.exchange.find_group", lambda name: None)
    log, handing_over, ended = [], threading.Event(), threading.Event()
    plain = overlap._Turns._await, overlap._random_state, threading.Thread.join

    def interrupted(turns, me):
        if me == 1:
            assert handing_over.wait(60)
            raise KeyboardInterrupt
        plain[0](turns, me)

    def state(device):
        if threading.current_thread() is not threading.main_thread():
            handing_over.set()
            assert ended.wait(60)
        return plain[1](device)

    def join(thread, timeout=None):
        ended.set()
        plain[2](thread, 60)
        assert not thread.is_alive(), "it waits for a thread that has ended"

    monkeypatch.setattr(overlap._Turns, "_await", interrupted)
    monkeypatch.setattr(overlap, "_random_state", state)
    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        by_turns(functools.partial(steps, "b", log, 3), lambda: None, torch.device("cpu"))
    assert len(log) == 3


def test_interrupt_while_the_other_starts(monkeypatch):
    """Ctrl-C in Thread.start(), which waits for the new thread: it computes to its end all the same."""
    monkeypatch.setattr("fmoe_ext.ep.exchange.find_group", lambda name: None)
    log, plain = [], threading.Thread.start

    def interrupted(thread):
        plain(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        by_turns(functools.partial(steps, "b", log, 3), lambda: None, torch.device("cpu"))
    assert len(log) == 3


class Block(nn.Module):
    """Attention's place, dropout included, and experts of all ranks."""

    def __init__(self, groups):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.dropout = nn.Dropout(0.2)
        self.moe = fmoe_ext.FMoETransformerMLP(
            2, D, 12, world_size=2, moe_group=groups.ep, overlap_degree=2, gate="softmax"
        )
        self.moe.mark_parallel_comm("moe")

    def forward(self, x):
        with torch.autocast(
            "cpu", enabled=False
        ):  # autograd's products have the dtype of who calls the backward
            attended = self.linear(x)
        return x + self.moe(self.dropout(attended))


def train(pp, checkpoint, autocast):
    """[(loss, gradients, turns taken)] of two steps without and with overlap."""
    dtype = torch.float32 if autocast else torch.float64  # autocast leaves float64 as it is
    groups = init_groups(pp, 2)
    turns = []
    plain = overlap.by_turns
    overlap.by_turns = lambda *args: (turns.append(1), plain(*args))
    results = []
    try:
        for overlapped in (False, True):
            torch.manual_seed(dist.get_rank(groups.ep))
            model = nn.Sequential(*(Block(groups) for _ in range(4))).to(dtype)
            x = torch.randn(ROWS * 4, D, dtype=dtype)
            pipeline = Pipeline(
                split(model, 2 * pp, x[:ROWS], by=[2, 2] if pp == 1 else [1, 1, 1, 1]),
                lambda output, target: (output - target).pow(2).sum(),
                schedule="dualpipe_v",
                chunks=CHUNKS,
                groups=groups,
                balance_weight=0.1,
                checkpoint=checkpoint,
                count=len,
                overlap=overlapped,
            )
            torch.manual_seed(3)
            with torch.autocast("cpu", torch.bfloat16, autocast):
                loss = pipeline.train_step(x, x.flip(0)).item()
            results.append((loss, [p.grad for p in pipeline.parameters()], len(turns)))
    finally:
        overlap.by_turns = plain
    return results


@pytest.mark.parametrize(
    ("pp", "checkpoint", "autocast"),
    [(1, False, False), (1, True, False), (2, True, False), (1, False, True), (1, True, True)],
)
def test_same_bits_as_without(pool, pp, checkpoint, autocast):
    results = pool.run(train, pp, checkpoint, autocast, world_size=2 * pp)
    for (loss, grads, none), (overlapped, others, some) in results:
        assert none == 0 and some == 2 * CHUNKS * share_in_pairs(pp, CHUNKS)
        assert loss == overlapped
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))


def test_hides_all_that_the_schedule_pairs(pool):
    """On a clock that computations and messages alone advance, messages half as long as computations."""
    seconds = pool.run(measure_overlap, 4, True, 0.5, world_size=1)[0]
    alone, plain, overlapped = seconds.values()
    assert (plain - overlapped) / (plain - alone) == share_in_pairs(1, 4) == 5 / 8
