"""Megatron-core with experts, in layouts of gloo processes, against one process."""

import functools
import re
from unittest import mock

import megatron_layouts as layouts
import pytest
import torch
import torch.distributed as dist
from on_cpu import megatron_on_cpu

from fmoe_ext.gates import SoftmaxGate
from tests.sweeps import rest_is_long

pytest.importorskip("megatron.core", reason="pip install megatron-core")
STEPS = 3
TIMEOUT = 300  # seconds of a run; the first one of a process imports Megatron


def build_moe(config, **moe_kwargs):
    from gpt import make_chunks

    from fmoe_ext.megatron import moe_layer_spec

    config.moe_aux_loss_coeff = 0.05
    mlp = moe_layer_spec(
        **{"num_experts": layouts.EXPERTS, "d_hidden": 24, "top_k": 2, "gate": SoftmaxGate} | moe_kwargs
    )
    norm = layouts.SequenceParallelNorm if config.sequence_parallel else None
    return make_chunks(config, layouts.VOCAB, layouts.SEQ_LEN, mlp=mlp, norm=norm)


def train(layout, truth, **moe_kwargs):
    """Losses, gradient norms, and the gradients of the first step; compared with those of truth if it has any."""
    with megatron_on_cpu():
        build = functools.partial(build_moe, **moe_kwargs)
        training = layouts.Training(layout, build, optimizer="sgd", lr=0.3, sgd_momentum=0.5)
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


ETP2_EP2 = {"tp": 2, "etp": 2, "ep": 2, "sequence_parallel": True}
LAYOUTS = {
    "dp4": (4, {}),
    "ep2": (2, {"ep": 2}),
    "ep4": (4, {"ep": 4}),
    "dp2 ep2": (4, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}),
    # Batched, Megatron's messages to the next and to the previous stage, here one rank, look the same.
    "pp2 interleaved": (2, {"pp": 2, "vpp": 2, "batch_p2p_comm": False}),
    "tp2": (2, {"tp": 2}),
    "tp2 ep4": (4, {"tp": 2, "ep": 4}),
    "tp2 ep2 sequence parallel": (4, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "etp2": (2, {"tp": 2, "etp": 2}),
    "etp2 ep2 sequence parallel": (4, ETP2_EP2),
}


# Layouts that combine what the others have one at a time; slices of tensors are in the tests of options below.
QUICK = ("dp2 ep2", "pp2 ep2", "pp2 interleaved")


@pytest.fixture(scope="module")
def one_process(pool):
    return pool.run(train, {}, None, world_size=1, timeout=TIMEOUT)[0]


@pytest.mark.parametrize("layout", rest_is_long(LAYOUTS, QUICK))
def test_equals_one_process(pool, one_process, layout):
    assert_equal_training(pool, one_process, *LAYOUTS[layout])


def assert_equal_training(pool, one_process, num_ranks, sizes, **moe_kwargs):
    losses, norms, truth = one_process
    run = functools.partial(train, **moe_kwargs)
    for rank_losses, rank_norms in pool.run(run, sizes, truth, world_size=num_ranks, timeout=TIMEOUT):
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        assert rank_norms == pytest.approx(norms, rel=1e-6)  # Megatron adds them up in float32
    assert len(set(losses)) == STEPS


def test_expert_tensor_parallelism_of_gated_experts(pool):
    """Gate and up are split each for itself; some experts at a time."""
    options = {"activation": "swiglu", "overlap_degree": 2}
    one_process = pool.run(functools.partial(train, **options), {}, None, world_size=1, timeout=TIMEOUT)[0]
    assert_equal_training(pool, one_process, 4, {"tp": 2, "etp": 2, "ep": 2}, **options)


def all_in_one(quick, *others):
    """Layouts of a test: one that combines what the others have one at a time."""
    return pytest.mark.parametrize(
        "names", [(quick,), pytest.param(others, marks=pytest.mark.long)], ids=["combined", "others"]
    )


@all_in_one("etp2 ep2 sequence parallel", "tp2", "ep2", "tp2 ep2 sequence parallel")
def test_latent_experts(pool, names):
    """Projections beside the gate: gradients of tensor-parallel slices, of sequence parallelism, over experts."""
    run = functools.partial(train, latent_size=4)
    one_process = pool.run(run, {}, None, world_size=1, timeout=TIMEOUT)[0]
    assert "decoder.layers.mlp.moe.latent.narrow.weight [0]" in one_process[2]
    for layout in names:
        assert_equal_training(pool, one_process, *LAYOUTS[layout], latent_size=4)


@all_in_one("tp2 ep2 sequence parallel", "tp2", "ep2", "etp2 ep2 sequence parallel")
def test_balance_loss_of_each_sequence(pool, names):
    """Also of sequences that sequence parallelism cuts, whose parts lie on several ranks."""
    fields = {"moe_router_load_balancing_type": "seq_aux_loss"}
    run = functools.partial(train, gate=None)
    one_process = pool.run(run, fields, None, world_size=1, timeout=TIMEOUT)[0]
    plain = pool.run(run, {}, None, world_size=1, timeout=TIMEOUT)[0]
    gate = next(name for name in plain[2] if "gate.gate.weight" in name)
    assert (one_process[2][gate] - plain[2][gate]).abs().max() > 1e-9  # it is another loss
    for layout in names:
        num_ranks, sizes = LAYOUTS[layout]
        assert_equal_training(pool, one_process, num_ranks, sizes | fields, gate=None)


