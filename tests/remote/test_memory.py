"""Memory of a server: the bytes of calls under way are bounded, and callers wait in turn or are refused by name."""

import asyncio
import concurrent.futures
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import grpc
import pytest
import torch

from fmoe_ext.remote import (
    DeclaredExperts,
    Options,
    Refused,
    Server,
    Settings,
    StaticList,
    Training,
    errors,
    loop,
    protocol,
)
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.etcd.client import Entry
from fmoe_ext.remote.expert_classes import find_expert_class
from fmoe_ext.remote.protocol import WINDOW_BYTES
from fmoe_ext.remote.replication.messages import (
    APPEND,
    Append,
    Reply,
    append_message,
    read_append,
    replica_handlers,
    reply_message,
)
from fmoe_ext.remote.replication.replicas import ReplicatedExperts
from fmoe_ext.remote.server import fair_queue
from fmoe_ext.remote.server.fair_queue import ByteBudget, QueueFull
from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.ledger import End, ReplyCache, Request, Term, Update
from fmoe_ext.remote.server.options import Replication
from fmoe_ext.remote.server.service import Intake
from fmoe_ext.remote.wire import STATE, Message, compress, encode, unpacked_bytes
from tests import ports
from tests.remote.conftest import wait_until

D = 16


def test_calls_wait_in_turn_for_room():
    async def run():
        budget, order = ByteBudget(100), []

        async def call(name, peer, count, seconds=5.0):
            held = await budget.take(peer, count, seconds)
            order.append(name)
            assert budget.num_bytes <= 100
            await asyncio.sleep(0.01)
            held.release()

        calls = [("a", "x", 40), ("b", "x", 40), ("c", "y", 60), ("d", "z", 30), ("e", "z", 100)]
        await asyncio.gather(*(call(*one) for one in calls))
        return order, budget.num_bytes

    # b has to wait for a of the same peer, which has half at most; e takes all, as its peer's only call
    assert asyncio.run(run()) == (["a", "c", "b", "d", "e"], 0)


def test_call_that_waits_too_long_or_goes_away_leaves_nothing():
    async def run():
        budget = ByteBudget(100)
        first = await budget.take("x", 90, 1.0)
        with pytest.raises(QueueFull, match=r"no room for a call of 20 bytes within 0\.0 s: .* at most 100"):
            await budget.take("y", 20, 0.01)
        cancelled = asyncio.ensure_future(budget.take("y", 20, 5.0))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        for _ in range(2):
            first.release()
        (await budget.take("z", 100, 0.0)).release()
        return budget.num_bytes, budget._waiting

    assert asyncio.run(run()) == (0, {})


def test_call_that_grows_is_refused_at_once_where_there_is_no_room():
    async def run():
        budget = ByteBudget(100)
        one, _ = await budget.take("x", 10, 1.0), await budget.take("y", 10, 1.0)
        one.resize(90)
        with pytest.raises(QueueFull, match="no room for a call of 91 bytes"):
            one.resize(91)
        one.resize(5)
        assert budget.num_bytes == 15

    asyncio.run(run())


@pytest.mark.parametrize(("codec", "dtype"), [("none", "float32"), ("bf16", "float32"), ("int8", "float64")])
def test_bytes_of_a_packed_message_are_those_of_its_tensors(codec, dtype):
    x = torch.ones(3, 8, dtype=getattr(torch, dtype))
    assert unpacked_bytes(compress({"0": x}, codec, {})) == (0 if codec == "none" else x.nbytes)


def test_bytes_of_a_packed_message_count_the_product_of_int8_in_float32():
    x = torch.ones(3, 8, dtype=torch.float16)
    assert unpacked_bytes(compress({"0": x}, "bf16", {})) == x.nbytes
    assert unpacked_bytes(compress({"0": x}, "int8", {})) == x.nbytes + 4 * x.numel()


def test_calls_that_wait_are_bounded_by_the_windows_that_grpc_reads_of_them(monkeypatch):
    monkeypatch.setattr(fair_queue, "LEAST_WAITING", 0)

    async def run():
        budget = ByteBudget(4 * WINDOW_BYTES)
        first = await budget.take("x", 4 * WINDOW_BYTES, 1.0)
        waiting = [asyncio.ensure_future(budget.take(peer, 2**30, 9.0)) for peer in "aabb"]
        await asyncio.sleep(0)
        for peer, num_own in (("a", 2), ("c", 0)):
            with pytest.raises(QueueFull, match=rf"4 calls wait for memory, {num_own} of them of {peer}"):
                await budget.take(peer, 2**30, 9.0)
        for one in waiting:
            one.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        first.release()
        return budget.num_bytes

    assert asyncio.run(run()) == 0


