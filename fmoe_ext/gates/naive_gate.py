"""NaiveGate, the base of gates that are a linear layer; GateOverRanks, of gates that count over ranks; ZeroGate.

In a small layer each operator and autograd node costs the host more than its work. So the linear layer, the choice and
the balance loss are one node where that has the same bits (choose_in_one_node); SoftmaxGate, GShardGate and SwitchGate
use it too.
"""

import torch
from torch import nn

from fmoe_ext.gates.base_gate import BaseGate, OneRank, Ranks
from fmoe_ext.linear import WideLinear, is_plain
from fmoe_ext.ops.topk_gate import topk_gate_of_linear
from fmoe_ext.step import current_step


class NaiveGate(BaseGate):
    """A linear layer, the top_k experts of each token, and the softmax over their scores.

    With top_k=1 that softmax is always 1 and the gate learns nothing; normalize=False gives the probability
    among all experts instead. Scores are computed in float32 (float64 for float64 input), whatever the dtype
    of input, parameters and autocast. The loss is zero: nothing evens out the load of the experts.

    Example:

        >>> gate = NaiveGate(d_model=8, num_expert=4, world_size=1, top_k=2)
        >>> topk_idx, topk_weights = gate(torch.randn(10, 8))
        >>> topk_idx.shape, torch.allclose(topk_weights.sum(1), torch.ones(10))
        (torch.Size([10, 2]), True)
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        normalize: bool = True,
    ) -> None:
        super().__init__(num_expert, world_size)
        self.check_top_k(top_k)
        self.gate = WideLinear(d_model, self.num_experts, bias=gate_bias)
        self.d_model = d_model
        self.top_k = top_k
        self.normalize = normalize

    @property
    def balances(self) -> bool:
        return type(self).forward is not NaiveGate.forward

    @property
    def weights_vary(self) -> str | None:
        if self.normalize:
            return None
        return "its weights are probabilities among all experts; a gate with normalize=True divides them by their sum"

    def forward(self, inp: torch.Tensor, return_all_scores: bool = False) -> tuple[torch.Tensor, ...]:
        """Choose experts.

        inp [T, d_model] -> topk_idx [T, K] int64, best first, topk_weights [T, K] float32 or float64; with
        return_all_scores also the logits [T, E]. Raises TypeError for a nest of tensors, ValueError for
        another shape.
        Equivalent to: weights, idx = F.linear(inp, weight, bias).topk(top_k); idx, weights.softmax(-1).
        """
        chosen = None if return_all_scores or type(self) is not NaiveGate else self.choose_in_one_node(inp)
        if chosen is not None:
            return chosen
        logits = self.logits(inp)
        topk_idx, topk_weights = self.topk(logits, self.top_k, normalize=self.normalize)
        self.set_loss(logits.new_zeros(1), constant=True)
        return (topk_idx, topk_weights, logits) if return_all_scores else (topk_idx, topk_weights)

    def choose_in_one_node(
        self, inp: torch.Tensor, num_counted: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Choose by topk_gate_of_linear and set its loss: as logits(), topk() and the loss, but in one autograd node.

        None, and nothing is set, where those steps are needed: outside of a layer, without gradients, around a
        checkpoint, for a wrapped linear layer, for unusual input. num_counted: how many choices of each token the
        balance loss counts, 0 for no loss.
        """
        step = current_step()  # None while compiling
        # a checkpoint compares the tensors that both forwards keep, a selective one their operators
        if step is None or step.forward is not None or step.is_selective or not torch.is_grad_enabled():
            return None
        linear = self.gate
        # an adapter, a hook or a parametrization wants the layer to be called
        if type(linear) is not WideLinear or linear.must_be_called or not self.weighs_while_choosing:
            return None
        weight, bias = linear.weight, linear.bias
        is_usual = (
            type(inp) is torch.Tensor
            and (num_counted == 0 or not inp.is_cuda)  # on a GPU the loss is several operators
            and inp.dim() == 2
            and inp.shape[1] == self.d_model
            and inp.is_contiguous()
            and inp.device == weight.device
            and type(weight) is nn.Parameter
            and (weight.requires_grad or inp.requires_grad)
            and is_plain(inp, weight, bias)
        )
        if not is_usual:
            return None
        topk_idx, topk_weights, counts, loss = topk_gate_of_linear(
            inp, weight, bias, self.top_k, self.normalize, num_counted
        )
        if loss is None:
            self.set_loss(topk_weights.new_zeros(1), constant=True)
        else:
            self.set_loss(loss)
        if counts is not None and num_counted == self.top_k:  # GShard's are of first choices alone
            step.note_counts(topk_idx, counts)
        if self._tapes:  # one that only records, as weighs_while_choosing says
            return self.choose(lambda: topk_idx), topk_weights
        step.selected = topk_idx
        return topk_idx, topk_weights

    def logits(self, inp: torch.Tensor) -> torch.Tensor:
        """Score every expert: inp [T, d_model] -> [T, E], in float32 or wider."""
        if not isinstance(inp, torch.Tensor):
            raise TypeError(
                f"{type(self).__name__} needs a tensor [T, d_model], but got {type(inp).__name__}; "
                "a nest of tensors needs a gate of its own"
            )
        if inp.dim() != 2 or inp.shape[1] != self.d_model:
            raise ValueError(f"inp must have shape [T, d_model={self.d_model}], but got {list(inp.shape)}")
        logits: torch.Tensor = self.gate(inp)
        if logits.dtype == torch.float32:
            return logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class GateOverRanks(NaiveGate):
    """Base of the gates whose choices, capacity or loss are over the tokens of all ranks: ranks, OneRank() for None."""

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        top_k: int = 2,
        gate_bias: bool = True,
        *,
        normalize: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(d_model, num_expert, world_size, top_k, gate_bias, normalize=normalize)
        self.ranks: Ranks = OneRank() if ranks is None else ranks


def with_noise(x: torch.Tensor, spread: float) -> torch.Tensor:
    """Return x in float32 or wider, each element times noise that is uniform in [1 - spread, 1 + spread]."""
    wide = x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * noise_like(wide, spread)


def noise_like(x: torch.Tensor, spread: float) -> torch.Tensor:
    """Draw noise of the shape and dtype of x, uniform in [1 - spread, 1 + spread]."""
    return torch.rand_like(x) * (2 * spread) + (1 - spread)


class ZeroGate(BaseGate):
    """Sends every token to expert 0, top_k times with weight 1 / top_k; for tests. Nothing is learned.

    Example:

        >>> topk_idx, topk_weights = ZeroGate(8, num_expert=4, world_size=1, top_k=2)(torch.randn(1, 8))
        >>> topk_idx.tolist(), topk_weights.tolist()
        ([[0, 0]], [[0.5, 0.5]])
    """

    def __init__(self, _1: int, num_expert: int, world_size: int, top_k: int = 2) -> None:
        super().__init__(num_expert, world_size)
        if top_k < 1:
            raise ValueError(f"top_k must be at least 1, but got {top_k}")
        self.top_k = top_k

    @property
    def weights_vary(self) -> str | None:
        return None

    def forward(self, inp: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """inp [T, *] -> topk_idx [T, K] int64 zeros, topk_weights [T, K] float32."""
        shape = (inp.shape[0], self.top_k)
        topk_idx = torch.zeros(shape, dtype=torch.int64, device=inp.device)
        return topk_idx, torch.full(shape, 1 / self.top_k, device=inp.device)
