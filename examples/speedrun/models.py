"""A small GPT on bytes, its four MLPs, its optimizers and the sizes; contest.py trains it.

The MLPs (MLPS) have about as many active parameters each: dense; 8 experts of which a token takes 2, beside a shared
one, by torch's grouped_mm and by this package; and 32 fine experts of this package.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmoe_ext import FMoETransformerMLP, SigmoidGate
from fmoe_ext.optim import Muon

VOCAB = 256
RECENT = 4  # bytes that each position sees before any attention: itself and those before it
SOFT_CAP = 15.0
# A run has some hundred steps. DeepSeek-V3's speed of 1e-3 balances within some thousand.
BIAS_SPEED = 1e-2


@dataclass(frozen=True)
class Size:
    """Width, depth and context of the model, windows of a step, seconds of a run and of one learning rate's trial."""

    width: int
    depth: int
    context: int
    windows: int
    seconds: float
    trial_seconds: float
    head_width: int = 64
    most_bytes: int = 48 << 20

    @property
    def hidden(self) -> int:
        """Hidden units that each token meets in an MLP."""
        return 4 * self.width


SIZES = {
    "cpu": Size(width=256, depth=4, context=512, windows=8, seconds=480, trial_seconds=90),
    "cpu-wide": Size(width=384, depth=6, context=512, windows=8, seconds=960, trial_seconds=180),
    "gpu": Size(
        768, 12, 1024, windows=64, seconds=360, trial_seconds=60, head_width=128, most_bytes=192 << 20
    ),
    "test": Size(64, 2, 64, windows=4, seconds=2, trial_seconds=0.5, head_width=32, most_bytes=1 << 20),
}