def test_answers_that_are_remembered_keep_no_batch_alive():
    """They kept their message: 366 MB for 128 MB of answers."""
    cache, batch = ReplyCache(), torch.randn(100, D)
    cache.put("expert.0", "a", (batch[10:20],))
    (kept,) = cache.get("expert.0", "a")
    assert torch.equal(kept, batch[10:20])
    assert kept.untyped_storage().nbytes() == kept.nbytes == cache.num_bytes


def test_calls_at_once_hold_no_more_than_the_bound(serve, monkeypatch):
    """Eight calls of 96 MB took 2 GB."""
    limit, seen = 100_000, []
    add = ByteBudget.add

    def note(self, peer, count):
        add(self, peer, count)
        seen.append(self.num_bytes)

    monkeypatch.setattr(ByteBudget, "add", note)
    server, directory = serve(max_bytes_in_flight=limit, settings=Settings(forward_timeout=60.0))
    (expert,) = directory.get_experts(["expert.0"])
    x = torch.randn(600, D)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: expert(x), range(16)))
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert 38_400 < max(seen) <= limit
    wait_until(lambda: server.service.budget.num_bytes == 0)
    with pytest.raises(
        Refused, match=r"more than this server takes at a time, 100000 \(--max_bytes_in_flight\)"
    ):
        expert(torch.randn(2000, D))


@pytest.mark.parametrize("announced", [None, "8", "nonsense"])
def test_call_that_announces_less_than_it_sends_is_refused_without_room(serve, announced):
    server, directory = serve(max_bytes_in_flight=100_000)
    data = encode(Message({"0": torch.zeros(600, D)}, {protocol.UID: "expert.0"}))
    metadata = () if announced is None else ((protocol.BYTES, announced),)

    async def call():
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            send = channel.unary_unary(protocol.FORWARD)
            first = await send(data, metadata=metadata, timeout=60.0)
            budget = server.service.budget
            budget.add("other", 90_000)
            try:
                with pytest.raises(grpc.aio.AioRpcError, match="--max_bytes_in_flight") as caught:
                    await send(data, metadata=metadata, timeout=0.8)
            finally:
                budget.add("other", -90_000)
            return len(first), caught.value.code()

    size, code = loop.run(call(), 60)
    assert size > 38_400 and code is grpc.StatusCode.RESOURCE_EXHAUSTED


LARGE_ROWS = 5 * 2**20 // (4 * D)  # 5 MiB


def test_large_calls_come_in_parts_and_are_read_once_there_is_room(serve):
    server, directory = serve(expert_cls="nop")
    (expert,) = directory.get_experts(["expert.0"])
    x = torch.randn(LARGE_ROWS, D, requires_grad=True)
    y = expert(x)
    y.sum().backward()
    assert torch.equal(y, x) and torch.equal(x.grad, torch.ones_like(x))
    budget, turns = server.service.budget, []

    def note(self, peer, count, take=ByteBudget.add):
        turns.append(count)
        take(self, peer, count)

    ByteBudget.add, kept = note, ByteBudget.add
    try:
        expert(x.detach())
    finally:
        ByteBudget.add = kept
    wait_until(lambda: budget.num_bytes == 0)
    assert turns[0] > 4 * x.numel(), "all of it was held before the first part was read"


def test_whole_call_that_is_too_long_is_ended_unread(serve):
    server, _ = serve(expert_cls="nop")
    data = encode(Message({"0": torch.zeros(LARGE_ROWS, D)}, {protocol.UID: "expert.0"}))

    async def call(method):
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            metadata = ((protocol.BYTES, "8"),)  # whatever it announces
            with pytest.raises(grpc.aio.AioRpcError, match="message larger than max") as caught:
                await channel.unary_unary(method)(data, metadata=metadata, timeout=60.0)
            return caught.value.code()

    for method in (protocol.FORWARD, protocol.FORWARD + protocol.IN_PARTS):
        assert loop.run(call(method), 60) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_call_in_parts_beyond_its_announcement_ends_where_the_room_does(serve):
    server, _ = serve(max_bytes_in_flight=2 << 20)
    data = encode(Message({"0": torch.zeros(LARGE_ROWS, D)}, {protocol.UID: "expert.0"}))

    async def call():
        async with grpc.aio.insecure_channel(server.endpoint) as channel:
            send = channel.stream_stream(protocol.FORWARD + protocol.IN_PARTS)
            stream = send(metadata=((protocol.BYTES, "8"),), timeout=60.0)
            # in one write: for another one, as the server ends the call, gRPC may report a failure of its own
            await stream.write(data[: 3 << 20])
            with pytest.raises(grpc.aio.AioRpcError, match="--max_bytes_in_flight") as caught:
                await stream.read()
            return caught.value.code()

    assert loop.run(call(), 60) is grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_until(lambda: server.service.budget.num_bytes == 0)


