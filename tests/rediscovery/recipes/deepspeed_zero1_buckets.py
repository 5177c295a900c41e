"""ZeRO 1 that reduces buckets of gradients which are not contiguous."""

from deepspeed_zero import Model, batch, dtype, engine, loss

__all__ = ["batch", "dtype", "loss", "model", "parallelize"]
model = Model


def parallelize(model, rank, world):
    return engine(model, world, stage=1, contiguous_gradients=False, reduce_scatter=False)
