"""For merge: the change that an adapter makes to tensors of the files that hold a linear layer in another form.

merge.py calls converted_changes(). The layer's weight may be joined with others in the files, split, or in another
order. Transformers' own converters turn the parameters of a model into the tensors of its files. A converter that only
moves numbers is linear: given the changes of parameters instead of their values, it makes the changes of the tensors in
the files. Whether it only moves numbers nobody says, so it is tried: the changes, sent there and back, must return to
the bit, which rounding would not give; and twice the changes must become twice as much, which adding a constant would
not. Experts are not among these layers: delta.py computes theirs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from fmoe_ext.adapters import change_of
from fmoe_ext.checkpoint.base_experts import BaseExperts
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.weight_names import Converted, as_in_modules, as_written
from fmoe_ext.finetune.adapters.delta import module_of

_Pair: TypeAlias = tuple[StoredTensor, StoredTensor, float]  # lora_A, lora_B, scaling


class _ConvertedChanges:
    """The changes of one converter's parameters, and what they become in the files.

    pairs: {name of a parameter: (lora_A, lora_B, scaling)}. Raises CheckpointError if the converter does not turn
    changes into changes.
    """

    def __init__(self, model: Any, found: Converted, pairs: dict[str, _Pair]) -> None:
        self._model, self._found, self._pairs = model, found, pairs
        changes = self._of_parameters()
        try:
            in_files = self._in_files(changes)
            back = as_in_modules(model, in_files)
            twice = self._in_files({name: 2 * change for name, change in changes.items()})
            is_right = (
                in_files.keys() == set(found.names)
                and all(_are_equal(back[name], change) for name, change in changes.items())
                and all(_are_equal(twice[name], 2 * change) for name, change in in_files.items())
            )
        except Exception as error:  # Transformers' errors have no common class
            raise self._error(f": {type(error).__name__}: {error}") from error
        if not is_right:
            raise self._error("")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in the files that change."""
        return self._found.names

    def change(self, name: str) -> torch.Tensor:
        """Compute the change of one tensor of the files, in float32 or wider.

        All parameters' changes are computed anew at each call: a group's factors are small, its changes are not kept.
        """
        return self._in_files(self._of_parameters())[name]

    def _of_parameters(self) -> dict[str, torch.Tensor]:
        """Compute the changes of all parameters of the converter: zeros where there is no adapter."""
        factors = [factor for a, b, _ in self._pairs.values() for factor in (a, b)]
        wide = torch.float32
        for factor in factors:
            wide = torch.promote_types(wide, factor.dtype)
        changes = {
            name: torch.zeros(shape, dtype=wide, device="cpu")
            for name, shape in self._found.parameters.items()
        }
        for name, (a, b, scaling) in self._pairs.items():
            changes[name] = change_of(a.read().to(wide), b.read().to(wide), scaling)
        return changes

    def _in_files(self, changes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stored = {name: StoredTensor.of(change) for name, change in changes.items()}
        return {name: tensor.read() for name, tensor in as_written(self._model, stored).items()}

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{next(iter(self._pairs))} is made of {', '.join(self.names)} by Transformers' {self._found.operations}, "
            f"which does not turn the adapter's change back into one of the files{reason}. Merge in memory instead: "
            "PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(folder)"
        )


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare values in the wider dtype."""
    wide = torch.promote_types(first.dtype, second.dtype)
    return torch.equal(first.to(wide), second.to(wide))


def converted_changes(
    of_base: BaseExperts, pairs: dict[str, _Pair]
) -> tuple[list[_ConvertedChanges], dict[str, _Pair]]:
    """Group the changes of converted weights by their tensors in the files -> (groups, pairs of all others).

    pairs: {name of lora_A: (lora_A, lora_B, scaling)}.
    """
    groups: dict[tuple[str, ...], tuple[Any, Converted, dict[str, _Pair]]] = {}
    others = {}
    for key, pair in pairs.items():
        if (at := of_base.converted(module_of(key))) is None:
            others[key] = pair
            continue
        model, found = at
        _, _, of_group = groups.setdefault(found.names, (model, found, {}))
        of_group[f"{module_of(key)}.weight"] = pair
    return [_ConvertedChanges(*group) for group in groups.values()], others
