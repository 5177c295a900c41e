"""Work on CPU tensors under another default device (test_layering.py: every call names the device that it means)."""

import functools

import pytest
import torch
from torch import nn

import fmoe_ext
from fmoe_ext import FMoE, FMoETransformerMLP, balance, checkpoint, doctor, fmoefy, frozen, gates
from fmoe_ext.balance.page import render
from fmoe_ext.balance.report import summarize_logs
from fmoe_ext.compat.fairscale import DeferredBatchNorm
from fmoe_ext.frozen import rounding
from fmoe_ext.optim import Muon
from fmoe_ext.pipeline import split
from fmoe_ext.planning import placement
from fmoe_ext.planning.simulate import draw_loads
from fmoe_ext.remote import StaticList, Training, loop
from fmoe_ext.remote.beam_search import beam_search
from fmoe_ext.remote.expert_classes import find_expert_class
from fmoe_ext.remote.server.fair_queue import Job
from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.state import read_state, write_state
from fmoe_ext.remote.wire import Message, decode, encode
from tests.default_device import assert_same_under_default, default_device, files, ids, tokens

D, H, E, T = 8, 12, 4, 10


def step(model, *inputs):
    """Output, the gates' losses and all gradients."""
    y = model(*inputs)
    loss = y.double().square().mean() + gates.total_loss(model)
    loss.backward()
    return y.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def layer(gate="softmax", **options):
    return FMoETransformerMLP(E, D, H, gate=gate, **options)


@pytest.mark.parametrize("gate", gates.GATES)
def test_gate(gate, tmp_path):
    def prepare(_):
        model, x = layer(gate), tokens(T, D)

        def run():
            found = step(model, x), step(model, x)
            gates.update_biases(model)
            return found, model

        return run

    assert_same_under_default(prepare, tmp_path)


@pytest.mark.parametrize("gate", gates.GATES)
def test_constructor_follows_the_default_device(gate):
    with default_device("meta"):
        model = layer(gate, shared_expert_hidden=5, latent_size=4)
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} <= {"meta"}


def shared_experts(_):
    model, x = layer(shared_expert_hidden=5, shared_expert_gate=True, activation="swiglu"), tokens(T, D)
    valid = torch.arange(T) % 3 > 0

    def run():
        with fmoe_ext.valid_tokens(valid):
            padded = step(model, x)
        with fmoe_ext.packed_sequences(torch.tensor([0, 4, T], device="cpu")):
            return padded, step(model, x)

    return run


def functions_of_rows(_):
    model, x = FMoE(E, D, expert=lambda d: nn.Linear(d, d)), tokens(T, D)
    return lambda: (step(model, x), model.expert_fn(x, torch.tensor([T, 0, 0, 0], device="cpu")))


def recomputed(_):
    model, x = layer("noisy"), tokens(T, D).requires_grad_()
    run = functools.partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)

    def both():
        y = run(x)
        y.sum().backward()
        return y.detach(), x.grad

    return both


def hashed(_):
    model, x, numbers = layer(functools.partial(gates.HashGate, vocab_size=61)), tokens(T, D), ids(T)

    def run():
        with fmoe_ext.token_ids(numbers):
            return step(model, x)

    return run


def muon(_):
    model, x = layer(), tokens(T, D)
    optimizer = Muon([p for p in model.parameters() if p.dim() > 1], lr=0.1)

    def run():
        found = step(model, x)
        optimizer.step()
        return found, model

    return run


def telemetry(folder):
    model, x = nn.Sequential(layer(), layer("switch")), tokens(T, D)

    def run():
        monitor = balance.watch(model)
        with balance.log_choices(model, folder / "log") as log:
            for number in range(3):
                model(x)
                log.end_step(number, torch.arange(T, device="cpu"))
            load = monitor.collect(step=2)
        page = render(summarize_logs([folder / "log"]), {3: "a"})
        return load, [record.topk_idx for record in balance.read_log(folder / "log")[1]], page

    return run


