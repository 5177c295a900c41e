"""Checkpoints, compiled autograd and exports of compiled layers: the bits of eager without them."""

from functools import partial

import pytest
import torch
import torch._dynamo.config
from compiled_steps import LAYOUTS, D, make
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fmoe_ext.gates import total_loss

OPERATORS = torch.ops.fmoe_ext
SAVED = (OPERATORS.expert_mlp.default, OPERATORS.topk_gate.default)


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, policy)


def new_layer(gate="softmax"):
    torch.manual_seed(0)
    return make(gate, LAYOUTS["one rank"])


def tokens(size=6):
    return torch.randn(size, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(layer, call):
    x = tokens().requires_grad_()
    torch.manual_seed(7)  # of gates that draw noise
    (call(x).square().sum() + total_loss(layer)).backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


def assert_gradients_of_eager(layer, call):
    plain = new_layer(type(layer.gate))
    for ours, theirs in zip(gradients(layer, call), gradients(plain, plain), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gate", ["softmax", pytest.param("switch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"context_fn": SELECTIVE}], ids=["full", "selective"])
def test_checkpoint_inside_a_graph(gate, options):
    layer = new_layer(gate)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(x):
        return checkpoint(layer, x, use_reentrant=False, **options)

    # A gate's loss is a side effect of its forward, which torch otherwise refuses here.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        assert_gradients_of_eager(layer, call)


@pytest.mark.slow
def test_compiled_autograd():
    layer = new_layer()
    torch.compiler.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):

        @torch.compile(backend="aot_eager")
        def call(x):
            return layer(x)

        assert_gradients_of_eager(layer, call)


def test_export_of_a_training_graph():
    layer, plain = new_layer(), new_layer()
    exported = torch.export.export(layer, (tokens(),)).module()
    exported(tokens()).square().sum().backward()
    plain(tokens()).square().sum().backward()
    trained = dict(exported.named_parameters())
    assert all(torch.equal(trained[name].grad, p.grad) for name, p in plain.named_parameters())


@pytest.mark.slow
def test_aot_inductor_package(tmp_path):
    layer = new_layer().eval()
    sizes = {0: torch.export.Dim("T", min=2, max=64)}
    with torch.no_grad():
        exported = torch.export.export(layer, (tokens(),), dynamic_shapes=(sizes,))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
        packaged = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(packaged(tokens(9)), layer(tokens(9)), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_torch_script_is_refused_in_a_sentence():
    with pytest.raises(
        RuntimeError, match=r"TorchScript does not compile .*: use torch.export or torch.compile"
    ):
        torch.jit.script(new_layer())
    with pytest.raises(RuntimeError, match=r"torch.jit.trace .* cannot record the backward"):
        torch.jit.trace(new_layer(), (tokens(),))
