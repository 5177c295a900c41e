"""save_pretrained of models that import_model() made: the format that they came from."""

import os
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fmoe_ext.checkpoint import CheckpointError
from fmoe_ext.checkpoint.saving import gathered
from fmoe_ext.checkpoint.shards import new_folder
from fmoe_ext.integrations.formats.export import MAX_SHARD_BYTES, plan_export, write_files

UNITS = MappingProxyType(
    {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}
)


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

    state_dict: the model's own, as the Trainer passes it. is_main_process and safe_serialization as in Transformers;
    CheckpointError for its other arguments, which are not honoured.
    """
    wanted = {name: value for name, value in options.items() if value and name != "safe_serialization"}
    if wanted:
        raise CheckpointError(
            f"save_pretrained of an imported model takes no {', '.join(wanted)}: use fmoe_ext.export"
        )
    _check_state_dict(model, state_dict)
    folder = Path(save_directory)
    plan = plan_export(model, model.config.model_type)
    with gathered(folder, model) as whole:
        if whole is not None and is_main_process:
            with new_folder(folder.with_name(f".{folder.name}.new")) as unfinished:
                write_files(plan, whole, unfinished, _bytes(max_shard_size))
                folder.mkdir(exist_ok=True)
                _move(unfinished, folder)
            folder.with_name(f".{folder.name}.new").rmdir()


def _check_state_dict(model: Any, state_dict: dict[str, Any] | None) -> None:
    own = model.state_dict()
    for name, value in (state_dict or {}).items():
        if name not in own or own[name].data_ptr() != value.data_ptr():
            raise CheckpointError(
                f"state_dict= has {name!r}, which is not the model's own: load it into the model first"
            )


def _move(source: Path, folder: Path) -> None:
    """Files take the places of older ones; what an earlier save had more goes."""
    names = {file.name for file in source.iterdir()}
    for name in sorted(
        names, key=lambda name: (name.endswith(".json"), name)
    ):  # what names the others comes last
        os.replace(source / name, folder / name)
    for old in folder.glob("model*.safetensors*"):
        if old.name not in names and re.fullmatch(
            r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", old.name
        ):
            old.unlink()


def _bytes(size: int | str) -> int:
    """Bytes of "5GB" as Transformers has them."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?B?)", str(size).upper())
    if match is None or match[2] not in UNITS:
        raise CheckpointError(f"max_shard_size must be bytes, or a text as '5GB', but got {size!r}")
    return int(match[1]) * UNITS[match[2]]
