"""Round W + D to a packed format by the inputs that it multiplies; W is packed already, D a small change (an adapter).

round_packed() is for `fmoe adapter merge --to packed`. to_nearest() rounds without inputs, for that command's
--rounding nearest and for adapters that train on rounded weights (huggingface/lattice.py).

A packed weight is a point of a lattice: each value is step * level - low with a level of the format. Plain rounding of
W + D finds the nearest point, which is W itself while D is below half a step everywhere: a small adapter is rounded
away. What counts is the output of inputs X [N, in], ||X (Q - W - D)^T||^2: the sum of d H d^T over the rows d of
Q - W - D [out, in], with the inputs' moments H = X^T X. So Q minimises d H d^T, row by row:

1. Babai's point, as GPTQ finds it: round a column, and move its error to the columns that are left, by the Cholesky
   factor of H^-1. Columns of large inputs go first, while many others can take up their error.
2. A few sweeps of coordinate descent: each column to its best level while the others stay.
3. Both again with fresh scales, and 2 alone after the scales are refitted; each row takes the best (round_packed).

GPTQ: Frantar et al., 2022, https://arxiv.org/abs/2210.17323
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fmoe_ext.frozen.formats import FORMATS
from fmoe_ext.frozen.formats.base import Lattice
from fmoe_ext.frozen.formats.microscaling import in_e4m3
from fmoe_ext.frozen.quantized import Quantized, quantize

_COLUMNS = 64  # rounded one after the other before one product corrects the rest of a row
_SWEEPS = 3  # of coordinate descent, at most
_DAMPING = 0.01  # times the mean of the diagonal, as GPTQ: few inputs leave a Hessian singular

# names of the formats that round_packed() and to_nearest() take
ROUNDED = tuple(name for name, kind in FORMATS.items() if isinstance(kind, Lattice))


def round_packed(
    packed: Quantized, target: torch.Tensor, hessian: torch.Tensor
) -> tuple[Quantized, dict[str, int]]:
    """Round target [out, in] to one expert's packing -> (the weight, {way of rounding: number of rows that it gave}).

    packed [1, out, in]: W, for a target W + D. hessian [in, in]: second moments of the inputs, up to a factor.
    Each row is taken from the way with the least error on these inputs, the first of equally good ones:
        file        packed as it is
        kept        by second moments, with the scales of packed
        refitted    kept, its scales fitted by least squares, then moved by sweeps; none where they are powers of two
        nearest     by plain rounding, with scales of quantize() if packed can have them (_with_fresh_scales)
        fresh       by second moments, with the scales of nearest
    Raises ValueError for a format without a grid, and for other shapes.
    """
    if not isinstance(packed.kind, Lattice):
        raise ValueError(f"{packed.format} is not rounded by second moments: {', '.join(ROUNDED)} are")
    if tuple(target.shape) != packed.shape[1:] or packed.shape[0] != 1:
        raise ValueError(
            f"target must be [out, in] of packed {list(packed.shape)} with E = 1, but got {list(target.shape)}"
        )
    target, hessian = target.float(), hessian.float()
    # 1. The ways of rounding.
    descent = _Descent(target, hessian)
    kept = descent.rounded(packed)
    ways = {"file": packed, "kept": kept}
    if packed.kind.can_rescale:
        refitted = _refitted(kept, target, hessian)
        ways["refitted"] = descent.rounded(refitted, _values(refitted))
    if (nearest := _with_fresh_scales(packed, target[None])) is not None:
        ways["nearest"] = nearest
        ways["fresh"] = descent.rounded(nearest)
    # 2. The best of each row.
    errors = torch.stack([error_of(_values(q) - target, hessian) for q in ways.values()])
    best = errors.argmin(0)  # [out]: the way of each row
    counts = {name: int((best == i).sum()) for i, name in enumerate(ways)}

    def best_rows(parts: list[torch.Tensor]) -> torch.Tensor:
        rows = _as_bytes(parts[0]).clone()
        for i, part in enumerate(parts):
            rows[0, best == i] = _as_bytes(part)[0, best == i]
        return rows.view(parts[0].dtype)

    result = replace(packed, data=best_rows([q.data for q in ways.values()]))
    if packed.scale is not None:
        result = replace(result, scale=best_rows([q.scale for q in ways.values() if q.scale is not None]))
    return result, {name: n for name, n in counts.items() if n}


def _as_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """View numbers of 8 bits as bytes: torch lacks operators for floats of 8 bits."""
    return numbers.view(torch.uint8) if numbers.element_size() == 1 else numbers


def to_nearest(packed: Quantized, target: torch.Tensor) -> Quantized:
    """Round target [E, out, in] or [out, in] to the nearest values in the packing of packed, without looking at inputs.

    Each block keeps its scale or, where the block then errs less, takes the one of quantize().
    """
    target = target.view(packed.shape).float()
    kept, fresh = _nearest_values(packed, target), _with_fresh_scales(packed, target)
    if fresh is None:
        return kept
    # blocks of a row: of GGUF's those whose bytes hold the scales, else the columns that share one
    parts = target.shape[2] // packed.kind.block if packed.scale is None else packed.scale.shape[2]
    errors = [(q.kind.decode(q) - target).square().unflatten(2, (parts, -1)).sum(-1) for q in (fresh, kept)]
    is_better = errors[0] < errors[1]

    def chosen(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        first, second = (_as_bytes(t).flatten(2).unflatten(2, (parts, -1)) for t in (new, old))
        return torch.where(is_better[..., None], first, second).view(old.dtype).view_as(old)

    data = chosen(fresh.data, kept.data)
    if kept.scale is None or fresh.scale is None:
        return replace(kept, data=data)
    return replace(kept, data=data, scale=chosen(fresh.scale, kept.scale))


def _nearest_values(packed: Quantized, target: torch.Tensor) -> Quantized:
    """Round target [E, out, in] to the nearest values that the scales of packed allow."""
    kind = _lattice(packed)
    grid = kind.grid(packed)
    width = packed.shape[2] // grid.step.shape[2]
    blocks = target.unflatten(2, (-1, width))
    index = _nearest_levels(blocks, grid.step[..., None], grid.low[..., None], grid.values)
    return replace(packed, data=kind.recode(packed, grid.codes[index].flatten(2)))


def _with_fresh_scales(packed: Quantized, target: torch.Tensor) -> Quantized | None:
    """Quantize target in the dtypes of packed; None where packed has zero points (int4) or groups of another size."""
    nearest = quantize(target, packed.format)
    if packed.scale is None or nearest.scale is None:
        return replace(packed, data=nearest.data)
    if packed.format == "nvfp4" and packed.zero is not None:  # the factor of the whole matrix stays
        scale = in_e4m3(_lattice(nearest).grid(nearest).step * packed.zero[..., 1:] / packed.zero[..., :1])
        return _nearest_values(replace(packed, scale=scale.view(packed.scale.dtype)), target)
    if packed.zero is not None or nearest.scale.shape != packed.scale.shape:
        return None
    if not packed.scale.dtype.is_floating_point or packed.scale.element_size() == 1:
        return replace(packed, data=nearest.data, scale=nearest.scale.view(packed.scale.dtype))
    # in another dtype a scale is rounded, so its codes are chosen again
    same = replace(packed, data=nearest.data, scale=nearest.scale.to(packed.scale.dtype))
    return _nearest_values(same, target)


def error_of(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Compute ||X d||^2 [out] of each row d of a difference [out, in]."""
    return ((difference @ hessian) * difference).sum(1)


