"""Names of a model's parameters in files, by Transformers' own table of its architectures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_layers import InFiles
from fmoe_ext.checkpoint.model_folder import ModelFolder

# The experts of ERNIE 4.5 VL: those of text come before those of images.
_SPLIT_BY_KIND = "ErnieFuseAndSplitTextVisionExperts"
# Leaves experts as they are if the files have no scales.
_DEQUANTIZE = "Inkling2LoopDequantizeExperts"


class Converted(NamedTuple):
    """Names parameters that a converter makes of tensors in the files: joined, split, or in another order."""

    parameters: dict[str, tuple[int, ...]]  # {name: shape}
    names: tuple[str, ...]  # of the tensors in the files
    operations: str  # names of the converter's operations, for errors


class WeightNames:
    """The parameters of a model, on the meta device or not, and the names that a folder has for them.

    names: of the plain tensors in the files. renamed: {name in the files: parameter} of those that are taken whole.
    shared: {parameter: another that is tied to it and has the same tensor in the files}.
    Equivalent to: the names that from_pretrained() matches.
    """

    def __init__(self, base: ModelFolder, model: Any, names: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        self._folder = base.folder
        self._tensors = base.tensors
        self._parameters = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        self._found: defaultdict[str, list[tuple[str | None, str]]] = defaultdict(list)
        prefix = model.base_model_prefix
        # Numbers by value, as Transformers sorts: expert 10 comes after 9
        in_order = sorted(
            names, key=lambda name: [(0, int(p)) if p.isdigit() else (1, p) for p in name.split(".")]
        )
        for name in in_order:
            arguments = prefix, self._parameters
            parameter, pattern = rename_source_key(name, renamings, converters, *arguments)
            if parameter not in self._parameters and name in self._parameters:
                parameter, pattern = rename_source_key(name, [], [], *arguments)
            becomes = [parameter]
            if pattern is not None:  # Transformers names what a converter makes by the first of its targets
                first, *others = self._converters[pattern].target_patterns
                becomes += [parameter.replace(first, other) for other in others]
            for other in becomes:
                self._found[other].append((pattern, name))
        self.shared: dict[str, str] = {}
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
        """The tensors that a parameter is made of by a converter; None if the files have it whole, or not at all."""
        found = self._found.get(parameter, [])
        pattern = found[0][0] if found else None
        if pattern is None:
            return None
        targets = [other for other, of_other in self._found.items() if of_other == found]
        shapes = {name: tuple(self._parameters[name].shape) for name in targets if name in self._parameters}
        operations = ", ".join(type(step).__name__ for step in self._converters[pattern].operations)
        return Converted(shapes, tuple(name for _, name in found), operations)

    def experts(self, parameter: str) -> InFiles | None:
        """Finds the tensors of a weight [E, *, *] of experts; None if the files do not have it.

        Raises CheckpointError for tensors that are put together in a way that is not known here.
        """
        found = self._found.get(parameter)
        if not found:
            return None
        num_experts, *shape = self._parameters[parameter].shape
        if found[0][0] is None:
            return InFiles(((found[0][1],),) * num_experts, is_stack=True)
        converter = self._converters[found[0][0]]
        operations: list[Any] = list(converter.operations)
        names = {
            pattern: [name for p, name in found if p == pattern] for pattern in converter.source_patterns
        }
        lists = [list(of_pattern) for of_pattern in names.values()]
        steps = [(type(step).__name__, getattr(step, "dim", None)) for step in operations]
        if sum(map(bool, lists)) == 1:
            steps = [step for step in steps if step[0] != _DEQUANTIZE]
        if [name for name, _ in steps] == [_SPLIT_BY_KIND]:
            lists = [self._share(parameter, converter, of_pattern) for of_pattern in lists]
            return InFiles(tuple(zip(*lists, strict=True)))
        if steps[:1] == [("MergeModulelist", 0)]:
            for pattern, of_pattern in names.items():
                self._check_count(parameter, pattern, of_pattern, num_experts)
            steps, is_stack = steps[1:], False
            of_experts = tuple(zip(*lists, strict=True))
        else:
            is_stack = True
            of_experts = (tuple(name for of_pattern in lists for name in of_pattern),) * num_experts
        if len(converter.target_patterns) == 1:
            put_together = self._put_together(InFiles(of_experts, is_stack), steps, operations, shape)
            if put_together is not None:
                return put_together
        kinds = ", ".join(type(step).__name__ for step in operations)
        raise CheckpointError(
            f"{self._folder}: {parameter} is made of {found[0][1]} and others by {kinds}, which is not computed here"
        )

    def _put_together(
        self, files: InFiles, steps: list[tuple[str, Any]], operations: list[Any], shape: list[int]
    ) -> InFiles | None:
        """The tensors of experts, and how one becomes a weight [*shape]; None for steps that are not known."""
        if steps in ([], [("Concatenate", 1)]):
            return files
        step = operations[-1]
        if steps == [("Interleave", 1)] and not step.inverse:
            return files._replace(interleaved=True)
        if steps == [("Transpose", None)] and {step.dim0, step.dim1} == {1, 2}:
            stored = self._tensors.get(files.names[0][0])
            is_same = stored is not None and list(stored.shape[-2:]) == shape
            return files._replace(transposed=not (step.check_dims and is_same))
        return None

    def _share(self, parameter: str, converter: Any, names: list[str]) -> list[str]:
        """Selects the tensors of the experts of text or of images, whose lists follow each other."""
        num_experts = len(names) // len(converter.target_patterns)
        if num_experts != self._parameters[parameter].shape[0] or len(names) % num_experts:
            raise CheckpointError(
                f"{self._folder}: {parameter} has {self._parameters[parameter].shape[0]} experts by config.json, but "
                f"the files have {len(names)} tensors for {' and '.join(converter.target_patterns)}"
            )
        index = next(i for i, target in enumerate(converter.target_patterns) if target in parameter)
        return names[index * num_experts : (index + 1) * num_experts]

    def _check_count(self, parameter: str, pattern: str, names: list[str], num_experts: int) -> None:
        """Raises CheckpointError unless there is a tensor for each expert."""
        numbers = {}
        for name in names:
            parts = name.split(".")
            place = max((i for i, part in enumerate(parts) if part.isdigit()), default=0)
            numbers[parts[place]] = [*parts[:place], "{}", *parts[place + 1 :]]
        expected = list(map(str, range(num_experts)))
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
        """Words an error about a parameter that the files do not have."""
        stem = parameter.rpartition(".")[0]
        block = stem.rpartition(".")[0]
        found = sorted(name for name in self._tensors if name.startswith((f"{stem}.", f"{block}.")))
        if not found:
            return f"no name in the files begins with {block}"
        return f"Transformers makes it of none of {', '.join(found[:3])}{', ...' if len(found) > 3 else ''}"


def up_of(experts: nn.Module) -> str:
    """Returns the name of the weight that is multiplied first."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


__all__ = ["WeightNames", "up_of"]
