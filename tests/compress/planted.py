"""A Qwen3-MoE with planted experts: one that every token chooses, dead ones, and copies of others.

Channel 0 of the hidden states is the same for all tokens: by it the router turns to an expert, or away from it.
"""

import torch
import transformers

SHAPE = {
    **{"vocab_size": 1009, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    **{
        "intermediate_size": 32,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
    },
}


def make(folder, dead, copies, apart, layers=2, experts=8, width=32, hidden=16):
    """Writes the model in float64, a shard a layer. dead: [numbers]; copies: {number: original}, in every layer.

    apart: size of the difference between the router's rows of a copy and its original, or None to let the router
    always prefer the original. Expert 0 is the one that every token chooses, so that one other is chosen beside it.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "moe_intermediate_size": hidden, "num_hidden_layers": layers}
    config = transformers.Qwen3MoeConfig(**SHAPE, **sizes, num_experts=experts)
    model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.float64)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.mul_(50)
        embedding[:, 0] = 10
        for layer in model.model.layers:
            _plant(layer, dead, copies, apart)
    model.save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.model.layers[0].parameters()))
    return folder


def _plant(layer, dead, copies, apart):
    layer.self_attn.o_proj.weight[0] = 0
    experts, gate = layer.mlp.experts, layer.mlp.gate.weight
    experts.gate_up_proj.mul_(10)
    experts.down_proj[:, 0] = 0
    gate.normal_(std=gate.shape[1] ** -0.5)[:, 0] = 0
    for copy, original in copies.items():
        experts.gate_up_proj[copy] = experts.gate_up_proj[original]
        experts.down_proj[copy] = experts.down_proj[original]
        gate[copy] = gate[original]
        if apart is None:
            gate[copy, 0] -= 30  # less than float32 sees in the sum of a softmax
        else:
            gate[copy, 1:] += apart * torch.randn(gate.shape[1] - 1, dtype=gate.dtype)
    gate[dead] = 0
    gate[dead, 0] = -100
    gate[0] = 0
    gate[0, 0] = 1.5
