"""fmoefy and what it knows about Megatron-LM, Transformers and plain PyTorch; optional packages are not imported here."""
