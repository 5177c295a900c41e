"""fmoe.fastermoe and its modules: FasterMoE's names for the same maths, without its overlap and shadowing.

FasterMoE cuts the exchange into steps that overlap with the experts, and copies ("shadows") busy experts to all ranks
instead of sending their tokens. fmoe_ext.ep has both. Here its functions compute the same results one step
after the other:

* expert_utils: the parameters of expert number idx of a list e, as one flat tensor
* shadow_policy: which experts would be copied, as bools [world_size * num_expert]
* schedule: the forward. stored_models says which experts were copied; that changes only where a result is computed, so
  it is taken and ignored
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from fmoe_ext import _env
from fmoe_ext.compat import _ranks
from fmoe_ext.compat.functions import MOEGather, MOEScatter
from fmoe_ext.compat.layers import _fmoe_general_global_forward as _general_forward
from fmoe_ext.ep.cost import Hardware, Layer
from fmoe_ext.ep.shadowing import choose_shadows

_ExpertFn: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

policy_fn = None


def float_from_env(key: str, default: Any = -1) -> float:
    """Return the value of an environment variable as a float; default if it is not set."""
    text = _env.unlisted(key)
    return default if text is None else float(text)


def switch_from_env(key: str, default: Any = False) -> bool:
    """Return True if an environment variable is "1" or "ON"; default if it is not set."""
    text = _env.unlisted(key)
    return default if text is None else text in ("1", "ON")


def get_expert_param_size(e: Sequence[nn.Module], idx: int) -> int:
    """Return the number of elements of all parameters of an expert."""
    return sum(parameter.numel() for parameter in e[idx].parameters())


@torch.no_grad()
def get_expert_params(e: Sequence[nn.Module], out: torch.Tensor, idx: int) -> None:
    """Copy the parameters of an expert to out."""
    for parameter, part in _parts(e[idx], out):
        part.copy_(parameter.flatten())


@torch.no_grad()
def stash_expert_params(e: Sequence[nn.Module], params: torch.Tensor, idx: int) -> None:
    """Put aside parameters and gradients of an expert, until pop_expert_params, and give it those in params."""
    expert: Any = e[idx]
    if not hasattr(expert, "expert_param_stash"):  # a second stash must not lose the expert's own values
        expert.expert_param_stash = [
            (parameter.clone(), None if parameter.grad is None else parameter.grad.clone())
            for parameter in expert.parameters()
        ]
    for parameter, part in _parts(expert, params):
        parameter.copy_(part.view_as(parameter))
        parameter.grad = None


@torch.no_grad()
def pop_expert_params(e: Sequence[nn.Module], idx: int) -> None:
    """Give an expert back what stash_expert_params put aside, if it did."""
    expert = e[idx]
    if not hasattr(expert, "expert_param_stash"):
        return
    stash: Any = expert.expert_param_stash
    for parameter, (value, grad) in zip(expert.parameters(), stash, strict=True):
        parameter.copy_(value)  # in place: optimizers and wrappers hold the parameter
        parameter.grad = grad
    del expert.expert_param_stash


@torch.no_grad()
def collect_expert_grads(e: Sequence[nn.Module], grads: torch.Tensor, idx: int) -> None:
    """Move the gradients of an expert to grads, zeros where there are none."""
    for parameter, part in _parts(e[idx], grads):
        if parameter.grad is None:
            part.zero_()
        else:
            part.copy_(parameter.grad.flatten())
        parameter.grad = None


@torch.no_grad()
def set_grads(e: Sequence[nn.Module], grads: torch.Tensor, idx: int) -> None:
    """Add grads to the gradients of an expert."""
    for parameter, part in _parts(e[idx], grads):
        part = part.view_as(parameter)
        parameter.grad = part.clone() if parameter.grad is None else parameter.grad + part


def _parts(expert: nn.Module, flat: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield each parameter with its part of a flat tensor."""
    begin = 0
    for parameter in expert.parameters():
        yield parameter, flat[begin : begin + parameter.numel()]
        begin += parameter.numel()


