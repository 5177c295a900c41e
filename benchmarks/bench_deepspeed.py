"""DeepSpeed's MoE layer and FMoETransformerMLP with the same experts and choices, forward and backward in turn.

    pip install deepspeed==0.19.8 && python -m benchmarks.bench_deepspeed

One process on the CPU, two nn.Linear and GELU an expert, gate included. DeepSpeed runs as it comes (a capacity of
T K / E choices an expert, others are dropped) and with drop_tokens=False, which computes what our layer computes.
"""

import argparse
import logging
import os

import torch
from torch import nn

from benchmarks import common
from fmoe_ext import FMoETransformerMLP, SoftmaxGate

SHAPES = [(4096, 512, 2048, 8, 2), (2048, 512, 512, 32, 4)]  # T, D, H, E, K


def deepspeed_layers(shape) -> dict[str, nn.Module]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29741")
    import deepspeed
    from deepspeed.moe.layer import MoE

    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    _, D, H, E, K = shape
    layers = {}
    for name, drop in (("DeepSpeed", True), ("DeepSpeed, drop_tokens=False", False)):
        torch.manual_seed(0)
        expert = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
        layers[name] = MoE(D, expert, num_experts=E, k=K, drop_tokens=drop)
        layers[name].set_deepspeed_parallelism()
    return layers


def ours_with_weights_of(layer: nn.Module, shape) -> FMoETransformerMLP:
    _, D, H, E, K = shape
    ours = FMoETransformerMLP(E, D, H, activation="gelu", top_k=K, gate=SoftmaxGate, gate_bias=False)
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    with torch.no_grad():
        ours.gate.gate.weight.copy_(layer.deepspeed_moe.gate.wg.weight)
        for mine, index in ((ours.experts.htoh4, 0), (ours.experts.h4toh, 2)):
            mine.weight.copy_(torch.stack([e[index].weight for e in experts]))
            mine.bias.copy_(torch.stack([e[index].bias for e in experts]))
    return ours


def step_of(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor):
    def step():
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(grad)
        layer.zero_grad()
        x.grad = None
        return out

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(common.machine(), common.commit())
    rows = []
    for shape in SHAPES:
        layers = deepspeed_layers(shape)
        layers["fmoe_ext"] = ours_with_weights_of(layers["DeepSpeed, drop_tokens=False"], shape)
        x = torch.randn(1, shape[0], shape[1], requires_grad=True)
        grad = torch.randn_like(x)
        steps = {name: step_of(layer, x, grad) for name, layer in layers.items()}
        exact, ours = steps["DeepSpeed, drop_tokens=False"](), steps["fmoe_ext"]()
        torch.testing.assert_close(exact, ours, rtol=1e-4, atol=1e-5)
        medians = {n: common.summary(s)["median"] for n, s in common.interleave(steps, args.rounds).items()}
        for name, seconds in medians.items():
            rows.append([str(shape), name, f"{seconds * 1e3:.0f}", f"{seconds / medians['fmoe_ext']:.2f}"])
    print(common.table(["(T, D, H, E, K)", "layer", "ms, forward + backward", "times ours"], rows))


if __name__ == "__main__":
    main()
