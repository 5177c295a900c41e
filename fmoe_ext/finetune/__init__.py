"""Fine-tune models whose experts do not fit: stream() keeps experts in their files, adapters/ reads and writes LoRA."""
