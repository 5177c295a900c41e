"""A language model whose blocks are cut over the ranks of a job, in stages of a pipeline, each with its copies.

runs.py makes it for --pp 2 and more, and spread.SpreadModel otherwise; both have the same methods.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from job import Job
from model import LanguageModel, ModelConfig, sum_of_losses
from precision import Precision
from spread import grouped_parameters, part_of, summing_gates
from torch import Tensor, nn

from fmoe_ext.gates import WholeBatch
from fmoe_ext.pipeline import Pipeline, split


class PipelinedModel:
    """One model over all ranks of a job: the interface of spread.SpreadModel.

    The gates' losses are those of the whole batch, as in one process: their sums are counted in a forward without
    gradients before each step (gates.WholeBatch), which costs one more.
    """

    def __init__(
        self,
        config: ModelConfig,
        job: Job,
        precision: Precision,
        seq_len: int,
        chunks: int,
        balance_weight: float,
        overlap_degree: int,
    ) -> None:
        assert job.stages is not None
        self.job, self.precision, self.seq_len = job, precision, seq_len
        self.balance_weight = balance_weight
        model = LanguageModel(config).to(job.device, precision.of_weights)
        options = {"overlap_degree": overlap_degree, "gate_group": job.stages.data}
        model = part_of(model, job.stages.ep, options).to(job.device, precision.of_weights)
        model.precision = precision
        self.pipeline = Pipeline(
            cut(model, job.num_stages, seq_len),
            self._loss,
            chunks=chunks,
            groups=job.stages,
            balance_weight=balance_weight / max(len(model.moe_layers()), 1),
            device=job.device,
        )
        self.module = self.saved = self.pipeline.module
        with torch.device("meta"):
            self.whole = LanguageModel(config)
        self._logits: list[Tensor] = []  # of the microbatches of an evaluation
        self._counts_first = bool(summing_gates(self.whole))  # the same on every stage, for all take part
        self._whole_batch = WholeBatch(self.module) if summing_gates(self.module) else None

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self._logits.append(logits)
        return sum_of_losses(logits, targets)

    def train_step(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward of the windows [B, S] of the whole batch -> its loss and balance loss."""
        mine = self.job.share(inputs), self.job.share(targets)
        whole = self._whole_batch
        if self._counts_first:
            with whole.first_pass() if whole else nullcontext():
                self._evaluate(*mine)
        with whole.second_pass() if whole else nullcontext():
            loss = self.pipeline.train_step(*mine)
        balance_loss = self.pipeline.balance_loss / (self.balance_weight or 1)
        return loss, balance_loss

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of all bytes of the windows [B, S]."""
        return self._evaluate(self.job.share(inputs), self.job.share(targets)) * targets.numel()

    def _evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._logits = []
        return self.pipeline.evaluate(inputs, targets)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [B, S, 256] of tokens [B, S], of at most seq_len bytes, on every rank."""
        padding = self.seq_len - tokens.shape[1]  # behind: no byte sees it
        padded = F.pad(tokens, (0, padding))
        self._evaluate(padded, padded)
        groups, last = self.job.stages, self.job.num_stages - 1
        assert groups is not None
        if dist.get_rank(groups.pp) == last:
            logits = torch.cat(self._logits).to(self.precision.of_weights)
        else:
            shape = (*padded.shape, self.whole.head.out_features)
            logits = torch.empty(shape, device=self.job.device, dtype=self.precision.of_weights)
        dist.broadcast(logits, group=groups.pp, group_src=last)
        return logits[:, : tokens.shape[1]]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradients of the whole job -> their norm before."""
        return self.pipeline.clip_grad_norm_(max_norm)

    def param_groups(self, weight_decay: float) -> list[dict]:
        """Parameters of this rank for an optimizer."""
        return grouped_parameters(self.module, weight_decay)


def cut(model: LanguageModel, num_stages: int, seq_len: int) -> list[nn.Module]:
    """Stages with equally many blocks, or one less; the first has the embedding besides, the last the head."""
    num_layers = [len(part) for part in torch.arange(len(model.blocks)).tensor_split(num_stages)]
    num_layers[0] += 1
    num_layers[-1] += 1
    sample = torch.zeros(1, seq_len, dtype=torch.int64, device=model.head.weight.device)
    return split(model, num_stages, sample, by=num_layers)
