"""Score experts by what a text needs: hooks count what they do while a model of Transformers reads it (prune.py).

Each choice (token t, expert e, weight w) adds to the expert's

    count       1
    mass        w
    saliency    w * ||output of e for t||    which is what the layer's sum would lack without e

Scores.of() makes scores of them. REAP's is the mean saliency over the tokens of an expert, for which each expert is
computed a second time (_Meter).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmoe_ext.checkpoint.errors import CheckpointError
from fmoe_ext.checkpoint.files import atomic_file, read_json
from fmoe_ext.model_files import experts_modules

CRITERIA = ("reap", "mass", "frequency")


@dataclass(frozen=True)
class Scores:
    """Counts of one pass over a text, for each layer of experts by its path."""

    tokens: int
    count: dict[str, Tensor]  # [E] int64: tokens that chose an expert
    mass: dict[str, Tensor]  # [E] float64: sum of their weights
    saliency: dict[str, Tensor]  # [E] float64: sum of weight times norm of output; {} unless it was measured

    def of(self, criterion: str) -> dict[str, Tensor]:
        """Compute {path: score [E] of each expert, the higher the more it is needed}.

        reap: mean of weight times norm of output over the tokens of an expert (REAP, https://arxiv.org/abs/2510.13999);
        mass: sum of weights; frequency: number of tokens. An expert that no token chose has 0.
        Raises ValueError for another criterion, and for reap where the norms were not measured.
        """
        if criterion == "frequency":
            return {path: count.double() for path, count in self.count.items()}
        if criterion == "mass":
            return dict(self.mass)
        if criterion != "reap":
            raise ValueError(f'criterion must be one of {", ".join(CRITERIA)}, but got "{criterion}"')
        if not self.saliency:
            raise ValueError("these scores lack the norms of outputs, which reap needs: measure them again")
        return {path: self.saliency[path] / count.clamp(min=1) for path, count in self.count.items()}

    def save(self, file: Path, about: dict[str, Any]) -> None:
        """Write the scores and what they are about as JSON, completely or not at all."""
        parts = {name: getattr(self, name) for name in ("count", "mass", "saliency")}
        lists = {name: {path: t.tolist() for path, t in part.items()} for name, part in parts.items()}
        with atomic_file(file) as out:
            out.write(json.dumps({"about": about, "tokens": self.tokens, **lists}).encode())

    @classmethod
    def load(cls, file: Path, about: dict[str, Any]) -> Scores:
        """Load a file of save(); CheckpointError for a damaged file, and for one about something else."""
        content = read_json(file)
        if content.get("about") != about:
            raise CheckpointError(
                f"{file} has scores of another model or text ({content.get('about')}): remove it, or name another file"
            )
        try:
            return cls(
                int(content["tokens"]),
                _tensors(content["count"], torch.int64),
                _tensors(content["mass"], torch.float64),
                _tensors(content["saliency"], torch.float64),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def measure(model: Any, batches: Iterable[Tensor], criterion: str = "reap") -> Scores:
    """Measure the scores of a model's experts on batches of token ids [B, L].

    model: of Transformers, in memory or from fmoe_ext.stream(), in eval(). criterion: reap computes each expert once
    more for the norm of its output; the others only count.
    Raises ValueError for another criterion, for a model without experts modules, and if there is no token.

    Example:

        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> model = MixtralForCausalLM(config).eval()
        >>> scores = measure(model, [torch.randint(64, (2, 16))], "frequency")
        >>> {name: values.sum().item() for name, values in scores.of("frequency").items()}
        {'model.layers.0.mlp.experts': 64.0}
    """
    with _Measurement(model, criterion) as found:
        for batch in batches:
            found.read(batch)
    if found.tokens == 0:
        raise ValueError("the text has no token")
    return found.scores()


def earlier(file: Path | None, about: dict[str, Any], criterion: str) -> Scores | None:
    """Load the scores of an earlier call, of a part of the text or all; None where there is no file.

    Raises what Scores.load() raises, and CheckpointError for a file that lacks what the criterion needs.
    """
    if file is None or not file.exists():
        return None
    found = Scores.load(file, about)
    if criterion == "reap" and not found.saliency:
        raise CheckpointError(f"{file} lacks the norms of outputs, which reap needs: name another file")
    return found


def measure_into(
    file: Path | None,
    about: dict[str, Any],
    model: Any,
    batches: Sequence[Tensor],
    criterion: str,
    say: Callable[[str], None],
) -> Scores:
    """Measure as measure() does, and keep the scores in a file, from which a later call goes on; None: keep nothing.

    about: what the scores belong to (JSON). The file is written after each batch. Raises what earlier() raises.
    """
    before = earlier(file, about, criterion)
    # batches that were read: all but the last have the same number of tokens
    done = 0 if before is None else -(-before.tokens // batches[0].numel())
    if before is not None and done == len(batches):
        say(f"scores of {file}")
        return before
    with _Measurement(model, criterion, before) as found:
        for i, batch in enumerate(batches[done:], done + 1):
            say(f"reading part {i} of {len(batches)} of the text")
            found.read(batch)
            if file is not None:
                found.scores().save(file, about)
    return found.scores()


class _Measurement:
    """Counts what a model's experts do while it reads, until the block ends. before: counts to go on from."""

    def __init__(self, model: Any, criterion: str, before: Scores | None = None) -> None:
        if criterion not in CRITERIA:
            raise ValueError(f'criterion must be one of {", ".join(CRITERIA)}, but got "{criterion}"')
        found = experts_modules(model)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no experts module that Transformers lets others compute"
            )
        self._model = model
        self.tokens = 0 if before is None else before.tokens
        self._meters = {path: _Meter(module, criterion == "reap") for path, module in found.items()}
        if before is not None:
            for path, meter in self._meters.items():
                meter.count, meter.mass = before.count[path], before.mass[path]
                meter.saliency = before.saliency.get(path)

    def __enter__(self) -> _Measurement:
        return self

    def __exit__(self, *_: object) -> None:
        for meter in self._meters.values():
            meter.hook.remove()

    @torch.no_grad()
    def read(self, batch: Tensor) -> None:
        """Let the model read token ids [B, L]; logits are not computed."""
        self._model.base_model(input_ids=batch, use_cache=False)
        self.tokens += batch.numel()

    def scores(self) -> Scores:
        """Return the counts so far."""
        meters = self._meters.items()
        saliency = {path: m.saliency for path, m in meters if m.saliency is not None}
        return Scores(self.tokens, {p: m.count for p, m in meters}, {p: m.mass for p, m in meters}, saliency)


