"""Other ways to run an MoE MLP (SwiGLU, weights [E, 2H, D] and [E, D, H]), and the dense chain that is the ceiling.

Every function takes (x [T, D], topk_idx [T, K], topk_weights [T, K], w1, w2) and returns out [T, D]. bench_layer times
implementations() and DenseChain in turn; bench_here and gpu_peers take some of them.
"""

import torch
import torch.nn.functional as F

from fmoe_ext import ops


def fmoe_ext_layer(x, topk_idx, topk_weights, w1, w2):
    _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, w1.size(0))
    return ops.expert_mlp(x, row_idx, inverse, offs, w1, None, w2, None, topk_weights, activation="swiglu")


def grouped_mm_pipeline(x, topk_idx, topk_weights, w1, w2):
    """argsort, index_select, torch grouped_mm, index_add: what one writes by hand with torch alone."""
    num_choices = topk_idx.size(1)
    order = torch.argsort(topk_idx.flatten(), stable=True)
    offs = torch.bincount(topk_idx.flatten(), minlength=w1.size(0)).cumsum(0).to(torch.int32)
    token = order // num_choices
    rows = x.index_select(0, token)
    gate, up = F.grouped_mm(rows, w1.transpose(1, 2), offs=offs).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs)
    y = y * topk_weights.flatten().index_select(0, order).unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


def loop_of_linear(x, topk_idx, topk_weights, w1, w2):
    out = torch.zeros_like(x)
    # unbind: the gradients of all experts are stacked once; w1[e] would fill one of full size for every expert
    for e, (gate_up, down) in enumerate(zip(w1.unbind(), w2.unbind(), strict=True)):
        token, k = torch.where(topk_idx == e)
        if token.numel() == 0:
            continue
        gate, up = F.linear(x.index_select(0, token), gate_up).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down) * topk_weights[token, k].unsqueeze(1).to(x.dtype)
        out = out.index_add(0, token, y)
    return out


def transformers_experts(implementation):
    """transformers' Qwen3MoeExperts with the named experts implementation, on the same weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    built = {}  # the module of the weights that the last call had: it is no part of a step

    def build(w1, w2):
        config = Qwen3MoeConfig(
            num_experts=w1.size(0),
            hidden_size=w1.size(2),
            moe_intermediate_size=w2.size(2),
            hidden_act="silu",
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            experts = Qwen3MoeExperts(config)
        del experts.gate_up_proj, experts.down_proj
        experts.gate_up_proj, experts.down_proj = w1, w2
        return experts

    def run(x, topk_idx, topk_weights, w1, w2):
        if built.get("weights") != (id(w1), id(w2)):
            built.update(weights=(id(w1), id(w2)), experts=build(w1, w2))
        return built["experts"](x, topk_idx, topk_weights.to(x.dtype))

    return run


def implementations() -> dict:
    return {
        "fmoe_ext": fmoe_ext_layer,
        "grouped_mm by hand": grouped_mm_pipeline,
        "loop of F.linear": loop_of_linear,
        "transformers grouped_mm": transformers_experts("grouped_mm"),
        "transformers eager": transformers_experts("eager"),
    }


class DenseChain:
    """The GEMMs of the layer's FLOPs on one dense expert that holds all T * K rows, into buffers made beforehand."""

    def __init__(self, num_rows, d_model, d_hidden, dtype, gated=True):
        def buffer(*shape):
            return torch.randn(*shape).to(dtype)

        self.x, self.dy = buffer(num_rows, d_model), buffer(num_rows, d_model)
        width = 2 * d_hidden if gated else d_hidden
        self.w1, self.w2 = buffer(width, d_model), buffer(d_model, d_hidden)
        self.h, self.a, self.y = (
            buffer(num_rows, width),
            buffer(num_rows, d_hidden),
            buffer(num_rows, d_model),
        )
        self.dw1, self.dw2 = torch.empty_like(self.w1), torch.empty_like(self.w2)

    def forward(self):
        torch.mm(self.x, self.w1.t(), out=self.h)
        torch.mm(self.a, self.w2.t(), out=self.y)

    def forward_backward(self):
        self.forward()
        torch.mm(self.dy, self.w2, out=self.a)
        torch.mm(self.dy.t(), self.a, out=self.dw2)
        torch.mm(self.h, self.w1, out=self.y)
        torch.mm(self.h.t(), self.x, out=self.dw1)
