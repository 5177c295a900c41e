"""Names between client, server and replicas: methods, keys of metadata, options of channels."""

import contextlib
import resource

SERVICE = "fmoe.Experts"
INFO, FORWARD = f"/{SERVICE}/Info", f"/{SERVICE}/Forward"
BACKWARD, STATE = f"/{SERVICE}/Backward", f"/{SERVICE}/State"
# Keys of a message's metadata.
UID, REQUEST_ID, VERSION, COMPRESSION, LOSS = "uid", "id", "version", "compression", "loss"
SCHEMA, CLASS, HIDDEN_DIM, REQUESTS = "schema", "class", "hidden_dim", "requests"
LOOKS_EVERY, LEAVING = "looks_every", "leaving"  # of who keeps warm copies, and to it
# Of Info, for people.
ROLE, TERM, COMMITTED, SAVED, WAITING = "role", "term", "committed", "saved", "waiting"
UNSAVED = "unsaved"  # why no newer version could be saved
BYTES = "fmoe-bytes"  # of the call, in grpc's metadata: the server has room for it before it reads it
IN_PARTS = "InParts"  # at the end of a method's name: request and answer come in parts
ROOM = "fmoe-room"  # in the first metadata of a server to a call in parts: now send it
PART_BYTES = 1 << 20  # of a message in parts; longer messages are sent in parts where the server knows how
# grpc reads a message to its end, and copies it twice, before a handler can say that there is no room for it. So
# servers take no longer ones; what is longer comes in parts, which are read when there is room for the whole.
WHOLE_BYTES = 4 << 20
GRAD = "grad"  # name of the tensor; inputs are called "0", "1", ...
ID_LENGTH = 32  # hexadecimal digits
# How the text of a FAILED_PRECONDITION begins when another server takes the gradients.
NOT_LEADER = "not the leader"


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Size caps, and quick reconnection to a server that came back."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


WINDOW_BYTES = 4 << 20  # of a call that may arrive before it is read
HANDSHAKE_SECONDS = 5  # for a new connection to speak HTTP/2
# After which a connection without calls is closed; its client opens another one at its next call.
IDLE_SECONDS = 30


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Bounds of sizes and of idle connections; a port that is in use is an error, not shared."""
    sizes = dict(channel_options(max_message_bytes))
    sizes["grpc.max_receive_message_length"] = min(max_message_bytes, WHOLE_BYTES)
    return [
        *sizes.items(),
        ("grpc.so_reuseport", 0),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
    ]


def allow_more_files() -> None:
    """Raises the soft limit of open files to the hard one: each connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a limit below the one that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
