"""What perf and `forebay bench` measure with. No speed is judged."""

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.measure.machine import file_system, machine
from forebay.measure.redis_peer import BareRedis, RedisServer, missing_redis
from forebay.measure.samples import Interval, Sample, Side, cpu_s_per_gb, interleave, interval, value_at
from forebay.measure.tcp_peer import TcpPeer


def test_sides_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []

    def side(name: str) -> Side:
        def work() -> int:
            order.append(name)
            return len(order)

        return Side(
            name, work, before=lambda: order.append(f"before {name}"), after=lambda: order.append(f"after {name}")
        )

    samples = interleave([side("a"), side("b")], 2)
    turns = [word for word in order if word in "ab"]
    assert turns == ["a", "b", "b", "a", "a", "b"] and order[-2:] == ["after a", "after b"]
    assert [len(found) for found in samples.values()] == [2, 2]
    assert order.index("before a") < order.index("a") and samples["a"][0].wall_s > 0


def test_a_time_limit_ends_the_rounds_after_one() -> None:
    samples = interleave([Side("a", lambda: 1)], 1000, limit_s=0)
    assert len(samples["a"]) == 1


BURN = """
import sys, time
for _ in sys.stdin:
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    print(flush=True)
"""


def test_cpu_time_of_clients_and_servers() -> None:
    command = [sys.executable, "-c", BURN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        requests, answers = other.stdin, other.stdout

        def work() -> int:
            requests.write(b"\n")
            requests.flush()
            answers.readline()
            return 10**9

        (server,) = interleave([Side("a", work, servers=(other.pid,))], 1)["a"]
        (client,) = interleave([Side("a", work, clients=(other.pid,))], 1)["a"]
        assert server.server_cpu_s >= 0.05 and server.client_cpu_s >= 0
        assert client.client_cpu_s >= 0.05 and client.server_cpu_s == 0
        other.communicate()


def test_figures() -> None:
    assert value_at([3.0, 1.0, 2.0], 0.5) == 2.0 and value_at([1.0], 0.99) == 1.0 and value_at([1.0, 2.0], 1.0) == 2.0
    found = interval([1.0, 2.0, 3.0])
    assert found.median == 2.0 and 1.0 <= found.low <= found.median <= found.high <= 3.0
    assert Interval(1 / 3, 0, 1).as_json() == {"median": 0.3333, "low": 0.0, "high": 1.0}
    samples = [Sample(10**9, 0.5, 1.0, 2.0), Sample(10**9, 0.5, 3.0, 4.0)]
    assert cpu_s_per_gb(samples) == {"client": 2.0, "server": 3.0, "both": 5.0} and samples[0].gb_per_s == 2.0


def test_the_machine(tmp_path: Path) -> None:
    assert set(machine()) >= {"cpu", "cores", "memory_gib", "kernel", "python"}
    assert file_system(Path("/proc")) == "proc" and file_system(tmp_path) != "unknown"


def test_bare_tcp_gives_back_what_it_was_given() -> None:
    values = [memoryview(bytes([i]) * 4096) for i in range(4)]
    with TcpPeer(4 * 4096) as peer:
        peer.put(0, values)
        buffers = [memoryview(bytearray(4096)) for _ in range(2)]
        peer.get(2, buffers)
        assert [bytes(b) for b in buffers] == [bytes(v) for v in values[2:]]


@pytest.mark.skipif(missing_redis() is not None, reason=str(missing_redis()))
def test_bare_redis(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        redis = BareRedis(server.port)
        keys = [b"%d" % i for i in range(600)]
        redis.put(keys, [memoryview(b"value")] * len(keys))  # more pieces than one system call takes
        assert redis.count([*keys, b"none"]) == 600 and server.version.count(".") == 2
        buffer = memoryview(bytearray(5))
        redis.get([b"7"], [buffer])
        assert bytes(buffer) == b"value"
        with pytest.raises(ConnectionError):
            redis.get([b"none"], [buffer])
        redis.close()
        again = BareRedis(server.port)
        again.clear()
        assert again.count(keys) == 0
        again.close()
