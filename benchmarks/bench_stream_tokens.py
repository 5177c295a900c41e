"""New tokens and prompts of fmoe_ext.stream on a GGUF file with 4-bit experts.

    pip install gguf transformers && python -m benchmarks.bench_stream_tokens --threads 1

The file has the shape of Qwen3-30B-A3B with fewer layers and words, and random weights: experts in Q4_K, the rest in
--others. All of it fits: the experts stay in the buffers of the stream after the first tokens. One thread is measured
in processor time, which other processes on its core do not add to, and more threads by the clock. Cases are
sequences that get one token each a step, and prompts that are read from the beginning.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

import fmoe_ext
from benchmarks import common
from benchmarks.bench_stream import SHAPE
from fmoe_ext import frozen
from fmoe_ext.gguf import architecture_for
from fmoe_ext.gguf.writing import write_facts

OUTSIDE = ("q4_k", "q8_0", "bf16")
TURN = 10  # tokens of one model, then as many of the other


def write(folder: Path, layers: int, experts: int, vocab: int, others: str) -> Path:
    config = transformers.Qwen3MoeConfig(
        **SHAPE | {"num_hidden_layers": layers, "vocab_size": vocab, "num_experts": experts}, dtype="bfloat16"
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe")
    write_facts(writer, config, architecture_for("qwen3_moe"))
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, *shape: int, kind: str = others) -> None:
        if kind == "f32":
            return writer.add_tensor(name, (torch.ones(shape) if len(shape) == 1 else random(shape)).numpy())
        if kind == "bf16":
            data = random(shape).bfloat16().view(torch.uint8).numpy()
        else:
            whole = frozen.quantize(random((1, *shape[-2:])), kind).data[0]  # one matrix for all experts
            data = whole.expand(*shape[:-2], *whole.shape).contiguous().numpy()
        writer.add_tensor(
            name, data.reshape(*shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind.upper()]
        )

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    D, H, heads, groups, size = (
        SHAPE[n]
        for n in (
            "hidden_size",
            "moe_intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
    )
    (
        add("token_embd.weight", vocab, D),
        add("output.weight", vocab, D),
        add("output_norm.weight", D, kind="f32"),
    )
    for layer in range(layers):
        for name, shape in {
            "attn_q": (heads * size, D),
            "attn_k": (groups * size, D),
            "attn_v": (groups * size, D),
            "attn_output": (D, heads * size),
        }.items():
            add(f"blk.{layer}.{name}.weight", *shape)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", D, kind="f32")
        for name in ("attn_q_norm", "attn_k_norm"):
            add(f"blk.{layer}.{name}.weight", size, kind="f32")
        add(f"blk.{layer}.ffn_gate_inp.weight", experts, D, kind="f32")
        for name, shape in {"gate": (H, D), "up": (H, D), "down": (D, H)}.items():
            add(f"blk.{layer}.ffn_{name}_exps.weight", experts, *shape, kind="q4_k")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


class NewTokens:
    """Greedy tokens of the streamed model, one of each sequence a call."""

    def __init__(self, model: torch.nn.Module, prompts: list[list[int]]) -> None:
        self.model = model
        with torch.no_grad():
            out = model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        self.past, self.logits = out.past_key_values, out.logits[:, -1]

    def __call__(self) -> None:
        tokens = self.logits.argmax(1, keepdim=True)
        with torch.no_grad():
            out = self.model(input_ids=tokens, past_key_values=self.past, use_cache=True)
        self.logits = out.logits[:, -1]


def reader(model: torch.nn.Module, prompt: list[int]) -> Callable[[], torch.Tensor]:
    """A function that reads a prompt from the beginning and returns the most likely next token."""

    def read() -> torch.Tensor:
        with torch.no_grad():
            out = model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        return out.logits[0, -1].argmax()

    return read


def measure(
    steps: Mapping[str, Callable[[], object]],
    turns: int,
    turn: int,
    first: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    """Median seconds of each step, in turns of `turn` steps, without the first turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(turns):
        for name, step in steps.items():
            for _ in range(turn):
                begun = clock()
                step()
                if done >= first:
                    seconds[name].append(clock() - begun)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--others", choices=OUTSIDE, default="q4_k")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=120, help="of one sequence")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1], help="that get a token each a step")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="tokens of prompts that are read")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), args.layers, args.experts, args.vocab, args.others)
        models = {
            name: fmoe_ext.stream(path, "8GiB", int8_activations=int8)
            for name, int8 in {"": False, "int8_activations": True}.items()
        }

        def add(case: str, tokens: int, medians: dict[str, float]) -> None:
            rows.extend([case, name, f"{m * 1e3:.2f}", f"{tokens / m:.0f}"] for name, m in medians.items())

        for many in args.sequences:
            prompts = [[(8 * s + i) % args.vocab for i in range(1, 9)] for s in range(many)]
            turns = max(6, args.tokens // TURN // (1 if many == 1 else 2))
            steps = {name: NewTokens(model, prompts) for name, model in models.items()}
            turn = TURN if many == 1 else max(1, TURN // many)
            add(f"{many} sequences", many, measure(steps, turns, turn, turns // 3, clock))
        for length in args.prompts:
            prompt = [7 * i % args.vocab for i in range(1, length + 1)]
            steps = {name: reader(model, prompt) for name, model in models.items()}
            add(f"prompt of {length}", length, measure(steps, 6, 1, 1, clock))
    print(common.machine(), common.commit())
    print(common.table(["case", "", "ms a step", "tokens/s"], rows))


if __name__ == "__main__":
    main()
