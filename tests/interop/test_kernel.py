"""The Linux kernel's initiator and nvme-cli judge the embedded target: one boot of a guest, a list of checks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import DhchapHash
from tests.appliance.target.conftest import eventually
from tests.appliance.target.host import HOST_ID, HOST_NQN
from tests.appliance.target.test_process import Process
from tests.interop import guest
from tests.interop.checks import Check, complaints, passed, prepare, read, serving
from tests.interop.replay import Replay

pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

RAW = "nqn.2026-01.io.forebay:interop:raw"
FENCED = "nqn.2026-01.io.forebay:interop:fenced"
CLOSED = "nqn.2026-01.io.forebay:interop:closed"
SECURE = "nqn.2026-01.io.forebay:interop:secure"
SECRETS = HostSecrets(Secret(bytes(range(64)), DhchapHash.SHA512), Secret(bytes(range(32, 64))))
AGREED = [("sha256", "null"), ("sha384", "ffdhe2048"), ("sha512", "ffdhe4096"), ("sha256", "ffdhe8192")]
VOLUME_BYTES = 64 << 20
LIMIT_S = 300


class Target:
    """The target process, and what the guest may ask of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.port = 0
        self._processes: list[Process] = []
        self.actions: dict[str, Callable[[], None]] = {
            "add": lambda: self._add_ns("b", 2),
            "remove": lambda: self._call("nvmf_subsystem_remove_ns", nqn=RAW, nsid=2),
            "show": lambda: self._call("nvmf_ns_add_host", nqn=RAW, nsid=3, host=HOST_NQN),
            "hide": lambda: self._call("nvmf_ns_remove_host", nqn=RAW, nsid=3, host=HOST_NQN),
            "restart": self._restart,
            **{f"agree_{n}": partial(self._agree, *one) for n, one in enumerate(AGREED)},
            "expired": lambda: eventually(self._expired, "the target noticed the silence", 25),
        }

    @property
    def process(self) -> Process:
        return self._processes[-1]

    def start(self) -> None:
        """Run it and set it up."""
        directory = self._directory / f"run{len(self._processes)}"
        directory.mkdir()
        self._processes.append(Process(directory))
        self._call("nvmf_create_transport", trtype="TCP")
        for name in "abcde":
            path = self._directory / f"{name}.vol"
            with path.open("ab") as file:
                os.truncate(file.fileno(), VOLUME_BYTES)
            self._call("bdev_aio_create", name=name, filename=str(path), block_size=4096)
            self._call("forebay_bdev_set_mode", name=name, mode="fenced" if name == "d" else "raw")
        for nqn, any_host in ((RAW, True), (FENCED, True), (CLOSED, False), (SECURE, False)):
            self._call("nvmf_create_subsystem", nqn=nqn, serial_number="INTEROP", allow_any_host=any_host)
            address = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": str(self.port)}
            self._call("nvmf_subsystem_add_listener", nqn=nqn, listen_address=address)
            with self.process.client() as client:
                self.port = int(client.nvmf_subsystem_get_listeners(nqn=nqn)[0]["address"]["trsvcid"])
        self._add_ns("a", 1)
        hidden = {"bdev_name": "c", "nsid": 3, "no_auto_visible": True}
        self._call("nvmf_subsystem_add_ns", nqn=RAW, namespace=hidden)
        self._call("nvmf_subsystem_add_ns", nqn=FENCED, namespace={"bdev_name": "d", "nsid": 1})
        self._call("nvmf_subsystem_add_ns", nqn=SECURE, namespace={"bdev_name": "e", "nsid": 1})
        for name, secret in (("host", SECRETS.host), ("controller", SECRETS.controller)):
            assert secret is not None
            path = directory / name
            path.touch(mode=0o600)
            path.write_text(secret.text())
            self._call("keyring_file_add_key", name=name, path=str(path))
        keys = {"dhchap_key": "host", "dhchap_ctrlr_key": "controller"}
        self._call("nvmf_subsystem_add_host", nqn=SECURE, host=HOST_NQN, **keys)
        self._call("forebay_grants_add", name="d", hosts=[[HOST_NQN, str(HOST_ID)]], grants=[[1, 0, 64, 0]])

    def _call(self, method: str, **params: object) -> None:
        with self.process.client() as client:
            getattr(client, method)(**params)

    def _agree(self, digest: str, group: str) -> None:
        self._call("nvmf_set_config", dhchap_digests=[digest], dhchap_dhgroups=[group])

    def _add_ns(self, name: str, nsid: int) -> None:
        uuid = f"0f0f0f0f-1111-2222-3333-44444444444{nsid}"
        self._call("nvmf_subsystem_add_ns", nqn=RAW, namespace={"bdev_name": name, "nsid": nsid, "uuid": uuid})

    def _restart(self) -> None:
        self.process.process.kill()
        self.process.process.wait(60)
        self.start()

    def _expired(self) -> bool:
        return "keep-alive time-out" in self.process.log.read_text()

    def log(self) -> str:
        return "".join(one.log.read_text() for one in self._processes)

    def close(self) -> None:
        for one in self._processes:
            one.process.terminate()
            one.process.wait(60)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Check]]:
    directory = tmp_path_factory.mktemp("interop")
    share = directory / "share"
    names: dict[str, object] = {"RAW": RAW, "FENCED": FENCED, "CLOSED": CLOSED, "SECURE": SECURE}
    names |= {"HOSTNQN": HOST_NQN, "HOSTID": HOST_ID, "AGREED": f"'{' '.join(map(str, range(len(AGREED))))}'"}
    assert SECRETS.controller is not None
    names |= {"SECRET": SECRETS.host.text(), "CONTROLLER_SECRET": SECRETS.controller.text()}
    target = Target(directory)
    replays = {name: Replay(directory / name, FENCED, defended=name == "product") for name in ("product", "undefended")}
    for name, replay in replays.items():
        target.actions |= replay.actions(name)
    try:
        target.start()
        ports = {"PORT": target.port, **{name.upper(): replay.wire.port for name, replay in replays.items()}}
        prepare(share, "checks.sh", names | ports)
        with serving(share, target.actions):
            text = guest.boot(share, LIMIT_S)
    finally:
        print(target.log())  # shown if a test failed
        target.close()
        for replay in replays.values():
            replay.close()
    yield read(text)


