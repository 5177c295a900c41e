"""Compare an adapter with its base model, and compute the change of each weight."""

from collections.abc import Mapping
from typing import TypeAlias

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.layouts import BLOCKS
from fmoe_ext.checkpoint.model_folder import Base, Experts
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.finetune.adapters.reading import PREFIX, Adapter, Factors, Pair, scaling_of

Loaded: TypeAlias = Mapping[str, tuple[Factors, Pair]]


def interleaves(adapter: Adapter, base: Base | None) -> bool | None:
    """True where the model has gate and up in turn; None if nothing says it."""
    if base is not None:
        found = [experts for layer in adapter.layers if (experts := base.experts(layer))]
        return any(experts.interleaved for experts in found) if found else None
    family = FAMILIES.get(model_type(adapter, base))
    return None if family is None else family.files.interleaved


def model_type(adapter: Adapter, base: Base | None) -> str:
    """Model type in the base's config or, without a base, in the class that PEFT noted; "" if nothing says it."""
    if base is not None:
        return str(base.config.get("model_type", ""))
    library = (adapter.config.get("auto_mapping") or {}).get("parent_library", "")
    parts = str(library).split(".")
    return parts[2] if len(parts) > 2 and parts[:2] == ["transformers", "models"] else ""


def linear(base: Base, key: str) -> str | None:
    """Name of the weight that a plain adapter, named by its lora_A, changes; None if the base lacks it."""
    name = key.removeprefix(PREFIX).removesuffix("lora_A.weight") + "weight"
    candidates = [name, *(name.replace(f".{a}.", f".{b}.") for a in BLOCKS for b in BLOCKS)]
    return next((c for c in candidates if c in base.tensors), None)


def compare(adapter: Adapter, base: Base) -> list[str]:
    """Sentences about what of an adapter does not fit a base."""
    wrong = []
    for layer, projections in adapter.layers.items():
        experts = base.experts(layer)
        if experts is None:
            wrong.append(f"{layer}: the base has no experts there")
            continue
        d, h = experts.d_model, experts.d_hidden
        expected = {"gate_up": (d, 2 * h), "gate": (d, h), "up": (d, h), "down": (h, d)}
        for role, factors in projections.items():
            if (factors.d_in, factors.d_out) == expected[role][::-1] != expected[role]:
                wrong.append(f"{layer}: {role} is transposed")
            elif (factors.d_in, factors.d_out) != expected[
                role
            ] or factors.num_experts != experts.num_experts:
                wrong.append(
                    f"{layer}: {role} has {factors.num_experts} experts {factors.d_in} -> {factors.d_out}, the base "
                    f"{experts.num_experts} of {expected[role][0]} -> {expected[role][1]}"
                )
    return wrong + [
        f"{key.removeprefix(PREFIX)}: the base has no such weight, or of another shape"
        for key, (a, b, _) in plain_pairs(adapter, whole_modules=True).items()
        if (name := linear(base, key)) is None or base.tensors[name].shape != (b.shape[0], a.shape[1])
    ]


def plain_pairs(
    adapter: Adapter, whole_modules: bool = False
) -> dict[str, tuple[StoredTensor, StoredTensor, float]]:
    """{name of lora_A: (lora_A, lora_B, scaling)} of the adapters that are not of experts.

    whole_modules: passes over the weights of modules_to_save. Raises CheckpointError for any other tensor.
    """
    pairs, used = {}, set()
    for key, a in adapter.others.items():
        if not key.endswith(".lora_A.weight"):
            continue
        other = key.removesuffix("lora_A.weight") + "lora_B.weight"
        b = adapter.others.get(other)
        if b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise CheckpointError(f"{adapter.folder}: {key} has no lora_B that fits it")
        module = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        pairs[key] = a, b, scaling_of(adapter.config, module, a.shape[0])
        used |= {key, other}
    left = sorted(k for k in adapter.others.keys() - used if ".lora_" in k or not whole_modules)
    if left:
        raise CheckpointError(
            f"{adapter.folder}: {left[0]} is no adapter of a linear layer: whole modules are not merged"
        )
    return pairs


def delta(loaded: Loaded, experts: Experts, role: str, e: int) -> torch.Tensor | None:
    """Change of one expert's weight, as the base stores it, at least in float32; None if it has none."""
    found = [(name, *part) for name, part in loaded.items()]
    total: torch.Tensor | None = None
    for name, factors, (a, b) in found:
        rows = _rows(name, role, experts)
        if rows is None:
            continue
        wide = torch.promote_types(a.dtype, torch.float32)
        take, put, num_rows = rows
        product = b[e].to(wide)[take] @ a[e].to(wide) * factors.scaling
        if total is None:
            total = torch.zeros(num_rows, product.shape[1], dtype=wide)
        total[put] += product
    return total.T if total is not None and experts.turned else total


def _rows(name: str, role: str, experts: Experts) -> tuple[slice, slice, int] | None:
    """(rows of the adapter's b, rows of the base's weight that they change, rows of the weight)."""
    h, whole = experts.d_hidden, slice(None)
    halves = {"gate": slice(0, h), "up": slice(h, 2 * h)}
    if name == role:
        return whole, whole, {"gate_up": 2 * h, "gate": h, "up": h, "down": experts.d_model}[role]
    if name == "gate_up" and role in halves:
        return halves[role], whole, h
    if role == "gate_up" and name in halves:
        in_turn = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        return whole, (in_turn if experts.interleaved else halves)[name], 2 * h
    return None
