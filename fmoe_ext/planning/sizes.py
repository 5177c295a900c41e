"""Count the layers of a decoder for `fmoe pipeline plan` and `fmoe info`: of a Transformers model, or from numbers.

A config.json of a type that Transformers has is counted: its model is made on the meta device, so that each
layer has its own sizes, whatever the family. What cannot be counted (sizes on the command line, a type that
Transformers lacks, Transformers not installed) is computed from a few numbers, all layers alike (Shape). Both give
Sizes, whose layers() gives what the planner adds up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import read_json
from fmoe_ext.checkpoint.model_folder import MAX_LAYERS, errors_of_transformers, local_path
from fmoe_ext.model_files import open_config
from fmoe_ext.planning.layouts import LayerPlan

# Our names, and the keys of Transformers' configurations, of which the first that is there counts.
_NAMES = MappingProxyType(
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
# Keys for what Shape does not have (layers that differ, shared experts, latent attention): value without effect.
_UNEQUAL_LAYERS = MappingProxyType(
    {
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "n_shared_experts": 0,
        "shared_expert_intermediate_size": 0,
        "kv_lora_rank": 0,
    }
)
# Keys of Transformers' configurations for the number of experts that a token chooses.
_CHOICES = (
    *("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token", "moe_top_k"),
    "top_k",
)
_EXPERTS = re.compile(r"(?:^|\.)experts\.")


@dataclass(frozen=True)
class Block:
    """One layer of a decoder, in numbers, not bytes."""

    dense: int  # parameters outside of experts
    experts: int  # parameters of all experts
    active: float  # parameters of the experts that a token meets
    q: int  # width of all queries
    kv: int  # width of all keys and values together
    hidden: float  # gate and up projections of a token, which the backward needs
    is_routed: bool  # has a gate, so that tokens travel to experts


@dataclass(frozen=True)
class Sizes:
    """A decoder, in numbers, not bytes."""

    blocks: Sequence[Block]
    head: int  # parameters of the head; 0 where it is the embedding
    rest: int  # parameters before the blocks: the embedding and all that is in no block
    d_model: int
    vocabulary: int
    num_experts: int
    top_k: int

    def layers(self, length: int, element: int = 4) -> list[LayerPlan]:
        """List embedding, blocks and head, for sequences of `length` tokens and numbers of `element` bytes."""
        D, K, E = self.d_model, self.top_k, self.num_experts
        layers = [LayerPlan(self.rest * element, 0, 0, 0)]
        for block in self.blocks:
            # both norms and their results; q, k, v before and after the rotation, attention; gate and up projections
            kept = 4 * D + 3 * block.q + 2 * block.kv + block.hidden
            if block.is_routed:  # its logits, scores and choices
                kept += 3 * E + 8 * K
            layers.append(
                LayerPlan(
                    block.dense * element,
                    block.experts * element,
                    length * kept * element,
                    # 2 FLOP a multiplication, in the forward and in both products of the backward: 6 a parameter.
                    # Attention's two products have 12 L L q, half of them under a causal mask.
                    6 * length * (block.dense + block.active) + 6 * length * length * block.q,
                    K * D * length * element if block.is_routed else 0.0,
                )
            )
        logits = 4 * self.vocabulary  # in float32
        head_flops = 6 * length * D * self.vocabulary
        layers.append(LayerPlan(self.head * element, 0, length * (2 * D * element + logits), head_flops))
        return layers


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
        for name in ("num_kv_heads", "d_head"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers must be at most {MAX_LAYERS}, but is {self.num_layers}")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")

    def sizes(self) -> Sizes:
        """Compute the sizes of the decoder with these numbers; a dense MLP counts as its one expert."""
        D, K, E = self.d_model, self.top_k, self.num_experts
        d_head = self.d_head or D // self.num_heads
        q, kv = self.num_heads * d_head, 2 * (self.num_kv_heads or self.num_heads) * d_head
        dense = D * (q + kv) + q * D + 2 * D + (D * E if E > 1 else 0)
        expert = 3 * D * self.d_hidden
        block = Block(dense, E * expert, K * expert, q, kv, K * 2 * self.d_hidden, E > 1)
        table = D * self.vocabulary
        return Sizes([block] * self.num_layers, table, table, D, self.vocabulary, E, K)


def sizes_of(model: str) -> tuple[Sizes, list[str]]:
    """Find (sizes, what they leave out) of a model that open_config() reads, or of "d_model=512,num_layers=8,...".

    Raises ValueError, naming what is missing, unknown or cannot be.
    """
    # 1. A text of numbers: whatever is no path of a configuration.
    try:
        path = local_path(model, ("config.json",))
    except CheckpointError as error:
        raise ValueError(f"--model: {error}") from error
    if path.is_dir():
        path = path / "config.json"
    if path.suffix not in (".json", ".gguf"):
        parts = model.split(",")
        pairs = [part.partition("=") for part in parts]
        if bad := [p for p, (_, _, n) in zip(parts, pairs, strict=True) if not n.strip().isdigit()]:
            raise ValueError(f"--model takes a config.json or name=number,..., but got {bad[0]!r}")
        names = [name.strip() for name, _, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"--model has {twice[0]} twice")
        return _shape({name: int(n) for name, (_, _, n) in zip(names, pairs, strict=True)}).sizes(), []
    # 2. A configuration that Transformers makes a model of.
    try:
        config = read_json(path) if path.suffix == ".json" else {}
        if (made := _on_meta(path, config)) is not None:
            return counted(made), []
    except CheckpointError as error:
        raise ValueError(f"--model: {error}") from error
    # 3. Another configuration: by its numbers, all layers alike.
    found = {ours: [config[n] for n in theirs if config.get(n)] for ours, theirs in _NAMES.items()}
    if wrong := [name for name, values in found.items() if values and not isinstance(values[0], int)]:
        # some families give a list here, a size a layer
        raise ValueError(f"--model: {path} has no one number for {wrong[0]}, but {found[wrong[0]][0]!r}")
    shape = _shape({ours: values[0] for ours, values in found.items() if values})
    unequal = [
        f"{name} {config[name]}"
        for name, none in _UNEQUAL_LAYERS.items()
        if config.get(name, none) not in (none, None)
    ]
    return shape.sizes(), unequal


def _shape(given: Mapping[str, int]) -> Shape:
    known = [field.name for field in fields(Shape)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"--model has no size {unknown[0]!r}: known are {', '.join(known)}")
    if missing := [name for name in known[:5] if name not in given]:
        raise ValueError(f"--model lacks {', '.join(missing)}")
    return Shape(**given)


def _on_meta(path: Path, config_json: Mapping[str, Any]) -> Any:
    """Make the model of a configuration on the meta device; None if Transformers is not there or makes none of it."""
    try:
        import transformers
    except ModuleNotFoundError:
        return None
    # a GGUF file needs no check: what open_config() reads has one of Transformers' types
    if path.suffix != ".gguf" and config_json.get("model_type") not in list(transformers.CONFIG_MAPPING):
        return None
    config = open_config(path)
    with errors_of_transformers(path.parent, path.name), torch.device("meta"):
        config._attn_implementation = config._experts_implementation = "eager"  # loads no kernels of a hub
        classes: Any = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        makes = [auto.from_config for auto in classes if type(config) in auto._model_mapping]
        named = getattr(transformers, (config.architectures or [""])[0], None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            makes.insert(0, named)
        return makes[0](config) if makes else None


def counted(model: Any) -> Sizes:
    """Count the sizes of a model of Transformers; ValueError without layers, or without the number of choices."""
    text = model.config.get_text_config()
    # The decoder is the stack of layers with most parameters in experts, as against an encoder of images.
    stacks = [
        m for n, m in model.named_modules() if n.rpartition(".")[2] == "layers" and len([*m.children()])
    ]
    if not stacks:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    layers = [*max(stacks, key=lambda stack: (_experts_of(stack), _size(stack))).children()]
    head = model.get_output_embeddings()
    of_head = 0 if head is None or head.weight is model.get_input_embeddings().weight else _size(head)
    parameters = [named for layer in layers for named in layer.named_parameters()]
    num_experts = max((p.shape[0] for n, p in parameters if _EXPERTS.search(n) and p.dim() == 3), default=1)
    # Hunyuan lists a number for each layer
    said = [getattr(text, name, None) for name in _CHOICES]
    numbers = [v[0] if isinstance(v, list) and len(set(v)) == 1 else v for v in said]
    top_k = next((v for v in numbers if isinstance(v, int) and v > 0), None)
    if top_k is None and any(map(_experts_of, layers)):
        raise ValueError(
            f"{type(text).__name__} does not say how many experts a token has: {', '.join(_CHOICES)}"
        )
    D, K, blocks = text.hidden_size, top_k or 1, []
    for layer in layers:
        of_experts = _experts_of(layer)
        dense, active = _size(layer) - of_experts, of_experts * K / num_experts
        widths: dict[str, int] = {}  # of the projections of attention
        of_mlp = 0  # width of gate and up outside of experts: of a dense or a shared MLP
        for name, p in layer.named_parameters():
            leaf = name.split(".")[-2] if "." in name else name
            if p.dim() == 2 and leaf in ("q_proj", "k_proj", "v_proj"):
                widths[leaf] = p.shape[0]
            elif p.dim() == 2 and leaf == "o_proj":
                widths.setdefault(
                    "q_proj", p.shape[1]
                )  # where queries come from no q_proj (latent attention)
            elif (
                p.dim() == 2
                and leaf in ("gate_proj", "up_proj", "gate_up_proj")
                and not _EXPERTS.search(name)
            ):
                of_mlp += p.shape[0]
        q, k = widths.get("q_proj", 0), widths.get("k_proj", 0)
        kv = k + widths.get("v_proj", k)  # values may be the keys
        # gate and up are two of the three matrices of a gated MLP; without these names the MLP is taken for two thirds
        hidden = (active * 2 / (3 * D) + of_mlp) or dense * 4 / (9 * D)
        blocks.append(Block(dense, of_experts, active, q, kv, hidden, bool(active)))
    rest = _size(model) - sum(map(_size, layers)) - of_head
    return Sizes(blocks, of_head, rest, D, text.vocab_size, num_experts, K)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _experts_of(module: nn.Module) -> int:
    return sum(p.numel() for n, p in module.named_parameters() if _EXPERTS.search(n))
