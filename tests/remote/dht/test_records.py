"""Records and what a node keeps: forged, replayed, expired, oversize, foreign ones; caps; hostile messages."""

import errno
import json
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from fmoe_ext.remote import loop
from fmoe_ext.remote.dht import Identity, messages, records
from fmoe_ext.remote.dht.messages import Answer, BadMessage, Found, Header, Request
from fmoe_ext.remote.dht.records import MAX_TTL, BadRecord, places_of, prefix_key, read_record, uid_key
from fmoe_ext.remote.dht.storage import Peer, RecordStore, RoutingTable
from fmoe_ext.remote.dht.transport import GrpcTransport, host_seen

NOW = 1.7e9
ME, OTHER = Identity(b"m" * 32), Identity(b"o" * 32)


def record(owner=ME, uid="expert.0", endpoint="a:1", sequence=1, expires=NOW + 100, fence=1):
    return owner.sign(uid, endpoint, fence, sequence, expires)


def put(store, signed, now=NOW, key=None):
    """None, or why it was refused."""
    refusal = store.put(uid_key(signed.uid) if key is None else key, signed, now)
    return refusal and refusal.reason


def kept(store, uid="expert.0", now=NOW):
    return [(r.owner == ME.public, r.endpoint) for r in store.find(uid_key(uid), now) if r.is_live(now)]


def test_identity_of_a_process_that_ends_at_once_is_made_by_the_next(tmp_path, monkeypatch):
    """An empty file stayed, and every later start ended with an error."""

    def end(count):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "urandom", end)
        Identity.at(tmp_path / "identity")
    assert list(tmp_path.iterdir()) == []
    identity = Identity.at(tmp_path / "identity")
    assert Identity.at(tmp_path / "identity").public == identity.public
    assert [path.name for path in tmp_path.iterdir()] == ["identity"]


def test_processes_that_start_at_once_have_one_identity(tmp_path, monkeypatch):
    draw, others = os.urandom, []

    def while_another_starts(count):
        monkeypatch.setattr(os, "urandom", draw)
        others.append(Identity.at(tmp_path / "identity"))
        return draw(count)

    monkeypatch.setattr(os, "urandom", while_another_starts)
    assert Identity.at(tmp_path / "identity").public == others[0].public
    assert [path.name for path in tmp_path.iterdir()] == ["identity"]


def test_identity_without_hard_links_is_refused_by_name(tmp_path, monkeypatch):
    """FAT and some network disks: the start ended in a bare "Operation not permitted"."""

    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "identity"
    with pytest.raises(OSError, match=rf"identity {path} cannot be made .*hard links.*head -c 32 .*> {path}"):
        Identity.at(path)
    assert list(tmp_path.iterdir()) == []


def test_half_an_identity_is_named(tmp_path):
    path = tmp_path / "identity"
    path.touch(0o600)
    with pytest.raises(ValueError, match=rf"32 bytes, but {path} has 0: put the file back, or remove it"):
        Identity.at(path)


@pytest.mark.parametrize("field", ["uid", "endpoint", "owner", "fence", "sequence", "expires", "metadata"])
def test_forged_record_is_refused(field):
    signed = record()
    values = json.loads(signed.payload)
    lies = {
        **{"uid": "expert.1", "endpoint": "b:1", "owner": OTHER.public, "fence": 0},
        **{"sequence": 2, "expires": NOW + 101, "metadata": {"version": "9"}},
    }
    forged = json.dumps(values | {field: lies[field]}, separators=(",", ":"), sort_keys=True)
    with pytest.raises(BadRecord, match="not signed by its owner"):
        read_record(forged, signed.signature)
    assert read_record(signed.payload, signed.signature) == signed


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"uid": "expert"}, "uid must look like"),
        ({"endpoint": "a"}, "host:port"),
        ({"endpoint": "a:70000"}, "host:port"),
        ({"endpoint": "x" * 300 + ":1"}, "host:port"),
        ({"owner": "zz"}, "64 hexadecimal"),
        ({"fence": -1}, "whole number"),
        ({"sequence": 1 << 70}, "whole number"),
        ({"sequence": True}, "whole number"),
        ({"expires": float("inf")}, "seconds since 1970"),
        ({"expires": float("nan")}, "seconds since 1970"),
        ({"expires": 10**400}, "seconds since 1970"),
        ({"expires": "soon"}, "seconds since 1970"),
        ({"metadata": {"a": 1}}, "must be text"),
        ({"metadata": {str(n): "" for n in range(17)}}, "at most 16"),
        ({"more": 1}, "nothing else"),
    ],
)
def test_every_field_of_a_record_is_bounded(changes, text):
    with pytest.raises(BadRecord, match=text):
        read_record(json.dumps(json.loads(record().payload) | changes), "0" * 128)


