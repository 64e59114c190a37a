"""The client against a whole node: daemon, embedded target, files."""

import hashlib
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import forebay
from forebay.client import Admin, Client, ClientOptions, Describe, Hints, NvmeTcpOptions, StatResult
from forebay.errors import (
    DuplicateKey,
    ForebayError,
    GridInvalid,
    InvalidArgument,
    KeySize,
    NamespaceNotFound,
    PermissionDenied,
    SchemaInvalid,
    SessionExpired,
    Unauthenticated,
    Unavailable,
    ValueSize,
)
from forebay.ids import MAX_KEY_BYTES, MAX_VALUE_BYTES, BlockKey
from forebay.schema import Group, HashAlgorithm, Schema
from tests.client.conftest import NodeProcess, eventually, halted, patient

OPTIONS = patient(ClientOptions(deadline_ms=30_000))


def noise(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def grid(layer_groups: int = 2, head_groups: int = 2, *, bytes_per_head: int = 100) -> Schema:
    """4 layers, 3 heads, 5 tokens: tiles of unequal lengths that are no multiples of anything."""
    group = Group(
        "full", (0, 1, 2, 3), 5, 3, bytes_per_head, "bf16", "test", layer_groups=layer_groups, head_groups=head_groups
    )
    mla = Group("mla", (0, 1), 5, 0, 128, "bf16", "test")
    return Schema("test", b"", HashAlgorithm("sha256", 5), (group, mla))


@pytest.fixture
def client(shared_node: NodeProcess) -> Iterator[Client]:
    with shared_node.connect(options=OPTIONS) as client:
        yield client


def values_of(client: Client, keys: Sequence[bytes | BlockKey], **arguments: Any) -> list[bytes | None]:
    return [bytes(r.value) if r.value is not None else None for r in client.get(keys, **arguments)]


# --- whole blocks ---


def test_values_of_every_length(client: Client) -> None:
    lengths = [1, 2, 4095, 4096, 4097, 65_536, 100_001, 1 << 20, (4 << 20) + 1, 9 << 20]
    keys = [b"length-%d" % length for length in lengths]
    values = [noise(length, length) for length in lengths]
    assert [r.reason for r in client.put(keys, values)] == ["ok"] * len(keys)
    assert values_of(client, keys) == values
    assert [r.length_bytes for r in client.get(keys)] == lengths


def test_the_largest_value(client: Client) -> None:
    value = np.frombuffer(os.urandom(1 << 20) * (MAX_VALUE_BYTES >> 20), np.uint8)
    assert client.put([b"largest"], [value])[0].stored
    into = mmap.mmap(-1, MAX_VALUE_BYTES)
    assert client.get_into([b"largest"], [into])[0].hit
    assert hashlib.sha256(into).digest() == hashlib.sha256(value.data).digest()
    assert client.delete([b"largest"]) == ["ok"]
    into.close()


def test_longer_batches_than_one_lease_should_cover(shared_node: NodeProcess) -> None:
    options = replace(OPTIONS, batch_bytes=100_000)
    keys = [b"part-%d" % i for i in range(20)]
    values = [noise(30_000, i) for i in range(20)]
    with shared_node.connect(options=options) as client:
        assert all(r.stored for r in client.put(keys, values))
        assert values_of(client, keys) == values
        into = [bytearray(30_000) for _ in keys]
        assert all(r.hit for r in client.get_into(keys, into))
        assert into == values


def test_every_kind_of_buffer(client: Client) -> None:
    value = noise(8192)
    client.put([b"kinds"], [value])
    area = mmap.mmap(-1, 8192)
    buffers: list[Any] = [
        bytearray(8192),
        memoryview(bytearray(9000))[808:],
        area,
        np.zeros((64, 64), np.float16),
        np.zeros(10_000, np.uint8),
    ]
    results = client.get_into([b"kinds"] * len(buffers), buffers)
    assert [(r.hit, r.length_bytes, r.value) for r in results] == [(True, 8192, None)] * len(buffers)
    assert bytes(buffers[0]) == bytes(buffers[1]) == area[:] == buffers[3].tobytes() == value
    assert buffers[4].tobytes() == value + bytes(10_000 - 8192), "nothing beyond the value is touched"
    area.close()


def test_what_is_present_is_not_written_again(client: Client) -> None:
    assert client.put([b"once"], [b"first"])[0].stored
    (again,) = client.put([b"once"], [b"other"])
    assert (again.stored, again.present, again.reason) == (False, True, "already_exists")
    assert values_of(client, [b"once"]) == [b"first"]


def test_misses_hits_and_duplicates_in_one_read(client: Client) -> None:
    client.put([b"dup"], [b"value"])
    results = client.get([b"dup", b"no such", b"dup"])
    assert [r.reason for r in results] == ["ok", "absent", "ok"]
    assert client.stats.hits == 2
    assert client.stats.misses == {"absent": 1}
    assert client.stats.bytes_read == 10


def test_a_buffer_too_small_for_an_opaque_block_is_a_miss(client: Client) -> None:
    client.put([b"big"], [bytes(5000)])
    into = bytearray(4999)
    assert client.get_into([b"big"], [into])[0].reason == "value_size"


# --- tiles ---


def test_tiles(shared_node: NodeProcess) -> None:
    schema = grid()
    layout = schema.groups[0].layout()
    assert layout.lengths == (2000, 2000, 1000, 1000)
    value = noise(layout.value_bytes)
    tiles = [value[at : at + length] for at, length in zip(layout.value_offsets, layout.lengths, strict=True)]
    with shared_node.connect(schema=schema, options=OPTIONS) as client:
        assert client.put([b"grid"], [value])[0].stored
        assert values_of(client, [b"grid"]) == [value]
        for wanted in ([0], [3], [1, 2], [0, 1, 2, 3], [3, 1], [2, 3, 0]):
            expected = b"".join(tiles[t] for t in wanted)
            assert values_of(client, [b"grid"], tiles=wanted) == [expected]
            into = bytearray(len(expected))
            assert client.get_into([b"grid"], [into], tiles=wanted)[0].length_bytes == len(expected)
            assert into == expected
        mla = BlockKey(b"grid", group=1)
        second = noise(schema.groups[1].layout().value_bytes, 2)
        assert client.put([mla], [second])[0].stored
        assert values_of(client, [b"grid", mla]) == [value, second]


def test_another_grid_is_another_keyspace(shared_node: NodeProcess) -> None:
    size = grid().groups[0].layout().value_bytes
    with (
        shared_node.connect(schema=grid(2, 2), options=OPTIONS) as one,
        shared_node.connect(schema=grid(4, 3), options=OPTIONS) as other,
    ):
        assert one.put([b"shared key"], [noise(size)])[0].stored
        assert other.get([b"shared key"])[0].reason == "absent"


@pytest.mark.parametrize(
    "tiles",
    [[], [-1], [4], [0, 0], [1, 2, 1]],
)
def test_tiles_that_are_not_of_the_grid(shared_node: NodeProcess, tiles: list[int]) -> None:
    with shared_node.connect(schema=grid(), options=OPTIONS) as client:
        with pytest.raises(GridInvalid):
            client.get([b"k"], tiles=tiles)
        with pytest.raises(GridInvalid):
            client.get_into([b"k"], [bytearray(100_000)], tiles=tiles)


# --- the life of blocks ---


def test_match(client: Client) -> None:
    client.put([b"m0", b"m1", b"m3"], [bytes(4096)] * 3)
    found = client.match([b"m0", b"m1", b"m2", b"m3"])
    assert found.present == (True, True, False, True)
    assert found.reasons == ("ok", "ok", "absent", "ok")
    assert found.prefix == {0: 2}
    assert found.present_bytes == 3 * 4096
    assert found.load_ms > 0


def test_stat_pin_touch_delete(client: Client) -> None:
    client.put([b"life"], [bytes(5000)], hints=Hints(priority_class=2), describe=Describe([b""], 16, [7], "adapter"))
    assert client.pin([b"life", b"no such"]) == ["ok", "absent"]
    found, none = client.stat([b"life", b"no such"])
    assert none == StatResult("absent")
    stat = found.block
    assert found.reason == "ok" and stat is not None
    assert (stat.length_bytes, stat.tiles, stat.pins, stat.durability) == (5000, 1, 1, "flush")
    assert stat.extent_bytes >= 8192
    assert len(stat.write_id) == 16
    assert [read.write_id for read in client.get([b"life", b"no such"])] == [stat.write_id, b""]
    assert client.touch([b"life"], hints=Hints(final=True)) == ["ok"]
    assert client.pin([b"life"], pinned=False) == ["ok"]
    assert client.delete([b"life", b"no such"]) == ["ok", "absent"]
    assert client.get([b"life"])[0].reason == "absent"


def test_listing_pages(client: Client) -> None:
    keys = [b"list/%04d" % i for i in range(1_100)]
    client.put(keys, [b"x"] * len(keys))
    assert [block.key for block in client.list(b"list/")] == keys
    assert {(b.length_bytes, b.group, b.scope) for b in client.list(b"list/000")} == {(1, 0, 0)}
    assert list(client.list(b"nothing like it")) == []
    for wrong in ({"prefix": bytes(2000)}, {"group": -1}, {"scope": 1 << 32}):
        with pytest.raises(InvalidArgument):
            client.list(**wrong)
    with pytest.raises(InvalidArgument):
        client.watch(-1)


def test_wait_for_another_client(shared_node: NodeProcess, client: Client) -> None:
    got: list[str] = []
    with shared_node.connect(options=OPTIONS) as writer:
        waiter = threading.Thread(target=lambda: got.extend(client.wait([b"awaited"], 60_000)))
        writer.put([b"awaited"], [b"here"])
        waiter.start()
        waiter.join(60)
    assert got == ["ok"]
    assert client.wait([b"awaited", b"never"], 1)[1] in ("absent", "deadline_exceeded")


def test_who_waits_for_a_write_waits_for_no_other(shared_node: NodeProcess, client: Client) -> None:
    assert client.wait([b"nobody writes this"], 20_000, pending_only=True) == ["absent"]
    with shared_node.connect(options=OPTIONS) as writer:
        plan = writer.allocate([b"being written"], lengths=[4])
        assert client.wait([b"being written"], 1, pending_only=True) == ["deadline_exceeded"]
        writer.abort(plan)
        assert client.wait([b"being written"], 20_000, pending_only=True) == ["absent"]
        writer.put([b"being written"], [b"here"])
        assert client.wait([b"being written"], 20_000, pending_only=True) == ["ok"]


def test_watch(client: Client) -> None:
    seen: list[Any] = []
    watching = client.watch()

    def follow() -> None:
        for event in watching:
            seen.append(event)
            if event.kind == "removed":
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()

    def written() -> bool:
        client.put([b"watched"], [b"x"])
        client.delete([b"watched"])
        thread.join(0.05)
        return not thread.is_alive()

    eventually(written, "an event of a removal")
    assert {event.kind for event in seen} >= {"removed"}
    assert {event.key for event in seen} == {b"watched"}


# --- arguments that can never work ---


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ([], InvalidArgument),
        ([b""], KeySize),
        ([b"ok", b"x" * (MAX_KEY_BYTES + 1)], KeySize),
        (["text"], InvalidArgument),
        ([7], InvalidArgument),
        ([BlockKey(b"k", group=1)], InvalidArgument),
        ([BlockKey(b"k", group=-1)], InvalidArgument),
        ([BlockKey(b"k", scope=1 << 32)], InvalidArgument),
        ([b"k"] * 16_385, InvalidArgument),
    ],
)
def test_bad_keys_raise_before_anything_is_sent(client: Client, keys: list[Any], kind: type[ForebayError]) -> None:
    for call in (
        client.match,
        client.get,
        client.delete,
        client.pin,
        client.touch,
        client.stat,
        lambda k: client.wait(k, 10),
        lambda k: client.get_into(k, [bytearray(1)] * len(k)),
        lambda k: client.put(k, [b"v"] * len(k)),
    ):
        with pytest.raises(kind):
            call(keys)


