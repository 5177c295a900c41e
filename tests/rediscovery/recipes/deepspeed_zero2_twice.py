"""ZeRO 2 around an encoder that runs twice in a step."""

from deepspeed_zero import Model, batch, dtype, engine, loss

__all__ = ["batch", "dtype", "loss", "model", "parallelize"]


def model():
    return Model(twice=True)


def parallelize(model, rank, world):
    return engine(model, world, stage=2)
