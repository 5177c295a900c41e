"""Quantise a float folder: its weights rounded to a packing, as GGUF or as a folder with Transformers' names.

Of each matrix the nearest values are taken (frozen.quantize), without a text. Packed are the experts, and the linear
layers of the layers that have experts' names around them; embeddings, the head, routers and norms stay as they are. A
matrix is read, packed and written before the next one, so that memory holds an expert in float32 and, for GGUF, the
packed experts of one weight of a layer. A call that ended early goes on with the files that are whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fmoe_ext import frozen
from fmoe_ext.checkpoint.card import render_card, shown, write_card
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer
from fmoe_ext.checkpoint.expert_layers import InFiles
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.files import fingerprint, path_of_unfinished, read_json, write_json
from fmoe_ext.checkpoint.methods.packings import PACKINGS, Packing
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.shards import CONFIG, MAX_SHARD_BYTES, check_is_free, continued, write_model_files
from fmoe_ext.checkpoint.weight_names import up_of
from fmoe_ext.checkpoint.written_names import as_in_modules
from fmoe_ext.formats.writing import PREDICTORS, tokenizer_files
from fmoe_ext.gguf.vocabulary import read_vocabulary
from fmoe_ext.gguf.writing import PACKED, check_writable, write_gguf
from fmoe_ext.model_files import FolderModel, experts_modules, linear_layers, open_model

TARGETS = ("gguf", "packed")
TYPES = (*PACKED, *(name for name in PACKINGS if name not in PACKED))
# What to take for a type that the other target has alone
INSTEAD = MappingProxyType(
    {
        "q4_k": "nvfp4, mxfp4 or nf4",
        "q8_0": "mxfp8 or fp8",
        "mxfp8": "q8_0",
        "fp8": "q8_0",
        "nf4": "q4_k",
    }
)
# Layers that servers join into one, whose rows then have one factor in NVFP4
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Report(NamedTuple):
    """Describes what was written.

    counts: {type: number of tensors}. left_out: names of tensors that the format has no place for.
    """

    counts: dict[str, int]
    bytes_before: int
    bytes_after: int
    left_out: list[str]
    has_vocabulary: bool


def export_quantized(source: str | Path, out: str | Path, to: str, type: str) -> Report:
    """Writes a float folder in packed weights; the folder is only read.

    source: of Transformers, or a name in the cache of the Hugging Face hub. out: a new folder; for "gguf" it has
    model.gguf, with the vocabulary of the folder's tokenizer. type: a name in TYPES.
    Raises CheckpointError for a type that the target does not have, for folders that are packed already, for experts
    whose rows are no whole blocks and for models that llama.cpp computes otherwise, before anything is written.
    """
    _check_type(to, type)
    out = Path(out).absolute()
    check_is_free(out)
    files = open_model(source)
    if not isinstance(files, FolderModel):
        raise CheckpointError(f"{files.path} is a GGUF file: give the float folder that it was made of")
    files.base.check_plain()
    job = (_Gguf if to == "gguf" else _Packed)(files, type)
    about = {"files": [fingerprint(file) for file in files.inputs], "choices": [to, type]}
    with continued(out, "exporting", about) as unfinished:
        counts = job.write(unfinished.folder)
        written = [file for file in unfinished.folder.iterdir() if file.suffix in (".gguf", ".safetensors")]
        report = Report(
            counts,
            sum(tensor.num_bytes for tensor in files.base.tensors.values()),
            sum(file.stat().st_size for file in written),
            job.left_out,
            job.has_vocabulary,
        )
        write_card(unfinished.folder, _card(files, out.name, to, type, report))
    return report


def _check_type(to: str, type: str) -> None:
    if to not in TARGETS:
        raise CheckpointError(f"--to must be one of {', '.join(TARGETS)}, but got {to!r}")
    known: Mapping[str, Any] = PACKED if to == "gguf" else PACKINGS
    if type in known:
        return
    if type not in TYPES:
        raise CheckpointError(f"--type must be one of {', '.join(TYPES)}, but got {type!r}")
    other = "packed" if to == "gguf" else "gguf"
    what = "llama.cpp has no type" if to == "gguf" else "no library of Transformers' folders has a packing"
    raise CheckpointError(f"{what} {type}: take --type {INSTEAD[type]}, or --to {other}")


def _card(files: FolderModel, title: str, to: str, type: str, report: Report) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in report.counts.items())
    return render_card(
        title,
        "A model whose weights are rounded to the nearest values of a packing.",
        files.path,
        {
            "packing": type,
            "tensors": counts,
            "bytes": f"{report.bytes_before:,} -> {report.bytes_after:,}",
            "left out": f"{len(report.left_out)} tensors, as {report.left_out[0]}"
            if report.left_out
            else None,
        },
        f"fmoe export {shown(files.path)} --to {to} --type {type} -o {title}",
        library="gguf" if to == "gguf" else "transformers",
        tags=["quantized", type],
    )


class _Job:
    """A folder that is to be packed. packed: names of the parameters to pack, experts and linear layers."""

    left_out: list[str]
    has_vocabulary = True

    def __init__(self, files: FolderModel, type: str) -> None:
        self.files, self.type = files, type
        self.skeleton = files.skeleton()
        self.names = files.names(self.skeleton)
        self.experts = experts_modules(self.skeleton)
        if not self.experts:
            raise CheckpointError(f"{files.path}: {_class(self.skeleton)} has no experts to pack")
        stems = tuple({f"{path.partition('layers.')[0]}layers." for path in self.experts})
        head = self.skeleton.get_output_embeddings()
        # a tower for images stays as it is, as does the head
        self.linear = {
            name: layer
            for name, layer in linear_layers(self.skeleton).items()
            if name.startswith(stems) and layer is not head and min(layer.weight.shape) > 1
        }
        self.left_out = []


def _class(model: object) -> str:
    return type(model).__name__


class _Packed(_Job):
    """A folder of Transformers, in the packing of a library."""

    def __init__(self, files: FolderModel, type: str) -> None:
        super().__init__(files, type)
        self.packing = PACKINGS[type]
        self.block = frozen.FORMATS[self.packing.format].block
        family = FAMILIES.get(str(files.base.config.get("model_type", "")))
        # GPT-OSS's own packing: stacks of experts, whose linear layers stay
        self.is_stack = type == "mxfp4" and family is not None and family.files.interleaved
        self.of_experts = set(self._of_experts())
        self.of_linear = set() if self.is_stack else set(self._of_linear())

    def _of_experts(self) -> Iterator[str]:
        """Names of experts' weights in the files."""
        for path, module in self.experts.items():
            for leaf in (up_of(module), "down_proj"):
                found = self.names.experts(f"{path}.{leaf}")
                if found is None:
                    raise CheckpointError(
                        f"{self.files.path} has no tensors for {path}.{leaf}: {self.names.nearest(f'{path}.{leaf}')}"
                    )
                self._check(found)
                yield from (name for of_expert in found.names for name in of_expert)

    def _check(self, found: InFiles) -> None:
        name = found.names[0][0]
        if found.is_stack != self.is_stack:
            raise CheckpointError(
                f"{self.files.path}: {name} is a stack of all experts, which {self.type} has no names for in folders: "
                "take --to gguf"
                + (", or --type mxfp4" if self.files.base.config.get("model_type") == "gpt_oss" else "")
            )
        shape = self.files.base.tensors[name].shape
        columns = shape[-2] if self.is_stack else shape[-1]
        if columns % self.block:
            raise CheckpointError(
                f"{self.files.path}: rows of {name} have {columns} columns, no whole blocks of {self.block} as "
                f"{self.type} has them: take --type fp8"
            )

    def _of_linear(self) -> Iterator[str]:
        """Names in the files of the weights of linear layers."""
        for name, parameter in self.names.renamed.items():
            layer = self.linear.get(parameter)
            if layer is not None and name.endswith(".weight") and layer.in_features % self.block == 0:
                yield name

    def tensors(self) -> dict[str, StoredTensor]:
        """{name: tensor} of the packed folder, in the order of the files."""
        base = self.files.base.tensors
        groups = {name: group for group in self._groups() for name in group}
        found: dict[str, StoredTensor] = {}
        for name, tensor in base.items():
            if self.is_stack and name in self.of_experts:
                found |= _stack_in_mxfp4(name, tensor)
            elif name not in groups:
                found[name] = tensor
            elif name == groups[name][0]:
                found |= _packed_group(base, groups[name], self.packing)
        return found

    def _groups(self) -> list[tuple[str, ...]]:
        """Names of the weights that are packed together: those that have one factor, or each alone."""
        wanted = self.of_experts | self.of_linear
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in self.files.base.tensors:
            if name not in wanted:
                continue
            parent, _, leaf = name.removesuffix(".weight").rpartition(".")
            joined = next((leaves for leaves in FUSED if leaf in leaves), (leaf,))
            key = (parent, *joined) if self.packing.fused else (name,)
            groups.setdefault(key, []).append(name)
        return [tuple(group) for group in groups.values()]

    def plain(self) -> list[str]:
        """Names of the layers that stay as they are, in the files and in the model, where they differ."""
        packed = self.of_experts | self.of_linear
        stems = set()
        for name, tensor in self.files.base.tensors.items():
            if name not in packed and len(tensor.shape) == 2 and name.endswith(".weight"):
                stems |= {
                    name.removesuffix(".weight"),
                    self.names.renamed.get(name, name).removesuffix(".weight"),
                }
        return sorted(stems)

    def write(self, work: Path) -> dict[str, int]:
        write_model_files(work, self.tensors(), MAX_SHARD_BYTES)
        self.files.copy_beside(work)
        config = {
            key: value for key, value in self.files.base.config.items() if key != "transformers_weights"
        }
        if self.is_stack:
            config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": self.plain()}
        else:
            config["quantization_config"] = self.packing.quantization_config(self.plain())
        write_json(work / CONFIG, config)
        number = len(self.of_experts) + len(self.of_linear)
        return {self.type: number, "as they were": len(self.files.base.tensors) - number}


