"""Is what is generated what is trained? Log-probabilities of a text from one forward, and from a model that generates.

Training by a model's own samples (GRPO and its kin) compares the log-probabilities of two programs: the forward of
training has the whole text, generation has one token at a time and a cache. They should be equal and seldom are, since
most products are summed in another order for one row than for many. Under batch_invariant() they are equal to the bit.

A text is computed once as in training, then in each way that generation has. Hooks on all modules keep inputs and
outputs of both. Where log-probabilities differ, the first module is named whose output differs though its input does
not; where the input of the first one differs already, the difference arose in the code of the module around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fmoe_ext.audit.cases import SEED, AuditError
from fmoe_ext.audit.shrink import smallest_vocabulary
from fmoe_ext.audit.source import find, is_of_transformers
from fmoe_ext.ops import batch_invariant

NUM_TEXTS, NUM_TOKENS = 2, 24  # of random tokens, if none are given

# Of one forward, {module: (input, output) of each of its calls}, in the order in which modules end; each [B, L, ...].
_Seen: TypeAlias = dict[str, list[tuple[Tensor | None, Tensor | None]]]


@dataclass(frozen=True)
class Way:
    """A way to compute a text's log-probabilities, compared with the forward of training."""

    name: str
    equal: float = 0.0  # share of the log-probabilities that have the same bits
    kl: float = 0.0  # from training to it, the mean over tokens, in nats
    largest: float = 0.0  # difference of a log-probability
    first: str = ""  # where the two part
    error: str | None = None  # what it raised, and in which module

    @property
    def ok(self) -> bool:
        """True if all bits are equal."""
        return self.error is None and self.equal == 1.0

    def __str__(self) -> str:
        if self.error is not None:
            return f"FAILED     {self.name}: {self.error}"
        if self.ok:
            return f"equal      {self.name}"
        return (
            f"DIFFERENT  {self.name}: {self.equal:.1%} of the log-probabilities have the same bits, KL {self.kl:.1e}, "
            f"off by up to {self.largest:.1e}; they part in {self.first}"
        )


@dataclass(frozen=True)
class RolloutReport:
    """Findings about a model and a text; str() has a line for each way to generate."""

    ways: Sequence[Way]
    num_texts: int
    num_tokens: int  # of each text
    dtype: str
    seconds: float

    @property
    def ok(self) -> bool:
        """True if every way has the bits of training."""
        return all(way.ok for way in self.ways)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON's types."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        verdict = "what is generated is trained" if self.ok else "what is generated is not what is trained"
        size = f"{self.num_texts} x {self.num_tokens} tokens, {self.dtype}, {self.seconds:.0f} s"
        return "\n".join([*map(str, self.ways), f"{size}: {verdict}"])


def audit_rollout(model: Any, tokens: Tensor | None = None, *, invariant: bool = True) -> RolloutReport:
    """Compare the log-probabilities of a text that is generated with those of the forward of training.

    model: a causal language model of Transformers, in the dtype and with the adapters that it trains with; it is left
    in its own train() or eval(). tokens [B, L] int64: without padding, at least 4 a text; None takes random ones.
    invariant: under batch_invariant(); False shows what it changes.
    Ways: token by token, a text in parts, a static cache, padding on the left (generated) and on the right, each text
    alone, whole and token by token, one thread where torch has several. Raises AuditError for what cannot be compared;
    what a way raises is part of the report.
    Equivalent to: torch.equal(log_softmax(model(tokens).logits), log_softmax(model.generate's logits)).

    Example:

        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        ...     num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)
        >>> audit_rollout(MixtralForCausalLM(config).eval()).ok
        True
    """
    if not is_of_transformers(model):
        raise AuditError(
            f"a rollout is audited of a causal language model of Transformers, not of a {type(model).__name__}"
        )
    if tokens is None:
        generator = torch.Generator("cpu").manual_seed(SEED)
        size = smallest_vocabulary(model.config)
        tokens = torch.randint(size, (NUM_TEXTS, NUM_TOKENS), generator=generator, device="cpu")
    if tokens.dim() != 2 or tokens.shape[1] < 4 or tokens.is_floating_point():
        raise AuditError(
            f"tokens must be integers [B, L] with L >= 4, but got {tokens.dtype}, {list(tokens.shape)}"
        )
    began, ways = time.monotonic(), []
    with batch_invariant() if invariant else nullcontext():
        try:
            truth = _forwards(model, [_Part(tokens, tokens.shape[1])], trains=True)
        except Exception as error:
            ways = [Way("the forward of training", error=f"{type(error).__name__}: {error}")]
        else:
            for name, run in _ways(model, tokens).items():
                try:
                    ways.append(_compare(name, truth, run()))
                except Exception as error:
                    ways.append(Way(name, error=f"{type(error).__name__}: {error}"))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    num_texts, num_tokens = tokens.shape
    return RolloutReport(ways, num_texts, num_tokens, dtype, time.monotonic() - began)


