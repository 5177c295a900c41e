"""FP8 with a scale for each block of 128 x 128, as DeepSeek-V3 has it.

    value = E4M3 * scale of its block      the last blocks of rows and columns may be shorter

Gate and up are packed apart and joined to one weight. Blocks begin anew with each part, so the scales of a joined
weight have a dimension for the parts, [E, parts, row blocks of a part, column blocks].
"""

from __future__ import annotations

import torch

from fmoe_ext.frozen.formats.base import Format, Packed, Shape, Tensors, refuse, require, same_shape

E4M3_MAX = 448.0
_SIZE = 128  # rows and columns of a block


class Fp8Block(Format):
    """E4M3 in blocks of 128 x 128."""

    number = 2
    tensors = (
        "data float8_e4m3fn [E, out, in], scale float32 [E, out / 128, in / 128], or of joined parts "
        "[E, parts, out / parts / 128, in / 128]"
    )
    bits = 8.002
    block = 1

    def check(self, q: Packed) -> Shape:
        data = require(q, "data", (torch.float8_e4m3fn,), 3)
        is_joined = q.scale is not None and q.scale.dim() == 4
        scale = require(q, "scale", (torch.float32, torch.bfloat16), 4 if is_joined else 3)
        refuse(q, "zero")
        E, out, width = data.shape
        parts = scale.shape[1] if is_joined else 1
        if parts == 0 or out % parts:
            raise ValueError(f"data of fp8_block {list(data.shape)} has no {parts} equal parts, as scale has")
        blocks = (-(-(out // parts) // _SIZE), -(-width // _SIZE))
        same_shape(q, "scale", scale, (E, parts, *blocks) if is_joined else (E, *blocks))
        return E, out, width

    def decode(self, q: Packed) -> torch.Tensor:
        assert q.scale is not None
        _, out, width = q.data.shape
        size = out // (q.scale.shape[1] if q.scale.dim() == 4 else 1)
        row = torch.arange(out, device=q.device)
        # the block of each row: whole parts before it, then blocks in its part
        row = row // max(size, 1) * -(-size // _SIZE) + row % max(size, 1) // _SIZE
        column = torch.arange(width, device=q.device) // _SIZE
        return q.data.float() * q.scale.flatten(1, -2).float()[:, row][:, :, column]

    def pack(self, weight: torch.Tensor) -> Tensors:
        E, out, width = weight.shape
        rows, columns = -(-out // _SIZE), -(-width // _SIZE)
        padded = weight.new_zeros(E, rows * _SIZE, columns * _SIZE)
        padded[:, :out, :width] = weight
        blocks = padded.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))  # [E, rows, 128, columns, 128]
        scale = blocks.abs().amax((2, 4)) / E4M3_MAX
        scale = torch.where(scale > 0, scale, 1.0)
        scaled = (blocks / scale[:, :, None, :, None]).flatten(3).flatten(1, 2)[:, :out, :width]
        return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale

    def of_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.float8_e4m3fn)

    def join_scale(self, scale: torch.Tensor, parts: int) -> torch.Tensor:
        """Split [E, all blocks of rows, *] into [E, parts, blocks of a part, *]: blocks end where a part ends."""
        return scale.unflatten(1, (parts, -1)) if parts > 1 else scale
