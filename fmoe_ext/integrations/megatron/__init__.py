"""Megatron: core (Megatron-core), and what programs for Megatron-LM v2.2 to v3.0 use; fmoe_ext.megatron is its face."""