def load_model(source: str, text: str | None) -> tuple[Any, Tensor | None]:
    """Load (model, tokens [1, L] of text or None): a folder of Transformers, or what "module:function" returns."""
    if ":" in source:
        made = find(source)()
        return made if isinstance(made, tuple) else (made, None)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fmoe_ext.checkpoint.errors import CheckpointError
    from fmoe_ext.checkpoint.model_folder import local_path

    try:
        folder = local_path(source)
        if not folder.is_dir():
            raise AuditError(f"{source} is no folder of a model of Transformers and no module:function")
        options = {"local_files_only": True, "trust_remote_code": False}
        model, tokens = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options), None
        if text is not None:
            tokens = AutoTokenizer.from_pretrained(folder, **options)(text, return_tensors="pt").input_ids
    except (CheckpointError, OSError, ValueError) as error:
        raise AuditError(f"{source} cannot be loaded: {error}") from error
    return model, tokens


@dataclass(frozen=True)
class _Part:
    """The input of one forward."""

    tokens: Tensor  # [B, S]
    num_real: int  # the last ones, or the first ones where padding is on the right
    mask: Tensor | None = None  # [B, S so far]
    positions: Tensor | None = None  # [B, S]
    pads_right: bool = False


@dataclass
class _Computed:
    """Results for the real tokens [B, L] of one way."""

    logits: Tensor
    seen: _Seen = field(default_factory=dict)


