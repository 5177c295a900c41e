"""Caller: send one message to one endpoint, with a deadline; grpc's errors become those of fmoe_ext.remote.errors.

Client calls experts through it, and servers call each other (replication, warm copies). A short message goes whole. A
long one, above PART_BYTES, goes in parts: the server sends ROOM once it has memory for all of it, then the parts go
out, and the answer comes back in parts too. download() is for answers too long for one message.
"""

import asyncio
import time
import urllib.request
from collections.abc import Awaitable, Callable

import grpc

from fmoe_ext.remote import errors, protocol
from fmoe_ext.remote.security import Credentials
from fmoe_ext.remote.wire import WHOLE, Limits, Message, WireError, decode

Code = grpc.StatusCode
PART_SECONDS = 30.0  # that download() waits for each part of an answer, the first one included
# no server answers there, or it stops, or it has no such expert
_GONE = (Code.UNAVAILABLE, Code.NOT_FOUND, Code.CANCELLED)
_OWN_FAILURE = "Internal error from Core"  # details of grpc's own status if a part could not be sent


class Caller:
    """Channels to any number of servers, made when needed; its methods run on one event loop."""

    def __init__(self, credentials: Credentials | None = None, limits: Limits | None = None):
        self.credentials = credentials or Credentials()
        self.limits = limits or Limits()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._takes_no_parts: set[str] = set()  # endpoints of servers of earlier releases

    async def call(self, endpoint: str, method: str, data: bytes, timeout: float) -> Message:
        """Send data to a method of a server -> its answer; RemoteError on failure, or after about `timeout` seconds."""

        async def read() -> Message:
            begin, channel, metadata = time.monotonic(), self._channel(endpoint), self._metadata(data)
            # 1. a long message in parts, unless the server does not know how
            if len(data) > protocol.PART_BYTES and endpoint not in self._takes_no_parts:
                stream = channel.stream_stream(method + protocol.IN_PARTS)(timeout=timeout, metadata=metadata)
                whole, statuses = bytearray(), list[tuple[grpc.StatusCode, str]]()
                stream.add_done_callback(lambda call: statuses.append(_status(call)))
                try:
                    # The server first sends ROOM, once it has memory for all of data. Without it the call has failed,
                    # and the reading below raises the reason.
                    if protocol.ROOM in dict(await stream.initial_metadata()):
                        try:
                            for first in range(0, len(data), protocol.PART_BYTES):
                                await stream.write(data[first : first + protocol.PART_BYTES])
                            await stream.done_writing()
                        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                            # The call has ended. For a part that was under way grpc replaces the call's status by one
                            # of its own, so the status that was noted first tells why.
                            code, details = statuses[0] if statuses else (Code.UNKNOWN, _OWN_FAILURE)
                            if details == _OWN_FAILURE and time.monotonic() - begin >= timeout:
                                code = Code.DEADLINE_EXCEEDED
                            elif code is Code.OK or details == _OWN_FAILURE:
                                text = f"{endpoint} ended the call before it had all of it"
                                raise errors.ExpertGone(text) from None
                            raise _translate(code, details, endpoint, timeout) from None
                    async for part in stream:
                        whole += part
                        if len(whole) > (most := self.limits.max_message_bytes):
                            text = f"{endpoint} sent more than the {most} bytes that are accepted"
                            raise errors.Refused(text)
                    return decode(whole, self.limits)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not Code.UNIMPLEMENTED:
                        raise
                    self._takes_no_parts.add(endpoint)  # goes on below
                finally:
                    stream.cancel()
            # 2. whole
            return decode(
                await channel.unary_unary(method)(data, timeout=timeout, metadata=metadata), self.limits
            )

        return await self._within(endpoint, timeout, read)

    async def download(
        self,
        endpoint: str,
        method: str,
        data: bytes,
        timeout: float,
        max_bytes: int = WHOLE.max_message_bytes,
    ) -> Message:
        """call() for an answer that comes in parts, of at most max_bytes together."""

        async def read() -> Message:
            send = self._channel(endpoint).unary_stream(method)
            stream = send(data, timeout=timeout, metadata=self._metadata(data))
            # the timeout of a whole state is long, so a server that hangs is noticed by the pause between two parts
            whole = bytearray()
            while True:
                try:
                    part = await asyncio.wait_for(stream.read(), PART_SECONDS)
                except asyncio.TimeoutError:
                    text = (
                        f"{endpoint} stopped after {len(whole)} bytes: no more came within {PART_SECONDS:g} s"
                    )
                    raise errors.CallTimeout(text) from None
                if part is grpc.aio.EOF:
                    break
                whole += part
                if len(whole) > max_bytes:
                    raise errors.Refused(f"{endpoint} sent more than the {max_bytes} bytes that are accepted")
            return decode(whole, WHOLE)

        return await self._within(endpoint, timeout, read)

    def _metadata(self, data: bytes) -> tuple[tuple[str, str], ...]:
        return (*self.credentials.metadata(), (protocol.BYTES, str(len(data))))

    async def _within(self, endpoint: str, timeout: float, work: Callable[[], Awaitable[Message]]) -> Message:
        """Return the result of work; failures of grpc, of time and of decoding are raised as RemoteError."""
        if timeout <= 0:
            raise errors.CallTimeout(f"no time was left to call {endpoint}")
        try:
            # grpc ends a call at its deadline by itself, with a better error; 0.1 s later we do, should it hang
            return await asyncio.wait_for(work(), timeout + 0.1)
        except errors.RemoteError:
            raise
        except grpc.aio.AioRpcError as error:
            raise _translate(error.code(), error.details() or "", endpoint, timeout) from None
        except asyncio.TimeoutError:
            raise errors.CallTimeout(f"{endpoint} did not answer within {timeout:.3g} s") from None
        except WireError as error:
            raise errors.Refused(f"{endpoint} sent an answer that cannot be read: {error}") from None
        except grpc.aio.BaseError as error:
            raise errors.ExpertGone(f"{endpoint} cannot be called: {error}") from None

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            options = protocol.channel_options(self.limits.max_message_bytes)
            credentials = self.credentials.channel_credentials()
            if credentials is None:
                channel = grpc.aio.insecure_channel(endpoint, options)
            else:
                channel = grpc.aio.secure_channel(endpoint, credentials, options)
            self._channels[endpoint] = channel
        return channel


