"""Without a registry: a copy takes over when its owner's record expires, and what is lost is counted."""

import concurrent.futures
import dataclasses
import time
import types

import pytest
import torch

from fmoe_ext.remote import DeclaredExperts, Directory, DiscoveryError, Options, Server, StaticList, loop
from fmoe_ext.remote.dht import open_node
from fmoe_ext.remote.expert_classes import find_expert_class
from fmoe_ext.remote.server import declared, service
from fmoe_ext.remote.server.declared import WarmCopies
from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.state import read_state
from fmoe_ext.remote.wire import Message, WireError
from tests import ports
from tests.remote.conftest import LONG, PATIENT, wait_until, within

D, UID = 16, "expert.0"


def vanish(server):
    """As after SIGKILL: nothing is withdrawn, the record just is not renewed."""

    async def end():
        for task in (server.placement._renewing, server.placement._copying):
            if task is not None:
                task.cancel()
        await server._grpc.stop(None)

    loop.run(end(), 60)


@pytest.fixture(params=["static", "dht"])
def directories(ends, request):
    """The directories of owner, heir and client: one list, or three nodes."""
    if request.param == "static":
        return [StaticList()] * 3
    nodes = [ends(loop.run(open_node([], ports.endpoint()), 60))]
    peers = [f"127.0.0.1:{nodes[0].node.port}"]
    return nodes + [ends(loop.run(open_node(peers, listen), 60)) for listen in (ports.endpoint(), None)]


@pytest.fixture
def family(ends, directories):
    """(owner of an expert, server that keeps a copy, its WarmCopies, the expert from outside)"""
    options = {"hidden_dim": D, "ttl": 6.0}
    copies = WarmCopies(directories[1], [UID], period=0.5)
    placements = DeclaredExperts(directories[0]), DeclaredExperts(directories[1], copies)
    owner, heir = (
        ends(Server(Options(listen_on=ports.endpoint(), expert_uids=(uid,), **options), placement).start())
        for uid, placement in zip((UID, "expert.1"), placements, strict=True)
    )
    directory = ends(Directory(directories[2], dataclasses.replace(PATIENT, patience=LONG)))
    (expert,) = directory.get_experts([UID])
    return owner, heir, copies, expert


def step(expert, count=1):
    for _ in range(count):
        expert(torch.randn(3, D)).pow(2).sum().backward()


def version_of(copies):
    return int(copies._copies[UID][1].meta["version"]) if UID in copies._copies else None


def test_copy_takes_over_and_the_loss_is_counted(family):
    owner, heir, copies, expert = family
    step(expert, 3)
    wait_until(lambda: version_of(copies) == 3, "a copy")
    before = owner.host.digest(UID)
    copies._copies[UID] = (time.monotonic() + 1000, copies._copies[UID][1])  # looks, but copies no more
    step(expert, 2)
    wait_until(lambda: copies._seen[UID] == (5, 5), "a look")
    vanish(owner)
    wait_until(lambda: heir.metrics.count("takeovers_total") == 1, "a takeover")
    assert heir.host.digest(UID) == before
    assert heir.metrics.count("updates_lost_total") == heir.metrics.count("gradients_lost_total") == 2
    step(expert)
    assert heir.host.find(UID).version == 4


def test_bad_copy_is_not_served_and_ends_no_other_copies():
    """Half of a copy stayed, and was declared and served; a directory that failed as well ended all looks."""

    class Failing(StaticList):
        async def withdraw(self, uids, endpoint, *, timeout=5.0):
            raise DiscoveryError("too late")

    host = ExpertHost(find_expert_class("ffn"), D)
    host.add([UID])
    state = read_state(host, UID)
    host.remove(UID)

    def call(function):
        future = concurrent.futures.Future()
        try:
            future.set_result(function())
        except WireError as error:
            future.set_exception(error)
        return future

    server = types.SimpleNamespace(
        host=host, compute=types.SimpleNamespace(call=call), endpoint="a:1", options=Options(hidden_dim=D)
    )
    copies = WarmCopies(Failing(), [UID])
    tensors = dict(state.tensors)
    del tensors["weight/norm_bias"]
    copies._copies[UID] = 0.0, Message(tensors, state.meta)
    loop.run(copies._take_over(server, UID), 60)
    assert UID not in host.experts


def test_owner_that_is_stopped_loses_nothing(family):
    """It waits until the copy is complete, although none is due for a long time."""
    owner, heir, copies, expert = family
    wait_until(lambda: version_of(copies) == 0, "a copy")
    copies.period = 1000.0
    step(expert, 5)
    assert version_of(copies) == 0
    before = owner.host.digest(UID)
    owner.stop()
    wait_until(lambda: heir.metrics.count("takeovers_total") == 1, "a takeover")
    assert heir.host.digest(UID) == before
    assert heir.metrics.count("updates_lost_total") == 0
    step(expert)
    assert heir.host.find(UID).version == 6


def test_owner_that_is_stopped_stays_declared_until_a_rare_look(family, monkeypatch):
    """The copy is looked for more rarely than the record expires; meanwhile nobody takes over an old version."""
    owner, heir, copies, expert = family
    wait_until(lambda: version_of(copies) == 0, "a copy")
    monkeypatch.setattr(service, "LONGEST_LOOK", 8.0)
    often, copies.looks_every = copies.looks_every, 8.0
    known = owner.service.copies._copies[UID]
    wait_until(lambda: known.due > time.monotonic() + 2 * 8.0, "the last look before the rare one")
    copies.looks_every = often  # after the rare one
    step(expert, 5)
    before = owner.host.digest(UID)
    owner.stop()
    wait_until(lambda: heir.metrics.count("takeovers_total") == 1, "a takeover")
    assert heir.host.digest(UID) == before
    assert heir.metrics.count("updates_lost_total") == 0


def test_owner_whose_copies_died_does_not_wait_for_them(family, monkeypatch):
    owner, heir, copies, expert = family
    wait_until(lambda: version_of(copies) == 0, "a copy")
    step(expert)
    vanish(heir)
    monkeypatch.setattr(declared, "HAND_OVER_SECONDS", 1000.0)
    with within(60):  # twice the time between looks and LATE_LOOK are 4
        owner.stop()
