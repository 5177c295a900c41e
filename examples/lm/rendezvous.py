"""Rendezvous of the ranks: a fresh part of the launcher's store, whenever they are started.

torchrun keeps its store over restarts, and ranks would find the addresses of the dead in it
(https://github.com/pytorch/pytorch/issues/135712). Its count of restarts differs between machines, so that it cannot
tell one start from another; the ranks agree on a name instead. job.py calls meet() on every rank.
"""

import time
import uuid

import torch.distributed as dist

PATIENCE = 1800.0  # seconds for all ranks to come


def meet() -> tuple[dist.Store, int, int]:
    """(store, rank, number of ranks) for init_process_group(), of the ranks that are alive now."""
    store, rank, size = next(dist.rendezvous("env://"))
    name = invite(store, size) if rank == 0 else join(store, rank)
    return dist.PrefixStore(name, store), rank, size


def invite(store: dist.Store, size: int) -> str:
    """The first rank names the meeting to each of the others that asks; those of earlier starts ask no more."""
    name = uuid.uuid4().hex
    absent, deadline = set(range(1, size)), time.monotonic() + PATIENCE
    while absent:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks {sorted(absent)} did not come within {PATIENCE:.0f} s")
        for rank in [rank for rank in absent if store.check([f"question/{rank}"])]:
            store.set(f"answer/{store.get(f'question/{rank}').decode()}", name)
        absent = {rank for rank in absent if not store.check([f"{name}/came/{rank}"])}
        time.sleep(0.01)
    return name


def join(store: dist.Store, rank: int) -> str:
    """Another rank asks with a number that nobody had before, and so gets no answer that was another's."""
    number = uuid.uuid4().hex
    store.set(f"question/{rank}", number)
    name = store.get(f"answer/{number}").decode()
    store.set(f"{name}/came/{rank}", "")
    return name
