"""Findings of the doctor: INVARIANTS with their advice, the Finding of a check, the Report as lines and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

OK, WRONG, UNDECIDED = "ok", "wrong", "undecided"

_NO_THREAD = "no thread"
# invariant: (issue or pull request where a model violated it, or that asks for it: docs/museum.md links to all; advice)
INVARIANTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "router-gradient": (
            "Megatron-LM#894",
            "take the softmax before the top k; with top_k=1 do not normalise, or the weight is always 1",
        ),
        "expert-gradient": ("transformers#48205", "keep the expert's output in the graph and in the sum"),
        "finite": ("vmoe#218", "find the division by zero or the uninitialised rows in the backward"),
        "gradient-size": (
            "DeepSpeed#6545",
            "scale experts' gradients like all others: finite differences of the loss show the right size",
        ),
        "used": (_NO_THREAD, "call every layer, and add what it computes to the output"),
        "registered": (_NO_THREAD, "hold experts in an nn.ModuleList: a list hides them from the optimizer"),
        "input-gradient": (_NO_THREAD, "keep the experts' inputs in the graph: no detach() before them"),
        "weighted": ("Automodel#2591", "multiply an expert's whole output by its weight, the bias included"),
        "choice-bias": ("PaddleFormers#3452", "take the weights from the scores without the bias"),
        "bias-direction": (
            _NO_THREAD,
            "add the bias to the scores of the choice; lower it where the load is high",
        ),
        "cleared": (_NO_THREAD, "clear the list of losses at the start of each step"),
        "experts-differ": ("Muon#65", "draw each expert from its own random numbers, or say upcycled=True"),
        "optimizer": (_NO_THREAD, "give every trainable parameter to the optimizer"),
        "frozen": (_NO_THREAD, "leave frozen parameters out of the optimizer and of in-place updates"),
        "clip-norm": ("Megatron-LM#5916", "clip by one norm over all ranks' gradients, every expert's once"),
        "accumulation": (
            _NO_THREAD,
            "divide every part of the loss, the router's too, by the number of microbatches",
        ),
        "balance-cost": (
            _NO_THREAD,
            "take the softmax once, multiply load and probability expert by expert, then sum",
        ),
        "balance-size": (
            "transformers#43688",
            "divide the counts by tokens * K and the probabilities by tokens: each sums to 1 over experts",
        ),
        "balance-padding": (
            "transformers#28505",
            "leave padding out of the counts, the losses and the capacity",
        ),
        "balance-in-loss": ("Automodel#1408", "add weight * balance to the loss, with its gradient"),
        "bias-once": (
            "torchtitan#1593",
            "count tokens once a step: not in recomputation, and not in evaluation",
        ),
        "recomputation": (
            "transformers#47467",
            "route as the first forward did: no state, no unrepeatable noise",
        ),
        "evaluation": ("transformers#33969", "draw noise only when training, never in evaluation"),
        "batch": ("torchtitan#1340", "let an output depend on its own sample alone; declare a capacity"),
        "causality": (_NO_THREAD, "let no later token move an earlier one: no statistics over tokens"),
        "history": (_NO_THREAD, "keep no scores, choices or counts of an earlier batch for a later one"),
        "own-row": ("torchtitan#1340", "return each row to its token, and let it depend on this token alone"),
        "choice": (_NO_THREAD, "compute each token by the experts with its highest scores, and by no others"),
        "weights": (
            _NO_THREAD,
            "multiply an expert's output by the score of this expert for this token, once",
        ),
        "normalised": (
            "torchtitan#1448",
            "divide a token's weights by their sum if the option says so, and only then",
        ),
        "top-k": ("MoLE#7", "read the number of experts of a token from the option"),
        "drops": (_NO_THREAD, "send every token to all of its experts, or declare a capacity"),
        "checkpoint": ("torchtitan#1222", "register buffers as persistent, and update them in place"),
        "optimizer-checkpoint": (_NO_THREAD, "save the optimizer's entries of every expert"),
        "repeatable": (_NO_THREAD, "seed every generator that the model draws from"),
        "options": ("trl#7222", "read the option where it acts, or refuse it by name"),
        "adapters": ("unsloth-zoo#1242", "use the adapter in the forward that really runs"),
        "merged": ("unsloth#6387", "merge every expert's delta in the orientation of its weight, or fail"),
        "adapter-targets": (
            "unsloth#6936",
            "name parameters that exist (PEFT: target_parameters for stacked experts)",
        ),
    }
)


@dataclass(frozen=True)
class Finding:
    """A verdict about one invariant in one module."""

    invariant: str  # a key of INVARIANTS
    module: str  # name of a module or parameter, or of a kind of them
    verdict: str  # OK, WRONG or UNDECIDED
    numbers: str  # what was measured, or why nothing could be

    def __str__(self) -> str:
        line = f"{self.verdict:9} {self.invariant:20} {self.module}: {self.numbers}"
        if self.verdict != WRONG:
            return line
        thread, advice = INVARIANTS[self.invariant]
        return f"{line}; {advice}" if thread == _NO_THREAD else f"{line}; see {thread}; {advice}"


@dataclass(frozen=True)
class Report:
    """All findings; str() has a line for each and a last one with the counts."""

    findings: Sequence[Finding]
    seconds: float

    @property
    def wrong(self) -> list[Finding]:
        """The findings of violated invariants."""
        return [finding for finding in self.findings if finding.verdict == WRONG]

    @property
    def ok(self) -> bool:
        """True if no invariant is violated and at least one was decided: a model that could not be examined is not."""
        return not self.wrong and any(finding.verdict == OK for finding in self.findings)

    def named(self) -> set[str]:
        """Return the names of the violated invariants."""
        return {finding.invariant for finding in self.wrong}

    def as_dict(self) -> dict[str, object]:
        """Make the report for json.dumps, with each invariant's thread and advice."""
        rows = [
            asdict(f) | dict(zip(("seen_in", "advice"), INVARIANTS[f.invariant], strict=True))
            for f in self.findings
        ]
        return {"ok": self.ok, "seconds": round(self.seconds, 2), "findings": rows}

    def __str__(self) -> str:
        counts = ", ".join(
            f"{sum(f.verdict == v for f in self.findings)} {v}" for v in (OK, WRONG, UNDECIDED)
        )
        return "\n".join([*map(str, self.findings), f"{counts}; {self.seconds:.1f} s"])
