"""MoE options of Megatron's TransformerConfig: honoured with the numbers of its MoELayer, or refused by name."""

import copy
import dataclasses
import inspect
import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from fmoe_ext import RoutingReplay, balance
from fmoe_ext.balance import Choices
from fmoe_ext.gates import SigmoidGate, SoftmaxGate, UniformGate
from fmoe_ext.megatron import fmoefy

pytest.importorskip("megatron.core", reason="pip install megatron-core")
import megatron_layouts as layouts
from gpt import make_chunks
from megatron_pair import (
    HONOURED,
    QUANTILES,
    SIGMOID,
    SINKHORN,
    B,
    E,
    Float64Inside,
    S,
    assert_equal_numbers,
    config_of,
    fill,
    known_config_of,
    ours_of,
    step,
    theirs_of,
    tracked,
)

from fmoe_ext.megatron.core import OPTIONS, check_options
from fmoe_ext.megatron.core.table import MOE_FIELD, table
from tests.test_latent import plain

pytestmark = pytest.mark.usefixtures("one_megatron_rank")


@pytest.mark.parametrize("case", HONOURED)
def test_equals_megatrons_layer(case):
    config = known_config_of(**HONOURED[case])
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    assert_equal_numbers(ours, theirs)
    ours.eval(), theirs.eval()
    if config.moe_input_jitter_eps is None:  # theirs goes on to jitter
        assert_equal_numbers(ours, theirs)


def test_biases():
    """Of the router and the experts; Megatron's backward of experts with biases fails on the CPU."""
    config = config_of(add_bias_linear=True, activation_func=torch.nn.functional.silu)
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    assert ours.moe.gate.gate.bias.abs().min() > 0 and ours.moe.experts.htoh4.bias.abs().max() > 0
    x = torch.randn(S, B, layouts.D, dtype=torch.float64)
    with torch.no_grad(), Float64Inside():
        torch.testing.assert_close(ours(x)[0], theirs(x)[0], rtol=1e-12, atol=1e-14)


def test_quantile_bias_moves_as_megatrons():
    """By Megatron's finalize_model_grads, over two microbatches a step, for three steps; then nothing is left."""
    finalize = pytest.importorskip("megatron.core.distributed.finalize_model_grads")
    config = known_config_of(**QUANTILES)
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    gate, router = ours.moe.gate, theirs.router
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    for number in range(3):
        for seed in (2 * number, 2 * number + 1):
            step(ours, seed=seed), step(theirs, seed=seed)
        assert gate.num_quantiles == router.qb_beta_count == 2
        torch.testing.assert_close(gate.quantile_sum, router.qb_beta_accum, rtol=1e-6, atol=1e-7)
        before = gate.quantile_bias.clone()
        finalize._update_router_qb_beta([torch.nn.ModuleList([ours, theirs])], config)
        finalize.reset_model_temporary_tensors(config, [torch.nn.ModuleList([ours, theirs])])
        torch.testing.assert_close(gate.quantile_bias, router.qb_beta, rtol=1e-6, atol=1e-7)
        assert (gate.quantile_bias - before).abs().max() > 0.01
        moved = gate.quantile_bias.clone()
        optimizer.step()
        assert torch.equal(gate.quantile_bias, moved)


WITHOUT_NUMBERS = ("default", "router dtype", "no balancing")


@pytest.mark.parametrize("case", [case for case in HONOURED if case not in WITHOUT_NUMBERS])
def test_no_honoured_option_is_without_effect(case):
    """Each case above gives other numbers than without its options, so that it tests them."""
    layers = [ours_of(known_config_of(**options)) for options in (HONOURED[case], {})]
    changed = []
    for layer in layers:
        with torch.no_grad():
            fill_same(layer)
        output, grad, grads = step(layer)
        changed.append((output, grad, grads["moe.gate.gate.weight"]))
    assert any(not torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(*changed, strict=True))


def fill_same(layer):
    generator = torch.Generator().manual_seed(6)
    for p in (*layer.moe.gate.parameters(), *layer.moe.experts.parameters()):
        p.copy_(torch.randn(p.numel(), generator=generator, dtype=p.dtype).view(p.shape) / 3)
    if hasattr(layer.moe.gate, "quantile_bias"):
        layer.moe.gate.quantile_bias.copy_(torch.linspace(-0.5, 0.5, E))


LOGGED_AS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


