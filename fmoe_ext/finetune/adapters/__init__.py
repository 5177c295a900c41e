"""LoRA adapters of experts in every layout that tools write: fmoe adapter check, convert, merge (docs/adapters.md)."""
