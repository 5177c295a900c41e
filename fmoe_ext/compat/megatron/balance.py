"""fmoe.megatron.balance: the figures of fmoe.balance for each layer, and their way to TensorBoard."""

import importlib

import torch
import torch.distributed as dist

from fmoe_ext.compat.balance import reset_balance_profile, update_balance_profile

balance_dict = {}
num_layers = 0


def reset_gate_hook(_num_layers=None):
    """Empties the profile; _num_layers: the number of MoE layers, once."""
    global num_layers
    if _num_layers is not None:
        num_layers = _num_layers
    reset_balance_profile(balance_dict, num_layers, _balance_strategy())


def get_balance_profile():
    """The profile: {figure: [value of each layer]}."""
    return balance_dict


def generate_megatron_gate_hook(layer_idx, num_expert_global):
    """The gate_hook that keeps the profile of a layer."""

    def gate_hook(gate_top_k_idx, gate_score_top_k, gate_context):
        if not balance_dict:
            return  # before reset_gate_hook()
        update_balance_profile(
            balance_dict,
            gate_top_k_idx,
            gate_score_top_k,
            gate_context,
            layer_idx,
            num_expert_global,
            _balance_strategy(),
        )

    return gate_hook


def add_balance_log(model, writer, iteration):
    """Writes the profile, averaged over the workers, as "balance-<figure>/layer-<i>" and "/all", and empties it.

    writer: a TensorBoard writer, None on workers that do not write. Figures without a value are left out.
    """
    for name, values in balance_dict.items():
        known = [(layer, value) for layer, value in enumerate(values) if value is not None]
        if not known:
            continue
        figures = torch.stack([torch.as_tensor(value).detach().float().reshape(()) for _, value in known])
        if dist.is_initialized():
            dist.all_reduce(figures)
            figures /= dist.get_world_size()
        if writer is None:
            continue
        for (layer, _), figure in zip(known, figures.tolist(), strict=True):
            writer.add_scalar(f"balance-{name}/layer-{layer}", figure, iteration)
        writer.add_scalar(f"balance-{name}/all", figures.mean().item(), iteration)
    reset_gate_hook()


def _balance_strategy():
    """args.balance_strategy of Megatron-LM, None without it."""
    try:
        return importlib.import_module("megatron").get_args().balance_strategy
    except (ModuleNotFoundError, AttributeError):
        return None
