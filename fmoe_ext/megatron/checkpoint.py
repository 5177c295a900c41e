"""The names of fmoe_ext.integrations.megatron.checkpoint, where they were before."""

from fmoe_ext.integrations.megatron.checkpoint import (
    get_fmoe_checkpoint_name,
    load_checkpoint,
    merge_state_dict,
    save_checkpoint,
)

__all__ = ["get_fmoe_checkpoint_name", "load_checkpoint", "merge_state_dict", "save_checkpoint"]
