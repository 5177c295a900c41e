"""FMoE: a gate chooses experts for every token, the experts compute, their results are summed by weight."""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmoe_ext.batch_invariance import check_batch_invariance
from fmoe_ext.dispatch import combine, dispatch
from fmoe_ext.ep.exchange import Group, find_group
from fmoe_ext.ep.expert_parallel import ExpertParallel, check_way
from fmoe_ext.ep.ranks import GroupRanks, SliceGroup
from fmoe_ext.ep.wrappers import check_wrappers
from fmoe_ext.expert_kinds import ExpertKind, OwnExpertFn, Separate, SeparateExperts, kind_of
from fmoe_ext.experts import SharedExperts
from fmoe_ext.gates import BaseGate, NaiveGate, OneRank, find_gate
from fmoe_ext.gates.base_gate import choices_of
from fmoe_ext.linear import check_sizes
from fmoe_ext.masking import drop_masked, fill_masked
from fmoe_ext.recompute import Forward, Forwards, Repeat, forward_is, is_counted, is_repeated
from fmoe_ext.routing import ExpertInput, Nest, leaves_of
from fmoe_ext.tokens import Batch, batch_is, current_batch, is_inside_a_block, with_valid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def mark_module_parallel_comm(module: nn.Module, comm: str, *, only_untagged: bool = False) -> None:
    """Tags parameters of module with the group that reduces their gradient: param.dp_comm = comm."""
    for param in module.parameters():
        if not (only_untagged and hasattr(param, "dp_comm")):
            setattr(param, "dp_comm", comm)  # noqa: B010 - an attribute that Parameter does not declare