@pytest.mark.parametrize(
    "name",
    [
        "several_queues",
        "fio_verify",
        "flush",
        "deallocate",
        "namespaces_come_and_go",
        "digests",
        "fenced",
        "authenticated",
        "authenticated_again",
        "restart",
        "keep_alive",
    ],
)
def test_check(checks: dict[str, Check], name: str) -> None:
    passed(checks, name)


def test_discover(checks: dict[str, Check]) -> None:
    output = passed(checks, "discover")
    assert re.findall(r"^subnqn: +(\S+)$", output, re.MULTILINE) == [
        RAW,
        FENCED,
        SECURE,
    ]  # and not what is closed to it
    assert re.findall(r"^traddr: +(\S+)$", output, re.MULTILINE) == ["127.0.0.1"] * 3
    assert "unrecognized" not in output


def test_wrong_host(checks: dict[str, Check]) -> None:
    passed(checks, "wrong_host")
    assert re.search(r"does not allow host|Connect .*(host|0x4184|384)", checks["wrong_host"].kernel)


def test_what_is_agreed_on_is_what_the_kernel_says(checks: dict[str, Check]) -> None:
    kernel = checks["authenticated"].kernel
    told = re.findall(r"qid 0: authenticated with hash hmac\((\w+)\) dhgroup (\w+)", kernel)
    assert told == [*AGREED, AGREED[0]]
    assert kernel.count("controller authenticated") == len(AGREED)
    assert "qid 0: authenticated with hash" in checks["authenticated_again"].kernel


