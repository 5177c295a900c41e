"""The layers of a decoder from its sizes, for the planner."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fmoe_ext.pipeline.plan import LayerPlan

# Our names, and those of configurations of Transformers, the first that is there counts.
NAMES = MappingProxyType(
    {
        "d_model": ("hidden_size",),
        "num_layers": ("num_hidden_layers",),
        "num_heads": ("num_attention_heads",),
        "d_hidden": ("moe_intermediate_size", "intermediate_size"),
        "vocabulary": ("vocab_size",),
        "num_kv_heads": ("num_key_value_heads",),
        "d_head": ("head_dim",),
        "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
        "top_k": ("num_experts_per_tok",),
    }
)

# What configurations say of layers that are not all alike, which Shape does not have: field, value without effect.
UNEQUAL_LAYERS = MappingProxyType(
    {
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "n_shared_experts": 0,
        "shared_expert_intermediate_size": 0,
        "kv_lora_rank": 0,
    }
)


@dataclass(frozen=True)
class Shape:
    """A decoder with gated MLPs: Llama, Mixtral, Qwen3-MoE, OLMoE, examples/lm."""

    d_model: int
    num_layers: int
    num_heads: int
    d_hidden: int  # of one expert
    vocabulary: int
    num_kv_heads: int = 0  # 0: as many as heads
    d_head: int = 0  # 0: d_model / num_heads
    num_experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        for name in ("d_model", "num_layers", "num_heads", "d_hidden", "vocabulary", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if not self.d_head and self.d_model % self.num_heads:
            raise ValueError(
                f"d_model {self.d_model} is no multiple of num_heads {self.num_heads}: give d_head if heads are not "
                "d_model / num_heads wide"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")

    def layers(self, length: int, element: int = 4) -> list[LayerPlan]:
        """Embedding, blocks, head, for sequences of so many tokens and numbers of so many bytes."""
        D, table = self.d_model, self.d_model * self.vocabulary * element
        head = LayerPlan(
            table, 0, length * (2 * D * element + 4 * self.vocabulary), 6 * length * D * self.vocabulary
        )
        return [LayerPlan(table, 0, 0, 0), *[self._block(length, element)] * self.num_layers, head]

    def _block(self, length: int, element: int) -> LayerPlan:
        D, K = self.d_model, self.top_k
        d_head = self.d_head or D // self.num_heads
        q, kv = self.num_heads * d_head, 2 * (self.num_kv_heads or self.num_heads) * d_head
        gate = D * self.num_experts if self.num_experts > 1 else 0
        dense = D * (q + kv) + q * D + 2 * D + gate
        expert = 3 * D * self.d_hidden
        # both norms and their results; q, k, v before and after the rotation, attention; gate and up projections
        kept = 4 * D + 3 * q + 2 * kv + K * 2 * self.d_hidden
        if gate:  # its logits, scores and choices
            kept += 3 * self.num_experts + 8 * K
        flops = 6 * length * (dense + K * expert) + 6 * length * length * q
        moved = K * D * length * element if self.num_experts > 1 else 0.0
        return LayerPlan(
            dense * element, self.num_experts * expert * element, length * kept * element, flops, moved
        )


def read_shape(model: str) -> Shape:
    """The sizes in a config.json of Transformers, or in a text "d_model=512,num_layers=8,...".

    Raises ValueError, naming what is missing or unknown.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    given = _from_config(path) if path.suffix == ".json" else _from_text(model)
    known = [field.name for field in fields(Shape)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"--model has no size {unknown[0]!r}: known are {', '.join(known)}")
    if missing := [name for name in known[:5] if name not in given]:
        raise ValueError(f"--model lacks {', '.join(missing)}")
    return Shape(**given)


def left_out(model: str) -> list[str]:
    """The fields of a config.json of which a Shape knows nothing, as "first_k_dense_replace 3"."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    config = _config(path) if path.suffix == ".json" else {}
    return [
        f"{name} {config[name]}"
        for name, none in UNEQUAL_LAYERS.items()
        if config.get(name, none) not in (none, None)
    ]


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--model: {path} does not exist") from None
    except ValueError as error:
        raise ValueError(f"--model: {path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model: {path} must hold an object, as config.json of Transformers does")
    return config


def _from_config(path: Path) -> dict[str, int]:
    config = _config(path)
    found = {ours: [config[name] for name in theirs if config.get(name)] for ours, theirs in NAMES.items()}
    if bad := [name for name, values in found.items() if values and not isinstance(values[0], int)]:
        raise ValueError(f"--model: {path} has no one number for {bad[0]}, but {found[bad[0]][0]!r}")
    return {ours: values[0] for ours, values in found.items() if values}


def _from_text(text: str) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    if bad := [
        part
        for part, (_, _, value) in zip(text.split(","), pairs, strict=True)
        if not value.strip().isdigit()
    ]:
        raise ValueError(f"--model takes a config.json or name=number,..., but got {bad[0]!r}")
    names = [name.strip() for name, _, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--model has {twice[0]} twice")
    return {name: int(value) for name, (_, _, value) in zip(names, pairs, strict=True)}