class DenseMLP(nn.Module):
    """x [..., D] -> relu(x @ up)^2 @ down [..., D]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = Matrix(width, hidden), Matrix(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class GroupedMLP(nn.Module):
    """The published recipe, with torch alone: sigmoid scores, 8 experts, top 2, a shared expert, a bias that balances.

    Rows are sorted by expert, torch.nn.functional.grouped_mm multiplies them, index_add sums the choices.
    """

    def __init__(self, width: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = Matrix(width, num_experts)
        self.up = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden))
        self.shared = DenseMLP(width, hidden)
        self.register_buffer("expert_bias", torch.zeros(num_experts))
        self.register_buffer("load", torch.zeros(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(tokens.float(), self.gate.weight).sigmoid()
        chosen = (scores + self.expert_bias).topk(self.top_k).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.up))
        if self.training:
            self.load += counts
        order = chosen.flatten().argsort(stable=True)
        token, offs = order // self.top_k, counts.cumsum(0).to(torch.int32)
        dtype = (
            torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        )
        up, down = self.up.to(dtype).transpose(1, 2), self.down.to(dtype).transpose(1, 2)
        hidden = F.relu(F.grouped_mm(tokens.to(dtype)[token], up, offs=offs)).square()
        rows = F.grouped_mm(hidden.to(dtype), down, offs=offs) * weights.flatten()[order, None].to(dtype)
        out = rows.new_zeros(tokens.shape).index_add(0, token, rows)
        return out.view_as(x) + self.shared(x)

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias, once a step, as SigmoidGate does."""
        self.expert_bias += BIAS_SPEED * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Matrix(nn.Linear):
    """A linear layer without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)


def experts(width: int, hidden: int, num_experts: int, top_k: int, shared: int) -> FMoETransformerMLP:
    """Experts of this package: one operator computes them all."""
    return FMoETransformerMLP(
        num_experts,
        width,
        hidden,
        activation="relu2",
        top_k=top_k,
        gate=lambda *size, gate_bias: SigmoidGate(*size, gate_bias=False, bias_update_speed=BIAS_SPEED),
        bias=False,
        shared_expert_hidden=shared,
    )


def recipe_hidden(hidden: int) -> int:
    """Hidden units of each of the two chosen experts and the shared one: a third, in steps of 16."""
    return max(16, hidden // 3 // 16 * 16)


MLPS = {
    "dense": lambda d, h: DenseMLP(d, h),
    "grouped_mm": lambda d, h: GroupedMLP(d, recipe_hidden(h), 8, 2),
    "ours": lambda d, h: experts(d, recipe_hidden(h), 8, 2, recipe_hidden(h)),
    "fine": lambda d, h: experts(d, h // 8, 32, 4, h // 2),
}
DESCRIPTIONS = {
    "dense": "dense",
    "grouped_mm": "8 experts, top 2, one shared: torch's grouped_mm",
    "ours": "8 experts, top 2, one shared: fmoe_ext",
    "fine": "32 experts, top 4, one shared: fmoe_ext",
}


class RecentBytes(nn.Embedding):
    """tokens [B, S] -> [B, S, width]: the sum of a vector for each of the last RECENT bytes, of a table for each place.

    A model of bytes without it spends its first hundreds of steps on finding the bytes before.
    """

    def __init__(self, width: int) -> None:
        super().__init__(RECENT * VOCAB, width)

    def forward(self, tokens: Tensor) -> Tensor:
        recent = F.pad(tokens, (RECENT - 1, 0)).unfold(1, RECENT, 1)
        return super().forward(recent + VOCAB * torch.arange(RECENT, device=tokens.device)).sum(2)


class Attention(nn.Module):
    """Causal attention with rotary positions and normalised queries and keys."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.qkv = nn.ModuleList(Matrix(width, width) for _ in range(3))
        self.out = Matrix(width, width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (matrix(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for matrix in self.qkv)
        q, k = norm(rotate(q, *rotation)), norm(rotate(k, *rotation))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, name: str, size: Size) -> None:
        super().__init__()
        self.attention = Attention(size.width, size.head_width)
        self.mlp = MLPS[name](size.width, size.hidden)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(norm(x), rotation)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """tokens [B, S] -> logits [B, S, 256] in float32, within +-SOFT_CAP; name: one of MLPS."""

    def __init__(self, name: str, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = RecentBytes(size.width)
        self.blocks = nn.ModuleList(Block(name, size) for _ in range(size.depth))
        self.head = Matrix(size.width, VOCAB)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        """Every block begins as the identity: the matrices that lead back to the residual are zero."""
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "down.weight", "mlp.down", "h4toh.weight")):
                p.zero_()
            else:
                p.uniform_(-1, 1).mul_(math.sqrt(3 / p.shape[-1]))
        self.embedding.weight.normal_()
        self.head.weight.normal_(std=1e-3)

    def forward(self, tokens: Tensor) -> Tensor:
        rotation = rotations(tokens.shape[1], self.size.head_width, tokens.device)
        x = norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(norm(x)).float()
        return SOFT_CAP * torch.tanh(logits / SOFT_CAP)

    def busiest(self) -> float:
        """Return the busiest expert's load over the mean load, in the worst layer; before the optimizer's step."""
        loads = [m.load for m in self.modules() if isinstance(m, GroupedMLP)]
        loads += [m.pending_load.float() for m in self.modules() if isinstance(m, SigmoidGate)]
        return max((load.max() / load.mean()).item() for load in loads) if loads else 1.0

    def num_parameters(self) -> tuple[int, int]:
        """(all, those that one token meets)."""
        total = sum(p.numel() for p in self.parameters())
        stacks, share = self._experts()
        return total, total - round(sum(p.numel() for p in stacks) * (1 - share))

    def optimizers(self, factor: float) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of the blocks and the experts, AdamW for the rest; factor multiplies all rates."""
        gates = [p for n, p in self.blocks.named_parameters() if ".gate." in n]
        experts, share = self._experts()
        apart = {*map(id, gates), *map(id, experts)}
        mlps = [p for n, p in self.blocks.named_parameters() if ".mlp." in n and id(p) not in apart]
        attention = [p for n, p in self.blocks.named_parameters() if ".attention." in n]
        groups = [
            {"params": attention, "lr": 0.02 * factor},
            {"params": mlps, "lr": 0.01 * factor},
            # Muon moves an expert as far as a dense matrix, however few tokens it has met.
            {"params": experts, "lr": 0.01 * factor * math.sqrt(share)},
        ]
        muon = Muon(groups, weight_decay=0.0)
        scale = (self.size.width / 768) ** -0.5
        groups = [
            {"params": [self.embedding.weight], "lr": 0.2 * scale * factor},
            {"params": [self.head.weight], "lr": 0.004 * scale * factor},
            # At the head's rate the scores are 0 or 1 after ten steps, and two experts have all tokens.
            {"params": gates, "lr": 0.0004 * scale * factor},
        ]
        return [muon, torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)]

    def _experts(self) -> tuple[list[nn.Parameter], float]:
        """Stacks of experts, and the share of the tokens that each expert meets."""
        layers = [m for m in self.modules() if isinstance(m, (GroupedMLP, FMoETransformerMLP))]
        named = [pair for layer in layers for pair in layer.named_parameters()]
        stacks = [p for name, p in named if p.dim() == 3 and "shared" not in name]
        return stacks, layers[0].top_k / len(stacks[0]) if layers else 1.0

    def after_step(self) -> None:
        """Move the biases that no optimizer's step moves."""
        for module in self.modules():
            if isinstance(module, GroupedMLP):
                module.balance()


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotations(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [S, head_width / 2] of rotary positions."""
    frequency = 10_000.0 ** -torch.arange(0, 1, 2 / head_width, device=device)
    angle = torch.arange(length, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