def global_policy(
    local_expert_count: torch.Tensor,
    _gec: torch.Tensor,
    num_expert: int,
    world_size: int,
    device: torch.device | str,
    *,
    d_model: int = 2048,
) -> torch.Tensor:
    """Return the experts whose copies save more communication than they cost; none on one rank.

    By ep.shadowing.choose_shadows. FasterMoE's variables give the sizes and speeds, FMOE_FASTER_GLBPLC_NETBW (bytes a
    second), _GPUTP (FLOP a second), _ALPHA (hidden width / d_model) and _DMODEL, which takes precedence over d_model.
    """
    shadows = no_shadow_policy(local_expert_count, _gec, num_expert, world_size, device)
    if world_size == 1:
        return shadows
    # sizes of the layer and speeds of the machine; the defaults are FasterMoE's
    d_model = int(float_from_env("FMOE_FASTER_GLBPLC_DMODEL", d_model))
    d_hidden = int(d_model * float_from_env("FMOE_FASTER_GLBPLC_ALPHA", 2))
    speeds = Hardware(
        float_from_env("FMOE_FASTER_GLBPLC_NETBW", 50e9 / 8),
        float_from_env("FMOE_FASTER_GLBPLC_GPUTP", 11.5e12),
    )
    # the load of all ranks, so that every rank chooses the same experts
    load = _ranks.sum_over_ranks(local_expert_count, world_size).tolist()
    shadows[list(choose_shadows(load, world_size, Layer(d_model, d_hidden), speeds))] = True
    return shadows


def no_shadow_policy(
    _lec: torch.Tensor, _gec: torch.Tensor, num_expert: int, world_size: int, device: torch.device | str
) -> torch.Tensor:
    """Return a policy's answer that copies no expert."""
    return torch.zeros(world_size * num_expert, dtype=torch.bool, device=device)


def get_shadow_policy(d_model: int | None = None) -> Callable[..., torch.Tensor]:
    """Return global_policy, for d_model if given, if FMOE_FASTER_SHADOW_ENABLE is 1 or ON; else no_shadow_policy."""
    if not switch_from_env("FMOE_FASTER_SHADOW_ENABLE"):
        return no_shadow_policy
    return global_policy if d_model is None else functools.partial(global_policy, d_model=d_model)


class MoEForward:
    """Scatter, run the experts one after the other, gather; called as MoEForward.apply(...), differentiable."""

    @staticmethod
    def apply(
        expert_fn: _ExpertFn,
        experts: Any,
        inp: torch.Tensor,
        pos_s: torch.Tensor,
        pos_g: torch.Tensor,
        local_expert_count: torch.Tensor,
        global_expert_count: torch.Tensor,
        stored_models: Any,
        fwd_batch_size: int,
        out_batch_size: int,
        num_expert: int,
        world_size: int,
    ) -> torch.Tensor:
        """Run a layer's forward with expert_fn(rows, number of rows [1], expert) -> [out_batch_size, *]."""
        # pos_s: the token of each row; pos_g: the place of its choice in the output
        x = MOEScatter.apply(inp, pos_s, local_expert_count, global_expert_count, fwd_batch_size, world_size)
        count = global_expert_count.view(world_size, num_expert).sum(0)
        y = _each_expert(expert_fn, x, count)
        return MOEGather.apply(y, pos_g, local_expert_count, global_expert_count, out_batch_size, world_size)


def _fmoe_general_global_forward(
    inp: torch.Tensor,
    gate: torch.Tensor,
    expert_fn: _ExpertFn,
    n_expert: int,
    world_size: int,
    experts: Any = None,
    stored_models: Any = None,
) -> torch.Tensor:
    """As fmoe.layers._fmoe_general_global_forward, with expert_fn(rows, number of rows [1], expert)."""

    # fmoe.layers calls its expert_fn once for all experts, fmoe.fastermoe once for each
    def all_experts(x: torch.Tensor, fwd_expert_count) -> torch.Tensor:
        return _each_expert(expert_fn, x, fwd_expert_count)

    return _general_forward(inp, gate, all_experts, n_expert, world_size)


# x: rows sorted by expert, as count says
def _each_expert(expert_fn: _ExpertFn, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    parts = x.split(count.tolist())
    return torch.cat([expert_fn(rows, count[idx : idx + 1], idx) for idx, rows in enumerate(parts)])
