"""LoRA on the experts of a Qwen3-MoE layer: lora.fuse against PEFT alone, on grouped_mm and eager experts, on the CPU.

    python -m benchmarks.bench_lora                                   float32 and bfloat16, into results/lora.*
    python -m benchmarks.bench_lora --experts 8 --width 64 --hidden 32 --tokens 32 --rounds 2 --quick

A step is forward and backward of the layer. Its time is compared with that of the same layer, frozen, without adapters.
"""

import argparse
from pathlib import Path

import peft
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from benchmarks import common
from fmoe_ext import huggingface, lora

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {  # experts implementation, adapters, fused
    "frozen": ("fmoe", False, False),
    "lora.fuse": ("fmoe", True, True),
    "PEFT on grouped_mm": ("grouped_mm", True, False),
    "PEFT on eager": ("eager", True, False),
}


class Model(torch.nn.Module):
    """One layer of experts."""

    def __init__(self, args, implementation):
        super().__init__()
        config = Qwen3MoeConfig(
            hidden_size=args.width,
            moe_intermediate_size=args.hidden,
            num_experts=args.experts,
            num_experts_per_tok=args.top_k,
        )
        config._experts_implementation = implementation
        self.mlp = Qwen3MoeSparseMoeBlock(config)
        torch.manual_seed(0)
        for p in self.parameters():
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        self.requires_grad_(False)

    def forward(self, x):
        return self.mlp(x)


def make_step(args, dtype, implementation, has_adapters, fused):
    model = Model(args, implementation).to(dtype)
    if has_adapters:
        config = peft.LoraConfig(r=args.rank, target_modules=[], target_parameters=PARAMETERS)
        model = peft.get_peft_model(model, config)
    if fused:
        lora.fuse(model)
    x = torch.randn(1, args.tokens, args.width, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)

    def step():
        model.zero_grad()
        x.grad = None
        model(x).backward(grad)

    return step


def measure(args):
    rows = []
    for name in args.dtypes.split(","):
        steps = {case: make_step(args, getattr(torch, name), *how) for case, how in CASES.items()}
        seconds = common.interleave(steps, args.rounds, slow=10.0)
        rows += [{"dtype": name, "case": case, **common.summary(times)} for case, times in seconds.items()]
    return rows


def report(rows):
    medians = {(row["dtype"], row["case"]): row["median"] for row in rows}
    lines = []
    for row in rows:
        frozen, ours = (medians[row["dtype"], case] for case in ("frozen", "lora.fuse"))
        spread = f"{row['median'] * 1e3:.0f} ({row['min'] * 1e3:.0f}-{row['max'] * 1e3:.0f})"
        lines.append(
            [
                row["dtype"],
                row["case"],
                spread,
                f"{row['median'] / frozen:.2f}",
                f"{row['median'] / ours:.2f}",
            ]
        )
    return common.table(["dtype", "layer", "ms (min-max)", "x frozen", "x lora.fuse"], lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "tokens": 512,
        "experts": 64,
        "top_k": 8,
        "width": 1024,
        "hidden": 768,
        "rank": 4,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "lora.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    huggingface.register()
    rows = measure(args)
    text = report(rows)
    print(text)
    if not args.quick:
        sizes = " ".join(
            f"--{n} {getattr(args, n)}" for n in ("tokens", "experts", "top_k", "width", "hidden", "rank")
        )
        common.write(args.out, f"python -m benchmarks.bench_lora {sizes} --rounds {args.rounds}", rows, text)


if __name__ == "__main__":
    main()
