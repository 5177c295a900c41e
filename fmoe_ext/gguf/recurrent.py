"""Read and write layers that are no attention (Mamba-2, delta nets, short convolutions), for classes in architectures/.

A file marks such a layer by 0 key heads; Transformers' layer_types names its kind. Then there are sizes of heads from
ssm.inner_size, the width of all heads of a layer together, and the tensors of Mamba-2.
"""

from typing import Any

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.gguf.architecture import Fields, Values
from fmoe_ext.gguf.transforms import TensorTransform, convolution, exp, log, one, renamed

KEY_HEADS = "attention.head_count_kv"


def kinds_of(fields: Fields, num_layers: int, recurrent: str) -> list[str]:
    """Return layer_types for a file: the name `recurrent` for layers with 0 key heads, else "full_attention".

    Raises CheckpointError for fewer entries than layers.
    """
    heads = fields.get(KEY_HEADS)
    heads = heads if isinstance(heads, list) else [heads] * num_layers
    if len(heads) < num_layers:
        raise CheckpointError(f"{KEY_HEADS} has {len(heads)} entries for {num_layers} layers")
    return [recurrent if heads[i] == 0 else "full_attention" for i in range(num_layers)]


def heads_of(config: Any) -> list[int]:
    """Return the number of key heads of each layer, 0 for layers without attention."""
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def one_number(name: str, values: Values) -> Values:
    """Make num_key_value_heads one number from a list for all layers; CheckpointError if attention layers differ."""
    key, said, num_layers = f"{name}.{KEY_HEADS}", values["num_key_value_heads"], values["num_hidden_layers"]
    found = said if isinstance(said, list) else [said]
    if any(type(heads) is not int for heads in found):
        raise CheckpointError(f"{key} is {said!r}, no number of heads")
    different = sorted({heads for heads in found[:num_layers] if heads})
    if len(different) > 1:
        raise CheckpointError(f"{key} has {different} heads in layers of attention, expected one number")
    heads = different[0] if different else values["num_attention_heads"]
    return {**values, "num_key_value_heads": heads}


def head_size(name: str, inner: Any, heads: Any) -> int:
    """Divide ssm.inner_size by the number of heads; CheckpointError if that is no whole number."""
    if any(type(n) is not int or n < 1 for n in (inner, heads)) or inner % heads:
        raise CheckpointError(
            f"{name}.ssm.inner_size is {inner!r}, no multiple of ssm.time_step_rank {heads!r}"
        )
    return inner // heads


def of_mamba(prefix: str, num_groups: int) -> dict[str, TensorTransform]:
    """Return the transforms of a Mamba-2 layer. num_groups: groups of its norm, rows of ssm_norm in the file."""
    return {
        f"{prefix}conv1d.weight": convolution("ssm_conv1d.weight"),
        f"{prefix}dt_bias": renamed("ssm_dt.bias"),
        f"{prefix}A_log": one("ssm_a", lambda a: log(a)[:, 0], lambda a: exp(a)[:, None]),
        f"{prefix}D": one("ssm_d", lambda d: d[:, 0], lambda d: d[:, None]),
        f"{prefix}norm.weight": one(
            "ssm_norm.weight", lambda w: w.flatten(), lambda w: w.unflatten(0, (num_groups, -1))
        ),
    }
