"""MiniMax-M2."""

from fmoe_ext.gguf.architecture import Architecture


class MiniMaxM2(Architecture):
    name = "minimax-m2"
    model_type = "minimax_m2"
    rotates_part = True
