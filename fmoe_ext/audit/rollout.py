"""Is what is generated what is trained? Log-probabilities of a text from one forward, and from a model that generates.

Training by a model's own samples (GRPO and its kin) compares the log-probabilities of two programs: the forward of
training has the whole text, generation has one token at a time and a cache. They should be equal and seldom are, since
most products are summed in another order for one row than for many. Under batch_invariant() they are equal to the bit.

A text is computed once as in training, then in each way that generation has (_ways): by the model's forward with a
cache, and by generate(), which is made to choose the text's tokens and works where a cache has another name. Where
log-probabilities differ, the first module is named in which they part (forwards.py).

Equal texts do not prove the rest. So the report also names lengths at which the model changes and that no text had, and
operators that the mode does not cover (coverage.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fmoe_ext.audit.cases import SEED, AuditError
from fmoe_ext.audit.coverage import Uncovered, lengths_that_matter, uncovered_operators
from fmoe_ext.audit.forwards import Computed, Part, Subject, forwards, generate, join, parting
from fmoe_ext.audit.shrink import vocabulary_of
from fmoe_ext.audit.source import is_of_transformers
from fmoe_ext.ops import batch_invariant
from fmoe_ext.ops.batch_invariant import is_batch_invariant

_NUM_TEXTS, _NUM_TOKENS = 2, 24  # of random tokens, if none are given
_TRAINING = "the forward of training"
# ways in which a model may call other operators
_SEARCHED = ("padded on the left by 3", "padded on the right", "static cache")
# ways that generate nothing: forwards of whole texts
_WHOLE_TEXTS = ("padded on the right", "each text alone", "on one thread")
_AROUND = 4  # tokens before and behind a length at which the model changes, which are computed one at a time
_MOST_TOKENS = 1 << 10  # of a longer text across such lengths
_MOST_WORK = 1 << 37  # its tokens times the model's parameters
_MOST_BYTES = 1 << 24  # of a buffer that is put back; larger ones are packed weights, which no forward writes


@dataclass(frozen=True)
class Way:
    """A way to compute a text's log-probabilities, compared with the forward of training."""

    name: str
    equal: float = 0.0  # share of the log-probabilities that have the same bits
    kl: float = 0.0  # from training to it, the mean over tokens, in nats
    largest: float = 0.0  # difference of a log-probability
    first: str = ""  # where the two part; not known of generate()
    error: str | None = None  # what it raised, and in which module
    is_impossible: bool = False  # it raises without batch_invariant() too: there is nothing to compare

    @property
    def ok(self) -> bool:
        """True if all bits are equal."""
        return self.error is None and self.equal == 1.0

    def __str__(self) -> str:
        if self.is_impossible:
            return f"impossible {self.name}: raises without batch_invariant() too: {self.error}"
        if self.error is not None:
            return f"FAILED     {self.name}: {self.error}"
        if self.ok:
            return f"equal      {self.name}"
        share = math.floor(1000 * self.equal) / 10  # not 100.0 while one differs
        return (
            f"DIFFERENT  {self.name}: {share}% of the log-probabilities have the same bits, KL {self.kl:.1e}, off by "
            f"up to {self.largest:.1e}" + (f"; they part in {self.first}" if self.first else "")
        )


@dataclass(frozen=True)
class RolloutReport:
    """Findings about a model and a text; str() has a line for each way to generate."""

    ways: Sequence[Way]
    num_texts: int
    num_tokens: int  # of each text
    dtype: str
    seconds: float
    longest: int = 0  # tokens of the longest text
    uncovered: Sequence[Uncovered] = ()  # operators that batch_invariant() does not cover
    untried: Sequence[str] = ()  # what the texts do not show
    unsearched: str | None = None  # what the search for uncovered operators raised

    @property
    def ok(self) -> bool:
        """True if every possible way, one that generates among them, has training's bits by covered operators."""
        is_equal = self._generates and all(way.ok or way.is_impossible for way in self.ways)
        return is_equal and not self.uncovered and self.unsearched is None

    @property
    def _generates(self) -> bool:
        return any(not way.is_impossible and way.name not in _WHOLE_TEXTS for way in self.ways)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON's types."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        lines = [
            *map(str, self.ways),
            *(f"UNCOVERED  {one}: other bits at other sizes" for one in self.uncovered),
            *(
                [f"FAILED     the search for operators that are not covered: {self.unsearched}"]
                * bool(self.unsearched)
            ),
            *(f"not tried  {what}" for what in self.untried),
        ]
        size = f"{self.num_texts} x {self.num_tokens} tokens, {self.dtype}, {self.seconds:.0f} s"
        if self.ok:
            verdict = f"what is generated is trained, up to {self.longest:,} tokens"
        elif not all(way.ok or way.is_impossible for way in self.ways):
            verdict = "what is generated is not what is trained"
        elif not self._generates:
            verdict = "no way to generate could be compared"
        else:
            verdict = "equal here, but not shown for other texts"
        return "\n".join([*lines, f"{size}: {verdict}"])


