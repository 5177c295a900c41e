"""A dense model under a stage of ZeRO."""

import deepspeed
import torch
from torch import nn

from fmoe_ext.audit.plans.deepspeed import Engine

D, VOCAB, SAMPLES, SEQ_LEN = 8, 32, 8, 6
dtype = "float32"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB)
        self.encoder = nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D))

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.encoder(x))


def batch(step):
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def engine(model, world, microbatches=1, **zero):
    """The model under DeepSpeed with the options of ZeRO."""
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world // microbatches,
        "gradient_accumulation_steps": microbatches,
        "zero_optimization": zero,
    }
    return Engine(model, model, config)