def signed_text(payload):
    return read_record(payload, ME.sign_bytes(records._DOMAIN + payload.encode(errors="surrogatepass")).hex())


@pytest.mark.parametrize("text", ["\U0001d11e", "\ud800", "\u00e9", "\x7f"])
def test_record_that_grows_in_an_answer_is_refused(text):
    """A character beyond ASCII has 6 or 12 bytes in an answer: a stranger's records made a prefix unreadable."""
    values = json.loads(record().payload) | {"metadata": {"a": text}}
    with pytest.raises(BadRecord, match="printable ASCII"):
        signed_text(json.dumps(values, ensure_ascii=False))
    assert signed_text(json.dumps(values)).metadata == {"a": text}  # escaped


def test_record_with_line_breaks_is_refused():
    values = json.loads(record().payload)
    with pytest.raises(BadRecord, match="printable ASCII"):
        signed_text(json.dumps(values, indent=0))
    assert signed_text(json.dumps(values, separators=(" , ", " : "))).endpoint == "a:1"


@pytest.mark.parametrize("text", ['"', "\\", "\n", "\u00e9", "x"])
def test_largest_value_of_each_character_fits_into_its_record(text):
    """A value of 1,024 characters as JSON passed, and failed in a record that its caller had never made."""
    taken = 0
    for count in range(1, 1025):
        try:
            metadata = records.dump_value(text * count)
        except ValueError as error:
            assert str(error).startswith("a value has at most")
            break
        signed = ME.sign(
            records.value_uid("key", ME.public), records.ENDPOINT, 2**63 - 1, 2**63 - 1, NOW + 1 / 7, metadata
        )
        assert records.load_value(signed, NOW).value == text * count
        taken = count
    assert taken == {'"': 428, "\\": 428, "\n": 511, "\u00e9": 170, "x": 1022}[text]


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", '{"a":1e999}'])
def test_values_that_are_no_json_are_none(text):
    """Another program may have signed them; dump_value() refuses them."""
    assert records.load_value(SimpleNamespace(metadata={"0": text}, owner=""), NOW) is None
    assert records.load_value(SimpleNamespace(metadata={"0": "[1e99]"}, owner=""), NOW).value == [1e99]


def test_value_in_the_place_of_another_owner_is_refused():
    store = RecordStore()
    uid = records.value_uid("key", ME.public)
    own, foreign = record(uid=uid), record(owner=OTHER, uid=uid)
    key = prefix_key(records.value_prefix("key"))
    assert put(store, foreign, key=key) == "this place is for a value of another owner"
    assert put(store, own, key=key) is None
    assert store.find(key, NOW) == [own]


def test_record_is_read_only_where_it_belongs():
    store, signed = RecordStore(), record(uid="grid.1.2")
    for key in places_of("grid.1.2"):
        assert put(store, signed, key=key) is None
    assert "not a key" in put(store, signed, key=uid_key("grid.1.3"))
    assert "not a key" in put(store, signed, key=prefix_key("grid.2"))
    assert store.find(prefix_key("grid.1"), NOW) == [signed]


def test_replayed_record_is_refused_until_the_last_one_has_expired():
    store, old, new = RecordStore(), record(sequence=1, expires=NOW + 500), record(sequence=2, endpoint="b:1")
    assert put(store, old) is None and put(store, new) is None
    assert "newer" in put(store, old)
    assert put(store, new) is None  # the same again is no replay
    assert kept(store) == [(True, "b:1")]
    assert "newer" in put(store, old, now=NOW + 200)  # the newer one has expired, but it was said
    store.purge(NOW + 200)
    assert "newer" in put(store, old, now=NOW + 200)


def test_withdrawn_record_cannot_come_back():
    store, signed = RecordStore(), record()
    assert put(store, signed) is None
    assert put(store, record(sequence=2, endpoint="")) is None
    assert "newer" in put(store, signed)
    assert kept(store) == []
    assert put(store, record(OTHER)) is None  # the uid is free
    assert kept(store) == [(False, "a:1")]


def test_live_record_is_not_taken_over_an_expired_one_is():
    store = RecordStore()
    put(store, record())
    refusal = store.put(uid_key("expert.0"), record(OTHER, sequence=99, fence=0), NOW)
    assert "another owner" in refusal.reason and refusal.holder == record()
    assert (
        put(store, record(OTHER, sequence=99, endpoint="")) is None
    )  # nothing of its to withdraw: no effect
    assert kept(store) == [(True, "a:1")]
    assert put(store, record(OTHER, expires=NOW + 200), now=NOW + 101) is None
    assert kept(store, now=NOW + 101) == [(False, "a:1")]


