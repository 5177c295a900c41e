"""Is what is generated what is trained? Log-probabilities of a text from one forward, and from a model that generates.

Training by a model's own samples (GRPO and its kin) compares the log-probabilities of two programs: the forward of
training has the whole text, generation has one token at a time and a cache. They should be equal and seldom are, since
most products are summed in another order for one row than for many. Under batch_invariant() they are equal to the bit.

A text is computed once as in training, then in each way that generation has: by the model's forward with a cache, and
by generate(), which is made to choose the text's tokens and works where a cache has another name. Hooks on all modules
keep inputs and outputs of forwards. Where log-probabilities differ, the first module is named whose output differs
though its input does not, or which wrote into its input; where the input of the first one differs already, the
difference arose in the code of the module around it.

Equal texts do not prove the rest. So the report also names lengths at which the model changes and that no text
had (lengths.py), and operators that the mode does not cover (coverage.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fmoe_ext.audit.cases import SEED, AuditError
from fmoe_ext.audit.coverage import Uncovered, uncovered_operators
from fmoe_ext.audit.lengths import lengths_that_matter
from fmoe_ext.audit.shrink import vocabulary_of
from fmoe_ext.audit.source import find, is_of_transformers
from fmoe_ext.ops import batch_invariant
from fmoe_ext.ops.batch_invariant import is_batch_invariant

_NUM_TEXTS, _NUM_TOKENS = 2, 24  # of random tokens, if none are given
_SEARCHED = (
    "padded on the left by 3",
    "padded on the right",
    "static cache",
)  # where a model may call other operators
# ways that generate nothing: forwards of whole texts
_WHOLE_TEXTS = ("padded on the right", "each text alone", "on one thread")
_AROUND = 4  # tokens before and behind a length at which the model changes, which are computed one at a time
_MOST_TOKENS = 1 << 10  # of a longer text across such lengths
_MOST_WORK = 1 << 37  # its tokens times the model's parameters
_MOST_BYTES = 1 << 24  # of a buffer that is put back; larger ones are packed weights, which no forward writes

# {where it stands among arguments or results: tensor of floats [B, L, ...]}
_Rows: TypeAlias = dict[str, Tensor]
# Of one forward, what each module took, what that became in the call, and what it returned, for each of its calls; in
# the order in which modules end.
_Seen: TypeAlias = dict[str, list[tuple[_Rows, _Rows, _Rows]]]


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
    lengths = lengths_that_matter(model)
    across: list[int] = []  # lengths that a longer text passes
    longer = None
    if tokens is None:
        most = min(_MOST_TOKENS, _MOST_WORK // max(1, sum(p.numel() for p in model.parameters())))
        across = [length for length in lengths if _NUM_TOKENS <= length <= most]
        generator = torch.Generator("cpu").manual_seed(SEED)
        size = vocabulary_of(model.config, "give tokens=, integers [B, L]")
        tokens = torch.randint(size, (_NUM_TEXTS, _NUM_TOKENS), generator=generator, device="cpu")
        if across:
            longer = torch.randint(size, (1, across[-1] + _AROUND), generator=generator, device="cpu")
    num_texts, num_tokens = tokens.shape
    mode = batch_invariant if invariant else nullcontext
    can_be_off = invariant and not is_batch_invariant()  # the mode of the process cannot
    ways, untried, uncovered, unsearched, longest = [], [], [], None, num_tokens
    half = num_tokens // 2
    searched: list[Callable[[], Any]] = []  # forwards whose operators are looked at
    with _put_back(model):
        with mode():
            subject = _Subject(model, _called_with_keywords(model, tokens[:1]))
        for text in [tokens] if longer is None else [tokens, longer]:
            try:
                with mode():
                    truth = _forwards(subject, [_Part(text, text.shape[1])], trains=True)
            except Exception as error:
                if text is longer:
                    untried.append(f"{text.shape[1]:,} tokens: training raised {_first_line(error)}")
                else:
                    ways = [Way("the forward of training", error=f"{type(error).__name__}: {error}")]
                break
            longest = text.shape[1]
            if num_nan := int(truth.logits.isnan().any(-1).sum()):
                what = f"{num_nan} of {text.numel()} tokens have logits that are NaN: there is nothing to compare"
                ways.append(Way("the forward of training", error=what))
                break
            searched.append(partial(_forwards, subject, [_Part(text, longest)], trains=True))
            for name, run in _ways(subject, text, across if text is longer else ()).items():
                try:
                    with mode():
                        found = run()
                    ways.append(_compare(name, truth, found))
                    if text is longer or name in _SEARCHED:
                        searched.append(run)
                except Exception as error:
                    ways.append(Way(name, error=f"{type(error).__name__}: {error}"))
                    if can_be_off:
                        try:
                            run()
                        except Exception as usual:
                            ways[-1] = Way(name, error=_first_line(usual), is_impossible=True)
        else:
            if invariant:
                one = tokens[:1] if num_texts > 1 else tokens.repeat(2, 1)  # another size of the batch
                searched.append(partial(_forwards, subject, [_Part(one, num_tokens)], trains=True))
                compared = [way.name for way in ways if way.error is None]
                for several in (tokens, one):
                    if "token by token" in compared:
                        parts = [_Part(several[:, :half], half), _Part(several[:, half : half + 1], 1)]
                        searched.append(partial(_forwards, subject, parts))
                    elif "generate()" in compared:
                        searched.append(partial(_generate, subject, several[:, : half + 2], half))
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


def _called_with_keywords(model: nn.Module, tokens: Tensor) -> frozenset[nn.Module]:
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
    return frozenset(found) - {model}


def load_model(source: str, text: str | None) -> tuple[Any, Tensor | None]:
    """Load (model, tokens [1, L] of text or None): a folder of Transformers, or what "module:function" returns."""
    if ":" in source:
        if text is not None:
            raise AuditError(
                f"--text is for the tokenizer of a folder: let {source} return (model, tokens) instead"
            )
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
class _Subject:
    model: Any
    with_keywords: frozenset[nn.Module]  # called with tensors as keyword arguments

    @property
    def has_learned_prompt(self) -> bool:
        """PEFT's forward puts it in front of each call, also of one with a cache that has it already."""
        return bool(getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False))


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
    begin: int = 0  # the first token whose logits they are


