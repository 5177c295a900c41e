"""Granite MoE with sliding windows."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import granitemoe

FAMILY = replace(granitemoe.FAMILY, name="granitemoe_swa", holds=("granitemoe_swa",))
