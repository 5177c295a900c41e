"""The budget of a streamed model: memory="auto", limits of the process, and the state of optimizers."""

import gc
import mmap
import os

import pytest
import torch

import fmoe_ext
from fmoe_ext.finetune.streaming import budget
from fmoe_ext.finetune.streaming.budget import bytes_of_state
from fmoe_ext.memory import Process, limits, memory_of, process, restart_peak, room_of_process
from tests.finetune.streamed_models import (
    bytes_of_adapters,
    resident,
    save,
    streamed,
    train,
    with_adapters,
)
from tests.huggingface.huggingface_models import make_ids, step

MIB = 2**20
UNLIMITED = 9223372036854771712


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def machine(root, cgroup, mounts, total=1000, available=700):
    """The files of /proc that are read, sizes in MiB -> their folder."""
    write(
        root / "proc/meminfo",
        f"MemTotal: {total * 1024} kB\nMemFree: 1 kB\nMemAvailable: {available * 1024} kB\n",
    )
    write(root / "proc/self/cgroup", cgroup)
    write(root / "proc/self/mountinfo", mounts)
    return root / "proc"


def group_v1(folder, limit, used, files=0):
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", used)
    write(folder / "memory.stat", f"cache 1\ntotal_inactive_file {files}\ntotal_active_file 0\n")


def group_v2(folder, limit, used, files=0, high="max"):
    write(folder / "memory.max", limit)
    write(folder / "memory.high", high)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 1\ninactive_file {files}\nactive_file 5\n")


def mount_v1(top, root="/"):
    return (
        f"32 31 0:29 {root} {top}/cpu rw,relatime - cgroup cgroup rw,cpu\n"
        f"35 31 0:32 {root} {top}/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    )


def test_auto_without_a_group_is_the_free_memory(tmp_path):
    found = memory_of("auto", machine(tmp_path, "", ""))
    assert found.num_bytes == 700 * MIB
    assert found.source == (
        f' from memory="auto" ({1000 * MIB:,} bytes in {tmp_path}/proc/meminfo, of which {300 * MIB:,} are used)'
    )


def test_auto_reads_groups_of_version_1_up_to_the_root(tmp_path):
    top = tmp_path / "fs"
    proc = machine(tmp_path, "9:cpu:/other\n4:memory:/jobs/mine\n0::/\n", mount_v1(top))
    group_v1(top / "memory", UNLIMITED, 999 * MIB)
    group_v1(top / "memory/jobs", 500 * MIB, 450 * MIB, files=200 * MIB)
    group_v1(top / "memory/jobs/mine", 400 * MIB, 20 * MIB)
    group_v1(top / "memory/other", 1, 1)
    found = memory_of("auto", proc)
    assert found.num_bytes == 250 * MIB and "memory/jobs/memory.limit_in_bytes" in found.source
    assert found.limit.num_bytes == 400 * MIB and len(limits(proc)) == 3


@pytest.mark.parametrize("high, expected", [("max", 180 * MIB + 5), (250 * MIB, 130 * MIB + 5)])
def test_auto_reads_groups_of_version_2(tmp_path, high, expected):
    top = tmp_path / "fs/unified"
    proc = machine(
        tmp_path, "0::/user/session\n", f"41 31 0:38 / {top} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
    )
    group_v2(top / "user", "max", 600 * MIB)
    group_v2(top / "user/session", 300 * MIB, 130 * MIB, 10 * MIB, high)
    found = memory_of("auto", proc)
    assert found.num_bytes == expected
    assert ("memory.max" if high == "max" else "memory.high") in found.source


@pytest.mark.parametrize("path", ["/docker/1234", "/", "/../../other"])
def test_group_of_a_container_is_the_root_of_its_mount(tmp_path, path):
    top = tmp_path / "fs"
    proc = machine(tmp_path, f"4:memory:{path}\n", mount_v1(top, "/docker/1234"))
    group_v1(top / "memory", 200 * MIB, 50 * MIB)
    assert memory_of("auto", proc).num_bytes == 150 * MIB


def test_auto_without_proc_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'memory="auto" needs /proc/meminfo.*memory="8GiB"'):
        memory_of("auto", tmp_path)
    assert memory_of("2KiB", tmp_path) == (2048, "", None, 0)


