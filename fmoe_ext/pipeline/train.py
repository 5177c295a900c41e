"""Train the stages of this rank by a schedule of torch.distributed.pipelining: Pipeline.

split() makes the stages. torch's schedule decides what runs when and sends tensors between ranks. What it would get
wrong is done here and in stage.py:

    losses   it takes the mean of microbatches' losses; ours are sums over tokens, divided once by the count of the
             whole batch, so that unequal microbatches and ranks change nothing
    shapes   it needs equal ones; our stages pad what they send and cut what they get
    gates    it sees one loss, at the last stage; gates' losses of inner stages enter the gradient where they arise
    values   it cuts the batch itself; here each rank is given the whole batch and cuts it, and the schedule passes on
             numbers of microbatches
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fmoe_ext.distributed import DistributedGroupedDataParallel
from fmoe_ext.distributed.clipping import norm_over, scale_to_norm
from fmoe_ext.ep.process_groups import check_same
from fmoe_ext.gates.accumulation import refuse_all_forwards_first
from fmoe_ext.pipeline.data_parallel import (
    TiedParameters,
    check_data_parallel,
    joined,
    num_copies,
    wrap,
)
from fmoe_ext.pipeline.groups import PipelineGroups, check_layers, init_groups, sum_over
from fmoe_ext.pipeline.materialize import fill, materialize, on_meta
from fmoe_ext.pipeline.microbatch import (
    Tensors,
    as_tuple,
    check_tensors,
    count_targets,
    map_tensors,
    num_rows,
    token_cross_entropy,
)
from fmoe_ext.pipeline.overlap import Overlap
from fmoe_ext.pipeline.schedules import Kind, check_compiled_blocks, find_schedule
from fmoe_ext.pipeline.stage import Microbatches, Stage, cut
from fmoe_ext.pipeline.trace import Span, TimedStage


class Pipeline:
    """A model that is cut over the ranks of a job and trained with microbatches under way in all stages at once.

    stages: what split() returned; only those of this rank are kept.
    loss_fn(output, target) -> the sum of the losses of the tokens of its rows; count(target) -> how many those are.
      The loss of a batch is the sum over all ranks divided by the count over all ranks, however unequal microbatches
      and ranks' batches are.
    schedule: a name in SCHEDULES. chunks: microbatches of a batch, which differ by one row at most; a schedule that
      needs more gets empty ones.
    groups: init_groups(pp, ep) or a DeviceMesh; all ranks in one pipeline if None.
    data_parallel: what reduces gradients over the ranks of a stage: "grouped" (DistributedGroupedDataParallel, the
      one for expert-parallel layers), "ddp", "fsdp" (FSDP2; stages must share no parameter) or "none": take the mean
      over groups.data yourself before the optimizer steps.
    balance_weight: how much the sum of all gates' losses counts, each microbatch's by itself. For the loss of the whole
      batch use gates.WholeBatch(pipeline.module), with evaluate() in its first pass and train_step() in its second.
    checkpoint: layers keep no activations and compute them again in backward. device: where this rank computes.
    overlap: with schedule="dualpipe_v" and expert parallelism, one microbatch's exchange runs while another computes.
    init(module): fills the parameters and buffers of a model on the meta device, of which only this rank's are made.

    module: the parts of the model that this rank has, under their names in it: fmoe_ext.checkpoint saves and loads it
    at any number of stages. Raises ValueError for a schedule, chunks, stages or groups that do not fit.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        loss_fn: Callable[[Any, Any], Tensor] = token_cross_entropy,
        *,
        schedule: str = "1f1b",
        chunks: int = 4,
        groups: PipelineGroups | DeviceMesh | None = None,
        data_parallel: str = "grouped",
        balance_weight: float = 0.0,
        checkpoint: bool = False,
        overlap: bool = True,
        count: Callable[[Any], int] = count_targets,
        init: Callable[[nn.Module], object] | None = None,
        device: torch.device | str = "cpu",
    ):
        if groups is None or isinstance(groups, DeviceMesh):
            groups = init_groups(dist.get_world_size() if groups is None else groups)
        self.groups = groups
        self.num_stages = len(stages)
        self.overlap = overlap
        self.loss_fn, self.count = loss_fn, count
        self.chunks, self.balance_weight = chunks, balance_weight
        if not 0 <= balance_weight < math.inf:
            raise ValueError(f"balance_weight must be a number of at least 0, but got {balance_weight}")
        self.device = torch.device(device)
        # The schedule, and what has to be the same on all ranks.
        ranks = dist.get_world_size(groups.pp)
        self._kind: Kind = find_schedule(schedule, ranks, self.num_stages, chunks)
        self.num_microbatches = self._kind.microbatches(chunks, ranks, self.num_stages)
        check_data_parallel(data_parallel, schedule, self._kind, stages, groups)
        sizes = [len(stage.layers) for stage in stages]
        check_same("stages, schedule and chunks of Pipeline", (sizes, schedule, chunks, data_parallel), None)
        # The stages of this rank, with memory for their parameters.
        self._places = self._kind.places(ranks, self.num_stages)
        own = [stages[index] for index in self._places[dist.get_rank(groups.pp)]]
        unset = on_meta(own)
        materialize(stages, own, self.device)
        self.stages = [stage.to(self.device) for stage in own]
        self.module = joined([stage.parts for stage in self.stages])
        check_layers(self.module, groups)
        if unset or init is not None:
            fill(self.module, init)
        for stage in self.stages:
            stage.is_checkpointed = checkpoint
        # Gradients over ranks: of parameters that stages share, and of a stage's replicas.
        self._tied = TiedParameters(stages, self._places, groups.pp)
        self._data_parallel = data_parallel if dist.get_world_size(groups.data) > 1 else "none"
        self._wrapped = [wrap(stage, self._data_parallel, groups, self.device) for stage in self.stages]
        self._schedule: Any = None  # torch's, for microbatches of _rows_of_schedule rows
        self._rows_of_schedule = -1
        self._timed: list[TimedStage] = []
        # Of the step that runs now.
        self._batch: Microbatches | None = None
        self._factor = 1.0  # of a microbatch's sum of losses, in the gradient
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # where the last stage is
        self._spans: list[Span] | None = None  # what was computed when; None without a trace
        self.balance_loss = torch.zeros((), dtype=torch.float64, device="cpu")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank, for its optimizer; each once."""
        seen: set[int] = set()
        for wrapped in self._wrapped:
            for p in wrapped.parameters():
                if id(p) not in seen:
                    seen.add(id(p))
                    yield p

    def train_step(self, batch: Tensors, target: Any, *, trace: bool = False) -> Tensor:
        """Run forward and backward of a batch, which add to gradients -> the loss, the same on all ranks.

        batch [B, *] and target as the model takes them; all ranks of one pipeline pass the same, ranks of one stage
        their own. target: a tensor [B, *], or a tuple of such. trace=True: self.spans() says afterwards what was
        computed when. balance_loss: the weighted sum of the gates' losses of this step, which is in the gradient but
        not in the result. Raises ValueError on every rank of a pipeline whose ranks pass unequal numbers of rows; the
        values are not compared.
        Equivalent, in one process: loss_fn(model(batch), target) / count(target), .backward().
        """
        # 1. Cut the batch, and count its targets over all ranks.
        check_tensors(batch, "the batch of a pipeline")
        refuse_all_forwards_first(self.module, "Pipeline.train_step()")
        for wrapped in self._wrapped:
            wrapped.train()
        microbatches = self._cut(batch, target)
        total = self._total_count(target)
        # Data parallelism takes the mean of gradients, but total counts the targets of all replicas.
        factor = dist.get_world_size(self.groups.data) / max(total, 1)
        self._spans = [] if trace else None
        began = time.perf_counter()
        self._begin(microbatches, factor)
        # 2. torch's stages have buffers of fixed shapes: another number of rows needs new ones, on all ranks at once.
        if microbatches.most_rows != self._rows_of_schedule:
            self._schedule = self._make_schedule(microbatches.most_rows)
            self._rows_of_schedule = microbatches.most_rows
        for timed in self._timed:
            timed.spans, timed.began = self._spans, began
        # 3. Run. The schedule cuts and passes on only the numbers of microbatches: each stage has the values itself.
        numbers = torch.arange(self.num_microbatches, device="cpu")
        indexes = [stage.index for stage in self.stages]
        given = (numbers,) if 0 in indexes else ()
        targets = numbers if self.num_stages - 1 in indexes else None
        self._tied.set_aside()
        try:
            self._schedule.step(*given, target=targets, return_outputs=False)
            balance_losses = [loss for stage in self.stages for loss in stage.balance_losses]
        except BaseException as error:
            self._tied.put_back()
            check_compiled_blocks(error)
            raise
        finally:
            for stage in self.stages:
                stage.forget()
        # 4. Reduce gradients: first over the replicas of each stage, then over the stages that share a parameter.
        for wrapped in self._wrapped:
            # the other wrappers do it in the backward
            if isinstance(wrapped, DistributedGroupedDataParallel):
                wrapped.allreduce_params()
        self._tied.sum_gradients()
        loss, self.balance_loss = self._report(total, balance_losses)
        return loss

    @torch.no_grad()
    def evaluate(self, batch: Tensors, target: Any) -> Tensor:
        """Return the loss of a batch without gradients and in eval mode, as train_step returns it.

        balance_loss stays the one of the last train_step.
        """
        for wrapped in self._wrapped:
            wrapped.eval()
        # One microbatch after the other; every rank runs its own stages, in their order.
        microbatches = self._cut(batch, target)
        self._begin(microbatches, 1.0)
        mine = {pair[0].index: pair for pair in zip(self.stages, self._wrapped, strict=True)}
        owner = {index: rank for rank, indexes in enumerate(self._places) for index in indexes}
        pp, me = self.groups.pp, dist.get_rank(self.groups.pp)
        try:
            for number in range(self.num_microbatches):
                index = torch.tensor([number], device="cpu")
                values: tuple[Tensor, ...] = ()
                for i in sorted(mine):
                    stage, wrapped = mine[i]
                    # from the stage before: received, or what the last turn of this loop left in `values`
                    if i > 0 and owner[i - 1] != me:
                        examples = stage.inputs.examples(microbatches.most_rows)
                        values = tuple(
                            torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in examples
                        )
                        for x in values:
                            dist.recv(x, group=pp, group_src=owner[i - 1])
                    stage.number = number
                    result = wrapped(*((index,) if i == 0 else values))
                    values = as_tuple(result)
                    if stage.is_last:
                        self._loss(result, index)
                    elif owner[i + 1] != me:
                        for x in values:
                            dist.send(x.contiguous(), group=pp, group_dst=owner[i + 1])
        finally:
            for stage, wrapped in zip(self.stages, self._wrapped, strict=True):
                stage.forget()
                if isinstance(wrapped, FSDPModule):
                    wrapped.reshard()  # as a backward does: parameters() are the shards again
        loss, _ = self._report(self._total_count(target), [])
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients of the job so that their norm is at most max_norm -> the norm before; all ranks call it.

        Each parameter counts once, on however many ranks and stages it has copies; with data_parallel="none" call it
        after your mean over groups.data.
        Equivalent, in one process: torch.nn.utils.clip_grad_norm_.
        """
        # of each gradient, on how many ranks it is: those of stages that share it times the replicas of a stage
        params = [p for p in self.parameters() if p.grad is not None]
        grads = [p.grad for p in params if p.grad is not None]
        copies = [self._tied.num_ranks(p) * num_copies(p, self._wrapped, self.groups) for p in params]
        counted = list(zip(grads, copies, strict=True))
        total = norm_over(counted, norm_type, [self.groups.pp, self.groups.data], self.device)
        scale_to_norm(grads, total, max_norm)
        return total

    def spans(self) -> list[Span]:
        """Gather the times of the ranks' computations in the last train_step(trace=True); all of them call it."""
        gathered: list[Any] = [None] * dist.get_world_size(self.groups.pp)
        dist.all_gather_object(gathered, self._spans or [], group=self.groups.pp)
        return [span for spans in gathered for span in spans]

    def _begin(self, microbatches: Microbatches, factor: float) -> None:
        self._batch, self._factor = microbatches, factor
        self._loss_sum.zero_()
        for stage in self.stages:
            stage.begin(microbatches)

    def _make_schedule(self, rows: int) -> Any:
        """Make torch's schedule and stages for microbatches of this many rows; the first stage gets their numbers."""
        number = torch.empty(1, dtype=torch.int64, device="meta")
        self._timed = made = []
        for stage, wrapped in zip(self.stages, self._wrapped, strict=True):
            given = number if stage.is_first else stage.inputs.examples(rows)
            result = stage.outputs.examples(rows)
            place, group = (stage.index, self.num_stages, self.device), self.groups.pp
            made.append(TimedStage(wrapped, *place, input_args=given, output_args=result, group=group))
            made[-1].stage = stage
        stages, count = made if self._kind.takes_list else made[0], self.num_microbatches
        schedule = self._kind.make(stages, count, loss_fn=self._loss, scale_grads=False)
        # with FSDP torch's own functions also gather and free shards, which Overlap's do not
        if self.overlap and self._kind.overlaps and not isinstance(self._wrapped[0], FSDPModule):
            Overlap(schedule, made, self._loss, self.device)
        return schedule

    def _loss(self, output: Tensors, number: Tensor) -> Tensor:
        """Compute the loss of a microbatch for torch's schedule: note the sum for the report, return it scaled."""
        batch = self._batch
        assert batch is not None
        rows, target = batch.rows[int(number)], batch.targets[int(number)]
        outputs = tuple(cut(x, rows) for x in as_tuple(output))  # without the padding of the last stage
        loss = self.loss_fn(outputs[0] if isinstance(output, Tensor) else outputs, target)
        if loss.dim():
            raise ValueError(
                f"loss_fn must return the sum of the losses, a scalar, but returned {list(loss.shape)}"
            )
        self._loss_sum += loss.detach().to(self.device)
        return loss * self._factor

    def _cut(self, batch: Tensors, target: Any) -> Microbatches:
        """Cut a batch into microbatches that differ by one row at most; a schedule that needs more gets empty ones.

        Raises ValueError on all ranks of the pipeline if their batches have unequal numbers of rows.
        """
        check_tensors(target, "the target of a pipeline")
        # 10 rows in 4 chunks: 3, 3, 2, 2
        rows = num_rows(batch)
        sizes = [rows // self.chunks + (i < rows % self.chunks) for i in range(self.chunks)]
        sizes += [0] * (self.num_microbatches - self.chunks)
        if any(num_rows(part) != rows for part in as_tuple(target)):
            raise ValueError(f"the target must have as many rows as the batch, {rows}")
        if any(num_rows(part) != rows for part in as_tuple(batch)):
            found = [num_rows(part) for part in as_tuple(batch)]
            raise ValueError(f"the tensors of a batch must have equally many rows, but have {found}")
        # With unequal batches ranks would wait for each other, or take padding for rows. Cheap, so asked every step:
        # (greatest, -least) in one message.
        if dist.get_world_size(self.groups.pp) > 1:
            extremes = torch.tensor((rows, -rows), device=self.device)
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.groups.pp)
            if extremes.sum() != 0:
                check_same("the number of rows of a batch", (rows,), self.groups.pp)
        batch = map_tensors(lambda x: x.to(self.device), batch)
        target = map_tensors(lambda x: x.to(self.device), target)
        return Microbatches(_parts(batch, sizes), _parts(target, sizes), sizes, self.balance_weight)

    def _total_count(self, target: Any) -> float:
        counted = torch.tensor(float(self.count(target)), dtype=torch.float64, device=self.device)
        sum_over(counted, self.groups.data)
        return float(counted)

    def _report(self, total: float, balance_losses: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Sum over all ranks -> the loss, the balance loss; replicas of a stage count with their mean balance loss."""
        data_size = dist.get_world_size(self.groups.data)
        balance = torch.zeros_like(self._loss_sum)
        for loss in balance_losses:
            balance += loss.to(self.device)
        # in one message; a rank without the last stage has a loss of 0
        numbers = torch.stack((self._loss_sum / max(total, 1), balance / data_size))
        sum_over(numbers, self.groups.pp)
        sum_over(numbers, self.groups.data)
        return numbers[0], numbers[1]


def _parts(values: Any, sizes: list[int]) -> list[Any]:
    if isinstance(values, tuple):
        return list(zip(*(x.split(sizes) for x in values), strict=True))
    return list(values.split(sizes))
