"""The methods that replicas call: Append, Join, Ready, Host."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc

from fmoe_ext.remote import protocol
from fmoe_ext.remote.replication import messages
from fmoe_ext.remote.replication.replica import Fenced, LogGap
from fmoe_ext.remote.security import Denied
from fmoe_ext.remote.server.host import ExpertMissing
from fmoe_ext.remote.server.service import NotLeader
from fmoe_ext.remote.wire import STATE, Message, WireError, decode, encode

if TYPE_CHECKING:
    from fmoe_ext.remote.replication.replicas import ReplicatedExperts

Code = grpc.StatusCode
_CODES = (
    (NotLeader, Code.FAILED_PRECONDITION),
    (Fenced, Code.ABORTED),
    (LogGap, Code.OUT_OF_RANGE),
    (ExpertMissing, Code.NOT_FOUND),
    (ValueError, Code.INVALID_ARGUMENT),
)


class ReplicaService:
    """Servers admit each other as they admit those who send gradients."""

    def __init__(self, owner: "ReplicatedExperts"):
        self.owner = owner

    def handlers(self) -> grpc.GenericRpcHandler:
        methods = {"Append": self._append, "Join": self._join, "Ready": self._ready, "Host": self._host}
        return grpc.method_handlers_generic_handler(
            messages.SERVICE,
            {name: grpc.unary_unary_rpc_method_handler(self._method(call)) for name, call in methods.items()},
        )

    def _method(self, call: Callable[[Message], Awaitable[Message]]) -> Callable[..., Any]:
        async def method(data: bytes, context: Any) -> bytes:
            try:
                self.owner.server.service.guard.admit(context, len(data), gradient=True)
                return encode(await call(decode(data, STATE)))
            except Denied as error:
                await context.abort(error.code, str(error))
            except Exception as error:
                code = next((code for kind, code in _CODES if isinstance(error, kind)), Code.INTERNAL)
                await context.abort(code, str(error)[:500] or repr(error)[:500])
            raise AssertionError("abort() does not return")

        return method

    async def _append(self, message: Message) -> Message:
        self.owner.append(message)
        return Message()

    async def _join(self, message: Message) -> Message:
        uid, server, endpoint = (_text(message, key) for key in (protocol.UID, "server", "endpoint"))
        return await self.owner.leading.admit(uid, server, endpoint)

    async def _ready(self, message: Message) -> Message:
        await self.owner.leading.promote(_text(message, protocol.UID), _text(message, "server"))
        return Message()

    async def _host(self, message: Message) -> Message:
        await self.owner.host_expert(_text(message, protocol.UID))
        return Message()


def _text(message: Message, key: str) -> str:
    value = message.meta.get(key)
    if not value:
        raise WireError(f"the call does not say {key}")
    return value
