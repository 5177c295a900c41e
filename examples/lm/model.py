"""A decoder-only Transformer on bytes, whose MLPs are mixtures of experts in some blocks and dense in the others.

LanguageModel is the model of one process; spread.py and pipelined.py put it on the ranks of a job.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from precision import Precision
from torch import nn

import fmoe_ext
from fmoe_ext.gates import find_gate

VOCABULARY = 256  # bytes


@dataclass
class ModelConfig:
    d_model: int
    num_layers: int
    num_heads: int
    num_experts: int
    d_hidden: int  # of one expert
    top_k: int
    gate: str
    ep_size: int = 1  # ranks that the experts are spread over
    layer_options: dict[str, Any] = field(default_factory=dict)  # what FMoETransformerMLP gets besides
    moe_every: int = 1  # blocks N, 2 N, ... have experts, the others a dense MLP of the same active width
    dense: bool = False  # no block has experts: the same active parameters per token

    def has_experts(self, block: int) -> bool:
        return not self.dense and (block + 1) % self.moe_every == 0


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x, rotation):
        batch, seq, d_model = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.num_heads, d_model // self.num_heads)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # [B, heads, S, d_head]
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, d_model))


def rope_rotation(seq, d_head, device):
    """(cos, sin) [S, d_head / 2] of the rotary position embedding."""
    frequency = 10000.0 ** -(torch.arange(0, d_head, 2, device=device) / d_head)
    angle = torch.arange(seq, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, rotation):
    cos, sin = (part.to(x.dtype) for part in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class DenseMLP(nn.Module):
    def __init__(self, d_model, d_hidden):
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_hidden, bias=False)
        self.down = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config, has_experts):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model)
        if not has_experts:
            self.mlp = DenseMLP(config.d_model, config.top_k * config.d_hidden)
        else:
            options = {
                "num_experts": config.num_experts,
                "world_size": config.ep_size,
                "d_model": config.d_model,
                "d_hidden": config.d_hidden,
                "activation": "swiglu",
                "bias": False,
                "top_k": config.top_k,
                "gate": find_gate(config.gate),
            }
            self.mlp = fmoe_ext.FMoETransformerMLP(**(options | config.layer_options))

    def forward(self, x, rotation):
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class RotatedBlock(nn.Module):
    """A block that makes its own rotation, so that stages of a pipeline pass x alone."""

    def __init__(self, block, d_head):
        super().__init__()
        self.block, self.d_head = block, d_head

    def forward(self, x):
        return self.block(x, rope_rotation(x.shape[1], self.d_head, x.device))


class AutocastLayer(nn.Module):
    """A layer of a pipeline, whose backward must not be under autocast as its forward is."""

    def __init__(self, layer, precision):
        super().__init__()
        self.layer, self.precision = layer, precision

    def forward(self, x):
        with self.precision.autocast():
            return self.layer(x)


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.precision: Precision | None = None  # of the layers of a pipeline
        self.embedding = nn.Embedding(VOCABULARY, config.d_model)
        self.blocks = nn.ModuleList(Block(config, config.has_experts(i)) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, VOCABULARY, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Normal(0, 1 / sqrt(fan in)), zero into the residual stream; the embedding Normal(0, 0.5)."""
        into_residual = ("attention.out.weight", "mlp.down.weight", "mlp.experts.h4toh.weight")
        for name, parameter in self.named_parameters():
            if name.endswith(into_residual):
                parameter.zero_()
            elif parameter.dim() >= 2:
                parameter.normal_(
                    std=0.5 if parameter is self.embedding.weight else parameter.shape[-1] ** -0.5
                )

    def forward(self, tokens):
        """Logits [B, S, 256] of the byte that follows each of tokens [B, S]."""
        d_head = self.config.d_model // self.config.num_heads
        rotation = rope_rotation(tokens.shape[1], d_head, tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))

    def pipeline_layers(self):
        """The layers that fmoe_ext.pipeline.split() cuts between, of this model's modules."""
        d_head = self.config.d_model // self.config.num_heads
        blocks = [RotatedBlock(block, d_head) for block in self.blocks]
        layers = [self.embedding, *blocks, nn.Sequential(self.norm, self.head)]
        return [AutocastLayer(layer, self.precision) for layer in layers] if self.precision else layers

    def moe_layers(self) -> list[fmoe_ext.FMoETransformerMLP]:
        """The MLPs that have experts."""
        return [block.mlp for i, block in enumerate(self.blocks) if self.config.has_experts(i)]

    def pop_balance_loss(self):
        """Mean over the layers of the gates' losses of the last forward; 0 where gates compute none."""
        losses = [layer.gate.get_loss() for layer in self.moe_layers()]
        losses = [loss.sum() for loss in losses if loss is not None]
        return torch.stack(losses).mean() if losses else self.head.weight.new_zeros(())

    def expert_parameters(self) -> set[nn.Parameter]:
        """The parameters of all experts of this rank."""
        return {p for layer in self.moe_layers() for p in layer.experts.parameters()}

    def num_parameters(self) -> tuple[int, int]:
        """(all, active): how many parameters there are on all ranks, and how many of them one token meets."""
        here = sum(p.numel() for p in self.expert_parameters())
        in_experts = here * self.config.ep_size
        total = sum(p.numel() for p in self.parameters()) - here + in_experts
        idle_share = 1 - self.config.top_k / self.config.num_experts
        return total, total - round(in_experts * idle_share)

    def flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of one token in training, forward and backward, counted as PaLM counts them.

        Six for each active parameter that is multiplied, and 12 * layers * d_model * seq_len in attention.
        """
        multiplied = self.num_parameters()[1] - self.embedding.weight.numel()
        return 6 * multiplied + 12 * self.config.num_layers * self.config.d_model * seq_len


def sum_of_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of all bytes, in float32 or wider."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def generate(logits_of, prompt, num_bytes, context, device, temperature=0.8, seed=0):
    """prompt (bytes) continued by num_bytes sampled bytes; logits_of(tokens [1, S]) sees the last `context` bytes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)  # [1, S]
    for _ in range(num_bytes):
        logits = logits_of(tokens[:, -context:])[0, -1].float().cpu()
        chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, chosen[None].to(device)), dim=1)
    return bytes(tokens[0].tolist())
