"""save_pretrained of models that import_model() made: the format that they came from."""

from pathlib import Path
from typing import Any

import torch

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.saving import gathered
from fmoe_ext.checkpoint.shards import MAX_SHARD_BYTES, num_bytes_of, replacing
from fmoe_ext.integrations.formats.plan import plan_export
from fmoe_ext.integrations.formats.writing import write_files


@torch.no_grad()
def save_in_format(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    max_shard_size: int | str = MAX_SHARD_BYTES,
    **options: Any,
) -> None:
    """save_pretrained(): writes the model in the format that it came from, over what an earlier call wrote.

    state_dict: the model's own, as the Trainer passes it. is_main_process, max_shard_size, safe_serialization: as in
    Transformers. Raises CheckpointError for its other arguments, which are not honoured.
    """
    wanted = [name for name, value in options.items() if value and name != "safe_serialization"]
    if wanted:
        raise CheckpointError(
            f"save_pretrained of an imported model takes no {', '.join(wanted)}: save first, then use "
            "Transformers on the folder"
        )
    _check_state_dict(model, state_dict)
    plan = plan_export(model, model.config.model_type)
    max_shard_bytes = num_bytes_of(max_shard_size)
    with gathered(Path(save_directory), model) as whole:
        if whole is not None and is_main_process:
            with replacing(Path(save_directory)) as unfinished:
                write_files(plan, whole, unfinished, max_shard_bytes)


def _check_state_dict(model: Any, state_dict: dict[str, Any] | None) -> None:
    own = model.state_dict()
    for name, value in (state_dict or {}).items():
        if name not in own or own[name].data_ptr() != value.data_ptr():
            raise CheckpointError(
                f"state_dict= has {name!r}, which is not the model's own: load it into the model first"
            )
