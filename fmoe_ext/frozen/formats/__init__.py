"""Formats of packed weights, a file each: its bits, check, decode, pack. docs/design.md says what a new one touches."""

from types import MappingProxyType

from fmoe_ext.frozen.formats.base import Format
from fmoe_ext.frozen.formats.fp8_block import FP8_BLOCKS
from fmoe_ext.frozen.formats.gguf import GGUF
from fmoe_ext.frozen.formats.int4 import INT4
from fmoe_ext.frozen.formats.mxfp4 import MXFP4
from fmoe_ext.frozen.formats.mxfp8 import MXFP8
from fmoe_ext.frozen.formats.nf4 import NF4
from fmoe_ext.frozen.formats.nvfp4 import NVFP4

FORMATS = MappingProxyType(
    {
        "mxfp4": MXFP4,
        "fp8_block": FP8_BLOCKS,
        "int4": INT4,
        **GGUF,
        "nf4": NF4,
        "mxfp8": MXFP8,
        "nvfp4": NVFP4,
    }
)

__all__ = ["FORMATS", "GGUF", "Format"]
