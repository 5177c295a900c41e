"""A small MoE model that has learned some text: make() trains and saves it, quantise() packs its experts to MXFP4.

finetune.py and examples/compress call these; upcycle() makes the larger model of `finetune.py --limit`.
"""

import json
import sysconfig
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from fmoe_ext import huggingface

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # values of 4 bits, without the sign
SIZES = {
    **{"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 5, "max_position_embeddings": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256},
    **{"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}


def texts() -> tuple[bytes, bytes]:
    """(sources of Python's standard library, the same in upper case): learned first, and by the adapters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    code = b"\n".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return code, code.upper()


def windows(text: bytes, count: int, length: int, seed: int) -> torch.Tensor:
    """Random places of a text -> [count, length] of its bytes."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(len(data) - length, (count, 1), generator=generator)
    return data[start + torch.arange(length)].long()


def make(folder: Path, text: bytes, steps: int, alike: bool = False, **sizes: Any) -> None:
    """Train a Qwen3-MoE from nothing on a text, and save it in bfloat16.

    alike: the experts of a layer begin as copies of one, as those of a model that was upcycled; sizes: besides SIZES.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES | sizes)
    model = huggingface.use(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    if alike:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".experts." in name:
                    weight.copy_(weight[:1].clone())
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    with tqdm(range(steps), "making a small model") as progress:
        for step in progress:
            ids = windows(text, 8, 128, seed=step)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.set_postfix(loss=f"{loss.item():.3f}")
    model.to(torch.bfloat16).save_pretrained(folder)


def upcycle(folder: Path, num_experts: int, top_k: int) -> None:
    """Write a model with one expert a layer again, with copies of it that noise sets apart, and a random gate."""
    import transformers

    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    out = {}
    for name, value in tensors.items():
        if ".experts.0." in name:
            for expert in range(num_experts):
                noise = torch.randn(value.shape, generator=generator) * 0.1 * value.float().std()
                out[name.replace(".experts.0.", f".experts.{expert}.")] = value + noise.to(value.dtype)
        elif name.endswith(".mlp.gate.weight"):
            out[name] = torch.randn(num_experts, value.shape[1], generator=generator).to(value.dtype) * 0.02
        else:
            out[name] = value
    save_file(out, folder / "model.safetensors", {"format": "pt"})
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_experts, config.num_experts_per_tok = num_experts, top_k
    config.save_pretrained(folder)


def pack(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, out, in] -> MXFP4 blocks [E, out, in / 32, 16] and scales [E, out, in / 32] (OCP MX 1.0: 2^(scale - 127))."""
    groups = weight.float().unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1).clamp(min=2.0**-120)
    exponent = largest.log2().floor() - 2  # the largest of 4 bits is 6, of exponent 2
    scaled = groups / exponent.exp2()[..., None]
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), middles) + 8 * (scaled < 0)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), (exponent + 127).to(torch.uint8)


def quantise(source: Path, target: Path) -> None:
    """Write a model's folder again, its experts in MXFP4 under the names of GPT-OSS's files."""
    import transformers

    target.mkdir(parents=True)
    tensors = load_file(source / "model.safetensors")
    out = {name: value for name, value in tensors.items() if ".experts." not in name}
    config = transformers.AutoConfig.from_pretrained(source)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        experts = [f"{prefix}.{e}" for e in range(config.num_experts)]
        gate, up, down = (
            torch.stack([tensors[f"{expert}.{name}.weight"] for expert in experts])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        for name, weight in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
            out[f"{prefix}.{name}_blocks"], out[f"{prefix}.{name}_scales"] = pack(weight)
    save_file(out, target / "model.safetensors", {"format": "pt"})
    written = json.loads((source / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4"}
    (target / "config.json").write_text(json.dumps(written, indent=2))
