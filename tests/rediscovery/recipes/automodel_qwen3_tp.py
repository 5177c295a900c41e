"""Qwen3 under Automodel's plan of tensor parallelism."""

import torch
from nemo_automodel.components.distributed.optimized_tp_plans import _parallelize_qwen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Qwen3Config, Qwen3ForCausalLM

from fmoe_ext.audit import Parallel

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def model():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS))


def batch(step):
    tokens = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(step))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss(model, batch):
    logits = model(batch["inputs"]).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class Replicas(Parallel):
    """Gradients of what every rank has are synchronized as Automodel's recipes do it, since it does."""

    def backward(self, recipe, batch):
        loss = super().backward(recipe, batch)
        try:
            from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
        except ImportError:
            return loss
        synchronize_tp_replica_gradients([self.model], self.mesh)
        return loss


def parallelize(model, rank, world):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, _parallelize_qwen(model))
    made = Replicas(model)
    made.mesh = mesh
    return made