def shrunk_moments(rows: torch.Tensor, prior: torch.Tensor | None = None) -> torch.Tensor:
    """Estimate second moments [in, in] of rows [N, in]: the fewer the rows, the nearer to a prior.

    Few tokens choose some experts, and rounding by their moments alone would fit these few.
    prior [in, in]: moments of other rows like these; by default the identity at the mean square of rows. The prior's
    share is that of OAS: Chen et al., 2010, https://arxiv.org/abs/0907.4698
    """
    count, width = rows.shape
    if count == 0:
        return torch.eye(width, device=rows.device) if prior is None else prior
    moments = rows.T @ rows / count
    trace, square = moments.trace(), moments.square().sum()
    around = (square - trace**2 / width) * (count + 1 - 2 / width)
    share = ((1 - 2 / width) * square + trace**2) / around.clamp(min=1e-30)
    share = share.clamp(0, 1)
    if prior is None:
        prior = trace / width * torch.eye(width, device=rows.device)
    return (1 - share) * moments + share * prior


class _Descent:
    """Finds lattice points near a target [out, in] in the metric of a Hessian. Its columns are sorted by `order`."""

    def __init__(self, target: torch.Tensor, hessian: torch.Tensor) -> None:
        # columns of large inputs first, while others are left to take up their error
        self.order = hessian.diag().argsort(descending=True)
        self.back = self.order.argsort()
        self.target = target[:, self.order]
        # factor: of damped^-1 = factor^T factor, upper. In float64, as a Hessian may be badly conditioned
        sorted_hessian = hessian[self.order][:, self.order].double()
        level = sorted_hessian.diag().mean().clamp(min=1e-30)
        identity = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
        damped = sorted_hessian + _DAMPING * level * identity
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        self.factor = torch.linalg.cholesky(inverse, upper=True).float()
        self.hessian = damped.float()

    def rounded(self, packed: Quantized, start: torch.Tensor | None = None) -> Quantized:
        """Round to values that the scales of packed [1, out, in] allow. start: values to improve, not Babai's point."""
        kind = _lattice(packed)
        grid = kind.grid(packed)
        target, factor, hessian = self.target, self.factor, self.hessian
        width = target.shape[1] // grid.step.shape[2]
        step, low = (t[0].repeat_interleave(width, -1)[:, self.order] for t in (grid.step, grid.low))
        blocks = [
            (begin, min(begin + _COLUMNS, target.shape[1])) for begin in range(0, target.shape[1], _COLUMNS)
        ]

        def best(values: torch.Tensor, j: int) -> torch.Tensor:
            """Return the nearest values of column j."""
            index = _nearest_levels(values, step[:, j], low[:, j], grid.values)
            return step[:, j] * grid.values[index] - low[:, j]

        # 1. Babai's point
        if start is None:
            point = torch.empty_like(target)
            left = target.clone()  # and the errors that are moved into it
            for begin, end in blocks:
                errors = torch.empty_like(left[:, begin:end])
                for j in range(begin, end):
                    point[:, j] = best(left[:, j], j)
                    # GPTQ's update: the columns that are left take up the error of column j
                    error = (left[:, j] - point[:, j]) / factor[j, j]
                    left[:, j:end] -= error[:, None] * factor[j, j:end]
                    errors[:, j - begin] = error
                left[:, end:] -= errors @ factor[begin:end, end:]
        else:
            point = start[:, self.order].clone()

        # 2. sweeps, _SWEEPS at most, until no column moves
        for _ in range(_SWEEPS):
            has_moved = False
            slope = (target - point) @ hessian  # minus half the gradient
            for begin, end in blocks:
                # within a block each move corrects the slope of the block alone; one product corrects the rest
                here, moves = slope[:, begin:end].clone(), torch.empty_like(slope[:, begin:end])
                for j in range(begin, end):
                    new = best(point[:, j] + here[:, j - begin] / hessian[j, j], j)
                    moves[:, j - begin] = new - point[:, j]
                    here -= moves[:, j - begin, None] * hessian[j, begin:end]
                    point[:, j] = new
                slope -= moves @ hessian[begin:end]
                has_moved |= bool(moves.any())
            if not has_moved:
                break
        index = _nearest_levels(point, step, low, grid.values)[:, self.back]
        return replace(packed, data=kind.recode(packed, grid.codes[index][None]))


