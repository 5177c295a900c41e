"""Other implementations of the expert layer on a GPU, on the same weights (w1 [E, F, D], w2 [E, D, H]).

Every function takes (x [T, D], topk_idx [T, K], topk_weights [T, K], w1, w2) and returns out [T, D]. Those of other
projects are used where they can be imported; what they return is compared before they are timed.
"""

import torch
import torch.nn.functional as F

from benchmarks import peers
from fmoe_ext import ops


def fmoe_ext_layer(activation):
    def run(x, topk_idx, topk_weights, w1, w2):
        _, offs, row_idx, inverse = ops.sort_tokens(topk_idx, w1.size(0))
        return ops.expert_mlp(x, row_idx, inverse, offs, w1, None, w2, None, topk_weights, activation)

    return run


def grouped_mm_gelu(x, topk_idx, topk_weights, w1, w2):
    order = torch.argsort(topk_idx.flatten(), stable=True)
    offs = torch.bincount(topk_idx.flatten(), minlength=w1.size(0)).cumsum(0).to(torch.int32)
    token = order // topk_idx.size(1)
    hidden = F.gelu(F.grouped_mm(x.index_select(0, token), w1.transpose(1, 2), offs=offs))
    y = F.grouped_mm(hidden, w2.transpose(1, 2), offs=offs)
    y = y * topk_weights.flatten().index_select(0, order).unsqueeze(1).to(y.dtype)
    return torch.zeros_like(x).index_add(0, token, y)


def liger():
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    def run(x, topk_idx, topk_weights, w1, w2):
        return LigerFusedMoEFunction.apply(x, w1, w2, topk_idx.to(torch.int32), topk_weights.float())

    return run


def scattermoe():
    from scattermoe.mlp import GLUMLP

    def run(x, topk_idx, topk_weights, w1, w2):
        with torch.device("meta"):
            mlp = GLUMLP(x.size(1), w2.size(2), w1.size(0), topk_idx.size(1))
        del mlp.experts.weight, mlp.output_experts.weight
        up_first = torch.cat(w1.chunk(2, dim=1)[::-1], dim=1)  # it expects the up rows before the gate rows
        mlp.experts.weight, mlp.output_experts.weight = up_first, w2
        return mlp(x, topk_weights.to(x.dtype), topk_idx)

    return run


def sonicmoe():
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    def run(x, topk_idx, topk_weights, w1, w2):
        tokens = torch.arange(x.size(0), device=x.device, dtype=torch.int32)
        return moe_general_routing_inputs(
            x,
            topk_weights.float().flatten(),
            tokens.repeat_interleave(topk_idx.size(1)),
            topk_idx.flatten().to(torch.int32),
            w1.permute(1, 2, 0),
            None,
            w2.permute(1, 2, 0),
            None,
            w1.size(0),
            torch.cuda.current_stream().cuda_stream,
            ActivationType.SWIGLU,
            is_concatenated_gate_up=True,
        )[0]

    return run


TUNING = (
    "Liger",
    "ScatterMoE",
    "SonicMoE",
)  # compile for a minute and more before their first result of a shape


def implementations(gated, tuning=False) -> tuple[dict, dict]:
    """({name: function}, {name: why it cannot be had}); fmoe_ext comes first. tuning: those of TUNING too."""
    if not gated:
        return {"fmoe_ext": fmoe_ext_layer("gelu"), "grouped_mm by hand": grouped_mm_gelu}, {}
    makers = {
        "fmoe_ext": lambda: fmoe_ext_layer("swiglu"),
        "grouped_mm by hand": lambda: peers.grouped_mm_pipeline,
        "transformers grouped_mm": lambda: peers.transformers_experts("grouped_mm"),
        "transformers eager": lambda: peers.transformers_experts("eager"),
        "Liger": liger,
        "ScatterMoE": scattermoe,
        "SonicMoE": sonicmoe,
    }
    found, missing = {}, {}
    for name, make in makers.items():
        if name in TUNING and not tuning:
            missing[name] = "compiles for a minute and more a shape: --tuning"
            continue
        try:
            found[name] = make()
        except ImportError as error:
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing
