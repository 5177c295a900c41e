"""Granite MoE with a shared MLP of its own beside the MoE layer."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import granitemoe

FAMILY = replace(granitemoe.FAMILY, name="granitemoeshared", holds=("granitemoeshared",))
