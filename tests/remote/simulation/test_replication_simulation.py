"""The replication code under simulated disaster: docs/replication.md's promises hold for every seed."""

import logging

import pytest
import torch

from tests.remote.simulation.checker import Failed
from tests.remote.simulation.mutants import MUTANTS
from tests.remote.simulation.world import World

CHUNK = 25  # seeds of one test


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_random_faults_lose_nothing_and_end(first):
    acknowledged = sum(len(World(seed).run().acknowledged) for seed in range(first, first + CHUNK))
    assert acknowledged > CHUNK  # the faults leave room for updates


@pytest.mark.slow
@pytest.mark.parametrize("first", range(300, 10_300, 500))
def test_ten_thousand_seeds_lose_nothing_and_end(first):
    for seed in range(first, first + 500):
        World(seed).run()


@pytest.mark.parametrize("seed", range(6))
def test_restored_registry_alone_loses_nothing(seed):
    World(seed, ["restore_etcd"]).run()


def test_seed_run_twice_gives_the_same_messages():
    runs = []
    for _ in range(2):
        world = World(11)
        history = world.run()
        runs.append((history.trace, history.acknowledged, world.network.num_messages, world.loop.time()))
    assert runs[0] == runs[1]
    assert len(runs[0][1]) > 10


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_fault_put_back_is_found(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(2000):
        try:
            World(seed, MUTANTS[mutant]).run()
        except Failed:
            return
    pytest.fail("not found in 2000 seeds")
