"""The dtypes in which a model computes: runs.py makes a Precision of --dtype, the models take it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """of_weights: float64 or float32; of_autocast: what products are computed in, None for the weights' dtype."""

    device_type: str
    of_weights: torch.dtype
    of_autocast: torch.dtype | None

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device) -> "Precision":
        """bfloat16 is autocast over float32."""
        weights = torch.float64 if dtype == torch.float64 else torch.float32
        return cls(device.type, weights, dtype if dtype == torch.bfloat16 else None)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.of_autocast, enabled=self.of_autocast is not None)
