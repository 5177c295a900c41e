"""fmoe.megatron.checkpoint: Megatron's own file, and beside it one with the experts of each further data-parallel rank.

    <dir>/iter_<iteration>/mp_rank_<tp>[_<pp>]/model_optim_rng.pt                    rank 0: Megatron's functions
    <dir>/iter_<iteration>/mp_rank_<tp>[_<pp>]_dp_rank_<dp>/model_optim_rng.pt       others: their experts and the state
                                                                                     of the optimizer for them

Loading on another rank reads both files and puts its experts into what rank 0 saved. The number of data-parallel ranks
must be what it was; fmoe_ext.checkpoint reads these files for another number.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fmoe_ext.compat.megatron.runtime import EXPERTS_TAG, get_args, get_mpu


def get_fmoe_checkpoint_name(
    checkpoints_path: str, iteration: int, release: bool = False, data_parallel_rank: int = -1
) -> str:
    """Name the file of a data-parallel rank, -1 for this one; rank 0 has Megatron's own."""
    mpu = get_mpu()
    if data_parallel_rank == -1:
        data_parallel_rank = mpu.get_data_parallel_rank()
    # the others' names are Megatron's with _dp_rank_<dp> behind the folder of the rank
    if data_parallel_rank == 0:
        if _is_v3():  # two names, of weights and optimizer: one file without the distributed optimizer
            return _megatron("get_checkpoint_names")(checkpoints_path, iteration, False, release)[0]
        return _megatron("get_checkpoint_name")(checkpoints_path, iteration, release)
    folder = "release" if release else f"iter_{iteration:07d}"
    rank = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        rank += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    return os.path.join(
        checkpoints_path, folder, f"{rank}_dp_rank_{data_parallel_rank:04d}", "model_optim_rng.pt"
    )


