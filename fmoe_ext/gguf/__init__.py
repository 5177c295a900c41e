"""Read and write GGUF, llama.cpp's file format, as Transformers models.

    file = open_gguf(path)                          the header, its sizes checked against the file's
    config = config_of(file)                        the Transformers configuration
    check(file, config)                             compares a given one with the file's keys
    gguf_layers(file)                               the experts of each layer as byte ranges
    outside_experts(file, config, shapes, dtype)    every other tensor, under Transformers' names

model_files.py reads with these; export() and `fmoe export` write with writing.py, and tokenizers with vocabulary.py.
An architecture of llama.cpp is a class in architectures/ (architecture_for() finds it by model type); architecture.py
says what one is.
"""

from fmoe_ext.gguf.file import open_gguf
from fmoe_ext.gguf.metadata import architecture_for, check, config_of
from fmoe_ext.gguf.reading import gguf_layers, outside_experts

__all__ = ["architecture_for", "check", "config_of", "gguf_layers", "open_gguf", "outside_experts"]
