"""The replication code under simulated disaster: docs/replication.md's promises hold for every seed."""

import asyncio
import inspect
import logging

import pytest
import torch

from tests.remote.simulation.checker import Failed, Held, History, check
from tests.remote.simulation.mutants import MUTANTS
from tests.remote.simulation.server import UIDS
from tests.remote.simulation.virtual import Process, VirtualLoop
from tests.remote.simulation.world import World

CHUNK = 25  # seeds of one test
MUTANT_SEEDS = 500


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(CHUNK, 100, CHUNK))],
)
def test_random_faults_lose_nothing_and_end(first):
    worlds = [World(seed) for seed in range(first, first + CHUNK)]
    acknowledged = sum(len(world.run().acknowledged) for world in worlds)
    assert acknowledged > CHUNK  # the faults leave room for updates
    assert 0 <= sum(world.num_lost for world in worlds) < acknowledged / 2


def test_all_members_killed_lose_a_known_number_of_updates():
    world = World(2)  # one replica, which dies with its disk
    history = world.run()
    kept = set(world.servers[0].placement.replicas[UIDS[0]].ledger.applied)
    assert world.num_lost == len(history.acknowledged.keys() - kept) == 8
    assert len(history.acknowledged) == 27


@pytest.mark.parametrize("seed", [22, 4], ids=["branch of an older term", "two recoveries"])
def test_recovery_reports_all_losses_that_the_record_knew(seed):
    world = World(seed)
    world.run()
    assert world.num_lost and world.losses.recoveries


HELD = Held({"a": 1, "b": 2}, 2, 2, "")
MADE = dict.fromkeys("abcd", 0.0)


def test_check_counts_the_lost_updates():
    history = History(MADE, {"a": 1, "c": 3, "d": 4}, lost={"b", "c", "d"})
    assert check(history, [HELD, HELD]) == 2  # b was in flight, and came again


@pytest.mark.parametrize(
    ("acknowledged", "lost"),
    [({"a": 1, "c": 3}, ()), ({"a": 1, "c": 3, "d": 4}, "c"), ({"a": 2}, ())],
    ids=["lost without a death", "one more than the dead had", "another version"],
)
def test_check_refuses_losses_beyond_the_allowed_ones(acknowledged, lost):
    with pytest.raises(Failed):
        check(History(MADE, acknowledged, lost=set(lost)), [HELD])


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 10_100, 500))
def test_ten_thousand_seeds_lose_nothing_and_end(first):
    for seed in range(first, first + 500):
        World(seed).run()


@pytest.mark.parametrize("seed", range(6))
def test_restored_registry_alone_loses_nothing(seed):
    World(seed, ["restore_etcd"]).run()


@pytest.mark.parametrize("seed", range(10))
def test_member_that_takes_a_copy_loses_nothing(seed):
    World(seed, ["distrust", "kill"]).run()


def test_seed_run_twice_gives_the_same_messages():
    runs = []
    for _ in range(2):
        world = World(11)
        history = world.run()
        runs.append((history.trace, history.acknowledged, world.network.num_messages, world.loop.time()))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) > 10


def test_task_of_a_killed_process_that_never_began_is_closed():
    loop = VirtualLoop()
    process, coroutine = Process("server", loop), asyncio.sleep(1.0)

    async def start_and_kill():
        process.spawn(coroutine)
        process.kill()

    loop.run_until_complete(start_and_kill())
    loop.drain()
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_fault_put_back_is_found(mutant, monkeypatch):
    """By the seed that found it when it was written down, or by another one."""
    mutant(monkeypatch)
    faults, first = MUTANTS[mutant]
    for seed in (*range(first, MUTANT_SEEDS), *range(first)):
        try:
            World(seed, faults).run()
        except Failed:
            return
    pytest.fail(f"not found in {MUTANT_SEEDS} seeds")
