"""Decide who may call: TLS, tokens, allow-lists and rates. Check that files with secrets are private, and lock files.

A client shows Credentials; a server demands Security, and its Guard checks each call, for Intake, in this order: the
token or the certificate, which give the caller's name (its address without both); whether that name may send gradients;
and its rates of calls and bytes. lock_file() is for the DHT's identity and the server's checkpoints.
"""

import errno
import fcntl
import hashlib
import ipaddress
import os
import ssl
import stat
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from fmoe_ext.remote.flags import POSITIVE, admission_flag

_MAX_PEERS = 10_000  # whose rates are remembered
_BURST_SECONDS = 2.0  # a peer that was silent may send as much at once as its rate allows in this time


class Denied(Exception):
    """A call that is not admitted: a grpc status code and one sentence."""

    def __init__(self, code: grpc.StatusCode, text: str):
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Credentials:
    """The proofs that a client shows to servers, and the authority by which it knows them."""

    ca: Path | None = None  # PEM file that signed the servers' certificates
    certificate: Path | None = None  # with key, for mutual TLS
    key: Path | None = None
    token: str | None = None

    def __post_init__(self) -> None:
        if self.ca is None and (self.certificate is not None or self.key is not None):
            raise ValueError(
                "a certificate needs TLS: give ca, the PEM file that signed the servers' certificates"
            )
        if (self.certificate is None) != (self.key is None):  # at which grpc would abort the process
            raise ValueError("mutual TLS needs both a certificate and its key")

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return grpc's credentials, None for plain TCP; ValueError for files that hold no certificates."""
        if self.ca is None:
            return None
        _check_authority("ca", self.ca)
        if self.certificate is not None and self.key is not None:
            _check_pair(self.certificate, self.key)
        chain, key = _read(self.certificate), _read(self.key)
        return grpc.ssl_channel_credentials(Path(self.ca).read_bytes(), key, chain)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of each call: the token, if there is one."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


@dataclass(frozen=True)
class Security:
    """The demands of a server on its callers."""

    certificate: Path | None = admission_flag(None, "PEM file", name="tls_certificate")
    key: Path | None = admission_flag(None, "PEM file", name="tls_key", needs=("tls_certificate",))
    client_ca: Path | None = admission_flag(
        None, "demand client certificates that it signed", name="tls_client_ca", needs=("tls_certificate",)
    )
    tokens: Mapping[str, str] = field(default_factory=dict)  # {token: name}; calls without one are refused
    backward: Collection[str] | None = admission_flag(
        None, "names that may send gradients; all, if not given", name="allow_backward", nargs="+"
    )  # names: of tokens, common names of certificates, or IP addresses
    calls_per_second: float = admission_flag(float("inf"), "of each peer", type=POSITIVE)
    bytes_per_second: float = admission_flag(float("inf"), "of each peer", type=POSITIVE)

    def __post_init__(self) -> None:
        if "" in self.tokens:
            raise ValueError(f"the token of {self.tokens['']} is empty: it would admit everybody")
        for name in ("calls_per_second", "bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, but is {getattr(self, name)}")

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Return grpc's credentials, None for plain TCP.

        Raises ValueError for a certificate without key, for two that are no pair, and for a client_ca without TLS or
        without certificates in it.
        """
        if (self.certificate is None) != (self.key is None):
            raise ValueError("TLS needs both a certificate and its key")
        if self.certificate is None or self.key is None:
            if self.client_ca is not None:
                raise ValueError("client certificates need TLS: give the server a certificate and a key")
            return None
        _check_pair(self.certificate, self.key)
        pair = (Path(self.key).read_bytes(), Path(self.certificate).read_bytes())
        if self.client_ca is not None:
            _check_authority("client_ca", self.client_ca)
        ca = _read(self.client_ca)
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)


def check_private(path: Path) -> None:
    """Raise ValueError if other users can open a file with a secret.

    A file of root's may be readable by its group, unless this process is root's.
    """
    status = os.stat(path)
    allowed = stat.S_IRWXU | (stat.S_IRGRP if status.st_uid == 0 and os.getuid() != 0 else 0)
    if stat.S_IMODE(status.st_mode) & ~allowed & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{path} holds a secret, but other users can open it (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"chmod 600 {path}"
        )


class InUse(OSError):
    """Another process has locked a file."""


def lock_file(path: Path, in_use: str) -> int:
    """Lock a file, which is made if it is missing -> its descriptor.

    Closing that unlocks the file, unless a forked child has it too.
    InUse(in_use) if another process has locked it; OSError if its file system has no locks.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # a file that may only be read can be locked too
        if not os.access(path, os.R_OK):
            raise
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise InUse(in_use) from None
        raise OSError(f"{path} cannot be locked ({error}): name one on a disk") from None
    return file