def replay(_):
    model, x = nn.Sequential(layer(), layer()), tokens(T, D)
    valid = torch.ones(2, 5, dtype=torch.bool)

    def run():
        recorded = balance.RoutingReplay(model)
        with recorded.record():
            y = model(x)
        found = balance.routed_experts(recorded, valid)
        text = [balance.encode_routed_experts(part) for part in found]
        given = [balance.decode_routed_experts(part, 2, 2) for part in text]
        balance.load_routed_experts(recorded, given, valid)
        with recorded.play():
            again = model(x)
        return found, text, y.detach(), again.detach()

    return run


def saved_and_loaded(folder):
    model, other, x = layer("sigmoid"), layer("sigmoid"), tokens(T, D)
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, other)]

    def run():
        step(model, x)
        optimizers[0].step()
        checkpoint.save(folder / "saved", model, optimizers[0])
        checkpoint.load(folder / "saved", other, optimizers[1])
        return files(folder / "saved"), other, optimizers[1].state_dict()

    return run


def planned(_):
    def run():
        loads = draw_loads(3, E, 100, 1.0)
        return loads, placement.plan(loads[0], 2)

    return run


def pipelined(_):
    layers, x = nn.Sequential(layer(), nn.Linear(D, D), layer()), tokens(T, D)
    norm = DeferredBatchNorm(nn.BatchNorm1d(D), chunks=2)

    def run():
        monitor = balance.watch(layers)
        norm(x), norm(layers(x).detach())
        load = {name: found["tokens_per_expert"] for name, found in monitor.collect(step=0)["layers"].items()}
        return sum(len(s.layers) for s in split(layers, 2, x, by="load", load=load)), norm

    return run


def plain_transformer(_):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, H, dropout=0.0, batch_first=True), 1)
    x = tokens(2, 5, D)
    return lambda: (changed := fmoefy(model, num_experts=E), step(changed, x))


def quantized(_):
    weight = tokens(1, 32, 256)

    def run():
        found = []
        for name in ("mxfp4", "int4", "q4_k", "mxfp8", "nvfp4"):
            packed = frozen.quantize(weight, name)
            found.append(packed.dequantize())
            if name in rounding.ROUNDED:
                better, counts = rounding.round_packed(packed, weight[0], rounding.shrunk_moments(weight[0]))
                found.append((better.dequantize(), counts))
        found.append(rounding.shrunk_moments(weight[0][:0]))
        return found

    return run


def examined(_):
    from tests.doctor.museum import subject

    model = subject()
    return lambda: [repr(finding) for finding in doctor.check(model).findings]


def hosted(_):
    x, grad = tokens(3, 64), tokens(3, 64, seed=1)

    def run():
        found = []
        for name in ("ffn", "nop", "transformer"):
            host = ExpertHost(find_expert_class(name), 64, Training("adam", 0.01))
            host.add(["expert.0", "expert.1"])
            if name == "ffn":
                host.run([Job("expert.0", (x,), found.append, grad, f"{1:032x}")])
            state = decode(encode(read_state(host, "expert.0")))
            write_state(host, state)
            found.append(read_state(host, "expert.0").tensors)
        return [getattr(part, "tensors", part) for part in found]

    return run


def messages(_):
    tensors = {"x": tokens(3, 4), "none": tokens(0, 4), "mask": tokens(3) > 0}
    directory = StaticList({f"cube.{i}.{j}": "a:1" for i in range(3) for j in range(3)})

    def run():
        found = loop.run(beam_search(directory, "cube", [tensors["x"][:, :3]] * 2, 4), 60)
        return decode(encode(Message(tensors, {"uid": "a"}))).tensors, found.topk_idx

    return run


CASES = (
    *(shared_experts, functions_of_rows, recomputed, hashed, muon, telemetry, replay, saved_and_loaded),
    *(planned, pipelined, plain_transformer, quantized, examined, hosted, messages),
)


@pytest.mark.parametrize("prepare", CASES, ids=lambda case: case.__name__)
def test_same_values(prepare, tmp_path):
    assert_same_under_default(prepare, tmp_path)
