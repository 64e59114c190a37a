"""The commands against a running node."""

import io
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forebay.cli.demo.node import DemoNode
from forebay.cli.exits import ABSENT, OK, REFUSED, UNAVAILABLE, USAGE
from forebay.cli.main import run
from forebay.client import Client, ClientOptions, StatResult, connect
from forebay.measure.machine import file_system
from tests.cli.shell import Shell
from tests.client.conftest import eventually, patient


def test_a_file_goes_in_and_comes_out(forebay: Shell, tmp_path: Path) -> None:
    value = os.urandom(300_001)
    (tmp_path / "in").write_bytes(value)
    assert "stored files/a (293 KiB)" in forebay("put", "files/a", str(tmp_path / "in"))
    assert forebay("get", "files/a", str(tmp_path / "out")) == ""
    assert (tmp_path / "out").read_bytes() == value
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert "stored already" in forebay("put", "files/a", str(tmp_path / "in"))
    again = forebay.json("put", "files/a", str(tmp_path / "in"))
    assert again == {
        "key": "files/a",
        "key_hex": b"files/a".hex(),
        "stored": False,
        "present": True,
        "length_bytes": len(value),
    }


def test_pipes(node: DemoNode) -> None:
    command = [sys.executable, "-m", "forebay.cli.main", "--data", str(node.data)]
    value = os.urandom(100_000)
    subprocess.run([*command, "put", "piped", "-"], input=value, check=True, timeout=60, capture_output=True)
    done = subprocess.run([*command, "get", "piped", "-"], check=True, timeout=60, capture_output=True)
    assert done.stdout == value and done.stderr == b""


