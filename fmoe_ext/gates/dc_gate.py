import math

from fmoe_ext.gates.gshard_gate import GShardGate


class DCGate(GShardGate):
    """GShardGate with FastMoE's earlier capacity, which is not divided by the number of experts.

    An expert takes ceil(capacity * T / world_size) choices, T the tokens of all ranks; FastMoE counts the tokens of
    each rank instead, which is the same for equal batches. On one rank nothing is dropped for a capacity >= 1.
    """

    def expert_capacity(self, factor: float, num_tokens: int) -> int:
        return math.ceil(factor * num_tokens / self.world_size)