@pytest.mark.parametrize("kind", LOGGED_AS)
def test_logged_loss_is_megatrons(kind):
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    config = config_of(moe_aux_loss_coeff=0.3, moe_router_load_balancing_type=kind)
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    clear_aux_losses_tracker()
    values = []
    for layer in (theirs, ours):
        step(layer)
        values.append(tracked(LOGGED_AS[kind]))
    assert values[1] == pytest.approx(values[0], rel=1e-6)  # the tracker is float32
    assert values[1] == pytest.approx(ours.gate_loss.item(), rel=1e-6)


def test_latent_experts_are_between_projections():
    """Megatron's own need Transformer Engine; plain PyTorch takes their place."""
    options = {"moe_latent_size": 8, "activation_func": torch.nn.functional.silu, "add_bias_linear": True}
    layer = ours_of(known_config_of(**options))
    moe = layer.moe
    assert moe.latent.narrow.weight.std() > 0 and not moe.latent.widen.bias.any()
    with torch.no_grad():
        fill_same(layer)
        for p in moe.latent.parameters():
            torch.nn.init.normal_(p, std=0.3)
    x = torch.randn(S, B, layouts.D, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], plain(moe, x.flatten(0, 1)).view_as(x), rtol=1e-12, atol=1e-13)
    shards = layer.sharded_state_dict()
    assert shards["moe.latent.narrow.weight"].global_shape == (8, layouts.D)
    assert shards["moe.experts.htoh4.weight"].global_shape == (E, 20, 8)


def test_sequence_loss_per_token_is_that_of_all_tokens():
    """Megatron before 0.19.2 multiplies it by the tokens of one sequence: B times less (Megatron-LM#3768)."""
    import megatron.core

    is_mended = tuple(map(int, re.findall(r"\d+", megatron.core.__version__)[:3])) >= (0, 19, 2)
    kind = {"moe_router_load_balancing_type": "seq_aux_loss", "calculate_per_token_loss": True}
    ours = ours_of(config_of(moe_aux_loss_coeff=0.3 / (1 if is_mended else B), **kind))
    theirs = theirs_of(config_of(moe_aux_loss_coeff=0.3, **kind))
    fill(ours, theirs)
    assert B > 1
    assert_equal_numbers(ours, theirs)


def test_logged_losses_of_several_types_are_megatrons():
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    config = config_of(moe_aux_loss_coeff=[0.3, 0.2, 0.1], moe_router_load_balancing_type=[*LOGGED_AS])
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    values = []
    for layer in (theirs, ours):
        clear_aux_losses_tracker()
        step(layer)
        values.append([tracked(name) for name in LOGGED_AS.values()])
    assert values[1] == pytest.approx(values[0], rel=1e-6)
    assert len(set(values[1])) == 2  # in one microbatch the loss of all is the loss of this one


def test_global_loss_counts_the_microbatches_of_a_step():
    """f_e of all microbatches since finalize_model_grads emptied the count, gradients and logged values."""
    from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    config = config_of(moe_aux_loss_coeff=0.25, moe_router_load_balancing_type="global_aux_loss")
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    theirs.router.double()  # its counts are float32, also where it divides them by 3 microbatches
    clear_aux_losses_tracker()
    generator, losses = torch.Generator().manual_seed(4), []
    for number in range(5):
        if number == 3:
            reset_model_temporary_tensors(config, [ours]), reset_model_temporary_tensors(config, [theirs])
        x = torch.randn(S, B, layouts.D, dtype=torch.float64, generator=generator)
        grads = []
        for layer, gate in ((ours, ours.moe.gate.gate), (theirs, theirs.router)):
            layer.zero_grad()
            with Float64Inside():
                layer(x)[0].sum().backward()
            losses.append(tracked("global_load_balancing_loss"))
            grads.append(gate.weight.grad)
        assert (grads[0] - grads[1]).abs().max() <= 1e-12 * grads[1].abs().max()
        assert losses[-2] == pytest.approx(losses[-1], rel=1e-6)  # the tracker is float32
        with torch.no_grad():  # neither evaluation nor a forward without gradients counts in the next one
            ours.eval()(x), ours.train()
    assert len(set(losses[1::2])) == 5


def test_expert_bias_moves_as_megatrons():
    """finalize_model_grads reads local_tokens_per_expert and writes expert_bias, once a step."""
    from megatron.core.distributed.finalize_model_grads import (
        _update_router_expert_bias,
        reset_model_temporary_tensors,
    )

    config = config_of(**SIGMOID, moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.01)
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    before = theirs.router.expert_bias.clone()
    for _ in range(3):
        for layer in (ours, theirs):
            step(layer)
            step(layer)  # two microbatches
            _update_router_expert_bias([layer], config)
            reset_model_temporary_tensors(config, [layer])
    assert torch.equal(ours.moe.gate.expert_bias, theirs.router.expert_bias)
    assert (theirs.router.expert_bias - before).abs().max() >= 0.01
    ours.bfloat16()
    ours(torch.zeros(S, B, layouts.D, dtype=torch.bfloat16))
    assert ours.moe.gate.expert_bias.dtype == torch.float32


