"""fmoe.megatron.balance and fmoe.balance: figures of the load of each layer, for Megatron's TensorBoard writer.

The profile is one for the process, as in FastMoE: {figure: [value of each layer]}. reset_gate_hook(number of layers)
makes it, each layer's gate_hook writes its values, add_balance_log() averages them over the ranks that have the layer
and empties it. A new program takes fmoe_ext.balance, which has more figures.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmoe_ext import ops
from fmoe_ext.compat.megatron.runtime import get_args, get_mpu
from fmoe_ext.ep.process_groups import gather_values

metrics = MappingProxyType(
    {
        "coefficient-variation": lambda c_e: c_e.std() / c_e.mean(),
        "Lmax-over-Lmin": lambda c_e: (c_e.max() + 1) / (c_e.min() + 1),  # an expert may have none
        "Lmax-over-Lmean": lambda c_e: c_e.max() / c_e.mean(),
    }
)


class _Profile:
    """The figures of this process: figures[name of a metric][layer], None before the layer has run."""

    def __init__(self) -> None:
        self.figures: dict[str, list] = {}
        self.num_layers = 0


_PROFILE = _Profile()
balance_dict = _PROFILE.figures  # FastMoE's name of it


# FastMoE has a variable num_layers here: a module cannot bind a name to a field of _PROFILE
def __getattr__(name: str) -> int:
    if name == "num_layers":
        return _PROFILE.num_layers
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def reset_balance_profile(
    balance_dict: dict[str, list], num_layers: int, balance_strategy: str | None
) -> None:
    """Put a list of num_layers None under each name of metrics and, for a strategy, under "<strategy>_loss"."""
    for key in metrics:
        balance_dict[key] = [None] * num_layers
    if balance_strategy:
        balance_dict[f"{balance_strategy}_loss"] = [None] * num_layers


def update_balance_profile(
    balance_dict: dict[str, list],
    gate_top_k_idx: Tensor,
    _gate_score_top_k: Tensor,
    gate_context: Any,
    layer_idx: int,
    num_expert: int,
    balance_strategy: str | None,
) -> None:
    """Set the entries of a layer from its choices [T, K]; the loss is gate_context, if it is not None.

    FastMoE leaves this function empty, for users to fill.
    """
    load = ops.count_tokens(gate_top_k_idx.reshape(-1, 1), num_expert).float()
    for key, metric in metrics.items():
        balance_dict[key][layer_idx] = metric(load)
    if balance_strategy and gate_context is not None:
        balance_dict[f"{balance_strategy}_loss"][layer_idx] = gate_context


def reset_gate_hook(_num_layers: int | None = None) -> None:
    """Empty the profile; _num_layers: the number of MoE layers, once."""
    if _num_layers is not None:
        _PROFILE.num_layers = _num_layers
    reset_balance_profile(_PROFILE.figures, _PROFILE.num_layers, _balance_strategy())


def get_balance_profile() -> dict[str, list]:
    """Return the profile: {figure: [value of each layer]}."""
    return _PROFILE.figures


def generate_megatron_gate_hook(layer_idx: int, num_expert_global: int) -> Callable[..., None]:
    """Return the gate_hook that keeps the profile of a layer; it does nothing before reset_gate_hook()."""

    def gate_hook(gate_top_k_idx: Tensor, gate_score_top_k: Tensor, gate_context: Any) -> None:
        if layer_idx < _PROFILE.num_layers:
            update_balance_profile(
                _PROFILE.figures,
                gate_top_k_idx,
                gate_score_top_k,
                gate_context,
                layer_idx,
                num_expert_global,
                _balance_strategy(),
            )

    return gate_hook


def add_balance_log(model: Any, writer: Any, iteration: int) -> None:
    """Write the profile, averaged over the ranks, as "balance-<figure>/layer-<i>" and "/all", and empty it.

    writer: a TensorBoard writer, None on ranks that do not write; all ranks call it. Figures without a value are left
    out. Layers are numbered through the pipeline stages, whose profiles each begin at 0.
    """
    figures: dict[str, dict[int, float]] = {}  # {figure: {layer: value}} of this rank
    for name, values in _PROFILE.figures.items():
        known = [(layer, value) for layer, value in enumerate(values) if value is not None]
        if known:
            tensors = [v if isinstance(v, Tensor) else torch.tensor(v, device="cpu") for _, v in known]
            of_layers = torch.stack([x.detach().float().reshape(()) for x in tensors])
            figures[name] = dict(zip((layer for layer, _ in known), of_layers.tolist(), strict=True))
    ranks = [(0, _PROFILE.num_layers, figures)]
    if dist.is_initialized():
        try:
            stage = get_mpu().get_pipeline_model_parallel_rank()
        except RuntimeError:  # a program without Megatron-LM
            stage = 0
        ranks = gather_values((stage, _PROFILE.num_layers, figures), None)
    reset_gate_hook()
    if writer is None:
        return
    num_layers = {stage: number for stage, number, _ in ranks}
    means: dict[str, dict[int, list[float]]] = {}  # {figure: {layer of all stages: values of the ranks}}
    for stage, _, of_rank in ranks:
        first = sum(number for other, number in num_layers.items() if other < stage)
        for name, by_layer in of_rank.items():
            for layer, value in by_layer.items():
                means.setdefault(name, {}).setdefault(first + layer, []).append(value)
    for name, of_ranks in means.items():
        averages = {layer: fmean(values) for layer, values in sorted(of_ranks.items())}
        for layer, average in averages.items():
            writer.add_scalar(f"balance-{name}/layer-{layer}", average, iteration)
        writer.add_scalar(f"balance-{name}/all", fmean(averages.values()), iteration)


def _balance_strategy() -> str | None:
    """Return args.balance_strategy of Megatron-LM, None without it or without Megatron-LM."""
    try:
        return getattr(get_args(), "balance_strategy", None)
    except RuntimeError:
        return None
