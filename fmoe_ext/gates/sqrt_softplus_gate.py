import torch

from fmoe_ext import ops
from fmoe_ext.gates.sigmoid_gate import SigmoidGate


class SqrtSoftplusGate(SigmoidGate):
    """The gate of DeepSeek-V4: scores sqrt(softplus(logit)), balanced by a bias that is added for the selection only.

    The weights are the scores of the chosen experts, divided by their sum. The bias moves as SigmoidGate's; arguments:
    SigmoidGate. Megatron's `--moe-router-score-function sqrtsoftplus`.
    """

    score = "sqrtsoftplus"

    @property
    def depends_on_batch(self) -> str | None:
        return "the last bits of PyTorch's softplus depend on a token's place; SigmoidGate's scores do not"

    def balance_choices(self, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        return ops.topk_gate(logits.detach(), self.top_k)[0]
