"""MiniMax-Text-01: the MoE layers of Mixtral."""

from dataclasses import replace

from fmoe_ext.checkpoint.families import mixtral

FAMILY = replace(mixtral.FAMILY, name="minimax", holds=("minimax",), gguf=None)
