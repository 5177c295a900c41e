"""What the expert layer can reach at best on a GPU: FLOPs, bytes and the sum of each kernel's own roofline.

python -m benchmarks.roofline        the table of docs/kernel_predictions.md, from the ceilings of an H200
"""

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import table

BYTES = 2  # of a bfloat16 or float16 element
ROUTING_SECONDS = 12e-6  # gate, top-k and sorting, of which most is launching
NUM_SMS = 132  # of an H200
MAIN_LOOP = 0.85  # share of the ceiling that a product of this kind reaches in its main loop; to be measured
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


H200 = Ceilings(788e12, 4.3e12)  # measured; docs/kernels.md

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
class Work:
    """One kernel: what it computes and moves, every operand once."""

    name: str
    flops: float
    bytes: float
    tiles: int = 0  # of its output; 0 where a kernel only moves data
    padding: float = 1  # FLOPs of whole tiles over those of the rows and columns that exist

    def seconds(self, ceilings):
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bandwidth)

    @property
    def waves(self):
        return self.tiles / NUM_SMS

    def expected_seconds(self, ceilings):
        """With whole tiles, whole waves and MAIN_LOOP of the ceiling; moving data at the bandwidth of a copy."""
        if not self.tiles:
            return self.seconds(ceilings)
        whole = self.padding * math.ceil(self.waves) / self.waves
        return max(self.flops * whole / ceilings.flops / MAIN_LOOP, self.bytes / ceilings.bandwidth)


def product(name, shape, rows, depth, columns, tile, byte_count):
    """A product of the rows of every expert, spread evenly, by tiles (rows, columns)."""
    height, width = (
        math.ceil(size / step) for size, step in zip((rows / shape.E, columns), tile, strict=True)
    )
    padding = shape.E * height * tile[0] / rows * width * tile[1] / columns
    return Work(name, 2 * rows * depth * columns, byte_count, shape.E * height * width, padding)


def weight_product(name, shape, rows, m, n, byte_count):
    """The gradient of a weight: tiles of 128 x 256 of [m, n] for each expert, rows in steps of 64."""
    height, width = math.ceil(m / 128), math.ceil(n / 256)
    padding = height * 128 / m * width * 256 / n * math.ceil(rows / shape.E / 64) * 64 * shape.E / rows
    return Work(name, 2 * rows * m * n, byte_count, shape.E * height * width, padding)


def kernels(shape, T):
    """(forward, backward): the Works of each."""
    R, D, H, F = T * shape.K, shape.D, shape.H, shape.F
    token, row, h, a = T * D * BYTES, R * D * BYTES, R * F * BYTES, R * H * BYTES
    w1, w2 = shape.E * F * D * BYTES, shape.E * D * H * BYTES
    forward = (
        product("F1 up", shape, R, D, F, (128, 256), token + w1 + h + a),
        product("F2 rows_by_weight", shape, R, H, D, (128, 192), a + w2 + row),
        Work("F3 combine", 0, row + token),
    )
    backward = (
        product("B1 grad_hidden", shape, R, D, H, (128, 128), token + w2 + 2 * h + a),
        weight_product("B2 grad_weight of w2", shape, R, D, H, token + a + w2),
        product("B3 grad_input", shape, R, F, D, (128, 192), h + w1 + row),
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
    """What backward has to be left: x and the pre-activation."""
    return T * (shape.D + shape.K * shape.F) * BYTES


def prediction(ceilings):
    """Markdown: every kernel of every model at PREDICTED_TOKENS tokens."""
    lines, T = [], PREDICTED_TOKENS
    for shape in MODELS:
        for part, works in zip(("forward", "backward"), kernels(shape, T), strict=True):
            for work in works:
                expected = work.expected_seconds(ceilings)
                line = [shape.name, work.name, f"{work.flops / 1e12:.3f}", f"{work.bytes / 1e9:.3f}"]
                line += [work.tiles or "", f"{work.waves:.1f}" if work.tiles else "", f"{work.padding:.2f}"]
                line += [f"{expected * 1e3:.3f}", f"{work.seconds(ceilings) / expected:.2f}"]
                lines.append(line)
            expected = sum(work.expected_seconds(ceilings) for work in works)
            at_best = sum(work.seconds(ceilings) for work in works)
            total = sum(work.flops for work in works)
            line = [shape.name, f"**{part}**", f"{total / 1e12:.3f}", "", "", "", ""]
            lines.append([*line, f"{expected * 1e3:.3f}", f"{at_best / expected:.2f}"])
    return table(
        ["shape", "kernel", "TFLOP", "GB", "tiles", "waves", "padding", "expected ms", "of roofline"], lines
    )


HEAD = f"""# Predictions

Nothing here was measured on the kernels: this is what a measurement is to be compared with. Written by
`python -m benchmarks.roofline` for T = {PREDICTED_TOKENS}, bfloat16, an H200 of {H200.flops / 1e12:.0f} TFLOP/s
(large product) and {H200.bandwidth / 1e12:.1f} TB/s (copy), {NUM_SMS} SMs, the rows spread evenly over the experts.
Bytes count every operand once. Expected time: whole tiles, whole waves, {MAIN_LOOP:.0%} of the product ceiling in the
main loop; or the bytes at the bandwidth of a copy, if that takes longer. Roofline: the larger of FLOPs and bytes at
the ceilings.

"""

if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "kernel_predictions.md"
    path.write_text(HEAD + prediction(H200) + "\n")
    print(path.name)