def _ways(
    subject: _Subject, tokens: Tensor, across: Sequence[int] = ()
) -> dict[str, Callable[[], _Computed]]:
    """Return the ways to compare; for a longer text only those that pass the lengths one token at a time."""
    num_texts, length = tokens.shape
    half = length // 2
    if across:
        near = (n + i for n in across for i in range(-_AROUND, _AROUND))
        edges = sorted({0, *near, length})
        sizes = [end - begin for begin, end in pairwise(edges)]
    else:
        sizes = [half, *[1] * (length - half)]

    def parts(*sizes: int) -> list[_Part]:
        return [_Part(part, part.shape[1]) for part in tokens.split(list(sizes), 1)]

    def padded_left(num_pads: int) -> _Computed:
        pads = tokens[:1, :1].expand(num_texts, num_pads)
        mask = torch.cat((torch.zeros_like(pads), torch.ones_like(tokens)), 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        whole, begin, inputs = torch.cat((pads, tokens), 1), 0, []
        for size in (sizes[0] + num_pads, *sizes[1:]):
            end = begin + size
            real = min(size, end - num_pads)
            inputs.append(_Part(whole[:, begin:end], real, mask[:, :end], positions[:, begin:end]))
            begin = end
        return _forwards(subject, inputs)

    def padded_right() -> _Computed:
        pads = torch.full_like(tokens[:, :3], int(tokens[0, 0]))
        mask = torch.cat((torch.ones_like(tokens), torch.zeros_like(pads)), 1)
        return _forwards(subject, [_Part(torch.cat((tokens, pads), 1), length, mask, pads_right=True)])

    def alone(*sizes: int) -> _Computed:
        texts = tokens.split(1)
        return _join(
            [_forwards(subject, [_Part(p, p.shape[1]) for p in t.split(list(sizes), 1)]) for t in texts], 0
        )

    def on_one_thread() -> _Computed:
        num = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _forwards(subject, [_Part(tokens, length)])
        finally:
            torch.set_num_threads(num)

    def static_cache() -> _Computed:
        from transformers import StaticCache

        return _forwards(
            subject, parts(*sizes), cache=StaticCache(subject.model.config, max_cache_len=length + 3)
        )

    ways: dict[str, Callable[[], _Computed]]
    if across:
        passed = f"{length:,} tokens, one at a time at {', '.join(f'{n:,}' for n in across)}"
        ways = {
            passed: lambda: _forwards(subject, parts(*sizes)),
            f"{passed}, padded on the left": lambda: padded_left(3),
            f"{passed}, static cache": static_cache,
            f"{length:,} tokens, generate()": lambda: _generate(subject, tokens, across[-1] - _AROUND),
        }
    else:
        ways = {
            "token by token": lambda: _forwards(subject, parts(*[1] * length)),
            "prefill in parts": lambda: _forwards(subject, parts(half - 1, 1, length - half)),
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
        ways["generate()"] = lambda: _generate(subject, tokens, half)
    if subject.has_learned_prompt:
        able = (*_WHOLE_TEXTS, "generate()")
        ways = {name: run for name, run in ways.items() if name.endswith(able)}
    return ways


def _generate(subject: _Subject, tokens: Tensor, num_given: int) -> _Computed:
    """The logits of generate(), which is given the first tokens of each text and has no choice about the others."""
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
    return _Computed(torch.stack(out.logits, 1), begin=num_given - 1)


def _forwards(
    subject: _Subject, parts: Sequence[_Part], cache: Any = None, trains: bool = False
) -> _Computed:
    """The logits of all parts, one after another with a cache if there are several."""
    found: list[_Computed] = []
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
        found.append(_Computed(_real(logits, part), seen))
    return found[0] if len(found) == 1 else _join(found, 1)


def _join(found: Sequence[_Computed], dim: int) -> _Computed:
    """Results of texts (dim 0), or of parts of a text (dim 1), as if they had been computed together."""
    together = _Computed(torch.cat([one.logits for one in found], dim))

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


@contextmanager
def _watch(subject: _Subject, part: _Part) -> Iterator[_Seen]:
    """Inputs and outputs of all modules in a forward; an error says in which module it was raised."""
    model = subject.model
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}
    seen: _Seen = {}
    running: list[
        tuple[str, dict[str, Tensor], _Rows]
    ] = []  # a module's name, what it took, its rows at the start

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
    """The tensors of floats in what a module takes or returns, by their places in it."""
    if isinstance(value, Tensor):
        return {where: value.detach()} if value.is_floating_point() else {}
    if isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    found: dict[str, Tensor] = {}
    for name, part in value.items() if isinstance(value, dict) else ():
        found |= _floats(part, f"{where}.{name}")
    return found


def _rows(tensors: dict[str, Tensor], part: _Part) -> _Rows:
    """The rows of the real tokens, [B, L, ...]; nothing of a tensor that has no row for each token."""
    batch, length = part.tokens.shape
    rows = {}
    for where, t in tensors.items():
        if t.dim() > 1 and t.shape[:2] == (batch, length):
            rows[where] = _real(t, part).clone()
        elif t.dim() > 0 and t.shape[0] == batch * length:
            rows[where] = _real(t.view(batch, length, *t.shape[1:]), part).clone()
    return rows


def _real(t: Tensor, part: _Part) -> Tensor:
    return t[:, : part.num_real] if part.pads_right else t[:, t.shape[1] - part.num_real :]


def _compare(name: str, truth: _Computed, ours: _Computed) -> Way:
    dtype = torch.promote_types(ours.logits.dtype, torch.float32)  # generate() returns float32
    logits = truth.logits[:, ours.begin : ours.begin + ours.logits.shape[1]]
    expected, found = (torch.log_softmax(one.to(dtype), -1) for one in (logits, ours.logits))
    is_equal = (expected == found) | (expected.isnan() & found.isnan())
    if bool(is_equal.all()):
        return Way(name, 1.0)
    kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
    largest = (expected - found).abs().max().item()
    first = _parting(truth.seen, ours.seen) if ours.seen else ""
    return Way(name, is_equal.float().mean().item(), kl, largest, first)


def _parting(truth: _Seen, ours: _Seen) -> str:
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
