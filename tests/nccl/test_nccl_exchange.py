"""The exchange over NCCL as its callers see it, with a communicator that only says whether it has failed."""

import contextlib
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.compat import functions
from fmoe_ext.ep import exchange
from fmoe_ext.ep.process_groups import find_group, register_group, timeout_of, use_timeout
from fmoe_ext.ep.static import check_max_rows
from fmoe_ext.gpu import kernels as gpu_kernels
from fmoe_ext.ops import chooser
from fmoe_ext.testing import DistributedPool

FAILURE = "the exchange took more than 2 s"


def timeouts():
    whole = register_group()
    assert timeout_of(find_group(whole)) == dist.group.WORLD.get_group_store().timeout
    part = dist.new_group([0], timeout=timedelta(seconds=33))
    register_group(part, timeout=timedelta(seconds=33))
    register_group(part)
    assert timeout_of(part) == timedelta(seconds=33)
    with pytest.raises(ValueError, match="timeout must be more than 0 s, but got -1 s"):
        register_group(part, timeout=timedelta(seconds=-1))
    use_timeout(part)  # as its communicator does
    register_group(part, timeout=timedelta(seconds=33))
    with pytest.raises(RuntimeError, match=r"ranks \[0\] is 0:00:33 .* cannot become 0:00:34"):
        register_group(part, timeout=timedelta(seconds=34))


def test_timeout_is_that_of_the_group():
    with DistributedPool(1) as pool:
        pool.run(timeouts)


def fail_exchanges_of(group):
    def check():
        raise RuntimeError(FAILURE)

    failed = SimpleNamespace(communicator=SimpleNamespace(check=check))
    exchange._nccl[group] = {torch.device("cpu"): failed}


def failures():
    """Counts that were copied from the device of an exchange that was aborted are garbage: nobody uses them."""
    torch.manual_seed(0)
    for bound in (None, 64):
        group = dist.new_group()
        layer = FMoETransformerMLP(4, 16, 32, world_size=2, moe_group=group, max_rows_per_rank=bound)
        layer(torch.randn(8, 16))
        layer.expert_parallel.row_limit and check_max_rows(layer)
        fail_exchanges_of(group)
        with pytest.raises(RuntimeError, match=f"the exchange in the group of ranks .* failed: .*{FAILURE}"):
            layer(torch.randn(8, 16))
    layer.expert_parallel.row_limit._seen = torch.zeros(3)
    with pytest.raises(RuntimeError, match=FAILURE):
        check_max_rows(layer)
    fail_exchanges_of(dist.group.WORLD)
    with pytest.raises(RuntimeError, match=FAILURE):
        functions.prepare_forward(torch.tensor([0, 1, 2]), 2, 2)


def test_failure_is_noticed_where_counts_reach_the_host():
    with DistributedPool(2) as pool:
        pool.run(failures)


@pytest.fixture
def margins(monkeypatch):
    """SM margins that the kernels were given."""
    told = []
    monkeypatch.setattr(gpu_kernels.SELECTION, "is_prepared", True)
    monkeypatch.setattr(torch.ops, "fmoe_ext", SimpleNamespace(_set_gpu_sm_margin=told.append), raising=False)
    return told


def start(monkeypatch, backend):
    works = []
    monkeypatch.setattr(exchange, "find_group", lambda name: name)
    monkeypatch.setattr(exchange.dist, "get_backend_config", lambda group: f"cuda:{backend}")
    work = SimpleNamespace(wait=lambda: works.append("waited"), is_completed=lambda: "ended" in works)
    monkeypatch.setattr(exchange, "_start", lambda *_: work)
    transfer = exchange.start_exchange(
        [None], [SimpleNamespace(is_cuda=True, device=torch.device("cuda"))], [], [], "group"
    )
    return transfer, works


def test_products_leave_sms_to_exchanges_that_are_under_way(margins, monkeypatch):
    first, waited = start(monkeypatch, "nccl")
    second, _ = start(monkeypatch, "nccl")
    assert margins == [16, 16]
    exchange.wait([first], "group")
    assert waited == ["waited"] and margins == [16, 16, 16]
    exchange.wait([first, second], "group")
    assert margins == [16, 16, 16, 0]
    abandoned, _ = start(monkeypatch, "nccl")  # by an error, say
    del abandoned
    assert margins[-2:] == [16, 0]


def test_sms_are_given_back_before_the_first_product_after_the_end(margins, monkeypatch):
    transfer, works = start(monkeypatch, "nccl")
    chooser.before(torch.zeros(1))
    assert margins == [16]
    works.append("ended")
    chooser.before(torch.zeros(1))
    assert margins == [16, 0]
    exchange.wait([transfer], "group")
    assert margins == [16, 0]  # once


class Stream:
    """A CUDA stream that keeps the calls it gets."""

    cuda_stream = 7

    def __init__(self):
        self.calls = []

    def wait_stream(self, other):
        self.calls.append(("stream", other))

    def wait_event(self, event):
        self.calls.append(("event", event))

    def record_event(self):
        return SimpleNamespace(query=lambda: True)


def on_fake_cuda(monkeypatch):
    """An exchange over NCCL whose communicator keeps its arguments -> it, and the current stream."""
    current, calls = Stream(), []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    made = exchange._NcclExchange.__new__(exchange._NcclExchange)
    made.stream = Stream()
    made.communicator = SimpleNamespace(all_to_all=lambda *args: calls.append(args), check=lambda: None)
    return made, current, calls


def test_all_tensors_of_an_exchange_are_one_group_of_calls(monkeypatch):
    made, _, calls = on_fake_cuda(monkeypatch)
    xs = [torch.zeros(5, 3), torch.zeros(5, 2, dtype=torch.int16), torch.zeros(5, dtype=torch.float64)]
    outs = [x.new_zeros(4, *x.shape[1:]) for x in xs]
    made.start(outs, xs, [2, 3], [4, 0])
    pointers = [x.data_ptr() for x in xs], [2, 3], [out.data_ptr() for out in outs], [4, 0]
    assert calls == [(*pointers, [12, 4, 8], 7)]


@pytest.mark.parametrize("waits", [True, False])
def test_memory_of_an_exchange_is_used_again_after_its_end(monkeypatch, waits):
    """Without record_stream: the stream of the tensors waits for the event before they are dropped."""
    made, current, _ = on_fake_cuda(monkeypatch)
    xs, outs = [torch.zeros(4, 3)], [torch.zeros(4, 3)]
    alive = [weakref.ref(t) for t in (*xs, *outs)]
    work = made.start(outs, xs, [2, 2], [2, 2])
    event = work.event
    del xs, outs
    assert all(ref() is not None for ref in alive)
    if waits:
        work.wait()
    else:
        del work  # by an error, say
    assert all(ref() is None for ref in alive)
    assert current.calls and all(call == ("event", event) for call in current.calls)


def test_products_leave_nothing_to_other_backends(margins, monkeypatch):
    work, waited = start(monkeypatch, "gloo")
    exchange.wait([work], "group")
    assert waited == ["waited"] and margins == []
