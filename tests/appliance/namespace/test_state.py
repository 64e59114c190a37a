"""Desired state, access, events, eviction order, and what a directory says of itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.appliance.namespace.acl import RIGHTS, Acl, hash_token, new_token
from forebay.appliance.namespace.desired_state import (
    DesiredState,
    Grant,
    Namespace,
    Principal,
    Scope,
    ScopeQuota,
    Volume,
    check_name,
)
from forebay.appliance.namespace.events import EventLog, Waiters
from forebay.appliance.namespace.eviction import Lru
from forebay.appliance.namespace.meta import FORMAT, NodeMeta
from forebay.appliance.namespace.store import MemoryStore, Op
from forebay.errors import (
    AlreadyExists,
    ConfigInvalid,
    DataDirNewer,
    InvalidArgument,
    MetadataCorrupt,
    NamespaceNotFound,
    NotFound,
    PermissionDenied,
    Unauthenticated,
)
from forebay.ids import VolumeId
from forebay.index import BlockIndex, RowState

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


# ------------------------------------------------------------------------------------------------ desired state

DRIVE = "0f0f0f0f-1111-2222-3333-444444444444"
ROWS: list[tuple[str, Any]] = [
    ("namespaces", Namespace(3, "t", "n", 5, 6, 1, "none", 7, 8, 9, deleting=True)),
    ("volumes", Volume(VolumeId(4), 3, "drive0", 1, DRIVE, "g", 12)),
    (
        "principals",
        Principal("p", b"\0" * 32, 5, True, (Grant("t/n", ("read", "pin"), ("a",)), Grant("*", ("write",)))),
    ),
    ("scopes", Scope("a", 9)),
    ("scope_quotas", ScopeQuota(3, 9, 100)),
]


@pytest.mark.parametrize(("table", "row"), ROWS, ids=[t for t, _ in ROWS])
def test_rows_come_back_as_they_were(table: str, row: Any) -> None:
    store = MemoryStore()
    run(getattr(DesiredState(store), table).put(row))
    again = getattr(DesiredState(store), table)
    assert list(again) == [row] and again.get(row.key) == row
    run(again.remove(row.key))
    assert list(getattr(DesiredState(store), table)) == []


def test_fields_of_a_newer_version_are_kept_out_and_older_rows_get_defaults() -> None:
    store = MemoryStore()
    full = {"v": 1, "id": 3, "tenant": "t", "name": "n", "created_ms": 5}
    run(store.write([Op("state", b"namespace/3", cbor2.dumps(full | {"colour": "red"}))]))
    (found,) = DesiredState(store).namespaces
    assert found == Namespace(3, "t", "n", 5)


_ROW = {"v": 1, "id": 3, "tenant": "t", "name": "n", "created_ms": 5}
WRONG_ROWS = [
    cbor2.dumps(_ROW | change)
    for change in ({"id": 4}, {"id": "3"}, {"name": b"n"}, {"created_ms": -1}, {"deleting": 2})
]


@pytest.mark.parametrize(
    "value", [b"", b"\xff", cbor2.dumps([1]), cbor2.dumps({"v": 1}), cbor2.dumps({"id": 1}), *WRONG_ROWS]
)
def test_rows_that_do_not_decode_are_said_to_be_corrupt(value: bytes) -> None:
    store = MemoryStore()
    run(store.write([Op("state", b"namespace/3", value)]))
    with pytest.raises(MetadataCorrupt):
        DesiredState(store)


def test_ids_are_never_given_twice() -> None:
    store = MemoryStore()
    given_out = [run(DesiredState(store).new_id()) for _ in range(5)]
    assert len(set(given_out)) == 5

    async def at_once() -> list[int]:
        state = DesiredState(store)
        return list(await asyncio.gather(*[state.new_id() for _ in range(20)]))

    assert not set(given_out) & set(run(at_once()))


@pytest.mark.parametrize("name", ["", "x" * 65, "a/b", "a b", ".a", "é", "a\0", "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_name(name, "name")
    assert caught.value.field == "name"


def test_principals() -> None:
    state = DesiredState(MemoryStore())
    run(state.add_principal(Principal("p", b"", 0)))
    with pytest.raises(AlreadyExists):
        run(state.add_principal(Principal("p", b"", 0)))
    with pytest.raises(NotFound):
        run(state.change_principal("q", admin=True))
    assert run(state.change_principal("p", admin=True)).admin


def test_a_deleting_namespace_is_not_found_by_name() -> None:
    state = DesiredState(MemoryStore())
    run(state.namespaces.put(Namespace(1, "t", "n", 0, deleting=True)))
    assert state.namespace("t/n") is None
    run(state.namespaces.put(Namespace(2, "t", "n", 0)))
    found = state.namespace("t/n")
    assert found is not None and found.id == 2


# ------------------------------------------------------------------------------------------------ access


def acl(*grants: Grant, admin: bool = False) -> tuple[Acl, Principal]:
    state = DesiredState(MemoryStore())
    run(state.namespaces.put(Namespace(1, "t", "n", 0)))
    run(state.namespaces.put(Namespace(2, "t", "m", 0)))
    principal = Principal("p", hash_token("token"), 0, admin, grants)
    run(state.principals.put(principal))
    return Acl(state), principal


def test_tokens() -> None:
    access, principal = acl()
    assert access.authenticate("token") == principal
    for wrong in (None, "", "Token", "token ", hash_token("token").hex()):
        with pytest.raises(Unauthenticated):
            access.authenticate(wrong)
    assert len({new_token() for _ in range(100)}) == 100


@given(st.sets(st.sampled_from(RIGHTS)), st.sampled_from(["t/n", "t/m", "*", "x/y"]), st.sampled_from(RIGHTS))
def test_denied_unless_granted(rights: set[str], namespace: str, asked: str) -> None:
    access, principal = acl(*([Grant(namespace, tuple(rights))] if rights else []))
    granted = rights if namespace in ("t/n", "*") else set()
    if not granted:
        with pytest.raises(NamespaceNotFound):
            access.access(principal, "t/n")
        return
    found = access.access(principal, "t/n")
    if asked in granted:
        found.need(asked)
    else:
        with pytest.raises(PermissionDenied):
            found.need(asked)
    found.need_scope("default")
    found.need_scope("")
    with pytest.raises(PermissionDenied):
        found.need_scope("other")


def test_grants_add_up_and_scopes_with_them() -> None:
    access, principal = acl(Grant("*", ("read",), ("a",)), Grant("t/n", ("write",), ("b",)))
    found = access.access(principal, "t/n")
    assert found.rights == {"read", "write"}
    for scope in ("a", "b"):
        found.need_scope(scope)
    with pytest.raises(PermissionDenied):
        found.need_scope("default")


def test_a_right_holds_only_in_the_scopes_of_its_own_grant() -> None:
    access, principal = acl(Grant("*", ("read",), ("a", "both")), Grant("t/n", ("write",), ("b", "both")))
    found = access.access(principal, "t/n")
    assert found.within(["a"]).rights == {"read"} and found.within(["b"]).rights == {"write"}
    assert found.within(["both"]).rights == {"read", "write"} and found.within(["a", "b"]).rights == set()
    access, principal = acl(Grant("t/n", ("read",)), Grant("*", ("delete",), ("*",)))
    found = access.access(principal, "t/n")
    assert found.within(["default"]).rights == found.within([""]).rights == {"read", "delete"}
    assert found.within(["x"]).rights == {"delete"}
    access, principal = acl(admin=True)
    assert access.access(principal, "t/n").within(["x", ""]).rights == set(RIGHTS)


def test_administrators_may_everything_that_exists() -> None:
    access, principal = acl(admin=True)
    found = access.access(principal, "t/n")
    assert found.rights == set(RIGHTS)
    found.need_scope("any")
    access.need_admin(principal)
    with pytest.raises(NamespaceNotFound):
        access.access(principal, "no/such")
    with pytest.raises(PermissionDenied):
        access.need_admin(Principal("q", b"", 0))


def test_merging_grants() -> None:
    one, two = Grant("a/b", ("read",)), Grant("c/d", ("write",))
    assert Acl.merge((one,), two) == (one, two)
    assert Acl.merge((one, two), Grant("a/b", ("pin",))) == (two, Grant("a/b", ("pin",)))
    assert Acl.merge((one, two), Grant("a/b", ())) == (two,)


# ------------------------------------------------------------------------------------------------ events


@given(st.lists(st.integers(1, 3), max_size=30), st.integers(0, 40), st.integers(1, 5))
def test_events_of_one_namespace_in_order_in_pages(owners: list[int], after: int, most: int) -> None:
    log = EventLog(1)
    for owner in owners:
        log.add("stored", owner)
    if after > len(owners):
        (gap,), seen = log.since(after, 2)
        assert gap.kind == "resync" and seen == len(owners)
        return
    found, at = [], after
    while True:
        page, following = log.since(at, 2, most)
        found += page
        if following == at:
            break
        at = following
    assert [e.sequence for e in found] == [i + 1 for i, owner in enumerate(owners) if owner == 2 and i >= after]


def test_a_watcher_that_fell_behind_is_told() -> None:
    log = EventLog(1)
    for _ in range(70_000):
        log.add("stored", 1)
    (gap,), at = log.since(10, 1)
    assert gap.kind == "resync" and at == 70_000
    assert log.since(69_999, 1)[0][0].sequence == 70_000


def test_all_who_wait_for_events_wake() -> None:
    async def scenario() -> None:
        log = EventLog(1)
        waiting = [asyncio.ensure_future(log.grown(0)) for _ in range(3)]
        await asyncio.sleep(0)
        log.add("stored", 1)
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        await asyncio.wait_for(log.grown(0), 5)

    run(scenario())


def test_waiters_are_woken_once_and_leave_nothing() -> None:
    async def scenario() -> None:
        waiters = Waiters()
        one, two, other = waiters.add(b"a"), waiters.add(b"a"), waiters.add(b"b")
        waiters.drop(b"a", two)
        waiters.wake([b"a"], 7)
        assert (one.result(), two.done(), other.done()) == (7, False, False)
        waiters.drop(b"b", other)
        waiters.drop(b"b", other)
        waiters.wake([b"a", b"b"], 1)
        assert not waiters._waiting and one.result() == 7

    run(scenario())


# ------------------------------------------------------------------------------------------------ eviction


@given(st.permutations(range(40)), st.integers(1, 40), st.sets(st.integers(0, 39), max_size=10))
def test_the_least_recently_used_first_and_retained_ones_last(order: list[int], count: int, kept: set[int]) -> None:
    index = BlockIndex(bytes(32), 100)
    rows = index.insert(index.digests([b"%d" % i for i in range(40)]), [[0]] * 40, state=RowState.VISIBLE)
    index.retain_until_s[list(kept)] = 2000
    lru = Lru()
    for row in order:
        lru.used(index, rows[row : row + 1])
    want = [r for r in order if r not in kept] + [r for r in order if r in kept]
    assert lru.victims(index, rows, count, 1000).tolist() == want[:count]
    # when the retention is over it counts no more
    assert lru.victims(index, rows, count, 3000).tolist() == order[:count]
    assert lru.victims(index, rows[:0], count, 1000).size == 0


def test_a_batch_is_used_in_its_order() -> None:
    index = BlockIndex(bytes(32), 100)
    rows = index.insert(index.digests([b"a", b"b", b"c"]), [[0]] * 3, state=RowState.VISIBLE)
    lru = Lru()
    lru.used(index, rows[::-1])
    lru.committed(index, rows[2:], {})
    assert lru.victims(index, rows, 3, 0).tolist() == [1, 0, 2]
    assert np.unique(index.tick[rows]).size == 3


# ------------------------------------------------------------------------------------------------ the directory


def counting() -> Any:
    numbers = itertools.count(1)
    return lambda size: next(numbers).to_bytes(1, "big") * size


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"format", cbor2.dumps([1])),
        (b"format", cbor2.dumps({"v": 1, "node": b"short", "secret": bytes(32), "region": 64 << 20})),
        (b"format", cbor2.dumps({"v": 1, "node": bytes(16), "secret": "text", "region": 64 << 20})),
        (b"drive/drive0", b"no uuid"),
        (b"drive/drive0", b"\xff"),
        (b"absent/drive0", cbor2.dumps("x")),
        (b"incarnation", b"\x01"),
    ],
)
def test_what_a_directory_says_of_itself_is_whole_or_corrupt(key: bytes, value: bytes) -> None:
    store = MemoryStore()
    run(NodeMeta.load(store, counting(), 64 << 20))
    run(store.write([Op("meta", key, value)]))
    with pytest.raises(MetadataCorrupt):
        run(NodeMeta.load(store, counting(), 64 << 20))


def test_a_directory_keeps_its_identity_and_counts_its_starts() -> None:
    store = MemoryStore()
    first = run(NodeMeta.load(store, counting(), 64 << 20))
    assert (first.incarnation, first.was_clean, len(first.node_id), len(first.secret)) == (0, False, 16, 32)
    run(first.begin_incarnation())
    run(first.confirm_epoch())
    run(first.name_drive("drive0", DRIVE))
    run(first.mark_clean())
    second = run(NodeMeta.load(store, counting(), 64 << 20))
    assert (second.node_id, second.secret, second.drives) == (first.node_id, first.secret, {"drive0": DRIVE})
    assert (second.incarnation, second.confirmed_epoch, second.was_clean) == (1, 1, True)
    run(second.begin_incarnation())
    third = run(NodeMeta.load(store, counting(), 64 << 20))
    assert (third.incarnation, third.confirmed_epoch, third.intended_epoch, third.was_clean) == (2, 1, 2, False)


def test_a_newer_format_another_region_size_and_nonsense_are_refused() -> None:
    store = MemoryStore()
    run(NodeMeta.load(store, counting(), 64 << 20))
    with pytest.raises(ConfigInvalid) as caught:
        run(NodeMeta.load(store, counting(), 128 << 20))
    assert (caught.value.field, caught.value.limit) == ("space.region", 64 << 20)
    raw = cbor2.loads(store.families["meta"][b"format"])
    store.families["meta"][b"format"] = cbor2.dumps(raw | {"v": FORMAT + 1})
    with pytest.raises(DataDirNewer) as newer:
        run(NodeMeta.load(store, counting(), 64 << 20))
    assert newer.value.limit == FORMAT
    for nonsense in (b"", b"\xff", cbor2.dumps({"v": 1}), cbor2.dumps(7)):
        store.families["meta"][b"format"] = nonsense
        with pytest.raises(MetadataCorrupt):
            run(NodeMeta.load(store, counting(), 64 << 20))