def _status(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    """Return code and details of a call that has just ended, before anything else runs on the loop."""

    async def read() -> tuple[grpc.StatusCode, str]:
        return await call.code(), await call.details() or ""

    try:
        read().send(None)  # the status is there, so nothing waits
    except StopIteration as result:
        return result.value
    return Code.UNKNOWN, _OWN_FAILURE


def _translate(code: grpc.StatusCode, details: str, endpoint: str, timeout: float) -> errors.RemoteError:
    """Return our error for a status of grpc; which one depends on what the caller can do about it."""
    text = f"{endpoint}: {details[:500]}"
    if code is Code.DEADLINE_EXCEEDED:
        return errors.CallTimeout(f"{endpoint} did not answer within {timeout:.3g} s")
    if code is Code.FAILED_PRECONDITION and details.startswith(protocol.NOT_LEADER):
        return errors.NoLeader(text)
    if code is Code.RESOURCE_EXHAUSTED:
        return errors.Busy(text)
    if code is Code.UNAVAILABLE:
        # grpc silently uses the environment's proxy, which often cannot reach a server of the same network
        host, proxies = endpoint.rpartition(":")[0], urllib.request.getproxies()
        if {"grpc", "https", "http"} & proxies.keys() and not urllib.request.proxy_bypass(host):
            text += (
                " (grpc_proxy, https_proxy or http_proxy sends it to a proxy; "
                f"set no_proxy={host} to call the server itself)"
            )
    return errors.ExpertGone(text) if code in _GONE else errors.Refused(f"{text} ({code.name})")
