"""A folder's tensors without some experts: bytes of the others are copied, packed ones as they are."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.layouts import STACKED
from fmoe_ext.checkpoint.model_folder import FLOATS, Base
from fmoe_ext.checkpoint.packed import prefixes
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

OF_EXPERT = re.compile(r"experts\.(\d+)\.(.+)")
SHARED = re.compile(r"(shared_|experts\.shared)")


def cut(base: Base, kept: Mapping[str, Sequence[int]], num_experts: int) -> dict[str, StoredTensor]:
    """{name: tensor} of the folder with the experts of `kept` alone, in that order.

    kept: {path of an experts module: experts}. The router's rows, its biases and stacked weights are cut alike; what is
    outside of these layers is as it was. Raises CheckpointError for a layer that the folder has no experts for, and for
    tensors of a router that do not show their experts, as tables of expert numbers.
    """
    tensors = dict(base.tensors)
    for path, experts in kept.items():
        prefix = next((p for p in prefixes(path) if _has_experts(base, p)), None)
        if prefix is None:
            raise CheckpointError(f"{base.folder} has no tensors of experts for {path}")
        place = {old: new for new, old in enumerate(experts)}
        for name in [name for name in base.tensors if name.startswith(prefix)]:
            stored, rest = tensors.pop(name), name.removeprefix(prefix)
            if match := OF_EXPERT.fullmatch(rest):
                if int(match[1]) in place:
                    tensors[f"{prefix}experts.{place[int(match[1])]}.{match[2]}"] = stored
            elif SHARED.match(rest):
                tensors[name] = stored
            else:
                tensors[name] = _cut_one(
                    base, name, stored, experts, num_experts, rest.startswith("experts.")
                )
    return tensors


def config_with(config: Mapping[str, Any], old: int, new: int) -> dict[str, Any]:
    """config.json with another number of experts, in the configuration of the text model too.

    Raises CheckpointError if no key says how many experts there are.
    """
    found = copy.deepcopy(dict(config))
    changed = 0
    for part in (found, found.get("text_config")):
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            if "experts" in key and "per_tok" not in key and "shared" not in key and value == old:
                part[key] = new
                changed += 1
    if not changed:
        raise CheckpointError(f"config.json has no number of experts that is {old}")
    return found


def _has_experts(base: Base, prefix: str) -> bool:
    stacks = {prefix + name for names in STACKED for name in names}
    return any(name.startswith(f"{prefix}experts.") or name in stacks for name in base.tensors)


def _cut_one(
    base: Base, name: str, stored: StoredTensor, experts: Sequence[int], num_experts: int, is_stack: bool
) -> StoredTensor:
    shape = stored.shape
    if shape[:1] == (num_experts,) and (stored.dtype in FLOATS or is_stack):

        def parts() -> Iterator[torch.Tensor]:
            return (stored.rows(e, e + 1) for e in experts)

        return StoredTensor(
            (len(experts), *shape[1:]), stored.dtype, lambda: torch.cat([*parts()]), parts=parts
        )
    if shape == (1, num_experts) and stored.dtype in FLOATS:
        return StoredTensor((1, len(experts)), stored.dtype, lambda: stored.read()[:, list(experts)])
    if num_experts in shape or stored.dtype not in FLOATS:
        raise CheckpointError(
            f"{base.folder}: {name} is {stored.dtype} {list(shape)}, and it is not known how to cut experts from it"
        )
    return stored
