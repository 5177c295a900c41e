"""fmoe.fastermoe.shadow_policy: experts that all ranks copy, as bools [world_size * num_expert]."""

import functools
from collections.abc import Callable

import torch

from fmoe_ext.compat import _ranks
from fmoe_ext.compat.fastermoe.config import float_from_env, switch_from_env
from fmoe_ext.ep.cost import Hardware, Layer
from fmoe_ext.ep.shadowing import choose_shadows


def global_policy(
    local_expert_count: torch.Tensor,
    _gec: torch.Tensor,
    num_expert: int,
    world_size: int,
    device: torch.device | str,
    *,
    d_model: int = 2048,
) -> torch.Tensor:
    """The experts whose copies save more communication than they cost; none on one rank.

    By ep.shadowing.choose_shadows, from FMOE_FASTER_GLBPLC_NETBW (bytes a second), _GPUTP (FLOP a second), _ALPHA
    (hidden width / d_model) and _DMODEL, which goes before d_model.
    """
    shadows = no_shadow_policy(local_expert_count, _gec, num_expert, world_size, device)
    if world_size == 1:
        return shadows
    d_model = int(float_from_env("FMOE_FASTER_GLBPLC_DMODEL", d_model))
    d_hidden = int(d_model * float_from_env("FMOE_FASTER_GLBPLC_ALPHA", 2))
    speeds = Hardware(
        float_from_env("FMOE_FASTER_GLBPLC_NETBW", 50e9 / 8),
        float_from_env("FMOE_FASTER_GLBPLC_GPUTP", 11.5e12),
    )
    load = _ranks.sum_over_ranks(local_expert_count, world_size).tolist()
    shadows[list(choose_shadows(load, world_size, Layer(d_model, d_hidden), speeds))] = True
    return shadows


def no_shadow_policy(
    _lec: torch.Tensor, _gec: torch.Tensor, num_expert: int, world_size: int, device: torch.device | str
) -> torch.Tensor:
    """No expert."""
    return torch.zeros(world_size * num_expert, dtype=torch.bool, device=device)


def get_shadow_policy(d_model: int | None = None) -> Callable[..., torch.Tensor]:
    """global_policy, for d_model if given, if FMOE_FASTER_SHADOW_ENABLE is 1 or ON, otherwise no_shadow_policy."""
    if not switch_from_env("FMOE_FASTER_SHADOW_ENABLE"):
        return no_shadow_policy
    return global_policy if d_model is None else functools.partial(global_policy, d_model=d_model)
