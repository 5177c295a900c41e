from fmoe_ext.gates.scored_gate import ScoredGate


class SoftmaxGate(ScoredGate):
    """Top-k of the softmax, the gate of most open models. Dropless; balance loss of the global batch.

    normalize=True (`norm_topk_prob`): the weights sum to 1, which is the same as a softmax after the top-k: Mixtral
    8x7B and 8x22B, Qwen3-MoE. normalize=False: the probabilities among all experts, softmax before the top-k: OLMoE,
    Qwen2-MoE, DeepSeekMoE 16B, DeepSeek-V2 (with num_groups, topk_groups and scale). Other arguments: ScoredGate.

    Example:

        >>> gate = SoftmaxGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> topk_idx, topk_weights = gate(torch.randn(10, 8))
        >>> topk_idx.shape, torch.allclose(topk_weights.sum(1), torch.ones(10))
        (torch.Size([10, 2]), True)
        >>> gate.get_loss().shape  # the balance loss
        torch.Size([])
    """

    score = "softmax"
