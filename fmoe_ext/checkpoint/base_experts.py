"""Find the experts of a layer in a model's folder by the path of their module, for finetune/adapters.

An adapter names modules of the model. Transformers' own table says which tensors of the files these are, for the
architectures that it knows (weight_names.py); for others we look for the names of known layouts. at() returns an
Experts: names of tensors, sizes, and the order of their rows and columns; no values are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import BLOCKS, PER_EXPERT, STACKED, UNGATED
from fmoe_ext.checkpoint.families.family import UP_DOWN
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.weight_names import Converted, WeightNames, up_of


@dataclass(frozen=True)
class Experts:
    """Describes the experts of a layer in a base (the folder that an adapter was trained on)."""

    # by role: gate, up, down; or gate_up, down; or up, down without a gate. One name per expert
    names: dict[str, tuple[str, ...]]
    d_model: int
    d_hidden: int
    is_stack: bool = False  # all experts are in one tensor, whose name is repeated
    turned: bool = False  # the files have [in, out], not [out, in]
    interleaved: bool = False  # the files have gate, up, gate, up, ... in place of gates before ups
    in_turn: bool = False  # the model's module has them in that order, too (GPT-OSS)

    @property
    def num_experts(self) -> int:
        return len(self.names["down"])

    @property
    def has_gate(self) -> bool:
        return self.names.keys() != {"up", "down"}


class BaseExperts:
    """Finds the experts of a base by the path that their module has in the model."""

    def __init__(self, base: ModelFolder) -> None:
        self.base = base
        # Models on the meta device with their names in the files: the class that config.json names, and the language
        # model alone. [] without Transformers, or if it does not know the model type
        self._models: list[tuple[Any, WeightNames]] = []
        try:
            import transformers
        except ModuleNotFoundError:
            return
        makers = (
            lambda config: getattr(transformers, (config.architectures or [""])[0])(config),
            transformers.AutoModelForCausalLM.from_config,
        )
        for make in makers:
            try:
                with torch.device("meta"):
                    # a converter may cast to the parameter's dtype (Inkling 2's does), which must not round
                    model = make(base.make_config()).double()
            except Exception:  # Transformers' errors have no common class; the names of layouts remain
                continue
            self._models.append((model, WeightNames(base, model, base.tensors)))

    def at(self, layer: str) -> Experts | None:
        """Return the experts at a module, as model.layers.0.mlp.experts; None if there are none.

        Raises CheckpointError for tensors that are missing or do not fit.
        """
        for model, names in self._models:
            try:
                module = model.get_submodule(layer)
            except AttributeError:
                continue
            if not hasattr(module, "is_transposed"):
                continue
            up, down = (names.experts(f"{layer}.{name}") for name in (up_of(module), "down_proj"))
            if up is None or down is None:
                continue
            # Each role's tensor for every expert: gate and up apart in the files, or one
            roles: tuple[str, ...] = ("gate", "up")
            if len(up.names[0]) == 1:
                roles = ("gate_up",) if module.has_gate else ("up",)
            columns = [*zip(*up.names, strict=True), *zip(*down.names, strict=True)]
            of_role = dict(zip((*roles, "down"), columns, strict=True))
            # Order and orientation, of the module and of the files
            in_turn = module.has_gate and not getattr(module, "is_concatenated", True)
            shape = module.down_proj.shape[1:]
            d_model, d_hidden = reversed(shape) if module.is_transposed else shape
            turned = bool(module.is_transposed) != down.transposed
            interleaved = up.interleaved or in_turn
            found = Experts(of_role, d_model, d_hidden, down.is_stack, turned, interleaved, in_turn)
            _check_shapes(self.base, found)
            return found
        # Transformers' table does not have it: look for the names of known layouts
        tensors = self.base.tensors
        stem, _, block = layer.removesuffix(".experts").rpartition(".")
        for name in dict.fromkeys((block, *BLOCKS)):
            prefix = f"{stem}.{name}." if stem else f"{name}."
            for gate_up, second in STACKED:
                if {prefix + gate_up, prefix + second} <= tensors.keys():
                    return _stacked(self.base, prefix + gate_up, prefix + second)
            for up_leaf, down_leaf in UNGATED:
                first, last = prefix + up_leaf, prefix + down_leaf
                if not {first, last} <= tensors.keys():
                    continue
                shape = tensors[first].shape
                if len(shape) != 3:
                    raise CheckpointError(
                        f"{self.base.folder}: {first} is {list(shape)}, no stack of matrices"
                    )
                of_expert = {"up": (first,) * shape[0], "down": (last,) * shape[0]}
                found = Experts(of_expert, shape[2], shape[1], is_stack=True)
                _check_shapes(self.base, found)
                return found
            # those without a gate come last: gated experts have up and down, too
            for leaves in (*PER_EXPERT, UP_DOWN):
                # experts are numbered from 0 without gaps
                count = 0
                while f"{prefix}experts.{count}.{leaves[0]}" in tensors:
                    count += 1
                if not count:
                    continue
                of_expert = {
                    role: tuple(f"{prefix}experts.{e}.{leaf}" for e in range(count))
                    for role, leaf in zip(("gate", "up", "down")[-len(leaves) :], leaves, strict=True)
                }
                first = of_expert["up"][0]
                if first not in tensors or len(tensors[first].shape) != 2:
                    found_shape = list(tensors[first].shape) if first in tensors else None
                    raise CheckpointError(f"{self.base.folder}: {first} is {found_shape}, no matrix")
                shape = tensors[first].shape
                found = Experts(of_expert, shape[1], shape[0])
                _check_shapes(self.base, found)
                return found
        return None

    def weight(self, module: str) -> str | None:
        """Find the name of a linear layer's weight; None if the base lacks it or has it as a part of another tensor."""
        wanted = f"{module}.weight"
        for _, names in self._models:
            for name, parameter in names.renamed.items():
                if parameter == wanted:
                    return name
        candidates = (wanted, *(wanted.replace(f".{a}.", f".{b}.") for a in BLOCKS for b in BLOCKS))
        return next((name for name in candidates if name in self.base.tensors), None)

    def check_alone(self, parameter: str) -> None:
        """Raise CheckpointError for a parameter that is tied: its tensor in the files is another parameter's, too."""
        for _, names in self._models:
            if other := names.shared.get(parameter):
                raise CheckpointError(
                    f"{parameter} shares its values with {other}, which a merge would change too: leave the adapter "
                    "unmerged"
                )

    def converted(self, module: str) -> tuple[Any, Converted] | None:
        """Find (model, tensors that a converter makes the weight from); None if the base has it whole or lacks it."""
        for model, names in self._models:
            if found := names.converted(f"{module}.weight"):
                return model, found
        return None


