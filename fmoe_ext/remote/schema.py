"""Schema: what an expert takes and returns, checked by the client before it sends and by the server before it computes.

A schema holds the dtype and shape of one *row* of each input and of the output, without the batch dimension; a size of
0 means any size. So ("F32", (0, 512)) is a float32 tensor [N, any, 512]. A server derives it from its expert class
(expert_classes.find_schema); a client fetches it by an Info call, as JSON.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fmoe_ext.remote.wire import DTYPES, NAMES

Row: TypeAlias = "tuple[str, tuple[int, ...]]"
_MAX_SIZE = 1 << 40  # largest size accepted in a schema from a server


class SchemaError(ValueError):
    """Tensors, or a schema, are not what was agreed; the text says what is expected and what was given."""


@dataclass(frozen=True)
class Schema:
    """Dtype and shape of one row of each input, and of the output; a size of 0 stands for any size."""

    inputs: tuple[Row, ...]
    output: Row
    keywords: tuple[str, ...] = ()  # names of the last inputs, which are given by keyword
    # shapes of several outputs, without a size of 0; they are sent as one: flattened and side by side [N, sum of sizes]
    parts: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls,
        samples: Sequence[torch.Tensor],
        output: torch.Tensor,
        keywords: Sequence[str] = (),
        parts: Sequence[tuple[int, ...]] = (),
    ) -> "Schema":
        rows = [(NAMES[x.dtype], tuple(x.shape)) for x in (*samples, output)]
        return cls(tuple(rows[:-1]), rows[-1], tuple(keywords), tuple(parts))

    def to_text(self) -> str:
        return json.dumps([self.inputs, self.output, self.keywords, self.parts])

    @classmethod
    def from_text(cls, text: str) -> "Schema":
        """Return the schema in a server's answer; SchemaError if it is not one."""
        try:
            inputs, output, keywords, parts = json.loads(text)
            rows = [(NAMES[DTYPES[name]], _sizes(shape)) for name, shape in [*inputs, output]]
            if not isinstance(keywords, list) or not all(isinstance(name, str) for name in keywords):
                raise ValueError
            schema = cls(tuple(rows[:-1]), rows[-1], tuple(keywords), tuple(map(_sizes, parts)))
            wide = sum(math.prod(part) for part in schema.parts)
            if len(schema.keywords) > len(inputs) or (schema.parts and rows[-1][1] != (wide,)):
                raise ValueError
            if any(0 in part for part in schema.parts):  # split() needs sizes
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            raise SchemaError(f"the server's schema cannot be read: {text[:200]!r}") from None
        return schema

    def arrange(
        self, inputs: Sequence[torch.Tensor], keywords: Mapping[str, torch.Tensor], uid: str
    ) -> tuple[torch.Tensor, ...]:
        """Return all inputs in the order of the schema; SchemaError unless the keywords are the expert's."""
        missing = [name for name in self.keywords if name not in keywords]
        unknown = sorted(keywords.keys() - set(self.keywords))
        if missing or unknown:
            if not self.keywords:
                raise SchemaError(f"{uid} takes no keywords, but got {', '.join(unknown)}")
            takes = ", ".join(self.keywords)
            raise SchemaError(
                f"{uid} takes the keywords {takes}; missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}"
            )
        return (*inputs, *(keywords[name] for name in self.keywords))

    def split(self, y: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the output of an expert, or a tuple of its outputs if it has several."""
        if not self.parts:
            return y
        flat = y.split([math.prod(part) for part in self.parts], dim=1)
        return tuple(x.reshape(-1, *part) for x, part in zip(flat, self.parts, strict=True))

    def check_inputs(self, tensors: Sequence[torch.Tensor], uid: str, max_rows: int | None = None) -> int:
        """Return the number of rows of a call; SchemaError if the tensors are not what the expert takes."""
        if len(tensors) != len(self.inputs):
            raise SchemaError(f"{uid} takes {len(self.inputs)} tensors, but got {len(tensors)}")
        rows = {x.shape[0] if x.dim() else 0 for x in tensors}
        for number, (x, row) in enumerate(zip(tensors, self.inputs, strict=True)):
            _check_rows(x, row, f"input {number} of {uid}")
        if len(rows) != 1 or 0 in rows:
            raise SchemaError(
                f"the inputs of {uid} need one number of rows, at least 1, but got {sorted(rows)}"
            )
        if max_rows is not None and max(rows) > max_rows:
            raise SchemaError(
                f"a call of {uid} may have {max_rows} rows (--max_rows of the server), but got {max(rows)}"
            )
        return rows.pop()

    def check_bytes(self, rows: int, most: int, uid: str) -> None:
        """Raise SchemaError if an output of `rows` rows holds more than `most` bytes; sizes of 0 count as 1."""
        dtype, shape = self.output
        num_bytes = rows * math.prod(size or 1 for size in shape) * DTYPES[dtype].itemsize
        if num_bytes > most:
            raise SchemaError(
                f"the output of {uid} for {rows} rows would be {num_bytes} bytes, but the server sends at most {most} "
                "(--max_message_bytes): send fewer rows per call"
            )

    def check_grad(self, grad: torch.Tensor, inputs: Sequence[torch.Tensor], uid: str) -> None:
        """Raise SchemaError if grad is not a gradient of the output for these inputs."""
        _check_rows(grad, self.output, f"gradient for {uid}")
        if grad.shape[0] != inputs[0].shape[0]:
            raise SchemaError(
                f"the gradient for {uid} has {grad.shape[0]} rows, but the inputs {inputs[0].shape[0]}"
            )

    def check_output(self, y: torch.Tensor, num_rows: int, uid: str) -> None:
        """Raise SchemaError if y is not an output for num_rows rows."""
        _check_rows(y, self.output, f"output of {uid}")
        if y.shape[0] != num_rows:
            raise SchemaError(f"the output of {uid} has {y.shape[0]} rows, but {num_rows} were expected")


def _sizes(shape: Any) -> tuple[int, ...]:
    if not all(type(size) is int and 0 <= size < _MAX_SIZE for size in shape):
        raise ValueError
    return tuple(shape)


def _check_rows(x: torch.Tensor, row: Row, what: str) -> None:
    dtype, shape = row
    fits = x.dim() == len(shape) + 1 and all(
        want in (0, got) for want, got in zip(shape, x.shape[1:], strict=True)
    )
    if not fits or x.dtype != DTYPES[dtype]:
        sizes = ", ".join(["N", *(str(size) if size else "any" for size in shape)])
        raise SchemaError(f"{what} must be {DTYPES[dtype]} [{sizes}], but got {x.dtype} {list(x.shape)}")


def check_finite(tensors: Mapping[str, torch.Tensor], uid: str) -> None:
    """Raise SchemaError if a floating tensor holds NaN or infinity."""
    for name, x in tensors.items():
        if not is_finite(x):
            raise SchemaError(f"{name} for {uid} holds NaN or infinity")


def is_finite(x: torch.Tensor) -> bool:
    """True if no element is NaN or infinite."""
    # a finite sum proves it in one pass without a copy; a sum may overflow, so one that is not needs a second look
    if not x.is_floating_point():
        return True
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
    return bool(torch.isfinite(total)) or bool(torch.isfinite(x).all())
