"""Messages: what is written is read back, by us and by safetensors; nothing that lies is believed."""

import asyncio
import json
import random
import struct
import types

import pytest
import safetensors.torch
import torch

from fmoe_ext.remote import CallTimeout, Client, Refused, RemoteExpert, Settings, Training, loop
from fmoe_ext.remote.client import caller
from fmoe_ext.remote.server.fair_queue import FairQueue, Job
from fmoe_ext.remote.wire import (
    DTYPES,
    STATE,
    ErrorFeedback,
    Limits,
    Message,
    WireError,
    body_bytes,
    compress,
    decode,
    decompress,
    encode,
    encode_parts,
)


def raw(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_survives(name):
    x = (torch.randn(3, 5) * 10).to(DTYPES[name])
    tensors = {"x": x, "none": x[:0], "scalar": x[0, 0], "strided": x.t()}
    back = decode(encode(Message(tensors, {"uid": "expert.1"})))
    assert back.meta == {"uid": "expert.1"}
    assert list(back.tensors) == list(tensors)
    for key, tensor in tensors.items():
        assert back.tensors[key].dtype == tensor.dtype
        assert torch.equal(back.tensors[key], tensor)


def test_layout_is_that_of_safetensors():
    tensors = {"b": torch.randn(7, 3), "a": torch.arange(4), "c": torch.ones(2).bool()}
    read = safetensors.torch.load(encode(Message(tensors, {"k": "v"})))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    ours = decode(safetensors.torch.save(tensors, {"k": "v"}))
    assert ours.meta == {"k": "v"}
    assert all(torch.equal(ours.tensors[name], tensor) for name, tensor in tensors.items())


LIES = {
    "empty": b"",
    "short": b"\0\0\0",
    "header longer than the message": struct.pack("<Q", 2**63) + b"{}",
    "header over the cap": raw(b" " * (40 << 10)),
    "no JSON": raw(b"\xff\xfe{"),
    "nested": raw(b"[" * 30_000),
    "a list": raw([1]),
    "unknown dtype": raw({"x": entry("Q128")}, bytes(4)),
    "dtype is a list": raw({"x": entry(["F32"])}, bytes(4)),
    "no offsets": raw({"x": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "negative size": raw({"x": entry(shape=(-1, -1))}, bytes(4)),
    "size is a float": raw({"x": entry(shape=(1.0,))}, bytes(4)),
    "size is true": raw({"x": entry(shape=(True,))}, bytes(4)),
    "product overflows": raw({"x": entry(shape=(2**33, 2**33), offsets=(0, 4))}, bytes(4)),
    "shape larger than data": raw({"x": entry(shape=(2,))}, bytes(4)),
    "data beyond the end": raw({"x": entry(shape=(2,), offsets=(0, 8))}, bytes(4)),
    "overlap": raw({"x": entry(), "y": entry()}, bytes(4)),
    "gap": raw({"x": entry(offsets=(4, 8))}, bytes(8)),
    "bytes left over": raw({"x": entry()}, bytes(8)),
    "too many dimensions": raw({"x": entry(shape=(1,) * 9)}, bytes(4)),
    "too many tensors": raw({str(n): entry(shape=(0,), offsets=(0, 0)) for n in range(99)}),
    "metadata is a list": raw({"__metadata__": ["x"]}),
    "metadata holds a number": raw({"__metadata__": {"x": 1}}),
    "metadata is long": raw({"__metadata__": {"x": "x" * 5000}}),
    "infinite size": raw(b'{"x":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}', bytes(4)),
    "product of a size of 0 overflows": raw({"x": entry(shape=(0, 2**39, 2**39), offsets=(0, 0))}),
    "name is half a surrogate pair": raw(b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    "metadata is half a surrogate pair": raw(b'{"__metadata__":{"x":"\\ud800"}}'),
    "huge number": raw(b'{"x":{"dtype":"F32","shape":[' + b"9" * 9000 + b'],"data_offsets":[0,4]}}'),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_lies_are_refused(data):
    with pytest.raises(WireError):
        decode(data)


def test_message_over_the_cap_is_refused_before_it_is_read():
    with pytest.raises(WireError, match="100 bytes"):
        decode(bytes(101), Limits(max_message_bytes=100))


def test_fuzzed_messages_are_read_or_refused():
    """10,000 messages with bytes changed, cut, doubled: a Message or a WireError, and nothing else."""
    rng = random.Random(0)
    tensors = {"x": torch.randn(4, 3), "n": torch.arange(3), "b": torch.tensor([True, False])}
    good = encode(Message(tensors, {"uid": "expert.1", "id": "00"}))
    refused = 0
    for _ in range(10_000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            kind, place = rng.randrange(4), rng.randrange(len(data) or 1)
            if kind == 0 and data:
                data[place] = rng.randrange(256)
            elif kind == 1:
                del data[place:]
            elif kind == 2:
                data[place:place] = rng.randbytes(rng.randint(1, 16))
            else:
                data[place:place] = data[: rng.randrange(32)]
        try:
            decompress(decode(bytes(data)))
        except WireError:
            refused += 1
    assert 5_000 < refused < 10_000


@pytest.mark.parametrize(
    ("codec", "ratio", "error"), [("none", 1, 0), ("bf16", 0.5, 2**-8), ("int8", 0.27, 1 / 254)]
)
def test_compression_bounds(codec, ratio, error):
    x = torch.randn(64, 512, dtype=torch.float32)
    plain = len(encode(Message({"x": x})))
    data = encode(compress({"x": x, "n": torch.arange(3)}, codec, {"uid": "e.0"}))
    back = decompress(decode(data))
    assert list(back) == ["x", "n"]
    assert back["x"].dtype == torch.float32
    assert (back["x"] - x).abs().max() <= error * x.abs().amax() * 1.01
    assert len(data) < ratio * plain + 500


def test_compression_keeps_zero_rows_and_no_rows():
    zeros = decompress(compress({"x": torch.zeros(2, 3), "e": torch.zeros(0, 3)}, "int8", {}))
    assert torch.equal(zeros["x"], torch.zeros(2, 3))
    assert zeros["e"].shape == (0, 3)


@pytest.mark.parametrize("broken", ["missing", "shape", "dtype", "wide"])
def test_broken_scales_are_refused(broken):
    message = compress({"x": torch.randn(2, 3)}, "int8", {})
    tensors, meta = dict(message.tensors), dict(message.meta)
    if broken == "missing":
        del tensors["x:scale"]
    elif broken == "shape":
        tensors["x:scale"] = torch.ones(3, 1)
    elif broken == "wide":  # the product in float64 would take twice what is counted
        tensors["x:scale"] = tensors["x:scale"].double()
    else:
        meta["x:dtype"] = "I64"
    with pytest.raises(WireError):
        decompress(Message(tensors, meta))


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_error_feedback_keeps_the_sum(codec):
    """Without it, errors of 200 messages add up; with it, the sum is off by one message's error."""
    torch.manual_seed(0)
    feedback, off = ErrorFeedback(codec), {}
    batches = [torch.randn(1 + n % 5, 8) + 0.001 for n in range(200)]
    truth = sum(batch.double().sum(0) for batch in batches)
    for name, send in (("with", feedback.compress), ("without", lambda t, meta: compress(t, codec, meta))):
        sent = [decompress(send({"g": batch}, {}))["g"].double().sum(0) for batch in batches]
        off[name] = (sum(sent) - truth).abs().max()
    assert off["with"] < 0.05
    assert off["without"] > 2 * off["with"]


@pytest.mark.parametrize("codec", ["bf16", "int8"])
@pytest.mark.parametrize("overflow", [torch.inf, torch.nan])
def test_error_feedback_outlives_a_gradient_that_overflows(codec, overflow):
    """As loss scaling makes one now and then (deepspeedai/DeepSpeed#753)."""
    grad, expected, feedback = torch.randn(4, 8), ErrorFeedback(codec), ErrorFeedback(codec)
    for one in (feedback, expected):
        one.compress({"g": grad}, {})
    spoiled = grad.clone()
    spoiled[2, 3] = overflow
    feedback.compress({"g": spoiled}, {})
    results = [decompress(one.compress({"g": grad}, {}))["g"] for one in (feedback, expected)]
    assert results[0].isfinite().all() and torch.equal(*results)


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1 << 20])
def test_parts_of_a_message_are_its_bytes(part_bytes):
    tensors = {
        "a": torch.randn(5, 3).t(),
        "none": torch.empty(0, 3),
        "b": torch.arange(3),
        "c": torch.tensor(True),
    }
    message = Message(tensors, {"uid": "expert.0"})
    parts = list(encode_parts(message, part_bytes))
    assert b"".join(parts) == encode(message)
    assert max(map(len, parts)) <= part_bytes
    back = decode(bytearray(b"".join(parts)))
    assert all(torch.equal(back.tensors[name], x) for name, x in tensors.items())


def test_state_larger_than_a_message_travels_in_parts(ends, serve):
    """A state passed through the cap on messages: an expert larger than it could not be copied."""
    options = {"hidden_dim": 64, "expert_uids": ("expert.0",), "training": Training("adam")}
    server, directory = serve(max_message_bytes=64 << 10, **options)
    (expert,) = directory.get_experts(["expert.0"])
    expert(torch.randn(4, 64)).sum().backward()
    state = loop.run(directory.client.state(expert.handle, server.endpoint, 60), 12)
    weights = server.host.parameters("expert.0")
    assert sum(x.numel() * x.element_size() for x in state.tensors.values()) > 6 * (64 << 10)
    assert all(torch.equal(state.tensors[f"weight/{name}"], p) for name, p in weights.items())
    assert state.meta["version"] == "1"
    assert server.metrics.count("calls_total", method="state", code="OK") == 1
    small = ends(Client(settings=Settings(max_state_bytes=1000)))
    with pytest.raises(Refused, match="sent more than the 1000 bytes that are accepted"):
        loop.run(small.state(expert.handle, server.endpoint, 60), 12)


def test_copy_that_stops_names_what_came_and_the_time_it_waited(monkeypatch):
    """The error named the timeout of the whole copy, which had not passed."""
    parts = [b"abc"]

    async def read():
        return parts.pop() if parts else await asyncio.Event().wait()

    stream = types.SimpleNamespace(read=read)
    channel = types.SimpleNamespace(unary_stream=lambda method: lambda data, **options: stream)
    ours = caller.Caller()
    monkeypatch.setattr(caller, "PART_SECONDS", 0.05)
    monkeypatch.setattr(ours, "_channel", lambda endpoint: channel)
    with pytest.raises(CallTimeout, match=r"h:1 stopped after 3 bytes: no more came within 0\.05 s"):
        asyncio.run(ours.download("h:1", "/state", b"", 60.0))


@pytest.mark.parametrize("num_inputs", [1, 3])
def test_batch_of_gradients_fits_in_an_update_that_followers_accept(num_inputs):
    """2,048 requests of one row made an update of 4,097 tensors, which every follower refused."""
    queue = FairQueue(max_waiting=4096, max_of_peer=4096)
    x = torch.ones(1, 4)
    for n in range(2048):
        queue.put(Job("expert.0", (x,) * num_inputs, lambda _: None, x, f"{n:032x}"))
    batches = []
    while len(queue):
        batches.append(queue.take())
    for batch in batches:
        tensors = {f"{n}/{i}": y for n, job in enumerate(batch) for i, y in enumerate(job.tensors)}
        ids = torch.zeros(16 * len(batch), dtype=torch.uint8)
        decode(encode(Message({"ids": ids, **tensors}, {"uid": "expert.0"})), STATE)
    assert sum(map(len, batches)) == 2048
    assert len(batches) <= 1 + num_inputs


def test_batch_of_gradients_fits_in_a_message():
    cap = 1 << 20
    queue = FairQueue(max_batch_bytes=body_bytes(cap))
    x = torch.ones(8, 1000)  # 32,000 bytes, and as many for the gradient
    for n in range(40):
        queue.put(Job("expert.0", (x,), lambda _: None, x, f"{n:032x}"))
    while len(queue):
        batch = queue.take()
        tensors = {f"{n}/{i}": y for n, job in enumerate(batch) for i, y in enumerate(job.tensors)}
        assert len(encode(Message(tensors))) <= cap


def test_gradient_that_unpacks_beyond_a_message_is_refused(serve):
    """Compressed to a quarter it came in, and no message to a follower could hold it."""
    _, directory = serve(Settings(compression="int8"), max_message_bytes=64 << 10)
    (expert,) = directory.get_experts(["expert.0"])
    x = torch.randn(400, 16)  # 400 * 16 * 4 bytes, twice, against 32 KiB
    y = expert(x)
    with pytest.raises(Refused, match="hold 51200 bytes, at most 32768 are taken"):
        y.sum().backward()


def test_rows_of_a_call_are_bounded_by_the_server(serve):
    server, directory = serve(max_rows=8)
    (expert,) = directory.get_experts(["expert.0"])
    assert expert(torch.ones(8, 16)).shape == (8, 16)
    with pytest.raises(Refused, match=r"may have 8 rows \(--max_rows of the server\), but got 9"):
        expert(torch.ones(9, 16))


def test_rows_of_a_call_are_bounded_by_bytes_where_no_number_is_given(serve):
    """hivemind's calls of 2^21 rows pass; an output that fits in no message is refused before it is computed."""
    server, _ = serve(expert_cls="nop", hidden_dim=1)
    nop = RemoteExpert("expert.0", server.endpoint)
    assert nop(torch.zeros(1 << 21, 1)).shape == (1 << 21, 1)
    few, _ = serve(expert_cls="nop", hidden_dim=1, max_message_bytes=64 << 10)
    with pytest.raises(
        Refused, match=r"for 8193 rows would be 32772 bytes, but the server sends at most 32768 "
    ):
        RemoteExpert("expert.0", few.endpoint)(torch.zeros(8193, 1))
