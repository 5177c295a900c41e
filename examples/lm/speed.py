"""Measure the machine for trainer.py: FLOP/s of a product, of which a run's speed is a share (mfu), and memory."""

import resource
import sys
import time

import torch
from job import Job


def measure_peak(job: Job, dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product, all ranks at once: what the run's share of the machine can do."""
    size = 4096 if job.device.type == "cuda" else 768
    a = torch.randn(size, size, device=job.device).to(dtype)
    best = float("inf")
    for _ in range(4):
        job.max(torch.zeros(1))  # all ranks begin together
        started = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return job.sum(torch.tensor(2 * size**3 / best, dtype=torch.float64)).item()


def peak_memory(job: Job) -> float:
    """GiB that the process (CPU), or its tensors on the GPU, took at most; of the rank that took most."""
    if job.device.type == "cuda":
        num_bytes = torch.cuda.max_memory_allocated(job.device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        num_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return job.max(torch.tensor(num_bytes / 2**30, dtype=torch.float64)).item()