def audit_rollout(model: Any, tokens: Tensor | None = None, *, invariant: bool = True) -> RolloutReport:
    """Compare the log-probabilities of a text that is generated with those of the forward of training.

    model: a causal language model of Transformers, in the dtype and with the adapters that it trains with; it is left
    in its own train() or eval(), and buffers that its forward writes, of up to 16 MiB each, are put back.
    tokens [B, L] int64: without padding, at least 4 a text; None takes random ones, and a longer text where the model
    changes with the length and that text can be afforded.
    invariant: under batch_invariant(); False shows what it changes.
    Ways: token by token, a text in parts, a static cache, padding on the left (generated) and on the right, each text
    alone, whole and token by token, one thread where torch has several, generate(). With learned prompts of PEFT, which
    only generate() puts in front of a cache, no other way generates. Raises AuditError for what cannot be compared;
    what a way raises is part of the report, as are lengths that no text had and operators that are not covered.
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
    if tokens is not None and (tokens.dim() != 2 or tokens.shape[1] < 4 or tokens.is_floating_point()):
        raise AuditError(
            f"tokens must be integers [B, L] with L >= 4, but got {tokens.dtype}, {list(tokens.shape)}"
        )
    began = time.monotonic()
    # 1. The texts, each with the lengths that it passes: the one that is given, or random ones.
    lengths = lengths_that_matter(model)
    texts: list[tuple[Tensor, list[int]]]
    if tokens is not None:
        texts = [(tokens, [])]
    else:
        most = min(_MOST_TOKENS, _MOST_WORK // max(1, sum(p.numel() for p in model.parameters())))
        across = [length for length in lengths if _NUM_TOKENS <= length <= most]
        vocabulary = vocabulary_of(model.config, "give tokens=, integers [B, L]")
        generator = torch.Generator("cpu").manual_seed(SEED)
        draw = partial(torch.randint, vocabulary, generator=generator, device="cpu")
        tokens = draw((_NUM_TEXTS, _NUM_TOKENS))
        texts = [(tokens, [])]
        if across:
            texts.append((draw((1, across[-1] + _AROUND)), across))
    num_texts, num_tokens = tokens.shape
    mode = batch_invariant if invariant else nullcontext
    can_be_off = invariant and not is_batch_invariant()  # the mode of the process cannot
    ways: list[Way] = []
    untried, uncovered, unsearched, longest, is_trained = [], [], None, num_tokens, True
    searched: list[Callable[[], Any]] = []  # forwards whose operators are looked at
    with _put_back(model):
        with mode():
            subject = Subject.of(model, tokens[:1])
        # 2. Each way of each text, beside the forward of training.
        for text, passed in texts:
            train = partial(forwards, subject, [Part(text, text.shape[1])], trains=True)
            try:
                with mode():
                    truth = train()
            except Exception as error:
                if passed:
                    untried.append(f"{text.shape[1]:,} tokens: training raised {_first_line(error)}")
                else:
                    ways, is_trained = [Way(_TRAINING, error=f"{type(error).__name__}: {error}")], False
                break
            longest = text.shape[1]
            if num_nan := int(truth.logits.isnan().any(-1).sum()):
                what = f"{num_nan} of {text.numel()} tokens have logits that are NaN: there is nothing to compare"
                ways.append(Way(_TRAINING, error=what))
                is_trained = False
                break
            searched.append(train)
            for name, run in _ways(subject, text, passed).items():
                try:
                    with mode():
                        found = run()
                    ways.append(_compare(name, truth, found))
                    if passed or name in _SEARCHED:
                        searched.append(run)
                except Exception as error:
                    ways.append(Way(name, error=f"{type(error).__name__}: {error}"))
                    if can_be_off:
                        try:
                            run()
                        except Exception as usual:
                            ways[-1] = Way(name, error=_first_line(usual), is_impossible=True)
        # 3. Operators that the mode does not cover, in forwards of several sizes.
        if invariant and is_trained:
            half = num_tokens // 2
            one = tokens[:1] if num_texts > 1 else tokens.repeat(2, 1)  # another size of the batch
            searched.append(partial(forwards, subject, [Part(one, num_tokens)], trains=True))
            compared = [way.name for way in ways if way.error is None]
            for several in (tokens, one):
                if "token by token" in compared:
                    parts = [Part(several[:, :half], half), Part(several[:, half : half + 1], 1)]
                    searched.append(partial(forwards, subject, parts))
                elif "generate()" in compared:
                    searched.append(partial(generate, subject, several[:, : half + 2], half))
            try:
                with batch_invariant():
                    uncovered = uncovered_operators(model, searched)
            except Exception as error:
                unsearched = _first_line(error)
    untried += [
        f"texts of more than {length:,} tokens: {what} changes there"
        for length, what in lengths.items()
        if length >= longest
    ]
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    seconds = time.monotonic() - began
    return RolloutReport(ways, num_texts, num_tokens, dtype, seconds, longest, uncovered, untried, unsearched)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Put back the random state of the CPU and the buffers that forwards write or replace.

    With them the numbers of their modules, which say what the buffers are of: rotary positions of type "dynamic" keep
    the longest text for which they were computed.
    """
    kept: list[tuple[nn.Module, dict[str, Any], dict[str, Tensor], dict[str, Any]]] = []
    for module in model.modules():
        buffers: dict[str, Any] = dict(module._buffers)
        if buffers:
            copies = {
                name: t.clone()
                for name, t in buffers.items()
                if type(t) is Tensor and not (t.is_meta or t.is_inference()) and t.nbytes <= _MOST_BYTES
            }
            numbers = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, Tensor))}
            kept.append((module, buffers, copies, numbers))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, buffers, copies, numbers in kept:
            written = [name for name, copy in copies.items() if not torch.equal(buffers[name], copy)]
            replaced = [name for name, t in module._buffers.items() if t is not buffers.get(name)]
            with torch.no_grad():
                for name in written:
                    buffers[name].copy_(copies[name])
            if written or replaced:
                module._buffers.clear()
                module._buffers.update(buffers)
                vars(module).update(numbers)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _ways(subject: Subject, tokens: Tensor, across: Sequence[int] = ()) -> dict[str, Callable[[], Computed]]:
    """Return the ways to compare; for a longer text only those that pass the lengths one token at a time."""
    num_texts, length = tokens.shape
    half = length // 2
    if across:
        near = (n + i for n in across for i in range(-_AROUND, _AROUND))
        edges = sorted({0, *near, length})
        sizes = [end - begin for begin, end in pairwise(edges)]
    else:
        sizes = [half, *[1] * (length - half)]

    def parts(*sizes: int) -> list[Part]:
        return [Part(part, part.shape[1]) for part in tokens.split(list(sizes), 1)]

    def padded_left(num_pads: int) -> Computed:
        pads = tokens[:1, :1].expand(num_texts, num_pads)
        mask = torch.cat((torch.zeros_like(pads), torch.ones_like(tokens)), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        whole, begin, inputs = torch.cat((pads, tokens), 1), 0, []
        for size in (sizes[0] + num_pads, *sizes[1:]):
            end = begin + size
            real = min(size, end - num_pads)
            inputs.append(Part(whole[:, begin:end], real, mask[:, :end], positions[:, begin:end]))
            begin = end
        return forwards(subject, inputs)

    def padded_right() -> Computed:
        pads = torch.full_like(tokens[:, :3], int(tokens[0, 0]))
        mask = torch.cat((torch.ones_like(tokens), torch.zeros_like(pads)), 1)
        return forwards(subject, [Part(torch.cat((tokens, pads), 1), length, mask, pads_right=True)])

    def alone(*sizes: int) -> Computed:
        texts = tokens.split(1)
        return join(
            [forwards(subject, [Part(p, p.shape[1]) for p in t.split(list(sizes), 1)]) for t in texts], 0
        )

    def on_one_thread() -> Computed:
        num = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return forwards(subject, [Part(tokens, length)])
        finally:
            torch.set_num_threads(num)

    def static_cache() -> Computed:
        from transformers import StaticCache

        return forwards(
            subject, parts(*sizes), cache=StaticCache(subject.model.config, max_cache_len=length + 3)
        )

    ways: dict[str, Callable[[], Computed]]
    if across:
        passed = f"{length:,} tokens, one at a time at {', '.join(f'{n:,}' for n in across)}"
        ways = {
            passed: lambda: forwards(subject, parts(*sizes)),
            f"{passed}, padded on the left": lambda: padded_left(3),
            f"{passed}, static cache": static_cache,
            f"{length:,} tokens, generate()": lambda: generate(subject, tokens, across[-1] - _AROUND),
        }
    else:
        ways = {
            "token by token": lambda: forwards(subject, parts(*[1] * length)),
            "prefill in parts": lambda: forwards(subject, parts(half - 1, 1, length - half)),
            # two widths without a common divisor: one hides what depends on a place in the cache modulo that width
            "padded on the left by 3": lambda: padded_left(3),
            "padded on the left by 4": lambda: padded_left(4),
            "padded on the right": padded_right,
        }
        if num_texts > 1:
            ways["each text alone"] = lambda: alone(length)
            ways["each text alone, token by token"] = lambda: alone(*[1] * length)
        if torch.get_num_threads() > 1:
            ways["on one thread"] = on_one_thread
        ways["static cache"] = static_cache
        ways["generate()"] = lambda: generate(subject, tokens, half)
    if subject.has_learned_prompt:
        able = (*_WHOLE_TEXTS, "generate()")
        ways = {name: run for name, run in ways.items() if name.endswith(able)}
    return ways


def _compare(name: str, truth: Computed, ours: Computed) -> Way:
    dtype = torch.promote_types(ours.logits.dtype, torch.float32)  # generate() returns float32
    logits = truth.logits[:, ours.begin : ours.begin + ours.logits.shape[1]]
    expected, found = (torch.log_softmax(one.to(dtype), -1) for one in (logits, ours.logits))
    is_equal = (expected == found) | (expected.isnan() & found.isnan())
    if bool(is_equal.all()):
        return Way(name, 1.0)
    kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
    largest = (expected - found).abs().max().item()
    first = parting(truth.seen, ours.seen) if ours.seen else ""
    return Way(name, is_equal.float().mean().item(), kl, largest, first)