class FMoE(nn.Module):
    """A Mixture-of-Experts layer with any gate and any experts.

    num_expert: experts of this rank. d_model: width of a token.
    world_size, moe_group: the experts of all world_size ranks of moe_group (a ProcessGroup, a DeviceMesh, or None
      for the default group) form one layer of num_expert * world_size experts, expert i on rank i // num_expert.
      All ranks of the group call forward, with any number of tokens each. gate_group: the ranks whose tokens count
      for the gate's losses and capacities, moe_group if None.
    overlap_degree > 1 exchanges the rows of some experts while others compute; "auto" chooses it from the times of
      the first forwards.
    exchange: "choice" sends a token to the rank of each expert that it chose, "token" once to a rank that has
      several of them, where their results are summed: fewer bytes (DeepEP's deduplicated dispatch), equal but for
      rounding. "auto" chooses it from the times of the first forwards.
    max_rows_per_rank: each rank sends each other one so many rows, padding included, so that nothing waits for
      sizes and a CUDA graph can hold the layer; tokens * top_k, or tokens with exchange="token", is always enough.
      If a rank has more, every rank gets a RuntimeError: on the CPU at once; on CUDA results are NaN and
      ep.static.check_max_rows(model) raises.
    slice_group: ranks with the same input; each computes a part of the rows. mp_group is its old name.
    gate: a class or function called as gate(d_model, num_expert, world_size, top_k[, gate_bias=]), a
      functools.partial of one, a name in gates.GATES, or a module: it maps moe_inp to topk_idx,
      topk_weights [T, K].
    expert: a callable d_model -> module, called num_expert times; a list of such callables, one for each
      expert (it sets num_expert); or None for subclasses that set self.experts to one module for all experts,
      which is called as experts(rows sorted by expert, tokens_per_expert). Separate experts are called as
      expert(rows) or, if their forward needs a second argument, as expert(rows, number of rows [1]); that
      needs the counts on the host.
    gate_hook(topk_idx, topk_weights, None) is called after the gate.
    mask (one entry a token) and mask_dict: a token with mask != 0 goes to no expert; its expert output is
      mask_dict[its mask] (scalar, [*] or [K, *]), or zero if that is missing, weighted as usual.
    renormalize=True scales the weights of a token that lost choices to their sum before; otherwise lost
      choices add nothing.
    """

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        world_size: int = 1,
        mp_group: Group = None,
        slice_group: Group = None,
        moe_group: Group = None,
        top_k: int = 2,
        gate: str | nn.Module | Callable[..., nn.Module] = NaiveGate,
        expert: Callable[[int], nn.Module] | Sequence[Callable[[int], nn.Module]] | None = None,
        gate_hook: Callable[..., Any] | None = None,
        mask: torch.Tensor | None = None,
        mask_dict: Mapping[int, Any] | None = None,
        gate_bias: bool = True,
        *,
        renormalize: bool = False,
        gate_group: Group = None,
        overlap_degree: int | str = 1,
        max_rows_per_rank: int | None = None,
        exchange: str = "choice",
        **unknown: Any,
    ):
        if unknown:
            raise TypeError(_unknown_keywords(type(self), unknown))
        check_sizes(top_k=top_k)
        super().__init__()
        if mp_group is not None:
            warnings.warn(
                "mp_group is the old name of slice_group, use that", DeprecationWarning, stacklevel=2
            )
            slice_group = mp_group
        self.num_expert = len(expert) if isinstance(expert, (list, tuple)) else num_expert
        self.num_experts = self.num_expert * world_size
        self.d_model = d_model
        self.world_size = world_size
        self.expert_parallel: ExpertParallel | None = None
        if world_size > 1 or moe_group is not None:
            self.expert_parallel = ExpertParallel(
                moe_group, self.num_expert, overlap_degree, max_rows_per_rank, exchange
            )
            if self.expert_parallel.size != world_size:
                raise ValueError(
                    f"world_size is {world_size}, but moe_group has {self.expert_parallel.size} ranks"
                )
        else:
            check_way(overlap_degree, exchange)
        self._slices = None if slice_group is None or slice_group.size() == 1 else SliceGroup(slice_group)
        self.top_k = top_k
        self.gate_hook = gate_hook
        self.mask = mask
        self.mask_dict = mask_dict
        self.renormalize = renormalize
        self.gate: Any = self._make_gate(gate, gate_bias)
        if self.expert_parallel is not None or gate_group is not None:
            self._share_gate(gate_group)
        self.experts_fused = expert is None
        self.experts: Any = None if expert is None else self._make_experts(expert)
        self.shared_experts: SharedExperts | None = None  # what every token passes besides
        self._expert_dp_comm: str | None = None
        self._forwards = Forwards()
        self.register_buffer("expert_placement", None)  # [E] once experts have moved
        self.register_load_state_dict_pre_hook(_drop_wrapper_prefix)
        self.register_load_state_dict_pre_hook(_take_placement)

    def _make_gate(self, gate: str | nn.Module | Callable[..., nn.Module], gate_bias: bool) -> nn.Module:
        gate = find_gate(gate) if isinstance(gate, str) else gate
        if isinstance(gate, nn.Module):
            if getattr(gate, "tot_expert", self.num_experts) != self.num_experts:
                raise ValueError(
                    f"the gate is for {gate.tot_expert} experts, but the layer has {self.num_experts}"
                )
            return gate
        if not callable(gate):
            raise TypeError(f"gate must be a class, a callable, a module or a name, but got {gate!r}")
        options = {"gate_bias": gate_bias} if _takes_gate_bias(gate) else {}
        return gate(self.d_model, self.num_expert, self.world_size, self.top_k, **options)

    def _share_gate(self, gate_group: Group) -> None:
        """Lets the gate's losses and capacities span the tokens of a group."""
        if isinstance(getattr(self.gate, "ranks", None), OneRank):
            group = self.moe_group if gate_group is None else gate_group
            self.gate.ranks = GroupRanks(group, num_copies=self.slice_size)

    @property
    def moe_group(self) -> ProcessGroup | None:
        """The process group that the experts are spread over, or None."""
        return None if self.expert_parallel is None else find_group(self.expert_parallel.group)

    @property
    def ep_rank(self) -> int:
        """Number of this rank among those that the experts are spread over; 0 without."""
        return 0 if self.expert_parallel is None else self.expert_parallel.rank

    @property
    def slice_size(self) -> int:
        """Ranks that share the rows of one input; 1 without slice_group."""
        return 1 if self._slices is None else self._slices.size

    @property
    def slice_rank(self) -> int:
        """Number of this rank among those; 0 without slice_group."""
        return 0 if self._slices is None else self._slices.rank

    def _make_experts(
        self, expert: Callable[[int], nn.Module] | Sequence[Callable[[int], nn.Module]]
    ) -> SeparateExperts:
        makers = [expert] * self.num_expert if callable(expert) else expert
        return SeparateExperts(maker(self.d_model) for maker in makers)

    def forward(self, moe_inp: Nest, valid: torch.Tensor | None = None) -> Nest:
        """Sends every token through its experts.

        moe_inp: tensor [T, d_model], or [T, *] or a nest (list, tuple, dict) of such tensors if gate and
        experts take them -> what the experts return for one row, [T, *], summed with topk_weights over the K
        choices.
        valid: T entries, bool or 0 / 1: the others are padding. They are taken out before the gate, so that they
        reach no expert, loss, capacity or counter, and their output is zero; everything else is as in the batch without
        them, to the bit: forward(x, valid)[valid] is forward(x[valid]). (In another batch a token's last bits may
        differ; see batch_invariant().) fmoe_ext.valid_tokens() says the same to all layers of a model.
        Raises ValueError for inputs, masks or choices whose number of tokens differs, TypeError for integer tokens.
        Equivalent to: out[t] = sum_k topk_weights[t, k] * expert[topk_idx[t, k]](moe_inp[t]).
        """
        check_wrappers(self)
        check_batch_invariance(self, moe_inp)
        num_tokens = _count_tokens(moe_inp)
        if torch.compiler.is_compiling() and not is_inside_a_block():
            batch = Batch() if valid is None else with_valid(Batch(), valid)
            batch.check(num_tokens)
            return self._forward_real(moe_inp, batch, None)
        repeated = self._forwards.find(moe_inp) if is_repeated() else None
        if repeated is not None:
            with batch_is(repeated.batch), forward_is(repeated):
                return self._forward_real(moe_inp, repeated.batch, repeated)
        batch = current_batch() if valid is None else with_valid(current_batch(), valid)
        batch.check(num_tokens)
        may_be_repeated = self.training or torch.is_grad_enabled() or batch.rows is not None
        forward = self._forwards.begin(moe_inp, batch) if may_be_repeated else None
        with batch_is(batch), forward_is(forward):
            out = self._forward_real(moe_inp, batch, forward)
        if forward is not None and is_counted():
            self._forwards.keep(forward, out, self.training)
        return out

    def _forward_real(self, moe_inp: Nest, batch: Batch, this: Forward | None) -> Nest:
        """The layer on the tokens that are not padding; every rank of a slice group on a part of them."""
        moe_inp = batch.take(moe_inp)
        mask = None if self.mask is None else batch.take(self.mask.flatten())
        if self._slices is None:
            return batch.put_back(self._forward(moe_inp, mask, this))
        mask = None if mask is None else self._slices.cut(mask)
        return batch.put_back(self._slices.join(self._forward(self._slices.cut(moe_inp), mask, this)))

    def _forward(self, moe_inp: Nest, mask: torch.Tensor | None, this: Forward | None = None) -> Nest:
        # 1. The gate chooses experts for every token; a masked token gets none.
        topk_idx, topk_weights = self._choose(moe_inp, mask, this)
        # 2. Tokens go to the ranks of their experts, some experts' tokens at a time; meanwhile, what needs no exchange.
        experts = self._experts_of_step()
        dispatched = dispatch(moe_inp, topk_idx, topk_weights, self.num_experts, self.expert_parallel)
        beside = None if self.shared_experts is None else self.shared_experts(moe_inp)
        # 3. The experts compute what has come and weigh their results, while the rest is under way.
        for chunk in dispatched.chunks:
            chunk.give_back(self._compute(experts, chunk.receive()))
        # 4. Results come back to their tokens and are summed; a masked token gets its own.
        out = fill_masked(combine(dispatched), topk_weights, mask, self.mask_dict)
        return out if beside is None else out + beside

    def _experts_of_step(self) -> ExpertKind:
        """The experts, ready for the chunks of this forward."""
        experts = self.expert_kind
        if self.expert_parallel is None:
            return experts
        max_chunks = self.num_expert if experts.can_be_divided else 1
        return experts.divided(self.expert_parallel.choose_way(max_chunks).chunk_ends)

    def _compute(self, experts: ExpertKind, tokens: ExpertInput) -> Nest:
        if tokens.shadows and self.expert_parallel is not None:
            experts = experts.fetched(tokens.shadows, self.expert_parallel)
        return experts.compute(tokens.x, tokens.topk_idx, tokens.topk_weights, tokens.first, tokens.end)

    @property
    def expert_kind(self) -> ExpertKind:
        """How this layer's experts are called, and what they can do."""
        is_own = type(self).expert_fn is not FMoE.expert_fn
        return OwnExpertFn(self) if is_own else kind_of(self)

    def place_experts(self, order: Iterable[int]) -> None:
        """Notes that the parameters of expert order[place] are now at that place (ep.placement moves them)."""
        assert self.expert_parallel is not None
        self.expert_parallel.experts_in_place = list(order)
        self.expert_placement = torch.tensor(order)

    def expert_fn(self, inp: Nest, fwd_expert_count: torch.Tensor) -> Nest:
        """Applies the experts to rows sorted by expert: inp [R, *] or a nest, fwd_expert_count [E]."""
        return kind_of(self).on_rows(inp, fwd_expert_count)

    def expert_fn_single(self, inp: Nest, fwd_expert_count: int | torch.Tensor, idx: int) -> Nest:
        """Applies expert number idx to all rows of inp."""
        if self.experts_fused:
            raise RuntimeError("expert_fn_single needs separate experts, but these are fused in one module")
        return Separate(self).call_one(inp, fwd_expert_count, idx)

    def mark_parallel_comm(self, expert_dp_comm: str = "none") -> None:
        """Tags the parameters of the experts with expert_dp_comm and those of the gate with "gate"."""
        self._expert_dp_comm = expert_dp_comm
        self._mark_parameters(expert_dp_comm)

    def tag_new_parameters(self) -> None:
        """Gives parameters that came since (adapters in the experts, copies of them) the tags of those beside them."""
        if self._expert_dp_comm is not None:
            self._mark_parameters(self._expert_dp_comm, only_untagged=True)

    def _mark_parameters(self, expert_dp_comm: str, only_untagged: bool = False) -> None:
        # as with the gate, ranks of a slice group have parts of the gradient of shared experts
        comms = (self.experts, expert_dp_comm), (self.gate, "gate"), (self.shared_experts, "gate")
        for module, comm in comms:
            if module is not None:
                mark_module_parallel_comm(module, comm, only_untagged=only_untagged)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._expert_dp_comm is not None:  # copies of parameters lose their attributes
            self._mark_parameters(self._expert_dp_comm)

    def _choose(
        self, moe_inp: Nest, mask: torch.Tensor | None, this: Forward | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """topk_idx, topk_weights [T, K], checked, renormalized and masked."""
        num_tokens = leaves_of(moe_inp)[0].shape[0]
        topk_idx, topk_weights = self._call_gate(moe_inp, this)
        if self.gate_hook is not None:
            self.gate_hook(topk_idx, topk_weights, None)
        if topk_idx.dim() != 2:
            topk_idx = topk_idx.reshape(-1, self.top_k)
        if topk_idx.shape[0] != num_tokens or topk_weights.numel() != topk_idx.numel():
            raise ValueError(
                f"the gate must return topk_idx and topk_weights [T={num_tokens}, K={self.top_k}], "
                f"but returned {list(topk_idx.shape)} and {list(topk_weights.shape)}"
            )
        if topk_weights.shape != topk_idx.shape:
            topk_weights = topk_weights.reshape(topk_idx.shape)
        if self.renormalize:
            topk_weights = _renormalize(topk_idx, topk_weights)
        if mask is not None:
            topk_idx = drop_masked(topk_idx, mask)
        return topk_idx, topk_weights

    def _call_gate(self, moe_inp: Nest, this: Forward | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The gate's choices; those of this, if this has been before. A gate that is no BaseGate chooses anew."""
        gate = self.gate
        if this is None or not isinstance(gate, BaseGate):
            return choices_of(gate, gate(moe_inp))
        if this.kept is None or this.selected is None:
            topk_idx, topk_weights = choices_of(gate, gate(moe_inp))
            this.choose(gate.take_selected(), topk_idx, gate.weighs_while_choosing, self.num_experts)
            return topk_idx, topk_weights
        tape, gate.tape = gate.tape, Repeat(this.selected.long(), this.is_fused)
        try:
            _, topk_weights = gate(moe_inp)
        finally:
            gate.tape = tape
        return this.kept.long(), topk_weights


def _count_tokens(moe_inp: Nest) -> int:
    leaves = leaves_of(moe_inp)
    sizes = [x.shape[0] if isinstance(x, torch.Tensor) and x.dim() > 0 else None for x in leaves]
    if not sizes or sizes[0] is None or any(size != sizes[0] for size in sizes):
        kinds = [list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves]
        raise ValueError(f"moe_inp must be tensors [T, *] with one number of tokens T, but got {kinds}")
    dtypes = {x.dtype for x in leaves}
    if not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        raise TypeError(
            f"moe_inp must have tokens of a floating dtype, but got {', '.join(map(str, dtypes))}"
        )
    return sizes[0]


def _unknown_keywords(cls: type, unknown: Iterable[str]) -> str:
    """What to say of keywords that neither cls nor a class that it hands them to takes."""
    classes = [base for base in cls.__mro__ if issubclass(base, FMoE)]
    names = sorted({name for base in classes for name in inspect.signature(base.__init__).parameters})
    texts = []
    for keyword in unknown:
        close = difflib.get_close_matches(keyword, names, n=1)
        texts.append(f"{keyword!r}{f' (did you mean {close[0]!r}?)' if close else ''}")
    return f"{cls.__name__} has no argument {', '.join(texts)}"


def _renormalize(topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    kept = torch.where(topk_idx >= 0, topk_weights, 0)
    kept_sum = kept.sum(-1, keepdim=True)
    return kept * (topk_weights.sum(-1, keepdim=True) / torch.where(kept_sum == 0, 1, kept_sum))


def _takes_gate_bias(gate: Callable[..., Any]) -> bool:
    """Whether a gate that is not built yet takes gate_bias: by name, or in the **kwargs of a NaiveGate."""
    bound = gate.keywords if isinstance(gate, functools.partial) else {}
    maker = gate.func if isinstance(gate, functools.partial) else gate
    parameters = inspect.signature(maker).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    is_naive = isinstance(maker, type) and issubclass(maker, NaiveGate)
    return "gate_bias" not in bound and (
        any(p.name == "gate_bias" for p in parameters) or (takes_any and is_naive)
    )


def _take_placement(module: FMoE, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Experts are where the state dict has them; in order, if it says nothing."""
    key = prefix + "expert_placement"
    if key in state_dict:
        if module.expert_parallel is None:
            raise RuntimeError(
                f"{key}: experts were moved between ranks, but this layer has all of them on one"
            )
        module.place_experts(state_dict[key].tolist())
    elif module.expert_placement is not None:
        state_dict[key] = torch.arange(module.num_experts)
        module.place_experts(range(module.num_experts))


def _drop_wrapper_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes the state dict of a layer that was wrapped for data parallelism."""
    wrapped = prefix + "module."
    for key in [key for key in state_dict if key.startswith(wrapped)]:
        state_dict[prefix + key.removeprefix(wrapped)] = state_dict.pop(key)
