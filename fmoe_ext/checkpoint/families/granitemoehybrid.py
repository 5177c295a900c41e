"""Granite 4, with Mamba layers: the MoE layers of Granite 3 beside a shared MLP of its own."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import granitemoe

FAMILY = replace(granitemoe.FAMILY, name="granitemoehybrid", holds=("granitemoehybrid",))
