"""Metadata keys of GGUF: each is compared with the configuration that is computed, or an error names it.

llama.cpp computes a model from its tensors and from the keys of its architecture. Each of these is read, has one value
that its graph computes with, or changes no logit; any other is refused, so that none is skipped in silence.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.families.family import Family
from fmoe_ext.checkpoint.gguf_facts import ROUTING, facts, gating_of, rope_of

Fields: TypeAlias = Mapping[str, Any]  # {key: value}

# {key behind the architecture: attribute of the configuration}; compared with the configuration that is computed.
COMPARED = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.dimension_count": "head_dim",
        "rope.freq_base": "rope_theta",
        "expert_weights_norm": "norm_topk_prob",
    }
)
# Read where no config.json is beside the file; no logit follows from them alone.
READ = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "feed_forward_length": "intermediate_size",
        "tokenizer.ggml.bos_token_id": "bos_token_id",
        "tokenizer.ggml.eos_token_id": "eos_token_id",
        "tokenizer.ggml.padding_token_id": "pad_token_id",
    }
)
# The values with which these models compute. 0 stands for "not used" in llama.cpp.
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
# Keys for which 0 stands for 1
UNUSED = (
    *("expert_weights_scale", "interleave_moe_layer_step", "expert_group_count", "expert_group_used_count"),
    *("embedding_scale", "residual_scale", "logit_scale"),
)
_HEADS = "nextn_predict_layers"
# Namespaces of notes: on the file, its vocabulary and how it was made. general.type and others above come first.
_NOTES = ("general.", "tokenizer.", "split.tensors.", "quantize.", "imatrix.")
_SCALING = "rope.scaling."
_ROPE_TYPES = ("none", "linear", "yarn")  # the last two have these names in Transformers too
# {key behind _SCALING: parameter of Transformers' YaRN}
YARN = MappingProxyType(
    {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
)


def family_of(path: Path, fields: Fields, config: Any = None) -> Family:
    """Finds the family of a file's architecture, the configuration's if it fits; CheckpointError if none is read."""
    architecture = fields.get("general.architecture")
    families = [family for family in FAMILIES.values() if family.gguf]
    named = [(family, family.gguf.of(str(architecture))) for family in families if family.gguf]
    found = [replace(family, gguf=gguf) for family, gguf in named if gguf]
    if not found:
        known = ", ".join(dict.fromkeys(family.gguf.name for family in families if family.gguf))
        raise CheckpointError(f"{path}: GGUF is read for {known}, but this model is {architecture}")
    gating = fields.get(f"{architecture}.expert_gating_func")
    family = next((family for family in found if gating_of(family) == gating), found[-1])
    for other in found:  # of two families with one architecture, the one whose own keys are there
        marks = other.gguf.marks if other.gguf else ()
        if other.gguf and marks and all(fields.get(f"{other.gguf.name}.{key}") for key in marks):
            family = other
            break
    family = next((family for family in found if family.name == getattr(config, "model_type", "")), family)
    for key in family.gguf.needs if family.gguf else ():
        if f"{architecture}.{key}" not in fields:
            raise CheckpointError(f"{path} has no key {architecture}.{key}: another model, or an old file")
    return family


def check(path: Path, fields: Fields, config: Any) -> None:
    """Raises CheckpointError for the first key that the configuration does not compute with, by name."""
    family = family_of(path, fields, config)
    assert family.gguf is not None
    try:
        computed = facts(config, family) if family.gguf.says_routing else {}
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{path} has a configuration with values of other types: {error}") from error
    heads = num_heads(fields, family)
    for key, value in fields.items():
        if heads and key == f"{family.gguf.name}.{_HEADS}":
            continue
        if key == f"{family.gguf.name}.block_count" and isinstance(value, int):
            value -= heads
        if heads and isinstance(value, list):  # one item a block
            value = value[: config.num_hidden_layers]
        wrong = _why_not(key, value, family, config, computed)
        if wrong:
            raise CheckpointError(f"{path}: {key} is {_short(value)}, {wrong}")
    kinds = layer_kinds(path, fields, family, config.num_hidden_layers)
    said = getattr(config, "layer_types", None)
    if kinds is not None and kinds != said:
        raise CheckpointError(
            f"{path} has layers of the kinds {_short(kinds)}, but config.json has layer_types {_short(said)}"
        )
    found = _with_defaults(config, family)
    for name, value in rope(path, fields, family, config.max_position_embeddings).items():
        if not _same(found.get(name), value):
            raise CheckpointError(
                f"{path}: the keys {_SCALING}* say {name} {value}, but config.json says {found.get(name)}"
            )


def num_heads(fields: Fields, family: Family) -> int:
    """Blocks at the end of a file that are heads for the tokens after the next, which are left out."""
    assert family.gguf is not None
    heads = fields.get(f"{family.gguf.name}.{_HEADS}", 0) if family.gguf.leaves_out_heads else 0
    blocks = fields.get(f"{family.gguf.name}.block_count", 0)
    is_count = type(heads) is int and type(blocks) is int
    return heads if is_count and 0 < heads < blocks else 0


def _why_not(key: str, value: Any, family: Family, config: Any, computed: Fields) -> str:
    """Says why a key is refused, "" for one that is not. The first table that has the key decides."""
    assert family.gguf is not None
    rest = key.removeprefix(f"{family.gguf.name}.")
    own = family.gguf.keys.get(rest, "")
    if own is None or rest in READ or (rest.startswith(_SCALING) and not own):
        return ""
    if own in family.gguf.fixed and not _same(family.gguf.fixed[own], value):
        return f"but the model is computed with {family.gguf.fixed[own]} in any case"
    if rest in computed:
        said = 1 if value == 0 and rest in UNUSED else value
        return "" if _same(computed[rest], said) else f"but the model is computed with {computed[rest]}"
    if rest in family.gguf.keys and own == "":  # which layer_kinds() or others read
        return ""
    if rest in ONLY:
        allowed = ONLY[rest]
        return "" if value in allowed else f"but only {' or '.join(map(str, allowed))} is computed"
    if rest in COMPARED:
        attribute = attribute_of(COMPARED[rest], family)
        found = getattr(config, attribute, None)
        if attribute == "rope_theta":
            found = rope_of(config).get("rope_theta")
        elif attribute == "head_dim" and found is None:
            found = config.hidden_size // config.num_attention_heads
        if found is None and attribute == "norm_topk_prob":
            found = family.gguf.normalizes
        return "" if _same(found, value) else f"but the model is computed with {attribute} {found}"
    if rest != key or _is_reserved(key):
        return "which is not computed here"
    return ""


def _is_reserved(key: str) -> bool:
    """False for notes: keys of no namespace that llama.cpp computes with."""
    import gguf

    namespace = key.partition(".")[0]
    if key.startswith(_NOTES):
        return False
    known = {name.partition(".")[0] for name in names()}
    return namespace in known or namespace in gguf.MODEL_ARCH_NAMES.values()


def names() -> Iterator[str]:
    """Every key that the installed package gguf knows, with {arch} for an architecture."""
    import gguf

    def walk(group: type) -> Iterator[str]:
        for name, value in vars(group).items():
            if isinstance(value, type):
                yield from walk(value)
            elif isinstance(value, str) and not name.startswith("__"):
                yield value

    return walk(gguf.Keys)


def table() -> str:
    """Writes the rows of docs/formats.md on metadata keys."""
    kinds: dict[str, list[str]] = {
        "compared": [],
        "read": [],
        "one value": [],
        "changes no logit": [],
        "refused": [],
    }
    for name in sorted(names()):
        key = name.removeprefix("{arch}.")
        kind = "refused"
        if key in COMPARED:
            kind = "compared"
        elif key in READ or key.removeprefix(_SCALING) in (*YARN, "type", "factor", "attn_factor"):
            kind = "read"
        elif key in ONLY:
            kind = "one value"
            key = f"{key} = {' or '.join(map(str, ONLY[key]))}"
        elif key.startswith(_NOTES) or key == _SCALING + "finetuned":
            kind = "changes no logit"
        kinds[kind].append(f"`{key}`")
    return "\n".join(f"| {kind} | {', '.join(keys)} |" for kind, keys in kinds.items())


def routing_table() -> str:
    """Writes the rows of docs/formats.md on architectures whose files say how their routers compute."""
    rows = []
    for family in FAMILIES.values():
        if family.gguf and family.gguf.says_routing:
            own = (key for key, attribute in family.gguf.keys.items() if attribute is not None)
            known = sorted({*ROUTING, *own, *family.gguf.multipliers})
            compared, needs = (", ".join(f"`{key}`" for key in keys) for keys in (known, family.gguf.needs))
            rows.append(f"| `{family.gguf.name}` ({family.name}) | {compared} | {needs or 'none more'} |")
    return "\n".join(rows)


def rope(path: Path, fields: Fields, family: Family, context: int) -> dict[str, Any]:
    """Reads rope_type and its parameters; empty where the file says nothing."""
    assert family.gguf is not None
    begin = f"{family.gguf.name}.{_SCALING}"
    said = {key.removeprefix(begin): value for key, value in fields.items() if key.startswith(begin)}
    said.pop("finetuned", None)
    if not said:
        return {}
    kind, factor = said.pop("type", "linear"), said.pop("factor", 1.0) or 1.0  # as in llama.cpp
    if kind not in _ROPE_TYPES:
        raise CheckpointError(f"{path}: {begin}type is {kind!r}, which is not computed here")
    if not 1 <= factor < math.inf:
        raise CheckpointError(f"{path}: {begin}factor is {factor}, which is not computed here")
    if kind != "yarn":
        said.pop("original_context_length", None)
    if kind == "none" or (kind == "linear" and factor == 1):
        found: dict[str, Any] = {}
    else:
        found = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found["original_max_position_embeddings"] = context
        if family.gguf.is_latent:
            # llama.cpp's graph for latent attention needs both to be equal; 0 stays in `said` to be refused
            scale = said.setdefault("yarn_log_multiplier", 0)
            if scale > 0:
                del said["yarn_log_multiplier"]
            found |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * scale if scale > 0 else 0)
        else:
            found["attention_factor"] = said.pop("attn_factor", 1.0) * _yarn_factor(factor)
        found |= {name: said.pop(key) for key, name in YARN.items() if key in said}
    if said.get("attn_factor") == 1:
        del said["attn_factor"]
    if said:
        key, value = next(iter(said.items()))
        raise CheckpointError(f"{path}: {begin}{key} is {_short(value)}, which is not computed here")
    return found


def layer_kinds(path: Path, fields: Fields, family: Family, num_layers: int) -> list[str] | None:
    """Reads layer_types of a file's model; None if the architecture fixes none."""
    architecture = family.gguf
    assert architecture is not None
    if architecture.kinds is None:
        return architecture.window_kinds(num_layers) if architecture.window_period else None
    begin = f"{architecture.name}."
    said = {key.removeprefix(begin): value for key, value in fields.items() if key.startswith(begin)}
    try:
        return architecture.kinds(said, num_layers)
    except (TypeError, IndexError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path} has keys on the kinds of layers with other values: {error}") from error


