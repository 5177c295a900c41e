"""Transformers models whose experts stay in their files: stream() and the buffers that hold a part of them."""

from fmoe_ext.finetune.streaming.model import stream

__all__ = ["stream"]
