"""The driver against the target process that ships."""

import asyncio
import os
import signal
import socket
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from forebay.appliance.dataplane.embedded import EmbeddedTarget
from forebay.appliance.dataplane.host_keys import HostKeyFiles
from forebay.appliance.dataplane.interface import Barrier, HostView, IoStats, VolumesFailed, VolumeSpec, WriteGrant
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.appliance.dataplane.spdk import SpdkTarget
from forebay.appliance.dataplane.subsystems import Listener, TransportLimits
from forebay.appliance.dataplane.supervisor import Supervisor, SupervisorTimes
from forebay.checksum import crc32c
from forebay.errors import AlreadyExists, NoSpace, NotFound, TargetRefused, Unavailable, VolumeMismatch
from forebay.ids import Extent, GrantId, HostIdentity, VolumeId
from forebay.nvmetcp.secret import HostSecrets, Secret

NODE = bytes(range(16))
REGION = 64 << 20
TIMES = SupervisorTimes(probe_interval_s=0.02, backoff_min_s=0.01, backoff_max_s=0.1)
DEADLINE_S = 60.0


@dataclass
class Rig:
    """A target of its own, its driver, and a plain connection to look at it."""

    supervisor: Supervisor
    target: EmbeddedTarget
    rpc: JsonRpcClient
    path: Path
    replays: list[Any]

    def volume(self, number: int = 1, tenant: str = "acme", **changes: Any) -> VolumeSpec:
        path = self.path / f"{number}.vol"
        if not path.exists():
            path.touch()
            os.truncate(path, 4 * REGION)
        nguid = uuid.uuid5(uuid.NAMESPACE_OID, str(number)).hex
        spec = VolumeSpec(VolumeId(number), tenant, number, f"vol{number}", str(path), 4 * REGION, nguid)
        return replace(spec, **changes)

    async def subsystems(self) -> list[dict[str, Any]]:
        return [one for one in await self.rpc.call("nvmf_get_subsystems") if one["subtype"] == "NVMe"]

    async def bdevs(self) -> list[str]:
        return [one["name"] for one in await self.rpc.call("bdev_get_bdevs")]

    async def live_grants(self) -> int:
        return int((await self.rpc.call("forebay_get_info"))["grants"])

    async def kill(self) -> None:
        """SIGKILL the target and wait for its successor."""
        assert self.supervisor.pid is not None
        before = self.supervisor.restarts
        os.kill(self.supervisor.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while self.supervisor.restarts == before or not self.supervisor.serving:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def rigged(path: Path, times: SupervisorTimes = TIMES, **options: Any) -> AsyncIterator[Rig]:
    replays: list[Any] = []

    async def replay() -> None:
        for each in replays:
            await each()

    supervisor = Supervisor(path, NODE, replay, times=times)
    await supervisor.start()
    rpc = JsonRpcClient(supervisor.socket)
    target = EmbeddedTarget(JsonRpcClient(supervisor.socket), node=NODE.hex(), **options)
    try:
        yield Rig(supervisor, target, rpc, path, replays)
    finally:
        await target.close()
        await rpc.close()
        await supervisor.stop()


def host(name: str = "a") -> HostIdentity:
    return HostIdentity(f"nqn.2026-11.io.forebay:host:{name}", str(uuid.uuid5(uuid.NAMESPACE_OID, name)))


def _nqn(subsystem: dict[str, Any]) -> str:
    return str(subsystem["nqn"])


def grants(numbers: Sequence[int], *owners: HostIdentity, volume: int = 1) -> list[WriteGrant]:
    """Grants of 4 KiB each, side by side from region 1 on."""
    return [WriteGrant(GrantId(n), owners, Extent(VolumeId(volume), REGION + n * 4096, 4096)) for n in numbers]


def watched(target: EmbeddedTarget, monkeypatch: pytest.MonkeyPatch, able: dict[str, bool] | None = None) -> list[str]:
    """Names of the methods that the driver calls from here on; ``able`` is what the target says that it can."""
    names: list[str] = []
    real = target._rpc.call

    async def call(method: str, params: Mapping[str, Any] | None = None, **options: Any) -> Any:
        names.append(method)
        answer = await real(method, params, **options)
        return answer | {"capabilities": able} if able is not None and method == "forebay_get_info" else answer

    monkeypatch.setattr(target._rpc, "call", call)
    return names


async def test_who_answers(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        info = await rig.target.info()
        assert (info.kind, info.pid) == ("embedded", rig.supervisor.pid)
        able = info.capabilities
        assert able.fencing and able.barrier and able.per_host_visibility and able.seal and able.ordered


async def test_nobody_answers(tmp_path: Path) -> None:
    target = EmbeddedTarget(JsonRpcClient(tmp_path / "none"), node="n")
    with pytest.raises(Unavailable):
        await target.info()


async def test_a_volume_is_served_under_its_own_names_and_hidden(tmp_path: Path) -> None:
    async with rigged(tmp_path, limits=TransportLimits(max_io_bytes=1 << 20, in_capsule_bytes=4096)) as rig:
        spec = rig.volume(3)
        await rig.target.add_volume(spec)
        (found,) = await rig.subsystems()
        assert found["nqn"] == f"nqn.2026-11.io.forebay:{NODE.hex()}:acme" == rig.target.subsystem_nqn("acme")
        assert (found["model_number"], found["allow_any_host"]) == ("Forebay", False)
        (namespace,) = found["namespaces"]
        assert (namespace["nsid"], namespace["bdev_name"]) == (3, "vol3")
        assert (namespace["nguid"], namespace["uuid"]) == (spec.nguid.upper(), str(uuid.UUID(spec.nguid)))
        assert namespace["no_auto_visible"] and not namespace["hosts"]
        (bdev,) = await rig.rpc.call("bdev_get_bdevs")
        assert bdev["driver_specific"]["aio"]["mode"] == "fenced"
        (transport,) = await rig.rpc.call("nvmf_get_transports")
        assert (transport["max_io_size"], transport["in_capsule_data_size"]) == (1 << 20, 4096)


async def test_spdks_own_client_sees_the_same(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.target.add_volume(rig.volume())

        def look() -> list[dict[str, Any]]:
            with JSONRPCClient(str(rig.supervisor.socket)) as client:
                return [one for one in client.nvmf_get_subsystems() if one["subtype"] == "NVMe"]

        assert await asyncio.to_thread(look) == await rig.subsystems()


async def test_a_raw_volume_is_asked_for(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        for fenced, mode in ((False, "raw"), (True, "fenced"), (True, "fenced")):
            await rig.target.add_volume(rig.volume(fenced=fenced))
            (bdev,) = await rig.rpc.call("bdev_get_bdevs")
            assert bdev["driver_specific"]["aio"]["mode"] == mode


async def test_all_tenants_share_one_port(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.target.add_volume(rig.volume(1, "acme"))
        await rig.target.add_volume(rig.volume(2, "other"))
        one, two = await rig.target.endpoint("acme"), await rig.target.endpoint("other")
        assert (one.transport, one.address, one.port) == (two.transport, two.address, two.port)
        assert one.port > 0 and one.subsystem_nqn != two.subsystem_nqn
        socket.create_connection((one.address, one.port), timeout=DEADLINE_S).close()
        with pytest.raises(NotFound):
            await rig.target.endpoint("nobody")


async def test_hosts_see_what_they_were_given_and_nothing_else(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        volumes = [rig.volume(n) for n in (1, 2, 3)]
        for spec in volumes:
            await rig.target.add_volume(spec)

        async def seen() -> dict[int, set[str]]:
            (found,) = await rig.subsystems()
            return {one["nsid"]: {each["nqn"] for each in one["hosts"]} for one in found["namespaces"]}

        a, b = host("a"), host("b")
        await rig.target.add_host("acme", a, volumes[:2])
        await rig.target.add_host("acme", b, volumes[1:])
        assert await seen() == {1: {a.nqn}, 2: {a.nqn, b.nqn}, 3: {b.nqn}}
        await rig.target.add_host("acme", a, volumes[2:])
        assert await seen() == {1: set(), 2: {b.nqn}, 3: {a.nqn, b.nqn}}
        await rig.target.remove_host("acme", b, volumes)
        assert await seen() == {1: set(), 2: set(), 3: {a.nqn}}
        assert [each["nqn"] for each in (await rig.subsystems())[0]["hosts"]] == [a.nqn]
        with pytest.raises(NotFound):
            await rig.target.add_host("acme", a, [rig.volume(9)])


async def test_what_a_target_that_was_started_anew_does_not_know_yet_is_unavailable_and_no_lack(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        spec = rig.volume()
        await rig.target.add_volume(spec)
        await rig.kill()  # and nothing is replayed
        asked: list[Callable[[], Awaitable[object]]] = [
            lambda: rig.target.endpoint("acme"),
            lambda: rig.target.add_host("acme", host(), [spec]),
            lambda: rig.target.grant(grants([1], host())),
            lambda: rig.target.barrier(spec),
            lambda: rig.target.seal([GrantId(1)], spec),
            lambda: rig.target.prepare_region(spec, REGION, REGION),
            lambda: rig.target.release_region(spec, REGION, REGION),
            lambda: rig.target.checksums(spec, [(REGION, 4096, 0)]),
        ]
        for ask in asked:
            with pytest.raises(Unavailable) as told:
                await ask()
            assert told.value.retry_after_ms > 0
        await rig.target.reconcile([spec], [])
        await rig.target.add_host("acme", host(), [spec])


async def test_volumes_and_hosts_that_are_gone_leave_nothing(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        volumes = [rig.volume(1), rig.volume(2)]
        for spec in volumes:
            await rig.target.add_volume(spec)
        await rig.target.add_host("acme", host(), volumes)
        await rig.target.grant(grants([1, 2], host()))
        for _ in range(2):  # each may be repeated
            for spec in volumes:
                await rig.target.remove_volume(spec)
            await rig.target.remove_host("acme", host(), volumes)
        assert await rig.subsystems() == [] and await rig.bdevs() == [] and await rig.live_grants() == 0


async def test_volumes_may_leave_after_their_hosts(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.target.add_volume(rig.volume())
        await rig.target.add_host("acme", host(), [rig.volume()])
        await rig.target.remove_host("acme", host(), [rig.volume()])
        await rig.target.remove_volume(rig.volume())
        assert await rig.subsystems() == [] and await rig.bdevs() == []


@pytest.mark.parametrize("known", ["all", "bdev only", "no listener", "nothing"])
async def test_state_is_replayed_whatever_the_target_knows(tmp_path: Path, known: str) -> None:
    async with rigged(tmp_path) as rig:

        async def replay() -> None:
            await rig.target.add_volume(rig.volume())
            await rig.target.add_host("acme", host(), [rig.volume()])

        await replay()
        wanted, endpoint = await rig.subsystems(), await rig.target.endpoint("acme")
        nqn = endpoint.subsystem_nqn
        if known == "bdev only":
            await rig.rpc.call("nvmf_delete_subsystem", {"nqn": nqn})
        elif known == "no listener":
            address = wanted[0]["listen_addresses"][0]
            await rig.rpc.call("nvmf_subsystem_remove_listener", {"nqn": nqn, "listen_address": address})
        elif known == "nothing":
            rig.replays.append(replay)
            await rig.kill()
        await replay()
        assert await rig.subsystems() == wanted
        assert await rig.target.endpoint("acme") == endpoint  # the same port


async def test_a_driver_that_finds_a_running_target_keeps_its_port(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.target.add_volume(rig.volume())
        again = EmbeddedTarget(JsonRpcClient(rig.supervisor.socket), node=NODE.hex())
        await again.add_volume(rig.volume(2, "other"))
        assert (await again.endpoint("other")).port == (await rig.target.endpoint("acme")).port
        await again.close()


async def test_a_port_that_was_taken_meanwhile_is_given_up(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.target.add_volume(rig.volume())
        port = (await rig.target.endpoint("acme")).port
        await rig.target.remove_volume(rig.volume())
        with socket.create_server(("127.0.0.1", port)):
            await rig.target.add_volume(rig.volume())
            assert (await rig.target.endpoint("acme")).port not in (0, port)


async def test_a_port_that_was_asked_for_and_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        async with rigged(tmp_path, port=port) as rig:
            with pytest.raises(TargetRefused, match=str(port)) as caught:
                await rig.target.add_volume(rig.volume())
            assert caught.value.field == "target.listen"


async def test_a_name_that_stands_for_another_file_is_refused(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await rig.target.add_volume(rig.volume(1))
        with pytest.raises(VolumeMismatch):
            await rig.target.add_volume(rig.volume(1, path=rig.volume(2).path))
        with pytest.raises(AlreadyExists):
            await rig.target.add_volume(rig.volume(2, nsid=1))


async def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        with pytest.raises(NotFound, match="bdev_aio_create"):
            await rig.target.add_volume(rig.volume(path=str(tmp_path / "gone")))
        assert await rig.subsystems() == []


class TestReconcile:
    @staticmethod
    def view(owner: HostIdentity, *volumes: VolumeSpec) -> HostView:
        return HostView("acme", owner, volumes)

    async def test_nothing_differs(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            volumes, views = [rig.volume(1), rig.volume(2)], [self.view(host(), rig.volume(2))]
            assert len(await rig.target.reconcile(volumes, views)) == 3
            wanted = await rig.subsystems()
            assert [len(one["hosts"]) for one in wanted[0]["namespaces"]] == [0, 1]
            assert await rig.target.reconcile(volumes, views) == []
            assert await rig.subsystems() == wanted
            await rig.target.grant(grants([1], host()))

    async def test_what_nobody_wants_is_taken_away(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            one, two, three = (rig.volume(n) for n in (1, 2, 3))
            for spec in (one, two, three):
                await rig.target.add_volume(spec)
            await rig.target.add_volume(rig.volume(4, "other"))
            for name in "ab":
                await rig.target.add_host("acme", host(name), [one, two])
            nqn = rig.target.subsystem_nqn("acme")
            await rig.rpc.call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": 3})  # leaves its bdev
            found = await rig.target.reconcile([one], [self.view(host("a"), one)])
            (left,) = await rig.subsystems()
            assert left["nqn"] == nqn and [each["nqn"] for each in left["hosts"]] == [host("a").nqn]
            (namespace,) = left["namespaces"]
            assert (namespace["nsid"], [each["nqn"] for each in namespace["hosts"]]) == (1, [host("a").nqn])
            assert await rig.bdevs() == ["vol1"]
            assert any("vol" not in line and host("b").nqn in line for line in found)
            assert await rig.target.reconcile([one], [self.view(host("a"), one)]) == []

    @pytest.mark.parametrize("change", ["host", "sight", "namespace", "bdev", "mode", "listener", "subsystem", "all"])
    async def test_what_is_missing_or_different_is_put_right(self, tmp_path: Path, change: str) -> None:
        async with rigged(tmp_path) as rig:
            volumes, views = [rig.volume(1), rig.volume(2)], [self.view(host(), rig.volume(1), rig.volume(2))]
            await rig.target.reconcile(volumes, views)
            wanted, call, nqn = await rig.subsystems(), rig.rpc.call, rig.target.subsystem_nqn("acme")
            address = wanted[0]["listen_addresses"][0]
            if change == "host":
                await call("nvmf_subsystem_remove_host", {"nqn": nqn, "host": host().nqn})
            elif change == "sight":
                await call("nvmf_ns_remove_host", {"nqn": nqn, "nsid": 2, "host": host().nqn})
            elif change == "namespace":
                await call("nvmf_subsystem_remove_ns", {"nqn": nqn, "nsid": 2})
            elif change == "bdev":
                await call("bdev_aio_delete", {"name": "vol2"})
            elif change == "mode":
                await call("forebay_bdev_set_mode", {"name": "vol2", "mode": "raw"})
            elif change == "listener":
                await call("nvmf_subsystem_remove_listener", {"nqn": nqn, "listen_address": address})
            elif change == "subsystem":
                await call("nvmf_delete_subsystem", {"nqn": nqn})
            else:
                await rig.kill()
            assert await rig.target.reconcile(volumes, views)
            assert await rig.subsystems() == wanted
            modes = {one["driver_specific"]["aio"]["mode"] for one in await call("bdev_get_bdevs")}
            assert modes == {"fenced"}
            assert await rig.target.reconcile(volumes, views) == []

    @pytest.mark.parametrize("there", ["nothing", "a directory", "an empty file"])
    async def test_what_cannot_be_opened_keeps_no_other_from_being_served(self, tmp_path: Path, there: str) -> None:
        async with rigged(tmp_path) as rig:
            bad, good, alone = rig.volume(1), rig.volume(2), rig.volume(3, "other")
            volumes, views = [bad, good, alone], [self.view(host(), bad, good)]
            await rig.target.reconcile(volumes, views)
            wanted, path = await rig.subsystems(), Path(bad.path)
            kept = path.rename(tmp_path / "kept")
            if there == "a directory":
                path.mkdir()
            elif there == "an empty file":
                path.touch()
            await rig.kill()
            with pytest.raises(VolumesFailed, match="volume 1: ") as caught:
                await rig.target.reconcile(volumes, views)
            assert set(caught.value.failed) == {bad.volume}
            assert sorted(await rig.bdevs()) == ["vol2", "vol3"]
            seen = {one["nsid"]: len(one["hosts"]) for each in await rig.subsystems() for one in each["namespaces"]}
            assert seen == {2: 1, 3: 0}
            await rig.target.grant(grants([1], host(), volume=2))
            assert await rig.target.reconcile([good, alone], [self.view(host(), good)]) == []
            if there != "nothing":
                path.rmdir() if path.is_dir() else path.unlink()
            kept.rename(path)
            assert await rig.target.reconcile(volumes, views)
            left = await rig.subsystems()
            for each in (*left, *wanted):
                each["namespaces"].sort(key=lambda one: one["nsid"])
            assert sorted(left, key=_nqn) == sorted(wanted, key=_nqn)

    async def test_a_volume_that_moved_is_opened_where_it_lies_now(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            spec = rig.volume()
            await rig.target.reconcile([spec], [self.view(host(), spec)])
            moved = replace(spec, path=str(Path(spec.path).rename(tmp_path / "moved.vol")))
            assert await rig.target.reconcile([moved], [self.view(host(), moved)])
            (bdev,) = await rig.rpc.call("bdev_get_bdevs")
            assert bdev["driver_specific"]["aio"]["filename"] == moved.path
            (subsystem,) = await rig.subsystems()
            assert [each["nqn"] for each in subsystem["namespaces"][0]["hosts"]] == [host().nqn]

    async def test_another_nodes_subsystems_are_left_alone(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            other = EmbeddedTarget(JsonRpcClient(rig.supervisor.socket), node="other")
            await other.add_volume(rig.volume())
            assert await rig.target.reconcile([], []) == []
            assert len(await rig.subsystems()) == 1 and await rig.bdevs() == ["vol1"]
            await other.close()


class TestGrants:
    async def test_they_are_given_and_taken(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            await rig.target.add_volume(rig.volume(1))
            await rig.target.add_volume(rig.volume(2))
            await rig.target.grant(
                [*grants([1, 2], host("a")), *grants([3], host("b")), *grants([4], host("a"), host("b"), volume=2)]
            )
            assert await rig.live_grants() == 4
            await rig.target.revoke([GrantId(1), GrantId(4), GrantId(99)])
            assert await rig.live_grants() == 2
            await rig.target.teardown_host(host("a"))
            await rig.target.teardown_all(1)
            assert await rig.live_grants() == 0

    async def test_more_than_one_message_holds(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            await rig.target.add_volume(rig.volume())
            await rig.target.grant(grants(range(10_000), host()))
            assert await rig.live_grants() == 10_000
            await rig.target.revoke([GrantId(n) for n in range(10_000)])
            assert await rig.live_grants() == 0

    async def test_all_or_none(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            await rig.target.add_volume(rig.volume(1))
            await rig.target.add_volume(rig.volume(2))
            await rig.target.grant(grants([7], host("b"), volume=2))
            overlapping = [WriteGrant(GrantId(8), (host("a"),), Extent(VolumeId(2), REGION + 7 * 4096, 4096))]
            with pytest.raises(AlreadyExists):
                await rig.target.grant([*grants([1, 2], host("a")), *overlapping])
            assert await rig.live_grants() == 1

    async def test_a_volume_that_is_not_served_is_refused(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            await rig.target.add_volume(rig.volume(1))
            with pytest.raises(NotFound):
                await rig.target.grant([*grants([1], host()), *grants([2], host(), volume=2)])
            assert await rig.live_grants() == 0


class TestMedia:
    async def test_counters_begin_at_nothing(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            await rig.target.add_volume(rig.volume())
            assert await rig.target.io_stats() == IoStats(0, 0, 0, 0)

    async def test_a_barrier_says_flushed(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            await rig.target.add_volume(rig.volume())
            assert await rig.target.barrier(rig.volume()) is Barrier.FLUSHED

    async def test_grants_are_sealed_in_one_exchange(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with rigged(tmp_path) as rig:
            spec = rig.volume()
            await rig.target.add_volume(spec)
            await rig.target.grant(grants(range(1, 10), host()))
            assert await rig.target.seal([GrantId(1)], spec) is Barrier.FLUSHED
            asked = watched(rig.target, monkeypatch)
            assert await rig.target.seal([GrantId(2), GrantId(99)], spec) is Barrier.FLUSHED
            assert asked == ["forebay_seal"] and await rig.live_grants() == 7
            many = [GrantId(n) for n in range(3, 5_000)]
            assert await rig.target.seal(many, spec) is Barrier.FLUSHED
            assert await rig.live_grants() == 0

    async def test_a_target_that_cannot_seal_is_asked_twice(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An older one, which goes on running under a newer daemon."""
        async with rigged(tmp_path) as rig:
            spec = rig.volume()
            await rig.target.add_volume(spec)
            await rig.target.grant(grants([1], host()))
            await rig.target.reconcile([spec], [])  # as after a restart: the one that answers now is asked what it can
            asked = watched(
                rig.target, monkeypatch, able={"fencing": True, "barrier": True, "per_host_visibility": True}
            )
            assert await rig.target.seal([GrantId(1)], spec) is Barrier.FLUSHED
            assert asked == ["forebay_get_info", "forebay_grants_revoke", "forebay_barrier"]
            assert await rig.live_grants() == 0
            monkeypatch.undo()
            await rig.target.reconcile([spec], [])
            asked = watched(rig.target, monkeypatch)
            await rig.target.seal([], spec)
            assert asked == ["forebay_get_info", "forebay_seal"]

    async def test_a_target_that_knows_no_order_is_not_told_any(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An older one, which goes on running under a newer daemon."""
        async with rigged(tmp_path) as rig:
            told: list[str] = []
            real, older = rig.target._rpc.call, True

            async def call(method: str, params: Mapping[str, Any] | None = None, **options: Any) -> Any:
                told.extend(
                    name for name, value in (params or {}).items() if name in ("order", "incarnation") and value
                )
                answer = await real(method, params, **options)
                if method == "forebay_get_info" and older:
                    answer["capabilities"].pop("ordered")
                return answer

            monkeypatch.setattr(rig.target._rpc, "call", call)
            for older in (True, False):
                await rig.target.info()
                await rig.target.teardown_all(3)
                await rig.target.add_volume(rig.volume())
                await rig.target.prepare_region(rig.volume(), REGION, REGION)
                await rig.target.grant(grants([1], host()))
                await rig.target.release_region(rig.volume(), REGION, REGION)
                await rig.target.revoke([GrantId(1)])
                assert told == ([] if older else ["incarnation", *["order"] * 4])

    async def test_regions_are_zeroed_and_given_back(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            spec = rig.volume()
            with Path(spec.path).open("r+b") as file:
                file.seek(REGION)
                file.write(b"left by another")
            await rig.target.add_volume(spec)
            await rig.target.prepare_region(spec, REGION, REGION)
            zeros = crc32c(bytes(REGION), 5)
            assert await rig.target.checksums(spec, [(REGION, REGION, 5)]) == [zeros]
            assert Path(spec.path).stat().st_blocks * 512 >= REGION
            await rig.target.release_region(spec, REGION, REGION)
            assert Path(spec.path).stat().st_blocks * 512 < REGION

    async def test_checksums_are_those_of_the_bytes(self, tmp_path: Path) -> None:
        async with rigged(tmp_path) as rig:
            spec = rig.volume()
            data = os.urandom(3 * 4096)
            with Path(spec.path).open("r+b") as file:
                file.seek(REGION)
                file.write(data)
            await rig.target.add_volume(spec)
            ranges = [(REGION + i * 4096, 4096 - i, 7 * i) for i in range(3)]
            sums = [crc32c(data[i * 4096 : i * 4096 + 4096 - i], 7 * i) for i in range(3)]
            assert await rig.target.checksums(spec, ranges) == sums
            many = [(REGION, 16, seed) for seed in range(5_000)]
            assert await rig.target.checksums(spec, many) == [crc32c(data[:16], seed) for _, _, seed in many]

    @pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm to be asked for too much")
    async def test_a_full_drive_is_no_space(self, tmp_path: Path) -> None:
        # tmpfs refuses at once what is larger than itself; other file systems would fill up first.
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            found = os.statvfs(file.name)
            size_bytes = 2 * found.f_blocks * found.f_frsize // REGION * REGION
            os.truncate(file.name, size_bytes)
            async with rigged(tmp_path) as rig:
                spec = rig.volume(path=file.name, size_bytes=size_bytes)
                await rig.target.add_volume(spec)
                with pytest.raises(NoSpace):
                    await rig.target.prepare_region(spec, 0, size_bytes)
                await rig.target.prepare_region(spec, REGION, 4096)


async def test_a_stopped_target_is_unavailable_in_time_and_one_that_follows_serves(tmp_path: Path) -> None:
    async with rigged(tmp_path, times=replace(TIMES, probe_timeout_s=0.3)) as rig:
        await rig.target.add_volume(rig.volume())
        rig.replays.append(lambda: rig.target.add_volume(rig.volume()))
        impatient = EmbeddedTarget(JsonRpcClient(rig.supervisor.socket, timeout_s=0.1), node=NODE.hex())
        assert rig.supervisor.pid is not None
        os.kill(rig.supervisor.pid, signal.SIGSTOP)
        with pytest.raises(Unavailable):
            await impatient.info()
        async with asyncio.timeout(DEADLINE_S):
            while rig.supervisor.restarts == 0 or not rig.supervisor.serving:
                await asyncio.sleep(0.01)
        assert await rig.target.barrier(rig.volume()) is Barrier.FLUSHED
        await impatient.close()


async def test_secrets_of_a_host_that_could_not_be_let_in_are_kept_by_nobody(tmp_path: Path) -> None:
    async with rigged(tmp_path, keys=HostKeyFiles(tmp_path / "keys", NODE.hex())) as rig:
        one, absent = rig.volume(1), rig.volume(2)
        await rig.target.add_volume(one)
        let_in, refused = (replace(host(n), secrets=HostSecrets(Secret.generate())) for n in "ab")
        await rig.target.add_host("acme", let_in, [one])
        with pytest.raises(NotFound):
            await rig.target.add_host("acme", refused, [one, absent])
        with pytest.raises(NotFound):  # one that was let in before keeps its own
            await rig.target.add_host("acme", let_in, [one, absent])
        assert [file.name.rpartition("-")[2] for file in (tmp_path / "keys").iterdir()] == ["a"]
        await rig.target.reconcile([one], [HostView("acme", let_in, (one,))])
        assert [key["name"].rpartition("-")[2] for key in await rig.rpc.call("keyring_get_keys")] == ["a"]
        without = EmbeddedTarget(JsonRpcClient(rig.supervisor.socket), node=NODE.hex())
        await without.reconcile([one], [])  # of a daemon that has no authentication any more
        assert await rig.rpc.call("keyring_get_keys") == []
        await without.close()


async def test_another_node_makes_the_transport_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rigged(tmp_path) as rig:
        real = rig.target._rpc.call

        async def call(method: str, params: Mapping[str, Any] | None = None, **options: Any) -> Any:
            if method == "nvmf_create_transport":
                await rig.rpc.call(method, {"trtype": "TCP"})
            return await real(method, params, **options)

        monkeypatch.setattr(rig.target._rpc, "call", call)
        await rig.target.add_volume(rig.volume(1))
        assert (await rig.target.endpoint("acme")).port


async def test_a_transport_that_the_target_has_not(tmp_path: Path) -> None:
    """As an `nvmf_tgt` that was built without RDMA; the embedded one has none either, and says it in the same words."""
    async with rigged(tmp_path) as rig:
        driver = SpdkTarget(
            JsonRpcClient(rig.supervisor.socket),
            node=NODE.hex()[:16],
            address="127.0.0.1",
            port=0,
            listeners=[Listener("RDMA", "127.0.0.1", 4421)],
        )
        try:
            with pytest.raises(TargetRefused, match="has no NVMe/RDMA: was it built with it") as caught:
                await driver.add_host("acme", host(), [])
            assert caught.value.field == "nvmf_tgt.rdma_listen"
        finally:
            await driver.close()
