import copy
import json
import math
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from fmoe_ext import balance
from fmoe_ext.gates import BaseGate, ExpertChoiceGate, SoftmaxGate, SwitchGate


class FixedGate(BaseGate):
    """A user's own gate, with given choices."""

    def __init__(self, num_experts, topk_idx, topk_weights=None):
        super().__init__(num_experts, 1)
        self.topk_idx = topk_idx if isinstance(topk_idx, torch.Tensor) else torch.tensor(topk_idx)
        weights = torch.full(self.topk_idx.shape, 0.5) if topk_weights is None else topk_weights
        self.topk_weights = weights if isinstance(weights, torch.Tensor) else torch.tensor(weights)

    def forward(self, inp):
        return self.topk_idx, self.topk_weights


def watch(*args, **kwargs):
    return balance.watch(nn.ModuleList([FixedGate(*args)]), **kwargs)


def run(monitored, times=1):
    for _ in range(times):
        monitored[0](None)


def test_summary_of_a_load():
    numbers = balance.summarize(torch.tensor([6, 2, 0, 0]), num_dropped=2)
    assert numbers["tokens_per_expert"] == [6, 2, 0, 0]
    assert numbers["max_over_mean"] == pytest.approx(6 / 2)
    assert numbers["cv"] == pytest.approx(math.sqrt((16 + 0 + 4 + 4) / 4) / 2)
    assert numbers["entropy"] == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert numbers["dropped_share"] == pytest.approx(0.2)
    assert numbers["dead_experts"] == 2
    even = balance.summarize(torch.tensor([5, 5, 5]))
    assert (even["max_over_mean"], even["cv"], even["dead_experts"]) == (1, 0, 0)
    assert even["entropy"] == pytest.approx(1)
    nothing = balance.summarize(torch.zeros(3))
    assert all(nothing[number] == 0 for number in balance.SUMMARY_NUMBERS if number != "dead_experts")
    assert balance.summarize(torch.tensor([4]))["entropy"] == 0


def test_counts_of_a_custom_gate():
    model = nn.ModuleList([FixedGate(4, [[0, 1], [0, -1], [2, 0]], [[0.5, 0.5], [1.0, 0.0], [0.2, 0.6]])])
    monitor = balance.watch(model)
    run(model, times=2)
    record = monitor.collect(step=7)
    layer = record["layers"]["0"]
    assert record["step"] == 7
    assert layer["tokens_per_expert"] == [6, 2, 2, 0]
    assert layer["dropped_share"] == pytest.approx(2 / 12)
    third = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    assert layer["gate_entropy"] == pytest.approx((1 + 0 + third) / 3, rel=1e-6)
    assert monitor.collect()["layers"]["0"]["tokens_per_expert"] == [0, 0, 0, 0], (
        "collect starts a new window"
    )
    run(model)
    assert monitor.collect(reset=False)["layers"]["0"]["tokens_per_expert"] == [3, 1, 1, 0]
    assert monitor.collect()["layers"]["0"]["tokens_per_expert"] == [3, 1, 1, 0]


def test_counts_of_a_rank_without_tokens():
    model = nn.ModuleList([FixedGate(4, torch.empty(0, 2, dtype=torch.int64))])
    monitor = balance.watch(model)
    run(model)
    layer = monitor.collect()["layers"]["0"]
    assert layer["tokens_per_expert"] == [0, 0, 0, 0] and layer["dropped_share"] == 0


def test_counts_only_training_until_removed():
    model = nn.ModuleList([FixedGate(2, [[0], [1]])])
    monitor = balance.watch(model)
    model.eval()
    run(model)
    model.train()
    run(model)
    monitor.remove()
    run(model)
    assert monitor.collect()["layers"]["0"]["tokens_per_expert"] == [1, 1]


def test_drops_of_a_gate_with_capacity():
    gate = SwitchGate(8, 4, 1, capacity=(0.5, 0.5), switch_eps=0)
    with torch.no_grad():
        gate.gate.weight.zero_()
        gate.gate.bias.copy_(torch.tensor([1.0, 0, 0, 0]))  # every token wants expert 0
    monitor = balance.watch(gate)
    gate(torch.randn(16, 8))
    layer = monitor.collect()["layers"][""]
    assert layer["tokens_per_expert"] == [2, 0, 0, 0]
    assert layer["dropped_share"] == pytest.approx(14 / 16)
    assert layer["dead_experts"] == 3