def test_bad_values_and_buffers_raise(client: Client, shared_node: NodeProcess) -> None:
    for values, kind in (
        ([], InvalidArgument),
        ([b"1", b"2"], InvalidArgument),
        ([b""], ValueSize),
        ([bytes(MAX_VALUE_BYTES + 1)], ValueSize),
        (["text"], InvalidArgument),
    ):
        with pytest.raises(kind):
            client.put([b"k"], values)
    with pytest.raises(DuplicateKey, match=r"keys\[2\]"):
        client.put([b"a", b"b", b"a"], [b"1", b"2", b"3"])
    with pytest.raises(InvalidArgument, match="read-only"):
        client.get_into([b"k"], [b"read-only"])
    with pytest.raises(InvalidArgument):
        client.get_into([b"k"], [])
    for deadline_ms in (0, -1, 600_001):
        with pytest.raises(InvalidArgument):
            client.get([b"k"], deadline_ms=deadline_ms)
    with pytest.raises(InvalidArgument):
        client.put([b"k"], [b"v"], describe=Describe(parents=[b"a", b"b"]))
    with pytest.raises(InvalidArgument):
        client.put([b"k"], [b"v"], hints=Hints(priority_class=-1))
    with shared_node.connect(schema=grid(), options=OPTIONS) as strict:
        size = grid().groups[0].layout().value_bytes
        with pytest.raises(ValueSize):
            strict.put([b"k"], [bytes(size + 1)])
        with pytest.raises(ValueSize):
            strict.get_into([b"k"], [bytearray(size - 1)])
    assert client.match([b"k"]).present == (False,)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "forebay://", "forebay://h:99999", "forebay://h/path", ""])
