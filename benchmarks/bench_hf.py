"""Training of Transformers' MoE models on the CPU: experts_implementation="fmoe" against "eager" and "grouped_mm".

    python -m benchmarks.bench_hf                    both models, both dtypes
    python -m benchmarks.bench_hf --models mixtral --dtypes float32 --rounds 3 --quick

One model, whose experts implementation is changed between the steps: A B C A B C ... A step is forward, backward and a
fused AdamW step; "fwd+bwd" is the same without the optimizer. Tokens per second, medians.
"""

import argparse
from pathlib import Path

import torch

from benchmarks import common
from fmoe_ext import huggingface

IMPLEMENTATIONS = ("fmoe", "grouped_mm", "eager")
SIZES = dict(vocab_size=2048, hidden_size=512, num_hidden_layers=2, num_attention_heads=8)
MODELS = {  # class, sizes of the experts: many small ones, few large ones
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256, head_dim=64),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=1024),
    ),
}
BATCH, LENGTH = 4, 256


def make_model(name, dtype):
    import transformers

    class_name, sizes = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**SIZES, **sizes, num_key_value_heads=4)).to(dtype)


def training_steps(model):
    """{(implementation, what): callable}"""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(SIZES["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def make(implementation, with_optimizer):
        def step():
            model.set_experts_implementation(implementation)
            model(input_ids=ids, labels=ids).loss.backward()
            if with_optimizer:
                optimizer.step()
            optimizer.zero_grad()

        return step

    return {
        (implementation, what): make(implementation, what == "step")
        for what in ("step", "fwd+bwd")
        for implementation in IMPLEMENTATIONS
    }


def measure(names, dtypes, rounds):
    rows = []
    for name in names:
        for dtype in dtypes:
            seconds = common.interleave(
                training_steps(make_model(name, getattr(torch, dtype))), rounds, slow=10.0
            )
            for (implementation, what), times in seconds.items():
                row = {"model": name, "dtype": dtype, "implementation": implementation, "measured": what}
                row |= common.summary(times)
                rows.append({**row, "tokens_per_second": BATCH * LENGTH / row["median"]})
    return rows


def report(rows):
    header = ["model", "dtype", "measured", "fmoe tokens/s", "ms (min-max)", "x grouped_mm", "x eager"]
    by_case = {}
    for row in rows:
        case = (row["model"], row["dtype"], row["measured"])
        by_case.setdefault(case, {})[row["implementation"]] = row
    lines = []
    for case, runs in by_case.items():
        ours = runs["fmoe"]
        spread = f"{ours['median'] * 1e3:.0f} ({ours['min'] * 1e3:.0f}-{ours['max'] * 1e3:.0f})"
        ratios = []
        for peer in ("grouped_mm", "eager"):
            other = runs[peer]
            span = f"{other['median'] * 1e3:.0f}: {other['min'] * 1e3:.0f}-{other['max'] * 1e3:.0f}"
            ratios.append(f"{other['median'] / ours['median']:.2f} ({span})")
        lines.append([*case, f"{ours['tokens_per_second']:.0f}", spread, *ratios])
    return common.table(header, lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="write nothing")
    parser.add_argument("--out", type=Path, default=common.RESULTS / "hf.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    huggingface.register()
    rows = measure(args.models.split(","), args.dtypes.split(","), args.rounds)
    text = report(rows)
    print(text)
    if not args.quick:
        command = f"python -m benchmarks.bench_hf --models {args.models} --dtypes {args.dtypes} --rounds {args.rounds}"
        common.write(args.out, command, rows, text)


if __name__ == "__main__":
    main()
