"""fmoe.megatron.checkpoint."""

from fmoe_ext.compat._core import core


def get_fmoe_checkpoint_name(checkpoints_path, iteration, release=False, data_parallel_rank=-1):
    """The file of a worker's experts."""
    return _core("get_fmoe_checkpoint_name")(checkpoints_path, iteration, release, data_parallel_rank)


def save_checkpoint(iteration, model, optimizer, lr_scheduler):
    """Saves the dense part once and the experts of every data-parallel rank."""
    return _core("save_checkpoint")(iteration, model, optimizer, lr_scheduler)


def merge_state_dict(state_dict_rank0, state_dict_local, fp16):
    """The state of a worker: the dense part of rank 0 with its own experts."""
    return _core("merge_state_dict")(state_dict_rank0, state_dict_local, fp16)


def load_checkpoint(model, optimizer, lr_scheduler, load_arg="load"):
    """Loads what save_checkpoint saved."""
    return _core("load_checkpoint")(model, optimizer, lr_scheduler, load_arg)


def _core(name):
    return core("integrations.megatron", name, f"fmoe.megatron.checkpoint.{name}")
