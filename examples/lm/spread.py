"""A language model over the ranks of a job: its experts spread, the rest copied (ddp) or sharded (fsdp2).

runs.py makes a SpreadModel, on one process too; for --pp 2 and more a pipelined.PipelinedModel with the same methods.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from job import Job
from model import LanguageModel, ModelConfig, sum_of_losses
from precision import Precision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fmoe_ext.distributed import DistributedGroupedDataParallel, clip_grad_norm_
from fmoe_ext.gates import BaseGate, WholeBatch


class SpreadModel:
    """One model on all ranks of a job, each of which computes its own windows of a batch.

    module: what this rank has of the model; saved: what a checkpoint is made of; whole: a LanguageModel for its counts.
    The weights do not depend on the layout: they are those of one process, cut. accumulate: microbatches of a batch,
    computed one after another; the gates' losses stay those of the whole batch (gates.WholeBatch, one more forward).
    """

    def __init__(
        self,
        config: ModelConfig,
        job: Job,
        precision: Precision,
        data_parallel: str,
        balance_weight: float,
        overlap_degree: int,
        accumulate: int,
    ) -> None:
        self.job, self.precision, self.balance_weight = job, precision, balance_weight
        self.accumulate = accumulate
        self.module = LanguageModel(config).to(job.device, precision.of_weights)
        self.saved: nn.Module = self.module
        if job.groups is not None:
            # balance losses and capacities are those of the whole batch
            options = {"overlap_degree": overlap_degree, "gate_group": job.groups.world}
            self.module = part_of(self.module, job.groups.ep, options).to(job.device, precision.of_weights)
            if data_parallel == "fsdp2":
                shard(self.module, job)
            self.saved = DistributedGroupedDataParallel(
                self.module, auto_allreduce=True, **job.groups.data_parallel_kwargs()
            )
        self.whole = self.module
        counts_first = accumulate > 1 and summing_gates(self.module)
        self._whole_batch = WholeBatch(self.module) if counts_first else None

    def train_step(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward of the windows [B, S] of the whole batch -> loss, balance loss: the job's on average."""
        shares = (self.job.share(x).to(self.job.device) for x in (inputs, targets))
        microbatches = list(zip(*(share.tensor_split(self.accumulate) for share in shares), strict=True))
        whole = self._whole_batch
        if whole is not None:
            with whole.first_pass(), self.precision.autocast():
                for mine, _ in microbatches:
                    self.module(mine)
        # The job's loss is the mean of its ranks' losses, so each divides by a rank's mean number of tokens.
        tokens_per_rank = targets.numel() / self.job.size
        losses = []
        with whole.second_pass() if whole else nullcontext():
            for number, microbatch in enumerate(microbatches, 1):
                with nullcontext() if number == self.accumulate else self._no_sync():
                    losses.append(self._backward(*microbatch, tokens_per_rank))
        loss, balance_loss = (torch.stack(parts) for parts in zip(*losses, strict=True))
        return loss.sum(), balance_loss.mean()

    def _backward(self, mine: Tensor, expected: Tensor, tokens_per_rank: float) -> tuple[Tensor, Tensor]:
        """Forward and backward of one microbatch -> its part of the loss, balance loss."""
        with self.precision.autocast():
            logits = self.saved(mine)
            balance_loss = self.module.pop_balance_loss()
        loss = sum_of_losses(logits, expected) / tokens_per_rank
        (loss + self.balance_weight / self.accumulate * balance_loss).backward()
        return loss.detach(), balance_loss.detach()

    def _no_sync(self) -> AbstractContextManager[None]:
        is_spread = isinstance(self.saved, DistributedGroupedDataParallel)
        return self.saved.no_sync() if is_spread else nullcontext()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of all bytes of the windows [B, S]."""
        mine, expected = (self.job.share(x).to(self.job.device) for x in (inputs, targets))
        return self.job.sum(sum_of_losses(self.logits(mine), expected).double())

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, 256] of tokens [B, S], each rank's own; without what layers do in training only."""
        self.saved.eval()
        with self.precision.autocast():
            logits = self.saved(tokens)
        self.saved.train()
        return logits

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradients of the whole job -> their norm before."""
        if isinstance(self.saved, DistributedGroupedDataParallel):
            return clip_grad_norm_(self.saved, max_norm)
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameters of this rank for an optimizer."""
        return grouped_parameters(self.module, weight_decay)


def summing_gates(module: nn.Module) -> list[BaseGate]:
    """The gates whose loss is a function of sums over all tokens."""
    return [m for m in module.modules() if isinstance(m, BaseGate) and hasattr(m, "ranks")]


def grouped_parameters(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only; fused steps take DTensors apart from tensors."""
    groups: dict[tuple[type, bool], list[nn.Parameter]] = {}
    for p in module.parameters():
        groups.setdefault((type(p.data), p.dim() >= 2), []).append(p)
    return [
        {"params": params, "weight_decay": weight_decay if is_matrix else 0.0}
        for (_, is_matrix), params in groups.items()
    ]


def part_of(model: LanguageModel, ep: dist.ProcessGroup, layer_options: dict[str, Any]) -> LanguageModel:
    """The model, of whose experts this rank keeps its share among the ranks of a group."""
    ep_size = dist.get_world_size(ep)
    model.config = replace(model.config, ep_size=ep_size)
    for layer in model.moe_layers():
        if ep_size > 1:
            layer.spread(ep, **layer_options)
        else:
            layer.share_gate(layer_options.get("gate_group"))
        layer.mark_parallel_comm("moe")
    return model


def shard(model: LanguageModel, job: Job) -> None:
    """FSDP2 over all ranks; experts that are spread over ranks stay as they are."""
    mesh = init_device_mesh(job.device.type, (job.size,))
    spread = set() if job.ep_size == 1 else model.expert_parameters()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, ignored_params=spread)
