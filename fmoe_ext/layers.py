"""FMoE: a gate chooses experts for every token, the experts compute, their results are summed by weight."""

import functools
import inspect
import warnings

import torch
from torch import nn

from fmoe_ext.dispatch import combine, dispatch, map_structure, sort_choices
from fmoe_ext.ep.exchange import find_group
from fmoe_ext.ep.ranks import GroupRanks, SliceGroup
from fmoe_ext.ep.schedule import ExpertParallel
from fmoe_ext.ep.shadowing import fetch
from fmoe_ext.experts import FusedExperts
from fmoe_ext.gates import NaiveGate, OneRank


def mark_module_parallel_comm(module, comm):
    """Tags every parameter of module with the group that reduces its gradient: param.dp_comm = comm."""
    for param in module.parameters():
        param.dp_comm = comm


class FMoE(nn.Module):
    """A Mixture-of-Experts layer with any gate and any experts.

    num_expert: experts of this worker. d_model: width of a token.
    world_size, moe_group: the experts of all world_size ranks of moe_group (a ProcessGroup, a DeviceMesh, or None
      for the default group) form one layer of num_expert * world_size experts, expert i on rank i // num_expert.
      All ranks of the group call forward, with any number of tokens each. gate_group: the ranks whose tokens count
      for the gate's losses and capacities, moe_group if None.
    overlap_degree > 1 exchanges the rows of some experts while others compute; "auto" chooses it from the times of
      the first forwards.
    max_rows_per_rank: each rank sends each other one so many rows, padding included, so that nothing waits for
      sizes and a CUDA graph can hold the layer; tokens * top_k is always enough. If a rank has more, every rank
      gets a RuntimeError: on the CPU at once; on CUDA results are NaN and ep.static.check_max_rows(model) raises.
    slice_group: ranks with the same input; each computes a part of the rows. mp_group is its old name.
    gate: a class or function called as gate(d_model, num_expert, world_size, top_k[, gate_bias=]), a
      functools.partial of one, or a module; it maps moe_inp to topk_idx [T, K], topk_weights [T, K].
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
        num_expert=32,
        d_model=1024,
        world_size=1,
        mp_group=None,
        slice_group=None,
        moe_group=None,
        top_k=2,
        gate=NaiveGate,
        expert=None,
        gate_hook=None,
        mask=None,
        mask_dict=None,
        gate_bias=True,
        *,
        renormalize=False,
        gate_group=None,
        overlap_degree=1,
        max_rows_per_rank=None,
    ):
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
        self._parallel = None
        if world_size > 1 or moe_group is not None:
            self._parallel = ExpertParallel(moe_group, self.num_expert, overlap_degree, max_rows_per_rank)
            if self._parallel.size != world_size:
                raise ValueError(f"world_size is {world_size}, but moe_group has {self._parallel.size} ranks")
        self._slices = None if slice_group is None or slice_group.size() == 1 else SliceGroup(slice_group)
        self.top_k = top_k
        self.gate_hook = gate_hook
        self.mask = mask
        self.mask_dict = mask_dict
        self.renormalize = renormalize
        self.gate = self._make_gate(gate, gate_bias)
        if self._parallel is not None or gate_group is not None:
            self._share_gate(gate_group)
        self.experts_fused = expert is None
        self._expert_takes_count = None
        self.experts = None if expert is None else self._make_experts(expert)
        self._expert_dp_comm = None
        self.register_buffer("expert_placement", None)  # [E] once experts have moved
        self.register_load_state_dict_pre_hook(_drop_wrapper_prefix)
        self.register_load_state_dict_pre_hook(_take_placement)

    def _make_gate(self, gate, gate_bias):
        if isinstance(gate, nn.Module):
            if getattr(gate, "tot_expert", self.num_experts) != self.num_experts:
                raise ValueError(
                    f"the gate is for {gate.tot_expert} experts, but the layer has {self.num_experts}"
                )
            return gate
        if not callable(gate):
            raise TypeError(f"gate must be a class, a callable or a module, but got {gate!r}")
        options = {"gate_bias": gate_bias} if _takes_gate_bias(gate) else {}
        return gate(self.d_model, self.num_expert, self.world_size, self.top_k, **options)

    def _share_gate(self, gate_group):
        """Lets the gate's losses and capacities span the tokens of a group."""
        if isinstance(getattr(self.gate, "ranks", None), OneRank):
            group = self.moe_group if gate_group is None else gate_group
            self.gate.ranks = GroupRanks(group, num_copies=self.slice_size)

    @property
    def moe_group(self):
        """The process group that the experts are spread over, or None."""
        return None if self._parallel is None else find_group(self._parallel.group)

    @property
    def ep_rank(self):
        """Number of this rank among those that the experts are spread over; 0 without."""
        return 0 if self._parallel is None else self._parallel.rank

    @property
    def slice_size(self):
        return 1 if self._slices is None else self._slices.size

    @property
    def slice_rank(self):
        return 0 if self._slices is None else self._slices.rank

    def _make_experts(self, expert):
        makers = expert if isinstance(expert, (list, tuple)) else [expert] * self.num_expert
        experts = nn.ModuleList(maker(self.d_model) for maker in makers)
        self._expert_takes_count = [_takes_count(module) for module in experts]
        return experts

    def forward(self, moe_inp):
        """Sends every token through its experts.

        moe_inp: tensor [T, d_model], or [T, *] or a nest (list, tuple, dict) of such tensors if gate and
        experts take them -> what the experts return for one row, [T, *], summed with topk_weights over the K
        choices.
        Raises ValueError for inputs, masks or choices whose number of tokens differs.
        Equivalent to: out[t] = sum_k topk_weights[t, k] * expert[topk_idx[t, k]](moe_inp[t]).
        """
        if self._slices is None:
            return self._forward(moe_inp, self.mask)
        mask = None if self.mask is None else self._slices.cut(self.mask.flatten())
        return self._slices.join(self._forward(self._slices.cut(moe_inp), mask))

    def _forward(self, moe_inp, mask):
        num_tokens = self._count_inputs(moe_inp)
        topk_idx, topk_weights = self._choose(moe_inp, num_tokens)
        if self.renormalize:
            topk_weights = _renormalize(topk_idx, topk_weights)
        masked = mask is not None and self.mask_dict is not None
        if masked:
            topk_idx = _drop_masked(topk_idx, mask)
        if self._parallel is None:
            out = self._compute(moe_inp, topk_idx, topk_weights)
        else:
            self._parallel.choose_overlap(self.num_expert if self._experts_divide else 1)
            compute = self._experts_by_chunk()
            out = self._parallel(moe_inp, topk_idx, topk_weights, compute, self._compute_shadows)
        return _fill_masked(out, topk_weights, mask, self.mask_dict) if masked else out

    def _compute(self, x, topk_idx, topk_weights):
        """The experts of this rank, without any exchange."""
        if self._experts_combine:
            handle = sort_choices(topk_idx, self.num_expert)
            return self.experts(x, handle.tokens_per_expert, handle, topk_weights)
        rows, handle = dispatch(x, topk_idx, self.num_expert)
        return combine(self.expert_fn(rows, handle.tokens_per_expert), handle, topk_weights)

    def _compute_shadows(self, x, topk_idx, topk_weights, places):
        """Experts of any rank, fetched from where they live: topk_idx counts them as in places."""
        if any(self.experts.main_grads):
            raise RuntimeError(
                "experts with gradient_accumulation_fusion=True cannot be shadowed: their owner would get a part of "
                "the gradient in weight.grad; clear the shadows, or pass gradient_accumulation_fusion=False"
            )
        weights = fetch(self.experts.weights, places, self.num_expert, self._parallel.group)
        handle = sort_choices(topk_idx, len(places))
        return self.experts(x, handle.tokens_per_expert, handle, topk_weights, weights)

    def place_experts(self, order):
        """Notes that the parameters of expert order[place] are now at that place (ep.placement moves them)."""
        self._parallel.experts_in_place = list(order)
        self.expert_placement = torch.tensor(order)

    def _experts_by_chunk(self):
        """compute(x, topk_idx, topk_weights, first, end): what _compute does, by the experts [first, end)."""
        ends = self._parallel.chunk_ends
        if len(ends) == 1:
            return lambda x, topk_idx, topk_weights, first, end: self._compute(x, topk_idx, topk_weights)
        if self._experts_combine:
            sizes = [end - first for first, end in zip((0, *ends), ends, strict=False)]
            whole = (*self.experts.weights, *self.experts.main_grads)
            parts = [[None] * len(ends) if w is None else w.split(sizes) for w in whole]
            weights = dict(zip(ends, zip(*parts, strict=True), strict=True))

            def compute(x, topk_idx, topk_weights, first, end):
                handle = sort_choices(topk_idx, end - first)
                *part, main1, main2 = weights[end]
                return self.experts(x, handle.tokens_per_expert, handle, topk_weights, part, (main1, main2))

            return compute
        if not self._experts_divide:
            raise RuntimeError(
                f"overlap_degree={len(ends)} computes some experts at a time, which this layer's experts cannot do: "
                "use FusedExperts or separate experts, or overlap_degree=1"
            )

        def compute(x, topk_idx, topk_weights, first, end):
            rows, handle = dispatch(x, topk_idx, end - first)
            return combine(self._separate(rows, handle.tokens_per_expert, first), handle, topk_weights)

        return compute

    def expert_fn(self, inp, fwd_expert_count):
        """Applies the experts to rows sorted by expert: inp [R, *] or a nest, fwd_expert_count [E]."""
        if self.experts is None:
            raise RuntimeError("this FMoE has no experts: pass expert=, or set self.experts in the subclass")
        if self.experts_fused:
            return self.experts(inp, fwd_expert_count)
        return self._separate(inp, fwd_expert_count, 0)

    def _separate(self, inp, fwd_expert_count, first):
        outputs, begin = [], 0
        for idx, count in enumerate(torch.as_tensor(fwd_expert_count).tolist(), first):
            rows = map_structure(lambda x, begin=begin, end=begin + count: x[begin:end], inp)
            outputs.append(self.expert_fn_single(rows, count, idx))
            begin += count
        return map_structure(lambda *parts: torch.cat(parts), *outputs)

    def expert_fn_single(self, inp, fwd_expert_count, idx):
        """Applies expert number idx to all rows of inp."""
        if self.experts_fused:
            raise RuntimeError("expert_fn_single needs separate experts, but these are fused in one module")
        if self._expert_takes_count is not None and not self._expert_takes_count[idx]:
            return self.experts[idx](inp)
        return self.experts[idx](inp, torch.as_tensor(fwd_expert_count, dtype=torch.int64).reshape(1))

    def mark_parallel_comm(self, expert_dp_comm="none"):
        """Tags the parameters of the experts with expert_dp_comm and those of the gate with "gate"."""
        self._expert_dp_comm = expert_dp_comm
        if self.experts is not None:
            mark_module_parallel_comm(self.experts, expert_dp_comm)
        mark_module_parallel_comm(self.gate, "gate")

    def __setstate__(self, state):
        super().__setstate__(state)
        if self._expert_dp_comm is not None:  # copies of parameters lose their attributes
            self.mark_parallel_comm(self._expert_dp_comm)

    @property
    def _experts_combine(self):
        """Whether the experts read tokens and sum results themselves, and no subclass steps in between."""
        return isinstance(self.experts, FusedExperts) and type(self).expert_fn is FMoE.expert_fn

    @property
    def _experts_divide(self):
        """Whether some experts can compute without the others."""
        separate = not self.experts_fused and type(self).expert_fn is FMoE.expert_fn
        return separate or self._experts_combine

    def _count_inputs(self, moe_inp):
        leaves = []
        map_structure(leaves.append, moe_inp)
        sizes = [x.shape[0] if isinstance(x, torch.Tensor) and x.dim() > 0 else None for x in leaves]
        if not sizes or sizes[0] is None or any(size != sizes[0] for size in sizes):
            kinds = [list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__ for x in leaves]
            raise ValueError(f"moe_inp must be tensors [T, *] with one number of tokens T, but got {kinds}")
        return sizes[0]

    def _choose(self, moe_inp, num_tokens):
        topk_idx, topk_weights = self.gate(moe_inp)
        if self.gate_hook is not None:
            self.gate_hook(topk_idx, topk_weights, None)
        if topk_idx.dim() != 2:
            topk_idx = topk_idx.reshape(-1, self.top_k)
        if topk_idx.shape[0] != num_tokens or topk_weights.numel() != topk_idx.numel():
            raise ValueError(
                f"the gate must return topk_idx and topk_weights [T={num_tokens}, K={self.top_k}], "
                f"but returned {list(topk_idx.shape)} and {list(topk_weights.shape)}"
            )
        return topk_idx, topk_weights.reshape(topk_idx.shape)


