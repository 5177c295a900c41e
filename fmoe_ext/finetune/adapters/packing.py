"""Tell from lora_B [out, E * r] itself how its columns are packed: columns of one expert resemble each other.

reading.py asks Evidence where neither the user nor the file says it; unpacked() and packed() are the two packings.

Column k of expert e (k < r) lies in one of two places. With E = 3 and r = 2:

    rank_major    k * E + e    e0 e1 e2 | e0 e1 e2    PEFT
    expert_major  e * r + k    e0 e0 | e1 e1 | e2 e2    early unsloth

Columns start at zero and grow along the gradient of their expert, so that columns of one expert share its directions.
Group the columns as one packing says, and take the mean |cosine| inside the groups: it is higher for the true
packing than for columns that are grouped at random, by several standard deviations of random groupings, and the
other packing's is not. A reading is believed if it is _MIN_MARGIN of them above chance and above the other; else the
file is "undecidable", and the user has to say. A permutation test, in statistics.
"""

import math
from dataclasses import dataclass, field

import torch

from fmoe_ext.checkpoint.safetensors_file import StoredTensor

RANK_MAJOR, EXPERT_MAJOR = "rank_major", "expert_major"  # column k * E + e, column e * r + k, of expert e
_MIN_MARGIN = 4.0  # standard deviations of a reading above chance, and above the other reading
_NUM_SHUFFLES = 48  # random groupings, for the mean and standard deviation of what chance gives
_MAX_ROWS, MAX_TENSORS = 256, 16  # that are looked at: enough to tell, also for a model of 48 layers


def unpacked(b: torch.Tensor, num_experts: int, rank: int, packing: str) -> torch.Tensor:
    """Unpack lora_B [out, E * r] -> [E, out, r]."""
    if packing == EXPERT_MAJOR:
        return b.reshape(b.shape[0], num_experts, rank).permute(1, 0, 2)
    return b.reshape(b.shape[0], rank, num_experts).permute(2, 0, 1)


def packed(b: torch.Tensor, packing: str) -> torch.Tensor:
    """Pack [E, out, r] -> lora_B [out, E * r]."""
    return b.permute((1, 0, 2) if packing == EXPERT_MAJOR else (1, 2, 0)).flatten(1)


@dataclass
class Evidence:
    """Standard scores of both readings, summed over the tensors that show anything."""

    scores: dict[str, float] = field(default_factory=lambda: {RANK_MAJOR: 0.0, EXPERT_MAJOR: 0.0})
    num_tensors: int = 0
    alike: bool = True  # both readings are the same: one expert, or rank 1

    def add(self, tensor: StoredTensor, rank: int) -> None:
        """Add the scores of one lora_B."""
        num_experts = tensor.shape[1] // rank
        if num_experts == 1 or rank == 1:
            return
        self.alike = False
        b = tensor.read()
        b = b[:: -(-b.shape[0] // _MAX_ROWS)].float()  # [rows, E * r]
        if not b.isfinite().all() or not b.any():
            return
        # how alike columns are that are grouped at random; a fixed seed, so that a file gets one answer
        columns = torch.nn.functional.normalize(b, dim=0, eps=1e-30)
        generator = torch.Generator("cpu").manual_seed(0)
        count = num_experts * rank
        orders = [torch.randperm(count, generator=generator, device="cpu") for _ in range(_NUM_SHUFFLES)]
        shuffled = [_likeness(columns[:, order], num_experts, rank, EXPERT_MAJOR) for order in orders]
        null = torch.tensor(shuffled, device="cpu")
        spread = null.std().item()
        if spread > 1e-6:  # else all groupings are equally alike, and the tensor shows nothing
            self.num_tensors += 1
            for packing in self.scores:
                likeness = _likeness(columns, num_experts, rank, packing)
                self.scores[packing] += (likeness - null.mean().item()) / spread

    def standard_scores(self) -> dict[str, float]:
        """Return the scores of all tensors together, in standard deviations of columns that are grouped at random."""
        # a sum of n scores that chance gives has the standard deviation sqrt(n)
        return {p: s / math.sqrt(max(1, self.num_tensors)) for p, s in self.scores.items()}

    def verdict(self) -> str:
        """Return RANK_MAJOR, EXPERT_MAJOR or "undecidable"; RANK_MAJOR where both are the same."""
        if self.alike:
            return RANK_MAJOR
        scores = self.standard_scores()
        best, other = sorted(scores, key=lambda packing: -scores[packing])
        clear = scores[best] >= _MIN_MARGIN and scores[best] - scores[other] >= _MIN_MARGIN
        return best if clear else "undecidable"


def _likeness(columns: torch.Tensor, num_experts: int, rank: int, packing: str) -> float:
    """Return the mean |cosine| of the columns within an expert, over the pairs that say something."""
    groups = unpacked(columns, num_experts, rank, packing)  # [E, out, r]
    cosines = (groups.transpose(1, 2) @ groups).abs()  # [E, r, r]
    # columns of zeros are of experts that no token chose: two are alike, one beside another kind is not
    zero = groups.eq(0).all(1)  # [E, r]
    both, any_zero = zero[:, :, None] & zero[:, None], zero[:, :, None] | zero[:, None]
    cosines = torch.where(both, torch.ones_like(cosines), cosines)
    # a cosine of 0 of two columns that are not zero: no row has values in both, which says nothing
    says = (cosines > 1e-12) | any_zero
    says &= ~torch.eye(rank, dtype=torch.bool, device=columns.device)
    return cosines[says].mean().item() if says.any() else 0.0
