"""save_pretrained of a fmoefied Transformers model whose experts are spread over ranks."""

from pathlib import Path
from typing import Any

import torch

from fmoe_ext.checkpoint.saving import gathered
from fmoe_ext.checkpoint.shards import MAX_SHARD_BYTES, num_bytes_of, replacing, write_model_files


@torch.no_grad()
def save_from_all_ranks(
    model: Any, save_directory: str | Path, *, max_shard_size: int | str = MAX_SHARD_BYTES
) -> None:
    """save_pretrained() of a model whose experts are spread over ranks; all of them call it, the first one writes.

    from_pretrained() loads the folder in one process; on several, fmoefy a model there and
    fmoe_ext.checkpoint.load(folder, model), which reads each rank's experts.
    Raises CheckpointError on every rank.
    """
    folder = Path(save_directory)
    with gathered(folder, model) as whole:
        if whole is not None:
            with replacing(folder) as unfinished:
                write_model_files(unfinished, whole.tensors, num_bytes_of(max_shard_size))
                model.config.architectures = [type(model).__name__]
                model.config.save_pretrained(unfinished)
                if getattr(model, "generation_config", None) is not None:
                    model.generation_config.save_pretrained(unfinished)
