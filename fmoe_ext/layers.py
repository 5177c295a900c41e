"""FMoE: a gate chooses experts for every token, the experts compute, their results are summed by weight.

FMoE.forward is five steps, which other files compute: the tokens to compute (step.py), the gate (gates/), the way to
the experts (dispatch.py, and ep/ over many ranks), the experts (expert_kinds.py), the way back. Letters of shapes:
T tokens, K choices of a token (top_k), E experts of all ranks, R rows: a token's copy for each of its choices, sorted
by expert. FMoETransformerMLP (transformer.py) is the layer with the experts of a transformer.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypedDict

import torch
from torch import nn
from typing_extensions import Unpack

from fmoe_ext import ops
from fmoe_ext._fastmoe_names import Alias
from fmoe_ext.dispatch import combine, dispatch
from fmoe_ext.ep.expert_parallel import LAYOUT_KEYWORDS, ExpertParallel, ParallelLayout, check_route
from fmoe_ext.ep.process_groups import Group
from fmoe_ext.ep.ranks import SliceGroup
from fmoe_ext.ep.wrappers import check_wrappers
from fmoe_ext.expert_kinds import ExpertKind, OwnExpertFn, Separate, SeparateExperts, kind_of
from fmoe_ext.gates import BaseGate, NaiveGate, find_gate
from fmoe_ext.linear import check_sizes
from fmoe_ext.recompute import Forwards, Repeat
from fmoe_ext.spread import SpreadLayer, drop_wrapper_prefix, mark_module_parallel_comm, take_placement
from fmoe_ext.step import Step, begin
from fmoe_ext.tokens import Nest, batch_is

GateMaker: TypeAlias = str | nn.Module | Callable[..., nn.Module]
ExpertMaker: TypeAlias = Callable[[int], nn.Module] | Sequence[Callable[[int], nn.Module]]
Device: TypeAlias = torch.device | str | int | None

__all__ = ["FMoE", "ParallelLayout", "mark_module_parallel_comm"]


class LayerOptions(TypedDict, total=False):
    """Keywords of FMoE that are seldom given: five fields of ParallelLayout, device and dtype.

    The other three fields (world_size, moe_group, slice_group) are named arguments, as in FastMoE.
    """

    gate_group: Group
    overlap_degree: int | str
    max_rows_per_rank: int | None
    exchange: str
    wire: str
    device: Device
    dtype: torch.dtype | None


class FMoE(SpreadLayer):
    """A Mixture-of-Experts layer with any gate and any experts.

    num_experts: experts of all ranks. num_expert: experts of this rank, as in FastMoE; 32 if both are left out. A list
      of experts overrides num_expert, as in FastMoE.
    d_model: width of a token. top_k: experts of a token.
    gate: a class or function called as gate(d_model, num_expert, world_size, top_k[, gate_bias=]), a
      functools.partial of one, a name in gates.GATES, or a module: it maps moe_inp to topk_idx,
      topk_weights [T, K].
    expert: a callable d_model -> module, called for each expert of this rank; a list of such callables, one for each
      of them; or None for subclasses that set self.experts to one module for all experts,
      which is called as experts(rows sorted by expert, tokens_per_expert). Separate experts are called as
      expert(rows) or, if their forward cannot be called without a second argument or names it fwd_expert_count, as
      expert(rows, number of rows [1]); a wrapper that takes *args, as torch.compile's, is called as what it wraps.
      Separate experts need their numbers of rows on the host.
    gate_hook(topk_idx, topk_weights, None) is called after the gate.
    mask (one entry a token) and mask_dict: a token with mask != 0 goes to no expert; its expert output is
      mask_dict[its mask] (scalar, [*] or [K, *]), or zero if that is missing, weighted as usual.
    parallel: how the layer is spread over ranks (ParallelLayout). Its fields are also keywords of FMoE, as in FastMoE:
      world_size, moe_group, slice_group (mp_group is its old name), and gate_group, overlap_degree,
      max_rows_per_rank, exchange, wire.
    device, dtype: of the parameters. They are drawn in that dtype by experts in one module; those of a gate and of
      separate experts are drawn as these draw them, and cast.
    renormalize=True scales the weights of a token that lost choices to their sum before; otherwise lost
      choices add nothing.

    Example:

        >>> expert = lambda d_model: torch.nn.Sequential(torch.nn.Linear(d_model, 16), torch.nn.Linear(16, d_model))
        >>> layer = FMoE(num_experts=4, d_model=8, expert=expert, top_k=2, gate="softmax")
        >>> layer(torch.randn(10, 8)).shape
        torch.Size([10, 8])
    """

    num_expert = Alias("num_local_experts")

    def __init__(
        self,
        num_expert: int | None = None,
        d_model: int = 1024,
        world_size: int = 1,
        mp_group: Group = None,
        slice_group: Group = None,
        moe_group: Group = None,
        top_k: int = 2,
        gate: GateMaker = NaiveGate,
        expert: ExpertMaker | None = None,
        gate_hook: Callable[..., Any] | None = None,
        mask: torch.Tensor | None = None,
        mask_dict: Mapping[int, Any] | None = None,
        gate_bias: bool = True,
        *,
        num_experts: int | None = None,
        parallel: ParallelLayout | None = None,
        renormalize: bool = False,
        **options: Unpack[LayerOptions],
    ):
        # 1. The layout: fields of `parallel` that are given as keywords, FastMoE's way.
        if mp_group is not None:
            warnings.warn(
                "mp_group is the old name of slice_group, use that", DeprecationWarning, stacklevel=2
            )
            slice_group = mp_group
        given: dict[str, Any] = {
            "world_size": world_size, "moe_group": moe_group, "slice_group": slice_group, **options
        }  # fmt: skip
        device, dtype = given.pop("device", None), given.pop("dtype", None)
        if unknown := [name for name in given if name not in LAYOUT_KEYWORDS]:
            raise TypeError(unknown_keywords(type(self), unknown))
        layout = ParallelLayout.of(parallel, **given)
        check_sizes(top_k=top_k)
        super().__init__()
        # 2. How many experts there are, and where they live.
        self.world_size = layout.num_ranks
        self.num_local_experts = _local_experts(num_expert, num_experts, layout.num_ranks, expert)
        self.num_experts = self.num_local_experts * self.world_size
        self.d_model = d_model
        way = layout.overlap_degree, layout.exchange, layout.wire
        check_route(*way)
        self.expert_parallel = None
        if layout.is_spread:
            self.expert_parallel = ExpertParallel(
                layout.moe_group, self.num_local_experts, way[0], layout.max_rows_per_rank, *way[1:]
            )
            if self.expert_parallel.size != layout.num_ranks:
                raise ValueError(
                    f"world_size is {layout.num_ranks}, but moe_group has {self.expert_parallel.size} ranks"
                )
        slices = layout.slice_group
        # one rank shares its rows with nobody
        self._slices = None if slices is None or slices.size() == 1 else SliceGroup(slices)
        self.top_k = top_k
        self.gate_hook, self.mask, self.mask_dict = gate_hook, mask, mask_dict
        self.renormalize = renormalize
        # 3. The gate and the experts, made on the device: in a block, since makers of users take no device.
        with contextlib.nullcontext() if device is None else torch.device(device):
            self.gate = _cast(_make_gate(self, gate, gate_bias), device, dtype)
            if self.expert_parallel is not None or layout.gate_group is not None:
                self.share_gate(layout.gate_group)
            # without expert= a subclass sets self.experts, one module for all
            self.experts_fused = expert is None
            self.experts = None if expert is None else _cast(_make_experts(self, expert), device, dtype)
        # 4. What FMoETransformerMLP, tags, checkpoints and repeated forwards set later.
        self.shared_experts = None  # an MLP that every token passes besides
        self.latent = None  # projections around narrower experts
        self._expert_dp_comm = None
        self._forwards = Forwards()
        self.register_buffer("expert_placement", None)  # [E] once experts have moved
        self.register_load_state_dict_pre_hook(drop_wrapper_prefix)
        self.register_load_state_dict_pre_hook(take_placement)

    def __prepare_scriptable__(self) -> None:  # torch.jit.script() calls it before it compiles a module
        raise RuntimeError("TorchScript does not compile an FMoE layer: use torch.export or torch.compile")

    def forward(self, moe_inp: Nest, valid: torch.Tensor | None = None, gate_inp: Nest | None = None) -> Nest:
        """Send every token through its experts.

        moe_inp: tensor [T, d_model], or [T, *] or a nest (list, tuple, dict) of such tensors if gate and
        experts take them -> what the experts return for one row, [T, *], summed with topk_weights over the K
        choices. FMoELinear casts tokens to the dtype of its weights, which is that of the result; under autocast the
        operators choose it. Tokens of float64 with other weights are refused.
        valid: T entries, bool or 0 / 1: the others are padding. They are taken out before the gate, so that they
        reach no expert, loss, capacity or counter, and their output is zero; everything else is as in the batch without
        them, to the bit: forward(x, valid)[valid] is forward(x[valid]). (In another batch a token's last bits may
        differ; see batch_invariant().) fmoe_ext.valid_tokens() says the same to all layers of a model.
        gate_inp: what the gate sees of the T tokens, where that is not moe_inp (Gemma 4).
        Raises ValueError for inputs, masks or choices whose number of tokens differs, TypeError for integer tokens.
        Equivalent to: out[t] = sum_k topk_weights[t, k] * expert[topk_idx[t, k]](moe_inp[t]).
        """
        # 1. Take off padding, masks and the tokens of other slices; find the original of a repeated forward.
        masks = self.mask, self.mask_dict
        step = begin(self._forwards, self._slices, moe_inp, valid, *masks, self.training, gate_inp)
        if step.is_repeated and step.forward is not None and step.forward.is_batch_invariant:
            with ops.batch_invariant():  # the backward may run on another thread, or after the block
                return self._run(step)
        return self._run(step)

    def _run(self, step: Step) -> Nest:
        """Steps 2 to 5; first _ready_experts(), as chunks of experts must be known before tokens are sent."""
        experts = self._ready_experts(step)
        # 2. The gate chooses experts for every token; a masked token gets none.
        topk_idx, topk_weights = self._choose(step)
        # 3. Tokens go to the ranks of their experts, some experts' tokens at a time; meanwhile the shared experts run.
        x = step.x if self.latent is None else self.latent.before(step.x)
        dispatched = dispatch(x, topk_idx, topk_weights, self.num_experts, self.expert_parallel, step)
        beside = None if self.shared_experts is None else self.shared_experts(step.x)
        # 4. The experts compute what has come and weigh their results, while the rest is under way.
        for chunk in dispatched.chunks:
            tokens, kind = chunk.receive(), experts
            # shadowed experts: this rank computes its tokens of another rank's busy experts with fetched weights
            if tokens.shadows and self.expert_parallel is not None:
                kind = experts.fetched(tokens, self.expert_parallel)
            chunk.give_back(
                kind.compute(tokens.x, tokens.topk_idx, tokens.topk_weights, tokens.first, tokens.end)
            )
        # 5. Results come back to their tokens and are summed; what was taken off is put back.
        out = combine(dispatched) if self.latent is None else self.latent.after(combine(dispatched))
        return step.end(out, topk_weights, beside, self.training)

    def _ready_experts(self, step: Step) -> ExpertKind:
        """Check that experts, gate and ranks can run this forward, and cut the experts into its chunks."""
        experts, parallel = self.expert_kind, self.expert_parallel
        # In the batch-invariant mode, refuse whatever would make a token's bits depend on its batch.
        if ops.is_batch_invariant():
            reasons = {
                "not with such experts": experts.depends_on_batch,
                "not with this expert parallelism": None if parallel is None else parallel.depends_on_batch,
                "not on this device": ops.kernels_depend_on_batch(step.first),
            }
            if isinstance(self.gate, BaseGate):
                reasons = {f"not with a {type(self.gate).__name__}": self.gate.depends_on_batch, **reasons}
            for what, reason in reasons.items():
                if reason is not None:
                    raise RuntimeError(
                        f"batch_invariant() promises that a token's result does not depend on its batch, but {what}: "
                        f"{reason}"
                    )
        if parallel is None:
            return experts
        check_wrappers(self)
        # A chunk is some experts with all tokens that chose them; the exchange of the next one overlaps its computing.
        max_chunks = self.num_local_experts if experts.can_be_divided else 1
        return experts.divided(parallel.choose_route(max_chunks, step).chunk_ends)

    def _choose(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the gate -> topk_idx, topk_weights [T, K], checked, renormalized and masked."""
        # Gates and telemetry ask the running step. A compiled graph cannot read the context variable that holds it, so
        # that there only the facts about the batch are set.
        if step.is_traced:
            with batch_is(step.batch):
                topk_idx, topk_weights = self._call_gate(step)
        else:
            with step:
                topk_idx, topk_weights = self._call_gate(step)
        if step.is_traced and self.expert_parallel is not None:
            # in the graph, the sums over ranks that the loss takes come before the exchange, on every rank in one order
            loss = getattr(self.gate, "loss", None)
            step.before_exchange = [] if loss is None else [loss.detach()]
        # FastMoE's older gates return flat choices [T * K] and weights [T, 1, K].
        num_tokens = step.first.shape[0]
        if topk_idx.dim() != 2:
            topk_idx = topk_idx.reshape(-1, self.top_k)
        if topk_idx.shape[0] != num_tokens or topk_weights.numel() != topk_idx.numel():
            raise ValueError(
                f"the gate must return topk_idx and topk_weights [T={num_tokens}, K], "
                f"but returned {list(topk_idx.shape)} and {list(topk_weights.shape)}"
            )
        if topk_weights.shape != topk_idx.shape:
            topk_weights = topk_weights.reshape(topk_idx.shape)
        # Give the weight of dropped choices (-1) to the kept ones. A token without any keeps the sum 0, not NaN.
        if self.renormalize:
            kept = torch.where(topk_idx >= 0, topk_weights, 0)
            kept_sum = kept.sum(-1, keepdim=True)
            topk_weights = kept * (
                topk_weights.sum(-1, keepdim=True) / torch.where(kept_sum == 0, 1, kept_sum)
            )
        return step.drop_masked(topk_idx), topk_weights

    def _call_gate(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the gate and the hook; a repeated forward reuses its recorded choices if the gate is a BaseGate."""
        gate: Any = self.gate
        forward = step.forward if isinstance(gate, BaseGate) else None
        if forward is not None and forward.kept is not None and forward.selected is not None:
            # The gate weighs the choices of the original by the present logits, through which the gradient flows. Its
            # tape replaces the choosing; the choices that capacity dropped then are dropped again (kept).
            tape, gate.tape = gate.tape, Repeat(forward.selected.long(), forward.is_fused)
            try:
                _, topk_weights = gate(step.gate_x)
            finally:
                gate.tape = tape
            topk_idx = forward.kept.long()
        else:
            returned = gate(step.gate_x)
            is_several = isinstance(returned, (tuple, list))
            if not is_several or len(returned) != 2:
                what = f"{len(returned)} things" if is_several else type(returned).__name__
                raise TypeError(
                    f"a gate returns topk_idx and topk_weights, but {type(gate).__name__} returned {what}"
                )
            topk_idx, topk_weights = returned
            if forward is not None:
                forward.choose(step.selected, topk_idx, gate.weighs_while_choosing, self.num_experts)
        if self.gate_hook is not None:
            self.gate_hook(topk_idx, topk_weights, None)
        return topk_idx, topk_weights

    @property
    def expert_kind(self) -> ExpertKind:
        """The kind of this layer's experts: how they are called, and what they can do."""
        is_own = type(self).expert_fn is not FMoE.expert_fn
        return OwnExpertFn(self) if is_own else kind_of(self)

    def expert_fn(self, inp: Nest, fwd_expert_count: torch.Tensor) -> Nest:
        """Apply the experts to rows sorted by expert: inp [R, *] or a nest, fwd_expert_count [num_local_experts]."""
        return kind_of(self).on_rows(inp, fwd_expert_count)

    def expert_fn_single(self, inp: Nest, fwd_expert_count: int | torch.Tensor, idx: int) -> Nest:
        """Apply expert number idx to all rows of inp."""
        if self.experts_fused:
            raise RuntimeError("expert_fn_single needs separate experts, but these are fused in one module")
        return Separate(self).call_one(inp, fwd_expert_count, idx)


def _local_experts(num_expert: int | None, num_experts: int | None, num_ranks: int, expert: Any) -> int:
    """Count the experts of this rank, from their number here, their number on all ranks, or their list.

    A list wins over num_expert, as in FastMoE. ValueError if num_experts is no multiple of num_ranks, comes with
    num_expert, or contradicts a list.
    """
    if num_experts is not None:
        if num_expert is not None:
            raise ValueError(
                f"num_experts={num_experts} (of all ranks) and num_expert={num_expert} (of each rank) say the same "
                "thing: give num_experts only"
            )
        check_sizes(num_experts=num_experts)
        num_expert, rest = divmod(num_experts, num_ranks)
        if rest:
            raise ValueError(
                f"num_experts={num_experts} is the number of experts of all ranks together: it must be a multiple "
                f"of the {num_ranks} ranks"
            )
    if isinstance(expert, Sequence):
        if num_experts is not None and len(expert) != num_expert:
            raise ValueError(
                f"num_experts={num_experts} gives each of {num_ranks} ranks {num_expert} experts, but expert= is a "
                f"list of {len(expert)}"
            )
        return len(expert)
    return 32 if num_expert is None else num_expert


def _make_gate(layer: FMoE, gate: GateMaker, gate_bias: bool) -> nn.Module:
    """Make the gate of a layer from a name, a class or function, or take a module as it is."""
    gate = find_gate(gate) if isinstance(gate, str) else gate
    if isinstance(gate, nn.Module):
        if getattr(gate, "tot_expert", layer.num_experts) != layer.num_experts:
            raise ValueError(
                f"the gate is for {gate.tot_expert} experts, but the layer has {layer.num_experts}"
            )
        return gate
    if not callable(gate):
        raise TypeError(f"gate must be a class, a callable, a module or a name, but got {gate!r}")
    # Pass gate_bias only to gates that take it, by name or in the **kwargs of a NaiveGate: those of users may not.
    bound = gate.keywords if isinstance(gate, functools.partial) else {}
    maker = gate.func if isinstance(gate, functools.partial) else gate
    parameters = inspect.signature(maker).parameters.values()
    is_naive = isinstance(maker, type) and issubclass(maker, NaiveGate)
    takes_bias = any(p.name == "gate_bias" or (is_naive and p.kind is p.VAR_KEYWORD) for p in parameters)
    options = {"gate_bias": gate_bias} if takes_bias and "gate_bias" not in bound else {}
    return gate(layer.d_model, layer.num_local_experts, layer.world_size, layer.top_k, **options)


def _make_experts(layer: FMoE, expert: ExpertMaker) -> SeparateExperts:
    """Call expert, or each of its list, with d_model; TypeError if it takes more, or makes no module."""
    way_out = "pass a function of the width, as lambda d_model: nn.Linear(d_model, d_model)"
    if not callable(expert) and not isinstance(expert, Sequence):
        raise TypeError(f"expert= is a callable, or a list of them, but got {expert!r}: {way_out}")
    makers = [expert] * layer.num_local_experts if callable(expert) else expert
    for maker in makers:
        if isinstance(maker, nn.Module) or not callable(maker):
            raise TypeError(f"expert= is called to make each expert, but got {maker!r}: {way_out}")
        # Try the call on the signature alone: a TypeError from inside the function must stay the user's own.
        try:
            signature = inspect.signature(maker)
        except ValueError:  # a builtin has no signature
            continue
        try:
            signature.bind(layer.d_model)
        except TypeError as error:
            name = getattr(maker, "__name__", repr(maker))
            raise TypeError(
                f"expert= is called as {name}(d_model), which it does not take ({error}): {way_out}"
            ) from None
    modules = [maker(layer.d_model) for maker in makers]
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expert= must make a module, but made a {type(module).__name__}")
    return SeparateExperts(modules)


def _cast(module: nn.Module, device: Device, dtype: torch.dtype | None) -> nn.Module:
    """Bring a module to a device, and its floating parameters to a dtype; buffers keep theirs."""
    module = module if device is None else module.to(device)
    for p in module.parameters() if dtype is not None else ():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    return module


def keywords_of(cls: type) -> list[str]:
    """List the arguments of a layer's class and of those that it passes them to."""
    classes = [base for base in cls.__mro__ if issubclass(base, FMoE)]
    names = {name for base in classes for name in inspect.signature(base.__init__).parameters}
    return sorted(names - {"self", "options", "kwargs"} | LayerOptions.__annotations__.keys())


# {keyword of another library: ours}, where the nearest spelling would be none or a wrong one
_OTHER_NAMES = MappingProxyType(
    {
        **dict.fromkeys(("embed_dim", "dim", "model_dim", "input_size"), "d_model"),
        **dict.fromkeys(
            ("intermediate_size", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size"), "d_hidden"
        ),
        **dict.fromkeys(("d_ff", "dim_feedforward", "hidden_features"), "d_hidden"),
        **dict.fromkeys(("n_experts", "num_moe_experts", "n_routed_experts"), "num_experts"),
        "num_local_experts": "num_expert",
        **dict.fromkeys(("k", "num_experts_per_tok", "num_experts_per_token"), "top_k"),
    }
)
_WIDTHS = "d_hidden is the width inside an expert, d_model that of a token"
_DROPOUT = "no activation is dropped here: put nn.Dropout behind the layer"
# {keyword of another library: what to say, where no argument of ours is meant for certain}
_HINTS = MappingProxyType(
    {
        **dict.fromkeys(("hidden_size", "hidden_dim"), _WIDTHS),
        **dict.fromkeys(("dropout", "dropout_p", "p_dropout"), _DROPOUT),
    }
)


def unknown_keywords(cls: type, unknown: Iterable[str]) -> str:
    """Say which keywords neither cls nor a class that it passes them to takes."""
    names = keywords_of(cls)
    texts = []
    for keyword in unknown:
        other = _OTHER_NAMES.get(keyword)
        close = [other] if other in names else difflib.get_close_matches(keyword, names, n=1)
        hint = _HINTS.get(keyword, f"did you mean {close[0]!r}?" if close else "")
        texts.append(f"{keyword!r} ({hint})" if hint else f"{keyword!r}")
    return f"{cls.__name__} has no argument {', '.join(texts)}"
