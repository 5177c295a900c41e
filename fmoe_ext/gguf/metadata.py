"""Make a Transformers configuration from a GGUF file's metadata (config_of), and check one by a round trip (check).

llama.cpp computes a model from its tensors and from the keys of its architecture. A configuration fits a file if the
file that it would make (Architecture.fields) has the same values. Every other key of the file must be one that

    the architecture reads itself, or knows to be harmless
    has the only value with which these models compute (ONLY)
    is a note on the file that changes no logit (NOTES)
    belongs to another program: llama.cpp has no namespace of its first word

Any other key is refused by name. architecture_of() and architecture_for() find the Architecture of a file, or of a
configuration to write.
"""

import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.gguf.architecture import NEXTN, READ, ZERO_MEANS_ONE, Architecture, Fields
from fmoe_ext.gguf.architectures import ARCHITECTURES
from fmoe_ext.gguf.file import GgufFile
from fmoe_ext.gguf.rope import SCALING, shortened, with_defaults

# {key: the values with which these models compute}; 0 stands for "not used" in llama.cpp
ONLY = MappingProxyType(
    {
        "general.type": ("model",),
        "general.quantization_version": (2,),
        "split.no": (0,),
        "split.count": (0, 1),
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.sliding_window": (0,),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "router_logit_softcapping": (0,),
        "embedding_scale": (0, 1),
        "residual_scale": (0, 1),
        "logit_scale": (0, 1),
        "expert_gating_func": (1,),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "interleave_moe_layer_step": (0, 1),
        "leading_dense_block_count": (0,),
        "moe_every_n_layers": (0, 1),
        "nextn_predict_layers": (0,),
        "pooling_type": (0,),
        "use_parallel_residual": (False,),
        "tensor_data_layout": ("reference", "Meta AI original pth"),
    }
)
# Namespaces of notes on the file, its vocabulary and how it was made. READ and ONLY are looked up before them
NOTES = ("general.", "tokenizer.", "split.tensors.", "quantize.", "imatrix.")
FREQUENCIES = "rope_freqs.weight"


def architecture_of(file: GgufFile, config: Any = None) -> Architecture:
    """Find a file's architecture, the configuration's if several have its name; CheckpointError for unknown ones."""
    return find(str(file.path), file.values(), config)


def architecture_for(model_type: str) -> Architecture | None:
    """Return the architecture of a model type of Transformers; None if llama.cpp's graph for it is not known here."""
    return next((kind() for kind in ARCHITECTURES if kind.model_type == model_type), None)


def find(path: str, fields: Fields, config: Any = None) -> Architecture:
    """Find the architecture of a file's metadata; CheckpointError if it is not read, or lacks keys that it needs."""
    # Several may have the name: take the configuration's model type, else the one that accepts the keys
    name = str(fields.get("general.architecture"))
    found = [kind(name) for kind in ARCHITECTURES if name in (kind.name, *kind.also)]
    if not found:
        known = ", ".join(dict.fromkeys(kind.name for kind in ARCHITECTURES))
        raise CheckpointError(f"{path}: GGUF is read for {known}, but this model is {name}")
    own = own_fields(found[0], fields)
    fitting = [architecture for architecture in found if architecture.accepts(own)] or found[-1:]
    model_type = getattr(config, "model_type", "")
    architecture = next((other for other in found if other.model_type == model_type), fitting[0])
    for key in architecture.needs:
        if key not in own:
            raise CheckpointError(f"{path} has no key {name}.{key}: another model, or an old file")
    return architecture


def own_fields(architecture: Architecture, fields: Fields) -> dict[str, Any]:
    """Return the keys of an architecture, without its name before them, and those of the vocabulary."""
    begin = f"{architecture.name}."
    own = {key.removeprefix(begin): value for key, value in fields.items() if key.startswith(begin)}
    return own | {key: value for key, value in fields.items() if key.startswith("tokenizer.")}


def factors_of(file: GgufFile) -> Tensor | None:
    """Read rope_freqs.weight, which divides the frequencies of rotary embeddings; None for a file without."""
    found = next((tensor for tensor in file.tensors if tensor.name == FREQUENCIES), None)
    return None if found is None else torch.from_numpy(found.data.copy())


