"""A Transformer language model as a sequence of layers that a pipeline can cut: encoder, blocks, decoder.

make_model(config) -> nn.Sequential, from tokens [B, S] to logits [B, S, vocabulary]; train.py gives it to split().
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

import fmoe_ext

MAX_LENGTH = 5000


@dataclass(frozen=True)
class ModelConfig:
    """The defaults are those of PyTorch's former tutorial on DDP across pipelines: 1,041,453,167 parameters."""

    vocabulary: int = 28783
    d_model: int = 4096
    d_hidden: int = 4096
    num_layers: int = 8
    num_heads: int = 16
    dropout: float = 0.2
    num_experts: int = 0  # 0: dense MLPs


class Encoder(nn.Module):
    """tokens [B, S] -> embeddings with positions [B, S, D]."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.dropout = nn.Dropout(config.dropout)
        self.register_buffer("positions", sines(MAX_LENGTH, config.d_model), persistent=False)

    def forward(self, tokens):
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(x + self.positions[: tokens.shape[1]].to(x.dtype))


def sines(length, d_model):
    """The position encoding of "Attention is all you need" [length, D]."""
    position = torch.arange(length)[:, None]
    rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    return torch.stack(((position * rate).sin(), (position * rate).cos()), dim=2).flatten(1)


class Block(nn.Module):
    """Causal attention and an MLP, each with a residual and a norm behind it; the MLP may be a mixture of experts."""

    def __init__(self, config):
        super().__init__()
        self.attention = nn.MultiheadAttention(
            config.d_model, config.num_heads, config.dropout, batch_first=True
        )
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.mlp = make_mlp(config)
        self.mlp_norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y, _ = self.attention(x, x, x, attn_mask=later, need_weights=False)
        x = self.attention_norm(x + self.dropout(y))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))


def make_mlp(config):
    if config.num_experts:
        return fmoe_ext.FMoETransformerMLP(
            config.num_experts, config.d_model, config.d_hidden, top_k=2, activation="relu", gate="softmax"
        )
    return nn.Sequential(
        nn.Linear(config.d_model, config.d_hidden),
        nn.ReLU(),
        nn.Dropout(config.dropout),
        nn.Linear(config.d_hidden, config.d_model),
    )


class Decoder(nn.Linear):
    """[B, S, D] -> logits of the next token [B, S, vocabulary]."""

    def __init__(self, config):
        super().__init__(config.d_model, config.vocabulary)
        nn.init.zeros_(self.bias)
        nn.init.uniform_(self.weight, -0.1, 0.1)


def make_model(config):
    blocks = [Block(config) for _ in range(config.num_layers)]
    return nn.Sequential(Encoder(config), *blocks, Decoder(config))
