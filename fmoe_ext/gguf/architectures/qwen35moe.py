"""Qwen3.5 and 3.6: gated delta nets whose file counts the heads of values through the heads of keys first."""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.gguf.architectures.qwen3next import Qwen3Next, heads_of
from fmoe_ext.gguf.transforms import TensorTransform, exp, log, one

_SECTIONS = "rope.dimension_sections"  # of a head, by time, height and width, which are equal in a text


class Qwen35Moe(Qwen3Next):
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

        def read(rows: Tensor, size: int = heads.value) -> Tensor:
            return rows.unflatten(0, (heads.values, heads.keys, size)).transpose(0, 1).flatten(0, 2)

        def write(rows: Tensor, size: int = heads.value) -> Tensor:
            return rows.unflatten(0, (heads.keys, heads.values, size)).transpose(0, 1).flatten(0, 2)

        def read_behind_keys(rows: Tensor) -> Tensor:
            return torch.cat((rows[:num_keys], read(rows[num_keys:])))

        def write_behind_keys(rows: Tensor) -> Tensor:
            return torch.cat((rows[:num_keys], write(rows[num_keys:])))

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
