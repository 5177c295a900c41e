from fmoe_ext.gates.scored_gate import ScoredGate


class SoftmaxGate(ScoredGate):
    """Top-k of the softmax, the gate of most open models. Dropless; balance loss of the global batch.

    normalize=True (`norm_topk_prob`): the weights sum to 1, which is the same as a softmax after the top-k: Mixtral
    8x7B and 8x22B, Qwen3-MoE. normalize=False: the probabilities among all experts, softmax before the top-k: OLMoE,
    Qwen2-MoE, DeepSeekMoE 16B, DeepSeek-V2 (with num_groups, topk_groups and scale). Other arguments: ScoredGate.
    """

    score = "softmax"
