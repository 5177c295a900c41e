"""PEFT itself on FMoE layers, against the same adapters on plain PyTorch modules."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fmoe_ext import FMoETransformerMLP
from fmoe_ext.checkpoint import CheckpointError, to_huggingface
from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.gates import QuantileGate, SigmoidGate, SoftmaxGate, total_loss
from tests.huggingface.huggingface_models import make_ids, make_model

peft = pytest.importorskip("peft")

T, E, K, D, H, R = 19, 4, 2, 6, 5, 2
EXPERTS = ["experts.htoh4.weight", "experts.h4toh.weight"]


class PlainStack(nn.Module):
    """FMoELinear as a loop."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, rows, counts):
        parts = zip(rows.split(counts.tolist()), self.weight, self.bias, strict=True)
        return torch.cat([F.linear(*part) for part in parts])


class PlainMoE(nn.Module):
    """FMoETransformerMLP(activation="swiglu") and its softmax gate in plain PyTorch, under the same names."""

    def __init__(self, layer):
        super().__init__()
        self.gate, self.experts = nn.Module(), nn.Module()
        self.gate.gate = nn.Linear(D, E)
        self.gate.gate.load_state_dict(layer.gate.gate.state_dict())
        self.experts.htoh4 = PlainStack(copy.deepcopy(layer.experts.htoh4))
        self.experts.h4toh = PlainStack(copy.deepcopy(layer.experts.h4toh))

    def forward(self, x):
        weights, topk_idx = self.gate.gate(x).topk(K)
        order = topk_idx.flatten().argsort(stable=True)
        counts = topk_idx.flatten().bincount(minlength=E)
        gate, up = self.experts.htoh4(x[order // K], counts).chunk(2, -1)
        rows = self.experts.h4toh(F.silu(gate) * up, counts)
        rows = rows * weights.softmax(-1).flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // K, rows)


class Model(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp
        self.head = nn.Linear(D, 3)

    def forward(self, x):
        return self.head(self.mlp(x))


def make_layer():
    return FMoETransformerMLP(E, D, H, "swiglu", top_k=K, gate=SoftmaxGate)


def make_both():
    """The same model with our layer and with the plain one."""
    torch.manual_seed(0)
    ours = Model(make_layer())
    plain = Model(PlainMoE(ours.mlp))
    plain.head.load_state_dict(ours.head.state_dict())
    return ours.double(), plain.double()


def tokens():
    return torch.randn(T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model):
    x = tokens().requires_grad_()
    out = model(x)
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return {"out": out.detach(), "x": x.grad, **gradients}


def assert_same(ours, plain):
    assert ours.keys() == plain.keys()
    for name, expected in plain.items():
        assert expected.norm() > 0, name
        assert (ours[name] - expected).norm() <= 1e-12 * expected.norm(), name


def with_adapters(model, **targets):
    """Adapters drawn by PEFT as if trained, not with zeros that would hide them."""
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(r=R, init_lora_weights=False, **targets))


TARGETS = {
    "experts": {"target_modules": [], "target_parameters": EXPERTS},
    "one of the experts' weights": {"target_modules": [], "target_parameters": EXPERTS[1:]},
    "router": {"target_modules": ["gate.gate"]},
    "all": {"target_modules": ["gate.gate", "head"], "target_parameters": EXPERTS},
    "all-linear": {"target_modules": "all-linear"},
    "experts copied": {"target_modules": ["head"], "modules_to_save": ["htoh4", "h4toh"]},
    "router copied": {"target_modules": ["head"], "modules_to_save": ["mlp.gate"]},
    "layer copied": {"target_modules": ["head"], "modules_to_save": ["mlp"]},
    "experts and a copied head": {
        **{"target_modules": ["gate.gate"], "target_parameters": EXPERTS},
        "modules_to_save": ["head"],
    },
}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_adapters_equal_those_on_plain_modules(targets):
    ours, plain = make_both()
    before = ours(tokens()).detach()
    ours, plain = with_adapters(ours, **targets), with_adapters(plain, **targets)
    adapted = step(plain)
    assert_same(step(ours), adapted)
    expected = adapted["out"]
    adapts = any(k.startswith("base_model") and "lora" in k for k in adapted)
    assert adapts and not torch.allclose(expected, before)

    with ours.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(ours(tokens()), before, rtol=1e-12, atol=1e-14)
    ours.merge_adapter()
    torch.testing.assert_close(ours(tokens()), expected, rtol=1e-12, atol=1e-14)
    ours.unmerge_adapter()
    assert_same(step(ours), adapted)
    merged = ours.merge_and_unload()
    torch.testing.assert_close(merged(tokens()), expected, rtol=1e-12, atol=1e-14)
    assert not merged.mlp.experts.must_be_called  # the fused operator again
    assert {*merged.state_dict()} == {*Model(make_layer()).state_dict()}


def test_saved_adapters_load(tmp_path):
    model = with_adapters(make_both()[0], **TARGETS["experts and a copied head"])
    expected = model(tokens()).detach()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make_both()[0], tmp_path)
    assert torch.equal(loaded(tokens()), expected)


@pytest.mark.parametrize("targets", ["router", "router copied", "layer copied"])
def test_balance_loss_trains_adapters_of_the_gate(targets):
    model = with_adapters(make_both()[0], **TARGETS[targets])
    model(tokens())
    total_loss(model).backward()
    gradients = [p.grad for name, p in model.named_parameters() if "gate" in name and p.requires_grad]
    assert gradients and all(grad is not None and grad.norm() > 0 for grad in gradients)


def test_experts_as_target_modules_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Target module FMoELinear\(.*is not supported"):
        with_adapters(make_both()[0], target_modules=["htoh4"])


def test_export_with_adapters_says_to_merge_them():
    model = with_adapters(make_both()[0], **TARGETS["experts and a copied head"])
    with pytest.raises(CheckpointError, match=r"merge the adapters first, by model\.merge_and_unload\(\)"):
        to_huggingface(model, "mixtral")


def part_of(name, value, rank):
    """Part of the parameter of one process on a rank; PEFT keeps the experts of lora_B innermost."""
    if ".experts." not in name:
        return value
    if "lora_B" in name:
        return value.unflatten(1, (R, E)).chunk(2, 2)[rank].flatten(1)
    return value.chunk(2)[rank]


def train_expert_parallel(targets, file):
    """A step of a rank with half of the experts, each with its own adapters -> {name: gradient}."""
    rank, full = dist.get_rank(), torch.load(file)
    layer = FMoETransformerMLP(E // 2, D, H, "swiglu", top_k=K, world_size=2, gate=SoftmaxGate)
    model = with_adapters(Model(layer).double(), **targets)
    own = {name: part_of(name, value, rank) for name, value in full.items()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(own[name])
    data_parallel = DistributedGroupedDataParallel(model, auto_allreduce=True)
    for name, p in model.named_parameters():
        assert torch.equal(p, own[name]), name
    data_parallel(tokens()[rank::2]).square().sum().mul(2).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("targets", ["experts", "all", "experts copied", "router copied"])
def test_expert_parallel_adapters(targets, pool, tmp_path):
    """Adapters of experts belong to their rank alone: nobody overwrites or averages them."""
    model = with_adapters(make_both()[0], **TARGETS[targets])
    torch.save({name: p.detach() for name, p in model.named_parameters()}, tmp_path / "full.pt")
    expected = step(model)
    results = pool.run(train_expert_parallel, TARGETS[targets], str(tmp_path / "full.pt"))
    for rank, gradients in enumerate(results):
        assert gradients
        for name, grad in gradients.items():
            torch.testing.assert_close(grad, part_of(name, expected[name], rank), rtol=1e-12, atol=1e-14)


MOE_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_models_of_transformers(architecture):
    """target_parameters on Transformers' experts: on our operators as eager."""
    pytest.importorskip("transformers")
    from fmoe_ext import huggingface

    results = {}
    for implementation in ("eager", "fmoe"):
        huggingface.register()
        model = make_model(architecture, implementation, torch.float64)
        model = with_adapters(model, target_modules=["q_proj"], target_parameters=MOE_PARAMETERS)
        ids = make_ids()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        results[implementation] = {"logits": out.logits.detach(), **gradients}
        with torch.no_grad():
            merged = model.merge_and_unload()(input_ids=ids).logits
        torch.testing.assert_close(merged, results[implementation]["logits"], rtol=1e-10, atol=1e-12)
    assert_same(results["fmoe"], results["eager"])


@pytest.mark.parametrize("gate", [SigmoidGate, QuantileGate])
def test_bias_that_an_adapters_files_leave_out_is_warned_of(gate, tmp_path, recwarn):
    """LoRA on the router moved the bias, and the adapter was loaded without it."""

    def make():
        torch.manual_seed(0)
        return Model(FMoETransformerMLP(E, D, H, "swiglu", top_k=K, gate=gate)).double()

    def train(model):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3)
        for _ in range(2):  # warned of once
            model(tokens()).square().sum().backward()
            optimizer.step()

    train(with_adapters(make(), target_modules=["gate.gate"]))
    said = [str(w.message) for w in recwarn if "an adapter's files do not hold it" in str(w.message)]
    assert len(said) == 1 and f"the bias of a {gate.__name__} moves" in said[0]
    recwarn.clear()
    train(with_adapters(make(), target_modules=["head"]))  # a frozen gate keeps its bias
    model = with_adapters(make(), target_modules=["head"], modules_to_save=["mlp.gate"])
    train(model)
    assert not any("adapter's files" in str(w.message) for w in recwarn)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path)
    bias = {SigmoidGate: "expert_bias", QuantileGate: "quantile_bias"}[gate]
    name = f"base_model.model.mlp.gate.modules_to_save.default.{bias}"
    moved = model.state_dict()[name]
    assert moved.abs().max() > 0 and loaded.state_dict()[name].equal(moved)
