"""Other implementations of the expert layer on a GPU, on the same weights (w1 [E, F, D], w2 [E, D, H]).

A maker takes (w1, w2) and returns a Layer. Whatever an implementation needs only once is done there: modules, copies of
weights in its own layout, compiled functions. The timed call has the work of a training step alone. Signatures of other
projects are compared with what they publish before they are called.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks import peers
from fmoe_ext import ops


class Incompatible(ImportError):
    """An installed package has another interface than the one that is called here."""


@dataclass(frozen=True)
class Layer:
    run: Callable  # (x [T, D], topk_idx [T, K], topk_weights [T, K]) -> out [T, D]
    weights: tuple  # leaves that the backward differentiates
    gradients: Callable = lambda *grads: (
        grads
    )  # gradients of weights -> (dw1, dw2) in the layout of w1 and w2


def leaf(t):
    return t.detach().contiguous().requires_grad_()


def on_weights(function, w1, w2):
    """The Layer of a function of (x, topk_idx, topk_weights, w1, w2)."""
    return Layer(lambda x, topk_idx, topk_weights: function(x, topk_idx, topk_weights, w1, w2), (w1, w2))


def check_signature(function, names):
    """Incompatible unless the parameters of a function begin with these names."""
    found = [name for name in inspect.signature(function).parameters if name not in ("ctx", "self")]
    if found[: len(names)] != list(names):
        where = f"{function.__module__}.{function.__qualname__}"
        raise Incompatible(f"{where} takes ({', '.join(found)}), not ({', '.join(names)}, ...)")


# ---- fmoe_ext
def fmoe_ext_layer(activation):
    def run(x, topk_idx, topk_weights, w1, w2):
        _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, w1.size(0))
        return ops.expert_mlp(x, row_idx, inverse, offs, w1, None, w2, None, topk_weights, activation)

    return run


# ---- torch alone
def grouped_mm_gelu(x, topk_idx, topk_weights, w1, w2):
    order = torch.argsort(topk_idx.flatten(), stable=True)
    offs = torch.bincount(topk_idx.flatten(), minlength=w1.size(0)).cumsum(0).to(torch.int32)
    token = order // topk_idx.size(1)
    hidden = F.gelu(F.grouped_mm(x.index_select(0, token), w1.transpose(1, 2), offs=offs))
    y = F.grouped_mm(hidden, w2.transpose(1, 2), offs=offs)
    y = y * topk_weights.flatten().index_select(0, order).unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


class FusedSteps:
    """Steps between the products of the compiled pipeline, each one pass over memory once it is compiled."""

    def __init__(self, gated, compiled):
        self.gated = gated
        if compiled:
            torch.compiler.reset()  # each shape is compiled for itself; a process may measure many
            for name in ("route", "activate", "combine", "combine_backward", "activate_backward", "sum_rows"):
                setattr(self, name, torch.compile(getattr(self, name), dynamic=False))

    def route(self, topk_idx, num_experts):
        """(token of each row, offs, row of each choice, choice of each row); no host reads a value."""
        choices = topk_idx.flatten()
        order = torch.argsort(choices, stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=choices.device)
        counts = counts.scatter_add(0, choices, torch.ones_like(choices, dtype=torch.int32))
        rows = torch.arange(order.numel(), device=order.device)
        inverse = torch.empty_like(order).scatter_(0, order, rows).view(topk_idx.shape)
        return order // topk_idx.size(1), counts.cumsum(0, dtype=torch.int32), inverse, order

    def activate(self, h):
        if not self.gated:
            return F.gelu(h.float()).to(h.dtype)
        gate, up = h.float().chunk(2, -1)
        return (F.silu(gate) * up).to(h.dtype)

    def combine(self, y, inverse, topk_weights):
        return (y[inverse].float() * topk_weights.float()[..., None]).sum(1).to(y.dtype)

    def combine_backward(self, dout, y, token, inverse, order, topk_weights):
        """(dy by row, gradient of topk_weights)"""
        factors = topk_weights.flatten()[order].float()
        dy = (dout[token].float() * factors[:, None]).to(dout.dtype)
        return dy, (y[inverse].float() * dout[:, None].float()).sum(-1).to(topk_weights.dtype)

    def activate_backward(self, da, h):
        wide, grad = h.float(), da.float()
        if not self.gated:
            cdf = 0.5 * (1 + torch.erf(wide * 0.5**0.5))
            slope = cdf + wide * torch.exp(-0.5 * wide * wide) * 0.3989422804014327
            return (grad * slope).to(h.dtype)
        gate, up = wide.chunk(2, -1)
        s = torch.sigmoid(gate)
        dgate = grad * up * s * (1 + gate * (1 - s))
        return torch.cat([dgate, grad * gate * s], -1).to(h.dtype)

    def sum_rows(self, rows, inverse):
        return rows[inverse].float().sum(1).to(rows.dtype)


class CompiledPipeline(torch.autograd.Function):
    """The peer of record: what a careful user of torch.compile gets from torch.nn.functional.grouped_mm.

    Six grouped products, and one pass each for gather, activation and combine. It keeps rows, h, a and y.
    """

    @staticmethod
    def forward(ctx, x, topk_idx, topk_weights, w1, w2, steps):
        token, offs, inverse, order = steps.route(topk_idx, w1.size(0))
        rows = x[token]
        h = F.grouped_mm(rows, w1.mT, offs=offs)
        a = steps.activate(h)
        y = F.grouped_mm(a, w2.mT, offs=offs)
        ctx.save_for_backward(rows, topk_weights, w1, w2, token, offs, inverse, order, h, a, y)
        ctx.steps = steps
        return steps.combine(y, inverse, topk_weights)

    @staticmethod
    def backward(ctx, dout):
        rows, topk_weights, w1, w2, token, offs, inverse, order, h, a, y = ctx.saved_tensors
        steps = ctx.steps
        dy, dweights = steps.combine_backward(dout, y, token, inverse, order, topk_weights)
        dh = steps.activate_backward(F.grouped_mm(dy, w2, offs=offs), h)
        dw2 = F.grouped_mm(dy.mT, a, offs=offs)
        dx = steps.sum_rows(F.grouped_mm(dh, w1, offs=offs), inverse)
        return dx, None, dweights, F.grouped_mm(dh.mT, rows, offs=offs), dw2, None


def compiled_pipeline(gated, compiled=True):
    def make(w1, w2):
        steps = FusedSteps(gated, compiled)

        def run(x, topk_idx, topk_weights, w1, w2):
            return CompiledPipeline.apply(x, topk_idx, topk_weights, w1, w2, steps)

        return on_weights(run, w1, w2)

    return make


# ---- other projects
def transformers(implementation):
    def make(w1, w2):
        return on_weights(peers.transformers_experts(implementation), w1, w2)

    return make


def liger(w1, w2):
    function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    check_signature(
        function.forward, ("x", "gate_up_proj", "down_proj", "top_k_index", "top_k_weights")
    )  # 0.8.5

    def run(x, topk_idx, topk_weights, w1, w2):
        return function.apply(x, w1, w2, topk_idx.to(torch.int32), topk_weights.float())

    return on_weights(run, w1, w2)


def scattermoe(w1, w2):
    mlp_class = importlib.import_module("scattermoe.mlp").GLUMLP
    check_signature(mlp_class.forward, ("x", "expert_p", "expert_idxs"))
    with torch.device("meta"):
        mlp = mlp_class(w1.size(2), w2.size(2), w1.size(0), 1)
    del mlp.experts.weight, mlp.output_experts.weight
    swap = lambda t: torch.cat(t.chunk(2, dim=1)[::-1], dim=1)  # noqa: E731  it has the up rows before the gate rows
    up_first, down = leaf(swap(w1)), leaf(w2)
    mlp.experts.weight, mlp.output_experts.weight = up_first, down

    def run(x, topk_idx, topk_weights):
        mlp.top_k = topk_idx.size(1)
        return mlp(x, topk_weights.to(x.dtype), topk_idx)

    return Layer(run, (up_first, down), lambda dw1, dw2: (swap(dw1), dw2))


QUACK_TILES = ((128, 192, True),)  # rows, columns, ping-pong


def restrict_quack():
    """Leaves one tile to the tuner of QuACK, which else compiles dozens a shape: four took more than two minutes."""
    for tuner in vars(importlib.import_module("quack.gemm_interface")).values():
        kept = []
        for candidate in getattr(tuner, "configs", ()):
            config = candidate.kwargs["config"]
            tile = (config.tile_m, config.tile_n, config.pingpong)
            if tile in QUACK_TILES and (config.cluster_m, config.swap_ab, config.device_capacity) == (
                2,
                False,
                9,
            ):
                kept.append(candidate)
        if kept:
            tuner.configs = kept


def sonicmoe(w1, w2):
    """By its path for a fixed number of choices a token, which its own layer takes after its router."""
    functional = importlib.import_module("sonicmoe.functional")
    restrict_quack()
    activation = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    up, down, metadata = (
        functional._UpProjection,
        functional._DownProjection,
        functional.TC_topk_router_metadata_triton,
    )
    routing = [
        "x_gather_idx",
        "s_scatter_idx",
        "s_reverse_scatter_idx",
        "num_activated_expert_per_token_offset",
    ]
    ups = ["x", "w1", "b1", "expert_frequency_offset", "total_expert_freq", "K", *routing]
    ups += ["is_each_token_has_variable_activated_experts", "activation_type", "is_inference_mode_enabled"]
    downs = ["a", "h", "w2", "b2", "topk_scores", "expert_frequency_offset", "T", "K", *routing]
    check_signature(up.forward, [*ups, "concat_layout"])  # 0.1.2.post1
    check_signature(down.forward, [*downs, "is_varlen_K", "activation_type"])
    E, width = w1.size(0), w1.size(1)
    rows = (
        torch.arange(width, device=w1.device).view(2, -1).t().flatten()
    )  # gate and up rows in turn: its default
    mixed, second = leaf(w1.index_select(1, rows)), leaf(w2)

    def run(x, topk_idx, topk_weights):
        T, K = topk_idx.shape

        def empty(size):
            return torch.empty(size, dtype=torch.int32, device=x.device)

        counts, offsets = empty(E), empty(E + 1)
        gather, scatter, reverse = empty(T * K), empty(T * K), empty(T * K)
        metadata(topk_idx.to(torch.int32), E, counts, offsets, gather, scatter, reverse)
        index = (gather, scatter, reverse, None, False)
        a, h = up.apply(x, mixed.permute(1, 2, 0), None, offsets, T * K, K, *index, activation, False, False)
        w2_view, scores = second.permute(1, 2, 0), topk_weights.float()
        return down.apply(a, h, w2_view, None, scores, offsets, T, K, *index, activation)

    return Layer(
        run, (mixed, second), lambda dw1, dw2: (torch.empty_like(dw1).index_copy_(1, rows, dw1), dw2)
    )


def transformer_engine(gated, compiled=True):
    """TransformerEngine's GroupedLinear between the compiled steps; it reads the rows of each expert on the host."""

    def make(w1, w2):
        linear = importlib.import_module("transformer_engine.pytorch").GroupedLinear
        check_signature(linear.__init__, ("num_gemms", "in_features", "out_features"))  # 2.20.2
        check_signature(linear.forward, ("inp", "m_splits"))
        steps = FusedSteps(gated, compiled)
        E = w1.size(0)

        def module(weight):
            made = linear(
                E, weight.size(2), weight.size(1), bias=False, params_dtype=weight.dtype, device=weight.device
            )
            with torch.no_grad():
                for e in range(E):
                    getattr(made, f"weight{e}").copy_(weight[e])
            return made, [getattr(made, f"weight{e}") for e in range(E)]

        (first, ones), (second, twos) = module(w1), module(w2)

        def run(x, topk_idx, topk_weights):
            with torch.no_grad():
                token, offs, inverse, order = steps.route(topk_idx, E)
            splits = offs.diff(prepend=offs.new_zeros(1)).tolist()
            h = first(Gather.apply(x, token, inverse, steps), splits)
            y = second(Activate.apply(h, steps), splits)
            return Combine.apply(y, topk_weights, token, inverse, order, steps)

        return Layer(run, (*ones, *twos), lambda *grads: (torch.stack(grads[:E]), torch.stack(grads[E:])))

    return make


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token, inverse, steps):
        ctx.inverse, ctx.steps = inverse, steps
        return x[token]

    @staticmethod
    def backward(ctx, drows):
        return ctx.steps.sum_rows(drows, ctx.inverse), None, None, None


class Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, steps):
        ctx.save_for_backward(h)
        ctx.steps = steps
        return steps.activate(h)

    @staticmethod
    def backward(ctx, da):
        return ctx.steps.activate_backward(da, *ctx.saved_tensors), None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, topk_weights, token, inverse, order, steps):
        ctx.save_for_backward(y, topk_weights, token, inverse, order)
        ctx.steps = steps
        return steps.combine(y, inverse, topk_weights)

    @staticmethod
    def backward(ctx, dout):
        y, topk_weights, token, inverse, order = ctx.saved_tensors
        dy, dweights = ctx.steps.combine_backward(dout, y, token, inverse, order, topk_weights)
        return dy, dweights, None, None, None, None


def deep_gemm(w1, w2):
    """Never had so far: the package of that name on PyPI (1.0.0) has products of FP8 alone."""
    module = importlib.import_module("deep_gemm")
    has_bf16 = hasattr(module, "m_grouped_bf16_gemm_nt_contiguous")
    raise Incompatible(
        "it wants the rows of each expert padded to 128" if has_bf16 else "it has no products of bfloat16"
    )


RECORD = "compiled grouped_mm"  # the peer that ratios are quoted against
TUNING = (
    "Liger",
    "ScatterMoE",
    "SonicMoE",
)  # compile for a minute and more before their first result of a shape


