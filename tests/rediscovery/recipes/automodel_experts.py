"""A layer of Automodel's GroupedExperts with its experts on two ranks, which gather each other's tokens."""

import torch
import torch.distributed as dist
from nemo_automodel.components.moe import parallelizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fmoe_ext.audit import Parallel

D, VOCAB, SAMPLES, SEQ_LEN, EXPERTS, TOP_K = 8, 32, 8, 6, 4, 2
dtype = "float32"


def grouped_experts():
    """GroupedExperts, whose file and configuration moved between versions."""
    try:
        from nemo_automodel.components.moe.config import MoEConfig
        from nemo_automodel.components.moe.experts import GroupedExperts
    except ImportError:
        from nemo_automodel.components.moe.layers import GroupedExperts, MoEConfig
    counts = {"n_routed_experts": EXPERTS, "n_activated_experts": TOP_K, "n_shared_experts": 0}
    groups = {"n_expert_groups": 1, "n_limited_groups": 1}
    sizes = {"dim": D, "inter_dim": 2 * D, "moe_inter_dim": 2 * D}
    gate = {
        "train_gate": True,
        "gate_bias_update_factor": 0.0,
        "aux_loss_coeff": 0.0,
        "score_func": "softmax",
    }
    scale = {"route_scale": 1.0, "norm_topk_prob": True, "dtype": torch.float32}
    experts = GroupedExperts(MoEConfig(**counts, **groups, **sizes, **gate, **scale))
    for p in experts.parameters():
        nn.init.normal_(p, std=0.3)
    return experts


class Model(nn.Module):
    def __init__(self, trains_router):
        super().__init__()
        self.embedding, self.router = nn.Embedding(VOCAB, D), nn.Linear(D, EXPERTS, bias=False)
        self.experts, self.head = grouped_experts(), nn.Linear(D, VOCAB)
        self.trains_router = trains_router

    def forward(self, tokens):
        x = self.embedding(tokens).flatten(0, 1)
        weights, indices = self.router(x if self.trains_router else x.detach()).softmax(-1).topk(TOP_K)
        weights = weights if self.trains_router else weights.detach()
        every = torch.ones(len(x), dtype=torch.bool)
        return self.head(x + self.experts(x, every, weights, indices))


class Sharded(Parallel):
    """Experts are DTensors over the ranks; each rank has its part of the tokens."""

    def backward(self, recipe, batch):
        """Average the gradients of what all ranks have, and divide those of the experts: they get all tokens."""
        loss = super().backward(recipe, batch)
        for name, p in self.model.named_parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if not name.startswith("experts."):
                dist.all_reduce(p.grad)
            p.grad.div_(self.share[1])
        return loss


def model():
    return Model(trains_router=True)


def batch(step):
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["targets"].flatten())


def parallelize(model, rank, world):
    parallelizer.ExpertParallel()._apply(model.experts, init_device_mesh("cpu", (world,)))
    return Sharded(model, (rank, world))
