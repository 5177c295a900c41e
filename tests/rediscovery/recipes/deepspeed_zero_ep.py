"""A layer of DeepSpeed's MoE with its experts on two ranks and ZeRO 1 around it."""

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import nn

from fmoe_ext.audit.plans.deepspeed import Engine

D, VOCAB, SAMPLES, SEQ_LEN = 8, 32, 8, 6
CONFIG = {"train_micro_batch_size_per_gpu": SAMPLES // 2, "zero_optimization": {"stage": 1}}
dtype = "float32"


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self, ep_size):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.moe = MoE(D, Expert(), num_experts=4, ep_size=ep_size, k=1, drop_tokens=False, use_rts=False)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.moe(x)[0])


def model():
    deepspeed.init_distributed(dist_backend="gloo")
    return Model(ep_size=1)


def batch(step):
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())


def parallelize(model, rank, world):
    return Engine(Model(ep_size=world), model, CONFIG)
