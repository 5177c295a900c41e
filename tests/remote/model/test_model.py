"""The protocol of docs/replication.md holds its promises in every reachable state; each fault put back breaks one."""

import pytest

from tests.remote.model.protocol import FAULTS, Budget, Protocol, Violation, first_state
from tests.remote.model.search import search

SMALL = {
    "one crash": (Budget(updates=2, crashes=1), 3, True),
    "one lease": (Budget(updates=2, expiries=1), 2, True),
    "lost calls and answers": (Budget(updates=2, losses=1, answers=1), 3, True),
    "two stops": (Budget(updates=1, stops=2), 2, True),
    "from nothing, one stop": (Budget(updates=1, stops=1), 1, False),
    "a damaged checkpoint": (Budget(updates=1, crashes=1, damages=1), 1, True),
    "a restored backup": (Budget(updates=1, restores=1), 3, True),
    "a member takes a copy": (Budget(updates=2, joins=1, losses=1), 2, True),
}
LARGE = {
    "two crashes": (Budget(updates=2, crashes=2), 3, True),
    "crash and lease": (Budget(updates=1, crashes=1, expiries=1), 3, True),
    "crash, lease and stop": (Budget(updates=1, crashes=1, expiries=1, stops=1), 2, True),
    "three updates": (Budget(updates=3, crashes=1), 3, True),
    "lease, lost calls and answers": (Budget(updates=2, expiries=1, losses=1, answers=1), 2, True),
    "two crashes and a damaged checkpoint": (Budget(updates=1, crashes=2, damages=1), 2, True),
    "restore and lease": (Budget(updates=1, restores=1, expiries=1), 2, True),
    "restore and crash": (Budget(updates=1, restores=1, crashes=1), 2, True),
    "copies and a crash": (Budget(updates=1, joins=2, crashes=1), 3, True),
    "copy, lease and lost calls": (Budget(updates=1, joins=1, expiries=1, losses=1), 2, True),
}
MUTANTS = {
    "order by version": (Budget(updates=2, expiries=1, stops=1), 2, True),
    "wait of an earlier vacancy": (Budget(updates=1, stops=1), 1, False),
    "answer before confirming": (Budget(updates=1, crashes=2), 3, True),
    "step without log": (Budget(updates=1, expiries=1), 3, True),
    "idle members never lead": (Budget(updates=1, expiries=1), 3, True),
    "term falls back with the registry": (Budget(updates=0, restores=1), 2, True),
    "silent sender": (Budget(updates=1, losses=1), 3, True),
    "accept a damaged checkpoint": (Budget(updates=2, crashes=1, damages=1), 1, True),
    "update that followers refuse": (Budget(updates=1), 3, True),
    "count what waits for a copy": (Budget(updates=1, joins=1), 2, True),
}


def run(budget, replicas, formed, broken=None):
    return search(Protocol(broken, replicas), first_state(budget, replicas, formed))


@pytest.mark.parametrize("name", SMALL)
def test_protocol_with_few_faults_keeps_every_invariant(name):
    assert run(*SMALL[name]) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_protocol_with_more_faults_keeps_every_invariant(name):
    assert run(*LARGE[name]) > 1000


@pytest.mark.parametrize("broken", FAULTS)
def test_model_with_a_fault_put_back_is_found_wrong(broken):
    with pytest.raises(Violation):
        run(*MUTANTS[broken], broken)
