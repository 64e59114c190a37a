"""Hosts that have to prove who they are to SPDK's target: clients', and the node's own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.appliance.dataplane.host_keys import HostKeyFiles
from forebay.checksum import crc32c
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.errors import TargetRefused
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import DhGroup
from tests.client.conftest import new_host
from tests.client.test_authenticated import soon
from tests.spdk.rig import NODE, REGION, rigged, write

pytestmark = [pytest.mark.spdk, pytest.mark.timeout(180)]


async def refused(transport: NvmeTcpTransport) -> None:
    with pytest.raises(TargetRefused):
        await asyncio.to_thread(transport.connect, soon())
    transport.close()


@pytest.mark.parametrize("kind", ["file", "aio"])
async def test_nobody_is_let_in_by_a_name(tmp_path: Path, kind: str) -> None:
    keys = HostKeyFiles(tmp_path / "keys", NODE.hex()[:16])
    async with rigged(tmp_path, kind, keys=keys) as rig:
        one = await rig.volume(1)
        await rig.target.add_volume(one)
        plain = new_host()
        secrets = HostSecrets(Secret.generate(), Secret.generate(), groups=(DhGroup.NULL,))
        host = HostIdentity(plain.nqn, plain.host_id, secrets)
        await rig.target.add_host("acme", host, [one])
        await rig.target.prepare_region(one, REGION, REGION)  # by the node's own host where there is a store
        transport = await rig.transport(host)
        assert await write(transport, 1, REGION, b"a" * LBA_BYTES) is None
        assert await rig.target.checksums(one, [(REGION, LBA_BYTES, 0)]) == [crc32c(b"a" * LBA_BYTES, 0)]
        await refused(await rig.transport(plain))
        own = rig.target._own.identity
        await refused(await rig.transport(HostIdentity(own.nqn, own.host_id)))

        await rig.target.teardown_host(host)
        await refused(await rig.transport(plain))
        assert await write(transport, 1, REGION, b"b" * LBA_BYTES) is None
        transport.close()
        before = await rig.rpc.call("keyring_get_keys")
        assert any(host.nqn.rpartition(":")[2] in str(key["name"]) for key in before)
        await rig.target.remove_host("acme", host, [one])
        after = await rig.rpc.call("keyring_get_keys")
        assert not any(host.nqn.rpartition(":")[2] in str(key["name"]) for key in after)


async def test_a_session_that_ends_when_the_target_was_started_anew(tmp_path: Path) -> None:
    """The target does not know its keys any more; nobody is kept from ending it by that."""
    async with rigged(tmp_path, "file", keys=HostKeyFiles(tmp_path / "keys", NODE.hex()[:16])) as rig:
        one = await rig.volume(1)
        rig.replays.append(lambda: rig.target.reconcile([one], []))
        await rig.target.add_volume(one)
        host = replace(new_host(), secrets=HostSecrets(Secret.generate(), Secret.generate()))
        await rig.target.add_host("acme", host, [one])
        await rig.kill()
        await rig.target.remove_host("acme", host, [one])
        assert not list((tmp_path / "keys").iterdir())
