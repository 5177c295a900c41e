"""fmoefy and moe_layer_spec on Megatron-core's GPTModel, in one process."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fmoe_ext import balance
from fmoe_ext.gates import SoftmaxGate
from fmoe_ext.megatron import fmoefy, moe_layer_spec
from fmoe_ext.megatron.core import process_groups
from fmoe_ext.megatron.core.layer import FusedNorm
from fmoe_ext.testing import assert_close

pytest.importorskip("megatron.core", reason="pip install megatron-core")
import megatron_layouts as layouts
from gpt import forward_backward, make_chunks
from megatron.core import tensor_parallel

pytestmark = pytest.mark.usefixtures("one_megatron_rank")


def gpt(mlp=None, **options):
    config = layouts.config_of(**({"num_layers": 2} | options))
    (model,) = make_chunks(config, layouts.VOCAB, layouts.SEQ_LEN, mlp=mlp)
    layouts.fill([model])
    return model


def logits(model):
    inputs = layouts.microbatches(0)[0][0]
    return model(inputs, torch.arange(layouts.SEQ_LEN).expand_as(inputs), None)


ACTIVATIONS = {
    "gelu": {},
    "silu": {"activation_func": F.silu},
    "relu2": {"activation_func": lambda x: F.relu(x).square()},
    "callable": {"activation_func": torch.tanh},
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True},
    "geglu": {"gated_linear_unit": True, "add_bias_linear": False},
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_upcycled_gpt_has_the_dense_logits(activation):
    model = gpt(**ACTIVATIONS[activation])
    dense = logits(model)
    assert fmoefy(model, num_experts=4, top_k=2, init="upcycle") is model
    assert (logits(model) - dense).abs().max() <= 1e-12 * dense.abs().max()
    names = {report.activation for report in model.fmoe_report.replaced}
    assert names == {activation} or activation == "callable"
    assert [r.path for r in model.fmoe_report.replaced] == [f"decoder.layers.{i}.mlp" for i in range(2)]


@pytest.mark.parametrize("clamp", [{}, {"activation_func_clamp_value": 0.01, "glu_linear_offset": 1.0}])
def test_gated_activations_without_an_operator(clamp):
    model = gpt(gated_linear_unit=True, activation_func=F.relu, **clamp)
    dense = logits(model)
    fmoefy(model, num_experts=2, init="upcycle")
    assert (logits(model) - dense).abs().max() <= 1e-12 * dense.abs().max()
    plain = gpt(gated_linear_unit=True, activation_func=F.relu)
    plain.load_state_dict(gpt(gated_linear_unit=True, activation_func=F.relu, **clamp).state_dict())
    assert torch.equal(logits(plain), dense) == (not clamp)  # the clamp acts


def test_upcycled_gpt_in_float32():
    truth, plain, model = gpt(), gpt(dtype=torch.float32), gpt(dtype=torch.float32)
    fmoefy(model, num_experts=4, top_k=2, init="upcycle")
    assert_close(logits(model), logits(truth), logits(plain), "logits")


def test_fused_bias_gelu_is_the_tanh_gelu():
    model = gpt(dtype=torch.float32, bias_activation_fusion=True)
    dense = logits(model)
    fmoefy(model, num_experts=2, init="upcycle")
    torch.testing.assert_close(logits(model), dense)
    assert model.decoder.layers[0].mlp.moe.experts.fused_activation == "gelu_tanh"


@pytest.mark.parametrize("activation", [F.silu, F.gelu])
def test_fused_gated_activations(activation):
    """Megatron's fused kernels leave a clamp out, so that it is refused beside them; the tanh GELU is gated too."""
    options = {"dtype": torch.float32, "bias_activation_fusion": True, "gated_linear_unit": True}
    clamp = {"activation_func_clamp_value": 0.01}
    plain, clamped = (gpt(activation_func=activation, **options, **more) for more in ({}, clamp))
    unfused = gpt(activation_func=activation, **options | clamp | {"bias_activation_fusion": False})
    with torch.compiler.set_stance("force_eager"):
        dense, ignored, applied = logits(plain), logits(clamped), logits(unfused)
    assert torch.equal(dense, ignored) and not torch.allclose(dense, applied)
    with pytest.raises(
        ValueError, match=r"activation_func_clamp_value=0\.01 is refused beside bias_activation"
    ):
        fmoefy(clamped, num_experts=2, init="upcycle")
    for model, expected in ((plain, dense), (unfused, applied)):
        fmoefy(model, num_experts=2, init="upcycle")
        torch.testing.assert_close(logits(model), expected)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_inside_linear_fc1_is_recreated(normalization, zero_centered):
    """Transformer Engine's linear_fc1 normalizes its input: here one that does the same by hand."""

    class LayerNormLinear(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias
            self.layer_norm_weight = nn.Parameter(torch.linspace(-1, 1, layouts.D, dtype=torch.float64))
            if normalization == "LayerNorm":
                self.layer_norm_bias = nn.Parameter(torch.linspace(0, 1, layouts.D, dtype=torch.float64))

        def forward(self, x):
            gamma = self.layer_norm_weight + zero_centered
            if normalization == "LayerNorm":
                x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
                x = x * gamma + self.layer_norm_bias
            else:
                x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma
            return F.linear(x, self.weight), self.bias

    model = gpt()
    model.config.normalization = normalization
    model.config.layernorm_zero_centered_gamma = zero_centered
    for layer in model.decoder.layers:
        layer.pre_mlp_layernorm = nn.Identity()
        layer.mlp.linear_fc1 = LayerNormLinear(layer.mlp.linear_fc1)
    dense = logits(model)
    fmoefy(model, num_experts=4, top_k=2, init="upcycle")
    assert (logits(model) - dense).abs().max() <= 1e-12 * dense.abs().max()
    assert "the norm inside linear_fc1" in repr(model.fmoe_report)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centred_norm_in_bfloat16_keeps_small_weights(normalization):
    """Weights far below bfloat16's step at 1 change outputs after the one rounding at the end."""
    config = SimpleNamespace(
        normalization=normalization, layernorm_epsilon=1e-5, layernorm_zero_centered_gamma=True
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(256, generator=generator) / 1000).bfloat16()
    bias = torch.randn(256, generator=generator).bfloat16() if normalization == "LayerNorm" else None
    norm = FusedNorm(config, weight, bias)
    found = norm(x)
    gamma = weight.double() + 1
    if normalization == "LayerNorm":
        expected = F.layer_norm(x.double(), [256], gamma, bias.double(), 1e-5)
    else:
        expected = F.rms_norm(x.double(), [256], gamma, 1e-5)
    # rounded once: only ties in float32 may fall to the other side
    assert found.dtype == torch.bfloat16
    assert (found != expected.bfloat16()).sum() <= 8
    found.sum().backward()
    assert norm.weight.grad.dtype == x.grad.dtype == torch.bfloat16


def test_spec_with_norm_equals_norm_before_it():
    spec = partial(moe_layer_spec, 4, d_hidden=24, top_k=2)
    model, with_norm = gpt(spec()), gpt(spec(norm=True))
    with torch.no_grad():
        for ours, theirs in zip(with_norm.decoder.layers, model.decoder.layers, strict=True):
            ours.mlp.norm.load_state_dict(theirs.pre_mlp_layernorm.state_dict())
            ours.mlp.moe.load_state_dict(theirs.mlp.moe.state_dict())
            ours.pre_mlp_layernorm = nn.Identity()
    torch.testing.assert_close(logits(with_norm), logits(model), rtol=1e-12, atol=0)


def test_spec_takes_what_it_is_not_told_from_config():
    model = gpt(moe_layer_spec(), num_moe_experts=6, moe_router_topk=3, moe_ffn_hidden_size=20)
    moe = model.decoder.layers[1].mlp.moe
    assert (moe.num_experts, moe.top_k, moe.d_hidden) == (6, 3, 20)
    assert isinstance(moe.gate, SoftmaxGate)
    assert moe.experts.htoh4.weight.dtype == torch.float64


def test_spec_initializes_as_megatron():
    config = layouts.config_of(num_layers=8, hidden_size=64, init_method_std=0.05)
    (model,) = make_chunks(config, layouts.VOCAB, layouts.SEQ_LEN, mlp=moe_layer_spec(4, d_hidden=64))
    moe = model.decoder.layers[0].mlp.moe
    assert moe.experts.htoh4.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert moe.experts.h4toh.weight.std().item() == pytest.approx(0.05 / 4, rel=0.05)
    assert moe.gate.gate.weight.std().item() == pytest.approx(0.05, rel=0.2)
    assert not moe.experts.htoh4.bias.any() and not moe.gate.gate.bias.any()


def test_marks_of_the_parameters():
    model = gpt(moe_layer_spec(4))
    for name, p in model.named_parameters():
        assert getattr(p, "allreduce", True) == (".experts." not in name), name
    assert model.decoder.layers[0].mlp.moe.gate.gate.weight.sequence_parallel is False


def test_gate_loss_has_the_scale_of_the_main_loss():
    """With Megatron's schedule, which divides by the number of microbatches and scales for float16."""
    batches = layouts.microbatches(0)

    def by_megatron(weight):
        model = gpt(moe_layer_spec(4, d_hidden=24), moe_aux_loss_coeff=weight)
        model.config.grad_scale_func = lambda loss: loss * 8
        model.config.finalize_model_grads_func = None
        forward_backward([model], batches, layouts.SEQ_LEN)
        return {name: p.grad for name, p in model.named_parameters()}

    def by_hand(loss_of):
        model = gpt(moe_layer_spec(4, d_hidden=24))
        gates = [layer.mlp.moe.gate for layer in model.decoder.layers]
        for gate in gates:
            gate.get_loss = lambda: None  # the losses stay where they are
        for inputs, targets in batches:
            scores = model(inputs, torch.arange(layouts.SEQ_LEN).expand_as(inputs), None)
            loss_of(scores.flatten(0, 1), targets.flatten(), gates).div(len(batches)).backward()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}

    main = by_hand(lambda scores, targets, gates: F.cross_entropy(scores, targets))
    auxiliary = by_hand(lambda scores, targets, gates: sum(gate.loss for gate in gates))
    without, with_loss = by_megatron(0.0), by_megatron(0.5)
    for name in main:
        torch.testing.assert_close(without[name], 8 * main[name], rtol=1e-10, atol=1e-14)
        expected = 8 * (main[name] + 0.5 * auxiliary[name])
        torch.testing.assert_close(with_loss[name], expected, rtol=1e-10, atol=1e-14)
    assert auxiliary["decoder.layers.0.mlp.moe.gate.gate.weight"].abs().max() > 1e-4


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def forwards_of_a_step(monkeypatch, noise=0.0, **options):
    """(gradients, counts of the gates, the choices of every forward) of four microbatches by Megatron's schedule."""
    model = gpt(moe_layer_spec(4, d_hidden=24), moe_aux_loss_coeff=0.5, **options)
    model.config.finalize_model_grads_func = None
    monitor, chosen = balance.watch(model), {}
    for number, layer in enumerate(model.decoder.layers):
        moe, of_layer = layer.mlp.moe, chosen.setdefault(number, [])
        moe.gate_hook = lambda topk_idx, *_, of_layer=of_layer: of_layer.append(topk_idx.clone())
        moe.gate.register_forward_pre_hook(lambda _, args: (args[0] + noise * torch.randn_like(args[0]),))
    ran = []
    of_megatron = tensor_parallel.random.CheckpointFunction.apply
    monkeypatch.setattr(
        tensor_parallel.random.CheckpointFunction, "apply", lambda *args: ran.append(1) or of_megatron(*args)
    )
    forward_backward([model], layouts.microbatches(0), layouts.SEQ_LEN)
    assert len(ran) == (8 if options else 0)
    return {name: p.grad for name, p in model.named_parameters()}, monitor.collect()["layers"], chosen