PADDED = (
    "default", "sigmoid", "groups", "aux loss", "aux loss sigmoid", "z-loss", "z-loss and aux loss",
    "per token", "sequence loss", "shared experts",
)  # fmt: skip  # not "expert bias", where Megatron 0.16.1 fails: it broadcasts [T] against [T, E]


@pytest.mark.parametrize("case", PADDED)
def test_padding_mask(case):
    options = HONOURED[case]
    if "moe_aux_loss_coeff" in options:  # Megatron's factor of the loss is float32 then: one that is exact
        options = options | {"moe_aux_loss_coeff": 0.25}
    config = known_config_of(**options)
    ours, theirs = ours_of(config), theirs_of(config)
    if "padding_mask" not in inspect.signature(theirs.forward).parameters:
        pytest.skip("this Megatron has no padding_mask")
    fill(ours, theirs)
    # Megatron divides every sequence by the mean length: only with equal ones that is each sequence's own loss
    lengths = [8, 8, 8] if case == "sequence loss" else [8, S, S]
    padding = torch.arange(S) >= torch.tensor(lengths)[:, None]  # [b, s]
    assert_equal_numbers(ours, theirs, padding)


def test_sequence_loss_takes_tokens_as_megatron_has_them():
    """[s, b, h]: tokens of a sequence do not follow each other; any gate with such a loss, and the output stays."""
    config = config_of(moe_aux_loss_coeff=0.5)
    by_sequence = partial(SoftmaxGate, balance_loss="sequence", seq_len=S)
    layers = [ours_of(config, gate=gate) for gate in (by_sequence, SoftmaxGate)]
    layers[0].load_state_dict(layers[1].state_dict())
    x = torch.randn(S, B, layouts.D, dtype=torch.float64)
    outputs = [layer(x)[0] for layer in layers]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-15)
    alone = []
    for sequence in x.split(1, 1):
        layers[1](sequence)
        alone.append(layers[1].gate_loss)
    assert layers[0].gate_loss.item() == pytest.approx(torch.stack(alone).mean().item(), rel=1e-12)


REFUSED = {
    "moe_extended_tp": ({"moe_extended_tp": True}, ValueError),
    "moe_layer_freq": ({"moe_layer_freq": [0, 1]}, ValueError),
    "moe_aux_loss_coeff sinkhorn": (SINKHORN | {"moe_aux_loss_coeff": 0.1}, ValueError),
    "moe_router_score_function sinkhorn": (SINKHORN | SIGMOID, ValueError),
    "moe_router_pre_softmax sinkhorn": (SINKHORN | {"moe_router_pre_softmax": True}, ValueError),
    "moe_router_topk_scaling_factor sinkhorn": (
        SINKHORN | {"moe_router_topk_scaling_factor": 2.0},
        ValueError,
    ),
    "moe_router_num_groups sinkhorn": (
        SINKHORN | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        ValueError,
    ),
    "moe_router_load_balancing_type several": (
        {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], "moe_aux_loss_coeff": [0.1, 0.1]},
        ValueError,
    ),
    "moe_token_dropping": ({"moe_token_dropping": True}, ValueError),
    "moe_enable_routing_replay sinkhorn": (SINKHORN | {"moe_enable_routing_replay": True}, ValueError),
    "moe_enable_routing_replay slices": (
        {"moe_enable_routing_replay": True, "tp": 2},
        ValueError,
    ),
    "moe_apply_probs_on_input": ({"moe_apply_probs_on_input": True}, ValueError),
    "moe_shared_expert_intermediate_size": (
        {"moe_shared_expert_intermediate_size": 8, "add_bias_linear": True},
        ValueError,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    options, error = REFUSED[case]
    config = known_config_of(**options)
    with pytest.raises(error, match=rf"^{case.split(' ')[0]}="):
        ours_of(config)


# Megatron refuses them itself here, without fp8, a GPU or 16-bit parameters: the config is changed afterwards.
REFUSED_LATER = {
    "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True,
    "activation_func_fp8_input_store": True,
    "use_kitchen": True,
    "overlap_moe_expert_parallel_comm": True,
}


@pytest.mark.parametrize("name", REFUSED_LATER)
def test_refused_whatever_megatron_says(name):
    config = config_of()
    setattr(config, name, REFUSED_LATER[name])
    with pytest.raises(ValueError, match=f"^{name}=True is refused: "):
        check_options(config)


# (a message that begins with the name): fields, of which some versions lack some
REFUSED_TOGETHER = {
    "fp8='hybrid'": {"fp8": "hybrid", "fp8_recipe": "mxfp8"},
    "fp4='e2m1'": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
    "cuda_graph_impl='local'": {"cuda_graph_impl": "local", "cuda_graph_scope": [], "cuda_graph_modules": []},
    "cuda_graph_impl='transformer_engine'": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": ["attn", "moe_router"],
        "cuda_graph_modules": ["attn", "moe_router"],
    },
    "enable_cuda_graph=True": {"enable_cuda_graph": True, "cuda_graph_scope": "full"},
    "recompute_modules=['moe_of_tomorrow']": {"recompute_modules": ["moe_of_tomorrow"]},
    "offload_modules=['attn_norm', 'moe_act']": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["attn_norm", "moe_act"],
    },
}


