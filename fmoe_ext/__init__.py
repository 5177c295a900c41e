"""fmoe_ext: Mixture-of-Experts training for PyTorch."""

from fmoe_ext import ops

__version__ = "0.1.0"
__all__ = ["ops"]
