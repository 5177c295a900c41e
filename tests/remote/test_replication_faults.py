"""Eight ways in which replicated experts lost updates or stood still, each by the part that mends it."""

import asyncio
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from fmoe_ext.remote import Training
from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.expert_classes import find_expert_class
from fmoe_ext.remote.replication import follower, recovery
from fmoe_ext.remote.replication.follower import Replica
from fmoe_ext.remote.replication.messages import (
    Append,
    Reply,
    Sender,
    append_message,
    read_append,
    reply_message,
)
from fmoe_ext.remote.replication.recovery import Action, Vacancy, decide
from fmoe_ext.remote.server.fair_queue import ByteBudget, Job
from fmoe_ext.remote.server.host import ExpertHost
from fmoe_ext.remote.server.ledger import End, Ledger, NotLeader, Request, Term, Update
from fmoe_ext.remote.server.state import end_of_weights
from fmoe_ext.remote.wire import STATE, decode, encode

OLD, NEW = Term(3, "a"), Term(4, "b")
NOTHING = End()


def vacancy(server="a", end=NOTHING, record=None, offers=(), alive=("a", "b"), seconds=0.0, is_able=True):
    offered = {name: keys.Offer.of(of, 7) for name, of in dict(offers).items()}
    return Vacancy(server, end, is_able, record, 7, alive, offered, seconds, seconds, 30.0, 2.0)


def record(end=NOTHING, members=(), **fields):
    endpoints = {name: f"{name}:1" for name in members}
    return keys.Members(endpoints, end.version, "", 4, end.term.number, end.term.leader, **fields)


def test_longer_log_of_an_older_term_does_not_lead():
    """A leader made 5 updates that nobody confirmed, the next one acknowledged 2: the 5 counted for more."""
    ends = {"a": End(OLD, 5), "b": End(NEW, 2)}
    known = record(ends["b"])
    assert decide(vacancy("b", ends["b"], known, ends, seconds=1.1)) is Action.RECOVER
    assert decide(vacancy("a", ends["a"], known, ends, seconds=100.0)) is Action.WAIT
    alone = vacancy("a", ends["a"], known, {"a": ends["a"]}, ("a",), seconds=1.1)
    assert decide(alone) is Action.WAIT
    assert recovery.count_lost(alone) >= 1


def test_lost_updates_are_at_most_those_that_were_reserved():
    """Both replicas were killed: what was acknowledged after the last note was lost without a line."""
    known = record(End(OLD, 20), starts={"3": 0}, reserved=84, noted=1.0)
    for end, most in ((End(OLD, 20), 64), (End(OLD, 15), 69), (End(OLD, 30), 54), (End(OLD, 84), 0)):
        assert recovery.count_lost_at_most(vacancy("a", end, known)) == most
    later = record(End(NEW, 35), starts={"3": 0, "4": 15}, reserved=40)
    assert recovery.count_lost_at_most(vacancy("a", End(OLD, 30), later)) == 25
    of_an_earlier_release = record(End(OLD, 20), starts={"3": 0})
    assert recovery.count_lost_at_most(vacancy("a", End(OLD, 15), of_an_earlier_release)) == 5
    led = recovery.next_record(vacancy("a", End(OLD, 15), known), Action.RECOVER, NEW, "a:1")
    assert led.reserved == 15, "it has acknowledged nothing yet"


def test_lost_updates_are_counted_from_the_start_of_the_next_term():
    """Updates 21 to 30 of term 3 were never acknowledged; term 4 began at 20 and reached 35."""
    known = record(End(NEW, 35), starts={"3": 0, "4": 20})
    assert recovery.count_lost(vacancy("a", End(OLD, 30), known)) == 15
    assert recovery.count_lost(vacancy("a", End(OLD, 12), known)) == 23
    assert recovery.count_lost(vacancy("a", End(NEW, 34), known)) == 1
    after = recovery.next_record(vacancy("a", End(OLD, 30), known), Action.RECOVER, Term(5, "a"), "a:1")
    assert dict(after.starts) == {"3": 0}
    assert keys.load(keys.Members, keys.dump(after)) == after