def test_standard_input_over_the_limit(forebay: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return bytes(size)

    class Stdin:
        buffer = Endless()

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert "64 MiB" in forebay("put", "endless", "-", code=USAGE)
    assert forebay.json("match", "endless", code=ABSENT)["prefix"] == 0


def test_get_of_an_absent_key_leaves_the_file_alone(forebay: Shell, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"before")
    forebay("get", "absent", str(tmp_path / "out"), code=ABSENT)
    assert (tmp_path / "out").read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1
    forebay("get", "absent", "-", code=ABSENT)


def test_get_keeps_what_stands_at_its_path(forebay: Shell, tmp_path: Path) -> None:
    put(forebay, tmp_path, "kept", value=b"new")
    file, link, fifo, loose = (tmp_path / name for name in ("file", "link", "fifo", "loose"))
    file.write_bytes(b"old")
    file.chmod(0o600)
    link.symlink_to("file")
    forebay("get", "kept", str(link))
    assert link.is_symlink() and file.read_bytes() == b"new" and stat.S_IMODE(file.stat().st_mode) == 0o600
    loose.symlink_to("made")
    forebay("get", "kept", str(loose))
    assert loose.is_symlink() and (tmp_path / "made").read_bytes() == b"new"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        forebay("get", "kept", str(fifo))
        assert os.read(reader, 100) == b"new" and fifo.is_fifo()
    finally:
        os.close(reader)
    forebay("get", "kept", "/dev/null")
    assert Path("/dev/null").is_char_device()
    assert "No space left" in forebay("get", "kept", "/dev/full", code=USAGE)
    assert {p.name for p in tmp_path.iterdir()} == {"file", "link", "fifo", "loose", "made", "value"}


def put(forebay: Shell, tmp_path: Path, *keys: str, value: bytes = b"value") -> None:
    (tmp_path / "value").write_bytes(value)
    for key in keys:
        forebay("put", key, str(tmp_path / "value"))


def test_match(forebay: Shell, tmp_path: Path) -> None:
    put(forebay, tmp_path, "m/0", "m/1", "m/3")
    found = forebay.json("match", "m/0", "m/1", "m/2", "m/3", code=ABSENT)
    assert [k["present"] for k in found["keys"]] == [True, True, False, True]
    assert [k["reason"] for k in found["keys"]] == ["ok", "ok", "absent", "ok"]
    assert found["prefix"] == 2 and found["present_bytes"] == 15 and found["load_ms"] >= 0
    assert "the first 2 of 2 are stored" in forebay("match", "m/0", "m/1")


def test_ls(forebay: Shell, tmp_path: Path) -> None:
    put(forebay, tmp_path, "l/2", "l/1", "other")
    assert [k["key"] for k in forebay.json("ls", "l/")["keys"]] == ["l/1", "l/2"]
    assert [k["key"] for k in forebay.json("ls", "l/", "--limit", "1")["keys"]] == ["l/1"]
    assert "5 B" in forebay("ls", "l/")
    assert {"l/1", "l/2", "other"} <= {k["key"] for k in forebay.json("ls")["keys"]}
    assert forebay.json("ls", "nothing/")["keys"] == []


def test_keys_in_hexadecimal(forebay: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "value").write_bytes(b"x")
    forebay("put", "--hex", "00ff00", str(tmp_path / "value"))
    (listed,) = forebay.json("ls", "--hex", "00")["keys"]
    assert listed["key"] is None and listed["key_hex"] == "00ff00"
    assert "0x00ff00" in forebay("ls", "--hex", "00")
    assert forebay.json("match", "--hex", "0x00ff00")["prefix"] == 1
    assert run(["get", "0x00ff00", str(tmp_path / "out")]) == ABSENT
    assert "--hex" in capsys.readouterr().err
    for command in ("match", "stat", "rm"):
        assert run([command, "0x00ff00"]) == ABSENT
        assert "--hex" in capsys.readouterr().err
        assert run([command, "00ff00"]) == ABSENT
        assert capsys.readouterr().err == ""
    assert forebay("match", "0x00ff00", code=ABSENT).startswith("absent               0x3078303066663030")


def test_lines_of_keys_are_never_folded(forebay: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    long = "k" * 900
    put(forebay, tmp_path, long)
    for line in (forebay("match", long), forebay("stat", long), forebay("put", long, str(tmp_path / "value"))):
        assert long in line


def test_stat(forebay: Shell, tmp_path: Path) -> None:
    put(forebay, tmp_path, "s", value=b"x" * 5000)
    one, two = forebay.json("stat", "s", "t", code=ABSENT)["keys"]
    assert one["present"] and not two["present"]
    assert (one["length_bytes"], one["tiles"], one["durability"], one["pins"]) == (5000, 1, "flush", 0)
    assert one["extent_bytes"] >= 8192 and one["extent_bytes"] % 4096 == 0 and one["offset_bytes"] % 4096 == 0
    assert one["transport"] == "tcp"
    assert "5000 bytes" in forebay("stat", "s")
    assert "read by  tcp (127.0.0.1:" in forebay("stat", "s")
    assert forebay.json("stat", "s", "--transport", "tcp")["keys"][0]["transport"] == "tcp"


@pytest.mark.parametrize(("kind", "why"), [("rdma", "the node offers no NVMe/RDMA"), ("block", "is it connected?")])
def test_what_no_transport_reaches_is_said(
    forebay: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, why: str
) -> None:
    """In one line: neither node nor drive is to blame, and no device is shown that is not there."""
    put(forebay, tmp_path, "no-way", value=b"x" * 5000)
    capsys.readouterr()
    assert run(["get", "no-way", str(tmp_path / "got"), "--transport", kind]) == UNAVAILABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert "no transport that is allowed here reaches volume" in line
    assert f"not by {kind}: " in line and why in line
    assert f"read by  no transport; not by {kind}: " in forebay("stat", "no-way", "--transport", kind)
    assert forebay.json("stat", "no-way", "--transport", kind)["keys"][0]["transport"] == "none"
    wrote = run(["put", "no-way-either", str(tmp_path / "value"), "--transport", kind])
    assert wrote == (OK if kind == "block" else UNAVAILABLE)  # which only reads: what writes is another


def test_one_kind_of_transport_alone(forebay: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such way here, so nothing is read; the same by the environment."""
    put(forebay, tmp_path, "one-kind", value=b"x" * 5000)
    monkeypatch.setenv("FOREBAY_TRANSPORT", "rdma")
    assert run(["get", "one-kind", str(tmp_path / "got")]) == UNAVAILABLE
    assert run(["get", "one-kind", str(tmp_path / "got"), "--transport", "auto"]) == 0
    monkeypatch.setenv("FOREBAY_TRANSPORT", "carrier pigeon")
    assert run(["get", "one-kind", str(tmp_path / "got")]) == USAGE


def test_sessions_say_by_what_they_read(forebay: Shell, node: DemoNode) -> None:
    with connect(
        node.url, token=(node.data / "admin.token").read_text().strip(), options=patient(ClientOptions(client="me"))
    ):

        def said() -> bool:
            found = forebay.json("sessions")["sessions"]
            return any(one["client"] == "me" and one["transports"] == ["tcp"] for one in found)

        eventually(said, "a heartbeat has told")
        assert "reads by" in forebay("sessions")


def test_stat_of_a_node_that_went_away_is_no_miss(
    node: DemoNode, forebay: Shell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "stat", lambda _client, keys: [StatResult("unavailable")] * len(keys))
    assert run(["stat", "s", "t"]) == UNAVAILABLE
    assert capsys.readouterr().out == "s\n  unavailable\nt\n  unavailable\n"


def test_rm(forebay: Shell, tmp_path: Path) -> None:
    put(forebay, tmp_path, "r")
    outcome = forebay.json("rm", "r", "never", code=ABSENT)["keys"]
    assert [(k["ok"], k["reason"]) for k in outcome] == [(True, "ok"), (False, "absent")]
    forebay("match", "r", code=ABSENT)
    put(forebay, tmp_path, "r", value=b"another value")
    assert forebay.json("stat", "r")["keys"][0]["length_bytes"] == 13


def test_pins_outlive_the_command(forebay: Shell, tmp_path: Path) -> None:
    put(forebay, tmp_path, "p")
    before = forebay.json("namespace", "show", "default/default")["pinned_bytes"]
    assert forebay("pin", "p").startswith("pinned")
    assert forebay.json("namespace", "show", "default/default")["pinned_bytes"] > before
    assert forebay.json("stat", "p")["keys"][0]["pins"] == 1
    assert forebay("unpin", "p").startswith("unpinned")
    assert forebay.json("stat", "p")["keys"][0]["pins"] == 0
    assert forebay.json("namespace", "show", "default/default")["pinned_bytes"] == before
    assert forebay("pin", "never", code=ABSENT).startswith("absent")


def test_namespaces(forebay: Shell, tmp_path: Path) -> None:
    made = forebay.json("namespace", "create", "acme/chat", "--quota", "128MiB", "--durability", "verify")
    assert (made["quota_bytes"], made["durability"], made["eviction"]) == (128 << 20, "verify", "lru")
    assert "AlreadyExists" in forebay("namespace", "create", "acme/chat", code=REFUSED)
    changed = forebay.json("namespace", "set", "acme/chat", "--quota", "64MiB", "--min-generation", "3")
    assert (changed["quota_bytes"], changed["min_generation"], changed["durability"]) == (64 << 20, 3, "verify")
    assert forebay.json("namespace", "show", "acme/chat") == changed
    names = [n["name"] for n in forebay.json("namespace", "ls")["namespaces"]]
    assert {"acme/chat", "default/default"} <= set(names)
    assert "acme/chat" in forebay("namespace", "ls") and "64 MiB" in forebay("namespace", "show", "acme/chat")

    (tmp_path / "value").write_bytes(b"x")
    assert "StaleGeneration" in forebay("-n", "acme/chat", "ls", code=REFUSED)
    forebay("put", "k", str(tmp_path / "value"), "--namespace", "acme/chat", "--generation", "3")
    assert forebay.json("ls", "-n", "acme/chat", "--generation", "3")["keys"][0]["key"] == "k"
    assert "--force" in forebay("namespace", "rm", "acme/chat", code=USAGE)
    assert "TENANT/NAME, such as default/tiny" in forebay("namespace", "create", "tiny", code=USAGE)
    assert forebay.json("namespace", "rm", "acme/chat", "--force")["blocks"] == 1


def test_time_to_live(forebay: Shell) -> None:
    made = forebay.json("namespace", "create", "acme/scratch", "--ttl", "1h", "--retention", "10m")
    assert (made["ttl_ms"], made["retention_ms"]) == (3_600_000, 600_000)
    assert "ttl         1 h 0 min" in forebay("namespace", "show", "acme/scratch")
    assert forebay.json("namespace", "set", "acme/scratch", "--ttl", "0")["ttl_ms"] == 0
    assert "blocks stay" in forebay("namespace", "show", "acme/scratch")
    forebay("namespace", "rm", "acme/scratch")


def test_quotas_of_scopes(forebay: Shell) -> None:
    bounded = forebay.json("namespace", "scope-quota", "default/default", "user-42", "64MiB")
    assert {"scope": "user-42", "quota_bytes": 64 << 20, "used_bytes": 0} in bounded["scopes"]
    assert "user-42: 0 B of 64 MiB" in forebay("namespace", "show", "default/default")
    lifted = forebay.json("namespace", "scope-quota", "default/default", "user-42", "0")
    assert "user-42" not in {s["scope"] for s in lifted["scopes"]}
    forebay("namespace", "scope-quota", "no/such", "user-42", "1GiB", code=ABSENT)


def test_sessions(forebay: Shell, node: DemoNode) -> None:
    with connect(node.url, token=node.token, options=patient()):
        eventually(lambda: len(forebay.json("sessions", "default/default")["sessions"]) == 1, "others have ended")
        (found,) = forebay.json("sessions", "default/default")["sessions"]
        assert (found["principal"], found["namespace"], found["state"]) == ("admin", "default/default", "open")
        assert len(found["session"]) == 32 and found["hosts"] == 1 and found["age_ms"] >= found["idle_ms"] >= 0
        assert "default/default" in forebay("sessions")
        forebay("principal", "create", "idle")
        assert forebay.json("sessions", "--principal", "idle")["sessions"] == []
        forebay("sessions", "--principal", "nobody", code=ABSENT)
        forebay("sessions", "no/such", code=ABSENT)


def test_unknown_namespaces(forebay: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    forebay("namespace", "show", "no/such", code=ABSENT)
    assert run(["ls", "-n", "no/such"]) == ABSENT
    assert "does not exist, or this token has no right in it" in capsys.readouterr().err


def test_principals(forebay: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = forebay.json("principal", "create", "vllm")
    assert made["principal"] == {**made["principal"], "name": "vllm", "admin": False, "grants": []}
    monkeypatch.setenv("FOREBAY_TOKEN", made["token"])
    forebay("ls", code=ABSENT)  # it may not know that the namespace exists
    assert "principal create NAME --admin" in forebay("principal", "ls", code=REFUSED)
    monkeypatch.delenv("FOREBAY_TOKEN")
    granted = forebay.json("principal", "grant", "vllm", "default/default", "--rights", "read")
    assert granted["grants"] == [{"namespace": "default/default", "rights": ["read"], "scopes": []}]
    (tmp_path / "value").write_bytes(b"x")
    token = ["--token", made["token"]]
    forebay("ls", *token)
    assert "PermissionDenied" in forebay("put", "denied", str(tmp_path / "value"), *token, code=REFUSED)
    rotated = forebay.json("principal", "rotate", "vllm")
    assert "Unauthenticated" in forebay("ls", *token, code=REFUSED)
    forebay("ls", "--token", rotated["token"])
    forebay("principal", "revoke", "vllm", "defualt/default", code=ABSENT)
    assert "vllm" in {p["name"] for p in forebay.json("principal", "ls")["principals"] if p["grants"]}
    assert forebay.json("principal", "revoke", "vllm", "default/default")["grants"] == []
    forebay("principal", "revoke", "vllm", "default/default", code=ABSENT)
    forebay("principal", "revoke", "nobody", "default/default", code=ABSENT)
    shown = forebay("principal", "ls")
    assert "vllm" in shown and made["token"] not in shown and rotated["token"] not in shown
    assert forebay.json("principal", "rm", "vllm") == {"name": "vllm", "removed": True}
    assert "vllm" not in {p["name"] for p in forebay.json("principal", "ls")["principals"]}
    forebay("principal", "rm", "vllm", code=ABSENT)


def test_status(forebay: Shell, node: DemoNode) -> None:
    found = forebay.json("status")
    assert found["target"]["kind"] == "embedded" and "fencing" in found["target"]["capabilities"]
    assert found["capacity_bytes"] == 512 << 20 and found["uptime_ms"] >= 0
    assert [d["io"] in ("direct", "buffered", "mmap") for d in found["drives"]] == [True]
    forebay("put", "moved", __file__)
    forebay("get", "moved", "-")
    moved = forebay.json("status")
    size = Path(__file__).stat().st_size
    assert moved["written_bytes"] >= found["written_bytes"] + size and moved["read_bytes"] > found["read_bytes"]
    assert moved["target"]["restarts"] == 0
    told = json.loads((node.data / "node.json").read_text())
    assert found["incarnation"] == f"{told['incarnation']:016x}" or found["node"] == told["node"]
    text = forebay("status")
    assert "embedded" in text and "512 MiB" in text


def test_a_node_by_its_address(forebay: Shell, node: DemoNode, tmp_path: Path) -> None:
    where = ["--url", node.url.removeprefix("forebay://"), "--data", str(tmp_path)]
    assert "admin.token" in forebay("status", *where, code=REFUSED)
    forebay("status", *where, "--token", node.token)
    assert "Unauthenticated" in forebay("status", *where, "--token", "wrong", code=REFUSED)


def test_a_node_that_does_not_answer(forebay: Shell) -> None:
    told = forebay("status", "--url", "forebay://127.0.0.1:9", code=UNAVAILABLE)
    assert "127.0.0.1:9 does not answer" in told and "is the node running?" in told and "Unavailable" in told
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        for command in ("status", "ls"):
            told = forebay(command, "--url", url, "--timeout", "200ms", code=UNAVAILABLE)
            assert f"{url} did not answer within 0.2 s" in told and "--timeout" in told


def test_a_data_directory_in_use(node: DemoNode) -> None:
    command = [sys.executable, "-m", "forebay.cli.main", "serve", "--data", str(node.data), "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == REFUSED and "DataDirInUse" in done.stderr and "Traceback" not in done.stderr
    environment = {**os.environ, "FOREBAY_DATA": str(node.data)}
    command = [sys.executable, "-m", "forebay.cli.main", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert f"{node.data} (from FOREBAY_DATA) is served by another" in done.stderr and done.returncode == REFUSED
    command += ["--data", str(node.data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert f"{node.data} is served by another" in done.stderr and done.returncode == REFUSED


@pytest.mark.skipif(file_system(Path("/dev/shm")) != "tmpfs", reason="/dev/shm is no tmpfs here")
def test_a_drive_in_memory_is_said() -> None:
    with tempfile.TemporaryDirectory(prefix="fb-", dir="/dev/shm") as folder:
        running = DemoNode(Path(folder, "data"), 128 << 20, Path(folder, "log"))
        try:
            running.start()
        finally:
            running.stop()
        (line,) = [line for line in Path(folder, "log").read_text().splitlines() if "WARNING" in line]
    assert "is tmpfs" in line and "power loss" in line


@pytest.mark.parametrize("flag", ["--listen", "--target-listen", "FOREBAY_HTTP_LISTEN"])
def test_a_port_that_is_taken(flag: str) -> None:
    command = [sys.executable, "-m", "forebay.cli.main", "serve", "--capacity", "256MiB"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    with tempfile.TemporaryDirectory(prefix="fb-") as data, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        free = {"--listen": "127.0.0.1:0", "--target-listen": "127.0.0.1:0", "FOREBAY_HTTP_LISTEN": "127.0.0.1:0"}
        for name, value in {**free, flag: address}.items():
            if name.startswith("--"):
                command += [name, value]
            else:
                environment[name] = value
        done = subprocess.run([*command, "--data", data], capture_output=True, text=True, timeout=60, env=environment)
    (line,) = [line for line in done.stderr.splitlines() if "INFO" not in line and "WARNING" not in line]
    assert done.returncode == USAGE and line.startswith("forebay: ") and f"{flag} " in line