def _stacked(base: ModelFolder, first: str, second: str) -> Experts:
    """Describe stacks of all experts, [E, 2H, D] and [E, D, H] or both transposed: their shapes say which."""
    w1, w2 = base.tensors[first].shape, base.tensors[second].shape
    in_turn = f"{first}_bias" in base.tensors  # GPT-OSS
    if len(w1) == len(w2) == 3 and w1[0] == w2[0]:
        names = {"gate_up": (first,) * w1[0], "down": (second,) * w1[0]}
        if w1[1] == 2 * w2[2] and w1[2] == w2[1]:
            order = {"turned": False, "interleaved": in_turn, "in_turn": in_turn}
            return Experts(names, w1[2], w2[2], is_stack=True, **order)
        if w1[2] == 2 * w2[1] and w1[1] == w2[2]:
            order = {"turned": True, "interleaved": in_turn, "in_turn": in_turn}
            return Experts(names, w1[1], w2[1], is_stack=True, **order)
    raise CheckpointError(
        f"{base.folder}: {first} {list(w1)} and {second} {list(w2)} do not fit each other: expected [E, 2H, D] and "
        "[E, D, H], or both transposed"
    )


def _check_shapes(base: ModelFolder, experts: Experts) -> None:
    d, h = experts.d_model, experts.d_hidden
    shapes = {"gate_up": (2 * h, d), "gate": (h, d), "up": (h, d), "down": (d, h)}
    for role, names in experts.names.items():
        expected: tuple[int, ...] = shapes[role][::-1] if experts.turned else shapes[role]
        if experts.is_stack:
            expected = (experts.num_experts, *expected)
        for name in dict.fromkeys(names):
            tensor = base.tensors.get(name)
            if tensor is None or tensor.shape != expected:
                found = None if tensor is None else list(tensor.shape)
                raise CheckpointError(f"{base.folder}: {name} is {found}, expected {list(expected)}")
