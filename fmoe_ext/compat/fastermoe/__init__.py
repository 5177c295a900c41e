"""fmoe.fastermoe: overlap and shadowing are part of fmoe_ext.ep; these are FasterMoE's names for the same maths."""
