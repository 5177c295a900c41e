"""Translate a file's rope.scaling.* keys (stretched rotary positions) to rope_parameters, and YaRN's parameters back.

architecture.py calls it for both ways, metadata.py to compare. Linear scaling and YaRN are read; YaRN as GPT-OSS has it
is written, and Architecture.refused() refuses the rest. Any other key is an error, so that no scaling is lost, but for
what changes nothing: "finetuned", the original length without YaRN, an attn_factor of 1.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fmoe_ext.checkpoint.errors import CheckpointError

SCALING = "rope.scaling."
KINDS = ("none", "linear", "yarn")  # the last two have these names in Transformers too
# {key behind SCALING: parameter of Transformers' YaRN}
YARN = MappingProxyType(
    {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
)


def rope_of(config: Any) -> Mapping[str, Any]:
    """Return rope_parameters of layers with full attention, empty for models without rotary embeddings."""
    said = getattr(config, "rope_parameters", None) or {}
    found: Mapping[str, Any] = said.get("full_attention", said)
    return found


def shortened(value: Any) -> str:
    """Return a value's text for an error, 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def yarn_factor(factor: float) -> float:
    """Return the factor of attention that llama.cpp derives from YaRN's factor of positions."""
    return 1 + 0.1 * math.log(factor)


def rope_parameters(
    name: str,
    fields: Mapping[str, Any],
    context: int,
    attention_of: Callable[[dict[str, Any], float], dict[str, Any]],
) -> dict[str, Any]:
    """Read rope_type and its parameters from the keys of an architecture.

    {} if the file has none, or they change no position: no scaling, or a linear one by 1. context: the model's longest
    sequence. attention_of(said, factor) is Architecture.yarn_attention: return YaRN's parameters for the scale of
    attention, and remove the keys that it used from `said`. CheckpointError for keys that are not computed.
    """
    # Each step removes what it used from `said`; what is left is an error
    begin = f"{name}.{SCALING}"
    said = {key.removeprefix(SCALING): value for key, value in fields.items() if key.startswith(SCALING)}
    said.pop("finetuned", None)
    if not said:
        return {}
    # a damaged file may have any value
    for key, value in said.items():
        if key != "type" and type(value) not in (int, float):
            raise CheckpointError(f"{begin}{key} is {shortened(value)}, but must be a number")
    kind, factor = said.pop("type", "linear"), said.pop("factor", 1.0) or 1.0  # as in llama.cpp
    if kind not in KINDS:
        raise CheckpointError(f"{begin}type is {shortened(kind)}, which is not computed here")
    if not 1 <= factor < math.inf:
        raise CheckpointError(f"{begin}factor is {factor}, which is not computed here")
    # only YaRN uses it
    if kind != "yarn":
        said.pop("original_context_length", None)
    # neither changes any position
    is_plain = kind == "none" or (kind == "linear" and factor == 1)
    found: dict[str, Any] = {} if is_plain else {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found["original_max_position_embeddings"] = context
        found |= attention_of(said, factor)
        found |= {parameter: said.pop(key) for key, parameter in YARN.items() if key in said}
    # 1 is what llama.cpp multiplies by without the key
    if said.get("attn_factor") == 1:
        del said["attn_factor"]
    if said:
        key, value = next(iter(said.items()))
        raise CheckpointError(f"{begin}{key} is {shortened(value)}, which is not computed here")
    return found


def with_defaults(config: Any, rounds_yarn: bool) -> Mapping[str, Any]:
    """Return rope_parameters of a configuration, with YaRN's defaults for what is left out: metadata.py compares these.

    Left as they are if they have DeepSeek's mscale, from which the scale of attention is computed.
    """
    said = {name: value for name, value in rope_of(config).items() if value is not None}
    if said.get("rope_type") != "yarn" or {"mscale", "mscale_all_dim"} & said.keys():
        return said
    # llama.cpp rounds the bounds of YaRN's ramp: without rounding the model is another one, and nothing is filled in
    if rounds_yarn and not said.get("truncate", True):
        return said
    # what Transformers takes for missing parameters
    defaults = {
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": config.max_position_embeddings,
        "attention_factor": yarn_factor(said["factor"]),
    }
    return defaults | said


def yarn_fields(config: Any) -> dict[str, Any]:
    """Return the metadata of YaRN with the usual factor of attention, which llama.cpp derives itself."""
    said = rope_of(config)
    context = said.get("original_max_position_embeddings") or config.max_position_embeddings
    return {
        f"{SCALING}type": "yarn",
        f"{SCALING}factor": float(said["factor"]),
        f"{SCALING}original_context_length": context,
        f"{SCALING}yarn_beta_fast": float(said.get("beta_fast") or 32),
        f"{SCALING}yarn_beta_slow": float(said.get("beta_slow") or 1),
    }
