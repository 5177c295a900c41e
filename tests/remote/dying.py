"""Servers of this process that vanish as after SIGKILL."""

from fmoe_ext.remote import loop


def kill(server):
    """Nothing is handed over, its lease just ends."""

    async def vanish():
        placement = server.placement
        joins = [replica.joining for replica in placement.replicas.values()]
        for task in (placement._task, *placement._confirming, *placement.registry._tasks, *joins):
            if task is not None:
                task.cancel()
        for replica in placement.replicas.values():
            if replica.leader is not None:
                replica.leader.end("killed")
        placement.replicas.clear()
        placement.registry.lease = 0
        await server._grpc.stop(None)

    loop.run(vanish(), 60)
