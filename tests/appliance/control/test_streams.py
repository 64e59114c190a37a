"""Wait and Watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import cbor2
import grpc
import pytest

from forebay.appliance.control.calls import taken
from forebay.errors import OK, Absent, DeadlineExceeded, Unavailable
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import unpack
from tests.appliance.control.peer import Caller, Daemon


def outcomes(replies: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    for reply in replies:
        rows, codes = unpack("u32", reply.indices, "indices"), unpack("u16", reply.status, "status")
        found |= dict(zip(rows, codes, strict=True))
    return found


def test_a_client_that_goes_away_while_it_is_answered_is_no_fault_of_the_node() -> None:
    async def gone() -> None:
        raise grpc.aio.BaseError

    with pytest.raises(Unavailable):
        asyncio.run(taken(gone()))


def test_wait_tells_what_is_there_and_wakes_on_commit(caller: Caller, shared: Daemon) -> None:
    caller.put(b"w0")
    pending = caller.allocate(b"w1")
    other = shared.caller()
    other.open()
    wait = pb.WaitRequest(context=other.context(), keys=other.keys(b"w0", b"w1", b"w1"))
    replies = other.stream("Wait", wait)
    assert outcomes([next(replies)]) == {0: OK}
    assert caller.commit(pending.write_ids, caller.zeros(pending, b"w1")) == [OK]
    assert outcomes(replies) == {1: OK, 2: OK}
    other.close()


@pytest.mark.parametrize("how", ["abort", "close"])
def test_wait_wakes_when_the_producer_is_gone(caller: Caller, shared: Daemon, how: str) -> None:
    key = b"dead-" + how.encode()
    producer = shared.caller()
    opened = producer.open()
    pending = producer.allocate(key)
    there = b"there-" + how.encode()
    wait = pb.WaitRequest(context=caller.context(), keys=caller.keys(there, key))
    caller.put(there)
    replies = caller.stream("Wait", wait)
    assert outcomes([next(replies)]) == {0: OK}
    if how == "abort":
        abort = pb.AbortRequest(
            context=producer.context(), write_ids=pending.write_ids, quiesced=True, host_nqn=opened.host_nqn
        )
        assert producer("Abort", abort).aborted == 1
    else:
        producer("CloseSession", pb.CloseSessionRequest(context=producer.context()))
    assert outcomes(replies) == {1: Absent.code}
    producer.close()


def test_wait_ends_at_its_deadline(caller: Caller) -> None:
    wait = pb.WaitRequest(context=caller.context(deadline_ms=50), keys=caller.keys(b"never"))
    assert outcomes(caller.stream("Wait", wait)) == {0: DeadlineExceeded.code}


def test_watch_sees_every_change_in_order(caller: Caller, shared: Daemon) -> None:
    watcher = shared.caller()
    watcher.open()
    replies = watcher.stream("Watch", pb.WatchRequest(context=watcher.context()))
    log = next(replies).log
    describe = pb.Describe(parents=caller.keys(b"root"), block_tokens=16)
    reply = caller.allocate(b"e1", sizes=[10], describe=describe)
    assert caller.commit(reply.write_ids, caller.zeros(reply, b"e1", size=10)) == [OK]
    caller("Delete", pb.DeleteRequest(context=caller.context(), keys=caller.keys(b"e1")))
    events = _take(replies, 2)
    stored, removed = events
    assert (stored.kind, stored.key, stored.value_length) == ("stored", b"e1", 10)
    assert caller.session is not None and stored.keyspace == caller.session.keyspace
    told = cbor2.loads(stored.describe)
    assert (told["parent"], told["block_tokens"]) == (b"root", 16)
    assert (removed.kind, removed.key, removed.reason) == ("removed", b"e1", "deleted")
    assert removed.sequence > stored.sequence
    # again from where the first one was: nothing is missed, nothing comes twice
    again = pb.WatchRequest(context=watcher.context(), after_sequence=stored.sequence, log=log)
    assert _take(watcher.stream("Watch", again), 1) == [removed]
    watcher.close()


def test_watch_of_another_log_or_a_gap_asks_for_a_snapshot(caller: Caller) -> None:
    caller.put(b"gap")
    first = next(caller.stream("Watch", pb.WatchRequest(context=caller.context())))
    for after, log in ((5, first.log + 1), (10**9, first.log)):
        request = pb.WatchRequest(context=caller.context(), after_sequence=after, log=log)
        (event,) = _take(caller.stream("Watch", request), 1)
        assert event.kind == "resync"


def test_watch_after_a_restart_asks_for_a_snapshot(make: Callable[..., Daemon]) -> None:
    daemon = make().start()
    caller = daemon.caller()
    caller.open()
    replies = caller.stream("Watch", pb.WatchRequest(context=caller.context()))
    log = next(replies).log
    caller.put(b"k")
    (event,) = _take(replies, 1)
    daemon.kill()
    with pytest.raises(grpc.RpcError):
        list(replies)
    caller.close()
    daemon.start()
    caller = daemon.caller()
    caller.open()
    request = pb.WatchRequest(context=caller.context(), after_sequence=event.sequence, log=log)
    (resync,) = _take(caller.stream("Watch", request), 1)
    assert resync.kind == "resync"
    assert caller("List", pb.ListRequest(context=caller.context())).keys.data == b"k"
    caller.close()


def test_watch_sees_only_its_scopes(caller: Caller, shared: Daemon) -> None:
    watcher = shared.caller()
    (scope,) = unpack("u32", watcher.open(scopes=["watched"]).scope_ids, "scope_ids")
    replies = watcher.stream("Watch", pb.WatchRequest(context=watcher.context(deadline_ms=300)))
    caller.put(b"not-yours")
    assert scope and not [e for reply in replies for e in reply.events]
    watcher.close()


def _take(replies: Any, count: int) -> list[pb.Event]:
    events: list[pb.Event] = []
    while len(events) < count:
        events += next(replies).events
    assert len(events) == count
    return events
