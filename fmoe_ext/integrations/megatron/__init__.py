"""Megatron-core, in core/; fmoe_ext.megatron has the public names, fmoe_ext.compat.megatron those of FastMoE's time."""
