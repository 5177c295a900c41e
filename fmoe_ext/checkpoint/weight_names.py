"""Match the names of tensors in files with a model's parameters, by Transformers' own table for its architecture.

The table has renamings and converters. A converter takes the tensors that match its source patterns through operations
(join the experts, concatenate, transpose, split) to the parameters that its target patterns name:

    experts.*.w1.weight, experts.*.w3.weight  --MergeModulelist(0), Concatenate(1)-->  experts.gate_up_proj

Reversed it makes the files' tensors from parameters. Three ways to use it:

    WeightNames        which tensors of a folder make a parameter, and how: for readers of byte ranges (model_files.py)
    as_written()       a model's tensors as save_pretrained writes them, each read when it is written: for export()
    as_in_modules()    tensors of files as the modules have them: for load_state_dict() and weights beside experts
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_layers import InFiles
from fmoe_ext.checkpoint.model_folder import ModelFolder
from fmoe_ext.checkpoint.safetensors_file import StoredTensor

# Operation of ERNIE 4.5 VL, whose files have the experts of text before those of images in one list
_SPLIT_BY_KIND = "ErnieFuseAndSplitTextVisionExperts"
# Operation of Inkling 2, which does nothing if the files have no scales
_DEQUANTIZE = "Inkling2LoopDequantizeExperts"


class Converted(NamedTuple):
    """Parameters that one converter makes from tensors in the files: joined, split, or in another order."""

    parameters: dict[str, tuple[int, ...]]  # {name: shape}
    names: tuple[str, ...]  # of the tensors in the files
    operations: str  # names of the converter's operations, for errors


class WeightNames:
    """The parameters of a model, on the meta device or not, and the names that a folder has for them.

    Equivalent to: the names that from_pretrained() matches.
    """

    renamed: dict[str, str]  # {name in the files: parameter} of those that are taken whole
    unloaded: list[str]  # names in the files of what becomes no parameter (unloaded.py)
    shared: dict[str, str]  # {parameter: another that is tied to it and has the same tensor in the files}

    def __init__(
        self, base: ModelFolder, model: Any, names: Iterable[str], mapping: Sequence[Any] | None = None
    ) -> None:
        """names: of the plain tensors in the files. mapping: Transformers' steps, by default those of the model."""
        from transformers.core_model_loading import rename_source_key

        self._folder = base.folder
        self._tensors = base.tensors
        self._parameters = model.state_dict()
        renamings, converters, self._converters = _table(model, mapping=mapping)
        self._found: defaultdict[str, list[tuple[str | None, str]]] = defaultdict(list)  # (pattern, name)
        self.unloaded = []
        arguments = model.base_model_prefix, self._parameters
        # Sort numbers by value, as Transformers does: expert 10 comes after 9
        in_order = sorted(
            names, key=lambda name: [(0, int(p)) if p.isdigit() else (1, p) for p in name.split(".")]
        )
        for name in in_order:
            parameter, pattern = rename_source_key(name, renamings, converters, *arguments)
            # it has the module's name already
            if parameter not in self._parameters and name in self._parameters:
                parameter, pattern = rename_source_key(name, [], [], *arguments)
            becomes = [parameter]
            if pattern is not None:  # Transformers names what a converter makes by the first of its targets
                first, *others = self._converters[pattern].target_patterns
                becomes += [parameter.replace(first, other) for other in others]
            for other in becomes:
                self._found[other].append((pattern, name))
            if not self._parameters.keys() & set(becomes):
                self.unloaded.append(name)
        # Tied parameters are in the files once
        self.shared = {}
        for tied, parameter in getattr(model, "all_tied_weights_keys", {}).items():
            if parameter in self._found and tied not in self._found:
                self._found[tied] = self._found[parameter]
                self.shared |= {tied: parameter, parameter: tied}
        self.renamed = {
            found[0][1]: parameter
            for parameter, found in self._found.items()
            if len(found) == 1 and found[0][0] is None
        }

    def converted(self, parameter: str) -> Converted | None:
        """Find the tensors from which a converter makes a parameter; None if the files have it whole, or not at all."""
        found = self._found.get(parameter, [])
        pattern = found[0][0] if found else None
        if pattern is None:
            return None
        # all parameters that the same tensors become
        targets = [other for other, of_other in self._found.items() if of_other == found]
        shapes = {name: tuple(self._parameters[name].shape) for name in targets if name in self._parameters}
        operations = ", ".join(type(step).__name__ for step in self._converters[pattern].operations)
        return Converted(shapes, tuple(name for _, name in found), operations)

    def experts(self, parameter: str) -> InFiles | None:
        """Find the tensors of a weight [E, *, *] of experts; None if the files do not have it.

        Raises CheckpointError for tensors that are put together in a way that is not known here.
        """
        found = self._found.get(parameter)
        if not found:
            return None
        num_experts, *shape = self._parameters[parameter].shape
        if found[0][0] is None:  # one tensor, renamed at most
            return InFiles(((found[0][1],),) * num_experts, is_stack=True)
        # The names by source pattern (gate, up), and the operations
        converter = self._converters[found[0][0]]
        operations: list[Any] = list(converter.operations)
        names = {
            pattern: [name for p, name in found if p == pattern] for pattern in converter.source_patterns
        }
        lists = list(names.values())
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in operations]
        if sum(map(bool, lists)) == 1:  # the weights, and no scales
            steps = [step for step in steps if step[0] != _DEQUANTIZE]
        if [name for name, _ in steps] == [_SPLIT_BY_KIND]:
            lists = [self._share(parameter, converter, of_pattern) for of_pattern in lists]
            return InFiles(tuple(zip(*lists, strict=True)))
        # A tensor for each expert, which the first operation stacks, or a stack already
        is_stack = steps[:1] != [("MergeModulelist", 0)]
        if is_stack:
            of_experts = (tuple(name for of_pattern in lists for name in of_pattern),) * num_experts
        else:
            for pattern, of_pattern in names.items():
                self._check_count(parameter, pattern, of_pattern, num_experts)
            steps = steps[1:]
            of_experts = tuple(zip(*lists, strict=True))
        # What the rest of the operations does, in the terms of InFiles
        if len(converter.target_patterns) == 1:
            last = operations[-1]
            if steps in ([], [("Concatenate", 1)]):
                return InFiles(of_experts, is_stack)
            if steps == [("Interleave", 1)] and not last.inverse:
                return InFiles(of_experts, is_stack, interleaved=True)
            if steps == [("Transpose", None)] and {last.dim0, last.dim1} == {1, 2}:
                # with check_dims Transformers leaves a tensor that has the parameter's shape already
                stored = self._tensors.get(of_experts[0][0])
                is_same = stored is not None and list(stored.shape[-2:]) == shape
                return InFiles(of_experts, is_stack, transposed=not (last.check_dims and is_same))
        kinds = ", ".join(type(step).__name__ for step in operations)
        raise CheckpointError(
            f"{self._folder}: {parameter} is made of {found[0][1]} and others by {kinds}, which is not computed here"
        )

    def _share(self, parameter: str, converter: Any, names: list[str]) -> list[str]:
        """Select the tensors of one target: of the experts of text or of images, whose lists follow each other."""
        num_experts = len(names) // len(converter.target_patterns)
        if num_experts != self._parameters[parameter].shape[0] or len(names) % num_experts:
            raise CheckpointError(
                f"{self._folder}: {parameter} has {self._parameters[parameter].shape[0]} experts by config.json, but "
                f"the files have {len(names)} tensors for {' and '.join(converter.target_patterns)}"
            )
        index = next(i for i, target in enumerate(converter.target_patterns) if target in parameter)
        return names[index * num_experts : (index + 1) * num_experts]

    def _check_count(self, parameter: str, pattern: str, names: list[str], num_experts: int) -> None:
        """Raise CheckpointError, with the first missing name, unless there is a tensor for each expert."""
        # The last number in a name is the expert's: {number: name with {} in its place}
        numbers = {}
        for name in names:
            parts = name.split(".")
            place = max((i for i, part in enumerate(parts) if part.isdigit()), default=0)
            numbers[parts[place]] = [*parts[:place], "{}", *parts[place + 1 :]]
        expected = list(map(str, range(num_experts)))
        # else say which one is missing, or how many there are
        if len(names) == num_experts and numbers.keys() == set(expected):
            return
        missing = [number for number in expected if number not in numbers]
        if missing and numbers:
            example = ".".join(next(iter(numbers.values()))).format(missing[0])
            raise CheckpointError(f"{self._folder} lacks {example}")
        raise CheckpointError(
            f"{self._folder}: {parameter} has {num_experts} experts by config.json, but the files have {len(names)} "
            f"tensors {pattern}"
        )

    def nearest(self, parameter: str) -> str:
        """Word the end of an error about a parameter that the files do not have, by names that are near."""
        stem = parameter.rpartition(".")[0]
        block = stem.rpartition(".")[0]
        found = sorted(name for name in self._tensors if name.startswith((f"{stem}.", f"{block}.")))
        if not found:
            return f"no name in the files begins with {block}"
        return f"Transformers makes it of none of {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}"


