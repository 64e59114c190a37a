import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.process import Process, ProcessName
from forebay.appliance.dataplane.supervisor import (
    MAX_SOCKET_PATH_BYTES,
    TARGET_COMMAND,
    EmbeddedProgram,
    Supervisor,
    SupervisorTimes,
    socket_path,
)
from forebay.errors import ConfigInvalid, TargetFailed, Unavailable

NODE = bytes(range(16))
TIMES = SupervisorTimes(probe_interval_s=0.02, backoff_min_s=0.01, backoff_max_s=0.1)
IMPATIENT = replace(TIMES, probe_timeout_s=0.3)
"""Where a target hangs. A busy machine may make a healthy one late, too: it is replaced once more then."""
DEADLINE_S = 60.0


async def nothing() -> None:
    return None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory whose path is short: these tests are about how long a socket's may be, and pytest's own grow."""
    with tempfile.TemporaryDirectory(prefix="fb-") as path:
        yield Path(path)


@asynccontextmanager
async def supervised(
    run_dir: Path,
    on_restart: Callable[[], Awaitable[None]] = nothing,
    *,
    program: EmbeddedProgram | None = None,
    times: SupervisorTimes = TIMES,
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(run_dir, NODE, on_restart, times=times, program=program)
    try:
        yield supervisor
    finally:
        await supervisor.stop()


async def boot_id(supervisor: Supervisor) -> str:
    rpc = JsonRpcClient(supervisor.socket, timeout_s=DEADLINE_S)
    try:
        return str((await rpc.call("forebay_get_info"))["boot_id"])
    finally:
        await rpc.close()


def alive(pid: int | None) -> bool:
    """Whether a process runs; one that ended but was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class TestLife:
    async def test_starts_and_stops(self, tmp_path: Path) -> None:
        async with supervised(tmp_path) as supervisor:
            assert not await supervisor.start()
            pid = supervisor.pid
            assert alive(pid) and supervisor.serving
            assert await boot_id(supervisor)
        assert not alive(pid)
        assert supervisor.pid is None and not supervisor.serving
        assert not supervisor.socket.exists() and not (tmp_path / "target.pid").exists()

    async def test_the_target_has_a_session_of_its_own(self, tmp_path: Path) -> None:
        async with supervised(tmp_path) as supervisor:
            await supervisor.start()
            assert supervisor.pid is not None
            assert os.getsid(supervisor.pid) == supervisor.pid != os.getsid(0)

    async def test_a_detached_target_is_found_again(self, tmp_path: Path) -> None:
        first = Supervisor(tmp_path, NODE, nothing, times=TIMES)
        await first.start()
        pid, boot = first.pid, await boot_id(first)
        await first.detach()
        assert alive(pid)
        async with supervised(tmp_path) as second:
            assert await second.start()
            assert second.pid == pid and await boot_id(second) == boot
        assert not alive(pid)

    async def test_it_is_found_without_its_pid_file(self, tmp_path: Path) -> None:
        first = Supervisor(tmp_path, NODE, nothing, times=TIMES)
        await first.start()
        pid = first.pid
        await first.detach()
        (tmp_path / "target.pid").write_text("{torn")
        async with supervised(tmp_path) as second:
            assert await second.start()
            assert second.pid == pid

    async def test_it_is_found_where_it_listens_though_the_path_would_be_another_now(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_dir = tmp_path / ("d" * 100)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        first = Supervisor(run_dir, NODE, nothing, times=TIMES)
        await first.start()
        pid = first.pid
        await first.detach()
        (tmp_path / "t").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
        async with supervised(run_dir) as second:
            assert await second.start()
            assert (second.pid, second.socket) == (pid, first.socket)

    async def test_a_target_that_does_not_come_up_says_why(self, tmp_path: Path) -> None:
        async with supervised(
            tmp_path, program=EmbeddedProgram(("sh", "-c", "echo no such drive >&2; exit 3", "sh"))
        ) as supervisor:
            with pytest.raises(Unavailable, match="ended with status 3: no such drive"):
                await supervisor.start()

    async def test_what_is_said_of_it_is_its_own_and_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "target.log").write_text("of another one\n" * 3)
        for code, said in (
            ("exit 0", "ended with status 0: it wrote no log"),
            ("printf 'a\\nb\\nc\\n\\nd\\ne\\n'; exit 1", r"ended with status 1: b \| c \| d \| e \(.*target\.log\)"),
        ):
            async with supervised(tmp_path, program=EmbeddedProgram(("sh", "-c", code, "sh"))) as supervisor:
                with pytest.raises(Unavailable, match=said) as refused:
                    await supervisor.start()
            assert refused.value.field == "target" and "\n" not in refused.value.message

    async def test_a_target_that_never_answers_is_ended(self, tmp_path: Path) -> None:
        command = ("sh", "-c", "exec sleep 1000", "sh")
        supervisor = Supervisor(
            tmp_path, NODE, nothing, times=replace(TIMES, start_s=0.3), program=EmbeddedProgram(command)
        )
        with pytest.raises(Unavailable, match="did not answer"):
            await supervisor.start()
        started = ProcessName.load(tmp_path / "target.pid")
        assert started is not None and not alive(started.pid)
        await supervisor.stop()

    async def test_a_command_that_does_not_exist_is_unavailable(self, tmp_path: Path) -> None:
        async with supervised(tmp_path, program=EmbeddedProgram(("/does/not/exist",))) as supervisor:
            with pytest.raises(Unavailable, match="does not start"):
                await supervisor.start()

    async def test_a_target_that_ignores_sigterm_is_killed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        times = replace(TIMES, stop_s=1.0)  # which a killed process has to end, too
        code = (
            "import signal, sys, threading; from forebay.appliance.dataplane.target.__main__ import main\n"
            "signal.sigwait = lambda _: threading.Event().wait(); main(sys.argv[1:])"
        )
        supervisor = Supervisor(
            tmp_path, NODE, nothing, times=times, program=EmbeddedProgram((sys.executable, "-c", code))
        )
        await supervisor.start()
        pid = supervisor.pid
        with caplog.at_level("WARNING"):
            await supervisor.stop()
        assert not alive(pid)
        assert "does not stop" in caplog.text

    async def test_a_stopped_target_is_ended(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        async with supervised(tmp_path) as supervisor:
            await supervisor.start()
            pid = supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            with caplog.at_level("WARNING"):
                await supervisor.stop()
        assert not alive(pid)
        assert "does not stop" not in caplog.text  # it was let go on, and ended by itself


class TestFailures:
    async def test_a_killed_target_is_replaced_and_state_replayed(self, tmp_path: Path) -> None:
        replayed = asyncio.Event()

        async def replay() -> None:
            replayed.set()

        async with supervised(tmp_path, replay) as supervisor:
            await supervisor.start()
            pid, boot = supervisor.pid, await boot_id(supervisor)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                await replayed.wait()
            assert supervisor.pid != pid and supervisor.restarts == 1
            assert await boot_id(supervisor) != boot

    async def test_a_killed_target_that_was_found_is_replaced(self, tmp_path: Path) -> None:
        code = (
            "import asyncio, sys; from pathlib import Path\n"
            "from tests.appliance.dataplane import test_supervisor as t\n"
            "async def main():\n"
            "    s = t.Supervisor(Path(sys.argv[1]), t.NODE, t.nothing, times=t.TIMES)\n"
            "    await s.start(); await s.detach()\n"
            "asyncio.run(main())"
        )
        root = Path(__file__).resolve().parents[3]
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=True, timeout=60)
        async with supervised(tmp_path) as supervisor:
            assert await supervisor.start()
            pid = supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: supervisor.restarts == 1)
            assert alive(supervisor.pid)

    async def test_a_hung_target_is_killed_and_replaced(self, tmp_path: Path) -> None:
        async with supervised(tmp_path, times=IMPATIENT) as supervisor:
            await supervisor.start()
            pid = supervisor.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: supervisor.restarts >= 1 and supervisor.serving)
            assert not alive(pid)

    async def test_a_target_that_hangs_when_the_daemon_starts_is_replaced(self, tmp_path: Path) -> None:
        first = Supervisor(tmp_path, NODE, nothing, times=TIMES)
        await first.start()
        pid = first.pid
        assert pid is not None
        await first.detach()
        os.kill(pid, signal.SIGSTOP)
        async with supervised(tmp_path, times=IMPATIENT) as second:
            assert not await second.start()
            assert second.pid != pid and not alive(pid)

    async def test_a_target_that_is_late_when_the_daemon_starts_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = Supervisor(tmp_path, NODE, nothing, times=TIMES)
        await first.start()
        pid = first.pid
        assert pid is not None
        await first.detach()
        os.kill(pid, signal.SIGSTOP)
        async with supervised(tmp_path, times=replace(TIMES, probe_timeout_s=1.0)) as second:
            ask = second._probe

            async def probe() -> tuple[int, str]:
                try:
                    return await ask()
                except Unavailable:
                    os.kill(pid, signal.SIGCONT)
                    raise

            monkeypatch.setattr(second, "_probe", probe)
            assert await second.start()
            assert second.pid == pid and second.restarts == 0

    async def test_a_target_whose_socket_is_gone_is_replaced(self, tmp_path: Path) -> None:
        async with supervised(tmp_path) as supervisor:
            await supervisor.start()
            pid = supervisor.pid
            rpc = supervisor._rpc
            supervisor.socket.unlink()
            await rpc.close()
            await until(lambda: supervisor.restarts == 1)
            assert not alive(pid)

    async def test_another_target_on_the_socket_is_replaced(self, tmp_path: Path) -> None:
        async with supervised(tmp_path) as supervisor:
            await supervisor.start()
            pid = supervisor.pid
            supervisor.socket.unlink()
            command = [*TARGET_COMMAND, "--socket", str(supervisor.socket)]
            intruder = Process.start(command, tmp_path / "log", supervisor.socket)
            await until(supervisor.socket.exists)
            await supervisor._rpc.close()
            await until(lambda: supervisor.restarts >= 1)
            assert not alive(pid) and not intruder.running
            assert alive(supervisor.pid)
            intruder.close()

    async def test_state_that_could_not_be_replayed_is_replayed_again(self, tmp_path: Path) -> None:
        calls = 0

        async def replay() -> None:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise TargetFailed("not yet")

        async with supervised(tmp_path, replay) as supervisor:
            await supervisor.start()
            assert supervisor.pid is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: calls == 3)
            await until(lambda: supervisor.serving)
            assert supervisor.restarts == 1

    async def test_a_target_that_fails_at_once_is_started_again_until_it_does_not(self, tmp_path: Path) -> None:
        fuse = tmp_path / "fuse"
        script = f'if [ -e {fuse} ]; then rm {fuse}; exit 1; fi; exec {" ".join(TARGET_COMMAND)} "$@"'
        async with supervised(tmp_path, program=EmbeddedProgram(("sh", "-c", script, "sh"))) as supervisor:
            await supervisor.start()
            assert supervisor.pid is not None
            fuse.touch()
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.restarts == 1)
            assert not fuse.exists()

    async def test_stopping_in_the_middle_of_a_restart_leaves_no_process(self, tmp_path: Path) -> None:
        started = tmp_path / "started"
        script = (
            f'if [ -e {started} ]; then echo $$ >> {started}; exec sleep 1000; fi; exec {" ".join(TARGET_COMMAND)} "$@"'
        )
        async with supervised(tmp_path, program=EmbeddedProgram(("sh", "-c", script, "sh"))) as supervisor:
            await supervisor.start()
            assert supervisor.pid is not None
            started.touch()
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: started.stat().st_size > 0)
        assert not any(alive(int(pid)) for pid in started.read_text().split())


