"""The layers of a decoder by the parameters of its Transformers model on the meta device, for the planner."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fmoe_ext.pipeline.plan import LayerPlan

CHOICES = (
    *("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k"),
    "top_k",
)
EXPERTS = re.compile(r"(?:^|\.)experts\.")


@dataclass(frozen=True)
class Counted:
    """Parameters of a decoder: of each layer, outside of experts and of all experts; of the head; of all the rest.

    widths: numbers of the queries, and of the keys and values together, of each layer. A tied head counts as rest.
    """

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    head: int
    rest: int
    d_model: int
    vocabulary: int
    num_experts: int
    top_k: int

    def layers(self, length: int, element: int = 4) -> list[LayerPlan]:
        """As Shape.layers(); each layer by its own sizes."""
        D = self.d_model
        head = LayerPlan(
            self.head * element,
            0,
            length * (2 * D * element + 4 * self.vocabulary),
            6 * length * D * self.vocabulary,
        )
        blocks = [self._block(i, length, element) for i in range(len(self.dense))]
        return [LayerPlan(self.rest * element, 0, 0, 0), *blocks, head]

    def _block(self, i: int, length: int, element: int) -> LayerPlan:
        D, K, (q, kv) = self.d_model, self.top_k, self.widths[i]
        active = self.experts[i] * K / self.num_experts
        # both norms and their results; q, k, v before and after the rotation, attention; gate and up projections
        kept = 4 * D + 3 * q + 2 * kv + (active or self.dense[i] / 3) * 2 / (3 * D)
        if active:  # its logits, scores and choices
            kept += 3 * self.num_experts + 8 * K
        flops = 6 * length * (self.dense[i] + active) + 6 * length * length * q
        moved = K * D * length * element if active else 0.0
        return LayerPlan(
            self.dense[i] * element, self.experts[i] * element, length * kept * element, flops, moved
        )


def count(model: str) -> Counted | None:
    """The counts for a config.json of Transformers; None for other texts and for types that Transformers lacks."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    if path.suffix != ".json" or not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        import transformers
    except (ValueError, ModuleNotFoundError):
        return None
    if not isinstance(values, dict) or values.get("model_type") not in transformers.CONFIG_MAPPING:
        return None
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = "eager"  # loads no kernels of a hub
    classes: Any = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    makes = [auto.from_config for auto in classes if type(config) in auto._model_mapping]
    named = getattr(transformers, (values.get("architectures") or [""])[0], None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        makes.insert(0, named)
    if not makes:
        return None
    with torch.device("meta"):
        return counted(makes[0](config))


def counted(model: Any) -> Counted:
    """The counts for a model of Transformers; ValueError if it has no layers, or does not say its choices."""
    text = model.config.get_text_config()
    stacks = [
        m for n, m in model.named_modules() if n.rpartition(".")[2] == "layers" and len([*m.children()])
    ]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    layers = [*max(stacks, key=lambda stack: (_experts_of(stack), _size(stack))).children()]
    head = model.get_output_embeddings()
    of_head = 0 if head is None or head.weight is model.get_input_embeddings().weight else _size(head)
    experts = tuple(map(_experts_of, layers))
    num_experts = max(
        (
            p.shape[0]
            for layer in layers
            for n, p in layer.named_parameters()
            if EXPERTS.search(n) and p.dim() == 3
        ),
        default=1,
    )
    top_k = next((v for name in CHOICES if isinstance(v := getattr(text, name, None), int) and v > 0), None)
    if top_k is None and any(experts):
        raise ValueError(
            f"{type(text).__name__} does not say how many experts a token has: {', '.join(CHOICES)}"
        )
    sizes = [_size(layer) for layer in layers]
    rest = _size(model) - sum(sizes) - of_head
    dense = tuple(size - part for size, part in zip(sizes, experts, strict=True))
    widths = tuple(map(_widths, layers))
    return Counted(
        dense, experts, widths, of_head, rest, text.hidden_size, text.vocab_size, num_experts, top_k or 1
    )


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _experts_of(module: nn.Module) -> int:
    return sum(p.numel() for n, p in module.named_parameters() if EXPERTS.search(n))


def _widths(layer: nn.Module) -> tuple[int, int]:
    """Width of all queries, and of all keys and values, by the projections of a layer's attention; 0 without."""
    found: dict[str, int] = {}
    for name, p in layer.named_parameters():
        leaf = name.split(".")[-2] if "." in name else name
        if p.dim() == 2 and leaf in ("q_proj", "k_proj", "v_proj"):
            found[leaf] = p.shape[0]
        elif p.dim() == 2 and leaf == "o_proj":
            found.setdefault("q_proj", p.shape[1])
    return found.get("q_proj", 0), found.get("k_proj", 0) + found.get("v_proj", found.get("k_proj", 0))
