"""A node whose hosts have to prove who they are, with either target: `[target] authentication = "dhchap"`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spdk.rpc.client import JSONRPCClient  # type: ignore[import-untyped]

from forebay.client.client import Client
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.nvme_tcp import NvmeTcpTransport
from forebay.clock import SystemClock
from forebay.errors import ForebayError, TargetRefused
from forebay.ids import HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret
from tests import targets
from tests.appliance.target.conftest import eventually
from tests.client.conftest import NodeProcess

VALUE = bytes(range(256)) * 1024


@pytest.fixture(scope="module", params=targets.EACH)
def node(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[NodeProcess]:
    environment = {**targets.environment(request.param), "FOREBAY_TARGET_AUTHENTICATION": "dhchap"}
    node = NodeProcess(tmp_path_factory.mktemp("node") / "data", **environment)
    yield node
    node.stop()


def target_of(node: NodeProcess) -> Any:
    target = node.info["target"]
    assert isinstance(target, dict)
    return JSONRPCClient(target["socket"])


def value_of(client: Client, keys: list[bytes]) -> bytes | None:
    value = client.get(keys)[0].value
    return None if value is None else bytes(value)


def host_and_address(client: Client) -> tuple[HostIdentity, SubsystemAddress]:
    """Who a client is to the target, and where that is."""
    view = client._session.view
    endpoint = view.reply.endpoints[0]
    return view.host, SubsystemAddress(endpoint.address, endpoint.port, endpoint.subsystem_nqn)


def soon() -> int:
    return SystemClock().monotonic_ms() + 30_000


def refused(address: SubsystemAddress, host: HostIdentity) -> str:
    transport = NvmeTcpTransport(address, host)
    with pytest.raises(ForebayError) as caught:
        transport.connect(soon())
    transport.close()
    assert isinstance(caught.value, TargetRefused), caught.value
    return str(caught.value)


def key_files(node: NodeProcess) -> list[Path]:
    return list((node.data / "run" / "keys").iterdir())


def test_clients_prove_themselves(node: NodeProcess) -> None:
    with node.connect() as client:
        assert client.put([b"mine"], [VALUE])[0].stored
        assert value_of(client, [b"mine"]) == VALUE
        host, address = host_and_address(client)
        with target_of(node) as target:
            pairs = [one for one in target.nvmf_subsystem_get_qpairs(nqn=address.nqn) if one["hostnqn"] == host.nqn]
        assert len(pairs) >= 2
        assert all(one["auth"]["state"] == "completed" and one["auth"]["dhgroup"] == "null" for one in pairs)
        with node.connect() as other:
            assert value_of(other, [b"mine"]) == VALUE
            assert host_and_address(other)[0].secrets != host.secrets


def test_each_process_of_a_session_has_secrets_of_its_own(node: NodeProcess) -> None:
    with node.connect() as client:
        assert client.put([b"joint"], [VALUE])[0].stored
        with Client.join(node.url, token=node.token, session_token=client.join_token) as other:
            assert value_of(other, [b"joint"]) == VALUE
            mine, theirs = host_and_address(client)[0], host_and_address(other)[0]
            assert mine.secrets is not None and theirs.secrets is not None
            assert mine.nqn != theirs.nqn and mine.secrets.host != theirs.secrets.host
            assert mine.secrets.controller != theirs.secrets.controller


def test_whoever_knows_a_host_but_no_secret_stays_outside(node: NodeProcess) -> None:
    with node.connect() as client:
        assert client.put([b"other"], [VALUE])[0].stored
        host, address = host_and_address(client)
        assert host.secrets is not None
        assert "no secret" in refused(address, HostIdentity(host.nqn, host.host_id))
        wrong = HostSecrets(Secret.generate(), host.secrets.controller, groups=host.secrets.groups)
        assert "does not take" in refused(address, HostIdentity(host.nqn, host.host_id, wrong))
        fooled = HostSecrets(host.secrets.host, Secret.generate(), groups=host.secrets.groups)
        assert "does not prove" in refused(address, HostIdentity(host.nqn, host.host_id, fooled))
        assert value_of(client, [b"other"]) == VALUE


def test_a_target_that_is_started_anew_knows_the_hosts_again(node: NodeProcess) -> None:
    with node.connect() as client:
        assert client.put([b"again"], [VALUE])[0].stored
        node.kill_target()
        eventually(lambda: client.get([b"again"])[0].hit, "the target is back", 60)
        host, address = host_and_address(client)
        assert "no secret" in refused(address, HostIdentity(host.nqn, host.host_id))


def test_secrets_go_with_the_session_and_are_nowhere_else(node: NodeProcess) -> None:
    client = node.connect()
    assert client.put([b"gone"], [VALUE])[0].stored
    secrets = host_and_address(client)[0].secrets
    assert secrets is not None
    assert any(secrets.host.text() in file.read_text() for file in key_files(node))
    assert all(file.stat().st_mode & 0o077 == 0 for file in key_files(node))
    client.close()
    eventually(lambda: not key_files(node), "the files are gone", 30)
    with target_of(node) as target:
        assert not [one for one in target.keyring_get_keys() if one["name"].startswith("forebay-")]
    logs = [node.data.parent / "node.log", *node.data.rglob("*.log")]
    assert not any("DHHC" in log.read_text(errors="replace") for log in logs)


@pytest.mark.parametrize("keeps_target", [True, False])
def test_a_node_that_starts_anew_has_no_old_secrets(node: NodeProcess, keeps_target: bool) -> None:
    with node.connect() as client:
        key = f"anew {keeps_target}".encode()
        assert client.put([key], [VALUE])[0].stored
        before = {file.name for file in key_files(node)}
        assert before
        if keeps_target:
            node.process.kill()
            node.process.wait()
        else:
            node.kill()
        node.start()
        assert not before & {file.name for file in key_files(node)}
        with target_of(node) as target:
            assert not before & {one["name"] for one in target.keyring_get_keys()}
        eventually(lambda: client.get([key])[0].hit, "the client is back", 60)
