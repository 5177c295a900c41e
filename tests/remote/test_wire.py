"""Messages: what is written is read back, by us and by safetensors; nothing that lies is believed."""

import json
import random
import struct

import pytest
import safetensors.torch
import torch

from fmoe_ext.remote.compression import ErrorFeedback, compress, decompress
from fmoe_ext.remote.wire import DTYPES, Limits, Message, WireError, decode, encode


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


@pytest.mark.parametrize("broken", ["missing", "shape", "dtype"])
def test_broken_scales_are_refused(broken):
    message = compress({"x": torch.randn(2, 3)}, "int8", {})
    tensors, meta = dict(message.tensors), dict(message.meta)
    if broken == "missing":
        del tensors["x:scale"]
    elif broken == "shape":
        tensors["x:scale"] = torch.ones(3, 1)
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
