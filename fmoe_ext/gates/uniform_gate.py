import torch

from fmoe_ext.gates.base_gate import weights_of
from fmoe_ext.gates.scored_gate import ScoredGate


class UniformGate(ScoredGate):
    """Deals the tokens out to the experts in turn, for benchmarks of a perfectly balanced load.

    Choice k of token t, counted over the tokens of all ranks, is expert (t * K + k) % E; the weights are those of
    SoftmaxGate for these choices, so that the gate costs what a real one costs and learns. (Megatron's
    `--moe-router-force-load-balancing` draws at random.) Arguments: ScoredGate; groups have no effect.
    """

    @property
    def depends_on_batch(self) -> str | None:
        return "an expert is chosen by a token's place in the batch; SoftmaxGate chooses by the token"

    def select(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        topk_idx = self.choose(lambda: self._deal(logits))
        return topk_idx, weights_of(logits, topk_idx, self.score, self.normalize, self.scale)

    def _deal(self, logits: torch.Tensor) -> torch.Tensor:
        turn = torch.arange(logits.shape[0] * self.top_k, device=logits.device)
        turn = turn + self.ranks.first_token(logits.shape[0]) * self.top_k
        return (turn % self.num_experts).view(-1, self.top_k)
