"""fmoe.transformer."""

from fmoe_ext.experts import FusedExperts
from fmoe_ext.transformer import FMoETransformerMLP


class _Expert(FusedExperts):
    """num_expert two-layer MLPs as one module: called with rows sorted by expert and fwd_expert_count."""

    def __init__(self, num_expert, d_model, d_hidden, activation, rank=0):
        super().__init__(num_expert, d_model, d_hidden, activation)


__all__ = ["FMoETransformerMLP"]
