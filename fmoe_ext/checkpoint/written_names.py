"""Tensors of a model as save_pretrained writes them, by Transformers' own table; each is read when it is written."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.safetensors_file import StoredTensor


def as_written(model: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Converts the tensors of a model's state dict to the names and shapes of its files.

    model: on the meta device or not. A tensor of one expert reads that expert alone.
    Equivalent to: transformers.core_model_loading.revert_weight_conversion(model, tensors).
    """
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [e.reverse_transform() for e in reversed(mapping) if not isinstance(e, PrefixChange)]
    renamings = [entry for entry in reverse if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in reverse if isinstance(entry, WeightConverter)]
    is_renamed_last = hasattr(core_model_loading, "apply_renamings")  # behind the converters, since 5.24
    before, behind = ([], renamings) if is_renamed_last else (renamings, [])
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    out: dict[str, StoredTensor] = {}
    groups: dict[str, _Group] = {}
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, before, converters, reverse=True)
        if pattern is None:
            out[rename_source_key(renamed, behind, [], reverse=True)[0]] = tensors[name]
        else:
            group = groups.setdefault(renamed, _Group(model, renamed, by_pattern[pattern]))
            group.sources[name] = pattern, tensors[name]
    for group in groups.values():
        found = group.tensors().items()
        out |= {rename_source_key(name, behind, [], reverse=True)[0]: tensor for name, tensor in found}
    return out


def as_in_modules(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a model's files as Transformers' modules have them.

    Experts one by one, and stacks that have their name already, are renamed alone: from_huggingface() reads them.
    model: on the meta device or not. Raises CheckpointError for tensors that cannot be put together.
    Equivalent to: what from_pretrained() does to the tensors before it assigns them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    own = model.state_dict().keys()
    out: dict[str, torch.Tensor] = {}
    groups: dict[str, _Group] = {}
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters)
        plain = rename_source_key(name, renamings, [])[0]
        first = None if pattern is None else type(by_pattern[pattern].operations[0]).__name__
        # MergeModulelist begins with a tensor for each expert, which from_huggingface() puts together itself
        is_new = renamed != plain and pattern is not None and first != "MergeModulelist"
        if pattern is not None and (renamed in own or is_new):
            group = groups.setdefault(renamed, _Group(model, renamed, by_pattern[pattern]))
            group.sources[name] = pattern, StoredTensor.of(tensors[name])
        else:
            out[name if name in own else plain] = tensors[name]
    for group in groups.values():
        try:
            out |= group.converted({name: tensors[name] for name in group.sources})
        except Exception as error:  # of Transformers' operations: a KeyError for a part that is missing
            kinds = ", ".join(type(operation).__name__ for operation in group.converter.operations)
            raise CheckpointError(
                f"{group.name} is not made of {', '.join(group.sources)} by {kinds}: {error!r}"
            ) from error
    return out


class _Group:
    """The tensors that one converter turns into others, of modules or of files."""

    def __init__(self, model: Any, name: str, converter: Any) -> None:
        self.model, self.name, self.converter = model, name, converter
        self.sources: dict[str, tuple[str, StoredTensor]] = {}

    def tensors(self) -> dict[str, StoredTensor]:
        shapes = self.converted(
            {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, (_, t) in self.sources.items()}
        )
        # One source that ends as a tensor for each expert: an expert is read and converted alone
        last = type(self.converter.operations[-1]).__name__
        is_by_expert = len(self.sources) == 1 and last == "SplitModulelist"
        num_experts = next(iter(self.sources.values()))[1].shape[0]
        out = {}
        for i, (name, shape) in enumerate(shapes.items()):
            read = partial(self._read, name)
            if is_by_expert:
                read = partial(self._read_expert, i // num_experts, i % num_experts)
            out[name] = StoredTensor(tuple(shape.shape), shape.dtype, read)
        return out

    def converted(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)  # which collects the tensors that it is given
        for name, value in values.items():
            converter.add_tensor(self.name, name, self.sources[name][0], value)
        found = converter.convert(self.name, model=self.model, config=self.model.config)
        return {n: value[0] if isinstance(value, list) else value for n, value in found.items()}

    def _read(self, name: str) -> torch.Tensor:
        return self.converted({n: t.read() for n, (_, t) in self.sources.items()})[name]

    def _read_expert(self, part: int, expert: int) -> torch.Tensor:
        """Reads part 0 or 1 (gate and up of one weight) of an expert."""
        ((name, (_, tensor)),) = self.sources.items()
        found = self.converted({name: tensor.rows(expert, expert + 1)})
        return [*found.values()][part]