def config_of(file: GgufFile) -> Any:
    """Make the Transformers configuration of a file.

    Raises CheckpointError for keys that are missing or have impossible values, and for unknown architectures.
    """
    import transformers

    path, fields = file.path, file.values()
    architecture = find(str(path), fields)
    shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in file.tensors}
    if "token_embd.weight" not in shapes:  # which says the size of the vocabulary
        raise CheckpointError(f"{path} has no tensor token_embd.weight")
    if architecture.model_type not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"{path}: the installed transformers {transformers.__version__} has no model type "
            f"{architecture.model_type}: pip install -U transformers"
        )
    try:
        values = architecture.config(own_fields(architecture, fields), shapes, factors_of(file))
        return transformers.CONFIG_MAPPING[architecture.model_type](**values)
    except KeyError as error:
        raise CheckpointError(f"{path} has no key for {error.args[0]}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # of Transformers, which have no common class
        raise CheckpointError(f"{path} has metadata that Transformers refuses: {error}") from error


def check(file: GgufFile, config: Any) -> None:
    """Raise CheckpointError that names the first key of the file with which the configuration does not compute."""
    path, fields = file.path, file.values()
    architecture = find(str(path), fields, config)
    own = own_fields(architecture, fields)
    try:
        expected = {**architecture.implied(config), **architecture.fields(config)}
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(f"the configuration of {path} has a value of a wrong type: {error}") from error
    # Each key; lists with one item a block lose the items of the blocks for multi-token prediction
    mtp_blocks = architecture.num_mtp_blocks(own)
    for full, value in fields.items():
        key = full.removeprefix(f"{architecture.name}.")
        if mtp_blocks and key == NEXTN:
            continue
        if key == "block_count" and isinstance(value, int):
            value -= mtp_blocks
        if mtp_blocks and isinstance(value, list):
            value = value[: config.num_hidden_layers]
        wrong = _why_not(architecture, full, key, value, expected)
        if wrong:
            raise CheckpointError(f"{path}: {full} is {shortened(value)}, {wrong}")
    # What several keys say together: kinds of layers, frequencies, scaling of positions
    try:
        kinds = architecture.layer_types(own, config.num_hidden_layers)
    except (TypeError, IndexError, ZeroDivisionError, KeyError) as error:
        raise CheckpointError(f"{path}: its keys for the kinds of layers cannot be read: {error}") from error
    said = getattr(config, "layer_types", None)
    if kinds is not None and kinds != said:
        raise CheckpointError(
            f"{path} has layers of the kinds {shortened(kinds)}, but config.json has layer_types {shortened(said)}"
        )
    divisors, needed = factors_of(file), architecture.rope_factors(config)
    if needed is None:
        if divisors is not None and (divisors != 1).any():
            raise CheckpointError(f"{path}: {FREQUENCIES} scales frequencies, which is not computed here")
    elif divisors is None:
        raise CheckpointError(f"{path} lacks {FREQUENCIES}")
    elif not torch.equal(divisors, needed):
        raise CheckpointError(
            f"{path}: {FREQUENCIES} is {divisors.tolist()[:8]}, but the model is computed with {needed.tolist()[:8]}"
        )
    try:
        scaling = architecture.rope(own, config.max_position_embeddings)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    found = with_defaults(config, architecture.rounds_yarn)
    for name, value in scaling.items():
        if not _same(found.get(name), value):
            raise CheckpointError(
                f"{path}: the keys {SCALING}* say {name} {value}, but config.json says {found.get(name)}"
            )


def _why_not(architecture: Architecture, full: str, key: str, value: Any, expected: Fields) -> str:
    """Say why a key is refused, "" if it is not. key: `full` without the architecture's name before it."""
    import gguf

    if key in architecture.harmless or key in READ:
        return ""
    if key.startswith(SCALING) and key not in architecture.keys:  # which rope() reads
        return ""
    attribute = architecture.attributes.get(key, "")
    # The graph computes one value whatever the configuration says
    if attribute in architecture.fixed and not _same(architecture.fixed[attribute], value):
        return f"but the model is computed with {architecture.fixed[attribute]} in any case"
    # The round trip
    if key in expected:
        # a file may say "not used" for a factor of 1
        said = 1 if value == 0 and key in ZERO_MEANS_ONE else value
        return "" if _same(expected[key], said) else f"but the model is computed with {expected[key]}"
    if key in architecture.read:
        return ""
    if key in ONLY:
        return "" if value in ONLY[key] else f"but only {' or '.join(map(str, ONLY[key]))} is computed"
    # a key of no architecture: other programs may add keys in namespaces that llama.cpp does not have
    if key == full:
        if full.startswith(NOTES):
            return ""
        known = {name.partition(".")[0] for name in names()} | {*gguf.MODEL_ARCH_NAMES.values()}
        if full.partition(".")[0] not in known:
            return ""
    return "which is not computed here"


def _same(a: Any, b: Any) -> bool:
    """Compare values of a key: floats to float32's precision, one number with a list of it for all layers."""
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)  # the file has float32, config.json decimals
    if isinstance(a, list) and type(b) in (int, float):  # llama.cpp takes one number for all layers
        return bool(a) and all(_same(one, b) for one in a)
    if type(a) in (int, float) and isinstance(b, list):
        return _same(b, a)
    return bool(a == b)


def names() -> Iterator[str]:
    """Yield every key that the installed package gguf knows, with {arch} for an architecture."""
    import gguf

    def walk(group: type) -> Iterator[str]:
        for name, value in vars(group).items():
            if isinstance(value, type):
                yield from walk(value)
            elif isinstance(value, str) and not name.startswith("__"):
                yield value

    return walk(gguf.Keys)
