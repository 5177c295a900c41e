"""The ranks of a run: which of them this process is, how they add up and agree. One process needs no group.

train.py makes one Job; models, runs and checkpoints get it and call its sums, which are no message in one process.
"""

import math
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rendezvous import meet

import fmoe_ext
from fmoe_ext import ops, pipeline
from fmoe_ext.distributed import ParallelGroups, init_groups


class JobError(Exception):
    """The run cannot start here; the message says why."""


class Job:
    """This process among those of the run, which torchrun (or another launcher with its variables) has started."""

    def __init__(self, device: torch.device) -> None:
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        on_gpu = device.type == "cuda"
        self.device = torch.device("cuda", self.local_rank) if on_gpu else device
        if on_gpu:
            torch.cuda.set_device(self.device)
        self.owns_group = not dist.is_initialized() and "WORLD_SIZE" in os.environ
        if self.owns_group:
            store, rank, size = meet()
            dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size)
        self.is_spread = dist.is_initialized()
        self.rank = dist.get_rank() if self.is_spread else 0
        self.size = dist.get_world_size() if self.is_spread else 1
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))  # ranks on this machine
        self.is_first = self.rank == 0
        # for what the host asks while the GPU computes
        self.host_group = dist.new_group(backend="gloo") if self.is_spread and on_gpu else None
        self.groups: ParallelGroups | None = None  # of a job that is spread without a pipeline
        self.stages: pipeline.PipelineGroups | None = None  # of one with a pipeline
        self.ep_size = self.num_stages = 1
        self.data_rank, self.data_size = self.rank, self.size  # among those that have windows of their own

    def set_layout(self, ep_size: int, num_stages: int = 1) -> None:
        """Over how many ranks the experts are spread, and over how many the layers."""
        self.ep_size, self.num_stages = ep_size, num_stages
        if num_stages > 1:
            self.stages = pipeline.init_groups(num_stages, ep_size)
            self.data_rank, self.data_size = dist.get_rank(self.stages.data), self.size // num_stages
        elif self.is_spread:
            self.groups = init_groups(ep=ep_size)

    def largest_ep_size(self, num_experts: int, num_stages: int) -> int:
        """Most ranks of a stage that can share the experts evenly and stay within one machine."""
        return math.gcd(num_experts, self.local_size, self.size // num_stages)

    def share(self, windows: torch.Tensor) -> torch.Tensor:
        """This rank's part of the windows [B, *] of a batch; parts differ by one window at most and may be empty."""
        return windows.tensor_split(self.data_size)[self.data_rank]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def sum_of_stage(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that have the same layers."""
        return self._reduced(x, dist.ReduceOp.SUM, self.stages and self.stages.data)

    def min_of_stage(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, dist.ReduceOp.MIN, self.stages and self.stages.data)

    def of_all_stages(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Gather the stages' values of each layer, in the order of the layers."""
        if self.stages is None:
            return mine
        parts: list[Any] = [None] * self.num_stages
        dist.all_gather_object(parts, mine, self.stages.pp)
        return {name: value for part in parts for name, value in part.items()}

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self.sum(x) / self.size

    def _reduced(
        self, x: torch.Tensor, operation: Any, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        if not self.is_spread:
            return x
        reduced = x.to(self.device, copy=True)
        dist.all_reduce(reduced, operation, group)
        return reduced.to(x.device)

    def from_first(self, compute: Callable[[], Any]) -> Any:
        """Result of compute() on the first rank, on all ranks; if it raises there, JobError on all."""
        if not self.is_spread:
            return compute()
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer = [compute(), None]
            except Exception as error:
                answer = [None, f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise JobError(answer[1])
        return answer[0]

    def end(self) -> None:
        if self.owns_group:
            dist.destroy_process_group()


class StopSignals:
    """Notes SIGINT and SIGTERM, which may reach the ranks at different times: they agree on the step to stop after.

    In one process a second signal acts at once; torchrun passes on what the terminal has sent to all processes already.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.received = 0  # number of the last signal here
        self.number = 0  # that all ranks know of
        self._question: tuple[torch.Tensor, Any] | None = None

    def __enter__(self) -> "StopSignals":
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, _: object) -> None:
        self.received = number
        if not self.job.is_spread:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ask(self) -> None:
        """Begins to ask all ranks, while the step computes."""
        if self.job.is_spread:
            received = torch.tensor(self.received)
            work = dist.all_reduce(received, dist.ReduceOp.MAX, self.job.host_group, async_op=True)
            self._question = received, work

    def answer(self) -> int:
        """The signal that any rank had received when it asked, 0 if none."""
        if self._question is None:
            self.number = self.received
        else:
            received, work = self._question
            work.wait()
            self.number = int(received)
        return self.number


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and not fmoe_ext.ops.cuda_module_missing else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise JobError("--device cuda: PyTorch finds no CUDA device here")
        if fmoe_ext.ops.cuda_module_missing:
            raise JobError(f"--device cuda: {fmoe_ext.ops.cuda_module_missing}")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 (autocast) where the hardware multiplies bfloat16 matrices."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = ops.fast_bfloat16()
    return torch.bfloat16 if fast else torch.float32
