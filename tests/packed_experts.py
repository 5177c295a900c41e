"""Packed experts at a module's path, by the names that the known families have in files."""

from __future__ import annotations

from fmoe_ext.checkpoint.expert_files import Layer
from fmoe_ext.checkpoint.expert_layers import InFiles, layer_of, mxfp4_layer, prefixes
from fmoe_ext.checkpoint.families import PER_EXPERT
from fmoe_ext.checkpoint.methods import kind_of
from fmoe_ext.checkpoint.model_folder import ModelFolder


def packed_layer(base: ModelFolder, path: str) -> tuple[Layer, set[str]] | None:
    """(the layer of packed experts, names of its tensors); None if the folder has none at the path.

    path: of an experts module. Raises CheckpointError for tensors that are missing or do not fit, and for settings of
    quantization_config that are not computed.
    """
    found = mxfp4_layer(base, path)
    if found is not None:
        return found
    kind = kind_of(base)
    if kind is None:
        return None
    for prefix in prefixes(path):
        for leaves in PER_EXPERT:
            stems = [leaf.removesuffix(".weight") for leaf in leaves]
            if kind.is_packed(base, f"{prefix}experts.0.{stems[0]}"):
                count = 0
                while kind.is_packed(base, f"{prefix}experts.{count}.{stems[0]}"):
                    count += 1
                weights = (
                    InFiles(
                        tuple(tuple(f"{prefix}experts.{e}.{s}.weight" for s in joined) for e in range(count))
                    )
                    for joined in (stems[:2], stems[2:])
                )
                return layer_of(base, kind, path, (next(weights), next(weights)))
    return None