def save_checkpoint(iteration: int, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
    """Save the model of all ranks to args.save; all ranks call it.

    model: as Megatron's save_checkpoint takes it, with one chunk. Raises ValueError for an interleaved pipeline, and in
    fp16 and bf16 for an optimizer that FastMoE has not patched, whose copies of experts are not known by a tag, and
    for v3.0.2's distributed optimizer.
    """
    _refuse_distributed_optimizer()
    if get_mpu().get_data_parallel_rank() == 0:
        _megatron("save_checkpoint")(iteration, model, optimizer, lr_scheduler)
        return
    args = get_args()
    module = _only_chunk(model)
    # keep_vars: parameters instead of plain tensors, whose dp_comm tells the experts
    state: dict[str, Any] = {"model": _experts_of(module.state_dict_for_save_checkpoint(keep_vars=True))}
    if not args.no_save_optim and optimizer is not None:
        # Entries of the optimizer are by the number of the parameter: the numbers stay, entries of others are left out.
        # In fp16 and bf16 it wraps another optimizer and has float32 copies of the parameters: None for the others.
        whole, has_copies = optimizer.state_dict(), _has_copies(args)
        inner = whole["optimizer"] if has_copies else whole
        params = [p for group in optimizer.optimizer.param_groups for p in group["params"]]
        kept = {i: inner["state"][i] for i, p in enumerate(params) if _is_expert(p) and i in inner["state"]}
        state["optimizer"] = {"state": kept}
        if has_copies:
            copies = [
                [p if _is_expert(p) else None for p in group] for group in whole["fp32_from_fp16_params"]
            ]
            if state["model"] and not any(p is not None for group in copies for p in group):
                raise ValueError(
                    "the float32 copies of experts in Megatron's optimizer have no dp_comm, and would not be saved: "
                    "where it makes them, copy it as FastMoE's patch does (main_param.dp_comm = param.dp_comm)"
                )
            state["optimizer"] = {"optimizer": {"state": kept}, "fp32_from_fp16_params": copies}
    path = Path(get_fmoe_checkpoint_name(args.save, iteration))
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(state, path)
    dist.barrier()  # the two in Megatron's save_checkpoint: before and after the tracker file
    dist.barrier()


def _write(state: dict[str, Any], path: Path) -> None:
    """Write a file with torch.save, or raise OSError and leave an older one as it was."""
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the name with an empty file
        os.replace(partial, path)
    except Exception as error:  # torch's writer raises RuntimeError for a full disk
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {' '.join(str(error).split())}") from error


def load_checkpoint(model: Any, optimizer: Any, lr_scheduler: Any, load_arg: str = "load") -> int:
    """Load what save_checkpoint saved to args.<load_arg> -> the iteration, 0 if there is none; all ranks call it.

    Random number generators of all ranks continue from rank 0's, as in Megatron without data_parallel_random_init.
    Raises FileNotFoundError where this rank's file is missing, ValueError for v3.0.2's distributed optimizer.
    """
    _refuse_distributed_optimizer()
    mpu = get_mpu()
    if mpu.get_data_parallel_rank() == 0:
        return _megatron("load_checkpoint")(model, optimizer, lr_scheduler, load_arg)
    args = get_args()
    folder = getattr(args, load_arg)
    tracker = Path(_megatron("get_checkpoint_tracker_filename")(folder))
    if not tracker.is_file():
        return 0
    text = tracker.read_text().strip()
    release = text == "release"
    if not release and not text.isdigit():
        raise ValueError(f"{tracker} must hold a number or 'release', but holds {text!r}")
    iteration = 0 if release else int(text)
    saved_by = []
    for rank in (0, mpu.get_data_parallel_rank()):  # Megatron's file first
        file = get_fmoe_checkpoint_name(folder, iteration, release, rank)
        if not Path(file).is_file():
            raise FileNotFoundError(
                f"{file} is missing: the checkpoint was saved with fewer than the "
                f"{mpu.get_data_parallel_world_size()} data-parallel ranks of this job; "
                "fmoe_ext.checkpoint merges such files"
            )
        # not weights_only: Megatron's files hold its options and scheduler
        saved_by.append(torch.load(file, map_location="cpu", weights_only=False))
    state = merge_state_dict(saved_by[0], saved_by[1], _has_copies(args))
    _megatron("set_checkpoint_version")(state.get("checkpoint_version", 0))
    _only_chunk(model).load_state_dict(state["model"])
    # as Megatron's own load_checkpoint: a release, or weights to finetune, begins at iteration 0 with a new optimizer
    fresh = release or args.finetune
    if not fresh and not args.no_load_optim:
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
        if lr_scheduler is not None:  # v3.0.2 writes it under another name
            lr_scheduler.load_state_dict(
                state["lr_scheduler" if "lr_scheduler" in state else "opt_param_scheduler"]
            )
    elif optimizer is not None and _has_copies(args) and _is_v3():
        optimizer.reload_model_params()  # else the next step would put the copies of the first weights back
    if (saved := state.get("args")) is not None:  # the samplers go on where the data of the saved run ended
        args.consumed_train_samples = getattr(saved, "consumed_train_samples", 0)
        args.consumed_valid_samples = getattr(saved, "consumed_valid_samples", 0)
        _megatron("update_num_microbatches")(consumed_samples=args.consumed_train_samples)
    if not fresh and not getattr(args, "no_load_rng", False):
        _set_generators(state, mpu)
    dist.barrier()  # the one in Megatron's load_checkpoint
    return 0 if fresh else state.get("iteration", state.get("total_iters", iteration))


def _refuse_distributed_optimizer() -> None:
    """Raise ValueError on every rank: each saves a part of the optimizer, and FastMoE's files have no place for it."""
    if getattr(get_args(), "use_distributed_optimizer", False):
        raise ValueError(
            "--use-distributed-optimizer divides the optimizer's state over ranks that have different experts, and "
            "FastMoE's files have no place for it: leave the option out"
        )


def _set_generators(state: dict[str, Any], mpu: Any) -> None:
    """Set the random number generators as a file of Megatron has them; one without them (no_save_rng) changes none."""
    import numpy

    saved = state["rng_state"][0] if "rng_state" in state else state  # v3.0.2 has a list of them
    if "torch_rng_state" not in saved:
        return
    random.setstate(saved["random_rng_state"])
    numpy.random.set_state(saved["np_rng_state"])
    torch.set_rng_state(saved["torch_rng_state"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda_rng_state"])
    # that of tensor-parallel regions: in mpu, in v3.0.2 in megatron.core.tensor_parallel
    place = mpu if hasattr(mpu, "get_cuda_rng_tracker") else sys.modules.get("megatron.core.tensor_parallel")
    if place is not None:
        place.get_cuda_rng_tracker().set_states(saved["rng_tracker_states"])


def merge_state_dict(
    state_dict_rank0: dict[str, Any], state_dict_local: dict[str, Any], fp16: bool
) -> dict[str, Any]:
    """Put a rank's experts and their optimizer state into rank 0's state, which is changed; fp16: bf16 too."""
    _update_nested(state_dict_rank0["model"], state_dict_local["model"])
    if "optimizer" not in state_dict_local:  # saved with no_save_optim
        return state_dict_rank0
    merged, local = state_dict_rank0["optimizer"], state_dict_local["optimizer"]
    if fp16:  # None: no expert's
        for into, params in zip(merged["fp32_from_fp16_params"], local["fp32_from_fp16_params"], strict=True):
            for i, p in enumerate(params):
                if p is not None:
                    into[i] = p
        merged, local = merged["optimizer"], local["optimizer"]
    merged["state"].update(local["state"])
    return state_dict_rank0


def _experts_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a nested state dict whose tensors are parameters of experts."""
    experts = type(state)()
    for key, value in state.items():
        if isinstance(value, dict):
            inner = _experts_of(value)
            if inner:
                experts[key] = inner
        elif _is_expert(value):
            experts[key] = value.detach()
    return experts


def _has_copies(args: Any) -> bool:
    """Return True if Megatron's optimizer has float32 copies of the parameters."""
    return args.fp16 or getattr(args, "bf16", False)


def _is_v3() -> bool:
    """Return True for the checkpointing of v3.0.2."""
    return hasattr(importlib.import_module("megatron.checkpointing"), "get_checkpoint_names")


# different on each data-parallel rank: no reduction at all, or one over tensor-parallel copies
def _is_expert(p: Any) -> bool:
    return getattr(p, "dp_comm", "dp") in ("none", EXPERTS_TAG)


def _update_nested(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _update_nested(into[key], value)
        else:
            into[key] = value


def _only_chunk(model: Any) -> Any:
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if len(chunks) != 1:
        raise ValueError(
            f"the model must be one chunk, but there are {len(chunks)} (an interleaved pipeline)"
        )
    module = chunks[0]
    while hasattr(module, "module"):  # wrappers: data parallelism, Float16Module
        module = module.module
    return module


# imported when it is needed: without Megatron-LM this module imports all the same
def _megatron(name: str) -> Any:
    return getattr(importlib.import_module("megatron.checkpointing"), name)
