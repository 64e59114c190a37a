"""Bad input of every kind: a coded error that names field and limit, and the connection usable after."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import cbor2
import grpc
import pytest
from google.protobuf.message import Message

from forebay.errors import (
    OK,
    Absent,
    AlreadyExists,
    DuplicateKey,
    ForebayError,
    GridInvalid,
    InvalidArgument,
    KeySize,
    NamespaceNotFound,
    NotFound,
    Pending,
    PermissionDenied,
    QuotaExceeded,
    SchemaInvalid,
    SessionExpired,
    StaleGeneration,
    StaleIncarnation,
    StaleMap,
    Unauthenticated,
    ValueSize,
    WriteExpired,
)
from forebay.ids import MAX_BATCH_KEYS, MAX_VALUE_BYTES, BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import pack, unpack
from forebay.schema import Schema
from tests.appliance.control.peer import Caller, Daemon, failure
from tests.sim.rig import GRID

UNARY = [
    (service, m.name)
    for service in ("Blocks", "Admin")
    for m in pb.DESCRIPTOR.services_by_name[service].methods
    if not m.server_streaming
]


def refused(error: type[ForebayError], status: str, field: str, call: Callable[[], Any]) -> ForebayError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    found_status, found = failure(caught.value)
    assert (type(found), found_status) == (error, status), str(found)
    assert found.field == field, str(found)
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["unary", "stream"])
def streams(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(autouse=True)
def usable_after(caller: Caller) -> Iterator[None]:
    """Whatever a test sent, the same connection and session still work, and nothing is left pending."""
    yield
    assert caller.match(b"nothing") == [Absent.code]


@pytest.mark.parametrize(("service", "method"), UNARY, ids=[f"{s}.{m}" for s, m in UNARY])
def test_malformed_protobuf(caller: Caller, service: str, method: str) -> None:
    for data in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05abc"):
        refused(
            InvalidArgument,
            "INVALID_ARGUMENT",
            "request",
            lambda data=data: caller.raw(f"/forebay.v1.{service}/{method}", data),  # type: ignore[misc]
        )


@pytest.mark.parametrize(("service", "method"), UNARY, ids=[f"{s}.{m}" for s, m in UNARY])
def test_an_empty_message_is_a_coded_error_or_an_answer(caller: Caller, service: str, method: str) -> None:
    try:
        caller.raw(f"/forebay.v1.{service}/{method}", b"")
    except grpc.RpcError as error:
        assert 1000 <= failure(error)[1].code < 4000
    else:
        assert service == "Admin" and method in (
            "ListNamespaces",
            "ListPrincipals",
            "ListSessions",
            "NodeStatus",
            "StartScrub",
            "StopScrub",
            "ScrubStatus",
            "ListQuarantine",
        ), "only what is about the whole node needs no argument"


@pytest.mark.parametrize("token", [None, "", "wrong", "fbt_" + "A" * 43, "x" * 2000])
@pytest.mark.parametrize("method", ["Blocks/OpenSession", "Blocks/Match", "Admin/NodeStatus"])
def test_wrong_tokens(shared: Daemon, token: str | None, method: str) -> None:
    stranger = Caller(shared.address, token)
    try:
        refused(Unauthenticated, "UNAUTHENTICATED", "token", lambda: stranger.raw(f"/forebay.v1.{method}", b""))
    finally:
        stranger.close()


@pytest.mark.parametrize("name", ["", "none/such", "default", "a/b/c", "default/default/", "\0"])
def test_unknown_namespaces(caller: Caller, shared: Daemon, name: str) -> None:
    refused(NamespaceNotFound, "NOT_FOUND", "namespace", lambda: shared.caller().open(name))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "schema"),
        (b"\xff", "schema"),
        (cbor2.dumps({"engine": "x"}), "schema.draft"),
        (bytes(70_000), "schema"),
        (GRID.cbor.replace(b"khead_groups\x02", b"khead_groups\x09"), "schema.groups[0].head_groups"),
    ],
)
def test_schemas_that_do_not_parse(caller: Caller, data: bytes, field: str) -> None:
    request = pb.OpenSessionRequest(namespace="default/default", schema=data, deadline_ms=1000)
    refused(SchemaInvalid, "INVALID_ARGUMENT", field, lambda: caller("OpenSession", request))


@pytest.mark.parametrize("deadline_ms", [0, 600_001, 2**32 - 1])
def test_deadlines_out_of_range(caller: Caller, deadline_ms: int) -> None:
    found = refused(
        InvalidArgument,
        "INVALID_ARGUMENT",
        "context.deadline_ms",
        lambda: caller.match(b"k", context=caller.context(deadline_ms=deadline_ms)),
    )
    assert found.limit == "1 to 600000"
    request = pb.OpenSessionRequest(namespace="default/default", schema=Schema.opaque().cbor, deadline_ms=deadline_ms)
    refused(InvalidArgument, "INVALID_ARGUMENT", "deadline_ms", lambda: caller("OpenSession", request))
    if deadline_ms:
        status = pb.NodeStatusRequest(context=pb.AdminContext(deadline_ms=deadline_ms))
        refused(InvalidArgument, "INVALID_ARGUMENT", "deadline_ms", lambda: caller.admin("NodeStatus", status))


@pytest.mark.parametrize(
    ("changes", "error", "status", "field"),
    [
        ({"session": b"x" * 16}, SessionExpired, "FAILED_PRECONDITION", "context.session"),
        ({"session": b""}, SessionExpired, "FAILED_PRECONDITION", "context.session"),
        ({"session": bytes(10_000)}, SessionExpired, "FAILED_PRECONDITION", "context.session"),
        ({"incarnation": 0}, StaleIncarnation, "FAILED_PRECONDITION", "context.incarnation"),
        ({"incarnation": 99}, StaleIncarnation, "FAILED_PRECONDITION", "context.incarnation"),
        ({"generation": 1}, InvalidArgument, "INVALID_ARGUMENT", "context.generation"),
        ({"map_version": 9}, StaleMap, "FAILED_PRECONDITION", "context.map_version"),
    ],
)
@pytest.mark.parametrize("method", ["Match", "Acquire", "Allocate", "Commit", "Release", "Heartbeat", "List"])
def test_wrong_contexts(
    caller: Caller, method: str, changes: dict[str, Any], error: type[ForebayError], status: str, field: str
) -> None:
    name = pb.DESCRIPTOR.services_by_name["Blocks"].methods_by_name[method].input_type.name
    request = getattr(pb, name)(context=caller.context(**changes))
    refused(error, status, field, lambda: caller(method, request))


def test_a_session_belongs_to_its_principal(caller: Caller, shared: Daemon) -> None:
    made = caller.admin("CreatePrincipal", pb.CreatePrincipalRequest(name="thief", admin=True))
    thief = shared.caller(made.token)
    thief.session = caller.session
    assert caller.session is not None
    refused(SessionExpired, "FAILED_PRECONDITION", "context.session", lambda: thief.match(b"k"))
    join = pb.JoinSessionRequest(token=caller.session.token, deadline_ms=1000)
    refused(SessionExpired, "FAILED_PRECONDITION", "context.session", lambda: thief("JoinSession", join))
    thief.close()


KEYED = ["Match", "Acquire", "Allocate", "Touch", "Pin", "Delete", "Stat"]


@pytest.mark.parametrize("method", KEYED)
@pytest.mark.parametrize(
    ("keys", "error", "field", "limit"),
    [
        (pb.Keys(lengths=pack("u16", [0])), KeySize, "keys[0]", "1 to 1024"),
        (pb.Keys(data=bytes(1025), lengths=pack("u16", [1025])), KeySize, "keys[0]", "1 to 1024"),
        (pb.Keys(data=bytes(1025), stride=1025), KeySize, "keys.stride", "1 to 1024"),
        (pb.Keys(), InvalidArgument, "keys", f"1 to {MAX_BATCH_KEYS}"),
        (pb.Keys(data=bytes(MAX_BATCH_KEYS + 1), stride=1), InvalidArgument, "keys", f"1 to {MAX_BATCH_KEYS}"),
        (pb.Keys(data=b"abc", stride=2), InvalidArgument, "keys.data", None),
        (pb.Keys(data=b"a", stride=1, groups=pack("u16", [1])), InvalidArgument, "keys.groups", "0 to 0"),
        (pb.Keys(data=b"a", stride=1, groups=b"\0"), InvalidArgument, "keys.groups", None),
        (pb.Keys(data=b"a", stride=1, scopes=pack("u32", [9])), PermissionDenied, "keys.scopes", None),
    ],
    ids=["empty key", "long key", "long stride", "none", "too many", "odd", "group", "cut column", "scope"],
)
def test_keys(
    caller: Caller, method: str, keys: pb.Keys, error: type[ForebayError], field: str, limit: str | None
) -> None:
    name = pb.DESCRIPTOR.services_by_name["Blocks"].methods_by_name[method].input_type.name
    status = "PERMISSION_DENIED" if error is PermissionDenied else "INVALID_ARGUMENT"
    request = getattr(pb, name)(context=caller.context(), keys=keys)
    found = refused(error, status, field, lambda: caller(method, request))
    assert limit is None or found.limit == limit


@pytest.mark.parametrize("method", ["Allocate", "Pin", "Delete"])
def test_duplicate_keys_where_they_matter(caller: Caller, method: str) -> None:
    assert caller.session is not None
    extra: dict[str, Any] = {}
    if method == "Allocate":
        extra = {"value_lengths": pack("u64", [1, 1, 1]), "host_nqn": caller.session.host_nqn}
    name = pb.DESCRIPTOR.services_by_name["Blocks"].methods_by_name[method].input_type.name
    request = getattr(pb, name)(context=caller.context(), keys=caller.keys(b"a", b"b", b"a"), **extra)
    refused(DuplicateKey, "INVALID_ARGUMENT", "keys[2]", lambda: caller(method, request))
    assert caller.match(b"a", b"a") == [Absent.code] * 2


@pytest.mark.parametrize(
    ("sizes", "error", "field"),
    [
        ([0], ValueSize, "length_bytes"),
        ([MAX_VALUE_BYTES + 1], ValueSize, "length_bytes"),
        ([2**63], ValueSize, "length_bytes"),
        ([1, 2], InvalidArgument, "value_lengths"),
        ([], ValueSize, "length_bytes"),
    ],
)
def test_value_sizes(caller: Caller, sizes: list[int], error: type[ForebayError], field: str) -> None:
    refused(error, "INVALID_ARGUMENT", field, lambda: caller.allocate(b"size", sizes=sizes))


def test_odd_and_largest_sizes_are_allowed(caller: Caller) -> None:
    reply = caller.allocate(b"odd1", b"odd2", sizes=[1, 4097])
    assert unpack("u16", reply.status, "status") == [OK, OK]
    assert all(n % 4096 == 0 for n in unpack("u64", reply.lengths, "lengths"))


def test_sizes_that_the_schema_does_not_have(shared: Daemon) -> None:
    grid = shared.caller()
    grid.open(schema=GRID)
    found = refused(ValueSize, "INVALID_ARGUMENT", "length_bytes", lambda: grid.allocate(b"k", sizes=[100]))
    assert found.limit == GRID.groups[0].layout().value_bytes
    grid.close()


@pytest.mark.parametrize(
    "changes",
    [{"host_nqn": "nqn.other"}, {"host_nqn": ""}, {"host_nqns": ["nqn.other"]}],
)
def test_hosts_that_did_not_join(caller: Caller, changes: dict[str, Any]) -> None:
    refused(InvalidArgument, "INVALID_ARGUMENT", "host_nqn", lambda: caller.allocate(b"host", **changes))


def test_hints_beyond_their_room(caller: Caller) -> None:
    found = refused(
        InvalidArgument,
        "INVALID_ARGUMENT",
        "describe",
        lambda: caller.allocate(b"hints", hints=pb.Hints(origin="x" * 5000)),
    )
    assert found.limit == 4096
    describe = pb.Describe(parents=caller.keys(b"a", b"b"))
    refused(InvalidArgument, "INVALID_ARGUMENT", "describe.parents", lambda: caller.allocate(b"h", describe=describe))
    describe = pb.Describe(token_hashes=b"12345")
    refused(
        InvalidArgument, "INVALID_ARGUMENT", "describe.token_hashes", lambda: caller.allocate(b"h", describe=describe)
    )


# --------------------------------------------------------------------------------------------------- commit


def test_commit_outside_the_grid(shared: Daemon) -> None:
    grid = shared.caller()
    grid.open(schema=GRID)
    reply = grid.allocate(b"grid", sizes=[GRID.groups[0].layout().value_bytes])
    one = {"tile_counts": pack("u16", [1])}

    def bad(sums: list[int], **columns: bytes) -> ForebayError:
        return refused(GridInvalid, "INVALID_ARGUMENT", "tiles", lambda: grid.commit(reply.write_ids, sums, **columns))

    assert bad([1], tiles=pack("u16", [4]), **one).limit == "0 to 3"
    bad([], tile_counts=pack("u16", [0]))
    # a grid that is not covered stays pending, whatever is said twice
    for tile in (0, 1, 2, 2):
        assert grid.commit(reply.write_ids, [tile], tiles=pack("u16", [tile]), **one) == [Pending.code]
    bad([9], tiles=pack("u16", [2]), **one)
    assert grid.match(b"grid") == [Absent.code]
    assert grid.commit(reply.write_ids, [3], tiles=pack("u16", [3]), **one) == [OK]
    assert grid.match(b"grid") == [OK]
    grid.close()


@pytest.mark.parametrize(
    ("ids", "sums", "rest", "field"),
    [
        (b"", [], {}, "checksums"),
        (b"short", [1], {}, "write_ids"),
        (bytes(16), [1, 2], {"tile_counts": pack("u16", [1])}, "tiles"),
        (bytes(16), [1], {"tile_counts": pack("u16", [1, 1])}, "tile_counts"),
        (bytes(16), [1], {"tile_counts": pack("u16", [2]), "tiles": pack("u16", [0])}, "checksums"),
    ],
)
def test_commit_columns_that_do_not_fit(
    caller: Caller, ids: bytes, sums: list[int], rest: dict[str, Any], field: str
) -> None:
    refused(InvalidArgument, "INVALID_ARGUMENT", field, lambda: caller.commit(ids, sums, **rest))


def test_commit_twice_and_unknown(caller: Caller) -> None:
    reply = caller.allocate(b"twice")
    sums = caller.zeros(reply, b"twice")
    assert caller.commit(reply.write_ids, sums) == [OK]
    assert caller.commit(reply.write_ids, sums) == [OK]
    assert caller.commit(reply.write_ids + bytes(16), [*sums, 1]) == [OK, WriteExpired.code]
    assert unpack("u16", caller.allocate(b"twice").status, "status") == [AlreadyExists.code]


def test_a_repeated_commit_of_blocks_with_different_grids(shared: Daemon) -> None:
    """Without tile counts a repeated commit cannot know its grids any more: it is answered all the same."""
    mixed = Schema("mixed", b"", GRID.hash, (GRID.groups[0], Schema.opaque().groups[0]))
    one = shared.caller()
    one.open(schema=mixed)
    keys = (BlockKey(b"a", 0), BlockKey(b"b", 1))
    reply = one.allocate(*keys, sizes=[GRID.groups[0].layout().value_bytes, 5])
    assert one.commit(reply.write_ids, [1, 2, 3, 4, 5]) == [OK] * 2
    assert one.commit(reply.write_ids, [1, 2, 3, 4, 5]) == [OK] * 2
    assert one.match(*keys) == [OK] * 2
    one.close()


# --------------------------------------------------------------------------------------------------- limits of state


def test_stale_generations(caller: Caller, shared: Daemon) -> None:
    caller.admin("CreateNamespace", pb.CreateNamespaceRequest(spec=pb.NamespaceSpec(name="t/generations")))
    old = shared.caller()
    old.open("t/generations", generation=1)
    reply = old.allocate(b"k")
    spec = pb.NamespaceSpec(name="t/generations", min_generation=2)
    caller.admin("UpdateNamespace", pb.UpdateNamespaceRequest(spec=spec, fields=["min_generation"]))
    found = refused(StaleGeneration, "FAILED_PRECONDITION", "context.generation", lambda: old.match(b"k"))
    assert found.limit == 2
    assert old.commit(reply.write_ids, [1]) == [StaleGeneration.code]
    refused(
        StaleGeneration,
        "FAILED_PRECONDITION",
        "generation",
        lambda: shared.caller().open("t/generations", generation=1),
    )
    spec.min_generation = 1
    lower = pb.UpdateNamespaceRequest(spec=spec, fields=["min_generation"])
    refused(StaleGeneration, "FAILED_PRECONDITION", "min_generation", lambda: caller.admin("UpdateNamespace", lower))
    old.close()


def test_quota_exceeded(caller: Caller, shared: Daemon) -> None:
    spec = pb.NamespaceSpec(name="t/quota", quota_bytes=2 * 4096, eviction="none")
    caller.admin("CreateNamespace", pb.CreateNamespaceRequest(spec=spec))
    one = shared.caller()
    one.open("t/quota")
    reply = one.allocate(b"a", b"b", b"c")
    assert unpack("u16", reply.status, "status") == [OK, OK, QuotaExceeded.code]
    assert unpack("u64", reply.lengths, "lengths") == [4096, 4096, 0]
    shown = caller.admin("ListNamespaces", pb.ListNamespacesRequest()).namespaces
    info = next(n for n in shown if n.spec.name == "t/quota")
    assert (info.used_bytes, info.pending_bytes) == (8192, 8192)
    one.close()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "noslash"}, "name"),
        ({"name": "a/b/c"}, "name"),
        ({"name": "a/" + "x" * 65}, "name"),
        ({"name": "../x"}, "name"),
        ({"name": "t/x", "durability": "maybe"}, "durability"),
        ({"name": "t/x", "eviction": "random"}, "eviction"),
        ({"name": "t/x", "quota_bytes": 2**63}, "quota_bytes"),
        ({"name": "t/x", "retention_ms": 2**63}, "retention_ms"),
    ],
)
def test_namespaces_that_cannot_be(caller: Caller, spec: dict[str, Any], field: str) -> None:
    request = pb.CreateNamespaceRequest(spec=pb.NamespaceSpec(**spec))
    refused(InvalidArgument, "INVALID_ARGUMENT", field, lambda: caller.admin("CreateNamespace", request))
    shown = caller.admin("ListNamespaces", pb.ListNamespacesRequest()).namespaces
    assert not [n for n in shown if n.spec.name in ("t/x", spec["name"])]


def test_administration_of_what_is_not_there(caller: Caller) -> None:
    admin = caller.admin
    grant = pb.Grant(namespace="default/default", rights=["read"])
    nowhere, nothing = pb.Grant(namespace="no/such", rights=["read"]), pb.NamespaceSpec(name="no/such")
    calls: list[tuple[str, Message, type[ForebayError], str]] = [
        ("DeleteNamespace", pb.DeleteNamespaceRequest(name="no/such"), NamespaceNotFound, "name"),
        ("UpdateNamespace", pb.UpdateNamespaceRequest(spec=nothing), NamespaceNotFound, "name"),
        ("DeletePrincipal", pb.DeletePrincipalRequest(name="nobody"), NotFound, "principal"),
        ("RotateToken", pb.RotateTokenRequest(name="nobody"), NotFound, "principal"),
        ("SetGrant", pb.SetGrantRequest(principal="nobody", grant=grant), NotFound, "principal"),
        ("SetGrant", pb.SetGrantRequest(principal="admin", grant=nowhere), NamespaceNotFound, "grant.namespace"),
    ]
    for method, request, error, field in calls:
        refused(error, "NOT_FOUND", field, functools.partial(admin, method, request))
    grant = pb.Grant(namespace="default/default", rights=["fly"])
    fly = pb.SetGrantRequest(principal="admin", grant=grant)
    refused(InvalidArgument, "INVALID_ARGUMENT", "rights", lambda: admin("SetGrant", fly))
    last = pb.DeletePrincipalRequest(name="admin")
    for principal in admin("ListPrincipals", pb.ListPrincipalsRequest()).principals:
        if principal.admin and principal.name != "admin":
            admin("DeletePrincipal", pb.DeletePrincipalRequest(name=principal.name))
    refused(InvalidArgument, "INVALID_ARGUMENT", "name", lambda: admin("DeletePrincipal", last))
    exists = pb.CreatePrincipalRequest(name="admin")
    refused(AlreadyExists, "ALREADY_EXISTS", "principal", lambda: admin("CreatePrincipal", exists))


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"limit": 10_001}, InvalidArgument, "limit"),
        ({"scope": 7}, PermissionDenied, "scope"),
        ({"group": 1}, InvalidArgument, "group"),
        ({"group": 70_000}, InvalidArgument, "group"),
        ({"prefix": bytes(1025)}, KeySize, "prefix"),
    ],
)
def test_listings_that_cannot_be(
    caller: Caller, changes: dict[str, Any], error: type[ForebayError], field: str
) -> None:
    status = "PERMISSION_DENIED" if error is PermissionDenied else "INVALID_ARGUMENT"
    refused(error, status, field, lambda: caller("List", pb.ListRequest(context=caller.context(), **changes)))


def test_streams_refuse_as_calls_do(caller: Caller) -> None:
    wait = pb.WaitRequest(context=caller.context(), keys=pb.Keys())
    refused(InvalidArgument, "INVALID_ARGUMENT", "keys", lambda: next(caller.stream("Wait", wait)))
    watch = pb.WatchRequest(context=caller.context(deadline_ms=0))
    refused(InvalidArgument, "INVALID_ARGUMENT", "context.deadline_ms", lambda: next(caller.stream("Watch", watch)))
