"""Faults between client and server, each with a bound in seconds."""

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import socket
import threading
import time

import pytest
import torch

from fmoe_ext.remote import (
    Busy,
    CallTimeout,
    Client,
    ExpertGone,
    Refused,
    RemoteError,
    RemoteExpert,
    SchemaError,
    Settings,
    StaticList,
    Training,
    loop,
    protocol,
)
from fmoe_ext.remote.client.caller import Caller
from fmoe_ext.remote.discovery import ExpertRecord
from fmoe_ext.remote.wire import Message, encode
from tests import ports
from tests.remote.conftest import LONG, PATIENT, QUICK, wait_until, within

D = 16


def send(endpoint, method, data, timeout=LONG):
    async def once():
        caller = Caller()
        try:
            return await caller.call(endpoint, method, data, timeout)
        finally:
            await caller.close()

    return loop.run(once(), timeout + 60)


@contextlib.contextmanager
def busy_device(server):
    """The thread that computes is stuck."""
    go_on = threading.Event()
    server.compute.call(go_on.wait)
    try:
        yield
    finally:
        go_on.set()


def works(directory, uid="expert.1"):
    """True if an expert still computes and learns."""
    (expert,) = directory.get_experts([uid])
    x = torch.randn(2, D, requires_grad=True)
    expert(x).sum().backward()
    return bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, D + 1),
        torch.randn(D),
        torch.randn(2, 3, D),
        torch.randn(2, D, dtype=torch.float64),
        torch.randn(0, D),
        torch.ones(2, D, dtype=torch.int64),
    ],
    ids=["size", "rank 1", "rank 3", "dtype", "no rows", "integers"],
)
def test_wrong_tensors_are_not_sent(serve, x):
    server, directory = serve(settings=QUICK)
    (expert,) = directory.get_experts(["expert.0"])
    expert.schema()
    before = server.metrics.count("calls_total")
    with pytest.raises(SchemaError, match=r"expert\.0"):
        expert(x)
    assert server.metrics.count("calls_total") == before


def call(uid="expert.0", meta=None, **tensors):
    return encode(Message(tensors, {protocol.UID: uid, **(meta or {})}))


X, G = torch.ones(2, D), torch.ones(2, D)
BAD = {
    "wrong size": ("Forward", lambda: call(**{"0": torch.ones(2, D + 1)}), "must be"),
    "wrong dtype": ("Forward", lambda: call(**{"0": X.double()}), "must be"),
    "wrong rank": ("Forward", lambda: call(**{"0": X[0]}), "must be"),
    "no input": ("Forward", lambda: call(), "takes 1"),
    "another input": ("Forward", lambda: call(**{"0": X, "extra": X}), "unknown tensors"),
    "NaN": ("Forward", lambda: call(**{"0": X * float("nan")}), "NaN or infinity"),
    "infinity": ("Backward", lambda: call(**{"0": X * float("inf"), "grad": G}), "NaN or infinity"),
    "NaN gradient": ("Backward", lambda: call(**{"0": X, "grad": G * float("nan")}), "NaN or infinity"),
    "infinite gradient": ("Backward", lambda: call(**{"0": X, "grad": G * float("inf")}), "NaN or infinity"),
    "gradient of another dtype": ("Backward", lambda: call(**{"0": X, "grad": G.double()}), "must be"),
    "gradient of another width": ("Backward", lambda: call(**{"0": X, "grad": G[:, :-1]}), "must be"),
    "no gradient": ("Backward", lambda: call(**{"0": X}), "grad"),
    "gradient of other rows": ("Backward", lambda: call(**{"0": X, "grad": G[:1]}), "rows"),
    "bad id": ("Backward", lambda: call(meta={"id": "../x"}, **{"0": X, "grad": G}), "request id"),
    "bad version": ("Backward", lambda: call(meta={"version": "-1"}, **{"0": X, "grad": G}), "version"),
    "bad compression": ("Forward", lambda: call(meta={"compression": "zip"}, **{"0": X}), "compression"),
    "no uid": ("Forward", lambda: encode(Message({"0": X})), "uid"),
    "garbage": ("Forward", lambda: b"\xff" * 100, "header"),
    "nothing": ("Backward", lambda: b"", "message"),
    "lying header": ("Forward", lambda: call(**{"0": X})[:-4], "does not fit"),
}