def _tensors(lists: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    return {path: torch.tensor(values, dtype=dtype, device="cpu") for path, values in lists.items()}


class _Meter:
    """Counts the choices of one experts module: its forward takes hidden states, indices and weights."""

    def __init__(self, experts: Any, with_norms: bool) -> None:
        size = int(experts.num_experts)
        self.count = torch.zeros(size, dtype=torch.int64, device="cpu")
        self.mass = torch.zeros(size, dtype=torch.float64, device="cpu")
        self.saliency = torch.zeros(size, dtype=torch.float64, device="cpu") if with_norms else None
        self.is_busy = False
        self.hook = experts.register_forward_hook(self._see, with_kwargs=True)

    def _see(self, experts: Any, given: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
        if self.is_busy:  # computing a norm, by this module's forward
            return
        order = ("hidden_states", "top_k_index", "top_k_weights")
        x, topk_idx, weights = (named[name] if name in named else given[i] for i, name in enumerate(order))
        # [T, K] each. Routers with choices of no expert give numbers behind those of experts, which count for nothing.
        is_here = topk_idx < self.count.numel()
        idx, w = topk_idx.clamp(max=self.count.numel() - 1).cpu(), (weights * is_here).double().cpu()
        self.count += torch.bincount(idx[is_here.cpu()], minlength=self.count.numel())
        self.mass.index_add_(0, idx.flatten(), w.flatten())
        if self.saliency is None:
            return
        self.is_busy = True  # the forward below calls this hook again
        try:
            # one choice at a time: the output of K together has no norm of each
            for k in range(topk_idx.shape[1]):
                one = torch.ones_like(weights[:, :1])
                y = experts(x, topk_idx[:, k : k + 1], one)
                self.saliency.index_add_(0, idx[:, k], w[:, k] * y.double().norm(dim=-1).cpu())
        finally:
            self.is_busy = False
