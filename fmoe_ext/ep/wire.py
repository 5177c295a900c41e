"""Pack rows into 8 bits for their way between ranks: E4M3 with a scale for each row, or for 32 columns of it.

wire="fp8" and "mxfp8" of ParallelLayout; schedule.py packs what it sends and unpacks what comes.

    "fp8"      D codes | s in float32            D + 4 bytes, x = code * s, s = max|x| of the row / 448
    "mxfp8"    D codes | D / 32 exponents        D + D / 32 bytes, x = code * 2 ** (exponent - 127)

A value errs by up to 1/16 of itself, or a few millionths of the largest in its row or block. A row, or block, with an
infinity or a NaN arrives as NaNs: nothing that was not finite turns into a number.
"""

import torch

WIRES = ("full", "fp8", "mxfp8")
_LARGEST = 448.0  # of E4M3
_BLOCK = 32


def is_packed(x: torch.Tensor, wire: str) -> bool:
    """Return whether x [R, D] travels packed: floats of at least 32 columns, for mxfp8 in whole blocks.

    Weights, labels, float64 and other rows travel as they are.
    """
    is_short = x.dim() != 2 or x.shape[1] < _BLOCK
    if wire == "full" or is_short or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return wire == "fp8" or x.shape[1] % _BLOCK == 0


def row_bytes(width: int, wire: str) -> int:
    """Count the bytes of a packed row of width columns."""
    return width + (4 if wire == "fp8" else width // _BLOCK)


def pack(x: torch.Tensor, wire: str) -> torch.Tensor:
    """Pack x [N, D] -> uint8 [N, row_bytes]."""
    x = x.detach().float()
    if wire == "fp8":
        # not 0 for rows of zeros, and no subnormal, which a GPU may flush
        scale = (x.abs().amax(1, keepdim=True) / _LARGEST).clamp(min=2.0**-126)
        return torch.cat(((x / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale.view(torch.uint8)), 1)
    blocks = x.unflatten(1, (-1, _BLOCK))
    largest = blocks.abs().amax(2)
    exponent = torch.frexp(largest / _LARGEST).exponent.clamp(-127, 127)  # largest <= 448 * 2^exponent
    codes = torch.ldexp(blocks, -exponent[..., None]).to(torch.float8_e4m3fn).flatten(1)
    scale = torch.where(largest.isfinite(), exponent + 127, 255).to(torch.uint8)  # 255 is NaN in E8M0
    return torch.cat((codes.view(torch.uint8), scale), 1)


def unpack(packed: torch.Tensor, out: torch.Tensor, wire: str) -> None:
    """Decode what pack() made of rows into out [N, D]."""
    width = out.shape[1]
    codes = packed[:, :width].view(torch.float8_e4m3fn).float()
    if wire == "fp8":
        out.copy_(codes * packed[:, width:].contiguous().view(torch.float32))
        return
    exponent = packed[:, width:].int()
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - 127).masked_fill(
        exponent == 255, torch.nan
    )
    out.copy_((codes.unflatten(1, (-1, _BLOCK)) * scale[..., None]).flatten(1))
