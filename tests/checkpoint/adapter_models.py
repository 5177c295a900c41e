"""Adapters that the installed PEFT makes on small random models, and PEFT's own deltas of what is loaded."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.formats.format_models import MODELS, make

peft = pytest.importorskip("peft")
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def base(name, folder=None):
    model = make(name, **MODELS[name])
    if folder is not None:
        model.save_pretrained(folder, max_shard_size="60KB")
    return model


def unturned(model):
    """Make PEFT read and write as before 0.19, which never turned a parameter; from 0.19 on it asks is_transposed."""
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.is_transposed = True
    return model


def trained(name, folder, rank=4, steps=3, old=False, lr=1e-2, seed=None):
    """Train an adapter for some steps and save it, on request as PEFT before 0.19."""
    torch.manual_seed(rank + steps if seed is None else seed)
    config = peft.LoraConfig(
        r=rank, lora_alpha=3 * rank, target_modules=["q_proj"], target_parameters=PARAMETERS
    )
    model = peft.get_peft_model(unturned(base(name)) if old else base(name), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        ids = torch.randint(3, 61, (4, 12))
        optimizer.zero_grad()
        model.float()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.double().save_pretrained(folder)
    if old:
        rewritten(folder, lambda k, v: (k, v), peft_version="0.18.1")


def rewritten(folder, change, **config):
    """Change the tensors of an adapter by change(name, tensor) -> (name, tensor), and its config."""
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(change(k, v) for k, v in tensors.items()), folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def by_expert(rank):
    """Pack lora_B of experts as early unsloth does."""

    def change(name, tensor):
        if ".experts." in name and "lora_B" in name:
            tensor = tensor.unflatten(1, (rank, -1)).transpose(1, 2).flatten(1).contiguous()
        return name, tensor

    return change


def peft_weights(name, folder, old=False):
    """Parameters of a model after PEFT itself has loaded and merged an adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # missing keys are only a warning to PEFT
        warnings.filterwarnings(
            "ignore",
            message=".*(torchao|Unsupported layer|target_parameters|tied|Enum|unauthenticated|pattern).*",
        )
        model = peft.PeftModel.from_pretrained(unturned(base(name)) if old else base(name), folder)
    return dict(model.merge_and_unload().named_parameters())


def assert_same(found, expected, start):
    """The changes of weights are the same, to 1e-12 of the change."""
    assert found.keys() == expected.keys()
    changed = 0
    for name, value in expected.items():
        change = value - start[name]
        changed += bool(change.norm() > 0)
        assert (found[name] - value).norm() <= 1e-12 * max(change.norm(), start[name].norm()), name
    assert changed
