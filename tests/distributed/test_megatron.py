"""Megatron-core with experts, in layouts of gloo processes, against one process."""

import multiprocessing

import megatron_layouts as layouts
import pytest
import torch
from on_cpu import megatron_on_cpu

from fmoe_ext.gates import SoftmaxGate

pytest.importorskip("megatron.core", reason="pip install megatron-core")
STEPS = 3
TIMEOUT = 300  # seconds of a run; the first one of a process imports Megatron


def build_moe(config):
    from gpt import make_chunks

    from fmoe_ext.megatron import moe_layer_spec

    config.moe_aux_loss_coeff = 0.05
    mlp = moe_layer_spec(layouts.EXPERTS, d_hidden=24, top_k=2, gate=SoftmaxGate)
    norm = layouts.SequenceParallelNorm if config.sequence_parallel else None
    return make_chunks(config, layouts.VOCAB, layouts.SEQ_LEN, mlp=mlp, norm=norm)


def train(layout, truth):
    """Losses, gradient norms, and the gradients of the first step; compared with those of truth if it has any."""
    with megatron_on_cpu():
        training = layouts.Training(layout, build_moe, optimizer="sgd", lr=0.3, sgd_momentum=0.5)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(training.forward_backward(step))
            if step == 0:
                first = layouts.gradients(training.modules)
            training.optimizer.step()
            norms.append(float(training.optimizer.get_grad_norm()))
    if truth is None:
        return losses, norms, {name: grad for name, (grad, _) in first.items()}
    scale = max(grad.abs().max() for grad in truth.values())
    for name, (grad, places) in first.items():
        error = (grad - truth[layouts.whole_name(name)][places]).abs().max() / scale
        assert error <= 1e-12, f"gradient of {name} is off by {error:.1e}"
    return losses, norms


