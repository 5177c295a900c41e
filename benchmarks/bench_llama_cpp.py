"""Decoding a GGUF file with 4-bit experts: fmoe_ext.stream beside llama.cpp, tokens a second, in turn in one process.

    pip install gguf xllamacpp transformers && python -m benchmarks.bench_llama_cpp --threads 1

The file has the shape of Qwen3-30B-A3B with fewer layers and words, and random weights: experts in Q4_K, the rest in
--others. All of it fits: the experts stay in the buffers of the stream after the first tokens. One thread is measured
in processor time, which other processes on its core do not add to, and more threads by the clock.
"""

import argparse
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

import fmoe_ext
from benchmarks import common
from benchmarks.bench_stream import SHAPE
from fmoe_ext import frozen
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.formats.gguf import write_facts
from tests.formats import llama_cpp

OUTSIDE = ("q4_k", "q8_0", "bf16")


def write(folder: Path, layers: int, experts: int, vocab: int, others: str) -> Path:
    config = transformers.Qwen3MoeConfig(
        **SHAPE | {"num_hidden_layers": layers, "vocab_size": vocab, "num_experts": experts}, dtype="bfloat16"
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe")
    write_facts(writer, config, FAMILIES["qwen3_moe"])

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


class Ours:
    """Greedy tokens of the streamed model, one a call."""

    def __init__(self, path: Path, prompt: list[int], int8_activations: bool) -> None:
        self.model = fmoe_ext.stream(path, "8GiB", int8_activations=int8_activations)
        with torch.no_grad():
            out = self.model(input_ids=torch.tensor([prompt]), use_cache=True)
        self.past, self.logits = out.past_key_values, out.logits[0, -1]

    def __call__(self) -> None:
        token = self.logits.argmax().view(1, 1)
        with torch.no_grad():
            out = self.model(input_ids=token, past_key_values=self.past, use_cache=True)
        self.logits = out.logits[0, -1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--others", choices=OUTSIDE, default="q4_k")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--turn", type=int, default=10, help="tokens of one, then as many of the other")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    prompt = list(range(1, 9))
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), args.layers, args.experts, args.vocab, args.others)
        exact, ours = (Ours(path, prompt, int8) for int8 in (False, True))
        seconds: dict[str, list[float]] = {"fmoe_ext": [], "fmoe_ext, int8_activations": [], "llama.cpp": []}
        with llama_cpp.decoder(path, prompt, args.threads) as theirs:
            for done in range(0, args.tokens, args.turn):
                for name, step in zip(seconds, (exact, ours, theirs), strict=True):
                    for _ in range(args.turn):
                        begun = clock()
                        step()
                        if done >= args.tokens // 3:  # before, experts are read for the first time
                            seconds[name].append(clock() - begun)
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    print(common.machine(), common.commit())
    rows = [[name, f"{m * 1e3:.2f}", f"{medians['llama.cpp'] / m:.2f}"] for name, m in medians.items()]
    print(common.table(["", "ms a token", "of llama.cpp's tokens/s"], rows))


if __name__ == "__main__":
    main()