def _drop_masked(topk_idx, mask):
    if mask.numel() != topk_idx.shape[0]:
        raise ValueError(
            f"mask must have one entry for each of the {topk_idx.shape[0]} tokens, "
            f"but got shape {list(mask.shape)}"
        )
    return torch.where(_of_rows(mask, topk_idx) != 0, -1, topk_idx)


def _fill_masked(out, topk_weights, mask, mask_dict):
    def fill(out):
        of_rows = _of_rows(mask, out)
        for value, filling in mask_dict.items():
            filling = torch.as_tensor(filling, device=out.device).to(topk_weights.dtype)
            filling = filling.expand(topk_weights.shape[1], *out.shape[1:])  # [K, *]
            weighted = torch.tensordot(topk_weights, filling, dims=1).to(out.dtype)  # [T, *]
            out = torch.where(of_rows == value, weighted, out)
        return out

    return map_structure(fill, out)


def _of_rows(mask, rows):
    """mask [T, 1, ...], shaped to select rows of [T, *]."""
    return mask.to(rows.device).reshape(-1, *(1 for _ in rows.shape[1:]))


def _renormalize(topk_idx, topk_weights):
    kept = torch.where(topk_idx >= 0, topk_weights, 0)
    kept_sum = kept.sum(-1, keepdim=True)
    return kept * (topk_weights.sum(-1, keepdim=True) / torch.where(kept_sum == 0, 1, kept_sum))


