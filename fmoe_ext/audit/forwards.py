"""Forwards of a model over a text, with what each of its modules took and returned, and where two of them part.

rollout.py computes one text in several ways, each by forwards() or generate(), and compares their logits. Hooks on all
modules keep inputs and outputs of forwards. Where logits differ, parting() names the first module whose output differs
though its input does not, or which wrote into its input; where the input of the first one differs already, the
difference arose in the code of the module around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fmoe_ext.audit.cases import AuditError

# {where it stands among arguments or results: tensor of floats [B, L, ...]}
_Rows: TypeAlias = dict[str, Tensor]
# Of one forward, what each module took, what that became in the call, and what it returned, for each of its calls; in
# the order in which modules end.
_Seen: TypeAlias = dict[str, list[tuple[_Rows, _Rows, _Rows]]]


@dataclass(frozen=True)
class Subject:
    """The audited model: a causal language model of Transformers."""

    model: Any
    with_keywords: frozenset[nn.Module]  # modules that get tensors as keyword arguments in its forward

    @classmethod
    def of(cls, model: nn.Module, tokens: Tensor) -> Subject:
        """Find these modules in a forward of tokens [B, L]."""
        found = set()

        def leave(module: nn.Module, _: Any, kwargs: Any, out: Any) -> None:
            if _floats(kwargs):
                found.add(module)

        handle = register_module_forward_hook(leave, with_kwargs=True)
        try:
            with torch.no_grad(), suppress(Exception):  # which the forward of training raises again
                model(input_ids=tokens, use_cache=False)
        finally:
            handle.remove()
        return cls(model, frozenset(found) - {model})

    @property
    def has_learned_prompt(self) -> bool:
        """PEFT's forward puts it in front of each call, also of one with a cache that has it already."""
        return bool(getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False))


@dataclass(frozen=True)
class Part:
    """The input of one forward."""

    tokens: Tensor  # [B, S]
    num_real: int  # the last ones, or the first ones where padding is on the right
    mask: Tensor | None = None  # [B, S so far]
    positions: Tensor | None = None  # [B, S]
    pads_right: bool = False


@dataclass
class Computed:
    """Results for the real tokens [B, L] of one way."""

    logits: Tensor
    seen: _Seen = field(default_factory=dict)
    begin: int = 0  # the first token whose logits they are


def forwards(subject: Subject, parts: Sequence[Part], cache: Any = None, trains: bool = False) -> Computed:
    """Run the parts of a text, one after another with a cache if there are several; trains: with gradients."""
    found: list[Computed] = []
    uses_cache = len(parts) > 1
    for part in parts:
        given = {"attention_mask": part.mask, "position_ids": part.positions, "past_key_values": cache}
        given = {name: value for name, value in given.items() if value is not None}
        with torch.set_grad_enabled(trains), _watch(subject, part) as seen:
            out = subject.model(input_ids=part.tokens, use_cache=uses_cache, **given)
        cache = out.past_key_values if uses_cache else None
        if uses_cache and cache is None:
            raise AuditError("the model was called with use_cache=True, but returned no past_key_values")
        # the last ones: a learned prompt in front of the text has logits too
        logits = out.logits.detach()[:, -part.tokens.shape[1] :]
        found.append(Computed(_real(logits, part), seen))
    return found[0] if len(found) == 1 else join(found, 1)


def join(found: Sequence[Computed], dim: int) -> Computed:
    """Join results of texts (dim 0), or of parts of a text (dim 1), as if they had been computed together."""
    together = Computed(torch.cat([one.logits for one in found], dim))

    def joined(parts: Sequence[_Rows]) -> _Rows:
        rows = {}
        for where in parts[0]:
            there = [part[where] for part in parts if where in part]
            # with one text or token, the rows of a module may look like something else
            if len(there) == len(parts) and len({(t.dim(), t.shape[2:]) for t in there}) == 1:
                rows[where] = torch.cat(there, dim)
        return rows

    for name in found[0].seen:
        calls = zip(*(one.seen.get(name, []) for one in found), strict=False)
        together.seen[name] = [
            (joined([p[0] for p in parts]), joined([p[1] for p in parts]), joined([p[2] for p in parts]))
            for parts in calls
        ]
    return together


