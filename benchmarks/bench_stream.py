"""Trains and generates a model larger than memory, in a memory cgroup (version 1 or 2, needs root).

python -m benchmarks.bench_stream --write FOLDER     # random weights in the shape of Qwen3-30B-A3B, MXFP4, 18.6 GB
python -m benchmarks.bench_stream --write FOLDER --layout kimi --layers 17   # in Kimi's layout, 40 GB
python -m benchmarks.bench_stream --write FOLDER --layout deepseek_v4 --layers 12
python -m benchmarks.bench_stream FOLDER --limit 8GiB --json benchmarks/results/stream.json
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.common import commit, machine
from benchmarks.packed_folders import LAYOUTS, write_packed

SHAPE = {
    **{"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32},
    **{
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
    },
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CGROUPS = Path("/sys/fs/cgroup")


def write(folder: Path, layers: int, vocab: int) -> None:
    """Random weights: scales of MXFP4 that give values of about 0.02, one shard a layer."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        **SHAPE | {"num_hidden_layers": layers, "vocab_size": vocab}, dtype="bfloat16"
    )
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.quantization_config = {"quant_method": "mxfp4"}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (2**26,), dtype=torch.uint8, generator=generator)
    with torch.device("meta"):
        del config.quantization_config
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, value in skeleton.state_dict().items():
        number = name.split(".")[2] if ".layers." in name else "outside"
        shards.setdefault(number, {})[name] = value.shape
    weight_map = {}
    for number, shapes in shards.items():
        tensors = {}
        for name, shape in shapes.items():
            if ".experts." in name:
                E, out, width = shape
                count = E * out * width // 2
                blocks = noise.repeat(-(-count // noise.numel()))[:count]
                tensors[f"{name}_blocks"] = blocks.view(E, out, width // 32, 16)
                tensors[f"{name}_scales"] = torch.full((E, out, width // 32), 120, dtype=torch.uint8)
            elif len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
            else:
                tensors[name] = 0.02 * torch.randn(shape, dtype=torch.bfloat16, generator=generator)
        file = f"model-{number}.safetensors"
        write_shard(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_shard(path: Path, tensors: dict) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


class Limit:
    """A memory cgroup of its own for a child process."""

    def __init__(self, num_bytes: int):
        self.is_v1 = (CGROUPS / "memory").is_dir()
        self.path = (CGROUPS / "memory" if self.is_v1 else CGROUPS) / f"fmoe_bench_{os.getpid()}"
        self.path.mkdir()
        self._write("memory.limit_in_bytes" if self.is_v1 else "memory.max", num_bytes)
        if not self.is_v1:
            self._write("memory.swap.max", 0)

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def enter(self) -> None:
        self._write("cgroup.procs", os.getpid())

    @property
    def peak(self) -> int:
        """Most bytes that the group had, cached pages of files included."""
        return int((self.path / ("memory.max_usage_in_bytes" if self.is_v1 else "memory.peak")).read_text())


def measure(folder: Path, memory: str, rank: int, tokens: int, steps: int, new_tokens: int) -> dict:
    """Seconds and reads of training steps and of generation, in this process."""
    import peft

    import fmoe_ext

    begun = time.perf_counter()
    model = fmoe_ext.stream(folder, memory)
    stream = model.expert_stream
    loaded = time.perf_counter() - begun
    layers = stream.pool.layers
    result = {
        "layers": len(layers),
        "bytes_of_experts": sum(layer.num_bytes(layer.num_experts) for layer in layers),
        "load_seconds": loaded,
        "generation": generate(model, new_tokens),
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    model = fmoe_ext.lora.fuse(
        peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_parameters=EXPERTS))
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    result["training"] = train(model, tokens, steps)
    return result


def generate(model, new_tokens: int) -> dict:
    stream = model.expert_stream
    ids = torch.randint(0, 1000, (1, 4), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        past = model(input_ids=ids, use_cache=True).past_key_values
        step = ids[:, -1:]
        stream.reset_statistics()
        begun = time.perf_counter()
        for _ in range(new_tokens):
            out = model(input_ids=step, past_key_values=past, use_cache=True)
            step = out.logits[:, -1:].argmax(-1)
        seconds = time.perf_counter() - begun
    found = stream.statistics
    return {
        "tokens": new_tokens,
        "tokens_per_second": new_tokens / seconds,
        "bytes_per_token": found.bytes_per_token,
        "hits": found.hits,
        "misses": found.misses,
        "read_seconds": found.read_seconds,
        "seconds": seconds,
    }


def train(model, tokens: int, steps: int) -> dict:
    stream, vocab = model.expert_stream, model.config.vocab_size
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4)
    model.train()
    seconds, losses, rows = [], [], []
    for number in range(steps + 1):
        ids = torch.randint(0, vocab, (4, tokens // 4), generator=torch.Generator().manual_seed(number))
        stream.reset_statistics()
        begun = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
        losses.append(loss.item())
        found = stream.statistics
        reads = found.layers_read, found.parts_read
        rows.append((*reads, found.bytes_read, found.read_seconds, found.hidden_share))
        print(
            f"step {number}: {seconds[-1]:.1f} s, {rows[-1]}, loss {losses[-1]:.3f}",
            file=sys.stderr,
            flush=True,
        )
    assert all(map(math.isfinite, losses))
    best = sorted(range(1, steps + 1), key=seconds.__getitem__)[steps // 2]
    return {
        "tokens": tokens,
        "trained_parameters": sum(p.numel() for p in trained),
        "seconds": seconds[1:],
        "tokens_per_second": tokens / seconds[best],
        "layers_read": rows[best][0],
        "parts_read": rows[best][1],
        "bytes_read": rows[best][2],
        "read_seconds": rows[best][3],
        "hidden_share": rows[best][4],
        "buffer_bytes": stream.statistics.buffer_bytes,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the model's folder, nothing else")
    parser.add_argument("--layout", choices=("qwen3_moe", *LAYOUTS), default="qwen3_moe", help="with --write")
    parser.add_argument("--layers", type=int, default=48, help="with --write")
    parser.add_argument("--vocab", type=int, default=151936, help="with --write")
    parser.add_argument("--limit", default="8GiB", help="of the cgroup")
    parser.add_argument("--memory", help="of stream(); auto by default")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of a training step")
    parser.add_argument("--steps", type=int, default=3, help="that are timed, after one that is not")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        if options.layout in LAYOUTS:
            write_packed(options.folder, options.layout, options.layers)
        else:
            write(options.folder, options.layers, options.vocab)
        return
    memory = options.memory or "auto"
    if options.inside:
        print(
            json.dumps(
                measure(
                    options.folder, memory, options.rank, options.tokens, options.steps, options.new_tokens
                )
            )
        )
        return
    from fmoe_ext.memory import bytes_of_text

    limit = Limit(bytes_of_text(options.limit))
    try:
        command = [
            sys.executable,
            "-m",
            "benchmarks.bench_stream",
            "--inside",
            *sys.argv[1:],
            "--memory",
            memory,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=limit.enter)
        peak = limit.peak
    finally:
        limit.path.rmdir()
    if done.returncode:
        sys.exit(f"error: the child ended with {done.returncode} under {options.limit}; peak {peak:,} bytes")
    result = json.loads(done.stdout.splitlines()[-1])
    result |= {
        "limit": options.limit,
        "memory": memory,
        "peak": peak,
        "commit": commit(),
        "machine": machine(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
