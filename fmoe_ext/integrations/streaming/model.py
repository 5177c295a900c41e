"""stream(): a model of Transformers whose experts stay in the files of its folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fmoe_ext.checkpoint.adapters.base import Base
from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer, plain_layer
from fmoe_ext.checkpoint.huggingface import check_folder
from fmoe_ext.checkpoint.packed_projections import packed_layer, tensors_outside
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.integrations import huggingface
from fmoe_ext.integrations.huggingface_saving import replace_save_pretrained
from fmoe_ext.integrations.streaming.budget import ExpertStream
from fmoe_ext.integrations.streaming.experts import Streamed
from fmoe_ext.integrations.streaming.placeholder import StreamedWeight

UNITS = {"": 1, "B": 1, **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}}
UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}


def stream(folder: str | Path, memory: int | str = "8GiB", *, dtype: torch.dtype | None = None) -> Any:
    """A causal language model of Transformers in eval(), its experts read from the folder's files as they are needed.

    folder: with config.json and safetensors files; memory: bytes, or a text like "8GiB", for the model, adapters with
    gradients and moments, buffers for experts, and a quarter of it for activations and the program. dtype: of the
    weights outside of the experts, by default that of config.json. The experts are frozen: train adapters by PEFT's
    target_parameters and fmoe_ext.lora.fuse(model). model.expert_stream has the counts of reads.
    Raises ValueError if memory is too little, CheckpointError for a folder that is damaged, reaches outside of itself
    or does not fit its config.json.
    Equivalent to: AutoModelForCausalLM.from_pretrained(folder, experts_implementation="fmoe"), with frozen experts.
    """
    import transformers

    folder = Path(folder)
    num_bytes = bytes_of_text(memory)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder: stream() reads local files")
    check_folder(folder)
    base = Base(folder)
    if not base.config:
        raise CheckpointError(f"{folder} has no config.json")
    config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = dtype or _dtype_of(config)
    model_class, layers, state = _plan(base, config, dtype)
    model = _load(folder, model_class, config, state, dtype)
    expert_stream = ExpertStream(model, layers, num_bytes)
    model.expert_stream = expert_stream
    for index, layer in enumerate(layers):
        model.get_submodule(layer.path).streamed = Streamed(expert_stream, index, dtype)
    replace_save_pretrained(model, _refuse_to_save)
    return huggingface.use(model).eval()


def bytes_of_text(memory: int | str) -> int:
    """Bytes of "8GiB", "500 MB", "1073741824" or a number; ValueError for anything else."""
    if isinstance(memory, int):
        return memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|)\s*", memory)
    if match is None:
        raise ValueError(f'memory must be bytes or a text like "8GiB", but got {memory!r}')
    return int(float(match[1]) * UNITS[match[2]])


def _dtype_of(config: Any) -> torch.dtype:
    value = getattr(config, "dtype", None) or torch.bfloat16
    return getattr(torch, value) if isinstance(value, str) else value


def _plan(base: Base, config: Any, dtype: torch.dtype) -> tuple[Any, list[Layer], dict[str, Any]]:
    """(class of the model, layers of experts, the state dict with placeholders for them)."""
    import transformers

    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    layers: list[Layer] = []
    state: dict[str, Any] = {}
    used: set[str] = set()
    for path, module in skeleton.named_modules():
        if not hasattr(module, "is_transposed"):
            continue
        found = packed_layer(base, path) or plain_layer(base, path)
        if found is None:
            raise CheckpointError(f"{base.folder} has no experts for {path} in a format that is known")
        layer, names = found
        for name, shape in zip(_names_of(module), layer.shapes, strict=True):
            expected = tuple(getattr(module, name).shape)
            if layer.is_packed and module.is_transposed:
                shape = (shape[0], shape[2], shape[1])
            if shape != expected:
                raise CheckpointError(
                    f"{base.folder}: {path}.{name} is {list(shape)} in the files, but {list(expected)} by config.json"
                )
            state[f"{path}.{name}"] = StreamedWeight(shape, dtype)
        layers.append(layer)
        used |= names
    if not layers:
        raise CheckpointError(
            f"{base.folder}: {config.model_type} has no experts that Transformers lets others compute"
        )
    state |= {name: Stored(t) for name, t in tensors_outside(base, used).items()}
    return type(skeleton), layers, state


def _names_of(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


class Stored:
    """A tensor in a file, as Transformers' loader reads it: by tensor[...]."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor.read()[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


def _load(folder: Path, model_class: Any, config: Any, state: dict[str, Any], dtype: torch.dtype) -> Any:
    import transformers

    read = model_class.from_pretrained
    try:
        model, found = read(None, config=config, state_dict=state, dtype=dtype, output_loading_info=True)
    except RuntimeError as error:
        raise CheckpointError(f"{folder} does not fit its config.json: {error}") from error
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{folder} lacks {', '.join(missing[:3])}{more}")
    model.name_or_path = model.config.name_or_path = str(folder)  # PEFT notes it in adapter_config.json
    if (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _refuse_to_save(model: Any, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a streamed model has no weights of experts to save: copy its folder, or save its adapters by PEFT's "
        "save_pretrained and merge them with `fmoe adapter merge`"
    )
