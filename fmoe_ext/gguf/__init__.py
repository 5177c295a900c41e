"""GGUF, the file of llama.cpp: its metadata and a model's configuration, its tensors and those of Transformers.

An architecture of llama.cpp is a class in architectures/; architecture.py says what one is, metadata.py compares files.
"""

from fmoe_ext.gguf.metadata import architecture_for

__all__ = ["architecture_for"]
