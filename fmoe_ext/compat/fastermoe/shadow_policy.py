"""fmoe.fastermoe.shadow_policy: experts that all workers copy, as bools [world_size * num_expert]."""

import torch

from fmoe_ext.compat._core import core
from fmoe_ext.compat.fastermoe.config import switch_from_env


def global_policy(local_expert_count, _gec, num_expert, world_size, device):
    """The experts whose copies save more communication than they cost; none on one worker."""
    if world_size == 1:
        return no_shadow_policy(local_expert_count, _gec, num_expert, world_size, device)
    policy = core("ep.shadowing", "global_policy", "fmoe.fastermoe.shadow_policy.global_policy")
    return policy(local_expert_count, _gec, num_expert, world_size, device)


def no_shadow_policy(_lec, _gec, num_expert, world_size, device):
    """No expert."""
    return torch.zeros(world_size * num_expert, dtype=torch.bool, device=device)


def get_shadow_policy(d_model=None):
    """global_policy if FMOE_FASTER_SHADOW_ENABLE is 1 or ON, otherwise no_shadow_policy; d_model is not needed."""
    return global_policy if switch_from_env("FMOE_FASTER_SHADOW_ENABLE") else no_shadow_policy
