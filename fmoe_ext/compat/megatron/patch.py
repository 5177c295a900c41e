"""fmoe.megatron.patch: wrap Megatron-LM's model provider, forward step and loss function, for v2.2 to v3.0.2.

patch_model_provider() gives the model MoE layers. The others add balance_loss_weight * (mean of the layers' balance
losses) to the loss. With pipeline parallelism each stage adds the part of its own layers, but in v2.2, as in FastMoE,
only the last stage does: layers of other stages train without a balance loss. v2.2's schedule takes no loss from them,
and fp16's loss scale, which a gradient of it would need, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext.compat.megatron.runtime import get_args, get_mpu, stacks
from fmoe_ext.models.fmoefy import fmoefy

_VERSIONS = ("v2.2", "v2.5", "v3.0.2")


def patch_model_provider(
    model_provider: Callable, gate: Any = None, Megatron_Version: str = "v2.2"
) -> Callable:
    """Wrap a model provider so that its models have MoE layers, built from get_args().

    Megatron_Version: "v2.2" for model_provider(), "v2.5" and "v3.0.2" for model_provider(pre_process, post_process).
    Experts have 4 * hidden_size / top_k hidden units. Raises ValueError for another version.
    """
    _check(Megatron_Version)

    def fmoefied_model_provider(*args: Any, **kwargs: Any) -> Any:
        # hidden units of a dense MLP, shared among a token's experts
        options = get_args()
        if 4 * options.hidden_size % options.top_k:
            raise ValueError(
                f"4 * hidden_size = {4 * options.hidden_size} must be a multiple of top_k, but top_k is {options.top_k}"
            )
        return fmoefy(
            model_provider(*args, **kwargs),
            hidden_hidden_size=4 * options.hidden_size // options.top_k,
            gate=gate,
            megatron_version=Megatron_Version,
        )

    return fmoefied_model_provider


def patch_forward_step(forward_step_func: Callable, Megatron_Version: str = "v2.2") -> Callable:
    """Wrap a forward_step_func to add balance_loss_weight * (mean balance loss of the layers) to the loss.

    "v2.2": forward_step_func(data_iterator, model, input_tensor) returns (loss, dict) on the last pipeline stage, whose
    layers' losses alone are added.
    "v2.5", "v3.0.2": forward_step_func(data_iterator, model) returns (output, loss_func); the patched one returns
    (output, loss_func with balance loss, balance loss of this stage), as FastMoE's patches of Megatron's schedules
    expect. Without args.balance_strategy the function is returned as it is. Raises ValueError for another version.
    """
    _check(Megatron_Version)
    if not get_args().balance_strategy:
        return forward_step_func

    def forward_step_v2_2(data_iterator: Any, model: Any, input_tensor: Any) -> Any:
        output = forward_step_func(data_iterator, model, input_tensor)
        return _add_balance_loss(output, model) if get_mpu().is_pipeline_last_stage() else output

    def forward_step_v2_5(data_iterator: Any, model: Any) -> Any:
        output, loss_func = forward_step_func(data_iterator, model)
        return output, partial(patch_loss_func_v2_5(loss_func), model), _balance_loss(model)

    return forward_step_v2_2 if Megatron_Version == "v2.2" else forward_step_v2_5


def patch_loss_func_v2_5(loss_func: Callable) -> Callable:
    """Turn loss_func(output) -> (loss, dict) into a function (model, output) that adds the balance loss to both.

    Without args.balance_strategy loss_func is returned as it is.
    """
    if not get_args().balance_strategy:
        return loss_func

    def loss_func_with_balance_loss(model: Any, output_tensor: Any) -> Any:
        return _add_balance_loss(loss_func(output_tensor), model)

    return loss_func_with_balance_loss


def _balance_loss(model: Any) -> torch.Tensor | None:
    """Return balance_loss_weight * (mean of this stage's balance losses) / pipeline stages; None without any.

    The losses stay with the gates, because several patches read them in one step.
    """
    # of the layers of this pipeline stage alone
    losses = [
        layer.mlp.gate.get_loss(clear=False).sum()
        for _, layers in stacks(model)
        for layer in layers
        if getattr(getattr(layer.mlp, "gate", None), "has_loss", False)
    ]
    if not losses:
        return None
    args = get_args()
    num_stages = getattr(args, "pipeline_model_parallel_size", 1)
    # each stage adds its own part, and their sum is to be the mean over the model
    return torch.stack(losses).mean() * args.balance_loss_weight / num_stages


# output is Megatron's (loss, figures for the log)
def _add_balance_loss(output: Any, model: Any) -> Any:
    loss, figures = output
    added = _balance_loss(model)
    if added is None:
        return output
    mean = added.detach().clone()  # for the log alone: each rank's gradient has its own loss
    if dist.is_initialized():
        group = get_mpu().get_data_parallel_group()
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
    return loss + added, figures | {f"{get_args().balance_strategy}_loss": mean}


def _check(version: str) -> None:
    if version not in _VERSIONS:
        raise ValueError(f"Megatron_Version must be one of {_VERSIONS}, but got {version!r}")
