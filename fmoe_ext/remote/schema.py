"""What an expert takes: checked by the client before it sends and by the server before it computes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fmoe_ext.remote.wire import DTYPES, NAMES

MAX_ROWS = 1 << 20


class SchemaError(ValueError):
    """Tensors are not what an expert takes; the text names expected and given."""


@dataclass(frozen=True)
class Schema:
    """Dtype and shape of one row of each input, and of the output; a size of 0 stands for any size."""

    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    output: tuple[str, tuple[int, ...]]

    @classmethod
    def of(cls, samples: Sequence[torch.Tensor], output: torch.Tensor) -> "Schema":
        rows = [(NAMES[x.dtype], tuple(x.shape)) for x in (*samples, output)]
        return cls(tuple(rows[:-1]), rows[-1])

    def to_text(self) -> str:
        return json.dumps([self.inputs, self.output])

    @classmethod
    def from_text(cls, text: str) -> "Schema":
        """The schema in a server's answer; SchemaError if it is none."""
        try:
            inputs, output = json.loads(text)
            rows = [(NAMES[DTYPES[name]], tuple(map(int, shape))) for name, shape in [*inputs, output]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SchemaError(f"the server's schema cannot be read: {text[:200]!r}") from None
        return cls(tuple(rows[:-1]), rows[-1])

    def check_inputs(self, tensors: Sequence[torch.Tensor], uid: str) -> int:
        """The number of rows of a call; SchemaError if the tensors are not what the expert takes."""
        if len(tensors) != len(self.inputs):
            raise SchemaError(f"{uid} takes {len(self.inputs)} tensors, but got {len(tensors)}")
        rows = {x.shape[0] if x.dim() else 0 for x in tensors}
        for number, (x, row) in enumerate(zip(tensors, self.inputs, strict=True)):
            _check_rows(x, row, f"input {number} of {uid}")
        if len(rows) != 1 or not 0 < max(rows) <= MAX_ROWS:
            raise SchemaError(f"the inputs of {uid} need one number of rows, 1 to {MAX_ROWS}, but got {rows}")
        return rows.pop()

    def check_grad(self, grad: torch.Tensor, inputs: Sequence[torch.Tensor], uid: str) -> None:
        """SchemaError if grad is no gradient of the output for inputs."""
        _check_rows(grad, self.output, f"gradient for {uid}")
        if grad.shape[0] != inputs[0].shape[0]:
            raise SchemaError(
                f"the gradient for {uid} has {grad.shape[0]} rows, but the inputs {inputs[0].shape[0]}"
            )

    def check_output(self, y: torch.Tensor, num_rows: int, uid: str) -> None:
        """SchemaError if y is no output for so many rows."""
        _check_rows(y, self.output, f"output of {uid}")
        if y.shape[0] != num_rows:
            raise SchemaError(f"the output of {uid} has {y.shape[0]} rows for {num_rows}")


def _check_rows(x: torch.Tensor, row: tuple[str, tuple[int, ...]], what: str) -> None:
    dtype, shape = row
    fits = x.dim() == len(shape) + 1 and all(
        want in (0, got) for want, got in zip(shape, x.shape[1:], strict=True)
    )
    if not fits or x.dtype != DTYPES[dtype]:
        sizes = ", ".join(["N", *(str(size) if size else "any" for size in shape)])
        raise SchemaError(f"{what} must be {DTYPES[dtype]} [{sizes}], but got {x.dtype} {list(x.shape)}")


def check_finite(tensors: Mapping[str, torch.Tensor], uid: str) -> None:
    """SchemaError if a floating tensor holds NaN or infinity."""
    for name, x in tensors.items():
        if not is_finite(x):
            raise SchemaError(f"{name} for {uid} holds NaN or infinity")


def is_finite(x: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. One pass where the sum shows it, two where the sum overflows."""
    if not x.is_floating_point():
        return True
    total = x.sum(dtype=torch.promote_types(x.dtype, torch.float32))
    return bool(torch.isfinite(total)) or bool(torch.isfinite(x).all())
