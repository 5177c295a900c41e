"""Compare an adapter with its base model, and compute the change of each weight (delta), for check, merge and repack.

The change of an expert's weight is scaling * b @ a. Adapter and base may differ in where gate (g) and up (u) are:

    two parameters        g g g    u u u
    one, in halves        g g g u u u
    one, interleaved      g u g u g u       ("in turn", as GPT-OSS's)

That is a matter of rows: _rows() says which rows of b change which rows of the base's weight. A base that stores
weights transposed gets the change transposed.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from fmoe_ext.adapters import change_of
from fmoe_ext.checkpoint.base_experts import BaseExperts, Experts
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.finetune.adapters.reading import (
    PREFIX,
    Adapter,
    Factors,
    Pair,
    name_for_patterns,
    scaling_of,
)

_Rows: TypeAlias = slice | torch.Tensor
_Loaded: TypeAlias = Mapping[str, tuple[Factors, Pair]]  # {projection: (its factors, what their read() gave)}


def interleaves(adapter: Adapter, of_base: BaseExperts | None) -> bool | None:
    """Return True where the model's gate_up has gate and up in turn; None if nothing says it."""
    if of_base is not None:
        found = [experts for layer in adapter.layers if (experts := of_base.at(layer))]
        return any(experts.in_turn for experts in found) if found else None
    family = FAMILIES.get(model_type(adapter, None))
    return None if family is None else family.files.interleaved


def lacks_gate(adapter: Adapter, of_base: BaseExperts | None) -> bool:
    """Return True where the experts are known to have no gate, as Nemotron-H's."""
    if of_base is not None:
        return any(e and not e.has_gate for e in map(of_base.at, adapter.layers))
    return adapter.form == "flat" and any("up" in parts for parts in adapter.layers.values())


def model_type(adapter: Adapter, of_base: BaseExperts | None) -> str:
    """Return the model type of the base's config or, without a base, of the class that PEFT noted; "" for neither."""
    if of_base is not None:
        return str(of_base.base.config.get("model_type", ""))
    # as "transformers.models.mixtral.modeling_mixtral"
    library = (adapter.config.get("auto_mapping") or {}).get("parent_library", "")
    parts = str(library).split(".")
    return parts[2] if len(parts) > 2 and parts[:2] == ["transformers", "models"] else ""


def compare(adapter: Adapter, of_base: BaseExperts) -> list[str]:
    """Say in sentences what does not fit between an adapter and its base."""
    wrong = compare_experts(adapter, of_base.at)
    for key, (a, b, _) in plain_pairs(adapter, whole_modules=True).items():
        module, shape = module_of(key), weight_shape(of_base, key)
        if shape is None:
            wrong.append(f"{module}: the base has no such weight")
        elif shape != (b.shape[0], a.shape[1]):
            wrong.append(
                f"{module}: the base's weight is {list(shape)}, the adapter of {[b.shape[0], a.shape[1]]}"
            )
    for key, whole in adapter.others.items():  # embeddings and heads that PEFT saves whole
        of_whole = of_base.base.tensors.get(key.removeprefix(PREFIX))
        if (
            ".lora_" in key or of_whole is None or not (of_whole.shape and whole.shape)
        ):  # a scalar has no rows
            continue
        if of_whole.shape[0] != whole.shape[0]:
            tokens = whole.shape[0]
            wrong.append(
                f"{key.removeprefix(PREFIX)} has {tokens} tokens, the base {of_whole.shape[0]}: the vocabulary was "
                f"extended. Extend the base's too, model.resize_token_embeddings({tokens}) and save_pretrained(), "
                "and give that folder as base"
            )
    return wrong


def module_of(key: str) -> str:
    """Return the module that a plain adapter, named by its lora_A, changes."""
    return key.removeprefix(PREFIX).removesuffix(".lora_A.weight")


def weight_shape(of_base: BaseExperts, key: str) -> tuple[int, ...] | None:
    """Return the shape of the weight that a plain adapter changes, as the model has it; None if the base lacks it."""
    if found := of_base.converted(module_of(key)):
        return found[1].parameters.get(f"{module_of(key)}.weight")
    name = of_base.weight(module_of(key))
    return None if name is None else of_base.base.tensors[name].shape