def test_without_the_secrets_there_is_no_way_in(checks: dict[str, Check]) -> None:
    passed(checks, "not_authenticated")
    assert re.search(r"no key|authentication required|Failed to configure", checks["not_authenticated"].kernel), checks[
        "not_authenticated"
    ].kernel
    assert "controller authentication failed" in checks["not_authenticated"].kernel


def test_what_nvme_cli_prints(checks: dict[str, Check]) -> None:
    output = passed(checks, "prints")
    for line in (
        r"^/dev/nvme0n1 .*INTEROP +Forebay +1 +67\.11 +MB /  67\.11 +MB +4 KiB",  # list
        r"^subnqn +: " + RAW,
        r"^oncs +: 0xc",
        r"ANA not supported",
        r"^dlfeat +: 9",
        r"^lbaf +0 : .*lbads:12|LBA Format  0 : .*4096 bytes",
        r"^available_spare\s+: 100%",
        r"^host_write_commands\s+: [1-9]",
        r"^num_err_log_entries\s+: \d+",
        r"^afi +: 0x1",
        r"^\[ +0\]:0x1",  # list-ns
        r"^uuid +: 0f0f0f0f-1111-2222-3333-444444444441",
        r"LID 0x2 \(SMART",
        r"Number of IO Submission Queues Allocated \(NSQA\): 2",
        r"Volatile Write Cache Enable \(WCE\): Enabled",
    ):
        assert re.search(line, output, re.MULTILINE), f"{line}\n{output}"


@pytest.mark.parametrize(
    "name",
    [
        "discover",
        "several_queues",
        "fio_verify",
        "flush",
        "deallocate",
        "prints",
        "namespaces_come_and_go",
        "digests",
        "authenticated",
        "authenticated_again",
    ],
)
def test_the_kernel_complains_of_nothing(checks: dict[str, Check], name: str) -> None:
    assert not complaints(checks[name])


RECONNECTS = r"starting error recovery|Failed reconnect attempt|failed to (connect socket|send request)|receive failed"
EXPECTED = {
    "fenced": r"sct 0x2 / sc 0x86\) DNR|critical medium error, dev \S+, sector \d+ op 0x1:\(WRITE\)",
    "wrong_host": r"failed to connect queue: 0 ret=16772",  # 4184h
    "not_authenticated": r"authentication (setup )?failed|failed to connect queue: 0 ret=-1(26|29)",
    "restart": RECONNECTS,
    # A Keep Alive that was sent into the silence is late, if that lasts long enough.
    "keep_alive": RECONNECTS + r"|keep.?alive|opcode 0x18 \(Admin Cmd\) QID 0 timeout",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_kernel_complains_of_nothing_else(checks: dict[str, Check], name: str) -> None:
    told = complaints(checks[name])
    assert told
    assert not [line for line in told if not re.search(EXPECTED[name], line)]


def test_the_kernel_is_told_why_a_write_was_refused(checks: dict[str, Check]) -> None:
    """Access Denied with DNR: it is not tried again (design §6.4)."""
    refused = re.findall(r"I/O Cmd\(0x1\) @ LBA (\d+), .*sct 0x2 / sc 0x86\) DNR", checks["fenced"].kernel)
    assert {int(lba) for lba in refused} == {48, 4096}


@pytest.mark.parametrize(
    ("name", "seen"), [("replayed_product", ["refused", "f"]), ("replayed_undefended", ["written", "s"])]
)
def test_a_write_that_is_sent_again_after_its_block_went_to_another(
    checks: dict[str, Check], name: str, seen: list[str]
) -> None:
    """Linux repeats what was on its way when a connection broke: its grant is gone, or nothing asks for one."""
    lines = [line for line in passed(checks, name).splitlines() if line in ("written", "refused", "f", "s")]
    assert lines == seen