@pytest.mark.parametrize("message", REFUSED_TOGETHER)
def test_low_precision_graphs_and_modules_are_refused_by_name(message):
    config = config_of()
    for name, value in REFUSED_TOGETHER[message].items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=f"^{re.escape(message)} is refused: "):
        check_options(config)


def test_cuda_graphs_of_attention_are_accepted():
    config = config_of()
    config.cuda_graph_impl, config.cuda_graph_scope, config.cuda_graph_modules = "local", ["attn"], ["attn"]
    check_options(config)


@pytest.mark.parametrize(
    "name", [option.name for option in OPTIONS if option.honoured and option.default is not False]
)
def test_unknown_names_are_refused(name):
    """A name that this version does not know would be taken for another one, as sqrtsoftplus was for sigmoid."""
    config = config_of()
    setattr(config, name, ["value_of_tomorrow"] if name.endswith("modules") else "value_of_tomorrow")
    with pytest.raises(ValueError, match=rf"^{name}=.*value_of_tomorrow.* is refused: .* knows "):
        check_options(config)


def test_weight_shards_of_the_tensor_parallel_size_are_accepted():
    """Megatron 0.19 and newer set them to expert_tensor_parallel_size in their arguments.py."""
    config = config_of()
    config.expert_tensor_parallel_num_weight_shards = 1
    check_options(config)
    config.expert_tensor_parallel_num_weight_shards = 2
    with pytest.raises(ValueError, match=r"^expert_tensor_parallel_num_weight_shards=2 is refused"):
        check_options(config)
    config.expert_tensor_parallel_size = 2
    check_options(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_in_float64_beside_narrower_weights(dtype, score):
    """Choices and weights equal Megatron's with moe_router_dtype="fp64", and differ from its default."""
    options = {"moe_router_dtype": "fp64", "moe_router_score_function": score, "moe_aux_loss_coeff": 0.3}
    config = config_of(dtype=dtype, **options)
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    torch.manual_seed(2)
    x = torch.randn(64, B, layouts.D, dtype=dtype)
    choices, weights = ours.moe.gate(x.flatten(0, 1))
    with Float64Inside():
        probs, routing_map = theirs.router(x)
    assert weights.dtype == torch.float32 and probs.dtype == torch.float64
    assert torch.equal(torch.zeros_like(routing_map).scatter(1, choices, True), routing_map)
    torch.testing.assert_close(weights.double(), probs.gather(1, choices), rtol=1e-7, atol=0)
    gate_loss = ours.moe.gate.get_loss()
    assert gate_loss.dtype == torch.float64
    output, expected = (layer(x)[0].float() for layer in (ours, theirs))
    assert (output - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_every_moe_field_is_in_the_table():
    fields = {field.name: field for field in dataclasses.fields(config_of())}
    known = {option.name: option for option in OPTIONS}
    assert len(known) == len(OPTIONS)
    missing = [name for name in fields if MOE_FIELD.search(name) and name not in known]
    assert not missing
    for name, option in known.items():
        assert option.honoured or option.refused, name
        assert not (option.values and option.refused and option.refuses is None), name


def test_docs_show_the_table():
    text = (Path(__file__).resolve().parents[2] / "docs/megatron.md").read_text()
    assert table() in text, "docs/megatron.md: paste what fmoe_ext.megatron.core.table.table() returns"


def test_unknown_option_is_refused():
    config = config_of()

    @dataclasses.dataclass
    class Newer(type(config)):
        moe_of_tomorrow: int = 3

    newer = copy.copy(config)
    newer.__class__ = Newer
    newer.moe_of_tomorrow = 3
    check_options(newer)
    newer.moe_of_tomorrow = 4
    with pytest.raises(ValueError, match=r"^moe_of_tomorrow=4 is refused: .*does not know.* leave it at 3"):
        check_options(newer)


@pytest.mark.parametrize("name", [option.name for option in OPTIONS if option.describes_router])
def test_options_of_the_router_go_without_a_gate_of_ones_own(name):
    option = next(option for option in OPTIONS if option.name == name)
    config = config_of()
    if not hasattr(config, name):
        pytest.skip("not an option of this Megatron")
    setattr(config, name, 0.123)
    if option.honoured.startswith("no effect"):
        check_options(config, own_gate=True)
        return
    with pytest.raises(ValueError, match=f"^{name}=0.123 describes Megatron's router, but gate= is given"):
        ours_of(config, gate=SoftmaxGate)


def test_fmoefy_heeds_the_options_too():
    (model,) = make_chunks(
        layouts.config_of(
            num_layers=2, moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=1.5
        ),
        layouts.VOCAB,
        layouts.SEQ_LEN,
    )
    fmoefy(model, num_experts=4, top_k=2)
    gate = model.decoder.layers[0].mlp.moe.gate
    assert isinstance(gate, SigmoidGate) and gate.scale == 1.5 and gate.normalize
    (model,) = make_chunks(layouts.config_of(num_layers=1), layouts.VOCAB, layouts.SEQ_LEN)
    model.config.moe_shared_expert_intermediate_size = 8
    with pytest.raises(
        ValueError, match=r"^moe_shared_expert_intermediate_size=8 is refused: .*moe_layer_spec"
    ):
        fmoefy(model, num_experts=4)
    model.config.moe_shared_expert_intermediate_size = None
    model.config.moe_router_pre_softmax = True
    with pytest.raises(ValueError, match=r"^moe_router_pre_softmax=True describes"):
        fmoefy(model, num_experts=4, gate=UniformGate)


def test_says_that_megatrons_default_trains_no_balance():
    with pytest.warns(UserWarning, match="moe_aux_loss_coeff is 0, Megatron's default"):
        ours_of(config_of())
    silent = [{"moe_aux_loss_coeff": 0.1}, {"moe_router_load_balancing_type": "none"}]
    silent.append(SIGMOID | {"moe_router_enable_expert_bias": True})
    for options in silent:
        config = config_of(**options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="moe_aux_loss_coeff is 0")
            ours_of(config)


def test_their_router_is_watched_logged_and_replayed(tmp_path):
    """Telemetry and replay see Megatron's own TopKRouter as they see ours: the same choices, the same gradients."""
    config = config_of()  # without a balance loss, for which Megatron's router chooses once more
    ours, theirs = ours_of(config), theirs_of(config)
    fill(ours, theirs)
    monitors = [balance.watch(layer) for layer in (ours, theirs)]
    replay, chosen = RoutingReplay(theirs), RoutingReplay(ours)
    plain = step(theirs)
    with replay.record(), balance.log_choices(theirs, tmp_path / "log") as log:
        recorded = step(theirs)
        log.end_step()
    with chosen.record():
        step(ours)
    loads = [next(iter(monitor.collect()["layers"].values()))["tokens_per_expert"] for monitor in monitors]
    assert loads == [[n // 2 for n in loads[1]], loads[1]]
    expected = next(iter(chosen.choices.values()))[0].kept
    (record,) = balance.read_log(tmp_path / "log")[1]
    for topk_idx in (replay.choices["router"][0].kept, record.topk_idx):
        assert torch.equal(topk_idx.sort().values, expected.sort().values)
    other = (expected + 1) % E
    replay.choices["router"] = chosen.choices["moe.gate"] = [Choices(other, other)]
    ours.zero_grad(), theirs.zero_grad()
    with replay.play(), chosen.play():
        assert_equal_numbers(ours, theirs)
    for a, b in ((recorded, plain), (step(theirs), plain)):
        assert torch.equal(a[0], b[0])
    replay.remove()


def test_replay_in_groups_of_their_router_is_refused():
    config = config_of(moe_router_num_groups=4, moe_router_group_topk=2)
    with pytest.raises(ValueError, match="moe_router_group_topk"), RoutingReplay(theirs_of(config)).record():
        pass
