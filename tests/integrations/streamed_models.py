"""Small models in folders, streamed and resident, with the same adapters of PEFT on their experts."""

import torch

import fmoe_ext
from fmoe_ext.integrations import huggingface
from fmoe_ext.integrations.streaming import pool
from tests.integrations.huggingface_models import make_model

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CHANGES = {"num_hidden_layers": 5}


def save(folder, architecture="Qwen3MoeForCausalLM", dtype=torch.float64, **changes):
    """Writes a random model to a folder -> the folder."""
    make_model(architecture, dtype=dtype, **CHANGES | changes).save_pretrained(folder)
    return folder


def resident(folder):
    """The model of a folder in memory, computed by fmoe_ext."""
    import transformers

    return huggingface.use(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")).eval()


def streamed(folder, num_layers=2, adapters=0):
    """The streamed model of a folder, with buffers for some layers. adapters: bytes of adapters that will come, with gradients and moments."""
    model = fmoe_ext.stream(folder, 2**40)
    stream = model.expert_stream
    fixed = sum(p.numel() * p.element_size() for p in stream.resident_tensors()) + adapters
    memory = fixed + num_layers * (stream.pool.layer_bytes + pool.BLOCK)
    return fmoe_ext.stream(folder, memory * 4 // 3 + 4)


def with_adapters(model, rank=2, fuse=True, **options):
    """Adapters of PEFT on the experts, the same for every model of one architecture."""
    import peft

    config = {"r": rank, "target_parameters": EXPERTS, "init_lora_weights": False} | options
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return fmoe_ext.lora.fuse(adapted) if fuse else adapted


def bytes_of_adapters(model):
    """Bytes of the weights that are trained."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def checkpoint_layers(model):
    """Activation checkpointing of every layer, as TrainingArguments(gradient_checkpointing=True) has it."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