def makers(gated, compiled=True):
    """{name: maker}; fmoe_ext first, then the peer of record."""
    ours = {
        "fmoe_ext": partial(on_weights, fmoe_ext_layer("swiglu" if gated else "gelu")),
        RECORD: compiled_pipeline(gated, compiled),
        "TransformerEngine": transformer_engine(gated, compiled),
    }
    if not gated:
        return ours | {"grouped_mm by hand": partial(on_weights, grouped_mm_gelu)}
    return ours | {
        "grouped_mm by hand": partial(on_weights, peers.grouped_mm_pipeline),
        "transformers grouped_mm": transformers("grouped_mm"),
        "transformers eager": transformers("eager"),
        "DeepGEMM": deep_gemm,
        "Liger": liger,
        "ScatterMoE": scattermoe,
        "SonicMoE": sonicmoe,
    }


def implementations(gated, w1, w2, tuning=False, compiled=True) -> tuple[dict, dict]:
    """({name: Layer}, {name: why it cannot be had}). tuning: TUNING too; compiled=False: plain steps."""
    found, missing = {}, {}
    for name, make in makers(gated, compiled).items():
        if name in TUNING and not tuning:
            missing[name] = "compiles for a minute and more a shape: --tuning"
            continue
        try:
            found[name] = make(w1, w2)
        except ImportError as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing
