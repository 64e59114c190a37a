"""Blocks of engines on the command line, and why one of them was a miss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from forebay.cli.demo.node import DemoNode
from forebay.cli.exits import ABSENT, USAGE
from forebay.client import ClientOptions, Describe, Hints, connect
from forebay.ids import BlockKey
from forebay.schema import Group, HashAlgorithm, Schema
from tests.cli.shell import Shell
from tests.client.conftest import patient

GROUP = Group("full", (0, 1), 16, 2, 64, "float32", "test/vec")
ONE = Schema("engine", b"m" * 32, HashAlgorithm("h", 16), (GROUP,))
TWO = replace(ONE, groups=(replace(GROUP, format="test/amx"),))
VALUE = bytes(GROUP.layout().value_bytes)
HASH = bytes(range(32))
OPTIONS = patient(ClientOptions(deadline_ms=30_000))


@pytest.fixture
def stored(node: DemoNode) -> Iterator[None]:
    """A block of one engine; another one that has none."""
    with (
        connect(node.url, token=node.token, schema=TWO, options=OPTIONS),
        connect(node.url, token=node.token, schema=ONE, generation=4, scopes=("default", "t"), options=OPTIONS) as one,
    ):
        about = Describe(parents=[b"before"], block_tokens=16, adapter="lora")
        hints = Hints(session="s", priority_class=1)
        key = BlockKey(HASH, 0, one.scope_ids["t"])
        assert one.put(
            [BlockKey(HASH), key], [VALUE] * 2, hints=hints, describe=replace(about, parents=[b"before", b""])
        )[0].stored
        yield
        one.delete([BlockKey(HASH), key])


@pytest.mark.usefixtures("stored")
def test_blocks_of_an_engine(forebay: Shell) -> None:
    listed = {row["keyspace"]: row for row in forebay.json("keyspaces")["keyspaces"]}
    assert listed[ONE.keyspace.hex()] == {
        "keyspace": ONE.keyspace.hex(),
        "generation": 4,
        "engine": "engine",
        "model": (b"m" * 32).hex(),
        "block_tokens": 16,
        "groups": [{"kind": "full", "layers": 2, "dtype": "float32", "format": "test/vec"}],
    }
    assert f"{ONE.keyspace.hex()[:16]}  generation 4  engine" in forebay("keyspaces")
    engine = ("--keyspace", ONE.keyspace.hex()[:10])
    (row,) = forebay.json("ls", *engine)["keys"]
    assert row["key_hex"] == HASH.hex() and row["length_bytes"] == len(VALUE)
    (row,) = forebay.json("ls", *engine, "--scope", "t")["keys"]
    assert row["key_hex"] == HASH.hex()
    (row,) = forebay.json("stat", *engine, "--hex", HASH.hex())["keys"]
    assert row["describe"] == {"parent": b"before".hex(), "block_tokens": 16, "adapter": "lora", "token_hash": 0}
    assert row["hints"] == {"session": "s", "priority_class": 1}
    assert "described parent 6265666f7265" in forebay("stat", *engine, "--hex", HASH.hex())
    first = forebay("stat", *engine, "--scope", "t", "--hex", HASH.hex())
    (line,) = [line for line in first.splitlines() if "described" in line]
    assert "block_tokens 16" in line and "parent" not in line, "a chain's first block has none"
    assert forebay.json("match", *engine, "--hex", HASH.hex())["prefix"] == 1


@pytest.mark.usefixtures("stored")
def test_why_a_key_is_a_miss(forebay: Shell) -> None:
    asked = ("why", "--keyspace", TWO.keyspace.hex(), "--hex", HASH.hex(), "00")
    one, two = forebay.json(*asked, code=ABSENT)["keys"]
    assert one["reason"] == "other_keyspace" and one["differences"] == ["groups[0].format: test/amx, test/vec"]
    assert one["elsewhere"] == {"keyspace": ONE.keyspace.hex(), "generation": 4}
    assert two["reason"] == "absent" and two["elsewhere"] is None and two["differences"] == []
    text = forebay(*asked, code=ABSENT)
    assert f"it is in keyspace {ONE.keyspace.hex()[:16]} under generation 4" in text and "test/amx, test/vec" in text
    found = forebay.json("match", "--keyspace", TWO.keyspace.hex(), "--hex", HASH.hex(), code=ABSENT)
    assert found["elsewhere"] == one["elsewhere"] and found["keys"][0]["reason"] == "other_keyspace"
    assert (
        forebay.json("why", "--keyspace", ONE.keyspace.hex(), "--hex", HASH.hex())["keys"][0]["meaning"]
        == "it is stored"
    )


@pytest.mark.usefixtures("stored")
def test_a_keyspace_that_is_none_or_several(forebay: Shell) -> None:
    assert "no keyspace" in forebay("ls", "--keyspace", "zz", code=USAGE)
    assert "several" in forebay("ls", "--keyspace", "", code=USAGE)
    assert "no keyspace" in forebay("ls", "--keyspace", ONE.keyspace.hex(), "--generation", "9", code=USAGE)
