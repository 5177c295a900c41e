"""Open a model of Transformers on the CPU whose experts stay in the files of its folder: stream().

So a model larger than memory can be fine-tuned with adapters and can generate; prune, repack and calibration read
models by it.

1. open_model() finds the tensors; a skeleton on the meta device says what parameters the model has.
2. Transformers' own loader fills it from a state dict of ours: placeholders without values for experts
   (StreamedWeight) and for packed linear layers (PackedWeight), for the rest tensors that are read when the loader asks
   for them. So its renaming, tying and casting apply as to any other model.
3. ExpertStream gets the memory that is left (budget.py), as buffers of a Pool (pool.py).
4. Each experts module gets a Streamed (experts.py), which brings its weights into a buffer before it computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.expert_files import Layer
from fmoe_ext.checkpoint.methods import PackedTensor
from fmoe_ext.checkpoint.model_folder import FLOATS, errors_of_transformers
from fmoe_ext.checkpoint.safetensors_file import StoredTensor
from fmoe_ext.checkpoint.weight_names import up_of
from fmoe_ext.finetune.streaming.activations import ActivationFile, SavedOnDisk
from fmoe_ext.finetune.streaming.budget import ExpertStream
from fmoe_ext.finetune.streaming.experts import Streamed
from fmoe_ext.finetune.streaming.linear import replace_linear
from fmoe_ext.finetune.streaming.placeholder import PackedWeight, StreamedWeight
from fmoe_ext.finetune.streaming.progress import Listener, Steps, print_progress
from fmoe_ext.huggingface import experts as huggingface
from fmoe_ext.huggingface.saving import replace_save_pretrained
from fmoe_ext.memory import memory_of
from fmoe_ext.model_files import ModelFiles, linear_layers, open_model


def stream(
    folder: str | Path | ModelFiles,
    memory: int | str = "auto",
    *,
    folders: Sequence[str | Path] = (),
    dtype: torch.dtype | None = None,
    optimizer_bytes: float | None = None,
    activations: str | Path | None = None,
    int8_activations: bool = False,
    progress: bool | Listener = False,
) -> Any:
    """Open a causal language model of Transformers, in eval(), whose experts are read from files as they are needed.

    It is loaded on the CPU, whatever torch.set_default_device() says.
    folder: with config.json and safetensors files, a GGUF file, or the name of a repository that is in the cache of the
    Hugging Face hub, as "Qwen/Qwen3-30B-A3B" (nothing is downloaded); or what open_model() made of one of them.
    memory: bytes, or a text like "8GiB", for the model, adapters, gradients, the optimizer's state, buffers for
    experts, and a quarter of it for activations and the program; "auto" is what the machine and the memory cgroups of
    this process have free.
    folders: further folders, perhaps on other disks, in which shards named by the index are looked for.
    dtype: of the model, by default that of config.json, or of most weights in the files where it names none; weights
    that the files have in another one are cast while they are read. The experts are frozen: train adapters
    by PEFT's target_parameters and fmoe_ext.lora.fuse(model). model.expert_stream has the counts of reads.
    optimizer_bytes: of state for each trained number before the first step, by default two moments of Adam; 2.1 for
    8-bit moments, 0 for SGD. After the first step the real state counts.
    activations: folder for an unnamed temporary file that holds the inputs of checkpointed layers; by default they
    stay in memory.
    int8_activations: without gradients on the CPU, multiply weights that stay packed as Q8_0 or Q4_K in integers
    (frozen.Quantized): faster generation, with rows rounded to 8 bits a block.
    progress: print layers, tokens per second and the time left of a step, or a function that gets them as a Progress.
    A backward is counted where activations are checkpointed.
    Warns if less than a quarter of this process's limit of memory would stay free. Raises ValueError for a dtype that
    is no float, an optimizer_bytes below 0, a memory that is no number of bytes or too little, CheckpointError for a
    folder that is damaged, reaches outside of itself, does not fit its config.json or has no experts, OSError for
    activations without a folder, ImportError if Transformers is missing or older than 5.7.
    Equivalent to: AutoModelForCausalLM.from_pretrained(folder, experts_implementation="fmoe"), with frozen experts.

    Example:

        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> config = Qwen3MoeConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        ...     num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        >>> Qwen3MoeForCausalLM(config).save_pretrained("model")
        >>> model = stream("model")
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 64])
    """
    huggingface.require_transformers("fmoe_ext.stream()")
    huggingface.register()
    import transformers

    # What may be wrong in the arguments is found before files are read.
    budget = memory_of(memory)
    saved = None if activations is None else ActivationFile(activations)
    if dtype not in (None, *FLOATS):
        raise ValueError(f"dtype must be one of {', '.join(map(str, FLOATS))}, but got {dtype}")
    if optimizer_bytes is not None and not 0 <= optimizer_bytes < math.inf:
        raise ValueError(
            f"optimizer_bytes must be 0 or more for each trained number, but got {optimizer_bytes!r}"
        )
    # 1. Which tensors there are, and what becomes of each.
    files = open_model(folder, folders)
    dtype = dtype or files.dtype
    skeleton = files.skeleton()
    layers, packed, state = _plan(files, skeleton, dtype)
    # 2. The model, by Transformers' own loader, which lists mismatched shapes only if it may ignore them.
    listed = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with torch.device("cpu"):  # where the buffers are, whatever the default device
        model, found = type(skeleton).from_pretrained(
            None, config=skeleton.config, state_dict=state, dtype=dtype, **listed
        )
    if wrong := sorted((name, [*a], [*b]) for name, a, b in found["mismatched_keys"]):
        name, in_files, by_config = wrong[0]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{files.path} does not fit its config.json: {name} is {in_files} in the files, but {by_config} by "
            f"config.json{more}"
        )
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{files.path} lacks {', '.join(missing[:3])}{more}")
    # The loader noted that it used no conversions, but generate(use_mtp=True) needs all of them for heads: None makes
    # it look them up
    model._weight_conversions = None
    if files.path.is_dir() and (files.path / "generation_config.json").exists():
        with errors_of_transformers(files.path, "generation_config.json"):
            model.generation_config = transformers.GenerationConfig.from_pretrained(files.path)
    # PEFT writes this into adapter_config.json, where an adapter's base is found again
    model.name_or_path = model.config.name_or_path = str(
        files.path if isinstance(folder, ModelFiles) else Path(folder)
    )
    replace_linear(model, packed, int8_activations)  # only now: the loader knows torch's layers alone
    # 3. Buffers for experts, of the memory that the model has left.
    expert_stream = ExpertStream(model, layers, budget, optimizer_bytes)
    model.expert_stream = expert_stream
    # 4. What computes each layer's experts.
    for index, layer in enumerate(layers):
        model.get_submodule(layer.path).streamed = Streamed(expert_stream, index, dtype, int8_activations)
    if progress:
        listener = print_progress if progress is True else progress
        expert_stream.steps = Steps(len(layers), listener)
    if saved is not None:
        expert_stream.activations = saved
        SavedOnDisk(model.base_model, expert_stream, saved)
    replace_save_pretrained(model, _refuse_to_save, _refuse_to_save)
    return huggingface.use(model).eval()


def _plan(
    files: ModelFiles, skeleton: Any, dtype: torch.dtype
) -> tuple[list[Layer], dict[str, PackedTensor], dict[str, Any]]:
    """Return (the layers of experts, what stays packed by name, a state dict for Transformers' loader).

    Raises CheckpointError for shapes that are not those of config.json, and for a model without experts.
    """
    weights = files.of(skeleton)
    layers: list[Layer] = []
    packed: dict[str, PackedTensor] = {}
    state: dict[str, Any] = {}
    tied = getattr(skeleton, "all_tied_weights_keys", {})  # Transformers ties these, without reading values
    for path, of_files in weights.layers.items():
        module: Any = skeleton.get_submodule(path)
        layer = of_files.cast(dtype)
        # the experts: a placeholder for each parameter, whose shape the files must have
        for name, shape in zip((up_of(module), "down_proj"), layer.shapes, strict=True):
            expected = tuple(getattr(module, name).shape)
            if layer.is_packed and module.is_transposed:  # packed rows are outputs, whatever the module says
                shape = (shape[0], shape[2], shape[1])
            if shape != expected:
                raise CheckpointError(
                    f"{files.path}: {path}.{name} is {list(shape)} in the files, but {list(expected)} by config.json"
                )
            if f"{path}.{name}" not in tied:
                state[f"{path}.{name}"] = StreamedWeight(shape, dtype)
        layers.append(layer)
    if not layers:
        raise CheckpointError(
            f"{files.path}: {type(skeleton).__name__} has no experts that Transformers lets others compute"
        )
    # all other tensors: packed where a linear layer can multiply them so, else as floats
    linear = linear_layers(skeleton)
    for name, tensor in weights.others(dtype).items():
        if name in weights.unloaded:  # else the loader would read heads, and leave them out after that
            continue
        parameter = weights.parameter(name)
        product = linear.get(parameter) if parameter else None
        # a packed weight of another shape than its layer's is decoded
        is_as_it_lies = product is not None and tensor.shape == product.weight.shape
        if parameter and is_as_it_lies and isinstance(tensor, PackedTensor):
            packed[parameter] = tensor
            state[name] = PackedWeight(tensor.shape, dtype)
        else:
            state[name] = _Stored(tensor)
    return layers, packed, state


class _Stored:
    """A tensor in a file, as Transformers' loader reads it: by tensor[...]."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor.read()[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


def _refuse_to_save(model: Any, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        "a streamed model has no weights of experts to save: copy its folder, or save its adapters by PEFT's "
        "save_pretrained and merge them with `fmoe adapter merge`"
    )