@pytest.mark.parametrize(("method", "data", "text"), BAD.values(), ids=BAD)
def test_bad_calls_are_refused_and_the_server_goes_on(serve, method, data, text):
    server, directory = serve(settings=QUICK)
    with within(20), pytest.raises(Refused, match=text):
        send(server.endpoint, f"/{protocol.SERVICE}/{method}", data())
    assert server.host.experts["expert.0"].version == 0
    assert works(directory)


def test_unknown_uid(ends, serve):
    server, _ = serve()
    expert = RemoteExpert("expert.9", server.endpoint, ends(Client(settings=QUICK)))
    with within(20), pytest.raises(ExpertGone, match=r"expert\.9"):
        expert(X)


def test_message_over_the_cap(serve):
    server, directory = serve(max_message_bytes=10_000)
    with within(20), pytest.raises(Busy):
        send(server.endpoint, protocol.FORWARD, call(**{"0": torch.ones(1000, D)}))
    assert works(directory)


def test_fuzzed_calls_never_stop_a_server(ends, serve):
    """1,000 broken messages over the wire (10,000 through the reader alone: test_wire.py), 50 at a time."""
    server, directory = serve(settings=QUICK)
    rng, caller = random.Random(1), ends(Caller())
    good = call(meta={"id": "0" * 32}, **{"0": X, "grad": G})

    def broken():
        data = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(data))
            data[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        return bytes(data)

    async def storm():
        codes = []
        for _ in range(20):
            methods = [rng.choice((protocol.FORWARD, protocol.BACKWARD, protocol.INFO)) for _ in range(50)]
            calls = [caller.call(server.endpoint, method, broken(), LONG) for method in methods]
            codes += await asyncio.gather(*calls, return_exceptions=True)
        return codes

    results = loop.run(storm(), 20 * LONG)
    assert all(isinstance(r, (Message, Refused, ExpertGone)) for r in results)
    assert sum(isinstance(r, RemoteError) for r in results) > 500
    assert server.compute.num_crashes == 0
    assert works(directory)


def test_one_bad_call_does_not_fail_those_it_is_batched_with(ends, serve):
    """Gradients that overflow the weights' are found when their group is split."""
    server, directory = serve(expert_uids=("expert.0",))
    huge = torch.full((2, D), 3e38)
    results = {}

    def go(name, x, grad):
        client = ends(Client(settings=dataclasses.replace(PATIENT, patience=0)))
        handle = client.handle("expert.0", server.endpoint)
        try:
            results[name] = loop.run(client.backward(handle, (x,), grad, 0, LONG), 2 * LONG)
        except RemoteError as error:
            results[name] = error

    with busy_device(server):
        threads = [
            threading.Thread(target=go, args=("good", X, G)),
            threading.Thread(target=go, args=("bad", X * 2, huge)),
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(server.queue) == 2)
    for thread in threads:
        thread.join()
    assert isinstance(results["bad"], Refused), results["bad"]
    assert results["good"].version == 1
    weights = server.compute.call(lambda: list(server.host.parameters("expert.0").values())).result(60)
    assert all(torch.isfinite(w).all() for w in weights)


def test_dead_server(serve):
    server, directory = serve(settings=QUICK)
    (expert,) = directory.get_experts(["expert.0"])
    expert(X)
    server.stop()
    with within(20), pytest.raises(ExpertGone):
        expert(X)


def test_hung_server(serve):
    server, directory = serve(dataclasses.replace(PATIENT, backward_timeout=0.5))
    (expert,) = directory.get_experts(["expert.0"])
    y = expert(X)
    directory.client.settings = dataclasses.replace(PATIENT, forward_timeout=0.5)
    with busy_device(server):
        with within(20), pytest.raises(CallTimeout):
            expert(X)
        with within(20), pytest.raises(CallTimeout):
            y.sum().backward()
    directory.client.settings = PATIENT
    assert works(directory)


def test_host_that_swallows_everything(ends):
    """A port that accepts and never says a word: info has a deadline too."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = Settings(info_timeout=0.5, forward_timeout=0.5, patience=0)
        expert = RemoteExpert("expert.0", endpoint, ends(Client(settings=settings)))
        with within(20), pytest.raises(RemoteError):  # CallTimeout, not just any TimeoutError
            expert.schema()
        with within(20), pytest.raises(RemoteError):
            expert(X)


def test_slow_replica_is_hedged(ends, serve):
    one, _ = serve()
    two, _ = serve()
    client = ends(Client(settings=dataclasses.replace(PATIENT, hedge_after=0.1)))
    expert = RemoteExpert("expert.0", (one.endpoint, two.endpoint), client)
    expert(X)
    with busy_device(one), within(20):
        y = expert(X)
    assert client.counts["hedges"] >= 1
    assert torch.isfinite(y).all()


def test_failures_beside_an_answer_are_read():
    """asyncio logged "Task exception was never retrieved" for each."""
    client, unread = Client(settings=dataclasses.replace(PATIENT, hedge_after=0.0)), []

    async def go():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))
        is_answered, never = asyncio.Event(), asyncio.Event()

        async def call(endpoint, method, data, timeout):
            if endpoint == "good:1":
                is_answered.set()
                return Message()
            try:
                await (is_answered if endpoint == "beside:1" else never).wait()
            finally:
                raise CallTimeout(f"{endpoint} is late")

        client.caller.call = call
        handle = client.handle("expert.0", ("beside:1", "cancelled:1", "good:1"))
        _, endpoint = await client._hedge(handle, protocol.INFO, b"", time.monotonic() + LONG)
        while len(asyncio.all_tasks()) > 1:  # the cancelled ones
            await asyncio.sleep(0)
        gc.collect()
        return endpoint

    assert asyncio.run(go()) == "good:1" and unread == []


def test_replica_that_lacks_an_acknowledged_update_is_not_believed(ends, serve):
    """A member that had left the replicas, but not the client's record, answered for a leader whose answer was lost."""
    leader, _ = serve()
    left_behind, _ = serve()
    client = ends(Client(settings=PATIENT))
    expert = RemoteExpert("expert.0", (leader.endpoint, left_behind.endpoint), client)
    expert(X).sum().backward()
    truth = RemoteExpert("expert.0", leader.endpoint, client)(X)
    deliver, lost = client.caller.call, []

    async def lose_one_answer(endpoint, *rest):
        answer = await deliver(endpoint, *rest)
        if endpoint == leader.endpoint and not lost:
            lost.append(endpoint)
            raise CallTimeout(f"the answer of {endpoint} was lost")
        return answer

    client.caller.call = lose_one_answer
    y = expert(X)
    assert lost and left_behind.metrics.count("calls_total", method="forward", code="OK") == 1
    assert torch.equal(y, truth)
    assert expert.handle.acknowledged == 1


def test_leader_that_lost_updates_is_believed(ends, serve):
    """All replicas died, and a checkpoint came back: what it has is the expert now, at followers too."""
    one, _ = serve()
    two, _ = serve()
    expert = RemoteExpert("expert.0", one.endpoint, ends(Client(settings=PATIENT)))
    before = expert(X)
    expert(X).sum().backward()
    expert.handle.record = ExpertRecord("expert.0", (two.endpoint,))
    assert torch.equal(expert(X), before)
    assert expert.handle.acknowledged == 0


def test_server_that_comes_back(ends, serve):
    server, _ = serve()
    endpoint = server.endpoint
    client = ends(Client(settings=dataclasses.replace(PATIENT, patience=LONG)))
    expert = RemoteExpert("expert.0", endpoint, client)
    expert(X)
    server.stop()
    timer = threading.Timer(0.5, lambda: serve(listen_on=endpoint))
    timer.start()
    try:
        with within(40):
            expert(X)
    finally:
        timer.join()


def test_port_busy(serve):
    server, _ = serve()
    with within(20), pytest.raises(OSError, match="port"):
        serve(listen_on=server.endpoint)


def test_two_servers_claim_one_uid(serve):
    _, directory = serve(expert_uids=("expert.0",))
    with within(20), pytest.raises(ValueError, match=r"other servers host expert\.0"):
        serve(discovery=directory.discovery, expert_uids=("expert.0", "expert.1"))
    serve(discovery=directory.discovery, expert_uids=("expert.1",))
    assert all(directory.get_experts(["expert.0", "expert.1"]))


def test_random_free_uids_of_a_pattern(serve):
    _, directory = serve(expert_uids=(), expert_pattern="expert.[0:5]", num_experts=3)
    other, _ = serve(
        discovery=directory.discovery, expert_uids=(), expert_pattern="expert.[0:5]", num_experts=2
    )
    assert all(directory.get_experts([f"expert.{n}" for n in range(5)]))
    assert len(other.host.experts) == 2
    with pytest.raises(ValueError, match="only 0 uids"):
        serve(discovery=directory.discovery, expert_uids=(), expert_pattern="expert.[0:5]", num_experts=1)


def test_queue_full(ends, serve):
    server, _ = serve(max_waiting=2)
    expert = RemoteExpert("expert.0", server.endpoint, ends(Client(settings=Settings(forward_timeout=4.0))))
    expert.schema()

    def fail():
        with pytest.raises(RemoteError):
            expert(X)

    with busy_device(server):
        threads = [threading.Thread(target=fail) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert server.metrics.count("calls_total", code="RESOURCE_EXHAUSTED") > 0
    assert len(server.queue) <= 2


def test_endpoint_that_was_given_outlives_a_failure(ends, serve):
    """After one failure the client asked its discovery alone, which knew no such expert."""
    server, _ = serve(settings=QUICK)
    client = ends(Client(StaticList(), QUICK))
    call, failures = client.caller.call, [Busy("once")]

    async def fail_once(*arguments):
        if failures:
            raise failures.pop()
        return await call(*arguments)

    client.caller.call = fail_once
    expert = RemoteExpert("expert.0", server.endpoint, client)
    assert expert(torch.randn(2, D)).shape == (2, D)
    assert failures == [] and client.counts["retries"] == 1


def test_queue_of_one_call_takes_it(serve):
    """Half of it, the share of a peer, was none: every call was Busy."""
    _, directory = serve(max_waiting=1)
    assert works(directory)


def test_stale_gradient(serve):
    server, directory = serve(settings=QUICK, training=Training("sgd", 0.1, max_staleness=1))
    (expert,) = directory.get_experts(["expert.0"])
    old = expert(X)
    for _ in range(2):
        expert(X).sum().backward()
    with within(20), pytest.raises(Refused, match="2 updates since"):
        old.sum().backward()
    assert server.host.experts["expert.0"].version == 2


def test_gradient_norm_is_capped(serve):
    server, directory = serve(training=Training("sgd", 1.0, max_grad_norm=0.5), expert_uids=("expert.0",))
    (expert,) = directory.get_experts(["expert.0"])
    read = lambda: [p.clone() for p in server.host.parameters("expert.0").values()]  # noqa: E731
    before = server.compute.call(read).result(60)
    (expert(X) * torch.randn(2, D) * 1e6).sum().backward()
    after = server.compute.call(read).result(60)
    moved = torch.stack([(a - b).norm() for a, b in zip(after, before, strict=True)]).norm()
    assert 0.49 < moved < 0.51


def test_repeated_request_steps_once(serve):
    server, _ = serve()
    data = call(meta={"id": "ab" * 16}, **{"0": X, "grad": G})
    first = send(server.endpoint, protocol.BACKWARD, data)
    again = send(server.endpoint, protocol.BACKWARD, data)
    assert server.host.experts["expert.0"].version == 1
    assert torch.equal(first.tensors["0"], again.tensors["0"])


def test_forked_child_is_refused_at_once(serve):
    """A DataLoader's worker, say: grpc's threads are not in it, and its calls would wait for ever."""
    _, directory = serve()
    (expert,) = directory.get_experts(["expert.0"])
    expert(torch.ones(1, D))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            expert(torch.ones(1, D))
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    assert text.startswith("this process was forked from one that had called remote experts"), text


def test_proxy_of_the_environment_is_named(ends, serve, monkeypatch):
    """ray-project/ray#6662: grpc sends calls of the next room to a proxy that knows nobody there."""
    monkeypatch.setenv("http_proxy", f"http://{ports.endpoint()}")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server, directory = serve(settings=QUICK)
    (expert,) = directory.get_experts(["expert.0"])
    with pytest.raises(ExpertGone, match=r"sends it to a proxy; set no_proxy=127\.0\.0\.1"):
        expert(torch.ones(1, D))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    expert = RemoteExpert("expert.0", server.endpoint, ends(Client(settings=PATIENT)))
    assert expert(torch.ones(1, D)).shape == (1, D)
