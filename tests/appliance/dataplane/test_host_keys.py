"""Files of hosts' secrets."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread

from forebay.appliance.dataplane.host_keys import HostKeyFiles
from forebay.ids import HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret

NQN = "nqn.2014-08.org.nvmexpress:uuid:1"


def test_only_their_owner_reads_them_and_a_next_daemon_has_none(tmp_path: Path) -> None:
    keys = HostKeyFiles(tmp_path / "keys", "node")
    written = keys.write(HostIdentity(NQN, "1", HostSecrets(Secret.generate(), Secret.generate())))
    assert sorted(written) == ["dhchap_ctrlr_key", "dhchap_key"]
    assert {file for _, file in written.values()} == set((tmp_path / "keys").iterdir())
    assert all(file.stat().st_mode & 0o777 == 0o600 for _, file in written.values())
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    other = HostKeyFiles(tmp_path / "keys", "other")
    assert len(list((tmp_path / "keys").iterdir())) == 2
    other.forget(NQN)
    HostKeyFiles(tmp_path / "keys", "node")
    assert not list((tmp_path / "keys").iterdir())


def test_what_is_left_goes_without_authentication_too(tmp_path: Path) -> None:
    HostKeyFiles.clear(tmp_path / "keys", "node")
    for node in ("node", "other"):
        HostKeyFiles(tmp_path / "keys", node).write(HostIdentity(NQN, "1", HostSecrets(Secret.generate())))
    HostKeyFiles.clear(tmp_path / "keys", "node")
    assert [file.name for file in (tmp_path / "keys").iterdir()] == ["forebay-other-1"]


def test_whoever_reads_one_that_is_written_again_finds_it_whole(tmp_path: Path) -> None:
    keys, secret = HostKeyFiles(tmp_path / "keys", "node"), Secret.generate()
    host = HostIdentity(NQN, "1", HostSecrets(secret))
    _, path = keys.write(host)["dhchap_key"]
    over = Event()

    def write() -> None:
        while not over.is_set():
            keys.write(host)

    writer = Thread(target=write)
    writer.start()
    try:
        assert all(path.read_text() == secret.text() for _ in range(2000))
    finally:
        over.set()
        writer.join()
