"""Cost of batch_invariant() on the CPU, of a layer and of a model: processor time with it over that without.

python -m benchmarks.bench_batch_invariant       one thread, float32 and bfloat16; prints a line a case, writes nothing
"""

import statistics
import time

import torch

import fmoe_ext

SHAPES = ((1, 512, 512, 16, 4), (64, 512, 512, 16, 4), (1024, 512, 512, 16, 4))  # T, D, H, E, K
ROUNDS = 3


def seconds(layer: torch.nn.Module, x: torch.Tensor, backward: bool) -> float:
    start = time.process_time()
    out = layer(x)
    if backward:
        out.sum().backward()
    return time.process_time() - start


def ratios(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[float, float]:
    """Of the forward, and of forward and backward: with the mode / without, medians over ROUNDS."""
    num_tokens, d_model, d_hidden, num_experts, top_k = shape
    torch.manual_seed(0)
    layer = fmoe_ext.FMoETransformerMLP(
        num_experts, d_model, d_hidden, top_k=top_k, gate="softmax", activation="swiglu", bias=False
    ).to(dtype)
    x = torch.randn(num_tokens, d_model, dtype=dtype, requires_grad=True)
    times: dict[tuple[bool, bool], list[float]] = {}
    for _ in range(ROUNDS):
        for on in (False, True):
            fmoe_ext.use_batch_invariant(on)
            for backward in (False, True):
                best = min(seconds(layer, x, backward) for _ in range(3))
                times.setdefault((on, backward), []).append(best)
    median = {key: statistics.median(values) for key, values in times.items()}
    return median[True, False] / median[False, False], median[True, True] / median[False, True]


def ratios_of_model(dtype: torch.dtype) -> dict[str, float]:
    """Of forwards and of a generated token of a Qwen3-MoE, with the mode / without, the least of ROUNDS."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=4, moe_intermediate_size=256)
    model = Qwen3MoeForCausalLM(config).to(dtype).eval()
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(ROUNDS):
        for on in (False, True):
            fmoe_ext.use_batch_invariant(on)
            with torch.no_grad():
                for batch, length in ((1, 256), (4, 128)):
                    x = torch.randint(8192, (batch, length))
                    start = time.process_time()
                    model(x, use_cache=False)
                    name = f"forward of {batch} x {length} tokens"
                    times.setdefault((name, on), []).append(time.process_time() - start)
                cache = model(x[:1, :64], use_cache=True).past_key_values
                start = time.process_time()
                for _ in range(12):
                    model(x[:1, :1], past_key_values=cache, use_cache=True)
                times.setdefault(("generated token", on), []).append(time.process_time() - start)
    fmoe_ext.use_batch_invariant(False)
    return {name: min(times[name, True]) / min(times[name, False]) for name, on in times if on}


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            forward, both = ratios(shape, dtype)
            print(f"{shape} {dtype}: forward x {forward:.2f}, with backward x {both:.2f}", flush=True)
        fmoe_ext.use_batch_invariant(False)
        for name, ratio in ratios_of_model(dtype).items():
            print(f"Qwen3-MoE {dtype}: {name} x {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