def _takes_gate_bias(gate):
    """Whether a gate that is not built yet takes gate_bias: by name, or in the **kwargs of a NaiveGate."""
    bound = gate.keywords if isinstance(gate, functools.partial) else {}
    maker = gate.func if isinstance(gate, functools.partial) else gate
    parameters = inspect.signature(maker).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    is_naive = isinstance(maker, type) and issubclass(maker, NaiveGate)
    return "gate_bias" not in bound and (
        any(p.name == "gate_bias" for p in parameters) or (takes_any and is_naive)
    )


def _takes_count(expert):
    """Whether an expert is called with its number of rows: its forward needs a second argument."""
    parameters = list(inspect.signature(expert.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (
        positional[1].default is inspect.Parameter.empty or "count" in positional[1].name
    )


def _take_placement(module, state_dict, prefix, *_):
    """Experts are where the state dict has them; in order, if it says nothing."""
    key = prefix + "expert_placement"
    if key in state_dict:
        if module._parallel is None:
            raise RuntimeError(
                f"{key}: experts were moved between ranks, but this layer has all of them on one"
            )
        module.place_experts(state_dict[key].tolist())
    elif module.expert_placement is not None:
        state_dict[key] = torch.arange(module.num_experts)
        module.place_experts(range(module.num_experts))


def _drop_wrapper_prefix(module, state_dict, prefix, *_):
    """Takes the state dict of a layer that was wrapped for data parallelism."""
    wrapped = prefix + "module."
    for key in [key for key in state_dict if key.startswith(wrapped)]:
        state_dict[prefix + key.removeprefix(wrapped)] = state_dict.pop(key)
