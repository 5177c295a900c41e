"""Same loss, gradients and optimizer steps in every layout as in one process."""

import functools

import pytest
import torch
import torch.distributed as dist

from fmoe_ext.gates import GATES, GShardGate, SwitchGate
from tests.distributed.layouts import D, E, assert_equal_training

LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 1), (4, 2, 2), (4, 1, 1)]
ROWS = {1: [7], 2: [5, 8], 4: [5, 8, 0, 3]}


@pytest.mark.parametrize(("world_size", "ep", "slice_"), LAYOUTS)
def test_layouts(pool, world_size, ep, slice_):
    """Uneven batches, a rank without tokens, odd numbers of rows in a slice; fused and separate experts."""
    pool.run(train_everything, ROWS[world_size // slice_], ep, slice_, world_size=world_size)


def train_everything(rows, ep, slice_):
    for experts in ("fused", "separate"):
        for overlap_degree in (1, 2):
            assert_equal_training(
                rows,
                ep=ep,
                slice_=slice_,
                options={"experts": experts},
                layout_options={"overlap_degree": overlap_degree},
            )