def compare_with_megatrons_layer(layout, fields):
    """Our layer and Megatron's MoELayer on this rank, each rank with weights and tokens of its own."""
    import megatron_pair as options
    from megatron.core.transformer.moe import moe_utils

    rank = dist.get_rank()
    # Megatron's router reads the name, which 0.16 defines with Transformer Engine only.
    gemm = mock.patch.object(
        moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None), create=True
    )
    with megatron_on_cpu(), gemm:
        layouts.initialize(**layout)
        config = options.config_of(**layout, **fields, sequence_parallel=True)
        ours, theirs = options.ours_of(config), options.theirs_of(config)
        with torch.no_grad():
            options.fill(ours, theirs)
            for p in (*ours.moe.experts.parameters(), *theirs.experts.parameters()):
                p.mul_(1 + 0.25 * rank)
        options.assert_equal_numbers(ours, theirs, seed=rank)
    return ours.moe.experts.h4toh.weight.shape[2]


@pytest.mark.parametrize("gated", [False, True])
def test_expert_tensor_parallelism_equals_megatrons(pool, gated):
    """Output and every gradient of Megatron-core's own layer in the same layout, to 1e-12."""
    fields = {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"}
    if gated:
        fields |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    arguments = {"tp": 2, "etp": 2}, fields
    assert pool.run(compare_with_megatrons_layer, *arguments, world_size=2, timeout=TIMEOUT) == [10, 10]


def refusals_of_expert_tensor_parallelism():
    """Arguments of a layer whose experts are split by width over the ranks."""
    from gpt import make_chunks

    from fmoe_ext import checkpoint
    from fmoe_ext.megatron import fmoefy, moe_layer_spec

    def message(error, call, *args, **kwargs):
        with pytest.raises(error) as raised:
            call(*args, **kwargs)
        return str(raised.value)

    def make(**moe_kwargs):
        config = layouts.config_of(tp=2, num_layers=1)
        mlp = moe_layer_spec(4, **moe_kwargs) if moe_kwargs else None
        return make_chunks(config, layouts.VOCAB, layouts.SEQ_LEN, mlp=mlp)[0]

    with megatron_on_cpu():
        layouts.initialize(tp=2, etp=2)
        model = make(d_hidden=24)
        moe = model.decoder.layers[0].mlp.moe
        return [
            message(ValueError, make, d_hidden=25),
            message(ValueError, make, d_hidden=24, overlap_degree="auto"),
            message(ValueError, make, d_hidden=24, exchange="auto"),
            message(ValueError, fmoefy, make(), num_experts=2),
            message(checkpoint.CheckpointError, checkpoint.save, "unused", model),
            message(RuntimeError, moe.place_experts, range(4)),
        ]


def test_expert_tensor_parallelism_refusals(pool):
    expected = (
        "d_hidden must be a multiple of expert_tensor_parallel_size=2, but is 25",
        'overlap_degree="auto" is measured by each expert-parallel group for itself',
        'exchange="auto" is measured by each expert-parallel group for itself',
        "expert_tensor_parallel_size is 2 .*, but fmoefy makes experts that are whole on one rank",
        "other ranks have parts of its experts .* Megatron's dist_checkpointing",
        "cannot be moved: they have parts elsewhere",
    )
    for messages in pool.run(refusals_of_expert_tensor_parallelism, world_size=2, timeout=TIMEOUT):
        for message, pattern in zip(messages, expected, strict=True):
            assert re.search(pattern, message), message


def train_in_float32(layout, distributed_optimizer):
    with megatron_on_cpu():
        adam = dict(optimizer="adam", lr=0.01, clip_grad=1.0, distributed_optimizer=distributed_optimizer)
        return layouts.Training(layout, build_moe, torch.float32, **adam).run(range(STEPS))


def test_distributed_optimizer(pool):
    """Its shards of expert parameters are those of the ranks that hold the same experts."""
    losses = pool.run(train_in_float32, {}, False, world_size=1, timeout=TIMEOUT)[0]
    for spread in pool.run(train_in_float32, {"ep": 2}, True, timeout=TIMEOUT):
        assert spread == pytest.approx(losses, rel=1e-5)


PRETRAIN = {"num_layers": 2, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
PRETRAIN |= {"moe_router_pre_softmax": True, "moe_aux_loss_coeff": 0.05, "add_bias_linear": False}


def build_as_pretrain_gpt(config):
    """Build a model as gpt_builder of pretrain_gpt.py does with `--spec moe_spec layer_spec`."""
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


@pytest.mark.parametrize("added", [{}, {"moe_shared_expert_intermediate_size": 8}, {"moe_latent_size": 4}])
def test_initial_weights_depend_on_no_layout(pool, added):
    """Nor do those of later layers, and of what follows the experts in a layer."""
    options = {"add_bias_linear": False, **added}
    expected = pool.run(initial_weights, {}, options, None, world_size=1, timeout=TIMEOUT)[0]
    assert expected["decoder.layers.mlp.moe.experts.htoh4.weight [1]"].std() > 0.01
    for layout in ({"ep": 2}, {"tp": 2, "etp": 2}, {}):
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
        fmoefy(model, num_experts=layouts.EXPERTS, top_k=2, init="upcycle")
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
