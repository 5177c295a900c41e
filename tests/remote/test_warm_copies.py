"""Without a registry: a copy takes over when its owner's record expires, and what is lost is counted."""

import time

import torch

from fmoe_ext.remote import DeclaredExperts, Directory, Options, Server, Settings, StaticList, loop
from fmoe_ext.remote.server.state import digest
from fmoe_ext.remote.server.warm_copies import WarmCopies

D, UID = 16, "expert.0"


def vanish(server):
    """As after SIGKILL: nothing is withdrawn, the record just is not renewed."""

    async def end():
        for task in server.placement._tasks:
            task.cancel()
        await server._grpc.stop(None)

    loop.run(end(), 10)


def test_a_copy_takes_over_and_the_loss_is_counted():
    discovery = StaticList()
    options = {"hidden_dim": D, "ttl": 0.9}
    owner = Server(Options(expert_uids=(UID,), **options), DeclaredExperts(discovery)).start()
    copies = WarmCopies(discovery, [UID], period=0.5)
    heir = Server(Options(expert_uids=("expert.1",), **options), DeclaredExperts(discovery, copies)).start()
    directory = Directory(discovery, Settings(patience=10, forward_timeout=10, backward_timeout=10))
    (expert,) = directory.get_experts([UID])

    def step():
        expert(torch.randn(3, D)).pow(2).sum().backward()

    for _ in range(3):
        step()
    end = time.monotonic() + 10
    while UID not in copies._copies or copies._copies[UID][1].meta["version"] != "3":
        assert time.monotonic() < end, "no copy within 10 s"
        time.sleep(0.02)
    before = digest(owner.host, UID)
    copies._copies[UID] = (
        time.monotonic() + 1000,
        copies._copies[UID][1],
    )  # no further copy, but further looks
    for _ in range(2):
        step()
    end = time.monotonic() + 10
    while copies._seen[UID] < 5:
        assert time.monotonic() < end, "no look within 10 s"
        time.sleep(0.02)
    vanish(owner)
    begin = time.monotonic()
    while UID not in heir.host.experts:
        assert time.monotonic() - begin < 10, "nobody took over"
        time.sleep(0.02)
    assert digest(heir.host, UID) == before
    assert heir.metrics.count("updates_lost_total") == 2
    step()
    assert heir.host.find(UID).version == 4
    heir.stop()
    owner.stop()
    directory.shutdown()