def test_megatrons_recomputation(monkeypatch):
    """tensor_parallel.checkpoint: the same gradients, the balance loss's too, and every token counts once."""
    expected, counts, _ = forwards_of_a_step(monkeypatch)
    got, counts_again, chosen = forwards_of_a_step(monkeypatch, **RECOMPUTED)
    for name, grad in expected.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-12, atol=1e-14)
    assert counts_again == counts
    assert all(len(of_layer) == 8 for of_layer in chosen.values())


def test_megatrons_recomputation_keeps_choices(monkeypatch):
    """Of a gate whose input is another one in the second forward; Megatron restores generators, but not this one."""
    numbers = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        torch, "randn_like", lambda x: torch.randn(x.shape, generator=numbers, dtype=x.dtype, device=x.device)
    )
    _, _, chosen = forwards_of_a_step(monkeypatch, noise=3.0, **RECOMPUTED)
    for of_layer in chosen.values():
        for first, second in zip(of_layer[::2], of_layer[1::2], strict=True):
            assert torch.equal(first, second)
        assert not torch.equal(of_layer[0], of_layer[2])


def main_grads(fused, dtype=torch.float64, **ddp):
    """Main gradients of a step of four microbatches, and the model."""

    def build(config):
        mlp = moe_layer_spec(
            layouts.EXPERTS, d_hidden=24, top_k=2, gate=SoftmaxGate, gradient_accumulation_fusion=fused
        )
        return make_chunks(config, layouts.VOCAB, layouts.SEQ_LEN, mlp=mlp)

    options = {"dtype": dtype, "optimizer": "sgd", "lr": 0.1}
    training = layouts.Training({"num_layers": 2}, build, ddp=ddp, **options)
    training.forward_backward(0)
    return {name: grad for name, (grad, _) in layouts.gradients(training.modules).items()}, training.modules[
        0
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_gradient_accumulation_fusion_changes_no_gradient(overlap):
    """Through Megatron's DistributedDataParallel, whose hook must not add what was added already."""
    (plain, _), (fused, model) = (main_grads(f, overlap_grad_reduce=overlap) for f in (False, True))
    experts = [name for name in fused if ".experts." in name and name.split(" ")[0].endswith("weight")]
    assert len(experts) == 4
    for name, grad in plain.items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(
            fused[name], grad, rtol=1e-12, atol=1e-15, msg=lambda t, n=name: f"{n}: {t}"
        )
    for name, p in model.named_parameters():
        weight = ".experts." in name and name.endswith("weight")
        assert p.grad_added_to_main_grad is weight, name


def test_gradient_accumulation_fusion_rounds_nothing():
    """bfloat16 weights with float32 main gradients: what differs is the rounding of each microbatch's gradient."""
    low = {"dtype": torch.bfloat16, "grad_reduce_in_fp32": True}
    (plain, _), (fused, _) = main_grads(False, **low), main_grads(True, **low)
    for name, grad in plain.items():
        assert fused[name].dtype == torch.float32
        weight = ".experts." in name and name.split(" ")[0].endswith("weight")
        difference = (fused[name] - grad).norm() / grad.norm()
        assert (0 < difference < 2**-8) if weight else difference == 0, (name, difference)


def test_gradient_accumulation_fusion_comes_from_config():
    config = layouts.config_of(num_moe_experts=2, gradient_accumulation_fusion=True)
    mlp = moe_layer_spec().module(config, **moe_layer_spec().params)
    assert mlp.moe.experts.htoh4.gradient_accumulation_fusion
    x = torch.randn(3, 2, layouts.D, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="wrap the model in Megatron-core's DistributedDataParallel"):
        mlp(x)[0].sum().backward()
    with pytest.raises(RuntimeError, match=r"must be torch.float32.*grad_reduce_in_fp32=True"):
        main_grads(True, torch.bfloat16)


def test_checkpoint_of_some_layers_names_them():
    model = gpt()
    fmoefy(model, num_experts=4, layers=[1])
    keys = {s.key for s in model.sharded_state_dict(metadata={"non_homogeneous_layers": True}).values()}
    assert "decoder.layers.1.mlp.moe.experts.htoh4.weight" in keys
    assert "decoder.layers.0.mlp.linear_fc1.weight" in keys


def test_sharded_state_dict_of_megatron_0_15(monkeypatch):
    """Its function for copies takes no groups: it asks parallel_state."""
    from megatron.core.transformer import utils

    layer = gpt(moe_layer_spec(2)).decoder.layers[0].mlp
    expected = layer.sharded_state_dict("a.")
    today = utils.make_sharded_tensors_for_checkpoint

    def of_0_15(state_dict, prefix, tensor_parallel_layers_axis_map=None, sharded_offsets=()):
        return today(state_dict, prefix, tensor_parallel_layers_axis_map, sharded_offsets)

    monkeypatch.setattr(utils, "make_sharded_tensors_for_checkpoint", of_0_15)
    state = layer.sharded_state_dict("a.")
    assert state.keys() == expected.keys()
    for key, shard in state.items():
        other = expected[key]
        assert torch.equal(shard.data, other.data) and shard.replica_id == other.replica_id


def test_refuses(monkeypatch):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model = gpt()
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel, whose gradient buffers"):
        fmoefy(wrapped, num_experts=2)
    with pytest.raises(ValueError, match="pass num_experts to moe_layer_spec"):
        gpt(moe_layer_spec())
    layer = gpt(moe_layer_spec(2)).decoder.layers[0].mlp
    x = torch.zeros(2, 1, layouts.D, dtype=torch.float64)
    with pytest.raises(ValueError, match="have 3 entries but the input has 2 tokens"):
        layer(x, padding_mask=torch.zeros(1, 3))
    layer.moe.expert_placement = torch.tensor([1, 0])
    with pytest.raises(RuntimeError, match=r"a\.moe: experts were moved between ranks"):
        layer.sharded_state_dict("a.")


def test_layouts_that_cannot_be():
    from fmoe_ext.megatron.core import layer_arguments

    groups = SimpleNamespace(tp=group_of(1), ep=group_of(3), expt_tp=group_of(1))
    with pytest.raises(
        ValueError, match="num_experts must be a multiple of the expert parallel size 3, but is 4"
    ):
        layer_arguments(gpt().config, groups, num_experts=4)


def group_of(size):
    return SimpleNamespace(size=lambda: size)


def test_needs_process_groups(monkeypatch):
    from megatron.core import parallel_state

    model = gpt()
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    model.decoder.layers[0].pg_collection = None
    with pytest.raises(RuntimeError, match=r"initialize_model_parallel\(...\) before"):
        fmoefy(model, num_experts=2)


def test_collection_without_some_groups(monkeypatch):
    """Of parallel_state's groups it is completed, as Megatron's T5 needs; of others it is refused."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    whole = process_groups()
    assert process_groups(whole) is whole
    some = ProcessGroupCollection(tp=whole.tp, cp=whole.cp)
    assert process_groups(some).ep is whole.ep
    grid = torch.distributed.new_group([0])
    others = ProcessGroupCollection(tp=grid, cp=grid, ep=grid, expt_tp=grid, expt_dp=grid)
    with pytest.raises(ValueError, match="lacks dp_cp, tp_cp, tp_dp_cp, and"):
        process_groups(others)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    with pytest.raises(ValueError, match="lacks ep, expt_tp, expt_dp, dp_cp, tp_cp, tp_dp_cp, and"):
        process_groups(some)
    torch.distributed.destroy_process_group(grid)


@pytest.mark.parametrize("as_function", [False, True])
def test_upcycling_loads_the_dense_weights_first(as_function):
    """State that Megatron's load_checkpoint loads after the model is built."""
    trained = gpt()
    dense, state = logits(trained), trained.state_dict()
    (model,) = make_chunks(layouts.config_of(num_layers=2), layouts.VOCAB, layouts.SEQ_LEN)
    load = (lambda model: model.load_state_dict(state)) if as_function else state
    fmoefy(model, num_experts=4, top_k=2, init="upcycle", load_dense=load)
    assert (logits(model) - dense).abs().max() <= 1e-12 * dense.abs().max()
    with pytest.raises(ValueError, match='load_dense is for init="upcycle", but init is'):
        fmoefy(gpt(), num_experts=4, load_dense=state)


def test_model_with_megatrons_own_experts_is_told_the_way():
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    model = gpt(get_moe_module_spec(use_te=False, num_experts=4), num_moe_experts=4)
    with pytest.raises(ValueError, match=r"built with --num-experts has none: docs/megatron\.md says how"):
        fmoefy(model, num_experts=4)
