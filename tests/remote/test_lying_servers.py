"""Servers that lie: every failure of a client is a RemoteError, and a tolerant mixture goes on without them."""

import contextlib
import json
import struct
import threading

import grpc
import pytest
import torch

from fmoe_ext.remote import (
    Client,
    ExpertGone,
    RemoteError,
    RemoteExpert,
    RemoteExperts,
    RemoteMixtureOfExperts,
    SchemaError,
    StaticList,
    loop,
    protocol,
)
from fmoe_ext.remote.wire import Message, encode
from tests import ports
from tests.remote.conftest import QUICK, within

D = 16


@contextlib.contextmanager
def busy_device(server):
    """The thread that computes is stuck."""
    go_on = threading.Event()
    server.compute.call(go_on.wait)
    yield
    go_on.set()


SCHEMA = f'[[["F32", [{D}]]], ["F32", [{D}]], [], []]'


def info(schema=SCHEMA, hidden_dim=str(D), **meta):
    return encode(
        Message({}, {"schema": schema, "hidden_dim": hidden_dim, "class": "ffn", "version": "1", **meta})
    )


def reply(version="1", meta=None, **tensors):
    return encode(Message(tensors, {"version": version, **(meta or {})}))


def raw(header, body=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + body


ROWS = torch.ones(4, D)
INFO_LIES = {
    "infinite size": info('[[["F32", [1e999]]], ["F32", [16]], [], []]'),
    "float size": info('[[["F32", [16.0]]], ["F32", [16]], [], []]'),
    "negative size": info('[[["F32", [-1]]], ["F32", [16]], [], []]'),
    "size of many digits": info(f'[[["F32", [{"9" * 3000}]]], ["F32", [16]], [], []]'),
    "list as dtype": info('[[[["F32"], [16]]], ["F32", [16]], [], []]'),
    "unknown dtype": info('[[["Q7", [16]]], ["F32", [16]], [], []]'),
    "schema is a number": info("3"),
    "schema is empty": info(""),
    "nested schema": info("[" * 4000),
    "parts that do not add up": info('[[["F32", [16]]], ["F32", [16]], [], [[3]]]'),
    "part without a size": info('[[["F32", [16]]], ["F32", [0]], [], [[0]]]'),
    "parts without a size": info('[[["F32", [16]]], ["F32", [16]], [], [[16], [16, 0]]]'),
    "keywords that are numbers": info('[[["F32", [16]]], ["F32", [16]], [3], []]'),
    "width is no number": info(hidden_dim="x"),
    "other width": info('[[["F32", [7]]], ["F32", [7]], [], []]'),
    "no bytes": b"",
    "garbage": b"\xff" * 64,
    "lone surrogate": raw(b'{"__metadata__": {"\\ud800": "x"}}'),
}
FORWARD_LIES = {
    "overflowing shape": raw({"0": {"dtype": "F32", "shape": [0, 2**39, 2**39], "data_offsets": [0, 0]}}),
    "no output": reply(),
    "two outputs": reply(**{"0": ROWS, "1": ROWS}),
    "other rows": reply(**{"0": ROWS[:3]}),
    "other width": reply(**{"0": ROWS[:, :3]}),
    "other dtype": reply(**{"0": ROWS.double()}),
    "scalar": reply(**{"0": torch.tensor(1.0)}),
    "NaN": reply(**{"0": ROWS * float("nan")}),
    "no version": reply("", **{"0": ROWS}),
    "version of many digits": reply("9" * 4000, **{"0": ROWS}),
    "version in other digits": reply("\u00b2", **{"0": ROWS}),
    "compressed from an integer": reply(meta={"0:dtype": "I64"}, **{"0": ROWS}),
    "int8 without scale": reply(meta={"0:dtype": "F32"}, **{"0": ROWS.to(torch.int8)}),
    "integer scale": reply(
        meta={"0:dtype": "F32"}, **{"0": ROWS.to(torch.int8), "0:scale": torch.ones(4, 1).int()}
    ),
    "metadata is a list": raw({"__metadata__": []}),
    "header of zeros": struct.pack("<Q", 0),
}
BACKWARD_LIES = {
    "NaN": reply(**{"0": ROWS * float("nan")}),
    "infinity": reply(**{"0": ROWS * float("inf")}),
    "int64": reply(**{"0": ROWS.long()}),
    "float64": reply(**{"0": ROWS.double()}),
    "float16": reply(**{"0": ROWS.half()}),
    "other rows": reply(**{"0": ROWS[:2]}),
    "nothing": reply(),
    "too many": reply(**{"0": ROWS, "1": ROWS}),
    "no version": reply("x", **{"0": ROWS}),
    "overflowing shape": raw({"0": {"dtype": "F32", "shape": [2**39, 0, 2**39], "data_offsets": [0, 0]}}),
}
LIES = [
    *(pytest.param("Info", data, id=f"info: {name}") for name, data in INFO_LIES.items()),
    *(pytest.param("Forward", data, id=f"forward: {name}") for name, data in FORWARD_LIES.items()),
    *(pytest.param("Backward", data, id=f"backward: {name}") for name, data in BACKWARD_LIES.items()),
]


class LyingServer:
    """Answers every call with fixed bytes; honest ones except for lies {method: bytes}."""

    def __init__(self, **lies):
        self.answers = {
            "Info": info(),
            "Forward": reply(**{"0": ROWS}),
            "Backward": reply(**{"0": ROWS}),
            **lies,
        }
        self.endpoint = f"127.0.0.1:{loop.run(self._start(), 60)}"

    async def _start(self):
        self.server = grpc.aio.server()
        methods = {name: grpc.unary_unary_rpc_method_handler(self._method(name)) for name in self.answers}
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(protocol.SERVICE, methods),)
        )
        port = self.server.add_insecure_port(ports.endpoint())
        await self.server.start()
        return port

    def _method(self, name):
        async def method(data, context):
            return self.answers[name]

        return method

    def stop(self):
        loop.run(self.server.stop(None), 60)


