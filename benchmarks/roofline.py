"""What the expert layer can reach at best on a GPU: FLOPs, bytes and the sum of each kernel's own roofline.

python -m benchmarks.roofline        the table of docs/kernel_predictions.md, from the ceilings of an H200
"""

import math
from dataclasses import dataclass

BYTES = 2  # of a bfloat16 or float16 element
ROUTING_SECONDS = 12e-6  # gate, top-k and sorting, of which most is launching
TILE_ROWS = 128


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
    columns: int = 0  # of its output, for the count of tiles; 0: no product of rows

    def seconds(self, ceilings):
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bandwidth)


def kernels(shape, T):
    """(forward, backward): the Works of each."""
    R, D, H, F = T * shape.K, shape.D, shape.H, shape.F
    token, row, h, a = T * D * BYTES, R * D * BYTES, R * F * BYTES, R * H * BYTES
    w1, w2 = shape.E * F * D * BYTES, shape.E * D * H * BYTES
    forward = (
        Work("up", 2 * R * D * F, token + w1 + h + a, F),
        Work("down", 2 * R * D * H, a + w2 + row, D),
        Work("combine", 0, row + token),
    )
    backward = (
        Work("grad_hidden", 2 * R * D * H, token + w2 + 2 * h + a, H),
        Work("grad_weight w2", 2 * R * D * H, token + a + w2),
        Work("grad_weight w1", 2 * R * D * F, token + h + w1),
        Work("grad_input", 2 * R * D * F, h + w1 + row, D),
        Work("sum of rows", 0, row + token),
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


def tiles(shape, T, columns, tile_columns, num_sms=132):
    """(tiles, waves, share of the tiles' rows that hold a token) with the rows spread evenly over the experts."""
    rows = T * shape.K / shape.E
    tile_rows = math.ceil(rows / TILE_ROWS)
    count = shape.E * tile_rows * math.ceil(columns / tile_columns)
    return count, count / num_sms, rows / (tile_rows * TILE_ROWS)