class EndedStream:
    """A call in parts that ends by `status` while its first part is sent; grpc then notes a status of its own."""

    OWN = grpc.StatusCode.INTERNAL, "Internal error from Core"

    def __init__(self, status):
        self.status, self.noted = status, None

    def __call__(self, timeout, metadata):
        return self

    def add_done_callback(self, callback):
        self.callback = callback

    async def initial_metadata(self):
        return ((protocol.ROOM, "1"),)

    async def write(self, data):
        await asyncio.sleep(0)
        self.noted = self.status
        self.callback(self)
        self.noted = self.OWN
        raise grpc.aio.AioRpcError(self.OWN[0], (), (), self.OWN[1])

    async def code(self):
        return self.noted[0]

    async def details(self):
        return self.noted[1]

    def cancel(self):
        pass


@pytest.mark.parametrize(
    ("status", "error", "text", "timeout"),
    [
        ((grpc.StatusCode.RESOURCE_EXHAUSTED, "no room"), errors.Busy, "no room", 60.0),
        ((grpc.StatusCode.INVALID_ARGUMENT, "too long"), errors.Refused, "too long", 60.0),
        ((grpc.StatusCode.UNAVAILABLE, "it stops"), errors.ExpertGone, "it stops", 60.0),
        ((grpc.StatusCode.DEADLINE_EXCEEDED, ""), errors.CallTimeout, "did not answer", 60.0),
        ((grpc.StatusCode.OK, ""), errors.ExpertGone, "before it had all of it", 60.0),
        (EndedStream.OWN, errors.ExpertGone, "before it had all of it", 60.0),
        (
            EndedStream.OWN,
            errors.CallTimeout,
            "did not answer",
            1e-9,
        ),  # grpc has not said yet that time is up
    ],
)
def test_call_that_ends_while_parts_are_sent_raises_what_the_server_said(status, error, text, timeout):
    """It was Refused, for good, whatever the server had said."""

    async def run():
        caller = Caller()
        caller._channels["a:1"] = types.SimpleNamespace(stream_stream=lambda method: EndedStream(status))
        await caller.call("a:1", protocol.FORWARD, bytes(2 * protocol.PART_BYTES), timeout)

    with pytest.raises(error, match=text) as caught:
        asyncio.run(run())
    assert type(caught.value) is error


def test_call_in_parts_beyond_the_largest_message_is_refused_by_its_size(serve):
    server, _ = serve(max_message_bytes=2 << 20)
    data = encode(Message({"0": torch.zeros(LARGE_ROWS, D)}, {protocol.UID: "expert.0"}))

    async def run():
        caller = Caller()
        for _ in range(20):  # the server ends the call between two parts, or while one is under way
            with pytest.raises(errors.Refused, match="--max_message_bytes"):
                await caller.call(server.endpoint, protocol.FORWARD, data, 60.0)
        await caller.close()

    loop.run(run(), 60)


def test_call_to_a_server_without_parts_is_sent_whole():
    async def run():
        calls = []

        async def forward(data, context):
            calls.append(len(data))
            return encode(Message({}, {protocol.VERSION: "1"}))

        server = grpc.aio.server(options=protocol.channel_options(1 << 30))
        methods = {"Forward": grpc.unary_unary_rpc_method_handler(forward)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.SERVICE, methods),))
        endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        caller, data = Caller(), encode(Message({"0": torch.zeros(LARGE_ROWS, D)}, {}))
        answers = [await caller.call(endpoint, protocol.FORWARD, data, 60.0) for _ in range(2)]
        await caller.close()
        await server.stop(None)
        assert calls == [len(data)] * 2
        return [answer.meta[protocol.VERSION] for answer in answers]

    assert loop.run(run(), 60) == ["1", "1"]


@pytest.fixture
def follower(ends):
    """A server with the methods of replicas; its `appends` are what came."""

    class Follower(DeclaredExperts):
        appends: ClassVar = []

        async def start(self, server):
            await super().start(server)
            self.intake = Intake(server.guard, ByteBudget(LARGE_ROWS * D * 4 * 3), STATE)
            server.add_handlers(replica_handlers(self.answer, self.intake, server.compute))

        async def answer(self, path, message):
            append = read_append(message)
            self.appends.append(append)
            return reply_message(Reply(True, append.end, append.term))

    options = Options(expert_cls="nop", hidden_dim=D, expert_uids=("expert.0",), listen_on=ports.endpoint())
    return ends(Server(options, Follower(StaticList())).start())


