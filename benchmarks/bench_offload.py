"""A folder read by fmoe_ext.stream beside accelerate's disk offload, with memory to spare for the page cache, in turn.

    python -m benchmarks.bench_offload --threads 1

Random float32 weights of Qwen3-MoE's architecture: 629 MB of experts, of which each program may hold --memory.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import fmoe_ext
from benchmarks import common


def write(folder: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=400,
        dtype=torch.float32,
    )
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder, max_shard_size="100MB")


def seconds(models: dict[str, Any], step: Callable[[Any], object]) -> dict[str, float]:
    """Median of five turns of each model, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(6):
        for name, model in models.items():
            begun = time.perf_counter()
            with torch.no_grad():
                step(model)
            found[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values[1:]) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", default="400MiB")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        write(folder)
        models = {
            "fmoe_ext.stream": fmoe_ext.stream(folder, args.memory),
            "accelerate": transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                device_map="auto",
                max_memory={"cpu": args.memory},
                offload_folder=Path(name, "offload"),
            ),
        }
        ids = torch.arange(256)[None] % 1024
        steps: dict[str, Callable[[Any], object]] = {
            "forward of 256 tokens": lambda model: model(ids),
            "12 new tokens": lambda model: model.generate(
                ids[:, :8], max_new_tokens=12, min_new_tokens=12, do_sample=False
            ),
        }
        rows = []
        for what, step in steps.items():
            medians = seconds(models, step)
            rows += [[what, name, f"{median:.3f}"] for name, median in medians.items()]
        cached = models["fmoe_ext.stream"].expert_stream.reads_through_cache
    print(common.machine(), common.commit(), f"{args.threads} thread(s), reads through the cache: {cached}")
    print(common.table(["", "", "seconds"], rows))


if __name__ == "__main__":
    main()
