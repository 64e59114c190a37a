"""`forebay doctor`: what each check says of what it is shown."""

import errno
import json
import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cbor2
import pytest

from forebay.appliance.config import Config, load
from forebay.appliance.dataplane.target.volume import Volume
from forebay.appliance.settings import Endpoint
from forebay.cli.context import Session
from forebay.cli.demo.node import DemoNode
from forebay.cli.doctor import hashes, machine, network, spdk, storage
from forebay.cli.doctor.finding import Finding
from forebay.cli.exits import OK
from forebay.cli.main import run
from forebay.client import VolumeTransport
from forebay.schema import Group, HashAlgorithm, Schema
from tests.cli.shell import Shell

GROUP = Group("full", (0, 1), 16, 8, 256, "bf16", "token-head", head_groups=8)
SCHEMA = Schema("vllm", bytes(32), HashAlgorithm("sha256_cbor", 16), (GROUP,), probe=bytes(32))


def levels(findings: Iterable[Finding]) -> list[str]:
    found = list(findings)
    assert all(bool(f.fix) == (f.level != "ok") for f in found), found
    return [f.level for f in found]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(None, flags={"data": str(tmp_path / "data")}, environ={})


# --- without a node


def test_without_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "TOKEN", "DATA", "GRPC_LISTEN"):
        monkeypatch.delenv(f"FOREBAY_{name}", raising=False)
    for name in ("GRPC", "HTTP", "TARGET"):
        monkeypatch.setenv(f"FOREBAY_{name}_LISTEN", "127.0.0.1:0")
    assert run(["doctor", "--data", str(tmp_path / "data"), "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and not (tmp_path / "data").exists()
    named = {check["check"] for check in found["checks"]}
    assert named >= {"python", "libraries", "open files", "clock", "data directory", "drive0", "grpc.listen", "rdma"}
    assert all(check["fix"] for check in found["checks"] if check["level"] != "ok")
    assert run(["doctor", "--data", str(tmp_path / "data")]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found["checks"]) + 1 and lines[-1].endswith("0 fail")


def test_a_failed_check_is_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").write_text("a file")
    assert run(["doctor", "--data", str(tmp_path / "data")]) == 1
    assert "is no directory" in capsys.readouterr().out


# --- storage


def test_data_directory_and_token(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert levels(storage.check_data(data)) == ["ok"]
    data.mkdir(mode=0o700)
    (data / "admin.token").touch(mode=0o600)
    (data / "node.json").touch(mode=0o600)
    assert levels(storage.check_data(data)) == ["ok", "ok", "ok"]
    (data / "admin.token").chmod(0o644)
    data.chmod(0o755)
    open_dir, token, _ = storage.check_data(data)
    assert open_dir.level == "warn" and "chmod 700" in open_dir.fix
    assert token.level == "fail" and "rotate" in token.fix


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_data_directory_that_cannot_be_made() -> None:
    assert levels(storage.check_data(Path("/proc/nothing"))) == ["fail"]


def test_a_drive_is_really_tried(tmp_path: Path) -> None:
    found = list(storage.check_drive("drive0", tmp_path / "not" / "yet", 64 << 20))
    assert "fail" not in levels(found) and all(f.check == "drive0" for f in found)
    text = " ".join(f.what for f in found)
    assert "holes punched" in text and "a flush takes" in text and "for a capacity of 64 MiB" in text
    assert list(tmp_path.iterdir()) == []


def test_a_drive_in_memory_is_warned_about() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    found = list(storage.check_drive("drive0", Path("/dev/shm"), None))
    assert found[0].level == "warn" and "reboot" in found[0].what and "mapping of memory" in found[1].what


def test_a_drive_without_room_is_told_apart_from_one_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, fix in ((errno.ENOSPC, "free some"), (errno.EOPNOTSUPP, "xfs")):

        def refuse(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Volume, "prepare_region", refuse)
        (failed,) = (f for f in storage.check_drive("drive0", tmp_path, None) if f.level == "fail")
        assert "fallocate" in failed.what and fix in failed.fix


def test_a_data_directory_on_a_read_only_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (failed,) = storage.check_data(tmp_path)
    assert failed.level == "fail" and "chown" in failed.fix
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    (failed,) = storage.check_data(tmp_path)
    assert failed.level == "fail" and "read-only" in failed.what and "remount" in failed.fix


def test_a_drive_that_is_too_small(tmp_path: Path) -> None:
    *_, space = storage.check_drive("drive0", tmp_path, 1 << 60)
    assert space.level == "fail" and "1024 PiB" in space.what


# --- ports and nodes


def test_ports(config: Config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = replace(
            config,
            grpc=replace(config.grpc, listen=Endpoint("127.0.0.1", port)),
            target=replace(config.target, listen=Endpoint("203.0.113.1", 4420)),
            http=replace(config.http, listen=Endpoint("127.0.0.1", 0)),
        )
        grpc, target, http = network.check_ports(wanted, None)
        assert grpc.level == "fail" and f"sport = :{port}" in grpc.fix
        assert target.level == "fail" and "no address" in target.what and http.level == "ok"
        about = {"pid": 7, "grpc": f"127.0.0.1:{port}", "target": {"address": "127.0.0.1", "port": 9}}
        heard, silent = network.check_ports(wanted, about)
        assert heard.level == "ok" and "pid 7" in heard.what
        assert silent.level == "fail" and silent.check == "target.listen"
    assert next(iter(network.check_ports(wanted, None))).level == "ok"


def test_a_running_node(forebay: Shell, node: DemoNode) -> None:
    found = forebay.json("doctor")
    by_name = {check["check"]: check for check in found["checks"]}
    assert by_name["node"]["level"] == by_name["versions"]["level"] == by_name["block data"]["level"] == "ok"
    assert node.url.removeprefix("forebay://") in by_name["grpc.listen"]["what"]
    assert str(node.data) in by_name["drive0"]["what"] or "512 MiB" in by_name["drive0"]["what"]
    assert by_name["admin.token"]["what"] == "mode 0600" and "removed" in by_name["block data"]["what"]
    assert by_name["transport"]["level"] == "ok"
    assert "is read by tcp (127.0.0.1:" in by_name["transport"]["what"]
    assert "not by rdma: the node offers no NVMe/RDMA" in by_name["transport"]["what"]
    assert forebay.json("ls")["keys"] == []
    about = network.running_node(Session(data=str(node.data)))
    assert about is not None and about["grpc"] == node.url.removeprefix("forebay://")


@pytest.mark.parametrize("kind", ["block", "rdma"])
def test_a_node_that_the_one_kind_allowed_does_not_reach(forebay: Shell, kind: str) -> None:
    found = forebay.json("doctor", "--transport", kind, code=1)
    by_name = {check["check"]: check for check in found["checks"]}
    assert by_name["block data"]["level"] == by_name["transport"]["level"] == "fail"
    assert f"is not reached; not by {kind}: " in by_name["transport"]["what"]


def test_a_volume_that_no_transport_reaches() -> None:
    ways = [VolumeTransport(1, "block", "/dev/nvme0n1", {}), VolumeTransport(2, "none", "", {"rdma": "no devices"})]
    assert levels(network.check_transports(ways)) == ["ok", "fail"]


def test_a_node_that_does_not_answer_and_one_that_refuses(node: DemoNode) -> None:
    (away,) = network.check_node(Session(url="forebay://127.0.0.1:9", token="x"))
    assert away.level == "fail" and away.fix
    (refused,) = network.check_node(Session(url=node.url, token="wrong"))
    assert refused.level == "fail" and "token" in refused.fix
    (elsewhere,) = network.check_node(Session(data="/no/such"))
    assert elsewhere.level == "ok"
    *_, last = network.check_node(Session(url=node.url, token=node.token, namespace="no/such"))
    assert last.level == "fail" and last.check == "block data" and "namespace ls" in last.fix


def test_rights_decide_what_is_tried(forebay: Shell, node: DemoNode) -> None:
    token = forebay.json("principal", "create", "reader")["token"]
    forebay("principal", "grant", "reader", "default/default", "--rights", "read")
    answers, block = network.check_node(Session(url=node.url, token=token))
    assert answers.level == "ok" and "administrators" in answers.what
    assert block.level == "warn" and "no right to write" in block.what


def test_version_skew() -> None:
    assert network._skew("999.0").level == "warn"


# --- the machine


def test_libraries_against_the_lock() -> None:
    assert levels(machine.check_libraries({"click": "0.0.1", "no-such-library": "1"})) == ["ok", "fail", "warn"]
    assert levels(machine.check_libraries({})) == ["ok", "ok"]


def test_limits() -> None:
    few, _ = machine.check_limits(10**9, rdma=False)
    assert few.level == "warn" and "1000000256" in few.fix
    assert next(iter(machine.check_limits(1, rdma=False))).level == "ok"


def test_clock() -> None:
    assert set(levels(machine.check_clock())) <= {"ok", "warn"}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_rdma_ports(tmp_path: Path) -> None:
    assert "no devices" in next(iter(machine.check_rdma(tmp_path / "none"))).what
    for number, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        port = tmp_path / "mlx5_0" / "ports" / number
        write(port / "state", state)
        write(port / "link_layer", "Ethernet")
        write(port / "rate", "400 Gb/sec")
    up, down = machine.check_rdma(tmp_path)
    assert up.level == "ok" and "400 Gb/sec" in up.what and down.level == "warn" and "ibstat mlx5_0" in down.fix


def test_gpu_direct(tmp_path: Path) -> None:
    assert levels(machine.check_gpu(tmp_path)) == ["ok"]
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: NVIDIA 570")
    assert levels(machine.check_gpu(tmp_path)) == ["ok", "ok", "warn"]
    write(tmp_path / "proc/driver/nvidia-fs/version", "2.24")
    write(tmp_path / "usr/local/cuda-12/lib64/libcufile.so.0", "")
    found = list(machine.check_gpu(tmp_path))
    assert levels(found) == ["ok", "ok", "ok"]
    assert "GPU memory by staging: kvikio is not installed" in found[1].what


def test_kernel_nvme_is_never_needed() -> None:
    assert levels(machine.check_nvme()) == ["ok"]


# --- hashes


def findings(tmp_path: Path, content: object) -> list[Finding]:
    file = tmp_path / "settings"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return list(hashes.check_schema(file))


@pytest.mark.parametrize(
    ("algorithm", "seed", "expected"),
    [
        ("sha256_cbor", "0", ["ok"]),
        ("sha256_cbor", None, ["ok", "warn"]),
        ("sha256", "0", ["warn"]),
        ("builtin", "0", ["fail"]),
        ("xxhash", None, ["fail"]),
        ("xxhash_cbor", "7", ["warn"]),
        ("xxhash", "random", ["fail"]),
    ],
)
def test_hash_algorithms(
    algorithm: str, seed: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    settings: dict[str, object] = {"cache_config": {"prefix_caching_hash_algo": algorithm}}
    if seed is not None:
        settings["env"] = {"PYTHONHASHSEED": seed}
    assert levels(findings(tmp_path, settings)) == expected


def test_settings_that_name_no_hash_take_the_default(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, {"model": "x"})
    assert found.level == "warn" and "pickle" in found.what and "sha256_cbor" in found.fix


def test_schemas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    good = findings(tmp_path, SCHEMA.cbor)
    assert levels(good) == ["ok", "ok"] and SCHEMA.keyspace.hex() in good[0].what
    plain = {**cbor2.loads(SCHEMA.cbor), "model": "00" * 32, "probe": "00" * 32, "draft": "", "processor": ""}
    assert findings(tmp_path, plain) == good
    poor = replace(SCHEMA, model=b"", probe=b"", groups=(replace(GROUP, dtype="fp8", head_groups=1),))
    found = findings(tmp_path, poor.cbor)
    assert levels(found) == ["ok", "ok", "warn", "warn", "fail", "warn", "warn"]
    assert levels(findings(tmp_path, Schema.opaque().cbor)) == ["ok"]
    assert levels(findings(tmp_path, {**plain, "groups": []})) == ["fail"]
    assert levels(findings(tmp_path, {**plain, "model": "xyz"})) == ["fail"]


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"[1]", b"not json"])
def test_what_is_no_schema(content: bytes, tmp_path: Path) -> None:
    assert levels(findings(tmp_path, content)) == ["fail"]
    assert levels(hashes.check_schema(tmp_path / "absent")) == ["fail"]


class TestSpdk:
    """`[target] kind = "spdk"`."""

    @staticmethod
    def config(tmp_path: Path, text: str) -> Config:
        (tmp_path / "c.toml").write_text(f'data = "data"\n[target]\nkind = "spdk"\n{text}')
        return load(tmp_path / "c.toml", environ={})

    @staticmethod
    def machine(tmp_path: Path, **drivers: str) -> Path:
        """/proc with 2 GiB free and 1 GiB in huge pages, and /sys with these PCI devices and their drivers."""
        (tmp_path / "proc").mkdir()
        text = "MemAvailable: 2097152 kB\nHugePages_Free:  512\nHugepagesize:       2048 kB\n"
        (tmp_path / "proc/meminfo").write_text(text)
        for number, driver in enumerate(drivers.values()):
            device = tmp_path / f"sys/bus/pci/devices/0000:0{number}:00.0"
            device.mkdir(parents=True)
            if driver:
                (tmp_path / "sys/bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
                (device / "driver").symlink_to(tmp_path / "sys/bus/pci/drivers" / driver)
        return tmp_path

    def test_nothing_is_said_where_the_target_is_forebays_own(self, config: Config) -> None:
        assert not list(spdk.check_spdk(config))

    def test_settings_that_are_not_used(self, tmp_path: Path) -> None:
        (tmp_path / "c.toml").write_text("[nvmf_tgt]\nrdma_listen = '127.0.0.1:4421'")
        (found,) = spdk.check_spdk(load(tmp_path / "c.toml", environ={}))
        assert found.level == "warn" and "target.kind is embedded" in found.what

    def test_the_program_and_its_memory(self, tmp_path: Path) -> None:
        root = self.machine(tmp_path)
        config = self.config(tmp_path, "[nvmf_tgt]\nbinary = '/bin/sh'")
        assert levels(spdk.check_spdk(config, root=root)) == ["ok", "ok"]
        config = self.config(tmp_path, "[nvmf_tgt]\nbinary = 'none'\nmemory = '3GiB'")
        assert levels(spdk.check_spdk(config, root=root)) == ["fail", "fail"]
        config = self.config(tmp_path, "[nvmf_tgt]\nbinary = '/bin/sh'\nhugepages = true\nmemory = '2GiB'")
        found = list(spdk.check_spdk(config, root=root))
        assert levels(found) == ["ok", "fail"] and "vm.nr_hugepages=1024" in found[1].fix

    def test_a_socket_where_nobody_answers(self, tmp_path: Path) -> None:
        (found,) = spdk.check_spdk(self.config(tmp_path, "[nvmf_tgt]\nsocket = 'none.sock'"))
        assert found.level == "fail" and "none.sock" in found.what

    def test_drives(self, tmp_path: Path) -> None:
        root = self.machine(tmp_path, a="vfio-pci", b="nvme", c="")
        (tmp_path / "disk").touch()
        drives = ["nvme:0000:00:00.0", "nvme:0000:01:00.0", "nvme:0000:02:00.0", "nvme:0000:09:00.0"]
        text = "[nvmf_tgt]\nbinary = '/bin/sh'\nhugepages = {}\n" + "".join(
            f"[[drives]]\nbdev = '{bdev}'\n" for bdev in [*drives, "aio:disk", "uring:none"]
        )
        text += "[[drives]]\nbdev = 'malloc:m'\ncapacity = '1GiB'\n"
        found = list(spdk.check_spdk(self.config(tmp_path, text.format("true")), root=root))[2:]
        assert levels(found) == ["ok", "fail", "fail", "fail", "ok", "fail", "warn", "warn", "warn"]
        found = list(spdk.check_spdk(self.config(tmp_path, text.format("false")), root=root))[2:]
        assert (found[0].level, found[0].fix) == ("fail", "nvmf_tgt.hugepages = true")


def test_a_variable_that_goes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a FOREBAY_DATA of an earlier node, in the same shell: serve and doctor tell, unless a flag overrules both."""
    path = tmp_path / "forebay.toml"
    path.write_text(f'data = "{tmp_path}/of-file"\n')
    monkeypatch.setenv("FOREBAY_DATA", str(tmp_path / "of-shell"))
    said = "FOREBAY_DATA is set and goes before data of"
    assert run(["serve", "--config", str(path), "--print-config"]) == OK
    printed = capsys.readouterr()
    assert said in printed.err and "of-shell" in printed.out
    run(["doctor", "--config", str(path), "--json"])
    assert any(said in check["what"] for check in json.loads(capsys.readouterr().out)["checks"])
    assert run(["serve", "--config", str(path), "--print-config", "--data", str(tmp_path / "typed")]) == OK
    assert said not in capsys.readouterr().err
    run(["doctor", "--config", str(path), "--json", "--data", str(tmp_path / "typed")])
    assert not any(said in check["what"] for check in json.loads(capsys.readouterr().out)["checks"])
