"""Remote experts: train through experts that other machines host."""
