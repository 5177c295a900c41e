"""Choices of each expert of a layer: added up in every forward, summed over ranks on request."""

import torch
import torch.distributed as dist


class LoadCounter:
    """Choices of each of num_experts experts by this rank since the last pop()."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self._counts = torch.zeros(num_experts, dtype=torch.int64, device="cpu")

    def add(self, counts: torch.Tensor) -> None:
        """Adds the choices of a forward, [num_experts]."""
        if self._counts.device != counts.device:
            self._counts = torch.zeros(self.num_experts, dtype=torch.int64, device=counts.device)
        self._counts.add_(counts)  # in place: a CUDA graph repeats it

    def pop(self, group: dist.ProcessGroup) -> list[int]:
        """The sum over the ranks of a group, from where on every rank counts anew; a collective call."""
        total = self._counts.clone()
        self._counts.zero_()
        total = total.to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        dist.all_reduce(total, group=group)
        return total.tolist()
