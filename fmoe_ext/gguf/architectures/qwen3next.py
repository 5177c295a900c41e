"""Qwen3-Next and Qwen3.5: three layers of four are gated delta nets, and a quarter has full attention.

A delta net has `keys` heads of keys and, for each of them, `values` heads of values. Its projection's rows are

    Qwen3-Next    in_proj_qkvz: for each key head its q, k, v and z (gate)
    in the file   attn_qkv: q of all heads, k of all heads, v of all heads; attn_gate: z of all heads

Qwen3.5's module has q, k, v like the file, but counts the heads of values by key head (k0v0 k0v1 k1v0 ...), where the
file has the first value head of every key head, then the second (k0v0 k1v0 ... k0v1 ...).
"""

from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmoe_ext.gguf.architecture import Architecture, Fields, Shapes, Values
from fmoe_ext.gguf.recurrent import head_size
from fmoe_ext.gguf.transforms import TensorTransform, convolution, exp, log, one, plus_one, renamed

_DELTA = MappingProxyType(
    {
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
    }
)
_RECURRENT, _INTERVAL = "attention.recurrent_layers", "full_attention_interval"


class Heads(NamedTuple):
    """Numbers and sizes of heads in a gated delta net."""

    keys: int  # heads of keys
    values: int  # heads of values for each head of keys
    key: int  # size of a key head
    value: int  # size of a value head


def heads_of(config: Any) -> Heads:
    """Return the heads of a configuration's gated delta nets."""
    keys = config.linear_num_key_heads
    return Heads(
        keys, config.linear_num_value_heads // keys, config.linear_key_head_dim, config.linear_value_head_dim
    )


class Qwen3Next(Architecture):
    name = "qwen3next"
    model_type = "qwen3_next"
    keys = MappingProxyType({**_DELTA, "ssm.inner_size": "inner_size"})
    read = (_RECURRENT, _INTERVAL)
    needs = ("rope.dimension_count",)
    defaults: MappingProxyType[str, Any] = MappingProxyType({"norm_topk_prob": True})
    fixed: MappingProxyType[str, Any] = MappingProxyType({"norm_topk_prob": True})
    has_mtp = True
    rotates_part = True

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = super().config(fields, shapes, factors)
        size = head_size(self.name, values.pop("inner_size"), values["linear_num_value_heads"])
        # the file has the width of all value heads together
        return {**values, "linear_value_head_dim": size}

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        recurrent = fields.get(_RECURRENT)
        if recurrent is None:  # such a file has an interval, or llama.cpp's default
            every = fields.get(_INTERVAL, 4)
            recurrent = [(i + 1) % every != 0 for i in range(num_layers)]
        return ["linear_attention" if recurrent[i] else "full_attention" for i in range(num_layers)]

    def fields(self, config: Any) -> dict[str, Any]:
        return {
            **super().fields(config),
            **{key: getattr(config, attribute) for key, attribute in _DELTA.items()},
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
            _RECURRENT: [kind == "linear_attention" for kind in config.layer_types],
        }

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        return {
            **super().transforms(config),
            # Transformers multiplies by 1 + w in these norms, and the file has 1 + w
            **{
                f"{norm}.weight": plus_one(f"{part}.weight")
                for norm, part in (
                    ("input_layernorm", "attn_norm"),
                    ("post_attention_layernorm", "post_attention_norm"),
                    ("self_attn.q_norm", "attn_q_norm"),
                    ("self_attn.k_norm", "attn_k_norm"),
                    ("model.norm", "output_norm"),
                )
            },
            **{f"linear_attn.{name}": transform for name, transform in self.of_delta(config).items()},
        }

    def of_delta(self, config: Any) -> dict[str, TensorTransform]:
        """Return the transforms of a gated delta net, {name in Transformers: transform}."""
        heads = heads_of(config)

        def read(qkv: Tensor, z: Tensor) -> Tensor:
            keys, values = heads.keys * heads.key, heads.keys * heads.values * heads.value
            parts = (*qkv.split((keys, keys, values)), z)
            return torch.cat([part.unflatten(0, (heads.keys, -1)) for part in parts], 1).flatten(0, 1)

        def write(w: Tensor) -> tuple[Tensor, ...]:
            sizes = (heads.key, heads.key, heads.values * heads.value, heads.values * heads.value)
            q, k, v, z = (part.flatten(0, 1) for part in w.unflatten(0, (heads.keys, -1)).split(sizes, 1))
            return torch.cat([q, k, v]), z

        return {
            "in_proj_qkvz.weight": TensorTransform(
                ("attn_qkv.weight", "attn_gate.weight"), read, write, True
            ),
            "A_log": one("ssm_a", log, exp),
            "dt_bias": renamed("ssm_dt.bias"),
            "conv1d.weight": convolution("ssm_conv1d.weight"),
        }


_SECTIONS = "rope.dimension_sections"  # of a head, by time, height and width, which are equal in a text


class Qwen35Moe(Qwen3Next):
    """Qwen3.5 and 3.6: the file has one value head of each key head, then the next of each."""

    name = "qwen35moe"
    model_type = "qwen3_5_moe_text"
    has_factors = True
    harmless = (_SECTIONS,)
    defaults = MappingProxyType({})
    fixed = MappingProxyType({})

    def fields(self, config: Any) -> dict[str, Any]:
        sections = config.rope_parameters.get("mrope_section") or [11, 11, 10]
        return {**super().fields(config), _SECTIONS: [*sections, 0]}

    def of_delta(self, config: Any) -> dict[str, TensorTransform]:
        heads = heads_of(config)
        num_keys = 2 * heads.keys * heads.key

        # rows [values, keys, size] in the file <-> [keys, values, size]
        def read(rows: Tensor, size: int = heads.value) -> Tensor:
            return rows.unflatten(0, (heads.values, heads.keys, size)).transpose(0, 1).flatten(0, 2)

        def write(rows: Tensor, size: int = heads.value) -> Tensor:
            return rows.unflatten(0, (heads.keys, heads.values, size)).transpose(0, 1).flatten(0, 2)

        # the same behind the rows of q and k, which are not rearranged
        def read_behind_keys(rows: Tensor) -> Tensor:
            return torch.cat((rows[:num_keys], read(rows[num_keys:])))

        def write_behind_keys(rows: Tensor) -> Tensor:
            return torch.cat((rows[:num_keys], write(rows[num_keys:])))

        # tensors with one number for each value head
        def ones(part: str, has_rows: bool = True) -> TensorTransform:
            return one(part, lambda w: read(w, 1), lambda w: write(w, 1), has_rows)

        return {
            "A_log": one("ssm_a", lambda a: read(log(a), 1), lambda a: write(exp(a), 1)),
            "dt_bias": ones("ssm_dt.bias", False),
            "conv1d.weight": one(
                "ssm_conv1d.weight",
                lambda w: read_behind_keys(w)[:, None],
                lambda w: write_behind_keys(w[:, 0]),
            ),
            "in_proj_qkv.weight": one("attn_qkv.weight", read_behind_keys, write_behind_keys, True),
            "in_proj_z.weight": one("attn_gate.weight", read, write, True),
            "in_proj_a.weight": ones("ssm_alpha.weight"),
            "in_proj_b.weight": ones("ssm_beta.weight"),
            "out_proj.weight": one("ssm_out.weight", lambda w: read(w.T).T, lambda w: write(w.T).T),
        }
