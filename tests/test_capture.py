"""Rules of a CUDA graph, on the CPU: a step on "meta" tensors under a mode that refuses what a capture would.

The rules are those of torch.cuda.graph: the host may not wait for the device, copy from or to it, or ask for sizes that
depend on values. Operators have their fake kernels here; tests/cuda/test_graph.py captures the same steps on a GPU.
"""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fmoe_ext import FMoE, FMoETransformerMLP, frozen, gates
from fmoe_ext.frozen import FORMATS
from fmoe_ext.frozen.frozen_gemm import composed as frozen_gemm
from fmoe_ext.frozen.frozen_mlp import composed as frozen_mlp
from fmoe_ext.frozen.frozen_mlp import composed_backward as frozen_mlp_backward
from fmoe_ext.gates import GATES
from tests.ops import frozen_arguments

D, H, E, K, T = 8, 12, 4, 2, 6

# Operators that wait for the device, because a size or a number of the host depends on values.
SYNCHRONISE = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "_pin_memory", "is_pinned",
}  # fmt: skip


class RefusedInCapture(RuntimeError):
    pass


class Capture(TorchDispatchMode):
    """Refuses what a stream that is captured refuses; num_ops: operators that ran."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.num_ops = 0
        self.tensor = torch.tensor

    def __enter__(self):
        torch.tensor = self._tensor  # no operator shows that it copies
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor = self.tensor
        return super().__exit__(*error)

    def _tensor(self, *args, device=None, **kwargs):
        if device is not None and torch.device(device).type == "meta":
            raise RefusedInCapture("torch.tensor copies from the host")
        return self.tensor(*args, device=device, **kwargs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            # what AOTAutograd makes of an operator that may write to an argument: a backward with main gradients
            assert func.name() == "auto_functionalized_v2" and args[0].namespace == "fmoe_ext"
            self.num_ops += 1
            return func(*args, **kwargs)
        name = func.name().split("::")[1].split(".")[0]
        if name in SYNCHRONISE or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            raise RefusedInCapture(f"{func.name()} waits for the device")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise RefusedInCapture(f"{func.name()} with a mask waits for the device")
        out = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        on_host = [t for t in tensors if t.device.type == "cpu" and t.dim() > 0]
        if on_host and any(t.device.type == "meta" for t in tensors):
            raise RefusedInCapture(f"{func.name()} copies between host and device")
        if on_host and any(t.is_pinned() for t in on_host):
            raise RefusedInCapture(f"{func.name()} takes pinned memory")
        self.num_ops += 1
        return out


class Model(nn.Module):
    """Dense layer, two expert layers, dense layer; a loss with the balance loss."""

    def __init__(self, gate="naive", **options):
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, 3)
        layers = [FMoETransformerMLP(E, D, H, "swiglu", top_k=K, gate=gate, **options) for _ in range(2)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x, wrap=lambda f, x: f(x)):
        x = self.before(x)
        for layer in self.layers:
            x = x + wrap(layer, x)
        loss = self.after(x).square().mean()
        found = gates.total_loss(self)
        return loss if found is None else loss + 0.1 * found


def recomputed(layer, x):
    return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)


def captured(model, step):
    """The operators of a captured step; the one before it may do anything, as warm-up steps of a graph may."""
    step(model)
    with Capture() as capture:
        step(model)
    return capture.num_ops


def train(model):
    x = torch.empty(T, D, device="meta", requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("gate", sorted(set(GATES) - {"sinkhorn"}))
@pytest.mark.parametrize("bias", [True, False])
def test_step_of_a_layer(gate, bias):
    with torch.device("meta"):
        layer = FMoETransformerMLP(E, D, H, top_k=1 if gate == "switch" else K, gate=gate, bias=bias)
    assert captured(layer, train) > 10


@pytest.mark.parametrize("wrap", [lambda f, x: f(x), recomputed], ids=["plain", "recomputed"])
@pytest.mark.parametrize(
    "options", [{}, {"shared_expert_hidden": 3, "latent_size": 4}, {"renormalize": True}], ids=str
)
def test_step_of_a_model(wrap, options):
    """Forward, loss with the balance loss, backward and optimizer."""
    with torch.device("meta"):
        model = Model("softmax", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model):
        optimizer.zero_grad()
        model(torch.empty(T, D, device="meta"), wrap).backward()
        optimizer.step()

    assert captured(model, step) > 100
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("gate", ["naive", "softmax"])
def test_traced_step_of_a_model(gate):
    """The graphs that AOTAutograd makes of the forward and of the backward."""
    num_ops = []

    def refusing(graph, _):
        def run(*args):
            with Capture() as capture:
                out = graph(*args)
            num_ops.append(capture.num_ops)
            return out

        return make_boxed_func(run)

    torch.compiler.reset()
    with torch.device("meta"):
        model = Model(gate)
    step = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=refusing))
    step(torch.empty(T, D, device="meta")).backward()
    assert len(num_ops) == 2 and min(num_ops) > 10
    assert all(p.grad is not None for p in model.parameters())


def test_layers_that_read_values_are_refused():
    """Separate experts have their numbers of rows on the host; SinkhornGate asks whether it has converged."""
    with torch.device("meta"):
        separate = FMoE(E, D, expert=lambda d: nn.Linear(d, d))
        sinkhorn = FMoETransformerMLP(E, D, H, gate="sinkhorn")
    for layer in (separate, sinkhorn):
        with pytest.raises(RuntimeError, match=r"waits for the device|meta tensor"):
            captured(layer, train)


def test_mode_refuses_what_a_capture_does():
    x, host = torch.empty(4, device="meta"), torch.ones(4)
    refused = [
        (lambda: torch.equal(x, x), "waits for the device"),
        (lambda: (x > 0).nonzero(), "waits for the device"),
        (lambda: x[x > 0], "with a mask"),
        (lambda: x.repeat_interleave(x.long()), "waits for the device"),
        (lambda: host.to("meta"), "copies between host and device"),
        (lambda: x.copy_(host), "copies between host and device"),
        (lambda: torch.tensor([1.0], device=x.device), "copies from the host"),
    ]
    with Capture() as capture:
        for call, text in refused:
            with pytest.raises(RefusedInCapture, match=text):
                call()
        assert capture.num_ops == 3  # two comparisons and a cast
        assert (x * 2).repeat_interleave(x.long(), output_size=4).shape == (4,)


@pytest.mark.parametrize("name", FORMATS)
def test_frozen_gemm_of_a_decoded_weight_is_capturable(name):
    """As on CUDA where no kernel takes packed weights, the forward and the gradient of x."""
    out, width = 40, 256
    weight = frozen.quantize(torch.ones(1, out, width), name).map(lambda t: t.to("meta"))
    packing = (*weight.packing()[:-1], name == "mxfp4")
    x, bias = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((T, width), (1, out)))
    with Capture() as capture:
        y = frozen_gemm(x, weight.rows(), None, bias, *packing, False)
        dx = frozen_gemm(y, weight.rows(), None, None, *packing, True)
    assert y.shape == (T, out) and dx.shape == x.shape and y.dtype == dx.dtype == x.dtype
    assert capture.num_ops > 8


@pytest.mark.parametrize("combine", [False, True])
def test_frozen_mlp_of_decoded_mxfp4_is_capturable(combine):
    """As composed on CUDA where no kernel takes packed weights; fmoe_ext.gpu.prove captures both."""
    D, H, R = 32, 64, T * K

    def packed(out, width):
        blocks = torch.empty(E, out, width // 32, 16, dtype=torch.uint8, device="meta")
        return frozen.Quantized("mxfp4", blocks, blocks[..., 0])

    def floats(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def integers(*shape):
        return torch.empty(shape, dtype=torch.int32, device="meta")

    w1, w2 = packed(2 * H, D), packed(D, H)
    row_idx, inverse, offs = integers(R), integers(T, K), integers(E)
    given = {"x": floats(T, D), "row_idx": row_idx, "inverse": inverse, "offs": offs, "combine": combine}
    given |= {"b1": floats(E, 2 * H), "b2": floats(E, D), **frozen_arguments.packing_of(w1, w2)}
    given["w1_interleaved"] = True
    forward = frozen_arguments.forward(**given, topk_weights=floats(T, K), activation=4)
    needs = [True, False, False, False, False, True]
    with Capture() as capture, torch.no_grad():
        y, *kept = frozen_mlp(*forward)
        backward = frozen_arguments.backward(forward, torch.empty_like(y), kept, needs)
        dx, *_, dweights = frozen_mlp_backward(*backward)
    assert y.shape == ((T if combine else R), D) and dx.shape == (T, D) and dweights.shape == (T, K)
    assert capture.num_ops > 20