def up_of(experts: nn.Module) -> str:
    """Return the name of an experts module's first weight: w1 in our words."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def as_written(model: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Convert the tensors of a model's state dict to the names and shapes of its files.

    model: on the meta device or not. A tensor of one expert reads that expert alone.
    Equivalent to: transformers.core_model_loading.revert_weight_conversion(model, tensors).
    """
    from transformers import core_model_loading
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    # From modules to files: group the tensors that one converter takes, pass on the others under their new names
    renamings, converters, by_pattern = _table(model, reverse=True)
    # Transformers applies renamings behind the converters since 5.24
    is_renamed_last = hasattr(core_model_loading, "apply_renamings")
    before, behind = ([], renamings) if is_renamed_last else (renamings, [])
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
        for name, tensor in group.tensors().items():
            out[rename_source_key(name, behind, [], reverse=True)[0]] = tensor
    return out


def as_in_modules(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert tensors of a model's files to what Transformers' modules have.

    Experts one by one, and stacks that have their name already, are renamed alone: from_huggingface() reads them.
    model: on the meta device or not. Raises CheckpointError for tensors that cannot be put together.
    Equivalent to: what from_pretrained() does to the tensors before it assigns them.
    """
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    # From files to modules, in the same way
    renamings, converters, by_pattern = _table(model, add_legacy=False)
    own = model.state_dict().keys()
    out: dict[str, torch.Tensor] = {}
    groups: dict[str, _Group] = {}
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters)
        plain = rename_source_key(name, renamings, [])[0]
        first = None if pattern is None else type(by_pattern[pattern].operations[0]).__name__
        # A parameter of the model, or another name. Not a tensor for each expert (MergeModulelist): from_huggingface()
        # stacks those itself
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


def _table(
    model: Any, reverse: bool = False, add_legacy: bool = True, mapping: Sequence[Any] | None = None
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return (renamings, converters, {source pattern: converter}) of a model; reverse: from modules to files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    if mapping is None:
        mapping = get_model_conversion_mapping(model, add_legacy=add_legacy and not reverse)
    if reverse:
        from transformers.core_model_loading import PrefixChange

        mapping = [e.reverse_transform() for e in reversed(mapping) if not isinstance(e, PrefixChange)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    return renamings, converters, {p: entry for entry in converters for p in entry.source_patterns}


class _Group:
    """The tensors that one converter turns into others: the files' into the modules', or back."""

    def __init__(self, model: Any, name: str, converter: Any) -> None:
        self.model, self.name, self.converter = model, name, converter
        self.sources: dict[str, tuple[str, StoredTensor]] = {}  # {name: (pattern that it matches, tensor)}

    def tensors(self) -> dict[str, StoredTensor]:
        """Return what the converter makes, computed when it is read."""
        # shapes and names, by converting on the meta device
        shapes = self.converted(
            {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, (_, t) in self.sources.items()}
        )
        (first, (_, source)), *others = self.sources.items()
        # One source that ends as a tensor for each expert: an expert is read and converted alone
        is_by_expert = not others and type(self.converter.operations[-1]).__name__ == "SplitModulelist"

        def reader(name: str, place: int) -> Callable[[], torch.Tensor]:
            def read() -> torch.Tensor:
                if is_by_expert:  # all experts of one part (gate, up) come before those of the next
                    part, expert = divmod(place, source.shape[0])
                    return [*self.converted({first: source.rows(expert, expert + 1)}).values()][part]
                return self.converted({n: t.read() for n, (_, t) in self.sources.items()})[name]

            return read

        return {
            name: StoredTensor(tuple(shape.shape), shape.dtype, reader(name, i))
            for i, (name, shape) in enumerate(shapes.items())
        }

    def converted(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Apply the converter."""
        converter = copy.deepcopy(self.converter)  # add_tensor() keeps tensors in it
        for name, value in values.items():
            converter.add_tensor(self.name, name, self.sources[name][0], value)
        found = converter.convert(self.name, model=self.model, config=self.model.config)
        return {n: value[0] if isinstance(value, list) else value for n, value in found.items()}
