"""fmoe.gates.noisy_gate."""

from fmoe_ext.gates.noisy_gate import NoisyGate

__all__ = ["NoisyGate"]
