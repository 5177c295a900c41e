"""Whole models from Megatron's own specifications: dense and MoE layers, recomputation, multi-token prediction."""

import warnings

import pytest
import torch
import torch.nn.functional as F

from fmoe_ext.megatron import moe_layer_spec, with_experts

pytest.importorskip("megatron.core", reason="pip install megatron-core")
import megatron_layouts as layouts
from megatron.core.activations import quick_gelu, squared_relu
from megatron_models import assert_equal_models, block_spec_of, model_of, train
from megatron_pair import (
    SIGMOID,
    E,
    Float64Inside,
    config_of,
    known_config_of,
)

from fmoe_ext.megatron.core import MegatronCoreMLP
from fmoe_ext.megatron.core.table import layers_with_experts

pytestmark = pytest.mark.usefixtures("one_megatron_rank")


SHAPES = {
    "DeepSeek-V3": SIGMOID
    | {"num_layers": 3, "moe_layer_freq": [0, 1, 1], "moe_router_topk": 4, "moe_router_num_groups": 4}
    | {
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
    }
    | {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"}
    | {"moe_shared_expert_intermediate_size": 20, "normalization": "RMSNorm", "gated_linear_unit": True}
    | {"activation_func": F.silu},
    "GLM-4.5": SIGMOID
    | {"num_layers": 4, "moe_layer_freq": [0, 0, 1, 1], "moe_router_enable_expert_bias": True}
    | {"moe_router_topk": 3, "moe_shared_expert_intermediate_size": 20, "moe_aux_loss_coeff": 0.01},
    "Qwen3": {"num_layers": 2, "moe_router_topk": 4, "moe_aux_loss_coeff": 0.01, "moe_router_dtype": "fp64"},
    "Qwen3-Next": {"num_layers": 2, "moe_router_topk": 4, "moe_aux_loss_coeff": 0.01}
    | {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
    | {"gated_linear_unit": True, "activation_func": F.silu},
    "Nemotron-3-Nano": SIGMOID
    | {"num_layers": 3, "moe_layer_freq": [0, 1, 1], "moe_router_topk": 4, "activation_func": squared_relu}
    | {"moe_router_topk_scaling_factor": 2.5, "moe_router_enable_expert_bias": True}
    | {"moe_shared_expert_intermediate_size": 20},
    "GPT-OSS": {"num_layers": 2, "moe_router_topk": 4, "gated_linear_unit": True}
    | {"activation_func": quick_gelu, "activation_func_clamp_value": 0.1, "glu_linear_offset": 1.0},
    "every other layer": {"num_layers": 4, "moe_layer_freq": 2, "moe_aux_loss_coeff": 0.01},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_model_with_dense_and_moe_layers_equals_megatrons(shape):
    """The specification is Megatron's own, with moe_layer_freq; loss and every gradient to 1e-9 in float64."""
    config = config_of(**{"ffn_hidden_size": 40} | SHAPES[shape])
    if config.normalization == "RMSNorm" and not hasattr(torch.nn, "RMSNorm"):
        pytest.skip("this torch has no RMSNorm")
    ours = model_of(config, with_experts(block_spec_of(config)))
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles its activations, which takes long
        layers = assert_equal_models(ours, model_of(config, block_spec_of(config)))
    numbers = [int(name.split(".")[2]) for name, *_ in layers]
    assert numbers == [number for number, moe in enumerate(layers_with_experts(config)) if moe]
    assert [layer.layer_number for _, layer, _ in layers] == [number + 1 for number in numbers]


def test_experts_in_a_layer_that_moe_layer_freq_leaves_dense_are_refused():
    config = config_of(num_layers=3, moe_layer_freq=[0, 1, 1])
    spec = block_spec_of(config)
    for layer_spec in spec.layer_specs:
        layer_spec.submodules.mlp = moe_layer_spec()
    with pytest.raises(
        ValueError, match=r"^moe_layer_freq=\[0, 1, 1\] is refused: .* layer 1 dense.*with_experts"
    ):
        model_of(config, spec)


def test_with_experts_copies_and_passes_arguments():
    config = config_of(num_layers=2, moe_layer_freq=[0, 1])
    theirs = block_spec_of(config)
    before = [layer_spec.submodules.mlp for layer_spec in theirs.layer_specs]
    ours = with_experts(theirs, d_hidden=36, top_k=3)
    assert [layer_spec.submodules.mlp for layer_spec in theirs.layer_specs] == before
    assert ours.layer_specs[0].submodules.mlp == before[0]
    moe = model_of(config, ours).decoder.layers[1].mlp.moe
    assert moe.experts.htoh4.weight.shape[1] == 36 and moe.top_k == 3


RECOMPUTED = {
    "moe": ["moe"],
    "shared_experts": ["shared_experts"],
    "both": ["moe", "shared_experts"],
    "moe inside mlp": ["moe", "mlp"],
}


@pytest.mark.parametrize("case", RECOMPUTED)
def test_selective_recomputation_changes_no_number(case):
    """Nor a count: of the running balance loss and of the expert bias; jitter draws the same noise again."""
    options = SIGMOID | {
        "moe_shared_expert_intermediate_size": 20,
        "moe_aux_loss_coeff": 0.25,
        "moe_input_jitter_eps": 0.1,
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "global_aux_loss",
    }
    results = []
    for recomputation in ({}, {"recompute_granularity": "selective", "recompute_modules": RECOMPUTED[case]}):
        torch.manual_seed(0)
        config = known_config_of(num_layers=2, **options, **recomputation)
        model = model_of(config, with_experts(block_spec_of(config)))
        layers = [layer for layer in model.modules() if isinstance(layer, MegatronCoreMLP)]
        calls = count_calls(layers)
        loss, grads = train(model)
        counts = [layer.moe.gate.pending_load for layer in layers] + [
            layer.moe.gate.running_load for layer in layers
        ]
        results.append((loss, grads, counts, calls))
    (loss, grads, counts, _), (again, grads_again, counts_again, calls) = results
    assert torch.equal(loss, again)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_again[name]), name
    assert all(torch.equal(a, b) for a, b in zip(counts, counts_again, strict=True)) and counts[0].sum() > 0
    repeated = {name: 2 for name in RECOMPUTED[case] if name in ("moe", "shared_experts")}
    assert calls["moe"] >= 2 * repeated.get("moe", 1) and (calls["moe"] == 2) == (
        "moe" not in RECOMPUTED[case]
    )
    assert calls["shared_experts"] >= 2 * repeated.get("shared_experts", 1)


def count_calls(layers):
    calls = {"moe": 0, "shared_experts": 0}

    def count(name):
        def hook(*_):
            calls[name] += 1

        return hook

    for layer in layers:
        layer.moe.experts.register_forward_pre_hook(count("moe"))
        layer.shared_experts.register_forward_pre_hook(count("shared_experts"))
    return calls


def test_evaluation_and_no_grad_recompute_nothing():
    config = config_of(num_layers=1, recompute_granularity="selective", recompute_modules=["moe"])
    config.moe_shared_expert_intermediate_size = 8
    (layer,) = model_of(config, with_experts(block_spec_of(config))).decoder.layers
    calls = count_calls([layer.mlp])
    x = torch.randn(4, 2, layouts.D, dtype=torch.float64, requires_grad=True)
    layer.mlp.eval()(x)[0].sum().backward()
    assert calls == {"moe": 1, "shared_experts": 1}


def train_by_labels(model):
    """Loss and {name: gradient} of a step; with labels Megatron adds the loss of multi-token prediction."""
    tokens, targets = layouts.microbatches(0)[0]
    positions = torch.arange(layouts.SEQ_LEN).expand_as(tokens)
    torch.manual_seed(3)
    # Megatron's cross entropy writes into what .float() copies, which Float64Inside leaves uncopied.
    hook = model.output_layer.register_forward_hook(lambda _, __, output: (output[0].clone(), output[1]))
    with warnings.catch_warnings(), Float64Inside():
        warnings.simplefilter("ignore")
        loss = model(tokens, positions, None, labels=targets).sum()
        loss.backward()
    hook.remove()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def test_multi_token_prediction_has_our_experts():
    """Equal to Megatron's to 1e-9; in the log of losses its layer follows the decoder's, whatever moe_layer_freq is."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.moe import moe_utils

    config = config_of(num_layers=2, moe_layer_freq=[0, 1], mtp_num_layers=1, moe_aux_loss_coeff=0.25)
    config.mtp_loss_scaling_factor = 0.1  # Megatron 0.15 has None
    spec, options = block_spec_of(config), {"position_embedding_type": "rope"}
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    try:
        theirs = model_of(config, spec, mtp_block_spec=mtp, **options)
    except TypeError as error:
        pytest.skip(f"Megatron's own does not build here: {error}")
    model = model_of(config, with_experts(spec), mtp_block_spec=with_experts(mtp), **options)
    assert_equal_models(model, theirs, train_by_labels)
    moe_utils.clear_aux_losses_tracker()
    train_by_labels(model)
    layers = [layer for layer in model.modules() if isinstance(layer, MegatronCoreMLP)]
    assert [layer.layer_number for layer in layers] == [2, 3]
    assert layers[1].moe.num_experts == E
    logged = moe_utils.get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"]
    assert logged[0] == 0 and (logged[1:] > 0).all()