def test_records_expire_and_leave_nothing():
    store = RecordStore()
    for n in range(10):
        for key in places_of(f"grid.{n}.1"):
            assert put(store, record(uid=f"grid.{n}.1"), key=key) is None
    assert len(store) == 30
    assert "expired" in put(store, record(), now=NOW + 100)
    store.purge(NOW + 100)
    assert (len(store), store._slots, store._num_of_owner) == (0, {}, {})


def test_lifetimes_and_claims_are_bounded():
    assert "lives over 3600 s" in put(RecordStore(), record(expires=NOW + MAX_TTL + 100))
    assert "future" in put(RecordStore(), record(fence=int((NOW + 100) * 1000)))


def test_numbers_are_bounded(monkeypatch):
    store = RecordStore(max_records=2)
    assert [put(store, record(uid=f"expert.{n}")) for n in range(2)] == [None] * 2
    assert "no more than 2 records" in put(store, record(uid="expert.2"))
    assert put(store, record(uid="expert.1", sequence=2)) is None  # a renewal needs no room
    assert (
        put(store, record(uid="expert.2", expires=NOW + 300), now=NOW + 100) is None
    )  # the others have expired
    monkeypatch.setattr("fmoe_ext.remote.dht.storage.MAX_OF_OWNER", 1)
    store = RecordStore()
    assert put(store, record()) is None and "of one owner" in put(store, record(uid="expert.1"))
    monkeypatch.undo()
    monkeypatch.setattr("fmoe_ext.remote.dht.storage.MAX_UNDER_PREFIX", 2)
    store = RecordStore()
    said = [put(store, record(uid=f"expert.{n}"), key=prefix_key("expert")) for n in range(3)]
    assert said[:2] == [None, None] and "expert has 2 experts" in said[2]


def test_routing_keeps_those_who_answer():
    table = RoutingTable(0, bucket_size=2)
    peers = [Peer((1 << 255) + n, f"h{n}:1") for n in range(4)]
    for peer in peers:
        table.heard(peer)
    assert list(table) == peers[:2]  # the old ones stay, the others wait
    assert table.failed(peers[0].node_id) is None and table.closest(0) == [peers[1]]
    table.heard(peers[0])
    assert len(table.closest(0)) == 2  # it answered again
    table.failed(peers[1].node_id)
    assert table.failed(peers[1].node_id) == peers[1]
    assert list(table) == [peers[0], peers[3]]
    assert table.closest(peers[3].node_id)[0] == peers[3]


def test_host_that_is_seen():
    assert host_seen("ipv4:10.0.0.1:4242") == "10.0.0.1"
    assert host_seen("ipv6:%5B::1%5D:4242") == "[::1]"
    assert host_seen("ipv6:[::ffff:10.0.0.1]:4242") == "10.0.0.1"


# ------------------------------------------------------------------ messages


def sample_messages():
    header = Header(7, NOW, "host:1")
    signed = record(uid="grid.1.2")
    found = {1: Found([Peer(2, "[::1]:3")], [signed]), 4: Found()}
    return [
        messages.encode_request(Request(header, keys=[1, 2**256 - 1])),
        messages.encode_request(Request(header, items=[(uid_key(signed.uid), signed)])),
        messages.encode_answer(Answer(header, found)),
        messages.encode_answer(
            Answer(header, refused=[None, RecordStore(0).put(uid_key(signed.uid), signed, NOW)])
        ),
    ]


def test_messages_come_back_as_they_went():
    request = Request(Header(7, NOW, ":80"), [1, 2], [(uid_key("expert.0"), record())])
    back = messages.decode_request(messages.encode_request(request))
    assert (back.header, list(back.keys), list(back.items)) == (request.header, request.keys, request.items)
    answer = messages.decode_answer(sample_messages()[2])
    assert answer.found[1].records[0].uid == "grid.1.2" and answer.found[1].peers[0] == Peer(2, "[::1]:3")


def test_forged_record_in_an_answer_has_no_effect():
    forged = replace(record(), payload=record().payload.replace("a:1", "b:1"))
    answer = messages.encode_answer(Answer(Header(7, NOW), {1: Found((), [forged, record()])}))
    assert messages.decode_answer(answer).found[1].records == (record(),)
    (item,) = messages.decode_request(
        messages.encode_request(Request(Header(7, NOW), items=[(1, forged)]))
    ).items
    assert "not signed" in item


