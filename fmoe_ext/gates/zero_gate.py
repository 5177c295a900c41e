import torch

from fmoe_ext.gates.base_gate import BaseGate


class ZeroGate(BaseGate):
    """Sends every token to expert 0, top_k times with weight 1 / top_k; for tests. Nothing is learned."""

    def __init__(self, _1: int, num_expert: int, world_size: int, top_k: int = 2) -> None:
        super().__init__(num_expert, world_size)
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, but got {top_k}")
        self.top_k = top_k

    @property
    def weights_vary(self) -> str | None:
        return None

    def forward(self, inp: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """inp [T, *] -> topk_idx [T, K] int64 zeros, topk_weights [T, K] float32."""
        shape = (inp.shape[0], self.top_k)
        topk_idx = torch.zeros(shape, dtype=torch.int64, device=inp.device)
        return topk_idx, torch.full(shape, 1 / self.top_k, device=inp.device)
