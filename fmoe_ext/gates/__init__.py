"""Gates choose K experts for each token: forward(inp [T, d_model]) -> topk_idx, topk_weights [T, K].

A layer calls its gate in each forward (FMoE._call_gate); an entry -1 of topk_idx is a choice that was dropped.

    gate                choices                                 load evened out by
    NaiveGate           top-k of the logits                     nothing
    NoisyGate           top-k of logits with learned noise      cv^2(importance) + cv^2(load)    Shazeer et al., 2017
    GShardGate, DCGate  top-2, random second, capacity          E sum_e c_e m_e                  Lepikhin et al., 2020
    SwitchGate          top-1, noise, capacity                  E sum_e f_e p_e                  Fedus et al., 2021
    FasterGate          top-2, few first choices leave a node   GShard's loss                    He et al., 2022
    SwipeGate           top-k, moved to ranks with room         construction                     FastMoE
    SoftmaxGate         top-k of the softmax                    E sum_e f_e p_e, global batch    Qwen3, Mixtral, OLMoE
    NormedGate          the same behind an RMS norm             the same                         Gemma 4
    SigmoidGate         top-k of sigmoids with a bias           the bias, which follows loads    Wang et al., 2024
    BiasedSoftmaxGate   the same of softmaxes                   the same                         ERNIE 4.5
    SqrtSoftplusGate    the same of sqrt(softplus)              the same                         DeepSeek-V4
    QuantileGate        top-k of logits less a bias             a quantile, in one step          Megatron
    SinkhornGate        top-k after Sinkhorn's iteration        construction                     S-BASE, 2022
    ExpertChoiceGate    experts choose tokens                   construction                     Zhou et al., 2022
    HashGate            a table of token ids                    the table                        Roller et al., 2021
    UniformGate         in turn, for benchmarks                 construction

E is the number of experts, f_e the share of choices that are expert e, c_e that of first choices, p_e its mean
probability (m_e in GShard's paper; losses.py). ZeroGate, for tests, takes expert 0. A gate and its variants are in
one file; ScoredGate has what those that rank by a score share: groups, capacity, jitter, balance losses.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from fmoe_ext.gates import scored_gate
from fmoe_ext.gates.accumulation import WholeBatch, all_forwards_first
from fmoe_ext.gates.base_gate import BaseGate, OneRank
from fmoe_ext.gates.expert_choice_gate import ExpertChoiceGate
from fmoe_ext.gates.faster_gate import FasterGate, gen_faster_gate
from fmoe_ext.gates.gshard_gate import DCGate, GShardGate
from fmoe_ext.gates.hash_gate import HashGate
from fmoe_ext.gates.losses import balance_loss, sequence_balance_loss, total_loss, z_loss
from fmoe_ext.gates.naive_gate import NaiveGate, ZeroGate
from fmoe_ext.gates.noisy_gate import NoisyGate
from fmoe_ext.gates.quantile_gate import QuantileGate
from fmoe_ext.gates.scored_gate import ScoredGate
from fmoe_ext.gates.sigmoid_gate import BiasedSoftmaxGate, SigmoidGate, SqrtSoftplusGate, update_biases
from fmoe_ext.gates.sinkhorn_gate import SinkhornGate
from fmoe_ext.gates.softmax_gate import NormedGate, SoftmaxGate, UniformGate
from fmoe_ext.gates.swipe_gate import SwipeGate
from fmoe_ext.gates.switch_gate import SwitchGate

# Pickles of earlier releases have these gates in scored_gate, from which they have moved.
for _gate in (SoftmaxGate, NormedGate, UniformGate):
    setattr(scored_gate, _gate.__name__, _gate)

# Gates by name, for command lines and configuration files; FMoE(gate=GATES[name]) takes each. Without HashGate, which
# needs the size of the vocabulary; "faster" is FasterGate of the first node.
GATES: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "naive": NaiveGate,
        "noisy": NoisyGate,
        "gshard": GShardGate,
        "switch": SwitchGate,
        "dc": DCGate,
        "swipe": SwipeGate,
        "faster": gen_faster_gate(0),
        "zero": ZeroGate,
        "softmax": SoftmaxGate,
        "normed": NormedGate,
        "sigmoid": SigmoidGate,
        "biased_softmax": BiasedSoftmaxGate,
        "sqrtsoftplus": SqrtSoftplusGate,
        "expert_choice": ExpertChoiceGate,
        "sinkhorn": SinkhornGate,
        "quantile": QuantileGate,
        "uniform": UniformGate,
    }
)


def find_gate(name: str) -> Callable[..., nn.Module]:
    """Find the gate of that name in GATES; ValueError, with the names there are, for another.

    Example:

        >>> find_gate("sigmoid").__name__
        'SigmoidGate'
    """
    if name not in GATES:
        raise ValueError(f"unknown gate {name!r}: choose one of {', '.join(GATES)}")
    return GATES[name]


__all__ = [
    "GATES",
    "BaseGate",
    "BiasedSoftmaxGate",
    "DCGate",
    "ExpertChoiceGate",
    "FasterGate",
    "GShardGate",
    "HashGate",
    "NaiveGate",
    "NoisyGate",
    "NormedGate",
    "OneRank",
    "QuantileGate",
    "ScoredGate",
    "SigmoidGate",
    "SinkhornGate",
    "SoftmaxGate",
    "SqrtSoftplusGate",
    "SwipeGate",
    "SwitchGate",
    "UniformGate",
    "WholeBatch",
    "ZeroGate",
    "all_forwards_first",
    "balance_loss",
    "find_gate",
    "gen_faster_gate",
    "sequence_balance_loss",
    "total_loss",
    "update_biases",
    "z_loss",
]
