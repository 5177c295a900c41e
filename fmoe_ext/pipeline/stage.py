"""Run consecutive layers of a model on one microbatch after the other: Stage, which split() makes and Pipeline runs.

torch's schedules send tensors of one shape, but microbatches may have unequal numbers of rows, or none. So a stage
pads what it sends to the rows of the largest microbatch and cuts what it gets: layers see only rows that are
there. The schedule gets the numbers of microbatches in place of the batch, whose values the stage has.

    received [most_rows, *] -> _Enter or cut -> [rows, *] -> layers -> [rows, *] -> _Leave -> sent [most_rows, *]

The losses of a stage's gates never reach the last stage. They enter the gradient where they arise: _Leave passes a
stage's result on, and in the backward gives the loss beside it the gradient 1, as the auxiliary losses of
Megatron-LM have it.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of

from fmoe_ext.gates import BaseGate
from fmoe_ext.gates.accumulation import loss_share
from fmoe_ext.gates.base_gate import gates_of
from fmoe_ext.pipeline.batch_norm import Recomputing, batch_norms_of
from fmoe_ext.pipeline.microbatch import Tensors, as_tuple


@dataclass(frozen=True)
class Boundary:
    """Values between two layers."""

    shapes: tuple[tuple[int, ...], ...]  # of a row of each tensor
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, values: Tensors) -> "Boundary":
        parts = as_tuple(values)
        return cls(tuple(tuple(x.shape[1:]) for x in parts), tuple(x.dtype for x in parts))

    def examples(self, rows: int) -> tuple[Tensor, ...]:
        """Make tensors of this many rows without content, as torch's PipelineStage wants to see them."""
        return tuple(
            torch.empty(rows, *shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )


@dataclass
class Microbatches:
    """The parts of one batch."""

    values: list[Tensors]  # that the first stage takes
    targets: list[Any]  # that the loss takes
    rows: list[int]  # of each part; 0 for those that a schedule needs beyond chunks
    balance_weight: float  # how much the sum of all gates' losses counts

    @property
    def most_rows(self) -> int:
        return max([1, *self.rows])  # what is sent has a row, also of an empty batch


class Stage(nn.Module):
    """Consecutive layers of a model. Part of split()'s result; Pipeline runs it.

    index, num_stages: its place. inputs, outputs: shapes and dtypes of what it receives and sends. parts: the modules
    of the model that it uses, under their names in the model.
    Microbatches come padded to one number of rows, as the schedules of torch need it; the layers see only rows that are
    there, so that gates, capacities and batch norms count no padding.
    """

    parts: nn.Module

    def __init__(
        self, layers: Sequence[nn.Module], index: int, num_stages: int, inputs: Boundary, outputs: Boundary
    ):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.index = index
        self.num_stages = num_stages
        self.inputs = inputs
        self.outputs = outputs
        self.is_checkpointed = False
        self.batch: Microbatches | None = None
        self.balance_losses: list[Tensor] = []
        self.number = 0  # of the microbatch whose forward comes next
        self._gates: list[list[BaseGate]] = []
        self._norms: list[list[nn.Module]] = []  # those whose statistics a repeated forward must not move

    @property
    def is_first(self) -> bool:
        """Return whether it gets the batch's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return whether its result is the model's."""
        return self.index == self.num_stages - 1

    def forward(self, *values: Tensor) -> Tensors:
        """Compute microbatch self.number: values [most_rows, *] -> what the last layer returns, padded as they are.

        The first stage takes the values from its batch, whatever its arguments are.
        """
        # 1. Cut the padding off.
        batch = self.batch
        assert batch is not None, "Pipeline gives a stage its batch before it runs"
        number = self.number
        rows = batch.rows[number]
        if self.is_first:
            inputs = as_tuple(batch.values[number])
        else:
            # Never a received x itself: torch's stage receives every step into it, and keeps its hooks.
            inputs = tuple(_Enter.apply(x) if len(x) == rows else x[:rows] for x in values)
        # 2. Compute.
        try:
            outputs, losses = self.compute(inputs[0] if len(inputs) == 1 else inputs)
        except Exception as error:
            if rows == 0:
                raise ValueError(
                    f"stage {self.index} takes no empty microbatch: the batch was cut into {len(batch.rows)} of "
                    f"{batch.rows} rows; use as many chunks as the schedule needs, and at least as many rows"
                ) from error
            raise
        if (found := Boundary.of(outputs)) != self.outputs:
            raise ValueError(
                f"stage {self.index} returns rows of shape {_text(found)}, but with split()'s sample they were "
                f"{_text(self.outputs)}: a pipeline is for batches of the sample's shape, first dimension aside; pad "
                "the batch, or split() the model with a sample of this shape"
            )
        # 3. The losses of the gates enter the gradient here, as they never reach the last stage (_Leave).
        injected: Tensor | None = None
        if losses:
            shares = [loss.sum() * loss_share(gate, number, batch.rows) for gate, loss in losses]
            injected = torch.stack(shares).sum() * batch.balance_weight
            self.balance_losses.append(injected.detach())
        # 4. Pad: by one _Leave for all floating tensors, which gives the loss its gradient once.
        most, parts = batch.most_rows, as_tuple(outputs)
        floats = [x for x in parts if x.is_floating_point()] if torch.is_grad_enabled() else []
        left = iter(_Leave.apply(injected, most, *floats) if floats else ())
        padded = tuple(next(left) if floats and x.is_floating_point() else _padded(x, most) for x in parts)
        return padded[0] if isinstance(outputs, Tensor) else padded

    def compute(self, values: Tensors) -> tuple[Tensors, list[tuple[BaseGate, Tensor]]]:
        """Compute the layers one after the other -> their result, and gates with their losses."""
        losses: list[tuple[BaseGate, Tensor]] = []
        is_checkpointed = self.is_checkpointed and self.training and torch.is_grad_enabled()
        for layer, gates, norms in zip(self.layers, self._gates, self._norms, strict=True):
            # losses are read inside the checkpoint: its backward then computes them again, with their graph
            if is_checkpointed:
                values, of_layer = checkpoint_of(
                    *(_run, layer, gates, values),
                    use_reentrant=False,
                    context_fn=functools.partial(_contexts, norms),
                )
            else:
                values, of_layer = _run(layer, gates, values)
            losses += of_layer
        return values, losses

    def begin(self, batch: Microbatches) -> None:
        """Take the batch of a step. Looks for modules once a step: a search visits every module of a layer."""
        self.batch = batch
        self._gates = [gates_of(layer) for layer in self.layers]
        self._norms = [batch_norms_of(layer) if self.is_checkpointed else [] for layer in self.layers]

    def forget(self) -> None:
        """Let go of the batch, and of losses that a repeated forward left in gates."""
        self.batch = None
        self.balance_losses = []
        for gates in self._gates:
            for gate in gates:
                gate.set_loss(None)
        self._gates, self._norms = [], []


def _text(boundary: Boundary) -> str:
    return ", ".join(
        f"{list(shape)} {dtype}" for shape, dtype in zip(boundary.shapes, boundary.dtypes, strict=True)
    )


def cut(x: Tensor, rows: int) -> Tensor:
    """Return the first rows of x; x itself where that is all, since the backward of a slice copies the gradient."""
    return x if len(x) == rows else x[:rows]


class _Enter(torch.autograd.Function):
    """Return x as a view; its gradient is contiguous, as what is sent must be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


def _contexts(norms: list[nn.Module]) -> tuple[AbstractContextManager[None], Recomputing]:
    """Make the contexts of a checkpoint's two forwards; the second moves no running statistics."""
    return nullcontext(), Recomputing(norms)


def _run(
    layer: nn.Module, gates: list[BaseGate], values: Tensors
) -> tuple[Tensors, list[tuple[BaseGate, Tensor]]]:
    """Call a layer -> its result, and its gates with their losses."""
    values = layer(values)
    return values, [(gate, loss) for gate in gates if (loss := gate.get_loss()) is not None]


def _padded(x: Tensor, rows: int) -> Tensor:
    whole = x if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))
    return whole.contiguous()  # as what is sent must be


class _Leave(torch.autograd.Function):
    """Pad tensors [n, *] with zeros to [rows, *], never as views; in backward a loss gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor | None, rows: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # parameters of a value that nobody uses keep no gradient
        ctx.num_rows = [len(x) for x in values]
        ctx.one = None if loss is None else torch.ones_like(loss)
        return tuple(_padded(x.detach(), rows) for x in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        own = (None if grad is None else grad[:n] for grad, n in zip(grads, ctx.num_rows, strict=True))
        return ctx.one, None, *own
