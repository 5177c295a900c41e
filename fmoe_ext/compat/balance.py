"""fmoe.balance: figures of the load in a dict of lists; fmoe_ext.balance is the richer way."""

from fmoe_ext import ops

metrics = {
    "coefficient-variation": lambda c_e: c_e.std() / c_e.mean(),
    "Lmax-over-Lmin": lambda c_e: (c_e.max() + 1) / (c_e.min() + 1),
    "Lmax-over-Lmean": lambda c_e: c_e.max() / c_e.mean(),
}


def reset_balance_profile(balance_dict, num_layers, balance_strategy):
    """Puts a list of num_layers None under each name of metrics and, for a strategy, under "<strategy>_loss"."""
    for key in metrics:
        balance_dict[key] = [None] * num_layers
    if balance_strategy:
        balance_dict[f"{balance_strategy}_loss"] = [None] * num_layers


def update_balance_profile(
    balance_dict,
    gate_top_k_idx,
    _gate_score_top_k,
    gate_context,
    layer_idx,
    num_expert,
    balance_strategy,
):
    """Sets the entries of a layer from its choices [T, K]; the loss is gate_context, if it is not None.

    FastMoE leaves this function empty, for users to fill.
    """
    load = ops.count_tokens(gate_top_k_idx.reshape(-1, 1), num_expert).float()
    for key, metric in metrics.items():
        balance_dict[key][layer_idx] = metric(load)
    if balance_strategy and gate_context is not None:
        balance_dict[f"{balance_strategy}_loss"][layer_idx] = gate_context