def generate(subject: Subject, tokens: Tensor, num_given: int) -> Computed:
    """Run generate(), which is given the first tokens of each text and has no choice about the others."""
    out = subject.model.generate(
        input_ids=tokens[:, :num_given],
        attention_mask=torch.ones_like(tokens[:, :num_given]),
        prefix_allowed_tokens_fn=lambda text, so_far: [int(tokens[text, len(so_far)])],
        max_new_tokens=tokens.shape[1] - num_given,
        eos_token_id=None,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    if not torch.equal(out.sequences, tokens):
        raise AuditError("generate() chose other tokens than prefix_allowed_tokens_fn= allows")
    return Computed(torch.stack(out.logits, 1), begin=num_given - 1)


@contextmanager
def _watch(subject: Subject, part: Part) -> Iterator[_Seen]:
    """Keep inputs and outputs of all modules in a forward; an error says in which module it was raised."""
    model = subject.model
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    seen: _Seen = {}
    # a module's name, what it took, its rows at the start
    running: list[tuple[str, dict[str, Tensor], _Rows]] = []

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            given = _floats(args)
            if isinstance(module, nn.Embedding) and args:
                given["indices"] = args[0].detach()  # which the code in front of it may have computed
            running.append((names[module], given, _rows(given, part)))

    def add_keywords(module: nn.Module, args: Any, kwargs: Any) -> None:
        _, given, before = running[-1]
        more = _floats(kwargs)
        given.update(more)
        before.update(_rows(more, part))

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        if module in names:
            name, given, before = running.pop()
            seen.setdefault(name, []).append((before, _rows(given, part), _rows(_floats(out), part)))

    # for all modules, not on each: experts whose modules have hooks take a slower path, which is not to be audited;
    # but torch gives keyword arguments only to a module's own hook, which runs after those
    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave),
        *(m.register_forward_pre_hook(add_keywords, with_kwargs=True) for m in subject.with_keywords),
    ]
    try:
        yield seen
    except Exception as error:
        if running:
            raise RuntimeError(f"{running[-1][0]}: {error}") from error
        raise
    finally:
        for handle in handles:
            handle.remove()


def _floats(value: Any, where: str = "") -> dict[str, Tensor]:
    """Return the tensors of floats in what a module takes or returns, by their places in it."""
    if isinstance(value, Tensor):
        return {where: value.detach()} if value.is_floating_point() else {}
    if isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    found: dict[str, Tensor] = {}
    for name, part in value.items() if isinstance(value, dict) else ():
        found |= _floats(part, f"{where}.{name}")
    return found


def _rows(tensors: dict[str, Tensor], part: Part) -> _Rows:
    """Return the rows of the real tokens, [B, L, ...]; nothing of a tensor that has no row for each token."""
    batch, length = part.tokens.shape
    rows = {}
    for where, t in tensors.items():
        if t.dim() > 1 and t.shape[:2] == (batch, length):
            rows[where] = _real(t, part).clone()
        elif t.dim() > 0 and t.shape[0] == batch * length:
            rows[where] = _real(t.view(batch, length, *t.shape[1:]), part).clone()
    return rows


def _real(t: Tensor, part: Part) -> Tensor:
    return t[:, : part.num_real] if part.pads_right else t[:, t.shape[1] - part.num_real :]


def parting(truth: _Seen, ours: _Seen) -> str:
    """Name the first module, in the order of the forward, whose output differs, or what it wrote into its input."""
    for name, calls in truth.items():
        for expected, found in zip(calls, ours.get(name, []), strict=False):
            before, after, out = (_differ(a, b) for a, b in zip(expected, found, strict=True))
            if after or out:
                if not before:
                    return name
                around, _, last = name.rpartition(".")
                return f"the code of {around or 'the model'} in front of its {last}"
    return "the code behind the last module"


def _differ(expected: _Rows, found: _Rows) -> bool:
    """Return whether a tensor has other bits; one that has another shape is of another use."""
    for where in expected.keys() & found.keys():
        a, b = expected[where], found[where]
        if a.shape == b.shape and not bool(((a == b) | (a.isnan() & b.isnan())).all()):
            return True
    return False
