"""Small models in folders, streamed and resident, with the same adapters of PEFT on their experts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fmoe_ext
from fmoe_ext import frozen, huggingface
from fmoe_ext.finetune.streaming import pool
from tests import packed_layouts
from tests.huggingface.huggingface_models import make_ids, make_model

transformers = pytest.importorskip("transformers")  # here for the tests that import this module

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CHANGES = {"num_hidden_layers": 5}


def save(folder, architecture="Qwen3MoeForCausalLM", dtype=torch.float64, **changes):
    """Writes a random model to a folder -> the folder."""
    make_model(architecture, dtype=dtype, **CHANGES | changes).save_pretrained(folder)
    return folder


def resident(folder):
    """The model of a folder in memory, computed by fmoe_ext."""
    return huggingface.use(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")).eval()


def streamed(folder, num_layers=2, adapters=0, **options):
    """The streamed model of a folder, with buffers for some layers. adapters: bytes for them and their state."""
    model = fmoe_ext.stream(folder, 2**40, **options)
    stream = model.expert_stream
    fixed = sum(p.numel() * p.element_size() for p in stream.resident_tensors()) + adapters
    memory = fixed + num_layers * (stream.pool.layer_bytes + pool.BLOCK)
    return fmoe_ext.stream(folder, memory * 4 // 3 + 4, **options)


def with_adapters(model, rank=2, fuse=True, **options):
    """Adapters of PEFT on the experts, the same for every model of one architecture."""
    peft = pytest.importorskip("peft")
    config = {"r": rank, "target_parameters": EXPERTS, "init_lora_weights": False} | options
    with torch.random.fork_rng():
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return fmoe_ext.lora.fuse(adapted) if fuse else adapted


def train(model, folder, **options):
    """Trains by Transformers' Trainer -> (losses, the optimizer)."""
    data = [{"input_ids": row, "labels": row} for row in make_ids(8, 10)]
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    torch.compiler.set_stance("force_eager")  # torchao would compile its step, for half a minute
    try:
        trainer.train()
    finally:
        torch.compiler.set_stance("default")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.optimizer.optimizer


def bytes_of_adapters(model):
    """Bytes of the weights that are trained."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def checkpoint_layers(model):
    """Activation checkpointing of every layer, as TrainingArguments(gradient_checkpointing=True) has it."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()


def pack(folder, seed=0):
    """Puts random MXFP4 blocks and scales in the place of a folder's experts -> the folder.

    The tensors have the names of GPT-OSS's files, whatever the model type.
    """
    generator = torch.Generator().manual_seed(seed)
    (file,) = folder.glob("*.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for name, value in load_file(file).items():
        if ".experts." not in name or name.endswith("bias"):
            tensors[name] = value
    for i in range(config["num_hidden_layers"]):
        E = config.get("num_local_experts") or config["num_experts"]
        D, H = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
        for name, out, width in (("gate_up_proj", 2 * H, D), ("down_proj", D, H)):
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            shape = E, out, width // 32
            tensors[f"{prefix}_blocks"] = torch.randint(
                0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
            )
            tensors[f"{prefix}_scales"] = torch.randint(
                122, 125, shape, dtype=torch.uint8, generator=generator
            )
    save_file(tensors, file, {"format": "pt"})
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def decoded(folder, dtype=torch.float32):
    """The model of a packed folder in memory, its experts decoded."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    state = {}
    for name, value in tensors.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            weight = frozen.Quantized("mxfp4", value, tensors[f"{stem}_scales"]).dequantize(dtype)
            state[stem] = weight.mT.contiguous() if config["model_type"] == "gpt_oss" else weight
        elif not name.endswith("_scales"):
            state[name] = value
    config = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    return huggingface.use(model).eval()


WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 256, "head_dim": 64}


def pack_linear(folder, name, layouts=packed_layouts):
    """Packs every linear layer of a folder, experts or not, as published folders do -> their values.

    layouts: packed_layouts, or published_packings.
    """
    (file,) = folder.glob("*.safetensors")
    tensors, values = {}, {}
    for key, value in load_file(file).items():
        values[key] = value.float()
        if not key.endswith("_proj.weight"):
            tensors[key] = value
            continue
        packed, values[key] = layouts.pack(value, name)
        tensors |= {f"{key.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = layouts.CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    return values


def write_gguf(folder, kind, others=None):
    """A GGUF file in place of the safetensors of a Qwen3-MoE -> (file, values).

    kind: the type of experts in it; others: of the other linear layers and the embedding, float32 by default.
    """
    import gguf

    (file,) = folder.glob("*.safetensors")
    tensors = {key: value.float() for key, value in load_file(file).items()}
    values = dict(tensors)
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe")
    type_of = gguf.GGMLQuantizationType[kind.upper()]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        for ours, theirs in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")):
            names = [f"{prefix}.{e}.{ours}.weight" for e in range(6)]
            packed = frozen.quantize(torch.stack([tensors.pop(name) for name in names]), kind)
            values |= dict(zip(names, packed.dequantize(), strict=True))
            writer.add_tensor(f"blk.{layer}.ffn_{theirs}_exps.weight", packed.data.numpy(), raw_dtype=type_of)
    inside = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    renamed = {
        **{f"self_attn.{k}_proj": v for k, v in inside.items()},
        **{"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp"},
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    }
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for key, value in tensors.items():
        stem = key.removesuffix(".weight")
        _, _, rest = stem.removeprefix("model.layers.").partition(".")
        name = outside.get(stem) or f"blk.{stem.split('.')[2]}.{renamed[rest]}"
        if others is None or "norm" in key or "mlp.gate" in key:
            writer.add_tensor(f"{name}.weight", value.numpy())
            continue
        packed = frozen.quantize(value[None], others)
        values[key] = packed.dequantize()[0]
        other_type = gguf.GGMLQuantizationType[others.upper()]
        writer.add_tensor(f"{name}.weight", packed.data[0].numpy(), raw_dtype=other_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.unlink()
    return folder / "model.gguf", values


def of_values(folder, values):
    """The model with these values in memory, in float32."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    stacked = {key: value for key, value in values.items() if ".experts." not in key}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([values[f"{prefix}.{e}.{name}_proj.weight"] for e in range(6)])
            for name in ("gate", "up", "down")
        )
        stacked[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], 1)
        stacked[f"{prefix}.down_proj"] = down
    config = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(None, config=config, state_dict=stacked, dtype=torch.float32)
    return huggingface.use(model).eval()


def split_gguf(file, folder, num_tensors):
    """Writes a GGUF file in parts of so many tensors, by the gguf package's own writer -> the parts in their order."""
    import gguf

    reader = gguf.GGUFReader(file)
    arch = reader.fields["general.architecture"].contents()
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "split.gguf", arch, split_max_tensors=num_tensors)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))
