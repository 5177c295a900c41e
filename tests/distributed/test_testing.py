"""run_distributed itself: results by rank, and every way in which a rank can fail."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from fmoe_ext.testing import DistributedError, DistributedPool, run_distributed


def rank_sum(value):
    total = torch.tensor(float(dist.get_rank() + value))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def misbehave(how):
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("this rank is unwell")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def test_results_and_failures():
    before = set(multiprocessing.active_children())
    pool = DistributedPool(2)
    assert pool.run(rank_sum, 1) == [(0, 2, 3.0), (1, 2, 3.0)]
    with pytest.raises(DistributedError, match=r"rank 1: (?s:.*)this rank is unwell"):
        pool.run(misbehave, "raise", timeout=20)
    with pytest.raises(DistributedError, match="rank 1: the process ended with exit code -9"):
        pool.run(misbehave, "die", timeout=20)
    with pytest.raises(DistributedError, match="rank 1: did not finish in time"):
        pool.run(misbehave, "hang", timeout=5)
    assert run_distributed(rank_sum, 3, 0) == [(rank, 3, 3.0) for rank in range(3)]
    assert set(multiprocessing.active_children()) <= before
