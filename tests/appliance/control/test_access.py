"""Who may do what: every call with every right, scopes, and what becomes of rights that are taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from forebay.errors import OK, Absent, NamespaceNotFound, PermissionDenied, SessionExpired, Unauthenticated
from forebay.ids import BlockKey
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import pack, unpack
from tests.appliance.control.peer import Caller, Daemon, failure

RIGHTS = ("read", "write", "delete", "pin")
NEEDS: dict[str, str | None] = {
    "Match": "read",
    "Keyspaces": "read",
    "Acquire": "read",
    "Touch": "read",
    "Stat": "read",
    "List": "read",
    "Pin": "read",
    "Pin persistent": "pin",
    "Allocate": "write",
    "Commit": "write",
    "Delete": "delete",
    "Release": None,
    "Abort": None,
    "Heartbeat": None,
    "Wait": "read",
    "Watch": "read",
}
"""The right that each data call needs. A call that is not here fails the test below."""


def attempts(caller: Caller) -> dict[str, Callable[[], Any]]:
    """Each data call once."""
    context, keys = caller.context(), caller.keys(b"k")
    short, stream = caller.context(deadline_ms=200), caller.stream
    return {
        "Match": lambda: caller.match(b"k"),
        "Keyspaces": lambda: caller("Keyspaces", pb.KeyspacesRequest(context=context)),
        "Acquire": lambda: caller("Acquire", pb.AcquireRequest(context=context, keys=keys)),
        "Touch": lambda: caller("Touch", pb.TouchRequest(context=context, keys=keys)),
        "Stat": lambda: caller("Stat", pb.StatRequest(context=context, keys=keys)),
        "List": lambda: caller("List", pb.ListRequest(context=context)),
        "Pin": lambda: caller("Pin", pb.PinRequest(context=context, keys=keys, pinned=True)),
        "Pin persistent": lambda: caller(
            "Pin", pb.PinRequest(context=context, keys=keys, pinned=True, persistent=True)
        ),
        "Allocate": lambda: caller.allocate(b"k"),
        "Commit": lambda: caller.commit(bytes(16), [1]),
        "Delete": lambda: caller("Delete", pb.DeleteRequest(context=context, keys=keys)),
        "Release": lambda: caller("Release", pb.ReleaseRequest(context=context, leases=pack("u64", [1]))),
        "Abort": lambda: caller("Abort", pb.AbortRequest(context=context, write_ids=bytes(16))),
        "Heartbeat": lambda: caller("Heartbeat", pb.HeartbeatRequest(context=context)),
        "Wait": lambda: list(stream("Wait", pb.WaitRequest(context=short, keys=keys))),
        "Watch": lambda: list(stream("Watch", pb.WatchRequest(context=short))),
    }


@pytest.fixture(scope="module", params=[False, True], ids=["unary", "stream"])
def streams(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def principal(shared: Daemon, caller: Caller) -> Iterator[Callable[..., Caller]]:
    """Makes a principal with grants and its connection."""
    made: list[tuple[str, Caller]] = []

    def one(name: str, *grants: pb.Grant) -> Caller:
        token = caller.admin("CreatePrincipal", pb.CreatePrincipalRequest(name=name)).token
        for grant in grants:
            caller.admin("SetGrant", pb.SetGrantRequest(principal=name, grant=grant))
        made.append((name, shared.caller(token, streams=caller.streams)))
        return made[-1][1]

    yield one
    for name, connection in made:
        connection.close()
        try:
            caller.admin("DeletePrincipal", pb.DeletePrincipalRequest(name=name))
        except grpc.RpcError as error:
            assert failure(error)[0] == "NOT_FOUND"


def test_every_data_call_is_in_the_table(caller: Caller) -> None:
    calls = {m.name for m in pb.DESCRIPTOR.services_by_name["Blocks"].methods}
    assert {name.split()[0] for name in NEEDS} == calls - {"OpenSession", "JoinSession", "CloseSession", "Calls"}
    assert attempts(caller).keys() == NEEDS.keys()


@pytest.mark.parametrize("right", RIGHTS)
def test_a_right_allows_its_calls_and_no_others(principal: Callable[..., Caller], right: str) -> None:
    one = principal(f"only-{right}", pb.Grant(namespace="default/default", rights=[right]))
    opened = one.open()
    assert opened.rights == right
    for name, call in attempts(one).items():
        if NEEDS[name] in (None, right):
            call()
            continue
        with pytest.raises(grpc.RpcError) as caught:
            call()
        status, error = failure(caught.value)
        assert (type(error), status, error.field) == (PermissionDenied, "PERMISSION_DENIED", "rights"), name


ADMIN_CALLS = [m.name for m in pb.DESCRIPTOR.services_by_name["Admin"].methods]


@pytest.mark.parametrize("method", ADMIN_CALLS)
def test_administration_is_for_administrators(principal: Callable[..., Caller], method: str) -> None:
    one = principal("everything", pb.Grant(namespace="*", rights=list(RIGHTS), scopes=["*"]))
    with pytest.raises(grpc.RpcError) as caught:
        one.raw(f"/forebay.v1.Admin/{method}", b"")
    assert failure(caught.value)[0] == "PERMISSION_DENIED"


def test_who_has_no_right_does_not_learn_that_a_namespace_exists(principal: Callable[..., Caller]) -> None:
    one = principal("nothing")
    told = []
    for name in ("default/default", "default/no-such"):
        with pytest.raises(grpc.RpcError) as caught:
            one.open(name)
        status, error = failure(caught.value)
        assert isinstance(error, NamespaceNotFound) and status == "NOT_FOUND"
        told.append(str(error).replace(name, ""))
    assert told[0] == told[1]


def test_scopes(principal: Callable[..., Caller]) -> None:
    one = principal("scoped", pb.Grant(namespace="default/default", rights=["read", "write"], scopes=["a", "b"]))
    for scopes in ([], ["default"], ["a", "c"]):
        with pytest.raises(grpc.RpcError) as caught:
            one.open(scopes=scopes)
        assert isinstance(failure(caught.value)[1], PermissionDenied)
    ids = unpack("u32", one.open(scopes=["a", "b"]).scope_ids, "scope_ids")
    assert len(set(ids)) == 2 and 0 not in ids
    assert one.put(BlockKey(b"k", 0, ids[0])) == [OK]
    assert one.match(BlockKey(b"k", 0, ids[0]), BlockKey(b"k", 0, ids[1])) == [OK, Absent.code]
    with pytest.raises(grpc.RpcError) as caught:
        one.match(b"k")  # the default scope was not granted
    assert isinstance(failure(caught.value)[1], PermissionDenied)
    again = principal("other-scope", pb.Grant(namespace="default/default", rights=["read"], scopes=["*"]))
    assert unpack("u32", again.open(scopes=["b", "a"]).scope_ids, "scope_ids") == ids[::-1]


def test_rights_do_not_spill_from_one_scope_into_another(principal: Callable[..., Caller]) -> None:
    one = principal(
        "two-grants",
        pb.Grant(namespace="*", rights=["read"], scopes=["shared"]),
        pb.Grant(namespace="default/default", rights=["write"], scopes=["own"]),
    )
    assert one.open(scopes=["shared"]).rights == "read"
    assert one.open(scopes=["own"]).rights == "write"
    assert one.open(scopes=["own", "shared"]).rights == ""


def test_rights_taken_away_end_at_once(principal: Callable[..., Caller], caller: Caller) -> None:
    grant = pb.Grant(namespace="default/default", rights=["read", "write"])
    one = principal("fallen", grant)
    one.open()
    assert one.put(b"fallen") == [OK]
    watch = one.stream("Watch", pb.WatchRequest(context=one.context(deadline_ms=20_000)))
    next(watch)
    grant.rights[:] = ["read"]
    caller.admin("SetGrant", pb.SetGrantRequest(principal="fallen", grant=grant))
    with pytest.raises(grpc.RpcError) as caught:
        one.allocate(b"more")
    assert isinstance(failure(caught.value)[1], PermissionDenied)
    assert one.match(b"fallen") == [OK]
    caller.admin("SetGrant", pb.SetGrantRequest(principal="fallen", grant=pb.Grant(namespace="default/default")))
    with pytest.raises(grpc.RpcError) as caught:
        one.match(b"fallen")
    assert isinstance(failure(caught.value)[1], SessionExpired)
    caller.put(b"secret")
    with pytest.raises(grpc.RpcError) as caught:
        for reply in watch:  # a stream that was open tells nothing more either
            assert not [e for e in reply.events if e.key == b"secret"]
    assert isinstance(failure(caught.value)[1], SessionExpired)


def test_a_rotated_token_and_a_deleted_principal_are_out(principal: Callable[..., Caller], caller: Caller) -> None:
    one = principal("rotated", pb.Grant(namespace="default/default", rights=["read"]))
    one.open()
    caller.admin("RotateToken", pb.RotateTokenRequest(name="rotated"))
    with pytest.raises(grpc.RpcError) as caught:
        one.match(b"k")
    assert isinstance(failure(caught.value)[1], Unauthenticated)
    other = principal("deleted", pb.Grant(namespace="default/default", rights=["read"]))
    other.open()
    caller.admin("DeletePrincipal", pb.DeletePrincipalRequest(name="deleted"))
    with pytest.raises(grpc.RpcError) as caught:
        other.match(b"k")
    assert isinstance(failure(caught.value)[1], Unauthenticated)


def test_tokens_are_kept_as_hashes(shared: Daemon) -> None:
    token = shared.token.encode()
    files = [p for p in shared.data.rglob("*") if p.is_file() and p.name != "admin.token" and p.suffix != ".vol"]
    assert files and not [p for p in files if token in p.read_bytes()]
    assert (shared.data / "admin.token").stat().st_mode & 0o777 == 0o600