@pytest.mark.parametrize("decode", [messages.decode_request, messages.decode_answer])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "object"),
        (b"9" * 10_000, "JSON"),
        (b"{}", "time|endpoint"),
        (b'{"endpoint": "", "time": NaN}', "time"),
        # quoted, because the text is logged, and sent to the peer, in UTF-8
        (rb'{"endpoint": "", "time": "\ud800\n"}', r"time .* but got '\\ud800\\n'$"),
        (b'{"endpoint": "", "time": 1' + b"0" * 400 + b"}", "time"),
        (b'{"endpoint": "", "time": 1}', "id must be"),
        (b" " * (9 << 20), "at most"),
        (
            json.dumps({"time": 1, "id": "0" * 64, "endpoint": "", "keys": ["0"] * 65, "found": 3}).encode(),
            "at most",
        ),
        (
            json.dumps({"time": 1, "id": "0" * 64, "endpoint": "", "items": [3], "refused": [3]}).encode(),
            "must",
        ),
    ],
)
def test_bad_messages_are_named(decode, data, text):
    with pytest.raises(BadMessage, match=text):
        decode(data)


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_messages_are_read_or_refused(count):
    rng, samples = random.Random(0), sample_messages()
    for n in range(count):
        data = bytearray(samples[n % len(samples)])
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(data))
            data[place : place + rng.choice((0, 1, 1, 1, 8))] = rng.choice(
                (b"", b"\xff", b'"', b"[", b"}", b"-1", b"1e999", b"null", rng.randbytes(3), b"9" * 30)
            )
        for decode in (messages.decode_request, messages.decode_answer):
            try:
                decode(bytes(data[: rng.randrange(len(data))] if n % 5 == 0 else data))
            except BadMessage as error:
                assert len(str(error)) < 1000


def test_node_survives_garbage_and_says_what_is_wrong(open_nodes, endpoint_of):
    discovery = open_nodes()

    async def send(method, data):
        async with grpc.aio.insecure_channel(endpoint_of(discovery)) as channel:
            try:
                return await channel.unary_unary(f"/fmoe.dht/{method}")(data, timeout=5)
            except grpc.aio.AioRpcError as error:
                return error.code().name

    for method in messages.METHODS:
        assert loop.run(send(method, b"\x80\x04}garbage"), 60) == "INVALID_ARGUMENT"
    assert loop.run(send("Find", b" " * (600 << 10)), 60) == "RESOURCE_EXHAUSTED"
    assert loop.run(send("Other", b""), 60) == "UNIMPLEMENTED"
    assert loop.run(discovery.declare(["expert.0"], "a:1", 5), 60) == {"expert.0"}


def test_peer_that_calls_too_often_is_refused(endpoint_of):
    async def run():
        server, client = GrpcTransport(calls_per_second=5), GrpcTransport()

        async def handler(method, data, host):
            return host.encode()

        port = await server.serve("127.0.0.1:0", handler)
        answers = []
        for _ in range(20):
            try:
                answers.append(await client.call(f"127.0.0.1:{port}", "Ping", b"", 5))
            except Exception as error:
                answers.append(str(error))
        await client.close()
        await server.close()
        return answers

    answers = loop.run(run(), 60)
    assert answers[:10] == [b"127.0.0.1"] * 10
    assert sum("sends more than its rate" in str(answer) for answer in answers) >= 5


def test_node_that_lies_about_its_address_is_not_believed(open_nodes, endpoint_of):
    discovery = open_nodes()

    async def lie():
        header = Header(12345, time.time(), "127.0.0.1:1")
        await discovery.node.handle("Ping", messages.encode_request(Request(header)), "127.0.0.1")
        while discovery.node.greeting:
            await next(iter(discovery.node.greeting.values()))
        return list(discovery.node.table)

    assert loop.run(lie(), 60) == []


@pytest.mark.parametrize("calls", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_threads_and_files_stay_flat(open_nodes, endpoint_of, calls):
    seed = open_nodes()
    nodes = [open_nodes([endpoint_of(seed)], refresh_period=0.5) for _ in range(4)]
    rng = random.Random(0)

    def some_calls(count):
        for n in range(count):
            discovery, uid = rng.choice(nodes), f"grid.{rng.randrange(4)}.{rng.randrange(4)}"
            loop.run(discovery.declare([uid], "a:1", 1.0, timeout=60), 120)
            loop.run(discovery.get([uid, "grid.9.9"], timeout=60), 120)
            loop.run(discovery.successors(["grid", "grid.1"], timeout=60), 120)
            if n % 10 == 0:  # a client that comes, asks and goes
                client = open_nodes([endpoint_of(seed)], listen_on=None)
                loop.run(client.get([uid], timeout=60), 120)
                loop.run(client.close(), 60)

    def used():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return threading.active_count(), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

    some_calls(40)
    threads, files, memory = used()
    some_calls(calls)
    end = time.monotonic() + 60  # closed sockets go away a little later
    while used()[1] > files + 4 and time.monotonic() < end:
        time.sleep(0.1)
    after = used()
    print(
        f"{calls} rounds: threads {threads} -> {after[0]}, files {files} -> {after[1]}, {after[2] - memory:+} bytes"
    )
    assert after[0] <= threads + 1 and after[1] <= files + 4
    assert after[2] - memory < 24 << 20
    assert all(len(d.node.store) <= 4 * (16 * 3 + 4) for d in nodes)