def test_memory_of_the_process_and_what_the_limits_leave_it(tmp_path):
    proc = machine(tmp_path, "4:memory:/mine\n", mount_v1(tmp_path / "fs"))
    group_v1(tmp_path / "fs/memory/mine", 400 * MIB, 350 * MIB, files=50 * MIB)
    assert process(proc) is None and room_of_process(20, tmp_path) is None
    write(proc / "self/status", "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\nThreads:\t1\n")
    assert process(proc) == Process(now=MIB, most=2 * MIB)
    assert room_of_process(MIB, proc) == 101 * MIB
    assert 0 < process().now <= process().most


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux restarts a peak by this file"
)
def test_peak_begins_anew(tmp_path):
    with mmap.mmap(-1, 2**28) as memory:  # not a tensor: malloc may keep its pages
        for page in range(0, 2**28, mmap.PAGESIZE):
            memory[page] = 1
    before = process()
    restart_peak()
    after = process()
    assert before.most >= before.now + 2**27 and after.most < after.now + 2**26
    restart_peak(tmp_path)  # without /proc nothing happens


def test_auto_streams_and_its_refusal_names_the_limit(tmp_path, monkeypatch):
    folder = save(tmp_path / "model", dtype=torch.float32)
    assert fmoe_ext.stream(folder).expert_stream.memory > 2**20  # of this machine
    top = tmp_path / "fs"
    proc = machine(tmp_path, "4:memory:/mine\n", mount_v1(top))
    group_v1(top / "memory/mine", 400_000, 300_000)
    monkeypatch.setattr(memory_of, "__defaults__", (proc,))
    with pytest.raises(ValueError) as error:
        fmoe_ext.stream(folder)
    assert str(error.value).startswith(
        f'memory=100,000 bytes from memory="auto" (400,000 bytes in {top}/memory/mine/memory.limit_in_bytes, of which '
        "300,000 are used) is too little: "
    )


