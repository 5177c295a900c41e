"""fmoe-server: host experts until a signal ends the process.

main() reads the flags, makes the Server (make_server), starts it, logs a line of progress now and then, and at a signal
stops it. Exit statuses are those of _cli.py.
"""

import argparse
import importlib.util
import logging
import os
import sys
import traceback
from collections import Counter
from collections.abc import Sequence

import torch

from fmoe_ext._cli import CANNOT, IN_USE, NOT_SAVED, reason, run
from fmoe_ext.remote import loop, protocol, status
from fmoe_ext.remote.dht import open_node
from fmoe_ext.remote.discovery import Discovery, DiscoveryError, StaticList
from fmoe_ext.remote.errors import RemoteError
from fmoe_ext.remote.flags import DATE_FORMAT, LOG_FORMAT, build
from fmoe_ext.remote.replication.replicas import ReplicatedExperts
from fmoe_ext.remote.security import Credentials, InUse, Security
from fmoe_ext.remote.server.checkpoints import Damaged
from fmoe_ext.remote.server.declared import DeclaredExperts, WarmCopies
from fmoe_ext.remote.server.options import Options, Replication, Training, parse, read_tokens
from fmoe_ext.remote.server.server import Server

log = logging.getLogger("fmoe_ext.remote")


def make_server(flags: argparse.Namespace) -> Server:
    """Make the server that the flags describe, not yet started; the DHT's node has joined, though."""
    # 1. how others prove themselves here, and how this server does at others
    tokens = {} if flags.tokens is None else read_tokens(flags.tokens)
    security = build(Security, flags, tokens=tokens)
    options = build(Options, flags, training=build(Training, flags), security=security)
    own = next((token for token, name in tokens.items() if name == flags.own_token), None)
    calls_others = flags.registry or flags.copies_of
    if flags.own_token is not None and own is None:
        raise SystemExit(f"--own_token {flags.own_token} is no name in {flags.tokens}")
    if tokens and own is None and calls_others:
        raise SystemExit("servers call each other: name this server's token with --own_token")
    if flags.tls_ca is not None:  # this server shows its own certificate to the others
        credentials = Credentials(flags.tls_ca, flags.tls_certificate, flags.tls_key, own)
    elif flags.tls_certificate is not None and calls_others:
        raise SystemExit("servers call each other by TLS: name who signed their certificates with --tls_ca")
    else:
        credentials = Credentials(token=own)
    # 2. who decides which experts it hosts: etcd, the DHT, or (--no_dht) only itself
    if flags.registry is not None:
        return Server(options, ReplicatedExperts(build(Replication, flags), credentials))
    discovery: Discovery = StaticList()
    if not flags.no_dht:
        host = flags.listen_on.rpartition(":")[0]
        node = open_node(
            list(flags.initial_peers),
            f"{host}:{flags.dht_port or 0}",
            identity_path=flags.identity_path,
            alone=True,
            relay=flags.relay,
            relay_token=flags.relay_token,
        )
        dht = loop.run(node, 30)
        log.info("DHT node listens on port %d", dht.node.port)
        discovery = dht
    copies = None
    if flags.copies_of:
        copies = WarmCopies(discovery, flags.copies_of, flags.copy_period, credentials)
    return Server(options, DeclaredExperts(discovery, copies))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT -> 0 after everything was handed over and saved; other statuses: _cli.

    With `status` as the first argument, run status.main() instead.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["status"]:
        return status.main(given[1:])
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=DATE_FORMAT)
    # 1. flags, and what they can be checked by at once
    flags = parse(given)
    try:
        torch.empty(0, device=flags.device)
    except (AssertionError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise SystemExit(f"--device {flags.device} cannot be used here: {why}") from None
    if flags.num_threads is not None:
        torch.set_num_threads(flags.num_threads)
    if (path := flags.custom_module_path) is not None:
        spec = importlib.util.spec_from_file_location("fmoe_server_custom_module", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise SystemExit(f"--custom_module_path {path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for the types of their fields
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise SystemExit(f"--custom_module_path {path} failed: {_describe(error)}") from None
    # 2. the server; signals are taken first, so that one which comes while it starts is not lost
    protocol.allow_more_files()
    has_to_end = loop.end_signals()
    # Python's 5 ms would be how long the loop waits for the thread that computes
    sys.setswitchinterval(0.001)
    try:
        server = make_server(flags)
        server.start()
    except InUse as error:
        log.error("%s", error)
        return IN_USE
    except (OSError, ValueError, ImportError, DiscoveryError, Damaged, RemoteError) as error:
        log.error("%s", error)
        return CANNOT
    except Exception as error:
        log.error("the server cannot start: %s", _describe(error))
        log.debug("it failed here", exc_info=True)
        return CANNOT
    # 3. a line of progress after each interval, until a signal
    before: Counter[str] = Counter()
    while not has_to_end(interval := flags.stats_report_interval):
        now = Counter(
            batches=server.compute.num_batches,
            forward=int(server.metrics.count("calls_total", method="forward", code="OK")),
            rows=sum(expert.num_rows for expert in list(server.host.experts.values())),
            backward=int(server.metrics.count("calls_total", method="backward", code="OK")),
        )
        now.subtract(before)
        before.update(now)
        log.info(
            "Processed %d batches in last %.1f seconds: %d forward calls (%d rows), %d backward calls, %d waiting",
            *(now["batches"], interval, now["forward"], now["rows"], now["backward"], len(server.queue)),
        )
    # 4. the end; its steps have bounds of their own
    server.stop(timeout=None)
    if isinstance(server.placement, DeclaredExperts):
        loop.run(server.placement.discovery.close(), 10)
    if server.saver is not None and (unsaved := server.saver.describe_unsaved()):
        log.error("not saved: %s", unsaved)
        if server.saver.is_stuck:  # a thread still waits for the disk, and Python would wait for it at exit
            logging.shutdown()
            os._exit(NOT_SAVED)
        return NOT_SAVED
    return 0


def _describe(error: Exception) -> str:
    """Return the kind of an unforeseen error, its text, and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {reason(error)[:300]} ({frame.filename}:{frame.lineno})"


if __name__ == "__main__":
    run(main)