@pytest.mark.parametrize(
    "value",
    [
        b"", b"\xff", b"3", b"[]", b"{}", b'{"endpoints": 3}', b'{"endpoints": {"a": 3}}', b'{"version": "3"}',
        b'{"version": 3}', b'{"version": true}', b'{"starts": {"x": 3}}', b'{"starts": {"1": "3"}}', b'{"noted": 1}',
    ],
)  # fmt: skip
def test_record_of_etcd_that_cannot_be_read_counts_as_none(value):
    assert keys.load(keys.Members, value) is None


def test_record_of_another_release_keeps_what_is_known():
    value = b'{"endpoints": {"a": "a:1"}, "version": 3, "of_a_later_release": 1}'
    assert keys.load(keys.Members, value) == keys.Members({"a": "a:1"}, 3)
    assert keys.load(keys.Leader, b'{"server": "a"}') is None  # without an endpoint it is no leader


def test_term_that_was_never_noted_has_its_start_in_the_next_record():
    ledger = Ledger(is_replicated=True)
    for term in (OLD, NEW, NEW):
        ledger.lead(term)
        ledger.append("e.0", ())
    assert (ledger.end, ledger.start) == (End(NEW, 3), 1)
    seen = dataclasses.replace(vacancy("b", ledger.end, record(End(OLD, 1), ["b"])), start=ledger.start)
    after = recovery.next_record(seen, Action.LEAD, Term(5, "b"), "b:1")
    assert dict(after.starts) == {"4": 1}
    assert recovery.count_lost(vacancy("a", End(OLD, 9), after)) == 2


def test_record_keeps_the_starts_of_the_last_terms():
    starts = {}
    for term in range(1, 101):
        starts = recovery.with_start(starts, term, 10 * term)
    assert starts == {str(term): 10 * term for term in range(69, 101)}


def test_server_without_the_last_state_waits_in_each_vacancy():
    known, offers = record(End(NEW, 40)), {"a": End()}
    assert decide(vacancy("a", End(), known, offers, ("a",), seconds=29.0)) is Action.WAIT
    assert decide(vacancy("a", End(), known, offers, ("a",), seconds=30.0)) is Action.RECOVER


def test_member_leads_whatever_its_role_and_others_wait_for_it():
    known = record(End(NEW, 40), ["a"])
    assert decide(vacancy("a", End(NEW, 40), known)) is Action.LEAD
    others = {"b": End()}
    assert decide(vacancy("b", End(), known, others, seconds=100.0)) is Action.WAIT
    assert decide(vacancy("a", End(NEW, 40), known, is_able=False)) is Action.OFFER


def test_offer_that_died_with_its_lease_is_made_again():
    assert decide(vacancy("a", End(NEW, 1), record(End(NEW, 1)), {}, seconds=50.0)) is Action.OFFER


def test_leader_that_has_not_confirmed_makes_no_step_and_commits_nothing():
    ledger = Ledger(is_replicated=True)
    ledger.lead(NEW)
    with pytest.raises(NotLeader):
        ledger.check_open("expert.0")
    ledger.open(NEW)
    ledger.check_open("expert.0")


def job(results, seed=1):
    x = torch.full((2, 16), float(seed))
    return Job("expert.0", (x,), results.append, x, f"{seed:032x}")


def test_step_that_the_log_refuses_is_not_made_nor_remembered():
    """Five updates were acknowledged without the log: the host had made the step when the log refused it."""
    host = ExpertHost(find_expert_class("nop"), 16, Training("none"))
    host.is_replicated = True
    host.add(["expert.0"])
    ledger, results = host.find("expert.0").ledger, []
    host.run([job(results)])
    assert isinstance(results[0], NotLeader)
    assert (ledger.version, ledger.end, len(ledger.applied)) == (0, End(), 0)
    ledger.lead(NEW)
    ledger.open(NEW)
    host.run([job(results)])
    assert ledger.version == ledger.end.version == 1


