"""Succession: what this server does about an expert that nobody leads.

recovery.decide() says what that is, at each look anew. To lead is one transaction, which fails if another server
leads or the record has changed since it was read: of several servers that decide the same, one wins, and the others
see its record at their next look. It then confirms its log with all members before it takes gradients: `leader`.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from fmoe_ext.remote.etcd import keys
from fmoe_ext.remote.flags import DATE_FORMAT
from fmoe_ext.remote.replication import recovery
from fmoe_ext.remote.replication.follower import Loss, Replica, Role
from fmoe_ext.remote.replication.leader import Leader
from fmoe_ext.remote.replication.recovery import Action, Vacancy
from fmoe_ext.remote.replication.registry import Site
from fmoe_ext.remote.server.ledger import Term

log = logging.getLogger("fmoe_ext.remote")


class Succession:
    """Carries out what recovery.decide() says: offers a state, or begins a term.

    confirming: receives the tasks that confirm new terms. wake() is called when a term has ended.
    """

    def __init__(self, site: Site, confirming: "set[asyncio.Task[None]]", wake: Callable[[], None]):
        self._site, self._confirming, self._wake = site, confirming, wake

    async def void(self, replica: Replica, record: keys.Members | None, revision: int) -> None:
        """The registry went back: it may name members that are none. Nobody leads until all have offered."""
        if replica.leader is not None:
            replica.leader.end("the registry went back")
        ledger = replica.ledger
        new = recovery.voided(record, ledger.end, ledger.seen, replica.epoch)
        if await self._site.registry.void(replica.uid, new, revision):
            text = "%s: the registry went back; epoch %d begins with term %d"
            log.error(text, replica.uid, new.epoch, new.term)
            self._site.server.metrics.add("registry_returns_total")
            replica.epoch, replica.num_returns = new.epoch, self._site.registry.num_returns

    async def fill(self, replica: Replica, record: keys.Members | None, revision: int) -> None:
        """Nobody leads: this server does, or offers its state, or waits."""
        now, alive = self._site.now(), self._site.registry.view.servers().keys()
        offers = self._site.registry.view.offers(replica.uid)
        members = set() if record is None else record.endpoints.keys() - {self._site.name}
        if replica.vacant is None or replica.vacant[0] != revision:
            replica.vacant = revision, now
            replica.hopeless_since = now
        if any(name in alive and name not in offers for name in members):
            replica.hopeless_since = now
        if replica.role is Role.JOINING:
            return
        vacancy = Vacancy(
            server=self._site.name,
            end=replica.ledger.end,
            is_able=replica.is_able(),
            record=record,
            revision=revision,
            alive=alive,
            offers=offers,
            seconds=now - replica.vacant[1],
            hopeless_seconds=now - replica.hopeless_since,
            recovery_wait=self._site.options.recovery_wait,
            ttl=self._site.options.ttl,
            start=replica.ledger.start,
            requests=replica.ledger.num_requests,
            lacks=replica.ledger.lacks,
        )
        action = recovery.decide(vacancy)
        if action is Action.OFFER:
            await self._site.registry.offer(replica.uid, recovery.make_offer(vacancy.end, revision))
        elif action in (Action.LEAD, Action.RECOVER):
            await self._lead(replica, vacancy, action)

    async def _lead(self, replica: Replica, vacancy: Vacancy, action: Action) -> None:
        known = 0 if vacancy.record is None else vacancy.record.term
        term = Term(max(known, replica.ledger.seen.number) + 1, self._site.name)
        record = recovery.next_record(vacancy, action, term, self._site.server.endpoint)
        if action is Action.RECOVER:
            lost, gradients = recovery.count_lost(vacancy), recovery.count_lost_gradients(vacancy)
            noted = 0.0 if vacancy.record is None else vacancy.record.noted
            replica.loss = Loss(lost, gradients, recovery.count_lost_at_most(vacancy), noted)
        me, lease = keys.Leader(self._site.name, self._site.server.endpoint), self._site.registry.lease
        guard = await self._site.registry.lead(replica.uid, me, record, vacancy.revision)
        if not guard or lease != self._site.registry.lease or replica.role is Role.JOINING:
            return
        replica.vacant = None

        def ended() -> None:
            replica.become_idle(self._site.now())
            self._wake()

        leader = Leader(self._site, replica.uid, replica.ledger, term, guard, record, ended)
        replica.role, replica.leader = Role.LEADER, leader
        self._site.server.metrics.add("leads_won_total")
        if (loss := replica.loss) is not None and loss.most:
            replica.loss = None
            self._site.server.metrics.add("updates_lost_total", loss.updates)
            self._site.server.metrics.add("gradients_lost_total", loss.gradients)
            self._site.server.metrics.add("updates_lost_at_most_total", loss.most)
            when = f"after {time.strftime(DATE_FORMAT, time.localtime(loss.since))} " if loss.since else ""
            log.error(
                "%s: up to %d acknowledged updates %sare lost, because no replica has them; at least %d updates "
                "with %d gradients or more are",
                *(replica.uid, loss.most, when, loss.updates, loss.gradients),
            )
        replica.ledger.lacks = 0
        task = asyncio.create_task(leader.confirm())
        self._confirming.add(task)
        task.add_done_callback(self._confirming.discard)
