"""What a client is told of keys that are absent, of keyspaces, and of what a block's writer said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.client import ClientOptions, Describe, Hints, connect
from forebay.errors import ProtocolError
from forebay.proto import forebay_pb2 as pb
from forebay.schema import Group, HashAlgorithm, Schema
from tests.client.conftest import NodeProcess, patient
from tests.client.scripted_node import ScriptedNode

GROUP = Group("full", (0, 1), 16, 2, 64, "float32", "test")
HERE = Schema("test", b"m" * 32, HashAlgorithm("h", 16), (GROUP,))
THERE = replace(HERE, model=b"n" * 32, groups=(replace(GROUP, format="other"),))
VALUE = bytes(GROUP.layout().value_bytes)
OPTIONS = patient(ClientOptions(deadline_ms=30_000))


def test_a_miss_says_where_the_block_is_instead(shared_node: NodeProcess) -> None:
    with (
        connect(shared_node.url, token=shared_node.token, schema=THERE, generation=3, options=OPTIONS) as there,
        connect(shared_node.url, token=shared_node.token, schema=HERE, options=OPTIONS) as here,
    ):
        assert there.put([b"1", b"2"], [VALUE] * 2)[0].stored
        found = here.match([b"1", b"2"])
        assert found.reasons == ("other_keyspace", "absent") and found.present == (False, False)
        assert found.elsewhere == (THERE.keyspace, 3)
        assert here.match([b"3"]).elsewhere is None
        assert there.match([b"1", b"2"]).elsewhere is None
        known = {(info.keyspace, info.generation): info.schema for info in here.keyspaces()}
        assert known[THERE.keyspace, 3] == THERE and known[HERE.keyspace, 0] == HERE
        assert HERE.differences(known[THERE.keyspace, 3]) == [
            f"model: {(b'm' * 32).hex()}, {(b'n' * 32).hex()}",
            "groups[0].format: test, other",
        ]
        there.delete([b"1", b"2"])


def test_schemas_that_are_alike_differ_in_nothing() -> None:
    assert HERE.differences(HERE) == []
    longer = replace(HERE, groups=(GROUP, replace(GROUP, layers=(2,))), draft=b"d" * 32)
    named = [line.partition(":")[0] for line in HERE.differences(longer)]
    assert "draft" in named and "groups[1].kind" in named and "groups[0].kind" not in named


def test_what_a_writer_said_of_a_block_is_told(shared_node: NodeProcess) -> None:
    with connect(shared_node.url, token=shared_node.token, options=OPTIONS) as client:
        hints = Hints(priority_class=2, session="of a user", retain_until_unix_ms=1 << 40, final=True)
        describe = Describe(parents=[b"", b"said-1"], block_tokens=16, token_hashes=[7, 8], adapter="a")
        client.put([b"said-1", b"said-2"], [b"x", b"y"], hints=hints, describe=describe)
        client.put([b"silent"], [b"z"])
        found = [stat.block for stat in client.stat([b"said-2", b"silent", b"none"])]
        assert found[0] is not None and found[1] is not None and found[2] is None
        assert found[0].describe == {"parent": b"said-1", "token_hash": 8, "block_tokens": 16, "adapter": "a"}
        assert found[0].hints == {
            "priority_class": 2,
            "session": "of a user",
            "retain_until_unix_ms": 1 << 40,
            "final": True,
        }
        assert found[1].describe == {} == found[1].hints
        client.delete([b"said-1", b"said-2", b"silent"])


@pytest.mark.parametrize(
    "reply",
    [
        pb.KeyspacesReply(schemas=[b"no schema"], keyspaces=bytes(32), generations=bytes(8)),
        pb.KeyspacesReply(schemas=[HERE.cbor], keyspaces=bytes(32), generations=bytes(8)),
        pb.KeyspacesReply(schemas=[HERE.cbor], keyspaces=HERE.keyspace, generations=bytes(9)),
    ],
)
def test_keyspaces_that_make_no_sense(reply: pb.KeyspacesReply) -> None:
    with ScriptedNode() as node, node.connect(options=OPTIONS) as client:
        node.answer["Keyspaces"] = lambda _: reply
        with pytest.raises(ProtocolError):
            client.keyspaces()


@pytest.mark.parametrize("about", [[b"\xff"], [b"\x01"], [b"\xa1\x61d\x01"], [b"", b""]])
def test_descriptions_that_make_no_sense(about: list[bytes]) -> None:
    zeros = {"status": bytes(2), "tiles": bytes(2), "pins": bytes(2), "leases": bytes(2), "volumes": bytes(4)}
    longs = {name: bytes(8) for name in ("value_lengths", "extent_lengths", "created_unix_ms", "offsets")}
    reply = pb.StatReply(**zeros, **longs, policies=bytes(1), write_ids=bytes(16), about=about)
    with ScriptedNode() as node, node.connect(options=OPTIONS) as client:
        node.answer["Stat"] = lambda _: reply
        assert [stat.reason for stat in client.stat([b"k"])] == ["protocol_error"]
