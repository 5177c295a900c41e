"""GGUF, the file of llama.cpp: its metadata and a model's configuration, its tensors and those of Transformers.

    file = open_gguf(path)                   the header, read with nothing taken on trust
    config = config_of(file)                 what Transformers computes; check(file, config) of any other configuration
    gguf_layers(file)                        the experts of each layer as byte ranges
    outside_experts(file, config, shapes)    every other tensor, under Transformers' names

An architecture of llama.cpp is a class in architectures/; architecture.py says what one is, metadata.py compares files,
writing.py writes them.
"""

from fmoe_ext.gguf.file import open_gguf
from fmoe_ext.gguf.metadata import architecture_for, check, config_of
from fmoe_ext.gguf.reading import gguf_layers, outside_experts

__all__ = ["architecture_for", "check", "config_of", "gguf_layers", "open_gguf", "outside_experts"]
