"""The configuration of Transformers that a GGUF file says, where no config.json is beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import Family
from fmoe_ext.checkpoint.gguf_keys import (
    COMPARED,
    READ,
    UNUSED,
    Fields,
    attribute_of,
    family_of,
    layer_kinds,
    num_heads,
    rope,
)

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # {tensor: shape as in PyTorch}
Values: TypeAlias = dict[str, Any]  # {attribute of the configuration: value}


def config_of(path: Path, fields: Fields, shapes: Shapes, factors: Tensor | None = None) -> Any:
    """Makes the configuration of Transformers for a file that has no config.json beside it.

    factors: rope_freqs.weight of the file. Raises CheckpointError for keys that are missing or have other types, and
    for an architecture that is not read.
    """
    import transformers

    family = family_of(path, fields)
    assert family.gguf is not None
    try:
        values = {"tie_word_embeddings": "output.weight" not in shapes, **_said(fields, family)}
        values |= _sizes(shapes, family)
        scaling = rope(path, fields, family, values["max_position_embeddings"])
        values["num_hidden_layers"] -= num_heads(fields, family)
        if family.gguf.says_routing:
            for attribute, value in family.gguf.missing.items():
                values.setdefault(attribute, value)
            if values.get("attention_multiplier") == 0:  # llama.cpp takes the usual one
                values["attention_multiplier"] = values["head_dim"] ** -0.5
            for (
                attribute,
                tensor,
            ) in family.gguf.flags.items():  # which no key says: the tensor is there or not
                values[attribute] = f"blk.0.{tensor}" in shapes
        else:
            values["norm_topk_prob"] = family.gguf.normalizes
        if family.gguf.complete:
            try:
                family.gguf.complete(values)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {family.gguf.name}.{error}") from None
        kinds = layer_kinds(path, fields, family, values["num_hidden_layers"])
        if kinds is not None:
            values["layer_types"] = kinds
        heads = values["num_attention_heads"]
        if family.gguf.is_latent:
            values["num_key_value_heads"] = heads
            values["qk_nope_head_dim"] = values.pop("qk_head_dim") - values["qk_rope_head_dim"]
        else:
            values.setdefault("num_key_value_heads", heads)
            values.setdefault("head_dim", values["hidden_size"] // heads)
        config_class = transformers.CONFIG_MAPPING[family.name]
        theta = values.pop("rope_theta", 10000.0)
        if hasattr(config_class, "rope_parameters"):
            values["rope_parameters"] = {"rope_theta": theta, **scaling}
        if scaling and not family.gguf.rounds_yarn:
            values["rope_parameters"]["truncate"] = False  # llama.cpp does not round the bounds of the ramp
        if family.gguf.is_partial:
            rotated = values.pop("rotated", values["head_dim"])
            values["rope_parameters"]["partial_rotary_factor"] = rotated / values["head_dim"]
        if family.gguf.finish:
            family.gguf.finish(values, shapes, factors)
        return config_class(**values)
    except KeyError as error:
        raise CheckpointError(f"{path} has no key for {error.args[0]}") from None
    except CheckpointError as error:
        raise error if str(path) in str(error) else CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # of Transformers, which have no common class
        raise CheckpointError(f"{path} has metadata that Transformers refuses: {error}") from error


def _said(fields: Fields, family: Family) -> Values:
    """Returns the attributes that keys of the file say."""
    architecture = family.gguf
    assert architecture is not None
    compared = dict(COMPARED)
    if architecture.says_routing:
        if "normalize" not in family.config:
            del compared["expert_weights_norm"]
        for key in ("expert_shared_feed_forward_length", "attention.value_length", "rope.dimension_count"):
            del compared[key]
        if architecture.is_partial:
            compared["rope.dimension_count"] = "rotated"
    values = {}
    for key, attribute in {**READ, **compared, **architecture.multipliers, **architecture.keys}.items():
        value = fields.get(key if key.startswith("tokenizer.") else f"{architecture.name}.{key}")
        if value is not None and attribute:
            is_unused = value == 0 and key in UNUSED and architecture.says_routing
            values[attribute_of(attribute, family)] = type(value)(1) if is_unused else value
    return values


def _sizes(shapes: Shapes, family: Family) -> dict[str, int]:
    """Returns the sizes that the tensors have, whatever the keys say of them."""
    found = {"vocab_size": shapes["token_embd.weight"][0]}
    kind = "gate" if family.in_modules.gated else "up"
    width, shared, dense = (_width(shapes, f"ffn_{kind}{role}.weight") for role in ("_exps", "_shexp", ""))
    if width is not None:
        found[family.config["d_hidden"]] = width
    if "shared" in family.config and shared is not None:
        found[family.config["shared"]] = shared
    if "num_shared" in family.config and width:
        found[family.config["num_shared"]] = (shared or 0) // width
    if dense is not None and family.config["d_hidden"] != "intermediate_size":
        found["intermediate_size"] = dense
    return found


def _width(shapes: Shapes, name: str) -> int | None:
    """Counts the rows of a matrix in the first block that has it."""
    for full, shape in shapes.items():
        if full.startswith("blk.") and full.split(".", 2)[2] == name and len(shape) > 1:
            return shape[-2]
    return None
