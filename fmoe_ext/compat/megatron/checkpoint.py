"""fmoe.megatron.checkpoint."""

from fmoe_ext.megatron.checkpoint import (
    get_fmoe_checkpoint_name,
    load_checkpoint,
    merge_state_dict,
    save_checkpoint,
)

__all__ = ["get_fmoe_checkpoint_name", "load_checkpoint", "merge_state_dict", "save_checkpoint"]
