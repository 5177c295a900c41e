"""Collect the known Hugging Face MoE families: FAMILIES of every file in this folder.

A file has one kind of MoE layer and the model types that are variants of it; plain.py has those that need no code of
their own, and family.py says what a family is. REFUSED has types that are not read. docs/formats.md has the table.

huggingface.py recognises a layer of a state dict by the tables below: each holds the names that any known layout has.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from fmoe_ext.checkpoint.families.family import Family, Layout

_MODULES = tuple(
    importlib.import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
    if module.name != "family"
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in sorted(
            (family for module in _MODULES for family in module.FAMILIES), key=lambda family: family.name
        )
    }
)
# {model_type of the text configuration: why import_model() refuses it}, the end of "... is not imported, for ...".
# huggingface.use(model) runs their experts on our operators, and their own save_pretrained writes them
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "diffusion_gemma_text": "its encoder and its decoder share their experts",
        "dots3_note_text": "the tower for its images has experts too, by another router",
        "ernie4_5_vl_moe_text": "each layer has two gates and two sets of experts, for text and for images",
        "inkling_text": "its router weighs the shared experts together with the chosen ones",
        "longcat_flash": "some of its experts compute nothing",
        "muse_spark_text": "a norm follows each of its experts",
        "openai_privacy_filter": "its router divides the weights by top_k, and it labels tokens",
        "phimoe": "its router is SparseMixer, which masks the logits anew for each choice",
        "zaya": "its router is an MLP with a state that passes from layer to layer, and a choice of no expert",
    }
)
# Those of REFUSED whose experts are outside of Transformers' experts interface: use() warns, and they stay eager
NOT_USED = ("longcat_flash",)
# How files name and shape the tensors; "fused": the default of Layout, which most modules of Transformers have
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"fused": Layout(), **{name: family.files for name, family in FAMILIES.items()}}
)

# Every layout that is known, of files and of modules: a state dict does not say which it has
_KNOWN = tuple(chain.from_iterable((family.files, family.in_modules) for family in FAMILIES.values()))


def names_of(field: str) -> list[Any]:
    """Return all values of a field of Layout over the known layouts, sorted, without "" and None."""
    return sorted({getattr(layout, field) for layout in _KNOWN} - {"", None})


GATE_NAMES = tuple(names_of("gate"))  # of the router's module: "gate", "router.proj", ...
BLOCKS = tuple(names_of("block"))  # of the MoE layer in a decoder layer: "mlp", "ffn", ...
PER_EXPERT = tuple(names_of("per_expert"))  # (gate, up, down) of experts.<e>
# (gate and up, down) of all experts in two tensors
STACKED = tuple(sorted({layout.experts for layout in _KNOWN if layout.gated}))
# (up, down) of all experts, without a gate
UNGATED = tuple(sorted({layout.experts for layout in _KNOWN if not layout.gated}))
# Names of three weights before names of two: up and down of gated experts look like experts without a gate
SHARED_NAMES = tuple(sorted(names_of("shared_names"), key=lambda names: (-len(names), names)))
# {name of the gate: name that our layer gets}, for layouts that keep router and experts in the decoder layer itself
# (Gemma 4)
PLACES = MappingProxyType({layout.gate: layout.place for layout in _KNOWN if layout.place})


def formats_for(model_type: str) -> tuple[str, ...]:
    """Return the names of the families that models of a type can be exported as, once their MLPs are MoE layers.

    formats_for("llama") has "mixtral" and "qwen2_moe".
    """
    return tuple(name for name, family in FAMILIES.items() if model_type in family.holds)
