"""Cost of batch_invariant() for a layer on the CPU: processor time with it over that without, side by side."""

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


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            forward, both = ratios(shape, dtype)
            print(f"{shape} {dtype}: forward x {forward:.2f}, with backward x {both:.2f}", flush=True)


if __name__ == "__main__":
    main()