class TestNames:
    def test_a_recycled_pid_is_not_taken_for_the_target(self, tmp_path: Path) -> None:
        with subprocess.Popen(["sleep", "1000"]) as bystander:
            name = ProcessName.of(bystander.pid, tmp_path / "s")
            assert name is not None
            for other in (
                replace(name, start_ticks=name.start_ticks - 1),
                replace(name, machine_boot_id="an earlier boot"),
            ):
                assert Process.find(other) is None
            found = Process.find(name)
            assert found is not None and found.running
            found.close()
            bystander.kill()

    async def test_a_bystander_with_the_pid_of_the_last_target_is_left_alone(self, tmp_path: Path) -> None:
        with subprocess.Popen(["sleep", "1000"]) as bystander:
            name = ProcessName.of(bystander.pid, tmp_path / "target.sock")
            assert name is not None
            replace(name, start_ticks=name.start_ticks - 1).save(tmp_path / "target.pid")
            async with supervised(tmp_path) as supervisor:
                assert not await supervisor.start()
                assert bystander.poll() is None
            bystander.kill()

    def test_a_pid_that_nobody_has_is_nobody(self, tmp_path: Path) -> None:
        with subprocess.Popen(["true"]) as gone:
            gone.wait()
        assert ProcessName.of(gone.pid, tmp_path) is None
        assert Process.find(ProcessName(gone.pid, 1, "", "")) is None

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "start_ticks": 1}'])
    def test_a_torn_pid_file_names_nobody(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "f").write_text(text)
        assert ProcessName.load(tmp_path / "f") is None
        assert ProcessName.load(tmp_path / "none") is None


