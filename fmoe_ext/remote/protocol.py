"""Define what client, server and replicas must agree on: names of methods, keys of metadata, sizes, grpc's options.

A long message comes in parts (IN_PARTS). grpc reads a whole message, and copies it twice, before a handler can say that
there is no memory for it; parts are read one by one, once there is room for all of them (ROOM).
"""

import contextlib
import resource

SERVICE = "fmoe.Experts"
INFO, FORWARD = f"/{SERVICE}/Info", f"/{SERVICE}/Forward"
BACKWARD, STATE = f"/{SERVICE}/Backward", f"/{SERVICE}/State"
# Keys of a message's metadata
UID, REQUEST_ID, VERSION, COMPRESSION, LOSS = "uid", "id", "version", "compression", "loss"
SCHEMA, CLASS, HIDDEN_DIM, REQUESTS = "schema", "class", "hidden_dim", "requests"
# of warm copies: seconds between a holder's looks, in its calls; "1" in the owner's answer to Info if it is stopping
LOOKS_EVERY, LEAVING = "looks_every", "leaving"
# Keys in the answer to Info that people read
ROLE, TERM, COMMITTED, SAVED, WAITING = "role", "term", "committed", "saved", "waiting"
UNSAVED = "unsaved"  # why no newer version could be saved
# in a call's grpc metadata: the size of its message, for which the server makes room first
BYTES = "fmoe-bytes"
IN_PARTS = "InParts"  # at the end of a method's name: request and answer come in parts
ROOM = "fmoe-room"  # in the initial metadata of the answer to such a call: there is room, send the parts
PART_BYTES = 1 << 20  # of a part; messages above this are sent in parts, if the server knows how
WHOLE_BYTES = 4 << 20  # of the largest message that servers take whole
GRAD = "grad"  # name of a gradient's tensor; inputs are called "0", "1", ...
ID_LENGTH = 32  # hexadecimal digits of a request id
# How the text of a FAILED_PRECONDITION begins if another server takes the gradients: clients then look it up anew.
NOT_LEADER = "not the leader"


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return grpc's options of a client: bounds of sizes, and quick reconnection to a server that came back."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


WINDOW_BYTES = 4 << 20  # of each call that grpc buffers before a handler reads it
_HANDSHAKE_SECONDS = 5  # for a new connection to speak HTTP/2
# after which a connection without calls is closed; the client opens another one at its next call
_IDLE_SECONDS = 30


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return grpc's options of a server: bounds of sizes and of idle connections."""
    sizes = dict(channel_options(max_message_bytes))
    sizes["grpc.max_receive_message_length"] = min(max_message_bytes, WHOLE_BYTES)
    return [
        *sizes.items(),
        ("grpc.so_reuseport", 0),  # a port that is in use is an error: otherwise both servers would share it
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.http2.bdp_probe", 0),  # or grpc itself makes the window larger on fast connections
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_SECONDS * 1000),
        ("grpc.max_connection_idle_ms", _IDLE_SECONDS * 1000),
    ]


def allow_more_files() -> None:
    """Raise the soft limit of open files to the hard one: each connection is a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a limit below the one that it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