def _packed_group(
    base: Mapping[str, StoredTensor], names: Sequence[str], packing: Packing
) -> dict[str, StoredTensor]:
    """{name: tensor} of matrices that are packed together, read and packed when the first of them is written."""

    def parts_of(weights: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        packed = frozen.quantize(torch.cat([w.float() for w in weights])[None], packing.format)
        if len(weights) == 1:
            return [packing.tensors(packed)]
        found, end = [], 0
        for weight in weights:
            first, end = end, end + len(weight)
            rows = slice(first, end)
            found.append(packing.tensors(packed.map(lambda t, rows=rows: t[:, rows])))  # type: ignore[misc]
        return found

    # the tensors of a matrix follow each other in a file: they are packed once
    @functools.lru_cache(maxsize=1)
    def read() -> list[dict[str, torch.Tensor]]:
        return parts_of([base[name].read() for name in names])

    found: dict[str, StoredTensor] = {}
    shapes = parts_of([torch.empty(base[name].shape, device="meta") for name in names])
    last = len(names) - 1, [*shapes[-1]][-1]
    for i, (name, parts) in enumerate(zip(names, shapes, strict=True)):
        for key, part in parts.items():

            def values(i: int = i, key: str = key) -> torch.Tensor:
                value = read()[i][key]
                if (i, key) == last:  # nothing is left to write of it
                    read.cache_clear()
                return value

            found[f"{name.removesuffix('weight')}{key}"] = StoredTensor(part.shape, part.dtype, values)
    return found


def _stack_in_mxfp4(name: str, tensor: StoredTensor) -> dict[str, StoredTensor]:
    """{name: tensor} of stacked experts [E, in, out] as GPT-OSS's files have them."""
    E, columns, rows = tensor.shape

    def parts(leaf: str) -> Iterator[torch.Tensor]:
        for e in range(E):
            packed = frozen.quantize(tensor.rows(e, e + 1).mT.float().contiguous(), "mxfp4")
            yield getattr(packed, leaf)

    found = {}
    for leaf, ending, shape in (
        ("data", "blocks", (E, rows, columns // 32, 16)),
        ("scale", "scales", (E, rows, columns // 32)),
    ):
        of_leaf = functools.partial(parts, leaf)
        found[f"{name}_{ending}"] = StoredTensor(
            shape,
            torch.uint8,
            lambda of_leaf=of_leaf: torch.cat([*of_leaf()]),  # type: ignore[misc]
            parts=of_leaf,
        )
    return found


class _Gguf(_Job):
    """A file of llama.cpp."""

    def __init__(self, files: FolderModel, type: str) -> None:
        super().__init__(files, type)
        for key in PREDICTORS:
            if getattr(files.config, key, None):
                setattr(files.config, key, 0)  # of layers that the file does not have
        architecture = check_writable(files.config)
        if type == "nvfp4" and not architecture.has_factors:
            raise CheckpointError(
                f"llama.cpp's graph of {architecture.name} does not multiply by the factors of NVFP4: take --type "
                "mxfp4 or q4_k"
            )
        self.tensors = self._tensors()
        weights = {
            f"{path}.{leaf}" for path, module in self.experts.items() for leaf in (up_of(module), "down_proj")
        }
        self.packings = dict.fromkeys(self.tensors.keys() & (weights | self.linear.keys()), type)
        self.has_vocabulary = bool(tokenizer_files(files.folder))
        self.vocabulary = None
        if self.has_vocabulary:
            self.vocabulary = read_vocabulary(files.folder, files.config, self._stops())

    def _stops(self) -> list[int]:
        """Ids at which an answer ends."""
        file = self.files.folder / "generation_config.json"
        stops = read_json(file).get("eos_token_id") if file.exists() else None
        return [stops] if isinstance(stops, int) else stops or []

    def _tensors(self) -> dict[str, StoredTensor]:
        """{name in Transformers' modules: tensor}; notes what the model has no place for."""
        weights = self.files.of(self.skeleton)
        tied = getattr(self.skeleton, "all_tied_weights_keys", {})
        others = weights.others(self.files.dtype)
        found: dict[str, StoredTensor] = {}
        for path, layer in weights.layers.items():
            if layer.is_packed:
                raise CheckpointError(f"{self.files.path}: the experts of {path} are packed already")
            for part, leaf in (("w1", up_of(self.experts[path])), ("w2", "down_proj")):
                found[f"{path}.{leaf}"] = _experts(layer, part)
        own, used = self.skeleton.state_dict(), set()
        for name, tensor in others.items():
            parameter = weights.parameter(name)
            if parameter in own:
                used.add(name)
                found[tied.get(str(parameter), str(parameter))] = tensor
        for parameter in own:
            if parameter in found or parameter in tied:
                continue
            made = self.names.converted(parameter)
            if made is None:
                raise CheckpointError(f"{self.files.path} lacks {parameter}: {self.names.nearest(parameter)}")
            used.update(made.names)
            found[parameter] = self._made(parameter, {name: others[name] for name in made.names})
        self.left_out = sorted(others.keys() - used)
        return found

    def _made(self, parameter: str, parts: Mapping[str, StoredTensor]) -> StoredTensor:
        """A parameter that Transformers makes of other tensors of the files."""
        first = next(iter(parts.values()))

        def read() -> torch.Tensor:
            values = {name: tensor.read() for name, tensor in parts.items()}
            return as_in_modules(self.skeleton, values)[parameter]

        return StoredTensor(self.skeleton.state_dict()[parameter].shape, first.dtype, read)

    def write(self, work: Path) -> dict[str, int]:
        with path_of_unfinished(work / "model.gguf") as file:
            return write_gguf(file, self.tensors, self.files.config, self.vocabulary, self.packings)


def _experts(layer: Layer, name: str) -> StoredTensor:
    """A weight of all experts of a layer, of which parts() reads one at a time."""
    part = layer.parts[name]

    def parts() -> Iterator[torch.Tensor]:
        return (part.read(e)[None] for e in range(layer.num_experts))

    def rows(first: int, end: int) -> torch.Tensor:
        return torch.stack([part.read(e) for e in range(first, end)])

    shape = (layer.num_experts, *part.shape)
    return StoredTensor(shape, part.dtype, lambda: rows(0, layer.num_experts), rows, parts)
