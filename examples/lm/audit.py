"""The language model's training as a recipe: `python -m fmoe_ext.audit examples/lm/audit.py:recipe`."""

import functools

import torch
import torch.nn.functional as F
from data import load_corpus
from model import LanguageModel, ModelConfig

from fmoe_ext.audit import Recipe
from fmoe_ext.gates import SoftmaxGate

CONFIG = {"d_model": 16, "num_layers": 2, "num_heads": 2, "num_experts": 4, "d_hidden": 8, "top_k": 2}
BATCH_SIZE, SEQ_LEN = 12, 8
BALANCE_WEIGHT = 0.03
corpus = functools.cache(load_corpus)


def build(layout):
    # each sequence's own balance loss, whose mean does not depend on where microbatches end
    gate = functools.partial(SoftmaxGate, balance_loss="sequence", seq_len=SEQ_LEN)
    options = {**layout.expert_arguments(CONFIG["num_experts"]), "gate": gate}
    return LanguageModel(ModelConfig(**CONFIG, gate="softmax", layer_options=options))


def batch(step):
    inputs, targets = corpus(seq_len=SEQ_LEN).batch(step, BATCH_SIZE, SEQ_LEN, seed=0)
    return {"inputs": inputs, "targets": targets}


def loss(model, batch):
    logits = model(batch["inputs"]).flatten(0, 1)
    mean = F.cross_entropy(logits, batch["targets"].flatten())
    return mean, BALANCE_WEIGHT * getattr(model, "module", model).pop_balance_loss()


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2.5e-3, betas=(0.9, 0.95))


def recipe():
    return Recipe(
        build,
        batch,
        loss,
        optimizer=optimizer,
        leave_out={
            "reentrant": "the gates' losses have no gradient there, and get_loss() says so",
            "padding": "a batch is windows of one length",
        },
    )
