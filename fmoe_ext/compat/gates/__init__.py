"""fmoe.gates."""

from fmoe_ext.gates import DCGate, GShardGate, NaiveGate, NoisyGate, SwipeGate, SwitchGate, ZeroGate

__all__ = ["DCGate", "GShardGate", "NaiveGate", "NoisyGate", "SwipeGate", "SwitchGate", "ZeroGate"]
