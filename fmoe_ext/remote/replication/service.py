"""The methods that replicas call: Append, Join, Ready, Host."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc

from fmoe_ext.remote import protocol
from fmoe_ext.remote.replication import messages
from fmoe_ext.remote.replication.messages import Append, Reply, read_append, reply_message, text
from fmoe_ext.remote.security import Denied, Guard
from fmoe_ext.remote.server.host import ExpertMissing
from fmoe_ext.remote.server.ledger import NotLeader
from fmoe_ext.remote.wire import STATE, Message, decode, encode, encode_parts

Code = grpc.StatusCode
CODES = (
    (NotLeader, Code.FAILED_PRECONDITION),
    (ExpertMissing, Code.NOT_FOUND),
    (ValueError, Code.INVALID_ARGUMENT),
)


class Replicas(Protocol):
    """Handlers of the calls."""

    def append(self, append: Append) -> Reply: ...
    async def admit(self, uid: str, name: str, endpoint: str) -> Message: ...
    async def promote(self, uid: str, name: str) -> None: ...
    async def host_expert(self, uid: str) -> None: ...


async def answer(replicas: Replicas, method: str, message: Message) -> Message:
    """The answer to a call of another server."""
    if method == messages.APPEND:
        return reply_message(replicas.append(read_append(message)))
    uid = text(message, protocol.UID)
    if method == messages.JOIN:
        return await replicas.admit(uid, text(message, "server"), text(message, "endpoint"))
    if method == messages.READY:
        await replicas.promote(uid, text(message, "server"))
    else:
        await replicas.host_expert(uid)
    return Message()


def replica_handlers(replicas: Replicas, guard: Guard, part_bytes: int) -> grpc.GenericRpcHandler:
    """Servers admit each other as they admit those who send gradients. A copy comes in parts."""

    @contextlib.asynccontextmanager
    async def answering(path: str, data: bytes, context: Any) -> AsyncIterator[Message]:
        try:
            guard.admit(context, len(data), gradient=True)
            yield await answer(replicas, path, decode(data, STATE))
        except Denied as error:
            await context.abort(error.code, str(error))
        except Exception as error:
            code = next((code for kind, code in CODES if isinstance(error, kind)), Code.INTERNAL)
            await context.abort(code, str(error)[:500] or repr(error)[:500])

    def method(path: str) -> Callable[..., Awaitable[bytes]]:
        async def call(data: bytes, context: Any) -> bytes:
            async with answering(path, data, context) as message:
                return encode(message)
            raise AssertionError("abort() does not return")

        return call

    async def join(data: bytes, context: Any) -> AsyncIterator[bytes]:
        async with answering(messages.JOIN, data, context) as message:
            for part in encode_parts(message, part_bytes):
                yield part

    handlers = {
        path.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(method(path))
        for path in (messages.APPEND, messages.READY, messages.HOST)
    }
    handlers["Join"] = grpc.unary_stream_rpc_method_handler(join)
    return grpc.method_handlers_generic_handler(messages.SERVICE, handlers)