def test_bad_urls(url: str) -> None:
    with pytest.raises(InvalidArgument):
        forebay.connect(url, token="t")


def test_bad_options() -> None:
    for bad in ({"deadline_ms": 0}, {"connect_ms": 0}, {"batch_bytes": 0}, {"wait_pending_ms": -1}):
        with pytest.raises(InvalidArgument):
            replace(OPTIONS, **bad)  # type: ignore[arg-type]
    for wrong in ({"connections": 0}, {"max_command_bytes": 5000}, {"queue_bytes": 0}, {"backoff_ms": (9, 3)}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            NvmeTcpOptions(**wrong)


# --- who may ---


def test_who_connects(shared_node: NodeProcess) -> None:
    with pytest.raises(Unauthenticated) as caught:
        forebay.connect(shared_node.url, token="fb_wrong")
    assert caught.value.__suppress_context__  # one traceback, not gRPC's before it
    with pytest.raises(NamespaceNotFound):
        shared_node.connect(namespace="no/such")
    with pytest.raises(InvalidArgument):
        shared_node.connect(generation=-1)


def test_where_the_token_comes_from(shared_node: NodeProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("FOREBAY_TOKEN", raising=False)
    monkeypatch.setenv("FOREBAY_DATA", str(tmp_path))
    with pytest.raises(Unauthenticated, match=r"admin\.token"):
        forebay.connect(shared_node.url)
    monkeypatch.setenv("FOREBAY_DATA", str(shared_node.data))
    forebay.connect(shared_node.url).close()
    monkeypatch.setenv("FOREBAY_TOKEN", "fb_wrong")
    with pytest.raises(Unauthenticated):
        forebay.connect(shared_node.url)
    for bad in ("", "two\nlines", "naïve"):
        with pytest.raises(Unauthenticated):
            forebay.connect(shared_node.url, token=bad)


def test_rights(shared_node: NodeProcess) -> None:
    with shared_node.admin() as admin:
        reader = admin.create_principal("reader")
        admin.set_grant("reader", "default/default", ["read"])
        with shared_node.connect(options=OPTIONS) as client:
            client.put([b"theirs"], [b"value"])
        with forebay.connect(shared_node.url, token=reader.token, options=OPTIONS) as client:
            assert values_of(client, [b"theirs"]) == [b"value"]
            assert client.put([b"mine"], [b"x"])[0].reason == "permission_denied"
            assert client.delete([b"theirs"]) == ["permission_denied"]
        with Admin(shared_node.url, token=reader.token) as plain, pytest.raises(PermissionDenied):
            plain.list_principals()
        admin.delete_principal("reader")
        with pytest.raises(Unauthenticated):
            forebay.connect(shared_node.url, token=reader.token)


def test_administration(shared_node: NodeProcess) -> None:
    with shared_node.admin() as admin:
        made = admin.create_namespace("team/kv", quota_bytes=1 << 28, durability="volatile", eviction="none")
        assert (made.name, made.quota_bytes, made.durability) == ("team/kv", 1 << 28, "volatile")
        assert admin.update_namespace("team/kv", min_generation=3).min_generation == 3
        with pytest.raises(InvalidArgument):
            admin.update_namespace("team/kv")
        with pytest.raises(InvalidArgument):
            admin.create_namespace("team/kv2", quota_bytes=-1)
        assert "team/kv" in [n.name for n in admin.list_namespaces()]
        with shared_node.connect(namespace="team/kv", generation=3, options=OPTIONS) as client:
            assert client.put([b"k"], [b"v"])[0].stored
        with pytest.raises(ForebayError):
            admin.delete_namespace("team/kv")
        assert admin.delete_namespace("team/kv", force=True).blocks == 1
        status = admin.status()
        assert status.target_kind == shared_node.kind
        assert status.drives
        token = admin.create_principal("p").token
        assert admin.rotate_token("p").token != token
        assert [p.name for p in admin.list_principals()] == ["admin", "p"]
        admin.delete_principal("p")
    with pytest.raises(InvalidArgument):
        Admin(shared_node.url, token="t", deadline_ms=0)


# --- many at once ---


def test_threads_share_a_client(client: Client) -> None:
    """Reads and writes of eight threads, every byte compared."""
    threads, rounds = 8, 10

    def work(number: int) -> int:
        rng = random.Random(number)
        for turn in range(rounds):
            keys = [b"t%d-%d-%d" % (number, turn, i) for i in range(rng.randrange(1, 8))]
            values = [rng.randbytes(rng.randrange(1, 200_000)) for _ in keys]
            assert {r.reason for r in client.put(keys, values)} == {"ok"}
            into = [bytearray(len(value)) for value in values]
            assert all(r.hit for r in client.get_into(keys, into))
            assert into == values
            assert client.match(keys).prefix == {0: len(keys)}
        return rounds

    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(work, range(threads))) == threads * rounds


class Engine:
    """Another process of the same engine."""

    def __init__(self, node: NodeProcess, client: Client) -> None:
        command = [sys.executable, "-m", "tests.client.engine", node.url, node.token, client.join_token.hex()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.hear() == "joined"

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        self.process.communicate(timeout=30)


def test_processes_of_one_session(shared_node: NodeProcess, client: Client) -> None:
    engines = [Engine(shared_node, client) for _ in range(2)]
    assert client.put([b"leader"], [b"L" * 5000])[0].stored
    for engine in engines:
        assert engine.say("get leader") == f"ok {(b'L' * 5000).hex()}"
    assert engines[0].say("put follower") == "ok"
    assert values_of(client, [b"follower"]) == [b"follower" * 3000]
    engines[0].process.kill()
    engines[0].end()
    assert engines[1].say("get follower").startswith("ok ")
    engines[1].end()
    assert values_of(client, [b"leader"]) == [b"L" * 5000], "those that leave do not end the session"


def test_joining_what_cannot_be_joined(shared_node: NodeProcess, client: Client) -> None:
    token = shared_node.token
    with pytest.raises((SessionExpired, Unauthenticated, InvalidArgument)):
        Client.join(shared_node.url, token=token, session_token=b"no such session!")
    with pytest.raises(SchemaInvalid):
        Client.join(shared_node.url, token=token, session_token=client.join_token, schema=grid())


# --- a node that dies ---


def test_a_node_killed_and_started_again(node: NodeProcess) -> None:
    """Everything acknowledged is there, through the same client."""
    options = replace(OPTIONS, nvme_tcp=NvmeTcpOptions(backoff_ms=(1, 50)))
    keys = [b"kept-%d" % i for i in range(50)]
    values = [noise(10_000 + i, i) for i in range(50)]
    with node.connect(options=options) as client:
        assert all(r.stored for r in client.put(keys, values))
        node.kill()
        assert {r.reason for r in client.get(keys)} == {"unavailable"}
        with pytest.raises(Unavailable):
            node.connect(options=options)
        node.start()
        eventually(lambda: client.match(keys).present == (True,) * 50, "the session to be opened anew")
        eventually(lambda: all(r.hit for r in client.get(keys)), "the data path")
        assert values_of(client, keys) == values
        assert client.put([b"after"], [b"x"])[0].stored
        assert client.stats.reopened >= 1


def test_a_target_killed_in_the_middle_of_reads(shared_node: NodeProcess) -> None:
    """Reads are hits with the right bytes or misses with a reason, and hits again once it is back."""
    options = replace(OPTIONS, nvme_tcp=NvmeTcpOptions(backoff_ms=(1, 50)))
    keys = [b"reads-%d" % i for i in range(16)]
    values = [noise(1 << 20, i) for i in range(16)]
    reasons: set[str] = set()
    with shared_node.connect(options=options) as client:
        assert all(r.stored for r in client.put(keys, values))
        into = [bytearray(1 << 20) for _ in keys]
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                for i, result in enumerate(client.get_into(keys, into, deadline_ms=5_000)):
                    reasons.add(result.reason)
                    assert not result.hit or into[i] == values[i]

        reader = threading.Thread(target=read)
        reader.start()
        eventually(lambda: "ok" in reasons, "a first read")
        shared_node.kill_target()
        eventually(lambda: reasons - {"ok"}, "a miss")
        stop.set()
        reader.join(30)
        assert not reader.is_alive()
        assert reasons - {"ok"} <= {"connection_lost", "unavailable", "deadline_exceeded", "target_refused", "absent"}
        eventually(lambda: all(r.hit for r in client.get_into(keys, into)), "the target to be back")
        assert into == values
        assert client.stats.reconnects >= 1


@pytest.mark.parametrize("part", ["daemon", "target"])
def test_a_stopped_process_holds_nobody_up(shared_node: NodeProcess, part: str) -> None:
    """Half-open: the kernel still answers, the process does not. Calls end at their deadlines."""
    pid = shared_node.process.pid if part == "daemon" else shared_node.target_pid
    key, value = b"stopped-" + part.encode(), noise(1 << 20)
    with shared_node.connect(options=OPTIONS) as client:
        assert client.put([key], [value])[0].stored
        with halted(pid):
            start = time.monotonic()
            assert client.get([key], deadline_ms=300)[0].reason == "deadline_exceeded"
            if part == "daemon":
                assert set(client.match([key], deadline_ms=300).reasons) == {"deadline_exceeded"}
            assert client.put([b"other-" + key], [value], deadline_ms=300)[0].reason == "deadline_exceeded"
            assert time.monotonic() - start < 15, "bounded by deadlines of 0.3 s, on a machine however busy"
        eventually(lambda: values_of(client, [key]) == [value], "the node to be back")


def test_a_closed_client_leaves_nothing_behind(shared_node: NodeProcess) -> None:
    def use() -> None:
        with shared_node.connect(options=OPTIONS) as client:
            client.put([b"left"], [b"x"])
            assert client.get([b"left"])[0].hit
        client.close()
        assert client.get([b"left"])[0].reason == "unavailable"

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    use()
    files, threads = open_files(), set(threading.enumerate())
    for _ in range(5):
        use()
    eventually(lambda: set(threading.enumerate()) <= threads, "threads to end")
    eventually(lambda: open_files() <= files, "files to be closed")
