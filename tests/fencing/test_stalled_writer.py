"""A writer stalls, its extent goes to another client, and then its write arrives (design §6.4).

The write is whole and on its way (`Wire`) when the writer's session gives the plan up, by another of its processes:
that one cannot speak for it. Two defences stand: its controllers are torn down, and its grant is revoked. Each alone
is enough.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from forebay.client import Client, NvmeTcpOptions, WritePlan
from forebay.proto import forebay_pb2 as pb
from tests.fencing.conftest import OPTIONS, PAIR, PRODUCT, Node, Out, got, out, place, take, warm
from tests.fencing.wire import COMMAND_BYTES, Wire

STALE, FRESH = b"\xaa" * 4096, b"\xbb" * 4096


@dataclass(frozen=True)
class Seen:
    late_write: str
    media: bytes
    read: tuple[str, bytes]


SOUND = (FRESH, ("ok", FRESH))
HARM = (STALE, ("checksum_mismatch", b""))


@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        pytest.param(PRODUCT, Seen("connection_lost", *SOUND), id="product"),
        pytest.param(out("grants"), Seen("connection_lost", *SOUND), id="teardown alone"),
        pytest.param(out("teardown"), Seen("write_fenced", *SOUND), id="grants alone"),
        pytest.param(out("teardown", "grants"), Seen("write_expired", *HARM), id="neither"),
    ],
)
def test_given_to_another(node: Node, wire: Wire, removed: Out, seen: Seen) -> None:
    with node.client(wire=wire) as writer, node.client(join=writer.join_token) as leader, node.client() as other:
        warm(writer)
        plan = writer.allocate([b"slow"], lengths=[len(STALE)])
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(writer.put_tiles, plan, None, [STALE])
            wire.await_kept("out", COMMAND_BYTES + len(STALE))
            assert leader.abort(plan) == 1
            key = take(other, place(plan), FRESH)
            wire.deliver("out")
            (late,) = writing.result(60)
        assert Seen(late.reason, node.media(place(plan), 4096), got(other, key)) == seen


def give_up(writer: Client, plan: WritePlan) -> None:
    """Abort as a process that says, and is wrong, that all of its commands have completed."""
    view, rpc = writer._session.view, writer._session.rpc
    request = pb.AbortRequest(
        context=view.context(60_000), write_ids=plan.writes[0].write_id, quiesced=True, host_nqn=view.host.nqn
    )
    assert rpc.blocks.Abort(request, timeout=60, metadata=rpc._named()).aborted == 1


@pytest.mark.fencing
@pytest.mark.parametrize(
    ("removed", "seen"),
    [
        pytest.param(PRODUCT, Seen("write_fenced", *SOUND), id="product"),
        pytest.param(out("tags"), Seen("write_expired", *HARM), id="no tags"),
    ],
)
def test_given_to_the_same_writer_again(node: Node, wire: Wire, removed: Out, seen: Seen) -> None:
    """Its new grant names the same host and the same place: only the tag tells the late write from those that may."""
    two = replace(OPTIONS, nvme_tcp=NvmeTcpOptions(connections=2, call_connections=1))
    with node.client(wire=wire, options=two, schema=PAIR) as writer:
        warm(writer, 8192)
        plan = writer.allocate([b"slow"])
        wire.hold("out")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(writer.put_tiles, plan, [0], [STALE])
            wire.await_kept("out", COMMAND_BYTES + len(STALE))
            give_up(writer, plan)
            fresh = writer.allocate([b"fresh"])
            assert place(fresh) == place(plan)
            assert writer.put_tiles(fresh, [0], [FRESH])[0].reason == "pending"
            wire.deliver("out")
            (late,) = writing.result(60)
        assert writer.put_tiles(fresh, [1], [FRESH])[0].reason == "ok"
        reason, value = got(writer, b"fresh")
        assert Seen(late.reason, node.media(place(plan), 4096), (reason, value[:4096])) == seen
