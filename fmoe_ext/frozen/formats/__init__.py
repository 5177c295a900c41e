"""Formats of packed weights, a class each: its bits, check, decode, pack. docs/design.md lists what one touches."""

from collections.abc import Mapping
from types import MappingProxyType

from fmoe_ext.frozen.formats.base import Format
from fmoe_ext.frozen.formats.fp8_block import Fp8Block
from fmoe_ext.frozen.formats.gguf import GGUF
from fmoe_ext.frozen.formats.int4 import Int4
from fmoe_ext.frozen.formats.microscaling import Mxfp4, Mxfp8, Nvfp4
from fmoe_ext.frozen.formats.nf4 import Nf4

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "mxfp4": Mxfp4(),
        "fp8_block": Fp8Block(),
        "int4": Int4(),
        **GGUF,
        "nf4": Nf4(),
        "mxfp8": Mxfp8(),
        "nvfp4": Nvfp4(),
    }
)

__all__ = ["FORMATS", "GGUF", "Format"]