LAYOUTS = {
    "dp4": (4, {}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "dp2 ep2": (4, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
    # Batched, Megatron's messages to the next and to the previous stage, here one rank, could not be told apart.
    "pp2 interleaved": (2, {"pp": 2, "vpp": 2, "batch_p2p_comm": False}),
    "tp2": (2, {"tp": 2}),
    "tp2 ep4": (4, {"tp": 2, "ep": 4}),
    "tp2 ep2 sequence parallel": (4, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "etp2": (2, {"tp": 2, "etp": 2}),
    "etp2 ep2 sequence parallel": (4, {"tp": 2, "etp": 2, "ep": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def one_process(pool):
    return pool.run(train, {}, None, world_size=1, timeout=TIMEOUT)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(pool, one_process, layout):
    num_ranks, sizes = LAYOUTS[layout]
    losses, norms, truth = one_process
    for rank_losses, rank_norms in pool.run(train, sizes, truth, world_size=num_ranks, timeout=TIMEOUT):
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        assert rank_norms == pytest.approx(norms, rel=1e-6)  # Megatron adds them up in float32
    assert len(set(losses)) == STEPS


def train_in_float32(layout, distributed_optimizer):
    with megatron_on_cpu():
        adam = dict(optimizer="adam", lr=0.01, clip_grad=1.0, distributed_optimizer=distributed_optimizer)
        return layouts.Training(layout, build_moe, torch.float32, **adam).run(range(STEPS))


def test_distributed_optimizer(pool):
    """Its shards of expert parameters are those of the ranks that hold the same experts."""
    losses = pool.run(train_in_float32, {}, False, world_size=1, timeout=TIMEOUT)[0]
    for spread in pool.run(train_in_float32, {"ep": 2}, True, timeout=TIMEOUT):
        assert spread == pytest.approx(losses, rel=1e-5)


def train_and_save(path):
    """Two steps with the experts on 4 ranks, a checkpoint, two more steps -> parameters at the checkpoint, losses."""
    from megatron.core import dist_checkpointing

    # Megatron's writer starts processes, which those of the pool may not.
    multiprocessing.current_process()._config["daemon"] = False
    with megatron_on_cpu():
        training = layouts.Training({"ep": 4}, build_moe, optimizer="adam", lr=0.01)
        training.run(range(2))
        dist_checkpointing.save(whole_state(training, is_loading=False), path)
        parameters = layouts.shards(training.modules)
        parameters = {name: (p.detach().clone(), *place) for name, (p, *place) in parameters.items()}
        return parameters, training.run(range(2, 4))


def whole_state(training, is_loading):
    model = training.modules[0].sharded_state_dict()
    return {"model": model, "optimizer": training.optimizer.sharded_state_dict(model, is_loading=is_loading)}


def load_and_train(path, layout, expected):
    from megatron.core import dist_checkpointing

    with megatron_on_cpu():
        training = layouts.Training(layout, build_moe, optimizer="adam", lr=0.01)
        state = dist_checkpointing.load(whole_state(training, is_loading=True), path)
        training.modules[0].load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        for name, (p, _, places) in layouts.shards(training.modules).items():
            assert torch.equal(p, expected[name][places]), name
        return training.run(range(2, 4))


def test_checkpoint_moves_to_another_layout(pool, tmp_path):
    saved = pool.run(train_and_save, str(tmp_path), timeout=TIMEOUT)
    losses, expected = saved[0][1], {}
    for parameters, _ in saved:
        for name, (shard, shape, places) in parameters.items():
            expected.setdefault(name, shard.new_empty(shape))[places] = shard
    for num_ranks, layout in ((4, {"ep": 2}), (2, {"ep": 2}), (1, {})):
        resumed = pool.run(
            load_and_train, str(tmp_path), layout, expected, world_size=num_ranks, timeout=TIMEOUT
        )
        for rank_losses in resumed:
            assert rank_losses == pytest.approx(losses, rel=1e-12)


PRETRAIN = {"num_layers": 2, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
PRETRAIN |= {"moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.05, "add_bias_linear": False}


def build_as_pretrain_gpt(config):
    """What gpt_builder of pretrain_gpt.py does with `--spec moe_spec layer_spec`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.spec_utils import import_module
    from on_cpu import CausalAttention

    layer_spec = import_module(["moe_spec", "layer_spec"])
    layer_spec.submodules.self_attention.submodules.core_attention = CausalAttention
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(config.params_dtype)
    try:
        model = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec,
            vocab_size=layouts.VOCAB,
            max_sequence_length=layouts.SEQ_LEN,
            parallel_output=False,
        )
    finally:
        torch.set_default_dtype(default_dtype)
    return [model]


def pretrain(layout):
    with megatron_on_cpu():
        training = layouts.Training(PRETRAIN | layout, build_as_pretrain_gpt, optimizer="sgd", lr=0.3)
        moe = training.modules[0].decoder.layers[1].mlp.moe
        return training.run(range(2)), moe.num_expert, moe.gate.normalize


def test_specification_for_pretrain_gpt(pool):
    losses, num_expert, normalize = pool.run(pretrain, {}, world_size=1, timeout=TIMEOUT)[0]
    assert num_expert == 4 and not normalize
    for spread in pool.run(pretrain, {"ep": 2}, timeout=TIMEOUT):
        assert spread == (pytest.approx(losses, rel=1e-12), 2, False)


def initial_weights(layout, options, expected):
    """The weights that moe_layer_spec draws; compared with the expected ones if there are any."""
    from gpt import make_chunks

    from fmoe_ext.megatron import moe_layer_spec

    with megatron_on_cpu():
        layouts.initialize(**layout)
        torch.manual_seed(3)
        config = layouts.config_of(num_layers=2, **options)
        model = make_chunks(config, layouts.VOCAB, layouts.SEQ_LEN, mlp=moe_layer_spec(layouts.EXPERTS))
    drawn = {name: (p.detach().clone(), places) for name, (p, _, places) in layouts.shards(model).items()}
    if expected is None:
        return {name: p for name, (p, _) in drawn.items()}
    return [name for name, (p, places) in drawn.items() if not torch.equal(p, expected[name][places])]


@pytest.mark.parametrize("shared", [None, 8])
def test_initial_weights_depend_on_no_layout(pool, shared):
    """Nor do those of later layers, and of what follows the experts in a layer."""
    options = {"moe_shared_expert_intermediate_size": shared, "add_bias_linear": False}
    expected = pool.run(initial_weights, {}, options, None, world_size=1, timeout=TIMEOUT)[0]
    assert expected["decoder.layers.mlp.moe.experts.htoh4.weight [1]"].std() > 0.01
    for layout in ({"ep": 2}, {}):
        differing = pool.run(initial_weights, layout, options, expected, world_size=2, timeout=TIMEOUT)
        assert differing == [[], []]


def upcycle(layout, options):
    """Logits of a dense model and of the same model with experts that are copies of its MLPs."""
    from gpt import make_chunks

    from fmoe_ext.megatron import fmoefy

    with megatron_on_cpu():
        layouts.initialize(**{key: layout[key] for key in layout if key in ("tp", "ep")})
        torch.manual_seed(0)
        (model,) = make_chunks(layouts.config_of(**layout, **options), layouts.VOCAB, layouts.SEQ_LEN)
        inputs = layouts.microbatches(0)[0][0]
        positions = torch.arange(layouts.SEQ_LEN).expand_as(inputs)
        dense = model(inputs, positions, None)
        fmoefy(model, num_experts=layouts.EXPERTS // layout.get("ep", 1), top_k=2, init="upcycle")
        with_experts = model(inputs, positions, None)
        num_experts = [report.num_experts for report in model.fmoe_report.replaced]
        return dense.detach(), with_experts.detach(), num_experts


@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(1, {}), (2, {"ep": 2}), (2, {"tp": 2}), (4, {"tp": 2, "ep": 2})]
)
def test_upcycled_model_equals_dense(pool, num_ranks, layout):
    swiglu = {
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
    }
    results = pool.run(upcycle, layout, swiglu, world_size=num_ranks, timeout=TIMEOUT)
    for dense, with_experts, num_experts in results:
        assert (dense - with_experts).abs().max() <= 1e-12 * dense.abs().max()
        assert num_experts == [layouts.EXPERTS] * layouts.LAYERS
