"""Quantise a float folder: write its weights in a packing, as a GGUF file or as a folder for Transformers.

    what     the experts, and the linear layers of the same decoder; embeddings, head, routers and norms stay as is
    how      each value becomes the nearest one that the packing has (frozen.quantize), under scales that a text may
             choose: errors weigh more where its inputs are large (calibration.py)
    memory   one matrix at a time is read, packed and written, or the few that servers join (_FUSED); for GGUF the
             packed experts of one weight of a layer are in memory, too
    restart  a call that was interrupted goes on after the files that are whole

export_quantized() is the entry, which cli.py calls. _Packed writes the folder, _Gguf the file, and _Job is what they
share.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.card import render_card, shown, write_card
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Part
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.files import fingerprint, path_of_unfinished, read_json, write_json
from fmoe_ext.checkpoint.methods.packings import PACKINGS, Packing
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.shards import CONFIG, MAX_SHARD_BYTES, check_is_free, continued, write_model_files
from fmoe_ext.checkpoint.unloaded import heads_in, without_heads, worded
from fmoe_ext.checkpoint.weight_names import as_in_modules, up_of
from fmoe_ext.finetune.text import sequences
from fmoe_ext.formats.calibration import measure
from fmoe_ext.formats.writing import heads_in_gguf, tokenizer_files
from fmoe_ext.frozen.quantized import FITTED
from fmoe_ext.gguf.vocabulary import read_vocabulary
from fmoe_ext.gguf.writing import PACKED, check_writable, write_gguf
from fmoe_ext.model_files import FolderModel, experts_modules, linear_layers, open_model

TARGETS = ("gguf", "packed")
TYPES = (*PACKED, *(name for name in PACKINGS if name not in PACKED))
# {type that only the other target has: what to take instead}
_INSTEAD = MappingProxyType(
    {
        "q4_k": "nvfp4, mxfp4 or nf4",
        "q8_0": "mxfp8 or fp8",
        "mxfp8": "q8_0",
        "fp8": "q8_0",
        "nf4": "q4_k",
    }
)
# Layers of one module that vLLM or SGLang joins into one matrix, which in NVFP4 has one factor for all rows: they have
# the same inputs and are packed together
_FUSED = (
    ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj"),  # from b_proj on: Kimi Linear's
    ("q_a_proj", "kv_a_proj_with_mqa"),  # DeepSeek's latent attention
    ("in_proj_qkv", "in_proj_z"),  # Qwen3.5's linear attention
    ("in_proj_b", "in_proj_a"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


class Report(NamedTuple):
    """Describes what was written."""

    counts: dict[str, int]  # {type: number of tensors}
    bytes_before: int
    bytes_after: int
    left_out: list[str]  # names of tensors that the format has no place for
    has_vocabulary: bool
    left_out_text: str  # left_out in words: how many in which head, and some of the others' names


def export_quantized(
    source: str | Path,
    out: str | Path,
    to: str,
    type: str,
    *,
    tokens: torch.Tensor | None = None,
    seq_len: int = 512,
    batch: int = 8,
    memory: int | str = "auto",
) -> Report:
    """Write a float folder in packed weights; the folder is only read.

    source: of Transformers, or a name in the cache of the Hugging Face hub. out: a new folder; for "gguf" it has
    model.gguf, with the vocabulary of the folder's tokenizer. type: a name in TYPES.
    tokens: ids [N] int64 of a text like those the model is for; scales are then chosen so that errors weigh more where
    the inputs of this text are large; for q4_k, mxfp4, nvfp4 and nf4. It is read in sequences of seq_len, a batch of
    them for each pass over the files, by a model that is streamed within `memory`.
    Raises CheckpointError for a type that the target does not have, for folders that are packed already, for experts
    whose rows are no whole blocks and for models that llama.cpp computes otherwise, before anything is written.
    """
    if to not in TARGETS:
        raise CheckpointError(f"--to must be one of {', '.join(TARGETS)}, but got {to!r}")
    if type not in TYPES:
        raise CheckpointError(f"--type must be one of {', '.join(TYPES)}, but got {type!r}")
    if type not in (PACKED if to == "gguf" else PACKINGS):
        other = "packed" if to == "gguf" else "gguf"
        what = (
            "llama.cpp has no type" if to == "gguf" else "no library of Transformers' folders has a packing"
        )
        raise CheckpointError(f"{what} {type}: take --type {_INSTEAD[type]}, or --to {other}")
    out = Path(out).absolute()
    check_is_free(out)
    files = open_model(source)
    if not isinstance(files, FolderModel):
        raise CheckpointError(f"{files.path} is a GGUF file: give the float folder that it was made of")
    files.base.check_plain()
    if tokens is not None and type not in FITTED:
        others = ", ".join(sorted({*FITTED} & {*TYPES}))
        raise CheckpointError(
            f"--type {type} leaves no choice to a text: leave the text out, or take --type {others}"
        )
    # All checks of names, shapes and the architecture are in these constructors: nothing is written before
    job = (_Gguf if to == "gguf" else _Packed)(files, type)
    # What a call must have in common with an interrupted one to go on with its files
    about: dict[str, Any] = {"files": [fingerprint(file) for file in files.inputs], "choices": [to, type]}
    calibrated = None
    if tokens is not None:
        num_experts = max(int(module.num_experts) for module in job.experts.values())
        text, _ = sequences(tokens, seq_len, 0, num_experts, files.config.get_text_config().vocab_size)
        digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
        about["text"] = [digest, seq_len, batch]
        # for the model card
        calibrated = f"{text.numel():,} tokens of a text, SHA-256 of its token ids `{digest}`"
    with continued(out, "exporting", about) as unfinished:
        if tokens is not None:
            job.calibrate(text.split(batch), memory)
        counts = job.write(unfinished.folder)
        before = sum(tensor.num_bytes for tensor in files.base.tensors.values())
        written = [file for file in unfinished.folder.iterdir() if file.suffix in (".gguf", ".safetensors")]
        after = sum(file.stat().st_size for file in written)
        # What was written, for the model card and the report
        left = job.left_out
        text_option = "" if tokens is None else f" --text TEXT --seq-len {seq_len}"
        card = render_card(
            out.name,
            "A model whose weights are rounded to the nearest values of a packing.",
            files.path,
            {
                "packing": type,
                "scales chosen by": calibrated,
                "tensors": ", ".join(f"{count} {name}" for name, count in counts.items()),
                "bytes": f"{before:,} -> {after:,}",
                "left out": worded(left, files.config) or None,
            },
            f"fmoe export {shown(files.path)} --to {to} --type {type}{text_option} -o {out.name}",
            library="gguf" if to == "gguf" else "transformers",
            tags=["quantized", type],
        )
        write_card(unfinished.folder, card)
    return Report(counts, before, after, left, job.has_vocabulary, worded(left, files.config))


class _Job:
    """A folder to pack, and which of its weights."""

    experts: Mapping[str, Any]  # {path: module} of those to pack
    linear: dict[str, Any]  # {parameter: layer} of the linear layers to pack
    left_out: list[str]  # names of tensors of the folder that are not written
    has_vocabulary = True

    def __init__(self, files: FolderModel, type: str) -> None:
        self.files, self.type = files, type
        self.skeleton = files.skeleton()
        self.names = files.names(self.skeleton)
        self.experts = experts_modules(self.skeleton)
        if not self.experts:
            model = self.skeleton.__class__.__name__
            raise CheckpointError(f"{files.path}: {model} has no experts to pack")
        stems = tuple({f"{path.partition('layers.')[0]}layers." for path in self.experts})
        head = self.skeleton.get_output_embeddings()
        # only beside experts: a tower for images stays as it is, and so do the head and gates of one row
        self.linear = {
            name: layer
            for name, layer in linear_layers(self.skeleton).items()
            if name.startswith(stems) and layer is not head and min(layer.weight.shape) > 1
        }
        self.left_out = []
        # {parameter: mean squares of its inputs in a text}, in float32 that broadcasts to the parameter
        self.importance: dict[str, torch.Tensor] = {}

    def calibrate(self, batches: tuple[torch.Tensor, ...], memory: int | str) -> None:
        """Measure the inputs of the weights to pack in a text; batches: ids [B, L]."""
        weights = {}
        for path, layer in self.files.of(self.skeleton).layers.items():
            for part, leaf in (("w1", up_of(self.experts[path])), ("w2", "down_proj")):
                weights[f"{path}.{leaf}"] = _by_expert(layer.parts[part], layer.num_experts)
        # [E, in] -> [E, in, 1] for weights [E, in, out], else [..., 1, in] for weights [..., out, in]
        for parameter, found in measure(self.files, self.linear, weights, batches, memory).items():
            if parameter in weights and self.experts[parameter.rpartition(".")[0]].is_transposed:
                self.importance[parameter] = found[:, :, None]
            else:
                self.importance[parameter] = found[..., None, :]


class _Packed(_Job):
    """A folder of Transformers, in the packing of a library."""

    def __init__(self, files: FolderModel, type: str) -> None:
        super().__init__(files, type)
        self.packing = PACKINGS[type]
        block = frozen.FORMATS[self.packing.format].block
        family = FAMILIES.get(str(files.base.config.get("model_type", "")))
        # GPT-OSS's own packing: stacks of experts, whose linear layers stay
        self.is_stack = type == "mxfp4" and family is not None and family.files.interleaved
        self.wanted: set[str] = set()  # names in the files of the weights to pack
        self.place: dict[str, tuple[str, int | None]] = {}  # {name of these: (parameter, expert)}
        # The experts: one tensor a matrix in the files, or a stack in GPT-OSS's packing alone
        for weight in (
            f"{path}.{leaf}" for path, m in self.experts.items() for leaf in (up_of(m), "down_proj")
        ):
            found = self.names.experts(weight)
            if found is None:
                raise CheckpointError(
                    f"{files.path} has no tensors for {weight}: {self.names.nearest(weight)}"
                )
            name = found.names[0][0]
            if found.is_stack != self.is_stack:
                or_else = ", or --type mxfp4" if files.base.config.get("model_type") == "gpt_oss" else ""
                raise CheckpointError(
                    f"{files.path}: {name} is a stack of all experts, which {type} has no names for in folders: "
                    f"take --to gguf{or_else}"
                )
            shape = files.base.tensors[name].shape
            columns = shape[-2] if self.is_stack else shape[-1]
            if columns % block:
                raise CheckpointError(
                    f"{files.path}: rows of {name} have {columns} columns, no whole blocks of {block} as "
                    f"{type} has them: take {'--to gguf' if self.is_stack else '--type fp8'}"
                )
            self.wanted |= {name for of_expert in found.names for name in of_expert}
            for e, of_expert in enumerate(found.names):
                self.place |= {name: (weight, None if found.is_stack else e) for name in of_expert}
        self.of_experts = frozenset(self.wanted)
        # The linear layers, where their rows are whole blocks; the others stay as they are
        for name, parameter in self.names.renamed.items() if not self.is_stack else ():
            layer = self.linear.get(parameter)
            if layer is not None and name.endswith(".weight") and layer.in_features % block == 0:
                self.wanted.add(name)
                self.place[name] = parameter, None

    def inputs(self, name: str) -> torch.Tensor | None:
        """Return the importance [1, in] of the rows of a matrix, [E, in, 1] of a stack; None without a text."""
        parameter, e = self.place[name]
        found = self.importance.get(parameter)
        if found is None or e is None:
            return found
        return found[e].view(1, -1)  # whatever the order in memory: files have [out, in]

    def tensors(self) -> dict[str, StoredTensor]:
        """Return {name: tensor} of the packed folder, in the order of the files."""
        base = self.files.base.tensors
        # Groups of weights that are packed together because they share one factor (_FUSED); most have one member
        groups: dict[tuple[str, ...], list[str]] = {}
        group_of: dict[str, list[str]] = {}
        for name in base:
            if name in self.wanted:
                parent, _, leaf = name.removesuffix(".weight").rpartition(".")
                joined = next((leaves for leaves in _FUSED if leaf in leaves), (leaf,))
                key = (parent, *joined) if self.packing.fused else (name,)
                group_of[name] = groups.setdefault(key, [])
                group_of[name].append(name)
        found: dict[str, StoredTensor] = {}
        for name, tensor in base.items():
            if self.is_stack and name in self.of_experts:
                found |= _stack_in_mxfp4(name, tensor, self.inputs(name))
            elif name not in group_of:
                found[name] = tensor
            elif name == group_of[name][0]:  # the first one brings the tensors of all
                found |= _packed_group(base, group_of[name], self.packing, self.inputs(name))
        return found

    def write(self, work: Path) -> dict[str, int]:
        base = self.files.base
        write_model_files(work, self.tensors(), MAX_SHARD_BYTES)
        self.files.copy_beside(work)
        # config.json lists the layers that are not packed, under their names in the files and in the model
        plain = set()
        for name, tensor in base.tensors.items():
            if name not in self.wanted and len(tensor.shape) == 2 and name.endswith(".weight"):
                plain |= {n.removesuffix(".weight") for n in (name, self.names.renamed.get(name, name))}
        config = {key: value for key, value in base.config.items() if key != "transformers_weights"}
        config["quantization_config"] = self.packing.quantization_config(plain)
        if self.is_stack:
            config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": sorted(plain)}
        write_json(work / CONFIG, config)
        return {self.type: len(self.wanted), "as they were": len(base.tensors) - len(self.wanted)}


def _packed_group(
    base: Mapping[str, StoredTensor],
    names: Sequence[str],
    packing: Packing,
    importance: torch.Tensor | None,
) -> dict[str, StoredTensor]:
    """Return {name: tensor} of matrices that are packed together, read and packed when the first is written.

    They have the same inputs, whose importance is [1, in]. Shapes come from packing tensors on the meta device.
    """

    def parts_of(
        weights: Sequence[torch.Tensor], importance: torch.Tensor | None = None
    ) -> list[dict[str, torch.Tensor]]:
        # [1, rows of all, in]: as the weight of one expert
        packed = frozen.quantize(torch.cat([w.float() for w in weights])[None], packing.format, importance)
        if len(weights) == 1:
            return [packing.tensors(packed)]
        # cut the packed rows apart again
        found, begin = [], 0
        for weight in weights:
            of_rows = functools.partial(torch.narrow, dim=1, start=begin, length=len(weight))
            found.append(packing.tensors(packed.map(of_rows)))
            begin += len(weight)
        return found

    # the tensors of a group are written one after the other: pack once, and let go after the last
    @functools.lru_cache(maxsize=1)
    def read() -> list[dict[str, torch.Tensor]]:
        return parts_of([base[name].read() for name in names], importance)

    found: dict[str, StoredTensor] = {}
    shapes = parts_of([torch.empty(base[name].shape, device="meta") for name in names])
    last = len(names) - 1, [*shapes[-1]][-1]
    for i, (name, parts) in enumerate(zip(names, shapes, strict=True)):
        for key, part in parts.items():

            def values(i: int = i, key: str = key) -> torch.Tensor:
                value = read()[i][key]
                if (i, key) == last:
                    read.cache_clear()
                return value

            found[f"{name.removesuffix('weight')}{key}"] = StoredTensor(part.shape, part.dtype, values)
    return found


def _stack_in_mxfp4(
    name: str, tensor: StoredTensor, importance: torch.Tensor | None
) -> dict[str, StoredTensor]:
    """Return {name: tensor} of stacked experts [E, in, out] as GPT-OSS's files have them."""
    E, columns, rows = tensor.shape

    def stored(leaf: str, shape: tuple[int, ...]) -> StoredTensor:
        def parts() -> Iterator[torch.Tensor]:
            for e in range(E):
                weight = tensor.rows(e, e + 1).mT.float().contiguous()
                packed = frozen.quantize(weight, "mxfp4", None if importance is None else importance[e].mT)
                yield getattr(packed, leaf)

        return StoredTensor(shape, torch.uint8, lambda: torch.cat([*parts()]), parts=parts)

    return {
        f"{name}_blocks": stored("data", (E, rows, columns // 32, 16)),
        f"{name}_scales": stored("scale", (E, rows, columns // 32)),
    }


class _Gguf(_Job):
    """A file of llama.cpp."""

    def __init__(self, files: FolderModel, type: str) -> None:
        super().__init__(files, type)
        without_heads(files.config)  # those that the file has are added below
        architecture = check_writable(files.config)
        if type == "nvfp4" and not architecture.has_factors:
            raise CheckpointError(
                f"llama.cpp's graph of {architecture.name} does not multiply by the factors of NVFP4: take --type "
                "mxfp4 or q4_k"
            )
        self.tensors: dict[str, StoredTensor] = {}  # {name in Transformers' modules: tensor}
        # The experts
        weights = files.of(self.skeleton)
        for path, layer in weights.layers.items():
            if layer.is_packed:
                raise CheckpointError(f"{files.path}: the experts of {path} are packed already")
            for part, leaf in (("w1", up_of(self.experts[path])), ("w2", "down_proj")):
                self.tensors[f"{path}.{leaf}"] = _by_expert(layer.parts[part], layer.num_experts)
        packed = self.tensors.keys() | self.linear.keys()
        # Tensors that the files have as the modules do; of tied parameters only the first name
        tied = getattr(self.skeleton, "all_tied_weights_keys", {})
        others = weights.others(files.dtype)
        own, used = self.skeleton.state_dict(), set()
        for name, tensor in others.items():
            parameter = weights.parameter(name)
            if parameter in own:
                used.add(name)
                self.tensors[tied.get(str(parameter), str(parameter))] = tensor
        # Parameters that Transformers makes of other tensors (joined, split, transposed)
        for parameter, value in own.items():
            if parameter in self.tensors or parameter in tied:
                continue
            made = self.names.converted(parameter)
            if made is None:
                raise CheckpointError(f"{files.path} lacks {parameter}: {self.names.nearest(parameter)}")
            used.update(made.names)
            parts = {name: others[name] for name in made.names}
            read = functools.partial(_converted, self.skeleton, parameter, parts)
            self.tensors[parameter] = StoredTensor(value.shape, others[made.names[0]].dtype, read)
        # What is left: heads for the tokens after the next, and tensors that have no place
        left = others.keys() - used
        heads = heads_in(left, files.config) if architecture.writes_heads else []
        of_heads, self.num_heads = heads_in_gguf({name: others[name] for name in heads}, self.skeleton)
        self.tensors |= of_heads
        self.left_out = sorted(left - {*heads})
        self.packings = dict.fromkeys(self.tensors.keys() & packed, type)
        self.has_vocabulary = bool(tokenizer_files(files.folder))
        self.vocabulary = None
        if self.has_vocabulary:
            generation = files.folder / "generation_config.json"
            # as generate() does
            said = read_json(generation) if generation.exists() else files.config.to_dict()
            stops = said.get("eos_token_id")
            stops = [stops] if isinstance(stops, int) else stops or []  # ids at which an answer ends
            self.vocabulary = read_vocabulary(files.folder, files.config, stops)

    def write(self, work: Path) -> dict[str, int]:
        with path_of_unfinished(work / "model.gguf") as file:
            return write_gguf(
                file,
                self.tensors,
                self.files.config,
                self.vocabulary,
                self.packings,
                self.num_heads,
                self.importance,
            )


def _converted(skeleton: Any, parameter: str, parts: Mapping[str, StoredTensor]) -> torch.Tensor:
    return as_in_modules(skeleton, {name: tensor.read() for name, tensor in parts.items()})[parameter]


def _by_expert(part: Part, num_experts: int) -> StoredTensor:
    """Return a weight of all experts of a layer as a StoredTensor, whose parts() read an expert at a time."""

    def rows(first: int, end: int) -> torch.Tensor:
        return torch.stack([part.read(e) for e in range(first, end)])

    return StoredTensor(
        (num_experts, *part.shape),
        part.dtype,
        lambda: rows(0, num_experts),
        rows,
        lambda: (part.read(e)[None] for e in range(num_experts)),
    )
