"""A GPTModel of Megatron-core with its own MoE layer as a recipe file of fmoe audit: experts over all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import make_chunks, make_config
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from on_cpu import megatron_on_cpu

from fmoe_ext.audit import PlanRecipe
from fmoe_ext.audit.plans.megatron import DataAndExpertParallel

VOCAB, SEQ_LEN, SAMPLES = 16, 6, 8
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None  # 0.16 reads the name, and defines it with Transformer Engine only


def build(**sizes):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    config = make_config(
        dtype=torch.float64,
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        num_moe_experts=4,
        moe_ffn_hidden_size=8,
        add_bias_linear=False,
        **sizes,
    )
    with megatron_on_cpu():
        return make_chunks(config, VOCAB, 2 * SEQ_LEN, mlp=get_moe_module_spec(use_te=False, num_experts=4))[
            0
        ]


def model():
    return build()


def batch(step):
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def loss(model, batch):
    positions = torch.arange(SEQ_LEN).expand_as(batch["inputs"])
    with megatron_on_cpu():
        logits = model(batch["inputs"], positions, None)
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def parallelize(model, rank, world):
    divided = build(expert_model_parallel_size=world)
    return DataAndExpertParallel(divided.double(), model, megatron_on_cpu)


class Summed(DataAndExpertParallel):
    """Expert gradients are summed over ranks, not averaged."""

    def backward(self, recipe, batch):
        loss = super().backward(recipe, batch)
        for name, p in self.model.named_parameters():
            if "local_experts" in name:
                p.main_grad.mul_(dist.get_world_size())
        return loss


def summed(model, rank, world):
    return Summed(build(expert_model_parallel_size=world).double(), model, megatron_on_cpu)


def over_tensors(model, rank, world):
    return DataAndExpertParallel(build(tensor_model_parallel_size=world), model, megatron_on_cpu)


RECIPE = PlanRecipe(model, parallelize, batch, loss)