def test_repeated_request_is_answered_when_its_version_is_committed():
    host = ExpertHost(find_expert_class("nop"), 16, Training("none"))
    host.is_replicated = True
    host.add(["expert.0"])
    host.find("expert.0").ledger.lead(NEW)
    host.find("expert.0").ledger.open(NEW)
    waiting, results = [], []
    host.when_committed = lambda uid, version, finish, fail: waiting.append((version, finish))
    host.run([job(results)])
    host.run([job(results)])
    assert [version for version, _ in waiting] == [1, 1] and not results
    for _, finish in waiting:
        finish()
    assert [answer.version for answer in results] == [1, 1]


def test_term_above_that_of_the_registry_voids_the_record():
    site = SimpleNamespace(registry=SimpleNamespace(num_returns=0))
    replica = Replica(site, "expert.0", Ledger(is_replicated=True))
    replica.ledger.see(Term(310, "b"))
    restored = record(members=["a"])
    assert replica.needs_void(restored, 0)
    new = recovery.voided(restored, End(NEW, 3), replica.ledger.seen, 0)
    assert (new.term, new.epoch, new.endpoints, new.voided) == (311, 1, {}, True)
    assert not replica.needs_void(new, 0)
    patient = vacancy("a", End(NEW, 3), new, {"a": End(NEW, 3)}, ("a",), seconds=1.5)
    assert decide(patient) is Action.WAIT  # a leader of before may have its lease still


@pytest.mark.parametrize("error", [OverflowError("too large"), ValueError("strange")])
def test_any_error_of_a_sender_is_the_failure_of_its_member(error):
    async def call(*_):
        raise error

    async def send():
        sender = Sender(SimpleNamespace(call=call), "b", "b:1", 1.0)
        replies = sender.put(Append("expert.0", NEW, 0, End())), sender.put(Append("expert.0", NEW, 0, End()))
        found = await asyncio.wait_for(asyncio.gather(*replies), 5)
        return found, sender.is_dead, sender.failure

    found, is_dead, failure = asyncio.run(send())
    assert found == [None, None] and is_dead and str(error) in failure


def test_update_of_2048_requests_is_one_that_followers_accept():
    requests = tuple(
        Request(f"{n + 1:032x}", (torch.full((1, 4), float(n)),), torch.full((1, 4), -float(n)))
        for n in range(2048)
    )
    update = Update("expert.0", End(OLD, 8), End(NEW, 9), requests, "ff")
    append = Append("expert.0", NEW, 8, update.end, update)
    found = read_append(decode(encode(append_message(append)), STATE))
    assert (found.term, found.committed, found.end, found.update.previous) == (
        NEW,
        8,
        End(NEW, 9),
        End(OLD, 8),
    )
    assert [r.request_id for r in found.update.requests] == [r.request_id for r in requests]
    assert all(
        torch.equal(a.grad, b.grad) and torch.equal(a.inputs[0], b.inputs[0])
        for a, b in zip(found.update.requests, requests, strict=True)
    )


def test_tail_brings_a_shorter_log_up_and_no_other_one():
    ledger = Ledger(is_replicated=True)
    ledger.lead(OLD)
    ledger.open(OLD)
    for _ in range(3):
        ledger.append("expert.0", ())
    ledger.commit(1)
    assert [update.end.version for update in ledger.tail_after(End(OLD, 1))] == [2, 3]
    assert ledger.tail_after(End(OLD, 3)) == []
    assert ledger.tail_after(End(NEW, 2)) is None
    assert Reply(True, ledger.end, OLD).end == End(OLD, 3)


@pytest.mark.parametrize("ends", ["the server stops", "the leader is gone", "both"])
def test_end_of_a_copy_under_way(ends, monkeypatch, caplog):
    """A server that stopped took it for the end of the call for a copy: it warned, and its task went on."""
    monkeypatch.setattr(follower, "AGAIN_SECONDS", 0.0)
    calls = []

    async def run():
        async def download(*_):
            calls.append("began")
            try:
                await asyncio.Event().wait()
            finally:
                calls.append("ended")

        replica = joining_replica(download)
        joining = asyncio.create_task(replica._join(SimpleNamespace(endpoint="b:1")))
        while not calls:
            await asyncio.sleep(0)
        reply = replica.receive(early_update(1))
        assert (reply.is_accepted, reply.is_early, reply.end) == (True, True, End())
        assert replica.site.early.num_bytes == 64
        if ends != "the server stops":
            replica.stop_copying("b:1 leads no longer")
        if ends != "the leader is gone":
            joining.cancel()
        await asyncio.wait((joining,))
        await asyncio.sleep(0)
        return joining.cancelled(), replica.role, replica._early, replica.site.early.num_bytes

    goes_on = ends == "the leader is gone"
    assert asyncio.run(run()) == (not goes_on, follower.Role.IDLE, [], 0)
    assert calls == ["began", "ended"]
    warned = ["expert.0 could not be copied: NotLeader('b:1 leads no longer')"] if goes_on else []
    assert [record.getMessage() for record in caplog.records] == warned


