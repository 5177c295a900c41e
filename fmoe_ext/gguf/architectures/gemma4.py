"""Gemma 4: a router before the experts' norm, a dense MLP beside the experts, and two kinds of attention layers.

Layers with full attention and with a sliding window have heads of other numbers and sizes, and other frequencies; keys
of the latter end in _swa. Transformers' configuration has the sliding layers' values, and per_layer_config for the full
ones. The last num_kv_shared_layers layers use the keys and values of an earlier layer. Full layers rotate a part of a
head only: rope_freqs.weight divides the other frequencies by 10^30.
"""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.gguf.architecture import Architecture, Fields, Shapes, Values
from fmoe_ext.gguf.transforms import TensorTransform, renamed

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PATTERN = "attention.sliding_window_pattern"
# of layers with full attention; with _swa: of the others
_KEY, _VALUE = "attention.key_length", "attention.value_length"
_SOFTCAP, _SHARED = "final_logit_softcapping", "attention.shared_kv_layers"
_UNROTATED = 1e30  # divides the frequency of what is not rotated
_OWN = MappingProxyType(
    {
        "attention.sliding_window": "sliding_window",
        _SHARED: "num_kv_shared_layers",
        "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "attention.key_length": "global_head_dim",
        "attention.key_length_swa": "head_dim",
        "rope.freq_base_swa": "rope_theta_swa",
        _SOFTCAP: _SOFTCAP,
    }
)


