"""SpreadLayer: the base of FMoE that spreads a layer's experts over the ranks of a group, and tags its parameters.

With E experts and W ranks, rank r keeps the experts [r * E / W, (r + 1) * E / W) of each parameter's first dimension.
A tag, param.dp_comm, names the ranks that have copies of a parameter: DistributedGroupedDataParallel reduces its
gradient over them. Experts get the tag that the user names, all that every token passes (gate, shared experts,
projections) the tag "gate".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fmoe_ext.ep.expert_parallel import ExpertParallel
from fmoe_ext.ep.process_groups import Group, find_group, size_of
from fmoe_ext.ep.ranks import GroupRanks, SliceGroup
from fmoe_ext.experts import FusedExperts, LatentProjections, SharedExperts
from fmoe_ext.gates import BaseGate, OneRank
from fmoe_ext.linear import FMoELinear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def mark_module_parallel_comm(module: nn.Module, comm: str, *, only_untagged: bool = False) -> None:
    """Tag the parameters of module with the name of the group that reduces their gradient: param.dp_comm = comm."""
    for param in module.parameters():
        if not (only_untagged and hasattr(param, "dp_comm")):
            setattr(param, "dp_comm", comm)  # noqa: B010 - an attribute that Parameter does not declare


class SpreadLayer(nn.Module):
    """A layer whose experts are on this rank, or spread over the ranks of a group."""

    num_local_experts: int  # on this rank
    num_experts: int  # of all ranks
    world_size: int  # ranks that share the experts
    gate: Any
    experts: Any
    shared_experts: SharedExperts | None
    latent: LatentProjections | None
    expert_parallel: ExpertParallel | None  # None: all experts are here
    expert_placement: torch.Tensor | None  # [E] the expert at each place, once experts have moved; a buffer
    _slices: SliceGroup | None  # ranks that share the rows of one input
    _expert_dp_comm: str | None  # tag of the experts, once the parameters are tagged

    @property
    def moe_group(self) -> ProcessGroup | None:
        """Process group that the experts are spread over, or None."""
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

    def spread(
        self,
        group: Group = None,
        *,
        gate_group: Group = None,
        overlap_degree: int | str = 1,
        max_rows_per_rank: int | None = None,
        exchange: str = "choice",
        wire: str = "full",
    ) -> None:
        """Leave on this rank its share of the experts: rank r of the group keeps [r * e, (r + 1) * e) of E = size * e.

        For a layer that was made for one process, with the same parameters on all ranks of the group. All of them call
        it, in one order of layers, before they make an optimizer: the parameters of the experts are new ones. Tags stay
        as they are. Arguments: ParallelLayout, group is its moe_group.
        Raises ValueError, and changes nothing, if the experts are spread already, the ranks do not divide them, or the
        gate must know its ranks when it is made.
        """
        # 1. Checks, before anything is changed.
        size = size_of(group)
        if self.expert_parallel is not None:
            raise ValueError(f"the experts of {type(self).__name__} are spread over ranks already")
        if self.num_experts % size:
            raise ValueError(
                f"{type(self).__name__} has {self.num_experts} experts, which {size} ranks cannot share evenly"
            )
        if isinstance(self.gate, BaseGate):
            self.gate.check_spread(size)
        # 2. What the layer and its gate know of the ranks.
        num_local = self.num_experts // size
        self.expert_parallel = ExpertParallel(
            group, num_local, overlap_degree, max_rows_per_rank, exchange, wire
        )
        self.num_local_experts, self.world_size = num_local, size
        self.gate.num_local_experts, self.gate.world_size = num_local, size
        self.share_gate(gate_group)
        # 3. The experts: this rank's modules, or the rows [first, end) of each parameter.
        first, end = self.ep_rank * num_local, (self.ep_rank + 1) * num_local
        if isinstance(self.experts, nn.ModuleList):
            kept = list(self.experts)[first:end]
            del self.experts[: len(self.experts)]
            self.experts.extend(kept)
            return
        for module in self.experts.modules():
            for name, p in module.named_parameters(recurse=False):
                setattr(module, name, keep_rows(p, first, end))
            if isinstance(module, FMoELinear):
                module.num_local_experts, module.rank = num_local, self.ep_rank
            if isinstance(module, FusedExperts):
                module.num_experts = num_local

    def share_gate(self, gate_group: Group = None) -> None:
        """Let the gate's losses and capacities span the tokens of a group, of moe_group if None."""
        if isinstance(getattr(self.gate, "ranks", None), OneRank):
            group = self.moe_group if gate_group is None else gate_group
            self.gate.ranks = GroupRanks(group, num_copies=self.slice_size)

    def place_experts(self, order: Iterable[int]) -> None:
        """Note that the parameters of expert order[place] are now at that place (planning.placement moves them)."""
        assert self.expert_parallel is not None
        self.expert_parallel.experts_in_place = list(order)
        self.expert_placement = torch.tensor(order, device="cpu")

    def mark_parallel_comm(self, expert_dp_comm: str = "none") -> None:
        """Tag the experts' parameters with expert_dp_comm, and those that every token passes with "gate"."""
        self._expert_dp_comm = expert_dp_comm
        self._mark_parameters(expert_dp_comm)

    def tag_new_parameters(self) -> None:
        """Tag parameters that came since mark_parallel_comm() (adapters in the experts) as those beside them."""
        if self._expert_dp_comm is not None:
            self._mark_parameters(self._expert_dp_comm, only_untagged=True)

    def _mark_parameters(self, expert_dp_comm: str, only_untagged: bool = False) -> None:
        # "gate" for all that every token passes: each rank of a slice group has a part of its gradient
        dense = [module for module in (self.gate, self.shared_experts, self.latent) if module is not None]
        for module, comm in ((self.experts, expert_dp_comm), *((module, "gate") for module in dense)):
            if module is not None:
                mark_module_parallel_comm(module, comm, only_untagged=only_untagged)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._expert_dp_comm is not None:  # copies of parameters lose their attributes
            self._mark_parameters(self._expert_dp_comm)


