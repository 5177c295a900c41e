"""Describe an architecture of llama.cpp: a class with three main methods, to read, check and write files.

    config(fields, shapes, factors)   what a file says      -> values of Transformers' configuration
    fields(config)                    a configuration       -> the metadata that a file of it has
    tensors(config, names)            names in Transformers -> names and values in the file

Most keys are one attribute of the configuration: config() takes them by `keys`, `defaults` has what llama.cpp takes for
a key that is missing. A file is checked by a round trip (metadata.py): its keys become a configuration, and fields() of
that configuration must give the file's keys again; so fields() sets each key explicitly. A key that only config() reads
stands in `read`, and one that changes no logit in `harmless`. llama.cpp's graph computes some things that no key says:
`fixed` has the only value allowed for an attribute, refused() names what a configuration may not use. The package gguf
knows most names of tensors (in_checkpoints() translates to the names that it knows); transforms() has the others, and
those whose values are in another order in memory.

Names with "mtp" are about multi-token prediction: blocks at the end of a file that predict the tokens after the next.
"heads" are those of attention, but in writes_heads.

To add one, write a subclass, in a file of architectures/, with what differs: it is found by being there. Its page and
tests are in docs/design.md, "What a change touches". A model type is exported under the first name that has it; a
second name of one type is only read (also).
"""

import functools
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families import FAMILIES
from fmoe_ext.checkpoint.families.family import Family
from fmoe_ext.gguf.rope import rope_of, rope_parameters, yarn_factor, yarn_fields
from fmoe_ext.gguf.transforms import TensorTransform, of_experts, pairs, renamed, row

Fields: TypeAlias = Mapping[str, Any]  # {key: value}; of an architecture without its name
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # {tensor: shape as in PyTorch}
Values: TypeAlias = dict[str, Any]  # {attribute of the configuration: value}