@pytest.fixture
def lying(ends):
    return lambda **lies: ends(LyingServer(**lies))


def test_honest_answers_of_the_lying_server_pass(ends, lying):
    expert = RemoteExpert("expert.0", lying().endpoint, ends(Client(settings=QUICK)))
    x = torch.zeros(4, D, requires_grad=True)
    y = expert(x)
    y.sum().backward()
    assert torch.equal(y, ROWS) and torch.equal(x.grad, ROWS)


@pytest.mark.parametrize(("method", "data"), LIES)
def test_every_lie_of_a_server_is_a_remote_error(ends, lying, method, data):
    """RuntimeError, OverflowError and WireError came through as they were; bad gradients were taken."""
    server = lying(**{method: data})
    expert = RemoteExpert("expert.0", server.endpoint, ends(Client(settings=QUICK)))
    x = torch.zeros(4, D, requires_grad=True)
    believable = data is INFO_LIES["other width"]  # then the input does not fit, and is not sent
    with within(20), pytest.raises(SchemaError if believable else RemoteError):
        expert(x).sum().backward()
    assert x.grad is None


@pytest.mark.parametrize(("method", "data"), LIES)
def test_mixture_survives_every_lying_server(serve, lying, method, data):
    server, _ = serve(expert_uids=("expert.0",))
    liar = lying(**{method: data})
    directory = StaticList({"expert.0": server.endpoint, "expert.1": liar.endpoint})
    moe = RemoteMixtureOfExperts(
        D, (2,), directory, "expert", k_best=2, forward_timeout=30, backward_timeout=30
    )
    x = torch.zeros(4, D, requires_grad=True)
    y = moe(x)
    y.sum().backward()
    assert y.shape == (4, D) and torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    assert server.host.experts["expert.0"].version == 1


def test_output_of_another_width_is_refused_by_mixture_and_layer(ends, serve, lying):
    """A schema of its own let a server return rows that did not fit those of the others."""
    one, _ = serve(expert_uids=("expert.0",))
    two, _ = serve(expert_uids=("expert.2",))
    wide = info('[[["F32", [16]]], ["F32", [3]], [], []]')
    liar = lying(Info=wide, Forward=reply(**{"0": ROWS[:, :3]}))
    where = {"expert.0": one.endpoint, "expert.1": liar.endpoint, "expert.2": two.endpoint}
    moe = RemoteMixtureOfExperts(D, (3,), StaticList(where), "expert", k_best=3, forward_timeout=30)
    assert moe(torch.zeros(4, D)).shape == (4, D)
    client = ends(Client(settings=QUICK))
    layer = RemoteExperts([RemoteExpert(uid, at, client) for uid, at in list(where.items())[:2]])
    y = layer(torch.ones(8, D), torch.tensor([4, 4]))
    assert y.shape == (8, D) and (y[4:] == 0).all() and (y[:4] != 0).any()
    assert "expert.1 returned rows of torch.float32 [3]" in layer.last_failed["expert.1"]


def test_too_few_experts_are_named_with_their_reasons(lying):
    """The error said "answered within 60 s" after an instant failure."""
    liar = lying(Forward=reply(**{"0": ROWS * float("nan")}))
    directory = StaticList({"expert.0": liar.endpoint})
    moe = RemoteMixtureOfExperts(D, (1,), directory, "expert", k_best=1, forward_timeout=60)
    with within(20), pytest.raises(ExpertGone) as raised:
        moe(torch.zeros(4, D))
    assert "0 of 1 experts of expert answered for some sample, but k_min=1 are needed; " in str(raised.value)
    assert "expert.0: " in str(raised.value) and "holds NaN or infinity" in str(raised.value)
    assert "60 s" not in str(raised.value)
    nobody = RemoteMixtureOfExperts(D, (1,), StaticList(), "expert", k_best=1)
    with pytest.raises(ExpertGone, match="discovery names no live expert below expert"):
        nobody(torch.zeros(4, D))


def test_timeout_after_k_min_leaves_the_slow_experts_behind(serve):
    """hivemind's timeout_after_k_min: the rest has so many seconds once k_min experts have answered every sample."""
    discovery = StaticList()
    quick, _ = serve(discovery=discovery, expert_uids=("expert.0",))
    slow, _ = serve(discovery=discovery, expert_uids=("expert.1",))
    options = {"k_best": 2, "forward_timeout": 60, "backward_timeout": 60, "timeout_after_k_min": 0.1}
    moe = RemoteMixtureOfExperts(D, (2,), discovery, "expert", **options)
    moe(torch.randn(4, D))  # schemas are known now
    with within(20), busy_device(slow):
        y = moe(torch.randn(4, D))
        assert moe.client.counts["failures"] == 0
    assert torch.isfinite(y).all()
    y = moe(torch.randn(4, D))
    with within(20), busy_device(slow):
        y.sum().backward()
    assert quick.host.experts["expert.0"].version == 1
    assert moe.client.counts["gradients lost"] == 1