def _check_authority(name: str, path: Path) -> None:
    """Raise ValueError, which names the file, if it holds no certificate: grpc says only that it cannot connect."""
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise ValueError(f"{name} {path} holds no certificate in PEM: {error}") from None


def _check_pair(certificate: Path, key: Path) -> None:
    """Raise ValueError, which names the files, if they are no pair: grpc says only that it cannot listen or connect."""
    check_private(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ValueError(
            f"{certificate} and {key} are not a certificate and its key in PEM: {error}"
        ) from None


class Guard:
    """Admits calls by the demands of a server, or raises Denied."""

    def __init__(self, security: Security):
        self.security = security
        self._names = {_digest(token): name for token, name in security.tokens.items()}
        self._calls = Rates(security.calls_per_second)
        self._bytes = Rates(security.bytes_per_second)

    def admit(self, context: Any, num_bytes: int, gradient: bool = False) -> str:
        """Return the caller's name; Denied if it may not make this call."""
        # 1. the name: of the token, or of the certificate, or the address, also if a certificate has no common name
        if self._names:
            given = str(dict(context.invocation_metadata() or ()).get("authorization", ""))
            # looked up by digests: how long a comparison of tokens takes would show how much of one is right
            name = self._names.get(_digest(given.removeprefix("Bearer ")))
            if name is None:
                text = f"this server asks for {'another' if given else 'a'} token"
                raise Denied(grpc.StatusCode.UNAUTHENTICATED, text)
        else:
            names = context.auth_context().get("x509_common_name") if self.security.client_ca else None
            name = names[0].decode(errors="replace") if names else host_of(context.peer())
        # 2. its rights, and its rates
        allowed = self.security.backward
        if gradient and allowed is not None and name not in allowed:
            raise Denied(grpc.StatusCode.PERMISSION_DENIED, f"{name} may not send gradients to this server")
        self.charge(name, num_bytes, num_calls=1)
        return name

    def charge(self, peer: str, num_bytes: int, num_calls: int = 0) -> None:
        """Count what a peer sends; Denied if it is more than its rates allow.

        num_bytes: of a call, what it announces; later, what it sends beyond that, <= 0 if it sends no more.
        """
        if num_bytes <= 0 and not num_calls:
            return
        may_call = not num_calls or self._calls.take(peer, num_calls)
        if not (may_call and self._bytes.take(peer, num_bytes)):
            raise Denied(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{peer} sends more than its rate allows")


class Rates:
    """A token bucket for each peer: it fills at per_second, holds _BURST_SECONDS of that, and is taken from.

    Of more than 10,000 peers those that were silent for longest are forgotten. A peer without a name is one address: a
    host with an IPv6 network has as many buckets as addresses.
    """

    def __init__(self, per_second: float):
        self.per_second = per_second
        # by peer: what is left, and since when
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, peer: str, amount: float, now: float | None = None) -> bool:
        """Take an amount from a peer's bucket -> True; False if there is too little. A full one gives any amount."""
        if self.per_second == float("inf"):
            return True
        now = time.monotonic() if now is None else now
        # an unknown peer has a full bucket: to forget one that has filled again changes nothing, but its debt goes too
        full = self.per_second * _BURST_SECONDS
        left, since = self._left.pop(peer, (full, now))
        left = min(full, left + (now - since) * self.per_second)
        # a full bucket gives an amount above `full`: what is left is negative then, and has to fill first
        granted = left >= min(amount, full)
        self._left[peer] = (left - amount if granted else left, now)
        while len(self._left) > _MAX_PEERS:
            self._left.popitem(last=False)
        return granted


def host_of(peer: str) -> str:
    """Return the address in grpc's name of a peer: "10.0.0.1" for "ipv4:10.0.0.1:42", "::1" for "ipv6:%5B::1%5D:42".

    An IPv4 address in IPv6's form, by which a server that listens on [::] sees it, becomes an IPv4 address.
    """
    kind, _, address = urllib.parse.unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    host = address.rpartition(":")[0].strip("[]")
    try:
        mapped = getattr(ipaddress.ip_address(host), "ipv4_mapped", None)
    except ValueError:
        return host
    return host if mapped is None else str(mapped)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _read(path: Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
