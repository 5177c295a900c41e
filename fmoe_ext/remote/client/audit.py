"""Auditor: recomputes random rows of what servers answer, and names those that cheat."""

import random
from collections import Counter
from dataclasses import dataclass

import torch

from fmoe_ext.remote import loop
from fmoe_ext.remote.client.client import Client, Handle, Outcome
from fmoe_ext.remote.errors import Cheated, RemoteError
from fmoe_ext.remote.expert_classes import find_expert_class
from fmoe_ext.remote.wire import Message


@dataclass(frozen=True)
class Finding:
    """Of one audit: the largest difference between answer and recomputation, relative to the largest number."""

    uid: str
    endpoint: str
    num_rows: int
    error: float


class Auditor:
    """Checks forward calls: auditor.check(expert, x) sends x and recomputes some rows with the expert's weights.

    The weights come from another replica than the one that answered where there is one, and must be those of the
    version that the answer names; otherwise the audit is tried again, attempts times. tolerance: of the relative
    error, above what float32 and the compression in use explain. With one replica a server can only be caught in
    answering otherwise than its own weights do.
    """

    def __init__(
        self,
        client: Client,
        tolerance: float = 1e-3,
        rows: int = 2,
        attempts: int = 5,
        seed: int | None = None,
    ):
        self.client, self.tolerance, self.rows, self.attempts = client, tolerance, rows, attempts
        self.caught: Counter[str] = Counter()  # endpoint: how often
        self._random = random.Random(seed)

    def check(self, handle: Handle, *inputs: torch.Tensor, timeout: float = 10.0) -> Finding:
        """What came out; Cheated if the answer is not what the weights give, RemoteError if no audit was possible."""
        for _ in range(self.attempts):
            outcome = loop.run(self.client.forward(handle, inputs, timeout), timeout + 1)
            state = loop.run(self.client.state(handle, self._witness(handle, outcome), timeout), timeout + 1)
            if state.meta.get("version") == str(outcome.version):
                return self._compare(handle, outcome, state, inputs)
        raise RemoteError(f"{handle.uid} changed between answer and weights {self.attempts} times: no audit")

    def _witness(self, handle: Handle, outcome: Outcome) -> str:
        others = [e for e in (handle.record.endpoints if handle.record else ()) if e != outcome.endpoint]
        return self._random.choice(others) if others else outcome.endpoint

    def _compare(
        self, handle: Handle, outcome: Outcome, state: Message, inputs: tuple[torch.Tensor, ...]
    ) -> Finding:
        module = find_expert_class(handle.expert_class).make(handle.hidden_dim)
        weights = {n.removeprefix("weight/"): x for n, x in state.tensors.items() if n.startswith("weight/")}
        module.load_state_dict(weights, strict=False)
        (y,) = outcome.tensors
        chosen = self._random.sample(range(y.shape[0]), min(self.rows, y.shape[0]))
        with torch.no_grad():
            truth = module(*(x[chosen] for x in inputs))
        error = ((y[chosen] - truth).abs().max() / truth.abs().max().clamp(min=1e-30)).item()
        if not error <= self.tolerance:
            self.caught[outcome.endpoint] += 1
            raise Cheated(
                f"{outcome.endpoint} answered for {handle.uid} with an error of {error:.3g}, {self.tolerance:g} is "
                f"allowed ({len(chosen)} of {y.shape[0]} rows recomputed)"
            )
        return Finding(handle.uid, outcome.endpoint, len(chosen), error)
