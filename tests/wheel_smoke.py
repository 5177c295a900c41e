"""Smoke test of an installed wheel: needs torch and nothing else.

python tests/wheel_smoke.py
"""

import torch

from fmoe_ext import FMoETransformerMLP


def by_hand(layer: FMoETransformerMLP, x: torch.Tensor) -> torch.Tensor:
    """The layer's output, token by token: x [T, d_model] -> [T, d_model]."""
    topk_idx, topk_weights = layer.gate(x)
    up, down = layer.experts.htoh4, layer.experts.h4toh
    rows = []
    for token, experts, weights in zip(x, topk_idx.tolist(), topk_weights, strict=True):
        hidden = [up.weight[e] @ token + up.bias[e] for e in experts]
        halves = [h.chunk(2) for h in hidden]
        outs = [
            down.weight[e] @ (torch.nn.functional.silu(gate) * value) + down.bias[e]
            for e, (gate, value) in zip(experts, halves, strict=True)
        ]
        rows.append(sum(w * out for w, out in zip(weights, outs, strict=True)))
    return torch.stack(rows)


def main() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        torch.manual_seed(0)
        layer = FMoETransformerMLP(num_expert=5, d_model=24, d_hidden=40, activation="swiglu", top_k=2).to(
            dtype
        )
        x = torch.randn(30, 24, dtype=dtype)
        results = []
        for function in (layer, lambda x, layer=layer: by_hand(layer, x)):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            results.append((y, torch.autograd.grad(y.float().square().mean(), leaf)[0]))
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    print("fmoe_ext computes the layer and its gradient as by hand")


if __name__ == "__main__":
    main()
