"""Add an adapter to its base, tensor by tensor: `fmoe adapter merge`.

The result has the base's files, and a report of what rounding took from each expert's change. _Merge decides first
which tensors of the base change, so that whatever does not fit is an error before a byte is written; the merged tensors
are then read one at a time, when their shard is written. A merge that was ended goes on after the last shard that it
noted as complete.

Files may hold a linear layer in another form: joined with others, split, or in another order. Transformers' own
converters turn the parameters of a model into the tensors of its files. A converter that only moves numbers is linear:
given the changes of parameters instead of their values, it makes the changes of the tensors in the files. Whether it
only moves numbers nobody says, so _ConvertedChanges tries it: the changes, sent there and back, must return to the bit,
which rounding would not give; and twice the changes must become twice as much, which adding a constant would not.
Experts are not among these layers: delta.py computes theirs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fmoe_ext.adapters import change_of
from fmoe_ext.checkpoint.base_experts import BaseExperts, Experts
from fmoe_ext.checkpoint.card import render_card, shown, write_card
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import fingerprint, write_json
from fmoe_ext.checkpoint.model_folder import FLOATS, ModelFolder, usual_dtype
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, write_safetensors
from fmoe_ext.checkpoint.shards import INDEX, check_is_free, continued
from fmoe_ext.checkpoint.weight_names import Converted, as_in_modules, as_written
from fmoe_ext.finetune.adapters.delta import compare, delta, module_of, plain_pairs
from fmoe_ext.finetune.adapters.reading import CONFIG, WEIGHTS, Adapter, Factors, Pair
from fmoe_ext.model_files import copy_small_files

_REPORT = "merge_report.json"
_Pair: TypeAlias = tuple[StoredTensor, StoredTensor, float]  # lora_A, lora_B, scaling


class _Merge:
    """One merge: which tensors change and how. tensor() gives each as it is to be written."""

    def __init__(self, adapter: Adapter, base: ModelFolder, dtype: torch.dtype | None):
        base.check_plain()
        adapter.require_whole()
        self.of_base = BaseExperts(base)
        if wrong := compare(adapter, self.of_base):
            raise CheckpointError(f"{adapter.folder} does not fit {base.folder}: {'; '.join(wrong[:3])}")
        adapter.require_decided()
        self.adapter, self.base = adapter, base
        self.usual = usual_dtype(base.tensors.values()) or FLOATS[0]  # dtype of most weights of the base
        self.dtype = dtype or self.usual
        self.loaded: tuple[str, dict[str, tuple[Factors, Pair]]] = ("", {})  # (layer, its factors)
        self.losses: dict[str, float] = {}  # {tensor or expert: share of its change that rounding took}
        self.owners: dict[str, str] = {}  # {tensor: module whose adapter changes it}
        # {tensor of all experts: (layer, experts, role)}
        self.stacks: dict[str, tuple[str, Experts, str]] = {}
        # {other tensor: (name for the report, makes its change)}
        self.changes: dict[str, tuple[str, Callable[[], torch.Tensor | None]]] = {}
        # The experts: one tensor for all of a layer, or one for each.
        for layer in adapter.layers:
            experts = self.of_base.at(layer)
            if experts is None:
                raise CheckpointError(f"{base.folder} has no experts at {layer}")
            for role, names in experts.names.items():
                for name in set(names):
                    self._claim(name, layer)
                if experts.is_stack:
                    self.stacks[names[0]] = layer, experts, role
                else:
                    self.changes |= {
                        name: (f"{layer}.{e}.{role}", partial(self._delta, layer, experts, role, e))
                        for e, name in enumerate(names)
                    }
        # A weight that is tied to another one would change both.
        pairs, leaves = plain_pairs(adapter), ("gate_up_proj", "up_proj", "down_proj")
        for parameter in (
            *(f"{module_of(key)}.weight" for key in pairs),
            *(f"{layer}.{leaf}" for layer in adapter.layers for leaf in leaves),
        ):
            self.of_base.check_alone(parameter)
        # Other linear layers: those whose weights the files hold in another form, then the plain ones.
        converted, plain = _converted_changes(self.of_base, pairs)
        for group in converted:
            for name in group.names:
                self._claim(name, group.names[0])
                self.changes[name] = name, partial(group.change, name)

        def product(a: StoredTensor, b: StoredTensor, scaling: float) -> torch.Tensor:
            return change_of(a.read(), b.read(), scaling)

        for key, (a, b, scaling) in plain.items():
            name = str(self.of_base.weight(module_of(key)))
            self._claim(name, key)
            self.changes[name] = name, partial(product, a, b, scaling)

    def tensor(self, name: str) -> StoredTensor:
        """Merge a tensor of the base; it is read when it is written."""
        stored = self.base.tensors[name]
        # a float32 gate, say, keeps its own
        dtype = self.dtype if stored.dtype == self.usual else stored.dtype
        if name in self.stacks:
            layer, experts, role = self.stacks[name]

            def parts() -> Iterator[torch.Tensor]:  # an expert at a time
                for e in range(experts.num_experts):
                    change = self._delta(layer, experts, role, e)
                    yield self._added(f"{layer}.{e}.{role}", stored.rows(e, e + 1)[0], change, dtype)[None]

            return StoredTensor(stored.shape, dtype, lambda: torch.cat([*parts()]), parts=parts)
        if name in self.changes:
            what, change = self.changes[name]
            return StoredTensor(
                stored.shape, dtype, lambda: self._added(what, stored.read(), change(), dtype)
            )
        if dtype == stored.dtype:
            return stored
        return StoredTensor(stored.shape, dtype, lambda: stored.read().to(dtype))

    def _claim(self, name: str, module: str) -> None:
        """Raise CheckpointError for a tensor of two modules: merged, both would have the change of one."""
        if (other := self.owners.setdefault(name, module)) != module:
            raise CheckpointError(
                f"{other} and {module} share {name}, and each has an adapter of its own: merged they would be one. "
                "Leave the adapter unmerged"
            )

    def _delta(self, layer: str, experts: Experts, role: str, e: int) -> torch.Tensor | None:
        if self.loaded[0] != layer:
            self.loaded = ("", {})  # frees one layer before the next is read
            self.loaded = (layer, {r: (f, f.read()) for r, f in self.adapter.layers[layer].items()})
        return delta(self.loaded[1], experts, role, e)

    def _added(
        self, name: str, weight: torch.Tensor, change: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Add a change to a weight in dtype, and note which share of it rounding took."""
        if change is None:
            return weight.to(dtype)
        wide = torch.promote_types(weight.dtype, change.dtype)
        exact = weight.to(wide) + change.to(wide)
        if not exact.isfinite().all():
            raise CheckpointError(f"{name}: the merged weight is not finite")
        rounded = exact.to(dtype)
        norm = change.norm().item()
        if norm:  # a share of no change is not defined
            self.losses[name] = (rounded.to(wide) - exact).norm().item() / norm
        return rounded


