"""Architectures of GGUF some of whose layers are no attention: their heads of keys are 0 there."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.families.family import TensorTransform, Values

HEADS = "attention.head_count_kv"


def kinds(said: Values, num_layers: int, recurrent: str) -> list[str]:
    """layer_types of a file: `recurrent` where it has no heads of keys."""
    heads = said.get(HEADS)
    heads = heads if isinstance(heads, list) else [heads] * num_layers
    return [recurrent if heads[i] == 0 else "full_attention" for i in range(num_layers)]


def heads_of(config: Any) -> list[int]:
    """attention.head_count_kv of a configuration."""
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]


def complete_heads(values: dict[str, Any]) -> None:
    """Makes num_key_value_heads of the heads of each layer; CheckpointError for layers of attention that differ."""
    said = values.get("num_key_value_heads")
    found = said if isinstance(said, list) else [said]
    if any(type(heads) is not int for heads in found):
        raise CheckpointError(f"{HEADS} is {said!r}, no number of heads")
    if isinstance(said, list) and len(said) < values["num_hidden_layers"]:
        raise CheckpointError(f"{HEADS} has {len(said)} entries for {values['num_hidden_layers']} layers")
    different = sorted({heads for heads in found[: values["num_hidden_layers"]] if heads})
    if len(different) > 1:
        raise CheckpointError(f"{HEADS} has {different} heads in layers of attention, expected one number")
    values["num_key_value_heads"] = different[0] if different else values["num_attention_heads"]


def of_mamba(prefix: str, groups: Callable[[Any], int]) -> tuple[TensorTransform, ...]:
    """Tensors of Mamba-2 layers; groups: of a configuration, each with a norm of its own."""
    return (
        convolution(f"{prefix}conv1d.weight", "ssm_conv1d.weight"),
        one(f"{prefix}A_log", "ssm_a", lambda config, a: log(a)[:, 0], lambda config, a: exp(a)[:, None]),
        one(f"{prefix}D", "ssm_d", lambda config, d: d[:, 0], lambda config, d: d[:, None]),
        one(
            f"{prefix}norm.weight",
            "ssm_norm.weight",
            lambda config, w: w.flatten(),
            lambda config, w: w.unflatten(0, (groups(config), -1)),
        ),
    )


def log(a: Tensor) -> Tensor:
    """A_log of the decays that a file has."""
    return (-a).log()


def exp(a: Tensor) -> Tensor:
    """Decays of a file of A_log."""
    return -a.double().exp().to(a.dtype)


def one(theirs: str, ours: str, read: Any, write: Any, has_rows: bool = False) -> TensorTransform:
    """A tensor that is one tensor in the file."""
    return TensorTransform(theirs, (ours,), read, lambda config, w: (write(config, w),), has_rows)


def convolution(theirs: str, ours: str) -> TensorTransform:
    """Weights [channels, 1, taps] that are [channels, taps] in the file."""
    return one(theirs, ours, lambda config, w: w[:, None], lambda config, w: w[:, 0])