def _ways(model: Any, tokens: Tensor) -> dict[str, Callable[[], _Computed]]:
    num_texts, length = tokens.shape
    half = length // 2

    def parts(*sizes: int) -> list[_Part]:
        return [_Part(part, part.shape[1]) for part in tokens.split(list(sizes), 1)]

    def padded_left() -> _Computed:
        pads = torch.full_like(tokens[:, :3], int(tokens[0, 0]))
        mask = torch.cat((torch.zeros_like(pads), torch.ones_like(tokens)), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        whole, sizes, begin, inputs = torch.cat((pads, tokens), 1), [3 + half, *[1] * (length - half)], 0, []
        for size in sizes:
            end = begin + size
            real = min(size, end - 3)
            inputs.append(_Part(whole[:, begin:end], real, mask[:, :end], positions[:, begin:end]))
            begin = end
        return _forwards(model, inputs)

    def padded_right() -> _Computed:
        pads = torch.full_like(tokens[:, :3], int(tokens[0, 0]))
        mask = torch.cat((torch.ones_like(tokens), torch.zeros_like(pads)), 1)
        return _forwards(model, [_Part(torch.cat((tokens, pads), 1), length, mask, pads_right=True)])

    def alone(*sizes: int) -> _Computed:
        texts = tokens.split(1)
        return _join(
            [_forwards(model, [_Part(p, p.shape[1]) for p in t.split(list(sizes), 1)]) for t in texts], 0
        )

    def on_one_thread() -> _Computed:
        num = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _forwards(model, [_Part(tokens, length)])
        finally:
            torch.set_num_threads(num)

    ways: dict[str, Callable[[], _Computed]] = {
        "token by token": lambda: _forwards(model, parts(*[1] * length)),
        "prefill in parts": lambda: _forwards(model, parts(half - 1, 1, length - half)),
        "padded on the left": padded_left,
        "padded on the right": padded_right,
    }
    if num_texts > 1:
        ways["each text alone"] = lambda: alone(length)
        ways["each text alone, token by token"] = lambda: alone(*[1] * length)
    if torch.get_num_threads() > 1:
        ways["on one thread"] = on_one_thread
    from transformers import StaticCache

    try:
        cache = StaticCache(model.config, max_cache_len=length + 3)
    except Exception:  # of a kind of layer that static caches do not have
        return ways
    steps = parts(half, *[1] * (length - half))
    return ways | {"static cache": lambda: _forwards(model, steps, cache=cache)}


def _forwards(model: Any, parts: Sequence[_Part], cache: Any = None, trains: bool = False) -> _Computed:
    """The logits of all parts, one after another with a cache if there are several."""
    found: list[_Computed] = []
    uses_cache = len(parts) > 1
    for part in parts:
        given = {"attention_mask": part.mask, "position_ids": part.positions, "past_key_values": cache}
        given = {name: value for name, value in given.items() if value is not None}
        with torch.set_grad_enabled(trains), _watch(model, part) as seen:
            out = model(input_ids=part.tokens, use_cache=uses_cache, **given)
        cache = out.past_key_values if uses_cache else None
        found.append(_Computed(_real(out.logits.detach(), part), seen))
    return found[0] if len(found) == 1 else _join(found, 1)


def _join(found: Sequence[_Computed], dim: int) -> _Computed:
    """Results of texts (dim 0), or of parts of a text (dim 1), as if they had been computed together."""
    together = _Computed(torch.cat([one.logits for one in found], dim))

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        there = [t for t in tensors if t is not None]
        # with one text or token, the rows of a module may look like something else
        is_alike = len(there) == len(tensors) and len({(t.dim(), t.shape[2:]) for t in there}) == 1
        return torch.cat(there, dim) if is_alike else None

    for name in found[0].seen:
        calls = zip(*(one.seen.get(name, []) for one in found), strict=False)
        together.seen[name] = [
            (joined([given for given, _ in call]), joined([out for _, out in call])) for call in calls
        ]
    return together


@contextmanager
def _watch(model: nn.Module, part: _Part) -> Iterator[_Seen]:
    """Inputs and outputs of all modules in a forward; an error says in which module it was raised."""
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    seen: _Seen = {}
    running: list[str] = []

    def enter(module: nn.Module, _: Any) -> None:
        if module in names:
            running.append(names[module])

    def leave(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if module not in names:
            return
        running.pop()
        given, result = _first([*args, *kwargs.values()]), _first(out)
        pair = tuple(None if t is None else _rows(t.detach(), part) for t in (given, result))
        seen.setdefault(names[module], []).append(pair)  # type: ignore[arg-type]

    # for all modules, not on each: experts whose modules have hooks take a slower path, which is not to be audited
    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, with_kwargs=True),
    ]
    try:
        yield seen
    except Exception as error:
        if running:
            raise RuntimeError(f"{running[-1]}: {error}") from error
        raise
    finally:
        for handle in handles:
            handle.remove()


def _first(value: Any) -> Tensor | None:
    """The first tensor of floats in what a module takes or returns."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((t for t in map(_first, values) if t is not None), None)


def _rows(t: Tensor, part: _Part) -> Tensor | None:
    """The rows of the real tokens, [B, L, ...]; None for a tensor that has no row for each token."""
    batch, length = part.tokens.shape
    if t.dim() > 1 and t.shape[:2] == (batch, length):
        return _real(t, part).clone()
    if t.dim() > 0 and t.shape[0] == batch * length:
        return _real(t.view(batch, length, *t.shape[1:]), part).clone()
    return None


def _real(t: Tensor, part: _Part) -> Tensor:
    return t[:, : part.num_real] if part.pads_right else t[:, t.shape[1] - part.num_real :]


def _compare(name: str, truth: _Computed, ours: _Computed) -> Way:
    expected, found = (torch.log_softmax(one.logits.float(), -1) for one in (truth, ours))
    is_equal = (expected == found) | (expected.isnan() & found.isnan())
    if bool(is_equal.all()):
        return Way(name, 1.0)
    kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
    largest = (expected - found).abs().max().item()
    return Way(name, is_equal.float().mean().item(), kl, largest, _parting(truth.seen, ours.seen))


def _parting(truth: _Seen, ours: _Seen) -> str:
    """Name the first module, in the order of the forward, whose output differs."""
    for name, calls in truth.items():
        for expected, found in zip(calls, ours.get(name, []), strict=False):
            if _differ(expected[1], found[1]):
                if not _differ(expected[0], found[0]):
                    return name
                around, _, last = name.rpartition(".")
                return f"the code of {around or 'the model'} in front of its {last}"
    return "the code behind the last module"


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and not torch.equal(a, b)
