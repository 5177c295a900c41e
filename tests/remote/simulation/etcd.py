"""A model of etcd: revisions, transactions, leases, watches, backups; and one client of it through a bad network."""

import asyncio
from collections import deque

from aetcd import rpc

from fmoe_ext.remote.discovery import DiscoveryError
from fmoe_ext.remote.etcd.client import Answer, Entry, Event


class Etcd:
    """The cluster. lease_rate: how fast its clock runs, against that of the servers."""

    def __init__(self, loop, lease_rate=1.0):
        self.loop, self.lease_rate = loop, lease_rate
        self.revision, self.cluster = 1, 7
        self.entries = {}  # key: (value, create revision, mod revision, lease)
        self.leases = {}  # number: (ttl, ends)
        self.events = deque(maxlen=5000)
        self.watchers = {}  # in the order in which they came
        self.is_paused = False
        self.on_expiry = lambda: None
        self.before_puts = lambda puts: None  # [(key, value)] of a transaction that will be done
        self._next_lease = 100

    def transact(self, compare, success, failure):
        self.expire()
        succeeded = all(self._holds(one) for one in compare)
        operations = success if succeeded else failure
        changes = any(not one.HasField("request_range") for one in operations)
        revision = self.revision + 1 if changes else self.revision
        ranges, events = [], []
        puts = [one.request_put for one in operations if one.HasField("request_put")]
        if puts:
            self.before_puts([(put.key.decode(), put.value) for put in puts])
        for operation in operations:
            if operation.HasField("request_range"):
                ranges.append(self._range(operation.request_range))
            elif operation.HasField("request_put"):
                put = operation.request_put
                key, lease = put.key.decode(), put.lease
                if lease and lease not in self.leases:
                    raise DiscoveryError("etcdserver: requested lease not found")
                created = self.entries[key][1] if key in self.entries else revision
                self.entries[key] = (put.value, created, revision, lease)
                events.append(Event(self._entry(key), False))
            else:
                key = operation.request_delete_range.key.decode()
                if self.entries.pop(key, None) is not None:
                    events.append(Event(Entry(key, b"", 0, revision), True))
        if events:
            self.revision = revision
            self._publish(events)
        return Answer(succeeded, self.revision, ranges, self.cluster)

    def _holds(self, compare):
        value = self.entries.get(compare.key.decode(), (b"", 0, 0, 0))
        if compare.target == rpc.Compare.CREATE:
            return value[1] == compare.create_revision
        if compare.target == rpc.Compare.MOD:
            return value[2] == compare.mod_revision
        return value[0] == compare.value

    def _range(self, request):
        first, end = request.key.decode(), request.range_end.decode()
        keys = [k for k in sorted(self.entries) if (first <= k < end if end else k == first)]
        return [self._entry(key) for key in keys]

    def _entry(self, key):
        value, created, changed, _ = self.entries[key]
        return Entry(key, value, created, changed)

    def _publish(self, events):
        self.events.extend((event.entry.mod_revision, event) for event in events)
        for watcher in list(self.watchers):
            watcher(events)

    def grant(self, ttl):
        self._next_lease += 1
        self.leases[self._next_lease] = (ttl, self.loop.time() + ttl / self.lease_rate)
        return self._next_lease

    def keep_alive(self, lease):
        self.expire()
        if lease not in self.leases:
            return False
        ttl, _ = self.leases[lease]
        self.leases[lease] = (ttl, self.loop.time() + ttl / self.lease_rate)
        return True

    def revoke(self, lease):
        self.leases.pop(lease, None)
        self._delete_orphans()

    def expire(self):
        """Ends the leases whose time is over; nothing expires while etcd is paused."""
        now = self.loop.time()
        for lease, (_, ends) in list(self.leases.items()):
            if ends <= now:
                del self.leases[lease]
        self._delete_orphans()

    def _delete_orphans(self):
        gone = [k for k, (_, _, _, lease) in self.entries.items() if lease and lease not in self.leases]
        if gone:
            self.revision += 1
            for key in gone:
                del self.entries[key]
            self._publish([Event(Entry(key, b"", 0, self.revision), True) for key in gone])
            self.on_expiry()

    def backup(self):
        return self.revision, dict(self.entries), dict(self.leases)

    def restore(self, backup):
        """Everything since the backup is forgotten, and every stream ends; leases begin anew."""
        self.revision, entries, leases = backup
        self.entries, now = dict(entries), self.loop.time()
        self.leases = {n: (ttl, now + ttl / self.lease_rate) for n, (ttl, _) in leases.items()}
        self.events.clear()
        watchers, self.watchers = list(self.watchers), {}
        for watcher in watchers:
            watcher(None)
        self._delete_orphans()


class StoreClient:
    """Stands for the EtcdClient of a server."""

    def __init__(self, etcd, network, process):
        self.etcd, self.network, self.process = etcd, network, process

    async def _ask(self, work, timeout):
        try:
            return await asyncio.wait_for(self.network.to_etcd(self.process, self.etcd, work), timeout)
        except asyncio.TimeoutError:
            raise DiscoveryError("etcd did not answer") from None

    async def transact(self, compare=(), success=(), failure=(), timeout=5.0):
        return await self._ask(lambda: self.etcd.transact(compare, success, failure), timeout)

    async def grant(self, ttl, timeout=5.0):
        return await self._ask(lambda: self.etcd.grant(ttl), timeout)

    async def keep_alive(self, lease, timeout=5.0):
        return await self._ask(lambda: self.etcd.keep_alive(lease), timeout)

    async def revoke(self, lease, timeout=5.0):
        await self._ask(lambda: self.etcd.revoke(lease), timeout)

    async def watch(self, prefix, revision):
        queue = asyncio.Queue()

        def begin():
            if revision <= self.etcd.revision:
                past = [event for at, event in self.etcd.events if at >= revision]
                if past:
                    self.network.later(0.001, lambda: queue.put_nowait(past))
            self.etcd.watchers[publish] = None

        def publish(events):
            waiting.append(events)
            self.network.in_order(queue, arrive)

        def arrive():  # a stream loses nothing: what is cut off comes later
            if self.network.is_cut_off(self.process):
                self.network.later(0.1, arrive)
                return
            while waiting:
                queue.put_nowait(waiting.pop(0))

        waiting = []
        await self._ask(begin, 5.0)
        try:
            while True:
                events = await queue.get()
                if events is None:
                    raise DiscoveryError("the watch ended")
                yield events
        finally:
            self.etcd.watchers.pop(publish, None)

    async def close(self):
        pass