class TestSocketPath:
    def test_a_short_one_is_in_the_run_directory(self, tmp_path: Path) -> None:
        assert socket_path(tmp_path / "run", NODE) == tmp_path / "run" / "target.sock"

    async def test_a_long_one_is_replaced_by_a_private_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        run_dir = tmp_path / ("d" * 100)
        path = socket_path(run_dir, NODE)
        assert path.parent.parent == tmp_path and len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert socket_path(run_dir, NODE) == path != socket_path(run_dir, bytes(16))
        async with supervised(run_dir) as supervisor:
            await supervisor.start()
            assert supervisor.socket == path and path.exists()

    def test_a_directory_that_others_may_enter_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        socket_path(tmp_path / ("d" * 100), NODE).parent.chmod(0o755)
        with pytest.raises(ConfigInvalid):
            socket_path(tmp_path / ("d" * 100), NODE)

    def test_a_link_in_its_place_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        private = socket_path(tmp_path / ("d" * 100), NODE).parent
        private.rmdir()
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        private.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigInvalid):
            socket_path(tmp_path / ("d" * 100), NODE)

    def test_no_path_at_all_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("t" * 100)))
        with pytest.raises(ConfigInvalid, match="TMPDIR"):
            socket_path(tmp_path / ("d" * 100), NODE)
