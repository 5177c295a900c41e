"""fmoefy and what it knows about Megatron-LM, Transformers and plain PyTorch; importing it needs none of them."""