def test_updates_of_other_servers_hold_memory_until_they_are_applied(follower):
    """Eight of 96 MB took 3.3 GB."""
    x = torch.randn(LARGE_ROWS, D)
    end = End(Term(1, "a"), 1)
    update = Update("expert.0", End(), end, (Request("a" * 32, (x,), x),))
    append = Append("expert.0", Term(1, "a"), 0, end, update)
    data, placement = encode(append_message(append)), follower.placement
    begun, go_on = threading.Event(), threading.Event()
    follower.compute.call(lambda: (begun.set(), go_on.wait(60)))
    assert begun.wait(60)
    caller = Caller()
    try:
        calls = [loop.submit(caller.call(follower.endpoint, APPEND, data, 60.0)) for _ in range(3)]
        (first,), _ = concurrent.futures.wait(calls, 60, concurrent.futures.FIRST_COMPLETED)
        assert first.result().meta["accepted"] == "1"
        wait_until(lambda: len(placement.intake.budget._waiting) == 2)
        assert placement.intake.budget.num_bytes == len(data) and len(placement.appends) == 1
        (request,) = placement.appends[0].update.requests
        assert torch.equal(request.grad, x) and torch.equal(request.inputs[0], x)
        go_on.set()
        assert [call.result(60).meta["accepted"] for call in calls] == ["1"] * 3
        wait_until(lambda: placement.intake.budget.num_bytes == 0)
    finally:
        go_on.set()
        loop.run(caller.close(), 60)


def _placement(host):
    """Return (ReplicatedExperts without a network, write(uid, *members) to its view of etcd, uids that it adds)."""
    placement = ReplicatedExperts(Replication("nowhere:1", replicas=2), store=object(), peers=object())
    added = []

    async def add_experts(uids):
        added.extend(uids)
        await asyncio.sleep(0)  # the disk and the thread that computes
        host.add(uids)

    placement.server = types.SimpleNamespace(host=host, add_experts=add_experts)
    placement._site = types.SimpleNamespace(registry=placement.registry)

    def write(uid, *servers):
        record = keys.dump(keys.Members({server: "host:1" for server in servers}))
        placement.registry.view.take(Entry(keys.members_key(uid), record, 1, 1))

    return placement, write, added


def test_host_takes_only_what_the_registry_has_and_lacks_and_what_fits():
    """A stranger could have 500 experts made."""

    async def run():
        host = ExpertHost(find_expert_class("ffn"), D, Training("adam"))
        placement, write, _ = _placement(host)
        for uid, servers in (("expert.0", "a"), ("expert.1", "a"), ("expert.2", "ab")):
            write(uid, *servers)
        await placement.host_expert("expert.0")
        with pytest.raises(ValueError, match=r"expert\.7 is no expert that the registry knows"):
            await placement.host_expert("expert.7")
        with pytest.raises(ValueError, match=r"expert\.2 has its replicas"):
            await placement.host_expert("expert.2")
        size = host.state_bytes("expert.0")
        assert size == 3 * sum(p.nbytes for p in host.parameters("expert.0").values())
        placement.max_hosted_bytes = 2 * size - 1
        with pytest.raises(
            QueueFull, match=rf"the 1 experts here hold {size} bytes, of at most {2 * size - 1}"
        ):
            await placement.host_expert("expert.1")
        placement.max_hosted_bytes = 2 * size
        await placement.host_expert("expert.1")
        return sorted(host.experts)

    assert asyncio.run(run()) == ["expert.0", "expert.1"]


def test_experts_that_a_server_is_asked_to_host_at_once_are_counted_together():
    async def run():
        host = ExpertHost(find_expert_class("ffn"), D, Training("adam"))
        placement, write, _ = _placement(host)
        uids = [f"expert.{i}" for i in range(4)]
        for uid in uids:
            write(uid, "a")
        other = ExpertHost(find_expert_class("ffn"), D, Training("adam"))
        other.add(["expert.0"])
        placement.max_hosted_bytes = 2 * other.state_bytes("expert.0")
        replies = await asyncio.gather(*map(placement.host_expert, uids), return_exceptions=True)
        return sorted(host.experts), [type(reply) for reply in replies]

    hosted, replies = asyncio.run(run())
    assert hosted == ["expert.0", "expert.1"]
    assert replies == [type(None)] * 2 + [QueueFull] * 2


def test_calls_for_one_expert_that_wait_for_its_record_add_it_once():
    """A second one would put the checkpoint over a replica that has begun to follow."""

    async def run():
        host = ExpertHost(find_expert_class("ffn"), D, Training("adam"))
        placement, write, added = _placement(host)
        calls = [asyncio.create_task(placement.host_expert("expert.0")) for _ in range(2)]
        await asyncio.sleep(0)  # both have looked for the record
        write("expert.0", "a")
        await asyncio.gather(*calls)
        return added

    assert asyncio.run(run()) == ["expert.0"]
