"""`forebay bench` at tiny sizes: that it measures and cleans up; no figure is judged."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from forebay.cli.bench.run import BenchOptions
from forebay.cli.demo.node import DemoNode
from forebay.cli.exits import INTERRUPTED, REFUSED, USAGE
from forebay.client import Admin
from forebay.errors import InvalidArgument
from forebay.measure.redis_peer import missing_redis
from tests.cli.shell import Shell

SMALL = [
    "--size",
    "64KiB",
    "--batch",
    "2",
    "--keys",
    "40",
    "--working-set",
    "512KiB",
    "--slot",
    "512KiB",
    "--rounds",
    "2",
]


def bench(forebay: Shell, *argv: str) -> dict[str, Any]:
    found: dict[str, Any] = forebay.json("bench", *SMALL, *argv)
    return found


def left(forebay: Shell) -> list[str]:
    return [n["name"] for n in forebay.json("namespace", "ls")["namespaces"]]


def test_everything_beside_its_references(forebay: Shell) -> None:
    found = bench(forebay, "--threads", "2")
    assert [(c["operation"], c["block_bytes"], c["batch"]) for c in found["comparisons"]] == [
        ("get", 65536, 2),
        ("put", 65536, 2),
        ("match", 4096, 40),
    ]
    sides = {"forebay", "tcp"} | (set() if missing_redis() else {"redis"})
    assert found["local"] and found["threads"] == 2 and found["durability"] == "flush"
    for comparison in found["comparisons"]:
        assert comparison["rounds"] == 2 and set(comparison["sides"]) == sides
        assert set(comparison["ratios"]) == sides - {"forebay"}
        for side in comparison["sides"].values():
            speed = side["keys_per_s" if comparison["operation"] == "match" else "gb_per_s"]
            assert 0 < speed["low"] <= speed["median"] <= speed["high"]
            assert 0 < side["p50_ms"] <= side["p99_ms"] and side["calls"] > 0
        if comparison["operation"] != "match":
            cpu = comparison["sides"]["forebay"]["cpu_s_per_gb"]
            assert cpu["client"] > 0 and cpu["server"] > 0
    assert left(forebay) == ["default/default"]


def test_processes_and_a_table(forebay: Shell) -> None:
    text = forebay("bench", *SMALL, "--processes", "2", "--op", "get", "--no-references", "--durability", "volatile")
    assert "get 64 KiB x 2" in text and "2 process(es) of 1 thread(s)" in text and "durability volatile" in text
    assert "tcp  " not in text and left(forebay) == ["default/default"]


def test_as_long_as_it_is_told(forebay: Shell) -> None:
    (comparison,) = bench(forebay, "--op", "match", "--no-references", "--seconds", "0.3")["comparisons"]
    assert 1 <= comparison["rounds"] < 1000


def test_a_token_that_may_create_no_namespace(forebay: Shell) -> None:
    token = forebay.json("principal", "create", "bench")["token"]
    forebay("principal", "grant", "bench", "default/default", "--rights", "read,write,delete")
    forebay("put", "mine", __file__)
    (comparison,) = bench(forebay, "--op", "put", "--no-references", "--token", token)["comparisons"]
    assert comparison["sides"]["forebay"]["cpu_s_per_gb"]["server"] is None
    assert [k["key"] for k in forebay.json("ls")["keys"]] == ["mine"]
    forebay("rm", "mine")


def test_a_token_that_may_not_delete_is_refused_before_anything_is_stored(forebay: Shell) -> None:
    token = forebay.json("principal", "create", "keeper")["token"]
    forebay("principal", "grant", "keeper", "default/default", "--rights", "read,write")
    told = forebay("bench", *SMALL, "--no-references", "--token", token, code=REFUSED)
    assert "'delete'" in told and forebay.json("ls")["keys"] == []


def test_a_node_without_room_is_refused(forebay: Shell) -> None:
    text = forebay("bench", "--working-set", "1GiB", code=REFUSED)
    assert "CapacityShort" in text and "--working-set" in text and left(forebay) == ["default/default"]


def test_a_working_set_that_is_too_small(forebay: Shell) -> None:
    assert "working set of 32 MiB" in forebay("bench", "--working-set", "1MiB", "--size", "2MiB", code=USAGE)


def test_sizes_of_any_number_of_bytes(forebay: Shell) -> None:
    (comparison,) = bench(forebay, "--op", "get", "--size", "4097", "--rounds", "1")["comparisons"][1:]
    assert comparison["block_bytes"] == 4097
    assert "ValueSize" in forebay("bench", "--op", "get", "--size", "65MiB", code=USAGE)
    assert "ValueSize" in forebay("bench", "--op", "get", "--size", "0", code=USAGE)


def test_space_that_is_needed() -> None:
    options = BenchOptions(("get", "put"), (1 << 20,), (4,), 10, 64 << 20, 32 << 20, 3, None, 1, 2, False, "flush")
    get, put = options.works()
    assert (get.count, get.calls, put.slot_bytes) == (32, 4, 16 << 20)
    assert options.need_bytes() == (64 << 20) + (128 << 20)
    with pytest.raises(InvalidArgument):
        list(BenchOptions(("get",), (1 << 20,), (4,), 10, 1 << 20, 1 << 20, 3, None, 1, 2, False, "flush").works())


def test_interrupted_it_leaves_nothing(node: DemoNode, forebay: Shell) -> None:
    command = [sys.executable, "-m", "forebay.cli.main", "--data", str(node.data), "bench", *SMALL, "--seconds", "60"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ, start_new_session=True
    ) as running:
        try:
            with Admin(node.url, token=node.token) as admin:
                deadline = time.monotonic() + 30
                while not any(s.namespace.startswith("forebay-bench/") for s in admin.list_sessions()):
                    assert time.monotonic() < deadline and running.poll() is None
                    time.sleep(0.02)
            os.killpg(running.pid, signal.SIGINT)  # as a terminal does
            assert running.wait(30) == INTERRUPTED
            assert running.stderr is not None
            told = running.stderr.read().decode()
            assert "Traceback" not in told and told.splitlines()[-1] == "forebay: interrupted"
        finally:
            running.kill()
    assert left(forebay) == ["default/default"]
