"""Merge an adapter into packed experts, in the files' own format: `fmoe adapter merge --to packed`.

W is a packed weight, D the adapter's change of it, Q the result in the same packing. A change of an adapter is often
smaller than the steps of the packing, so that rounding W + D to the nearest values would lose it. A text tells which
directions matter:

1. The files are copied. The text runs through the streamed model once, a hook on each layer sees the inputs x of the
   experts, and the experts are rounded one at a time so that ||x (Q - (W + D))|| is small, by the second moments of x
   (frozen.rounding). The down projection's inputs come from the merged up projection before it is rounded.
2. The bytes of Q replace those of W in the copies. Each layer is noted when its bytes are on the disk, so that a merge
   that was ended goes on after it.
3. The last part of the text rounds nothing: on it the error is measured, against the error of leaving the adapter out.
   The certificate has both, and a result that is not better is refused unless it is forced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from fmoe_ext.checkpoint.base_experts import BaseExperts, Experts
from fmoe_ext.checkpoint.card import render_card, shown, write_card
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer
from fmoe_ext.checkpoint.files import copy_file, fingerprint, sync_file, write_json
from fmoe_ext.checkpoint.model_folder import FLOATS
from fmoe_ext.checkpoint.safetensors_file import StoredTensor, renew_checksum
from fmoe_ext.checkpoint.shards import Unfinished, check_is_free, continued
from fmoe_ext.finetune.adapters.delta import compare_experts, delta, module_of, plain_pairs
from fmoe_ext.finetune.adapters.reading import CONFIG, WEIGHTS, Adapter
from fmoe_ext.finetune.streaming.model import stream
from fmoe_ext.finetune.text import sequences
from fmoe_ext.frozen import Quantized
from fmoe_ext.frozen.rounding import ROUNDED, error_of, round_packed, shrunk_moments, to_nearest
from fmoe_ext.huggingface.glu import apply_gate
from fmoe_ext.model_files import FolderModel, ModelFiles, experts_modules, open_model

_CERTIFICATE = "merge_certificate.json"
_Say: TypeAlias = Callable[[str], None]
_Bytes: TypeAlias = "np.ndarray[Any, Any]"
_ROLES = ("w1", "w2")


def repack(
    adapter: Adapter,
    source: str | Path | ModelFiles,
    out: Path,
    tokens: torch.Tensor | None,
    *,
    memory: int | str = "auto",
    seq_len: int = 512,
    held_out: float = 0.25,
    force: bool = False,
    say: _Say = lambda line: None,
) -> dict[str, Any]:
    """Write a packed model with an adapter merged into it -> the certificate, also in out/merge_certificate.json.

    source: a model that stream() reads, experts in one of frozen.rounding.ROUNDED; it is only read. tokens: ids [N]
    int64; the last held_out of the sequences measures the error. None: rounds to the nearest values, with the scale of
    each block or a fresh one where that errs less (to_nearest), and measures nothing, for adapters that
    lora.fuse(quantize=) trained. memory: of stream().
    certificate["ratio"]: ||X (Q - (W + D))|| / ||X (W - (W + D))||, over all experts and for each layer and weight.
    Raises CheckpointError for what does not fit, and unless force where a ratio is not below 1: then nothing is at
    `out`, and the certificate is in the text and in <out>.certificate.json. A call that ended early goes on.
    """
    out = Path(out).absolute()
    check_is_free(out)
    adapter.require_whole()
    adapter.require_decided()
    plan = _Repack(adapter, open_model(source), memory, say)
    if tokens is not None:
        plan.take_text(tokens, seq_len, held_out)
    plan.find_plain()
    text = "" if tokens is None else hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    with continued(out, "merging", plan.about(text, [seq_len, held_out])) as job:
        certificate = plan.run(job)
        beside = out.with_name(f"{out.name}.certificate.json")
        worse = certificate["not_better"]
        if worse and not force:
            write_json(beside, certificate)
            raise CheckpointError(
                f"{as_text(certificate)}\nthe result is not nearer to the merged weights than the model without the "
                f"adapter ({', '.join(worse[:3])}): train with lora.fuse(quantize=), give more text, or merge into "
                f"bfloat16. --force writes it. The certificate is {beside}"
            )
        beside.unlink(missing_ok=True)  # of an earlier call
        write_json(job.folder / _CERTIFICATE, certificate)
        write_card(job.folder, plan.card(out.name, text, certificate))
    return certificate


def as_text(certificate: Mapping[str, Any]) -> str:
    """Write a line for each weight of a layer: its error relative to leaving the adapter out."""
    lines = []
    for path, weights in certificate["layers"].items():
        for name, found in weights.items():
            ways = ", ".join(f"{way} {share:.0%}" for way, share in found["ways"].items())
            ratio = "not measured" if found["ratio"] is None else f"{found['ratio']:.3f}"
            lines.append(f"{path}.{name}: error relative to not merging {ratio}; rows: {ways}")
    total = certificate["ratio"]
    return "\n".join([*lines, f"all experts: {'not measured' if total is None else f'{total:.3f}'}"])


class _Repack:
    """One merge into packed experts: checks that everything fits, then copies and rounds (run)."""

    def __init__(self, adapter: Adapter, files: ModelFiles, memory: int | str, say: _Say) -> None:
        self.adapter, self.files, self.say = adapter, files, say
        self.model: Any = stream(files, memory)
        found = experts_modules(self.model)
        self.modules = {path: found[path] for path in found if path in adapter.layers}
        self.layers = {p: m.streamed.stream.pool.layers[m.streamed.index] for p, m in self.modules.items()}
        # Refuse layers that share the bytes of their experts, and formats that are not rounded.
        sharing: dict[tuple[Path, int], list[str]] = {}  # {(file, first byte of its experts): layers}
        for path, module in found.items():
            layer = module.streamed.stream.pool.layers[module.streamed.index]
            first = next(iter(layer.parts.values())).spans[0][0]
            sharing.setdefault((first.path, first.begin), []).append(path)
        for paths in sharing.values():
            if len(paths) > 1 and self.modules.keys() & set(paths):
                raise CheckpointError(
                    f"{' and '.join(paths)} share their experts, which a merge would change in all of them: leave the "
                    "adapter unmerged"
                )
        for path, layer in self.layers.items():
            # zero points and factors stay as they are, whatever they are made of
            parts = [part for name, part in layer.parts.items() if not name.endswith(".zero")]
            spans = [span for part in parts for of_expert in part.spans for span in of_expert]
            formats = {w.format for w in _read(layer, 0)} if layer.is_packed else {"floats"}
            if not formats <= set(ROUNDED) or any(span.turn is not None for span in spans):
                kind = ", ".join(sorted(formats)) + (" in another layout" if formats <= set(ROUNDED) else "")
                raise CheckpointError(
                    f"{files.path}: the experts of {path} are {kind}: --to packed is for {', '.join(ROUNDED)} as they "
                    "lie in the file. Merge into a float model without it"
                )
        # Describe the experts as delta() wants them, and compare them with the adapter.
        self.experts: dict[str, Experts] = {}
        for path, module in self.modules.items():
            layer = self.layers[path]
            (E, _, d), (_, _, h) = layer.shapes
            names = dict.fromkeys(("gate_up" if module.has_gate else "up", "down"), ("",) * E)
            in_turn = bool(module.has_gate) and not getattr(module, "is_concatenated", True)
            interleaved = _read(layer, 0)[0].interleaved  # gate and up in the packed rows
            self.experts[path] = Experts(names, d, h, True, False, interleaved, in_turn)
        self.base = files.base if isinstance(files, FolderModel) else None
        wrong = compare_experts(adapter, self.experts.get)
        if adapter.others and self.base is None:
            wrong.append(
                f"{next(iter(adapter.others))} is no adapter of experts, the only ones merged into GGUF files"
            )
        if wrong:
            raise CheckpointError(f"{adapter.folder} does not fit {files.path}: {'; '.join(wrong[:3])}")
        # (weight, lora_A, lora_B, scaling) of layers outside of the experts
        self.plain: list[tuple[StoredTensor, StoredTensor, StoredTensor, float]] = []
        self.ids: torch.Tensor | None = None  # of the text: sequences to round by, then those to measure on
        self.rows = 0  # tokens to round by

    def find_plain(self) -> None:
        """Find the weights outside of the experts that change, which the files must have as floats."""
        if self.base is None:  # a GGUF file, whose adapters of other layers __init__() has refused
            return
        of_base = BaseExperts(self.base)
        for key, (a, b, scaling) in plain_pairs(self.adapter).items():
            if at := of_base.converted(module_of(key)):
                raise CheckpointError(
                    f"{key}: the weight is made of {', '.join(at[1].names)} by Transformers' {at[1].operations}, which "
                    "is not merged into packed files: merge the adapter into the unpacked model"
                )
            name = of_base.weight(module_of(key))
            stored = self.base.tensors.get(str(name))
            if stored is None or stored.dtype not in FLOATS or stored.place is None:
                raise CheckpointError(
                    f"{self.files.path} has no float weight for {key}: adapters of packed layers outside of the "
                    "experts are not merged"
                )
            if stored.shape != (b.shape[0], a.shape[1]):
                raise CheckpointError(f"{key} does not fit {name} {list(stored.shape)}")
            of_base.check_alone(f"{module_of(key)}.weight")
            self.plain.append((stored, a, b, scaling))

    def take_text(self, tokens: torch.Tensor, seq_len: int, held_out: float) -> None:
        """Cut a text into sequences to round by and sequences to measure on."""
        if not self.modules:
            raise CheckpointError(
                f"{self.adapter.folder} has no adapter of experts, which a text is for: --rounding nearest"
            )
        config = self.model.config.get_text_config()
        size = max(e.num_experts for e in self.experts.values())  # so many experts need enough tokens
        calibration, measured = sequences(tokens, seq_len, held_out, size, config.vocab_size)
        if not len(measured):
            raise CheckpointError(f"held_out={held_out} leaves no text to measure the error on")
        self.ids, self.rows = torch.cat((calibration, measured)), calibration.numel()

    def about(self, text: str, split: Sequence[float]) -> dict[str, Any]:
        """Say the inputs and choices of a merge: one of others does not go on with its files."""
        files = [self.adapter.folder / CONFIG, self.adapter.folder / WEIGHTS, *self.files.inputs]
        return {
            "files": [fingerprint(file) for file in files if file.exists()],
            "text": text,
            "split": list(split),
            "choices": [self.adapter.packing, self.adapter.orientation],
        }

    def card(self, title: str, text: str, certificate: Mapping[str, Any]) -> str:
        """Write the model card of a merge. text: the digest of its ids, "" without one."""
        ratio = certificate["ratio"]
        packings = sorted({w.format for layer in self.layers.values() for w in _read(layer, 0)})
        facts = {
            "adapter": shown(self.adapter.folder),
            "packing of the experts": ", ".join(packings),
            "text, SHA-256 of its token ids": f"`{text}`" if text else None,
            "error relative to not merging": None if ratio is None else f"{ratio:.3f}",
        }
        return render_card(
            title,
            "A packed model with a LoRA adapter of its experts merged into it. Figures: merge_certificate.json.",
            self.files.path,
            facts,
            f"fmoe adapter merge {shown(self.adapter.folder)} --base {shown(self.files.path)} --to packed "
            f"{'--text TEXT' if text else '--rounding nearest'} -o {title}",
            library="gguf" if self.files.path.is_file() else "transformers",
            tags=["lora", "merged"],
        )

    def run(self, job: Unfinished) -> dict[str, Any]:
        """Copy the files and replace the bytes of experts -> the certificate."""
        job.done.setdefault("layers", {})
        # Copy what an earlier call has not copied.
        copied = job.done.setdefault("copied", [])
        for file in self.files.weights:
            if file.name not in copied:
                copy_file(file, job.folder / file.name)
                copied.append(file.name)
                job.note()
            elif not (job.folder / file.name).exists():
                raise CheckpointError(
                    f"{job.folder} has lost {file.name}: remove {job.place} and merge again"
                )
        self.files.copy_beside(job.folder, with_index=True)
        # Layers outside of the experts: add in float32 at least, and replace the bytes.
        for stored, a, b, scaling in self.plain:
            value = stored.read()
            wide = torch.promote_types(value.dtype, torch.float32)
            merged = (value.to(wide) + b.read().to(wide) @ a.read().to(wide) * scaling).to(value.dtype)
            whole, begin = cast(tuple[Path, int], stored.place)
            _patch(job.folder / whole.name, begin, _raw(merged))
        # Round every layer: when the text gets there, or one after the other without a text.
        if self.ids is None:
            for path in self.modules:
                self._layer(job, path, None, None)
        else:
            order = ("hidden_states", "top_k_index")

            def see(path: str, module: Any, given: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
                x, idx = (named[name] if name in named else given[i] for i, name in enumerate(order))
                self._layer(job, path, x.float(), idx)

            hooks = [
                module.register_forward_hook(partial(see, path), with_kwargs=True)
                for path, module in self.modules.items()
            ]
            try:
                with torch.no_grad():
                    self.model.base_model(input_ids=self.ids, use_cache=False)
            finally:
                for hook in hooks:
                    hook.remove()
        for file in job.folder.glob("*.safetensors"):
            renew_checksum(file)
        # Sum up the errors, of weights that changed.
        layers = job.done["layers"]
        changed = {f"{p}.{name}": w for p, ws in layers.items() for name, w in ws.items() if w["ways"]}
        total = _ratio([pair for w in changed.values() for pair in w["experts"]])
        not_better = []
        if self.ids is not None:
            not_better = [p for p, w in changed.items() if w["ratio"] is None or w["ratio"] >= 1]
        return {"ratio": total, "not_better": not_better, "layers": layers}

    @torch.no_grad()
    def _layer(self, job: Unfinished, path: str, x: torch.Tensor | None, idx: torch.Tensor | None) -> None:
        """Round the experts of a layer, and write them. x [T, D]: their inputs; idx [T, K]: the experts of each."""
        if path in job.done["layers"]:  # by an earlier call
            return
        self.say(f"rounding the experts of {path}")
        module, layer, experts = self.modules[path], self.layers[path], self.experts[path]
        loaded = {role: (f, f.read()) for role, f in self.adapter.layers[path].items()}
        prior = None if x is None else shrunk_moments(x[: self.rows])
        sums = {name: _Sums(experts.num_experts) for name in _ROLES}
        for e in range(experts.num_experts):
            weights = _read(layer, e)
            # inputs of this expert [n, D], those to round by first: the text has them in this order
            tokens = None if idx is None else (idx == e).any(1).nonzero()[:, 0]
            rows = None if x is None or tokens is None else x[tokens]
            num = 0 if tokens is None else int((tokens < self.rows).sum())
            for name, role, packed in zip(_ROLES, experts.names, weights, strict=True):
                change = delta(loaded, experts, role, e)
                lies = replace(packed, interleaved=False)  # rows as in the file, gate and up not put in order
                weight = lies.dequantize()[0]
                target = weight if change is None else weight + change.float()
                if not target.isfinite().all():
                    raise CheckpointError(f"{path}.{e}.{role}: the merged weight is not finite")
                if change is not None and change.any():
                    if rows is None:
                        rounded, ways = to_nearest(lies, target), {"nearest": target.shape[0]}
                    else:
                        # few tokens choose some experts: their moments are drawn to the moments of the layer's inputs
                        moments = shrunk_moments(rows[:num], prior if name == "w1" else None)
                        rounded, ways = round_packed(lies, target, moments)
                    sums[name].add(e, rounded, weight, target, rows, num, ways)
                    for key, part in layer.parts.items():  # to its place in the copies of the files
                        owner, _, piece = key.partition(".")
                        if owner == name and piece != "zero":  # which rounding leaves alone
                            raw = _raw(getattr(rounded, piece))
                            for span in part.spans[e]:
                                at = job.folder / span.path.name
                                _patch(at, span.begin, raw[span.at : span.at + span.num_bytes])
                if name == "w1" and rows is not None:
                    # inputs of the down projection [n, H], by an up projection that is not rounded
                    rows = rows @ target.T
                    if module.has_bias:
                        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
                        rows = rows + bias[e].float()
                    rows = apply_gate(module, rows) if module.has_gate else module.act_fn(rows)
        spans = (span for part in layer.parts.values() for of_expert in part.spans for span in of_expert)
        for file in {span.path.name for span in spans}:
            sync_file(job.folder / file)  # before the note that says that they have the layer
        job.done["layers"][path] = {name: sums[name].report() for name in _ROLES}
        job.note()


class _Sums:
    """Squared errors of the experts of one weight, with and without the adapter, and how their rows were rounded."""

    def __init__(self, num_experts: int) -> None:
        self.errors: list[tuple[float, float] | None] = [None] * num_experts  # (of the result, of no adapter)
        self.ways: dict[str, int] = {}  # {way of rounding: rows}

    def add(
        self,
        e: int,
        packed: Quantized,
        weight: torch.Tensor,
        target: torch.Tensor,
        rows: torch.Tensor | None,
        num: int,
        ways: Mapping[str, int],
    ) -> None:
        """Note expert e: measure its error on rows[num:], the inputs that it was not rounded by."""
        for way, count in ways.items():
            self.ways[way] = self.ways.get(way, 0) + count
        if rows is not None and len(rows) > num:
            # ||X (W - T)||^2 is a sum over the rows w of W - T: w X^T X w^T, of the moments X^T X
            moments = rows[num:].T @ rows[num:]
            pair = (error_of(w - target, moments).sum().item() for w in (packed.dequantize()[0], weight))
            self.errors[e] = (next(pair), next(pair))

    def report(self) -> dict[str, Any]:
        count = max(1, sum(self.ways.values()))
        return {
            "experts": self.errors,
            "ratio": _ratio(self.errors),
            "ways": {way: n / count for way, n in self.ways.items()},
        }


def _ratio(errors: Sequence[Sequence[float] | None]) -> float | None:
    """Return the norm of all errors over the norm of those without the adapter; None if no expert has any."""
    known = [pair for pair in errors if pair is not None]
    ours, without = (sum(pair[i] for pair in known) for i in range(2))
    return (ours / without) ** 0.5 if without else None


def _read(layer: Layer, e: int) -> tuple[Any, Any]:
    """Read (w1, w2) of one expert from the files."""
    found: tuple[Any, Any] = layer.build({name: part.read(e)[None] for name, part in layer.parts.items()})
    return found


def _raw(tensor: torch.Tensor) -> _Bytes:
    raw: _Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def _patch(path: Path, begin: int, raw: _Bytes) -> None:
    """Replace bytes inside a file."""
    with open(path, "r+b") as file:
        file.seek(begin)
        file.write(raw.tobytes())
