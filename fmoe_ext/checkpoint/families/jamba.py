"""Jamba: some of the layers, in turn."""

from fmoe_ext.checkpoint.families.family import PROJECTIONS, Family, Layout, as_configured

FAMILY = Family(
    name="jamba",
    holds=("jamba",),
    files=Layout(block="feed_forward", gate="router", per_expert=PROJECTIONS),
    modules=Layout(block="feed_forward", gate="router"),
    config={"num_experts": "num_experts", "d_hidden": "intermediate_size", "top_k": "num_experts_per_tok"},
    fixed={"normalize": False},
    layers=as_configured,
)
