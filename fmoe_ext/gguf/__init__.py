"""Read and write GGUF, the file of llama.cpp, as models of Transformers.

    file = open_gguf(path)                   the header; nothing in it is believed
    config = config_of(file)                 the Transformers configuration; check(file, config) compares any other
    gguf_layers(file)                        the experts of each layer as byte ranges
    outside_experts(file, config, shapes)    every other tensor, under Transformers' names

model_files.py reads by these; export() and `fmoe export` write by writing.py, with vocabulary.py for tokenizers.
An architecture of llama.cpp is a class in architectures/, and architecture.py says what one is.
"""

from fmoe_ext.gguf.file import open_gguf
from fmoe_ext.gguf.metadata import architecture_for, check, config_of
from fmoe_ext.gguf.reading import gguf_layers, outside_experts

__all__ = ["architecture_for", "check", "config_of", "gguf_layers", "open_gguf", "outside_experts"]
