"""A GGUF file without some experts: types, metadata and the bytes of everything else as they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import explained, path_of_unfinished, read_json, write_json
from fmoe_ext.checkpoint.shards import CONFIG
from fmoe_ext.compress.cut import config_with
from fmoe_ext.model_files import GgufModel

_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_STACKS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
_ROUTER = ("ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias")
_COUNT = "expert_count"
_HEADER = "general.architecture"  # which the writer makes itself


class GgufCut:
    """The tensors of a GGUF file with fewer experts in each layer.

    paths: of the experts modules. Raises CheckpointError for a tensor that depends on their number and is not known.
    """

    def __init__(self, files: GgufModel, paths: Sequence[str], num_experts: int, number: int) -> None:
        self.files, self.num_experts, self.number = files, num_experts, number
        self.file, self._reader = files.path, files.file
        found = [re.search(r"\.layers\.(\d+)\.", f".{path}.") for path in paths]
        self._layers = {int(m[1]): path for m, path in zip(found, paths, strict=True) if m}
        self._architecture = self._reader.architecture
        for tensor in self._reader.tensors:
            self._path_of(tensor)  # refuses what is not known how to cut before a text is read for hours

    def write(self, work: Path, kept: Mapping[str, Iterable[int]]) -> Path:
        """Write the smaller model into a folder, one file even of a split one, unless it is there -> the file.

        kept: {path of an experts module: its experts that stay, in that order}.
        """
        name = self._reader.name
        beside = self.files.folder / CONFIG
        if beside.exists():
            write_json(work / CONFIG, config_with(read_json(beside), self.num_experts, self.number))
        if (work / name).exists():
            return work / name
        num_bytes = sum(file.stat().st_size for file in self.files.weights)
        with explained(work / name, num_bytes), path_of_unfinished(work / name) as unfinished:
            self._write(unfinished, kept)
        return work / name

    def _write(self, path: Path, kept: Mapping[str, Iterable[int]]) -> None:
        import gguf

        writer = gguf.GGUFWriter(path, self._architecture)
        writer.data_alignment = self._reader.alignment
        try:
            for name, field in self._reader.fields.items():
                if name != _HEADER:
                    value = self.number if name == f"{self._architecture}.{_COUNT}" else field.contents()
                    if value == []:  # which the gguf package leaves out when it writes a file
                        continue
                    sub_type = field.types[-1] if len(field.types) > 1 else None
                    writer.add_key_value(name, value, field.types[0], sub_type)
            tensors = [(tensor, self._path_of(tensor)) for tensor in self._reader.tensors]
            for tensor, layer in tensors:
                shape, size = list(tensor.data.shape), int(tensor.n_bytes)
                if layer:
                    shape[0], size = self.number, size // self.num_experts * self.number
                writer.add_tensor_info(tensor.name, shape, tensor.data.dtype, size, tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor, layer in tensors:
                writer.write_tensor_data(tensor.data[list(kept[layer])] if layer else tensor.data)
        finally:
            with suppress(OSError):  # of buffers that a full disk did not take
                writer.close()

    def _path_of(self, tensor: Any) -> str | None:
        """Find the path of the experts whose number is the first dimension of a tensor; None for others."""
        match = _OF_LAYER.fullmatch(tensor.name)
        path = self._layers.get(int(match[1])) if match else None
        if match and path is None and "_exps." in match[2]:
            raise CheckpointError(f"{self.file}: {tensor.name} has experts of no layer of the model")
        if match is None or path is None:
            return None
        if not _STACKS.fullmatch(match[2]) and match[2] not in _ROUTER:
            if "exps" in match[2] or "exp_" in match[2]:  # shared experts are "shexp", which stay
                raise CheckpointError(f"{self.file}: it is not known how to cut experts from {tensor.name}")
            return None
        if int(tensor.shape[-1]) != self.num_experts:
            raise CheckpointError(
                f"{self.file}: {tensor.name} has {int(tensor.shape[-1])} experts, but the model {self.num_experts}"
            )
        return path