def test_files_go_through_the_page_cache_where_the_group_has_room_for_them(tmp_path, monkeypatch):
    folder = save(tmp_path / "model", dtype=torch.float32)
    model, memory = streamed(folder, 2), 10**6
    experts = sum(span.num_bytes for layer in model.expert_stream.pool.layers for span in layer.every_span())
    dense = sum(t.numel() * t.element_size() for t in model.expert_stream.resident_tensors())
    top = tmp_path / "fs"
    monkeypatch.setattr(memory_of, "__defaults__", (machine(tmp_path, "4:memory:/mine\n", mount_v1(top)),))
    layers = model.expert_stream.pool.layers
    buffers = len(layers) * max(layer.num_bytes(layer.num_experts) for layer in layers)
    held = dense + min(buffers, memory - memory // 4 - dense) + memory // 4
    for free, expected in ((held + experts, True), (held + experts - 1, False)):
        group_v1(top / "memory/mine", free + 1000, 1000)
        stream = fmoe_ext.stream(folder, memory).expert_stream
        assert stream.reads_through_cache is expected
        assert stream.pool._reader.through_cache is expected


def test_more_memory_than_a_limit_warns(tmp_path, monkeypatch, recwarn):
    folder = save(tmp_path / "model", dtype=torch.float32)
    stream = fmoe_ext.stream(folder, 2**40).expert_stream
    held = sum(t.numel() * t.element_size() for t in stream.resident_tensors()) + 5 * stream.pool.layer_bytes
    top = tmp_path / "fs"
    proc = machine(tmp_path, "4:memory:/mine\n", mount_v1(top))
    monkeypatch.setattr(memory_of, "__defaults__", (proc,))
    group_v1(top / "memory/mine", -(-held * 4 // 3), 0)
    fmoe_ext.stream(folder, 2**40)
    assert not [w for w in recwarn if "limit" in str(w.message)]
    group_v1(top / "memory/mine", held * 4 // 3 - 4, 0)
    with pytest.warns(UserWarning, match=rf"lets the model hold {held:,}, .*memory\.limit_in_bytes") as found:
        fmoe_ext.stream(folder, 2**40)
    assert any(w.filename == __file__ for w in found)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_optimizer_bytes_that_are_no_size(tmp_path, value):
    with pytest.raises(ValueError, match="optimizer_bytes must be 0 or more"):
        fmoe_ext.stream(tmp_path, optimizer_bytes=value)


# {TrainingArguments(optim=...): (state per trained number in bytes, difference of losses from float moments, share)}
OPTIMIZERS = {
    "adamw_torch": (8.0, 0.0),
    "adamw_torch_8bit": (2.2, 1e-3),  # torchao
    "adamw_bnb_8bit": (2.2, 1e-3),
    "paged_adamw_8bit": (2.2, 1e-3),
    "adafactor": (0.2, None),
    "sgd": (0.0, None),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model whose adapters of rank 64 are larger than a layer of experts."""
    return save(tmp_path_factory.mktemp("large") / "model", dtype=torch.float32, num_hidden_layers=3)


@pytest.fixture(scope="module")
def losses_by_adamw(large, tmp_path_factory):
    """Of the resident model."""
    folder = tmp_path_factory.mktemp("resident")
    return train(with_adapters(resident(large), rank=64), folder, max_steps=6, optim="adamw_torch")[0]


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_trainer_with_small_moments(large, losses_by_adamw, tmp_path, optim):
    pytest.importorskip("bitsandbytes" if "bnb" in optim or "paged" in optim else "torchao")
    state, share = OPTIMIZERS[optim]
    expected = losses_by_adamw
    plain = with_adapters(resident(large), rank=64)
    adapters = bytes_of_adapters(plain)
    model = with_adapters(
        streamed(large, 1, round(adapters * (2 + state / 4)), optimizer_bytes=state), rank=64
    )
    losses, optimizer = train(model, tmp_path, max_steps=6, optim=optim)
    assert losses[0] == expected[0] and losses[-1] < losses[0]
    if share is not None:
        assert losses == pytest.approx(expected, rel=share, abs=0)
    with torch.no_grad():
        model(make_ids())  # counts the state after the last step
    stream = model.expert_stream
    found = bytes_of_state([optimizer])
    tensors = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    if optim == "adamw_torch":
        assert found == sum(t.numel() * t.element_size() for t in tensors) == 2 * adapters + 4 * 12
    assert found <= state * adapters / 4 + 4 * 12  # and a counter of steps in each tensor
    dense = sum(t.numel() * t.element_size() for t in stream.resident_tensors()) - adapters
    left = stream.memory - stream.memory // 4 - dense - 2 * adapters - found
    assert 0 <= left - stream.pool.num_bytes < stream.pool.layer_bytes


def test_adapters_count_before_a_single_token(large):
    model = with_adapters(streamed(large, 1, 0), rank=64)
    with torch.no_grad(), pytest.raises(ValueError, match=r"\(adapters\)"):
        model(torch.tensor([[1]]))


def test_moments_that_do_not_fit_are_refused_before_they_are_made(large):
    adapters = bytes_of_adapters(with_adapters(resident(large), rank=64))
    room = round(adapters * (2 + 2.2 / 4))
    model = with_adapters(streamed(large, 1, room), rank=64).train()
    with pytest.raises(ValueError) as error:
        step(model, make_ids())
    assert f"{adapters:,} (gradients of trained weights) + {2 * adapters:,} (two moments of Adam) = " in str(
        error.value
    )
    assert str(error.value).endswith("stream(..., optimizer_bytes=2.1) plans for 8-bit moments")
    model = with_adapters(streamed(large, 1, room, optimizer_bytes=2.1), rank=64).train()
    assert len(step(model, make_ids())[2]) == 12


def test_optimizer_with_more_state_than_expected_is_refused(large):
    adapters = bytes_of_adapters(with_adapters(resident(large), rank=64))
    model = with_adapters(streamed(large, 1, 2 * adapters, optimizer_bytes=0), rank=64).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    step(model, make_ids())
    optimizer.step()
    with pytest.raises(ValueError, match=rf"{2 * adapters + 48:,} \(state of AdamW\)"):
        model(make_ids())
    del optimizer  # and its state
    gc.collect()
    assert step(model, make_ids())[1] > 0


def test_optimizer_with_less_state_gives_buffers_back(large):
    plain = with_adapters(resident(large), rank=64)
    model = with_adapters(streamed(large, 1, 4 * bytes_of_adapters(plain)), rank=64).train()
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, model)
    ]
    stream, losses, reads = model.expert_stream, [], []
    for _ in range(3):
        stream.reset_statistics()
        losses.append([step(m, make_ids())[1].item() for m in (plain.train(), model)])
        reads.append((stream.statistics.layers_read, stream.statistics.parts_read > 0))
        for optimizer in optimizers:
            optimizer.step()
    assert all(ours == theirs for theirs, ours in losses) and losses[2] < losses[1] < losses[0]
    assert reads == [(0, True), (3, False), (0, False)] and stream.pool.holds_all


def test_weights_outside_of_experts_count_when_they_are_trained(large):
    model = streamed(large, 1).train()  # all weights outside of the experts require gradients
    dense = sum(t.numel() * t.element_size() for t in model.parameters() if t.requires_grad)
    with pytest.raises(ValueError, match=rf"{dense:,} \(gradients of trained weights\)"):
        model(make_ids())
    model.requires_grad_(False)
    assert model(make_ids()).logits.isfinite().all()


def test_buffers_give_way_to_the_memory_that_a_step_had(large, monkeypatch):
    """The optimizer's state comes after the peak of the first step: the second one would exceed the limit."""
    plain, rooms = with_adapters(resident(large), rank=4), [2**30]
    whole = 4 * bytes_of_adapters(plain)
    model = with_adapters(streamed(large, 4, whole), rank=4).train()
    stream, most = model.expert_stream, [2**29]
    monkeypatch.setattr(budget, "process", lambda: Process(2**20, most[0]))
    monkeypatch.setattr(budget, "room_of_process", lambda now: rooms[0])
    optimizers = [torch.optim.Adam([p for p in m.parameters() if p.requires_grad]) for m in (plain, model)]

    def both():
        losses = [step(m, make_ids())[1].item() for m in (plain.train(), model)]
        for optimizer in optimizers:
            optimizer.step()
        assert losses[0] == losses[1]
        return stream.pool.num_bytes

    both()
    assert both() == both() and stream.pool.holds_all  # room is there
    used = stream.pool.bytes_in_use
    most[0] = 2**29 + 2**20  # the next step is larger
    both()
    rooms[0] = (most[0] - used // 2) * budget.MARGIN // (budget.MARGIN - 1)
    with pytest.warns(UserWarning, match=r"buffers for experts shrink from .* to .*activations="):
        smaller = both()
    excess = most[0] - (rooms[0] - rooms[0] // budget.MARGIN)
    assert smaller == max(stream._least, used - excess) < used
    assert both() == smaller


def test_peak_of_generation_is_not_that_of_a_step(large, monkeypatch):
    """Before training buffers may be larger: their peak, with the optimizer's state, would leave a step nothing."""
    plain, most = with_adapters(resident(large), rank=4), [2**30]
    model = with_adapters(streamed(large, 4, 4 * bytes_of_adapters(plain)), rank=4)
    model.eval()(make_ids())
    monkeypatch.setattr(budget, "process", lambda: Process(2**20, most[0]))
    monkeypatch.setattr(budget, "room_of_process", lambda now: 2**30)
    monkeypatch.setattr(budget, "restart_peak", lambda: most.__setitem__(0, 2**20))
    optimizer = torch.optim.Adam([p for p in model.train().parameters() if p.requires_grad])
    sizes = []
    for _ in range(3):
        step(model, make_ids())
        optimizer.step()
        sizes.append(model.expert_stream.pool.num_bytes)
        most[0] += 2**10  # a peak of a later step stays
    assert sizes[0] == sizes[1] == sizes[2] and most[0] == 2**20 + 3 * 2**10


def test_buffers_are_empty_while_an_optimizer_needs_their_memory(large, monkeypatch):
    """Its state and what it computes with come on top of gradients; no expert is used then."""
    plain = with_adapters(resident(large), rank=4).train()
    adapters = bytes_of_adapters(plain)
    model = with_adapters(streamed(large, 4, 4 * adapters), rank=4).train()
    stream, room = model.expert_stream, [2**40]
    monkeypatch.setattr(budget, "process", lambda: Process(2**28, 2**28))
    monkeypatch.setattr(budget, "room_of_process", lambda now: room[0] + room[0] // (budget.MARGIN - 1) + 1)
    optimizers = [torch.optim.Adam([p for p in m.parameters() if p.requires_grad]) for m in (plain, model)]
    in_use = []
    for needed, is_short in (
        (3 * adapters, True),
        (3 * adapters, False),
        (adapters, True),
        (adapters, False),
    ):
        losses = [step(m, make_ids())[1].item() for m in (plain, model)]
        assert losses[0] == losses[1] and stream.pool.bytes_in_use > 0
        room[0] = 2**28 + needed - is_short * 100
        for optimizer in optimizers:
            optimizer.step()
        room[0] = 2**40
        in_use.append(stream.pool.bytes_in_use > 0)
        if needed > adapters:  # begin again: the state is to come
            optimizers[1].state.clear()
            optimizers[0].state.clear()
    assert in_use == [False, True, False, True]