def joining_replica(download, limit=1 << 20):
    site = SimpleNamespace(
        **{"name": "a", "now": lambda: 0.0, "registry": SimpleNamespace(num_returns=0)},
        **{"server": SimpleNamespace(endpoint="a:1"), "peers": SimpleNamespace(download=download)},
        early=ByteBudget(limit),
    )
    return Replica(site, "expert.0", Ledger(is_replicated=True))


def early_update(version):
    """64 bytes of a gradient and its input."""
    request = Request("", (torch.ones(2, 4),), torch.ones(2, 4))
    end = End(NEW, version)
    return Append("expert.0", NEW, 0, end, Update("expert.0", End(NEW, version - 1), end, (request,)))


def test_copy_is_given_up_when_the_updates_before_it_fill_their_memory(monkeypatch, caplog):
    """All updates of a minute were kept, however many bytes they had."""
    monkeypatch.setattr(follower, "AGAIN_SECONDS", 0.0)

    async def run():
        replica = joining_replica(lambda *_: asyncio.Event().wait(), limit=300)
        joining = asyncio.create_task(replica._join(SimpleNamespace(endpoint="b:1")))
        while replica._copying is None:
            await asyncio.sleep(0)
        replies = [replica.receive(early_update(version)) for version in (1, 2, 3)]
        most = replica.site.early.num_bytes
        await asyncio.wait_for(joining, 5)
        return replies, most, replica.role, replica.site.early.num_bytes

    replies, most, role, after = asyncio.run(run())
    assert [reply.is_accepted for reply in replies] == [True, True, False]
    assert (most, role, after) == (128, follower.Role.IDLE, 0)
    why = "no room for an update of 64 bytes that came before its copy"
    assert why in replies[-1].reason and why in caplog.text


def test_answer_that_an_update_waits_for_a_copy_arrives():
    reply = Reply(True, End(OLD, 8), NEW, is_early=True)

    async def call(*_):
        return decode(encode(reply_message(reply)), STATE)

    async def send():
        return await Sender(SimpleNamespace(call=call), "b", "b:1", 1.0).put(early_update(9))

    assert asyncio.run(send()) == reply


def test_broken_weights_that_lead_have_the_log_up_to_them():
    """A broken server led and refused every gradient; its log named updates that its weights lack."""
    ledger = Ledger(is_replicated=True)
    ends = [End(), *(End(OLD, n) for n in range(1, 5))]
    updates = [Update("expert.0", *pair, ()) for pair in itertools.pairwise(ends)]
    for update in updates:
        ledger.receive(update, committed=2)
    for update in updates[:3]:
        ledger.note_applied(update)
    ledger.broken = "out of memory"
    assert (ledger.end, end_of_weights(ledger)) == (End(OLD, 4), End(OLD, 3))
    assert ledger.trust() == "out of memory"
    assert (ledger.end, ledger.broken) == (End(OLD, 3), "")
    ledger.lead(NEW)
    ledger.open(NEW)
    assert ledger.append("expert.0", ()).previous == End(OLD, 3)


def test_broken_server_waits_for_a_sound_one_before_it_leads():
    known, ends = record(End(NEW, 40), ["a"]), {"a": End(NEW, 40)}
    assert decide(vacancy("a", End(NEW, 40), known, ends, seconds=29.0, is_able=False)) is Action.WAIT
    assert decide(vacancy("a", End(NEW, 40), known, ends, seconds=30.0, is_able=False)) is Action.RECOVER