def tag_adapters(module: Any) -> None:
    """Tag the adapters that PEFT put around a Transformers model's experts as these experts, if they are spread.

    ValueError for those that lora.fuse has not seen: save_pretrained() would write the adapters of one rank.
    """
    experts = module.get_base_layer() if hasattr(module, "get_base_layer") else None
    if experts is None or getattr(experts, "expert_parallel", None) is None:
        return
    if not hasattr(type(module), "fused_adapter"):
        raise ValueError(
            f"{type(module).__name__} has adapters of experts that are spread over ranks, and save_pretrained() would "
            "write those of one rank: call fmoe_ext.lora.fuse(model) before wrapping it"
        )
    # the tag of the experts themselves
    comm = next((p.dp_comm for p in experts.parameters() if hasattr(p, "dp_comm")), "none")
    mark_module_parallel_comm(module, comm, only_untagged=True)


def keep_rows(param: nn.Parameter, first: int, end: int) -> nn.Parameter:
    """Make a parameter of the rows [first, end) of param [E, *], with its attributes."""
    kept = nn.Parameter(param.detach()[first:end].clone(), requires_grad=param.requires_grad)
    kept.__dict__.update(param.__dict__)
    return kept


def drop_wrapper_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the keys of a layer that was wrapped for data parallelism (a hook of load_state_dict)."""
    wrapped = prefix + "module."
    for key in [key for key in state_dict if key.startswith(wrapped)]:
        state_dict[prefix + key.removeprefix(wrapped)] = state_dict.pop(key)


def take_placement(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Note which expert is at which place of a state dict; in order, if it says nothing (a hook of load_state_dict)."""
    key = prefix + "expert_placement"
    if key in state_dict:
        if module.expert_parallel is None:
            raise RuntimeError(
                f"{key}: experts were moved between ranks, but this layer has all of them on one"
            )
        module.place_experts(state_dict[key].tolist())
    elif module.expert_placement is not None:
        state_dict[key] = torch.arange(module.num_experts, device="cpu")
        module.place_experts(range(module.num_experts))