def compare_experts(adapter: Adapter, at: Callable[[str], Experts | None]) -> list[str]:
    """Say in sentences what does not fit between an adapter and the experts at its paths."""
    wrong = []
    for layer, projections in adapter.layers.items():
        experts = at(layer)
        if experts is None:
            wrong.append(f"{layer}: the base has no experts there")
            continue
        d, h = experts.d_model, experts.d_hidden
        # (in, out) of each projection
        expected = {"gate_up": (d, 2 * h), "gate": (d, h), "up": (d, h), "down": (h, d)}
        for role, factors in projections.items():
            if role in ("gate", "gate_up") and not experts.has_gate:
                wrong.append(f"{layer}: {role} is adapted, but the base's experts have no gate")
                continue
            # turned around, and not square: there the orientation was read or given wrongly
            if (factors.d_in, factors.d_out) == expected[role][::-1] != expected[role]:
                wrong.append(f"{layer}: {role} is transposed")
            elif (factors.d_in, factors.d_out) != expected[
                role
            ] or factors.num_experts != experts.num_experts:
                wrong.append(
                    f"{layer}: {role} has {factors.num_experts} experts {factors.d_in} -> {factors.d_out}, the base "
                    f"{experts.num_experts} of {expected[role][0]} -> {expected[role][1]}"
                )
    return wrong


def plain_pairs(
    adapter: Adapter, whole_modules: bool = False
) -> dict[str, tuple[StoredTensor, StoredTensor, float]]:
    """Find the adapters that are not of experts -> {name of lora_A: (lora_A, lora_B, scaling)}.

    whole_modules: pass over the weights of modules_to_save. Raises CheckpointError for any other tensor.
    """
    pairs, used = {}, set()
    for key, a in adapter.others.items():
        if not key.endswith(".lora_A.weight"):
            continue
        # a [r, in] and b [out, r]
        other = key.removesuffix("lora_A.weight") + "lora_B.weight"
        b = adapter.others.get(other)
        if b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise CheckpointError(f"{adapter.folder}: {key} has no lora_B that fits it")
        name = name_for_patterns(adapter.config, module_of(key))
        pairs[key] = a, b, scaling_of(adapter.config, name, a.shape[0])
        used |= {key, other}
    # what is no pair: tensors of modules that PEFT saves whole, or parts of adapters that are not known
    left = sorted(k for k in adapter.others.keys() - used if ".lora_" in k or not whole_modules)
    if left:
        raise CheckpointError(
            f"{adapter.folder}: {left[0]} is no adapter of a linear layer: whole modules are not merged"
        )
    return pairs


def delta(loaded: _Loaded, experts: Experts, role: str, e: int) -> torch.Tensor | None:
    """Compute the change of one expert's weight, as the base stores it, at least in float32; None if it has none."""
    # of several projections of the adapter: gate and up may be one weight here
    total: torch.Tensor | None = None
    for name, (factors, (a, b)) in loaded.items():
        rows = _rows(name, role, experts)
        if rows is None:
            continue
        take, put, num_rows = rows
        product = change_of(a[e], b[e][take], factors.scaling)
        if total is None:
            total = torch.zeros(num_rows, product.shape[1], dtype=product.dtype, device=product.device)
        total[put] += product
    return total.T if total is not None and experts.turned else total


def _rows(name: str, role: str, experts: Experts) -> tuple[_Rows, _Rows, int] | None:
    """Return (rows of the adapter's b, rows of the base's weight that they change, rows of the weight), or None.

    name: the projection in the adapter, role: in the base. experts.in_turn: how the model, and so the adapter, has gate
    and up; experts.interleaved: how the base's files have them.
    """
    h, whole = experts.d_hidden, slice(None)
    if name == role:
        put: _Rows = whole
        if role == "gate_up" and experts.interleaved != experts.in_turn:
            # row i of the files is row halves[i] of the model; argsort() inverts the permutation
            rows = torch.arange(2 * h, device="cpu")
            halves = rows.view(2, -1).T.flatten() if experts.interleaved else rows.view(-1, 2).T.flatten()
            put = halves.argsort()
        return whole, put, {"gate_up": 2 * h, "gate": h, "up": h, "down": experts.d_model}[role]
    if name == "gate_up" and role in ("gate", "up"):  # one in the adapter, two in the base
        return half_rows(role, h, experts.in_turn), whole, h
    if role == "gate_up" and name in ("gate", "up"):  # two in the adapter, one in the base
        return whole, half_rows(name, h, experts.interleaved), 2 * h
    return None


def half_rows(role: str, h: int, in_turn: bool) -> slice:
    """Return the rows of gate or up, h each, in a parameter of both: in turn, or gate's before up's."""
    index = ("gate", "up").index(role)
    return slice(index, None, 2) if in_turn else slice(index * h, (index + 1) * h)