class Gemma4(Architecture):
    name = "gemma4"
    model_type = "gemma4_text"
    has_factors = True
    keys = _OWN
    read = (
        _PATTERN,
        "attention.value_length",
        "attention.value_length_swa",
        "rope.dimension_count",
        "rope.dimension_count_swa",
    )
    needs = tuple(key for key in (*_OWN, _PATTERN) if key not in (_SOFTCAP, _SHARED))
    defaults = MappingProxyType(
        {
            "enable_moe_block": True,
            "num_kv_shared_layers": 0,
            _SOFTCAP: 30.0,  # llama.cpp's, whose graph takes 0 for none
        }
    )
    fixed = MappingProxyType({"enable_moe_block": True, "hidden_activation": "gelu_pytorch_tanh"})

    def config(self, fields: Fields, shapes: Shapes, factors: Tensor | None) -> Values:
        values = super().config(fields, shapes, factors)
        for kind in ("", "_swa"):  # the configuration has one size for keys and values
            keys, of_values = fields.get(f"{_KEY}{kind}"), fields.get(f"{_VALUE}{kind}")
            if of_values is not None and keys != of_values:
                raise CheckpointError(
                    f"{self.name}.{_KEY}{kind} is {keys!r}, but {self.name}.{_VALUE}{kind} is {of_values!r}"
                )
        # What layers with full attention have otherwise: head size and number of key heads
        kinds, num_layers = values["layer_types"], values["num_hidden_layers"]
        said = values["num_key_value_heads"]
        own = {"head_dim": values.pop("global_head_dim"), "num_key_value_heads": _heads(said, kinds, _FULL)}
        # first: the first layer that shares keys and values; such layers may have an MLP of twice the width
        first = num_layers - values["num_kv_shared_layers"]
        widths = [shapes.get(f"blk.{i}.ffn_up.weight", (0,))[0] for i in (0, num_layers - 1)]
        if factors is None:
            raise CheckpointError("the file lacks rope_freqs.weight")
        rope, theta = values["rope_parameters"], values.pop("rope_theta_swa")
        if "rope_type" in rope:
            raise CheckpointError(f"{self.name}.rope.scaling.factor and its type are not computed here")
        # the part of a head whose frequencies are not divided away
        rotated = int((factors == 1).sum()) / max(1, len(factors))
        return {
            **values,
            "num_key_value_heads": _heads(said, kinds, _SLIDING),
            "per_layer_config": {i: own for i, kind in enumerate(kinds) if kind == _FULL},
            "attention_k_eq_v": any(
                kind == _FULL and f"blk.{i}.attn_v.weight" not in shapes
                for i, kind in enumerate(kinds[:first])
            ),
            "use_double_wide_mlp": widths[1] == 2 * widths[0],
            "vocab_size_per_layer_input": values["vocab_size"],
            _SOFTCAP: values[_SOFTCAP] or None,
            "rope_parameters": {
                _FULL: {"rope_type": "proportional", "partial_rotary_factor": rotated, **rope},
                _SLIDING: {"rope_type": "default", "rope_theta": theta},
            },
        }

    def layer_types(self, fields: Fields, num_layers: int) -> list[str]:
        windows = fields[_PATTERN]
        if not isinstance(windows, list):
            raise TypeError(f"{self.name}.{_PATTERN} is {windows!r}, expected a list")
        return [_SLIDING if windows[i] else _FULL for i in range(num_layers)]

    def fields(self, config: Any) -> dict[str, Any]:
        layers = range(config.num_hidden_layers)
        first = config.num_hidden_layers - config.num_kv_shared_layers
        heads = [config.per_layer_config[i].num_key_value_heads for i in layers]
        full, sliding = _head_dim(config, _FULL), _head_dim(config, _SLIDING)
        found = {
            **super().fields(config),
            "attention.key_length": full,
            "attention.value_length": full,
            "rope.dimension_count": full,
            "attention.key_length_swa": sliding,
            "attention.value_length_swa": sliding,
            "rope.dimension_count_swa": sliding,
            "rope.freq_base_swa": float(config.rope_parameters[_SLIDING]["rope_theta"]),
            "attention.head_count_kv": heads[0] if len({*heads}) == 1 else heads,
            _SHARED: config.num_kv_shared_layers,
            "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
            _PATTERN: [kind == _SLIDING for kind in config.layer_types],
            _SOFTCAP: float(config.final_logit_softcapping or 0),
        }
        if config.use_double_wide_mlp and first < config.num_hidden_layers:
            width = config.intermediate_size
            found["feed_forward_length"] = [width * (2 if i >= first > 0 else 1) for i in layers]
        return found

    def rope_factors(self, config: Any) -> Tensor:
        full = config.rope_parameters[_FULL]
        # [head_dim / 2]: a factor for each frequency
        part = full.get("partial_rotary_factor", 1.0) if full["rope_type"] == "proportional" else 1.0
        head_dim = _head_dim(config, _FULL)
        factors = torch.ones(head_dim // 2, device="cpu")
        factors[int(part * head_dim // 2) :] = _UNROTATED
        return factors

    def refused(self, config: Any) -> dict[str, bool]:
        rope, kinds = config.rope_parameters, config.layer_types
        first = config.num_hidden_layers - config.num_kv_shared_layers
        # llama.cpp shares the keys of the last layer that has its own; with a window, of the layer before that
        shared = {kind: first - (2 if kind == _SLIDING else 1) for kind in kinds[first:]}
        full, sliding = rope.get(_FULL, {}), rope.get(_SLIDING, {})
        return {
            **super().refused(config),
            "rope_parameters": full.get("rope_type") not in ("default", "proportional")
            or full.get("factor", 1.0) != 1
            or sliding.get("rope_type") != "default",
            "num_kv_shared_layers": any(
                i < 0 or kinds[i] != kind or kind in kinds[i + 1 : first] for kind, i in shared.items()
            ),
            "use_bidirectional_attention": config.use_bidirectional_attention == "all",
            "vocab_size_per_layer_input": bool(config.hidden_size_per_layer_input)
            and config.vocab_size_per_layer_input != config.vocab_size,
        }

    def transforms(self, config: Any) -> dict[str, TensorTransform]:
        return {
            **super().transforms(config),
            "router.scale": renamed("ffn_gate_inp.scale"),
            "router.per_expert_scale": renamed("ffn_down_exps.scale"),
            "layer_scalar": renamed("layer_output_scale.weight"),
        }


def _heads(said: Any, kinds: list[str], kind: str) -> int:
    """Return the number of key heads in layers of a kind; CheckpointError if they differ."""
    found = said if isinstance(said, list) else [said] * len(kinds)
    if len(found) < len(kinds) or any(type(heads) is not int for heads in found):
        raise CheckpointError(f"attention.head_count_kv is {said!r}, expected {len(kinds)} numbers of heads")
    own = {heads for heads, other in zip(found, kinds, strict=False) if other == kind}
    if len(own) > 1:
        raise CheckpointError(f"attention.head_count_kv has {sorted(own)} heads in layers of {kind}")
    return int(own.pop() if own else found[0])


def _head_dim(config: Any, kind: str) -> int:
    """Return the size of a head in layers of a kind, or in the first layer if none is."""
    layers = [i for i, other in enumerate(config.layer_types) if other == kind] or [0]
    return int(config.per_layer_config[layers[0]].head_dim)
