"""Memory of a server: the bytes of calls under way are bounded, and callers wait in turn or are refused by name."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from fmoe_ext.remote import Refused, Settings, loop, protocol
from fmoe_ext.remote.server.fair_queue import ByteBudget, QueueFull
from fmoe_ext.remote.wire import Message, compress, encode, unpacked_bytes
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
    assert unpacked_bytes(compress({"0": x}, codec, {})) == x.numel() * x.element_size()


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