def _nearest_levels(
    values: torch.Tensor, step: torch.Tensor, low: torch.Tensor, levels: torch.Tensor
) -> torch.Tensor:
    """Return for each value the index of the level that is nearest to it."""
    scaled = (values + low) / torch.where(step == 0, 1, step)
    return torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)


def _lattice(packed: Quantized) -> Lattice:
    assert isinstance(packed.kind, Lattice)
    return packed.kind


def _values(packed: Quantized) -> torch.Tensor:
    """Decode to [out, in], rows as they lie."""
    return packed.kind.decode(packed)[0]


def _refitted(packed: Quantized, target: torch.Tensor, hessian: torch.Tensor) -> Quantized:
    """Multiply each scale by the factor with the least error, one block of columns after another."""
    values = _values(packed)
    width = values.shape[1] // packed.scale.shape[2] if packed.scale is not None else packed.kind.block
    slope = (target - values) @ hessian
    factors = []
    for begin in range(0, values.shape[1], width):
        part = values[:, begin : begin + width]
        bent = part @ hessian[begin : begin + width]
        # The error as a function of 1 + f times the block's values is a parabola; more is the f at its bottom.
        curvature = (bent[:, begin : begin + width] * part).sum(1)
        more = (slope[:, begin : begin + width] * part).sum(1) / curvature.clamp(min=1e-30)
        # a nearly flat parabola may say anything: a factor stays between 0.5 and 1.5
        more = torch.where(curvature > 0, more, 0).clamp(-0.5, 0.5)
        slope = slope - more[:, None] * bent
        factors.append(1 + more)
    data, scale = _lattice(packed).rescale(packed, torch.stack(factors, -1)[None])
    return replace(packed, data=data, scale=scale)
