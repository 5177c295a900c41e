"""Layers of gated delta nets in GGUF: Qwen3-Next, and Qwen3.5 with value heads in another order.

Qwen3-Next's file has queries, keys and values of all heads one after the other, and their gates apart; its model has
those of a head of keys beside each other. Qwen3.5's file counts the heads of values through the heads of keys first.
"""

from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import Gguf, TensorTransform, Values
from fmoe_ext.checkpoint.families.gguf_recurrent import convolution, exp, log, one

ADDED = tuple(
    f"{name}.weight"
    for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm")
)


def _heads(config: Any) -> tuple[int, int, int, int]:
    """Heads of keys, heads of values for each, sizes of both."""
    keys = config.linear_num_key_heads
    return (
        *(keys, config.linear_num_value_heads // keys),
        *(config.linear_key_head_dim, config.linear_value_head_dim),
    )


def _read_joined(config: Any, qkv: Tensor, z: Tensor) -> Tensor:
    heads, many, key, value = _heads(config)
    parts = (*qkv.split((heads * key, heads * key, heads * many * value)), z)
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 1)


def _write_joined(config: Any, w: Tensor) -> tuple[Tensor, ...]:
    heads, many, key, value = _heads(config)
    q, k, v, z = w.unflatten(0, (heads, -1)).split((key, key, many * value, many * value), 1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v)]), z.flatten(0, 1)


def _as_model(config: Any, rows: Tensor, size: int) -> Tensor:
    """Rows of the heads of values in the model's order, of those in the file's."""
    heads, many, _, _ = _heads(config)
    return rows.unflatten(0, (many, heads, size)).transpose(0, 1).flatten(0, 2)


def _as_file(config: Any, rows: Tensor, size: int) -> Tensor:
    heads, many, _, _ = _heads(config)
    return rows.unflatten(0, (heads, many, size)).transpose(0, 1).flatten(0, 2)


def _read_values(config: Any, rows: Tensor) -> Tensor:
    return _as_model(config, rows, config.linear_value_head_dim)


def _write_values(config: Any, rows: Tensor) -> Tensor:
    return _as_file(config, rows, config.linear_value_head_dim)


def _read_ones(config: Any, rows: Tensor) -> Tensor:
    return _as_model(config, rows, 1)


def _write_ones(config: Any, rows: Tensor) -> Tensor:
    return _as_file(config, rows, 1)


def _behind_keys(turn: Any) -> Any:
    def turned(config: Any, rows: Tensor) -> Tensor:
        heads, _, key, _ = _heads(config)
        keys, values = rows[: 2 * heads * key], rows[2 * heads * key :]
        return torch.cat((keys, turn(config, values)))

    return turned


OF_NEXT = (
    TensorTransform(
        "linear_attn.in_proj_qkvz.weight",
        ("attn_qkv.weight", "attn_gate.weight"),
        _read_joined,
        _write_joined,
        True,
    ),
    one("linear_attn.A_log", "ssm_a", lambda c, a: log(a), lambda c, a: exp(a)),
    convolution("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
)
_QKV, _QKV_BACK = _behind_keys(_read_values), _behind_keys(_write_values)
OF_QWEN35 = (
    one(
        "linear_attn.A_log",
        "ssm_a",
        lambda c, a: _read_ones(c, log(a)),
        lambda c, a: _write_ones(c, exp(a)),
    ),
    one("linear_attn.dt_bias", "ssm_dt.bias", _read_ones, _write_ones),
    one(
        "linear_attn.conv1d.weight",
        "ssm_conv1d.weight",
        lambda c, w: _QKV(c, w)[:, None],
        lambda c, w: _QKV_BACK(c, w[:, 0]),
    ),
    one("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", _QKV, _QKV_BACK, True),
    one("linear_attn.in_proj_z.weight", "attn_gate.weight", _read_values, _write_values, True),
    one("linear_attn.in_proj_a.weight", "ssm_alpha.weight", _read_ones, _write_ones, True),
    one("linear_attn.in_proj_b.weight", "ssm_beta.weight", _read_ones, _write_ones, True),
    one(
        "linear_attn.out_proj.weight",
        "ssm_out.weight",
        lambda c, w: _read_values(c, w.T).T,
        lambda c, w: _write_values(c, w.T).T,
    ),
)


def _kinds(said: Values, num_layers: int) -> list[str]:
    recurrent = said.get("attention.recurrent_layers")
    if recurrent is None:
        every = said.get("full_attention_interval", 4)
        recurrent = [(i + 1) % every != 0 for i in range(num_layers)]
    return ["linear_attention" if recurrent[i] else "full_attention" for i in range(num_layers)]


def _facts(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
    }


def with_sections(config: Any) -> dict[str, Any]:
    """Facts of Qwen3.5: parts of a head that are rotated by time, height and width, which are equal in a text."""
    sections = config.rope_parameters.get("mrope_section") or [11, 11, 10]
    return {**_facts(config), "rope.dimension_sections": [*sections, 0]}


def _complete(values: dict[str, Any]) -> None:
    size, heads = values.pop("inner_size"), values["linear_num_value_heads"]
    if type(size) is not int or type(heads) is not int or heads < 1 or size % heads:
        raise CheckpointError(f"ssm.inner_size is {size!r}, no multiple of ssm.time_step_rank {heads!r}")
    values["linear_value_head_dim"] = size // heads


NEXT = Gguf(
    "qwen3next",
    None,
    names={
        "post_attention_layernorm.": "post_attention_norm.",
        "linear_attn.in_proj_ba.": "ssm_ba.",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.norm.": "ssm_norm.",
        "linear_attn.out_proj.": "ssm_out.",
    },
    keys={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.inner_size": "inner_size",
        "attention.recurrent_layers": "",
        "full_attention_interval": "",
    },
    missing={"norm_topk_prob": True},
    needs=("rope.dimension_count",),
    is_partial=True,
    leaves_out_heads=True,
    fixed={"norm_topk_prob": True},
    turned=OF_NEXT,
    added=ADDED,
    kinds=_kinds,
    facts=_facts,
    complete=_complete,
)
