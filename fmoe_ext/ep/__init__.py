"""Expert parallelism: the exchange, its overlap with computation, shadowing and placement of experts."""