def merge(
    adapter: Adapter,
    base: ModelFolder,
    out: Path,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], Any] | None = None,
) -> dict[str, Any]:
    """Write base + adapter to a new folder -> its report: the share of each change that rounding took.

    dtype: of the weights, the base's by default. Raises CheckpointError where they do not fit, where `out` is
    taken, and on a full disk; what is complete stays beside `out`, and the same call goes on with it.
    """
    # Whatever may not fit is found here, before a byte is written.
    out = Path(out).absolute()
    check_is_free(out)
    plan = _Merge(adapter, base, dtype)
    config = base.folder / "config.json"
    files = [adapter.folder / CONFIG, adapter.folder / WEIGHTS, *base.files, config]
    about = {  # a merge of other inputs or choices does not go on with these files
        "files": [fingerprint(file) for file in files if file.exists()],
        "choices": [str(plan.dtype), adapter.packing, adapter.orientation],
    }
    with continued(out, "merging", about) as job:
        # Write the shards that an earlier call has not completed.
        losses = job.done.setdefault("losses", {})  # of the shards that are complete
        left = {
            f: n for f, n in base.files.items() if f.name not in losses or not (job.folder / f.name).exists()
        }
        needed = sum(plan.tensor(name).num_bytes for names in left.values() for name in names)
        free = shutil.disk_usage(job.folder).free
        if needed > free:  # now, rather than after hours of merging
            raise CheckpointError(
                f"{job.folder}: {needed:,} bytes needed, {free:,} are free: make room and run the same command again"
            )
        for file, names in base.files.items():
            if file in left:
                plan.losses = {}
                shard = {name: plan.tensor(name) for name in names}
                write_safetensors(job.folder / file.name, shard, progress=progress)
                losses[file.name] = plan.losses
                job.note()
            elif progress is not None:
                progress(sum(plan.tensor(name).num_bytes for name in names))
        # Sum up what rounding took.
        lost = {name: loss for file in base.files for name, loss in losses[file.name].items()}
        values = sorted(lost.values())
        report = {
            "adapter": str(adapter.folder),
            "base": str(base.folder),
            "dtype": str(plan.dtype).removeprefix("torch."),
            "decoded_from": base.packed or None,
            "changed": len(plan.stacks) + len(plan.changes),
            "lost_share_median": values[len(values) // 2] if values else 0.0,
            "lost_share_worst": values[-1] if values else 0.0,
            "lost_share": lost,
        }

        # Write the rest of the folder: tokenizer, model card, report, index, configuration.
        copy_small_files(base, job.folder)
        facts = {
            "adapter": shown(adapter.folder),
            "weights": report["dtype"],
            "packing of the base": report["decoded_from"],
            "share of a change that rounding took": f"{report['lost_share_median']:.2g} (median)",
        }
        command = f"fmoe adapter merge {shown(adapter.folder)} --base {shown(base.folder)} -o {out.name}"
        what = "A model with a LoRA adapter of its experts merged into it. Figures: merge_report.json."
        card = render_card(out.name, what, base.folder, facts, command, tags=["lora", "merged"])
        write_card(job.folder, card)
        texts = {_REPORT: report}
        if len(base.files) > 1:
            stored = [plan.tensor(name) for name in base.tensors]
            metadata = {
                "total_parameters": sum(t.num_bytes // t.dtype.itemsize for t in stored),
                "total_size": sum(t.num_bytes for t in stored),
            }
            where = {name: file.name for file, names in base.files.items() for name in names}
            texts[INDEX] = {"metadata": metadata, "weight_map": dict(sorted(where.items()))}
        # config.json is rewritten only where its dtype is another now, or missing: else it was copied
        key = "torch_dtype" if "torch_dtype" in base.config else "dtype"
        if base.config and (plan.dtype != plan.usual or base.packed or not base.config.get(key)):
            texts["config.json"] = base.config | {key: str(plan.dtype).removeprefix("torch.")}
        for name, text in texts.items():
            write_json(job.folder / name, text)
    return report


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


def _converted_changes(
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
