"""The language model's training as a recipe: `python -m fmoe_ext.audit examples/lm/audit.py:recipe`.

The audit calls recipe(), and its functions build, batch, loss and optimizer for every layout that it compares.
"""

import contextlib
import functools

import torch
import torch.nn.functional as F
from data import load_corpus
from model import LanguageModel, ModelConfig

from fmoe_ext import valid_tokens
from fmoe_ext.audit import Recipe
from fmoe_ext.gates import WholeBatch

CONFIG = {"d_model": 16, "num_layers": 2, "num_heads": 2, "num_experts": 4, "d_hidden": 8, "top_k": 2}
BATCH_SIZE, SEQ_LEN = 12, 8
BALANCE_WEIGHT = 0.03
corpus = functools.cache(load_corpus)


def build(layout):
    options = layout.expert_arguments(CONFIG["num_experts"])
    return LanguageModel(ModelConfig(**CONFIG, gate="softmax", layer_options=options))


def batch(step):
    inputs, targets = corpus(seq_len=SEQ_LEN).batch(step, BATCH_SIZE, SEQ_LEN, seed=0)
    return {"inputs": inputs, "targets": targets, "valid": torch.ones_like(inputs, dtype=torch.bool)}


def logits_of(model, batch):
    with valid_tokens(batch["valid"]):
        return model(batch["inputs"]).flatten(0, 1)


@contextlib.contextmanager
def accumulate(model, microbatches):
    """Makes the gates' balance loss that of the whole batch, however many microbatches it comes in."""
    if len(microbatches) == 1:
        yield
        return
    whole = WholeBatch(model)
    with whole.first_pass():
        for microbatch in microbatches:
            logits_of(model, microbatch)
    with whole.second_pass():
        yield


def loss(model, batch):
    logits = logits_of(model, batch)
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
        accumulate=accumulate,
        shared_weight=lambda part: 1 / part.num_microbatches,
        leave_out={
            "reentrant": "the gates' losses have no gradient there, and get_loss() says so",
            "left": "the attention is causal and has no mask: only padding behind a sequence is hidden from it",
        },
    )