def test_columns_that_expert_choice_leaves_empty_are_no_drops():
    torch.manual_seed(0)
    gate = ExpertChoiceGate(8, 4, 1, top_k=2)
    monitor = balance.watch(gate)
    gate(torch.randn(16, 8))
    layer = monitor.collect()["layers"][""]
    assert layer["tokens_per_expert"] == [8] * 4
    assert layer["dropped_share"] == 0
    gate.max_experts = 1
    topk_idx, _ = gate(torch.randn(16, 8))
    num_kept = int((topk_idx >= 0).sum())
    assert monitor.collect()["layers"][""]["dropped_share"] == pytest.approx(1 - num_kept / 16)


def test_warns_about_an_expert_without_tokens():
    model = nn.ModuleList([FixedGate(3, [[0, 2]])])
    monitor = balance.watch(model, warn_after=3)
    run(model, times=2)
    monitor.collect()
    run(model)
    with pytest.warns(UserWarning, match=r"gate '0': no token for the experts \[1\] in the last 3 forwards"):
        monitor.collect()
    model[0].topk_idx = torch.tensor([[1, 1]])
    run(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.collect()
    assert monitor.counters["0"].idle_steps.tolist() == [1, 0, 1]


def test_sum_over_ranks():
    first, second = (nn.ModuleList([FixedGate(2, idx)]) for idx in ([[0], [0]], [[1], [-1]]))
    monitors = [balance.watch(model, warn_after=1) for model in (first, second)]
    run(first)
    run(second)
    other = monitors[1].counters["0"]
    values = iter(
        [
            other.tokens_per_expert,
            other.num_dropped,
            other.gate_entropy_sum,
            other.num_tokens,
            (other.idle_steps < 1).long(),
        ]
    )
    layer = monitors[0].collect(sum_over_ranks=lambda x: x + next(values))["layers"]["0"]
    assert layer["tokens_per_expert"] == [2, 1]
    assert layer["dropped_share"] == pytest.approx(1 / 4)


def test_sum_over_ranks_that_writes_into_its_argument_changes_no_counter():
    model = nn.ModuleList([FixedGate(2, [[0], [1]])])
    monitor = balance.watch(model)
    run(model)
    for _ in range(2):
        record = monitor.collect(sum_over_ranks=lambda x: x.mul_(2), reset=False)
        assert record["layers"]["0"]["tokens_per_expert"] == [2, 2]


def test_state_of_a_gate_with_other_experts_is_refused_before_a_counter_changes():
    model = nn.ModuleList([FixedGate(2, [[0], [1]]), FixedGate(4, [[0], [1]])])
    monitor = balance.watch(model)
    run(model)
    for num in (1, 8):
        other = balance.watch(nn.ModuleList([FixedGate(2, [[0]]), FixedGate(num, [[0]])]))
        with pytest.raises(ValueError, match=f"gate '1' has 4 experts, but the state is of {num}"):
            monitor.load_state_dict(other.state_dict())
    assert monitor.counters["0"].tokens_per_expert.tolist() == [1, 1]


def test_state_dict_continues_the_window():
    model = nn.ModuleList([FixedGate(2, [[0], [1]])])
    monitor = balance.watch(model)
    run(model)
    monitor.collect(step=1)
    run(model, times=2)
    state = copy.deepcopy(monitor.state_dict())
    monitor.remove()
    resumed = balance.watch(model)
    resumed.load_state_dict(state)
    run(model)
    assert resumed.collect(step=2)["layers"]["0"]["tokens_per_expert"] == [3, 3]
    assert [record["step"] for record in resumed.history] == [1, 2]
    with pytest.raises(ValueError, match="state is of the gates"):
        balance.watch(FixedGate(2, [[0]])).load_state_dict(state)


def test_forwards_are_summed_as_one_by_one():
    noted, single = (balance.LayerCounters(5, "cpu") for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    idle = [0] * 5
    for number in range(75):
        num_tokens, top_k = 1 + number % 3 * 700, 1 + number // 20
        topk_idx = torch.randint(-1, 4 if number % 9 else 5, (num_tokens, top_k), generator=generator)
        weights = torch.rand(num_tokens, top_k, generator=generator)
        for counters in (noted, single):
            counters.count(topk_idx, weights, top_k=2)
        single.sum_up()
        chosen = set(topk_idx.flatten().tolist())
        idle = [0 if expert in chosen else steps + 1 for expert, steps in enumerate(idle)]
        weights.zero_()  # what was noted is its own
    for name in balance.LayerCounters.NAMES:
        assert torch.allclose(getattr(noted, name), getattr(single, name), rtol=1e-6, atol=0), name
    assert noted.idle_steps.tolist() == idle
    assert idle[4] == 2
    assert noted.num_steps == 75


def test_experts_stay_idle_over_the_replays_of_a_graph(monkeypatch):
    """Forwards noted before the capture come before its replays, however late they are summed up."""

    def count(*experts):
        counters.count(torch.tensor([experts]), torch.ones(1, len(experts)))

    def replay(*experts):
        with monkeypatch.context() as patch:
            patch.setattr("fmoe_ext.balance.counters._is_captured", lambda x: True)
            count(*experts)

    counters = balance.LayerCounters(3, "cpu")
    count(0, 1)
    count(0, 2)
    for _ in range(4):
        replay(0)
    replay(2)
    replay(0)
    assert counters.idle_steps.tolist() == [0, 7, 1]
    replay(0)
    count(1)  # without a graph before or behind it
    replay(0)
    assert counters.idle_steps.tolist() == [0, 1, 4]
    assert counters.tokens_per_expert.tolist() == [9, 2, 2]
    assert counters.num_steps == 11


def test_counters_that_move_in_inference_mode_go_on_in_training():
    """They move to the device of the first forward: to meta as to a GPU."""
    counters = balance.LayerCounters(3, "cpu")
    topk_idx = torch.zeros(4, 2, dtype=torch.int64, device="meta")
    with torch.inference_mode():
        counters.count(topk_idx, torch.empty(4, 2, device="meta"))
    for name in balance.LayerCounters.NAMES:
        value = getattr(counters, name)
        assert value.is_meta and not value.is_inference(), name
    counters.count(topk_idx, torch.empty(4, 2, device="meta"))
    counters.reset()


def test_counters_move_while_no_other_thread_counts():
    counters, is_free = balance.LayerCounters(3, "cpu"), []

    class Sums(dict):
        def items(self):
            with ThreadPoolExecutor(1) as pool:
                is_free.append(pool.submit(counters._lock.acquire, blocking=False).result())
            return super().items()

    counters._sums = Sums(counters._sums)
    counters.to("meta")
    assert is_free == [False]


class ScalarWriter:
    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value


def test_writers(tmp_path):
    model = nn.ModuleList([FixedGate(2, [[0], [0]]), FixedGate(2, [[0], [1]])])
    monitor = balance.watch(model)
    for step in range(2):
        model[0](None), model[1](None)
        record = monitor.collect(step)
        balance.write(record, tmp_path / "new" / "load.jsonl")  # a folder that it makes
    lines = [json.loads(line) for line in (tmp_path / "new" / "load.jsonl").read_text().splitlines()]
    assert lines == monitor.history
    board = ScalarWriter()
    balance.write(record, board)
    assert board.scalars["max_over_mean/0", 1] == 2
    assert board.scalars["max_over_mean/1", 1] == 1
    assert board.scalars["max_over_mean/all", 1] == 1.5
    assert board.scalars["dead_experts/all", 1] == 0.5


def test_picture(tmp_path):
    monitor = watch(3, [[0, 1]])
    with pytest.raises(RuntimeError, match=r"call collect\(\) first"):
        monitor.plot(tmp_path / "load.png")
    monitor.collect()
    with torch.device("meta"):  # whatever the default is: the picture is drawn on the CPU
        monitor.plot(tmp_path / "new" / "load.png")
    assert (tmp_path / "new" / "load.png").read_bytes().startswith(b"\x89PNG")


def test_compiled_gate_counts_the_same():
    torch.manual_seed(0)
    gate = SoftmaxGate(8, 4, 1)
    monitor = balance.watch(gate)
    x = torch.randn(32, 8)
    expected, _ = gate(x)
    eager = monitor.collect()["layers"][""]
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    topk_idx, _ = compiled(x)
    assert torch.equal(topk_idx, expected)
    assert monitor.collect()["layers"][""] == eager


def test_no_synchronisation():
    """Nothing in the step reads a value: it runs on tensors that have none."""
    gate = FixedGate(
        4, torch.empty(16, 2, dtype=torch.int64, device="meta"), torch.empty(16, 2, device="meta")
    )
    monitor = balance.watch(gate)
    gate(None)
    assert all(getattr(monitor.counters[""], name).is_meta for name in balance.LayerCounters.NAMES)


@pytest.mark.bad_indices
def test_rejects():
    with pytest.raises(ValueError, match="Linear has no gate"):
        balance.watch(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="nothing to plot: call collect"):
        balance.draw([], "load.png")
    with pytest.raises(ValueError, match="warn_after must be at least 1, but got 0"):
        watch(2, [[0]], warn_after=0)