def _with_defaults(config: Any, family: Family) -> dict[str, Any]:
    """Returns rope_parameters, with YaRN's defaults for what is left out."""
    said = {name: value for name, value in rope_of(config).items() if value is not None}
    if (
        said.get("rope_type") != "yarn"
        or {"mscale", "mscale_all_dim"} & said.keys()
        or (not said.get("truncate", True) and family.gguf is not None and family.gguf.rounds_yarn)
    ):
        return said
    context = config.max_position_embeddings
    defaults = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": context}
    return defaults | {"attention_factor": _yarn_factor(said["factor"])} | said


def _yarn_factor(factor: float) -> float:
    return 1 + 0.1 * math.log(factor)


def attribute_of(name: str, family: Family) -> str:
    """Returns the family's own name of an attribute."""
    facts_named = {
        "num_experts": "num_experts",
        "num_experts_per_tok": "top_k",
        "moe_intermediate_size": "d_hidden",
    }
    return family.config[facts_named[name]] if name in facts_named else name


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-6)  # the file has float32, config.json decimals
    if isinstance(a, list) and type(b) in (int, float):  # llama.cpp takes one number for all layers
        return bool(a) and all(_same(one, b) for one in a)
    if type(a) in (int, float) and isinstance(b, list):
        return _same(b, a)
    return bool(a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
