"""run_distributed itself: results by rank, and every way in which a rank can fail."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fmoe_ext import testing
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


def test_results_and_failures(monkeypatch):
    monkeypatch.setattr(testing, "GRACE", 0.5)
    before = set(multiprocessing.active_children())
    pool = DistributedPool(2)
    assert pool.run(rank_sum, 1) == [(0, 2, 3.0), (1, 2, 3.0)]
    with pytest.raises(DistributedError, match=r"rank 1: (?s:.*)this rank is unwell"):
        pool.run(misbehave, "raise", timeout=120)
    with pytest.raises(DistributedError, match="rank 1: the process ended with exit code -9"):
        pool.run(misbehave, "die", timeout=120)
    with pytest.raises(DistributedError, match="rank 1: did not finish in time"):
        pool.run(misbehave, "hang", timeout=3)
    assert run_distributed(rank_sum, 3, 0) == [(rank, 3, 3.0) for rank in range(3)]
    assert set(multiprocessing.active_children()) <= before


def test_run_that_is_interrupted_leaves_no_results_to_the_next(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with DistributedPool(2) as pool:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(testing, "_collect", interrupt)
            pool.run(rank_sum, 1)
        assert pool.run(rank_sum, 5) == [(0, 2, 11.0), (1, 2, 11.0)]


def test_pool_process_that_does_not_start_is_explained(monkeypatch):
    monkeypatch.setattr(testing, "_serve", os._exit)  # which ends at once, by a TypeError
    with pytest.raises(DistributedError, match=r'ended before it began.* under `if __name__ == "__main__":`'):
        run_distributed(rank_sum, 1, 0)


def environment_of(name):
    return os.environ.get(name), subprocess.check_output(["printenv", name], text=True).strip()


def test_ranks_have_the_environment_of_their_start(monkeypatch):
    """And not of the server that they are forked from."""
    for value in ("one", "two"):
        monkeypatch.setenv("FMOE_TEST_VALUE", value)
        assert run_distributed(environment_of, 2, "FMOE_TEST_VALUE") == [(value, value)] * 2


def policies():
    """Of this rank's threads, gloo's too."""
    dist.barrier()
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
def test_threads_of_ranks_do_not_preempt_each_other():
    """gloo's thread spun while the one that its message was for could not run: four times the processor time."""
    assert run_distributed(policies, 2) == [{os.SCHED_BATCH}] * 2


def keep_a_group_in_a_cycle():
    kept = [dist.new_group()]
    kept.append(kept)


def num_threads():
    return len(os.listdir("/proc/self/task"))


def test_threads_of_the_groups_of_a_run_end_with_it():
    """A thread of gloo wakes a hundred times a second, whether its group is used or not."""
    with DistributedPool(2) as pool:
        before = pool.run(num_threads)
        for _ in range(2):
            pool.run(keep_a_group_in_a_cycle)
        assert pool.run(num_threads) == before


def make_lock():
    """The file of a lock that lives as long as this process, as tqdm makes one."""
    make_lock.kept = multiprocessing.RLock()
    return Path("/dev/shm", "sem." + make_lock.kept._semlock.name.lstrip("/"))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="only Linux shows locks as files there")
def test_locks_of_ranks_end_with_them():
    """Python's resource tracker counted 19 leaked semaphores at the end of these tests."""
    with DistributedPool(2) as pool:
        files = pool.run(make_lock)
        assert all(map(os.path.exists, files))
    assert not any(map(os.path.exists, files))


def start_sleeper(manager):
    """The id of a process that outlives its parent if nobody ends it."""
    if manager:
        multiprocessing.current_process()._config["daemon"] = False  # as programs under torchrun are not
        context = multiprocessing.get_context("spawn")
        start_sleeper.kept = context.Manager()
        return start_sleeper.kept._process.pid
    return subprocess.Popen(["sleep", "600"]).pid


def fail(_):
    raise ValueError("failed")


def is_alive(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.parametrize("ending", ["close", "failure"])
def test_processes_of_processes_end(ending):
    pool = DistributedPool(1)
    pids = pool.run(start_sleeper, False) + pool.run(start_sleeper, True)
    assert all(map(is_alive, pids))
    if ending == "close":
        pool.close()
    else:
        with pytest.raises(DistributedError):
            pool.run(fail, 0)
    deadline = time.monotonic() + 120
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