EPSILON, NEXTN = "attention.layer_norm_rms_epsilon", "nextn_predict_layers"
_GATING = MappingProxyType({"softmax": 1, "sigmoid": 2})  # expert_gating_func in llama.cpp
# {key: attribute} of all architectures; those of experts are named by the family
KEYS = MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        EPSILON: "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
)
OF_EXPERTS = MappingProxyType(
    {
        "expert_count": "num_experts",
        "expert_used_count": "top_k",
        "expert_feed_forward_length": "d_hidden",
        "expert_weights_norm": "normalize",
        "expert_weights_scale": "scale",
    }
)
# Needed for a configuration where no config.json is beside the file. They are not compared in the round trip:
# either no logit depends on them, or the shapes of tensors say the same
READ = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "feed_forward_length": "intermediate_size",
        "tokenizer.ggml.bos_token_id": "bos_token_id",
        "tokenizer.ggml.eos_token_id": "eos_token_id",
        "tokenizer.ggml.padding_token_id": "pad_token_id",
    }
)
# In llama.cpp 0 means "not used" for these factors and numbers, which is 1 in Transformers
ZERO_MEANS_ONE = (
    *("expert_weights_scale", "interleave_moe_layer_step", "expert_group_count", "expert_group_used_count"),
    *("embedding_scale", "residual_scale", "logit_scale"),
)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class Architecture:
    """A decoder whose file says how its router computes, with rotary embeddings and norms before both parts."""

    name = ""  # general.architecture of its files
    model_type = ""  # of Transformers: a key of checkpoint.families.FAMILIES
    also: Mapping[str, tuple[str, ...]] = _NOTHING  # {another name: its keys that change no logit}
    keys: Mapping[str, str] = _NOTHING  # {key: attribute} beside those of all
    read: tuple[str, ...] = ()  # further keys that config() reads
    harmless: tuple[str, ...] = ()  # keys that change no logit of this architecture
    needs: tuple[str, ...] = ()  # keys that a file of this model must have
    defaults: Mapping[str, Any] = _NOTHING  # {attribute: value of a file without its key} beside `usual`
    fixed: Mapping[str, Any] = _NOTHING  # {attribute: the only value that the graph computes}
    has_mtp = False  # the last blocks may be for multi-token prediction (num_mtp_blocks()), and are left out
    writes_heads = (
        False  # those blocks, as `model.layers.N` behind the others: the package's map has their names
    )
    has_biases = False  # of queries, keys, values and outputs
    groups_heads = True  # queries may be more than keys
    rotates_part = False  # of each head
    rotates_pairs = False  # neighbours, not halves of a head
    has_factors = False  # llama.cpp's graph multiplies by the factors of weights in NVFP4
    # whether Transformers rounds the bounds of YaRN's ramp, as llama.cpp always does; such YaRN is only read
    rounds_yarn = True
    attention_block = "self_attn"  # name of attention in Transformers' layer
    window_period = 0  # n: every n-th layer has full attention, the others a sliding window; 0: no such rule

    def __init__(self, name: str = "") -> None:
        self.name = name or self.name
        self.harmless = (*self.harmless, *self.also.get(self.name, ()))

    @property
    def family(self) -> Family:
        """Return the MoE layers as files and modules of Transformers have them."""
        return FAMILIES[self.model_type]

    @property
    def gating(self) -> int:
        """Return expert_gating_func of its router."""
        return _GATING["sigmoid" if self.family.gates[-1] == "SigmoidGate" else "softmax"]

    @property
    def attributes(self) -> dict[str, str]:
        """Return {key: attribute of the configuration}."""
        facts = self.family.config
        of_experts = {key: facts[fact] for key, fact in OF_EXPERTS.items() if fact in facts}
        found = {**READ, **KEYS, **of_experts, **self.keys}
        return {key: found[key] for key in found if key not in self.harmless and key not in self.read}

    @property
    def usual(self) -> Values:
        """Return {attribute: value with which llama.cpp computes where a file does not say it}."""
        facts = {"normalize": False, "scale": 1.0, "num_groups": 1, "topk_groups": 1}
        found = {self.family.config.get(fact): value for fact, value in facts.items()}
        found[self.keys.get("leading_dense_block_count")] = 0
        return {**{attribute: value for attribute, value in found.items() if attribute}, **self.defaults}

    def accepts(self, fields: Fields) -> bool:
        """True for a file of this model type, where several have the architecture's name."""
        return bool(fields.get("expert_gating_func") == self.gating)

    # What a file says

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        """Return the values of Transformers' configuration; KeyError for a key that is missing.

        factors: rope_freqs.weight of the file.
        """
        import transformers

        # The later ones win: what llama.cpp takes by default, keys, shapes of tensors
        values = {**self.usual, "tie_word_embeddings": "output.weight" not in shapes}
        for key, attribute in self.attributes.items():
            value = fields.get(key)
            if value is not None:  # 0 stands for "not used", which is a factor of 1 in Transformers
                values[attribute] = type(value)(1) if value == 0 and key in ZERO_MEANS_ONE else value
        values |= self.sizes(shapes)
        # YaRN's factors count from the context that the file says, if it says none of its own
        scaling = self.rope(fields, values["max_position_embeddings"])
        values["num_hidden_layers"] -= self.num_mtp_blocks(fields)  # block_count includes them
        kinds = self.layer_types(fields, values["num_hidden_layers"])
        if kinds is not None:
            values["layer_types"] = kinds
        values |= self.heads(values)
        # Rotary embeddings: Transformers has them in one dict, where the model type's configuration has that
        theta = values.pop("rope_theta", 10000.0)
        if hasattr(transformers.CONFIG_MAPPING[self.model_type], "rope_parameters"):
            values["rope_parameters"] = {"rope_theta": theta, **scaling}
        if scaling and not self.rounds_yarn:
            values["rope_parameters"]["truncate"] = False
        if self.rotates_part:
            rotated = fields.get("rope.dimension_count", values["head_dim"])
            values["rope_parameters"]["partial_rotary_factor"] = rotated / values["head_dim"]
        return values

    def sizes(self, shapes: Shapes) -> dict[str, int]:
        """Return the sizes that the tensors' shapes give, whatever the keys say."""
        facts, gated = self.family.config, self.family.in_modules.gated

        def width(role: str) -> int | None:
            # rows of the first layer's gate (or up) projection: d_hidden
            name = f"ffn_{'gate' if gated else 'up'}{role}.weight"
            for full, shape in shapes.items():
                if full.startswith("blk.") and full.split(".", 2)[2] == name and len(shape) > 1:
                    return shape[-2]
            return None

        found = {"vocab_size": shapes["token_embd.weight"][0]}
        # Widths of routed, shared and dense MLPs
        experts, shared, dense = width("_exps"), width("_shexp"), width("")
        if experts is not None:
            found[facts["d_hidden"]] = experts
        if "shared" in facts and shared is not None:
            found[facts["shared"]] = shared
        if "num_shared" in facts and experts:
            found[facts["num_shared"]] = (shared or 0) // experts
        if dense is not None and facts["d_hidden"] != "intermediate_size":
            found["intermediate_size"] = dense
        return found

    def heads(self, values: Values) -> Values:
        """Return the number of key and value heads and the size of one; llama.cpp's defaults follow from the others."""
        count = values["num_attention_heads"]
        return {
            "num_key_value_heads": values.get("num_key_value_heads", count),
            "head_dim": values.get("head_dim", values["hidden_size"] // count),
        }

    def rope(self, fields: Fields, context: int) -> Values:
        """Return rope_type and its parameters; empty where the file says nothing. context: longest of the model."""
        return rope_parameters(self.name, fields, context, self.yarn_attention)

    def yarn_attention(self, said: Values, factor: float) -> Values:
        """Take the scale of attention out of the rope.scaling keys -> YaRN's parameters for it."""
        return {"attention_factor": said.pop("attn_factor", 1.0) * yarn_factor(factor)}

    def layer_types(self, fields: Fields, num_layers: int) -> list[str] | None:
        """Return the kinds of layers that a file says; None if the architecture has one."""
        if not self.window_period:
            return None
        is_full = [(i + 1) % self.window_period == 0 for i in range(num_layers)]
        return ["full_attention" if full else "sliding_attention" for full in is_full]

    def num_mtp_blocks(self, fields: Fields) -> int:
        """Count the blocks at the end of a file that predict the tokens after the next (MTP)."""
        # a damaged file may have any value here: only a number below that of the blocks counts
        count, blocks = fields.get(NEXTN, 0) if self.has_mtp else 0, fields.get("block_count", 0)
        return count if type(count) is type(blocks) is int and 0 < count < blocks else 0

    # What a file of a configuration has

    def fields(self, config: Any) -> dict[str, Any]:
        """Return the metadata of a model, without the architecture's name before each key, in the order of files."""
        config = first_layer(config)
        family = self.family
        facts = {fact: getattr(config, family.config[fact]) for fact in ("num_experts", "top_k")}
        facts |= family.facts_of(config.to_dict())  # to_dict() lacks what is only an alias in Transformers
        found = {
            "vocab_size": config.vocab_size,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            **self.attention(config),
            EPSILON: float(getattr(config, self.attributes[EPSILON])),
            "expert_count": facts["num_experts"],
            "expert_used_count": facts["top_k"],
        }
        if rope_of(config):
            found["rope.freq_base"] = float(rope_of(config)["rope_theta"])
        # families name the width of experts differently; the number of shared ones is in routing()
        if hasattr(config, "moe_intermediate_size"):
            found["expert_feed_forward_length"] = config.moe_intermediate_size
        if hasattr(config, "shared_expert_intermediate_size"):
            found["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
        # these win: the router's keys have a width of experts too, which FixedRouter leaves out
        found |= self.routing(config, facts)
        if "attention.sliding_window" in self.keys:
            found["attention.sliding_window"] = config.sliding_window
        if rope_of(config).get("rope_type") == "yarn":
            found |= yarn_fields(config)
        return found

    def attention(self, config: Any) -> dict[str, Any]:
        """Return the metadata of attention: number and size of heads, width that rotary embeddings turn."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # the other models of Transformers ignore a factor of their configuration
        part = rope_of(config).get("partial_rotary_factor", 1) if self.rotates_part else 1
        return {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": size,
            "attention.value_length": size,
            "rope.dimension_count": int(size * part),
        }

    def routing(self, config: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metadata of the router, of shared experts, and of which layers are dense."""
        family = self.family
        # a family without a key for their number has one shared expert or none
        has_one = "num_shared" not in family.config and bool(family.in_modules.shared)
        shared = facts.get("num_shared", int(has_one)) or 0
        kinds = getattr(config, "mlp_layer_types", None)
        dense = getattr(config, self.keys.get("leading_dense_block_count", ""), 0)
        found = {
            "expert_feed_forward_length": getattr(config, "moe_intermediate_size", config.intermediate_size),
            "expert_gating_func": self.gating,
            "expert_weights_norm": bool(facts["normalize"]),
            "expert_weights_scale": float(facts.get("scale", 1)),
            "expert_shared_count": shared,
            "leading_dense_block_count": kinds.count("dense") if kinds else dense,
            "interleave_moe_layer_step": getattr(config, "moe_layer_interval", 1),
        }
        if shared:
            width = facts.get("shared") or shared * facts["d_hidden"]
            found["expert_shared_feed_forward_length"] = width
        if facts.get("num_groups", 1) > 1:
            found["expert_group_count"] = facts["num_groups"]
            found["expert_group_used_count"] = facts["topk_groups"]
        return found

    def implied(self, config: Any) -> dict[str, Any]:
        """Return metadata that other programs write and export leaves out; a file that has them must agree."""
        return {}

    def rope_factors(self, config: Any) -> Tensor | None:
        """Return rope_freqs.weight, which divides the frequencies of rotary embeddings; None without."""
        return None

    def refused(self, config: Any) -> dict[str, bool]:
        """Return {attribute: True if llama.cpp's graph would compute something else than the configuration}."""
        config = first_layer(config)
        facts = self.family.facts_of(config.to_dict())
        mlp_kinds = getattr(config, "mlp_layer_types", None) or ()
        rope = rope_of(config)
        kind = rope.get("rope_type", "default")
        # A window is lost unless the graph has one, or no layer uses it
        window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or ()
        if "attention.sliding_window" in self.keys:
            is_window_lost = window is None  # the graph has one in any case
        else:
            is_used = window and getattr(config, "use_sliding_window", True)
            is_window_lost = bool(is_used and {*kinds} != {"full_attention"})
        # the graph itself decides which layers have full attention
        period_kinds = self.layer_types({}, config.num_hidden_layers) if self.window_period else kinds
        heads = config.num_attention_heads
        return {
            "hidden_act": getattr(config, "hidden_act", "silu") != "silu",
            "linear_num_heads": getattr(config, "linear_num_heads", heads) != heads,
            # leading_dense_block_count can say dense layers at the beginning only
            "mlp_layer_types": ("sparse", "dense") in pairwise(mlp_kinds),
            "layers_block_type": "mlp" in (getattr(config, "layers_block_type", None) or ()),
            "mlp_only_layers": bool(getattr(config, "mlp_only_layers", None)),
            "n_group": facts.get("num_groups", 1) > 1 and "expert_group_count" not in self.keys,
            "clip_qkv": getattr(config, "clip_qkv", None) is not None,
            "sliding_window": is_window_lost,
            "layer_types": kinds != period_kinds,
            # YaRN is written without rounding alone, as GPT-OSS has it; llama.cpp derives its attention factor itself
            "rope_parameters": kind != "default"
            and (kind != "yarn" or self.rounds_yarn or rope.get("attention_factor") is not None),
            "attention_bias": getattr(config, "attention_bias", False) and not self.has_biases,
            "num_key_value_heads": config.num_key_value_heads != heads and not self.groups_heads,
            **{name: getattr(config, name) != value for name, value in self.fixed.items()},
        }

    # Tensors

    def tensors(self, config: Any, names: Iterable[str]) -> dict[str, TensorTransform]:
        """Return {name in Transformers: its transform}; CheckpointError for a name that the file has no place for."""
        own, known, found = self.transforms(config), known_names(self.name), {}
        for name in names:
            layer = _LAYER.fullmatch(name)
            # an own transform first, then the package's name; its names are the same in all layers, so ask for layer 0
            transform = own.get(layer[2] if layer else name)
            if transform is None:
                full = self.in_checkpoints(f"model.layers.0.{layer[2]}" if layer else name)
                theirs = known.get_name(full, (".weight", ".bias"))
                if theirs is None:
                    raise CheckpointError(f"{name} has no name in GGUF's {self.name}")
                transform = renamed(theirs.removeprefix("blk.0."))
            begin = f"blk.{layer[1]}." if layer else ""
            found[name] = transform._replace(parts=tuple(f"{begin}{part}" for part in transform.parts))
        return found

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        """Return {name in a layer, or outside: its transform} where the package has no name, or values are moved."""
        layout = self.family.in_modules
        block = f"{layout.block}."
        # [E, 2H, D] of gate and up -> two stacks in the file
        found = of_experts(
            f"{layout.place}." if layout.place else f"{block}experts.", layout.gated, layout.interleaved
        )
        if layout.shared_gate:
            found[f"{block}{layout.shared_gate}"] = row("ffn_gate_inp_shexp.weight")
        if layout.expert_bias:
            bias = "exp_probs_b.bias"
            found[f"{block}{layout.expert_bias}"] = row(bias) if layout.bias_is_row else renamed(bias)
        # Transformers rotates halves of a head, these graphs neighbours: rows of queries and keys are rearranged
        if self.rotates_pairs:
            counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
            for role, count in counts.items():
                for kind in ("weight", "bias"):
                    found[f"{self.attention_block}.{role}_proj.{kind}"] = pairs(f"attn_{role}.{kind}", count)
        return found

    def in_checkpoints(self, name: str) -> str:
        """Return a tensor's name in the files that llama.cpp's converter reads, by which the package knows it."""
        return name


class FixedRouter(Architecture):
    """An architecture whose graph fixes how the router computes: no key says it, and refused() checks it instead."""

    normalizes = True  # the weights of the chosen experts
    keys = MappingProxyType({"attention.value_length": "head_dim", "rope.dimension_count": "head_dim"})

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        return {**super().config(fields, shapes, factors), "norm_topk_prob": self.normalizes}

    def routing(self, config: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def implied(self, config: Any) -> dict[str, Any]:
        width = getattr(config, "moe_intermediate_size", config.intermediate_size)
        return {
            "expert_feed_forward_length": width,
            "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", 0),
            "expert_weights_norm": getattr(config, "norm_topk_prob", self.normalizes),
        }

    def refused(self, config: Any) -> dict[str, bool]:
        is_wrong = getattr(config, "norm_topk_prob", True) != self.normalizes
        return {"norm_topk_prob": is_wrong, **super().refused(config)}


def first_layer(config: Any) -> Any:
    """Return the first layer's configuration, where Transformers has one a layer; else the model's."""
    return config.per_layer_config[0] if getattr(config, "is_heterogeneous", False) else config


@functools.cache
def known_names(architecture: str) -> Any:
    """Return the package gguf's map of an architecture's tensor names, for one layer.

    Raises CheckpointError if the installed package is older than the architecture.
    """
    import gguf

    kind = next((kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        raise CheckpointError(
            f"the installed package gguf does not know {architecture}: pip install -U gguf (0.19 knows it)"
        )
    return gguf.get_tensor_name_map(kind, 1)
