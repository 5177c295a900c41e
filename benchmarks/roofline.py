"""Upper bound of the expert layer's speed on a GPU: FLOPs, bytes and the sum of each kernel's own roofline.

python -m benchmarks.roofline        writes benchmarks/kernel_predictions.md, from the ceilings of an H100

bench_gpu_layer, _kernels and _main_grads take their shapes, and what a time is compared with, from here. A roofline is
the larger of FLOPs over the ceiling of products and bytes over that of copies; `expected` adds whole tiles and waves,
L2 and exposed epilogues. F1 to F3 are the kernels of the forward, B1 to B5 those of the backward.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import table

BYTES = 2  # of a bfloat16 or float16 element
ROUTING_SECONDS = 12e-6  # gate, top-k and sorting, of which most is launching
NUM_SMS = 132  # of an H100
FLOPS_A_CYCLE = 4096  # of an SM's tensor cores
L2_BANDWIDTH = 7.6e12  # bytes a second of the L2 cache: what F1 draws without pairs on an H100, measured
MAIN_LOOP = 0.95  # share of the ceiling that a main loop reaches if nothing else binds it; assumed
PAIRS_FROM = {
    "F1 up": 1024,
    "F2 rows_by_weight": 1024,
    "B3 grad_input": 1024,
}  # rows an expert (cuda/select.h)
WIDE_FROM = 512  # tiles of 256 columns
WEIGHT_PAIRS_FROM = 512
PREDICTED_TOKENS = 16384


@dataclass(frozen=True)
class Shape:
    name: str
    D: int  # width of a token
    H: int  # hidden width of an expert
    E: int
    K: int
    T: tuple = (4096, 16384, 32768)
    gated: bool = True

    @property
    def F(self):
        return 2 * self.H if self.gated else self.H


@dataclass(frozen=True)
class Ceilings:
    flops: float  # a second, of a large bfloat16 product
    bandwidth: float  # bytes a second, read plus written, of a copy


H100 = Ceilings(787e12, 2.98e12)  # measured; docs/kernels.md

MODELS = (
    Shape("Mixtral-8x7B", 4096, 14336, 8, 2),
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Shape("OLMoE-1B-7B", 2048, 1024, 64, 8),
    Shape("GPT-OSS-20B", 2880, 2880, 32, 4),
    Shape("DeepSeek-V3 slice", 7168, 2048, 32, 1),  # 32 of 256 experts: one row a token on average
    Shape("FastMoE E64", 1024, 4096, 64, 2, gated=False),
    Shape("FastMoE E96", 1024, 4096, 96, 2, gated=False),
)
SONIC = tuple(  # the shapes that SonicMoE publishes: size, T, D, then H, E, K
    Shape(f"SonicMoE {size} {H}/{E}/{K}", D, H, E, K, (T,))
    for size, T, D, experts in (
        ("1.4B", 40960, 768, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
        ("7B", 24576, 1536, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
        ("30B", 32768, 4096, ((256, 256, 16), (512, 128, 8), (1024, 64, 4))),
        ("120B", 32768, 4096, ((512, 256, 16), (1024, 128, 8), (2048, 64, 4))),
    )
    for H, E, K in experts
)


@dataclass(frozen=True)
class Kernel:
    """Tiles of a kernel's product, and the cycles that its main loop does not hide."""

    height: int
    width: int
    epilogue: int  # cycles a tile, by the instructions of its machine code
    ping_pong: bool  # the epilogue of a tile runs beside the main loop of the next one
    shared: int = 256  # rows of the operand that a pair of blocks loads once

    def exposed_cycles(self, main_loop):
        return max(self.epilogue - main_loop, 0) if self.ping_pong else self.epilogue

    def l2_bytes_a_step(self, pairs):
        """Of a block of 64 k."""
        return 128 * (self.height + self.width - (self.shared // 2 if pairs else 0))


KERNELS = {
    "F1 up": Kernel(128, 256, 4500, False),  # of a gated activation
    "F2 rows_by_weight": Kernel(128, 192, 2200, True, shared=192),
    "B1 grad_hidden": Kernel(128, 256, 13000, False),
    "B2 grad_weight of w2": Kernel(128, 256, 2900, False),
    "B3 grad_input": Kernel(128, 192, 2200, True, shared=192),
    "B5 grad_weight of w1": Kernel(256, 128, 2900, False),  # x, along n, is gathered
}
WIDE = Kernel(128, 256, 2900, False)  # F2 and B3 at long k
IN_TURN = Kernel(128, 160, 7000, True)  # F1 without a gate, GELU
NARROW_B1 = Kernel(128, 128, 10900, False, shared=128)  # its epilogue as measured: not hidden, though in turn


def kernel_of(name, shape, columns, steps):
    """cuda/select.h, turns_pay and wide_hidden_pays, for many rows an expert."""
    if name == "F1 up" and not shape.gated:
        return IN_TURN
    if name == "B1 grad_hidden":
        wide, narrow = (math.ceil(columns / width) for width in (256, 128))
        if wide * (steps * 1165 + 13000) >= narrow * (steps * 684 + 10900):
            return NARROW_B1
    return KERNELS[name]


def is_wide(name, columns, steps):
    """cuda/select.h, wide_tiles_pay"""
    wide, narrow = (math.ceil(columns / width) for width in (256, 192))
    pays = 100 * wide * (steps * 1280 + 4000) < 97 * narrow * steps * 1000
    return name in ("F2 rows_by_weight", "B3 grad_input") and pays


@dataclass(frozen=True)
class Work:
    """One kernel: what it computes and moves, every operand once; and the tiles that it takes to do so."""

    name: str
    flops: float
    bytes: float
    tiles: float = 0  # of its output, as many as are expected; 0 where a kernel only moves data
    padding: float = 1  # FLOPs of whole tiles over those of the rows and columns that exist
    steps: float = 0  # blocks of 64 k of a tile
    pairs: bool = False
    kernel: Kernel | None = None  # where there are tiles

    def seconds(self, ceilings):
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bandwidth)

    @property
    def waves(self):
        return self.tiles / NUM_SMS

    def bounds(self, ceilings):
        """Seconds by what binds: tensor cores and L2, both with whole waves and exposed epilogues, and memory."""
        memory = self.bytes / ceilings.bandwidth
        kernel = self.kernel
        if kernel is None:
            return {"memory": memory}
        clock = ceilings.flops / NUM_SMS / FLOPS_A_CYCLE  # that at which the ceiling was measured
        products = self.steps * kernel.height * kernel.width * 64 * 2 / FLOPS_A_CYCLE / MAIN_LOOP
        l2 = self.steps * kernel.l2_bytes_a_step(self.pairs) * NUM_SMS * clock / L2_BANDWIDTH
        return {
            bound: math.ceil(self.waves) * (cycles + kernel.exposed_cycles(cycles)) / clock
            for bound, cycles in (("tensor cores", products), ("L2", l2))
        } | {"memory": memory}

    def expected_seconds(self, ceilings):
        return max(self.bounds(ceilings).values())


def expected_blocks(mean, size):
    """Blocks of `size` rows that an expert fills if tokens choose at random: about a normal distribution."""
    if mean <= 0:
        return 0.0
    spread = math.sqrt(2 * mean)
    last = math.ceil((mean + 8 * spread) / size)
    return sum(math.erfc((j * size + 0.5 - mean) / spread) / 2 for j in range(last + 1))


def product(name, shape, rows, depth, columns, byte_count):
    """A product of the rows of every expert."""
    mean, steps = rows / shape.E, math.ceil(depth / 64)
    wide = mean >= WIDE_FROM and is_wide(name, columns, steps)
    kernel = WIDE if wide else kernel_of(name, shape, columns, steps)
    pairs = mean >= PAIRS_FROM.get(name, math.inf) and kernel is not IN_TURN
    height = expected_blocks(mean, kernel.height * (1 + pairs)) * (1 + pairs)
    width = math.ceil(columns / kernel.width)
    padding = shape.E * height * kernel.height / rows * width * kernel.width / columns
    flops = 2 * rows * depth * columns
    return Work(name, flops, byte_count, shape.E * height * width, padding, steps, pairs, kernel)


def weight_product(name, shape, rows, m, n, byte_count):
    """The gradient of a weight: tiles of [m, n] for each expert, rows in steps of 64."""
    kernel = KERNELS[name]
    height, width = math.ceil(m / kernel.height), math.ceil(n / kernel.width)
    along_n = kernel.width < kernel.height  # the operand that is gathered, and not shared by pairs
    pairs = (width if along_n else height) > 1 and rows / shape.E >= WEIGHT_PAIRS_FROM
    if pairs and along_n:
        width += width % 2
    elif pairs:
        height += height % 2
    steps = expected_blocks(rows / shape.E, 64)
    padding = height * kernel.height / m * width * kernel.width / n * steps * 64 * shape.E / rows
    tiles = shape.E * height * width
    return Work(name, 2 * rows * m * n, byte_count, tiles, padding, steps, pairs, kernel)


def kernels(shape, T):
    """(forward, backward): the Works of each."""
    R, D, H, F = T * shape.K, shape.D, shape.H, shape.F
    token, row, h, a = T * D * BYTES, R * D * BYTES, R * F * BYTES, R * H * BYTES
    w1, w2 = shape.E * F * D * BYTES, shape.E * D * H * BYTES
    forward = (
        product("F1 up", shape, R, D, F, token + w1 + h + a),
        product("F2 rows_by_weight", shape, R, H, D, a + w2 + row),
        Work("F3 combine", 0, row + token),
    )
    backward = (
        product("B1 grad_hidden", shape, R, D, H, token + w2 + 2 * h + a),
        weight_product("B2 grad_weight of w2", shape, R, D, H, token + a + w2),
        product("B3 grad_input", shape, R, F, D, h + w1 + row),
        Work("B4 sum of rows", 0, row + token),
        weight_product("B5 grad_weight of w1", shape, R, F, D, token + h + w1),
    )
    return forward, backward


def flops(shape, T):
    """Of forward; backward has twice as many."""
    return 2 * T * shape.K * shape.D * (shape.F + shape.H)


def roofline_seconds(shape, T, ceilings):
    """(forward, backward) if every kernel ran at its own roofline."""
    forward, backward = kernels(shape, T)
    return (
        ROUTING_SECONDS + sum(work.seconds(ceilings) for work in forward),
        sum(work.seconds(ceilings) for work in backward),
    )


def saved_bytes(shape, T):
    """Bytes kept for the backward: x and the pre-activation."""
    return T * (shape.D + shape.K * shape.F) * BYTES


def prediction(ceilings):
    """Markdown: every kernel of every model at PREDICTED_TOKENS tokens."""
    lines, T = [], PREDICTED_TOKENS
    for shape in MODELS:
        for part, works in zip(("forward", "backward"), kernels(shape, T), strict=True):
            for work in works:
                bounds = work.bounds(ceilings)
                expected = max(bounds.values())
                line = [shape.name, work.name, f"{work.flops / 1e12:.3f}", f"{work.bytes / 1e9:.3f}"]
                line += [f"{work.waves:.1f}" if work.tiles else "", f"{work.padding:.2f}"]
                line += [*(f"{bounds[b] * 1e3:.3f}" if b in bounds else "" for b in BOUNDS)]
                line += [f"{expected * 1e3:.3f}", f"{work.seconds(ceilings) / expected:.2f}"]
                lines.append(line)
            expected = sum(work.expected_seconds(ceilings) for work in works)
            at_best = sum(work.seconds(ceilings) for work in works)
            total = sum(work.flops for work in works)
            line = [shape.name, f"**{part}**", f"{total / 1e12:.3f}", *[""] * 6]
            lines.append([*line, f"{expected * 1e3:.3f}", f"{at_best / expected:.2f}"])
    head = ["shape", "kernel", "TFLOP", "GB", "waves", "padding", *(f"{b} ms" for b in BOUNDS)]
    return table([*head, "expected ms", "of roofline"], lines)


BOUNDS = ("tensor cores", "L2", "memory")
CHANGES = (
    (
        "B1 in tiles of 128 x 256",
        "loads of 48 KiB a step and 256 columns instead of 64 KiB; an epilogue of 13,000 cycles is exposed, up to "
        "21,000 if its stores wait",
        "Qwen3 1.11, OLMoE 1.45, GPT-OSS 2.70, E64 1.03",
        "0.91 to 1.04, 1.16 to 1.34, 2.27 to 2.54, 0.79 to 0.98",
        "1.03, 1.39, 2.42, 0.82",
    ),
    (
        "F1 without a gate in tiles of 128 x 160, in turn",
        "the activation's 12,000 cycles a tile of 256 columns",
        "E64 0.74",
        "0.52 to 0.58",
        "0.71",
    ),
    (
        "exponential and reciprocal of one instruction",
        "8 % of B1's instructions with SwiGLU",
        "B1 alone",
        "2 to 4 % less",
        "not alone",
    ),
    (
        "F2 and B3 in tiles of 128 x 256 alone, 512 to 1,023 rows an expert",
        "padding of 1.125 instead of 1.25",
        "E64 0.50 and 0.51",
        "0.48 to 0.51: 9 waves of slower steps instead of 10",
        "0.44 and 0.44",
    ),
    (
        "B2 and B5: each producer warp issues one TMA load, an address is one multiply-add",
        "300 to 500 cycles between a free stage and the last of its loads",
        "0.92 us a step (0.82 without an index)",
        "0.82 to 0.92 us a step",
        "B2 of Qwen3 0.66 ms (0.71 before), B5 1.32 (1.41)",
    ),
    (
        "B2 and B5 store by TMA",
        "a warp's stores of a tile become 4 to 8 TMA stores, the last of them beside the next product",
        "Qwen3 0.66 and 1.32",
        "0.62 to 0.66 and 1.24 to 1.32",
        "0.65 and 1.30; OLMoE 0.83 and 1.63 (0.87 and 1.72 before)",
    ),
    (
        "main gradients added by TMA in L2",
        "reads and writes of float32 pairs, 32 bytes of a row at a time; what remains is 1.6 ms of traffic for Qwen3 "
        "and 3.8 ms for Mixtral, part of it beside products",
        "whole backward: Qwen3 10.06, Mixtral 48.1 (5.0 and 37.3 without main gradients)",
        "5.8 to 6.6, 38.5 to 40.5",
        "5.85, 37.9",
    ),
)
HEAD = f"""# Predictions

The table predicts the time of each kernel; a measurement can refute it.
`python -m benchmarks.bench_gpu_kernels` compares the two (benchmarks/results/gpu_kernels.md).
`python -m benchmarks.roofline` writes this page for T = {PREDICTED_TOKENS}, bfloat16,
an H100 of {H100.flops / 1e12:.0f} TFLOP/s (large product) and {H100.bandwidth / 1e12:.2f} TB/s (copy), {NUM_SMS} SMs;
tokens choose their experts at random.

The expected time is the largest of three:
* *Tensor cores*: the product in whole tiles and whole waves, at {MAIN_LOOP:.0%} of the product ceiling in the main
  loop, plus the epilogue of a tile unless another tile is multiplied meanwhile. Ragged rows and pairs need more
  tiles than R / 128.
* *L2*: the same, but the main loop takes as long as loading its operands at {L2_BANDWIDTH / 1e12:.1f} TB/s, measured.
* *Memory*: every operand once, at the bandwidth of a copy.

Roofline is the larger of FLOPs and bytes at the ceilings. The cycles of an epilogue are the instructions of its
machine code, issued one a cycle and scheduler, and its waits. 64-row tiles are left out.

## Changes and what became of them

Predicted before they could run, from the times of a first H100 at 16,384 tokens; measured on another one
(2026-11-26).
Each is an entry of the table, so `prove` races it against what there was. Only the last three replace what there was.
The last two were predicted from that run and measured on 2026-11-27.

{table(("change", "what falls", "before, measured ms", "predicted ms", "then measured"), CHANGES)}

**The gather of B2 and B5.** The code with and without an index differs by one load and one multiplication a lane in
two steps, and the load is up to two steps ahead. So arithmetic is not why the index costs 0.10 us a step. F1 gathers
as many bytes through an index and takes 0.80 us. What probably remains is memory: rows in another order meet L2 and
DRAM differently. The code can shorten how late a free stage
begins to load. Counted in the machine code of B2 in bfloat16, for a whole step of one block:

| instructions | before | now |
|---|---|---|
| of a warp, before it waits for the stage | 37 or 50 | 37 or 50 |
| of the first warp, from the free stage to its arrival | 146, four TMA loads among them | 78, one among them |
| of the other warps | 88 | 74 |
| of the whole loop, the last rows of an expert included | 378 | 214 |

The four warps issue less than a tenth of the slots of a step, so fewer instructions alone gain nothing. The first warp
begins to gather earlier. Whether that shows depends on the bound: none of it does if L2 delivers no more.

## All kernels

"""

if __name__ == "__main__":
    path = Path(__file__).parents[1] / "benchmarks" / "kernel_predictions.md"
    path.write_text(HEAD + prediction(H100) + "\n")
    print(path.name)
