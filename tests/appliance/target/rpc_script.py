"""A script of control calls, successes and errors, that SPDK's target and the embedded one are both driven through.

`python -m tests.appliance.target.rpc_script SOCKET DIRECTORY` runs it against a target that was just started and prints
the transcript that `golden/spdk_rpc.json` holds.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from spdk.rpc.client import JSONRPCClient, JSONRPCException  # type: ignore[import-untyped]

__all__ = ["Transcript", "run", "shape"]

Transcript = list[dict[str, Any]]

NQN = "nqn.2026-01.io.forebay:node:script"
OTHER = "nqn.2026-01.io.forebay:node:other"
NONE = "nqn.2026-01.io.forebay:node:none"
HOST = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555"
UUID = "0f0f0f0f-1111-2222-3333-444444444444"
ADDRESS = {"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": "{port}"}

#: Method and parameters. `{dir}` and `{port}` are filled in, and taken out of answers again.
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("spdk_get_version", {}),
    ("no_such_method", {}),
    ("spdk_get_version", {"bogus": 1}),
    # volumes
    ("bdev_get_bdevs", {}),
    ("bdev_aio_create", {"name": "a", "filename": "{dir}/a.vol", "block_size": 4096, "uuid": UUID}),
    ("bdev_aio_create", {"name": "b", "filename": "{dir}/b.vol", "block_size": 4096}),
    ("bdev_aio_create", {"name": "a", "filename": "{dir}/c.vol", "block_size": 4096}),
    ("bdev_aio_create", {"name": "c", "filename": "{dir}/none.vol", "block_size": 4096}),
    ("bdev_aio_create", {"name": "c"}),
    ("bdev_aio_create", {"name": 7, "filename": "{dir}/c.vol"}),
    ("bdev_aio_create", {"name": "c", "filename": "{dir}/c.vol", "block_size": 4096, "uuid": "x"}),
    ("bdev_aio_create", {"name": "c", "filename": "{dir}/c.vol", "block_size": 4096, "bogus": True}),
    ("bdev_get_bdevs", {"name": "a"}),
    ("bdev_get_bdevs", {"name": "none"}),
    ("bdev_get_iostat", {"names": ["a"]}),
    ("bdev_get_iostat", {"names": ["none"]}),
    ("bdev_get_iostat", {"names": ["a", "b"]}),
    ("bdev_aio_delete", {"name": "none"}),
    # transport
    ("nvmf_get_transports", {}),
    ("nvmf_create_transport", {"trtype": "NONE"}),
    ("nvmf_create_transport", {}),
    ("nvmf_create_transport", {"trtype": "TCP", "bogus": 1}),
    ("nvmf_create_transport", {"trtype": "TCP", "max_queue_depth": 64, "in_capsule_data_size": 8192}),
    ("nvmf_create_transport", {"trtype": "TCP"}),
    ("nvmf_get_transports", {}),
    ("nvmf_get_transports", {"trtype": "TCP"}),
    # subsystems
    ("nvmf_get_subsystems", {}),
    ("nvmf_get_subsystems", {"nqn": NONE}),
    ("nvmf_create_subsystem", {"nqn": NQN, "serial_number": "S1", "model_number": "M1", "max_namespaces": 8}),
    ("nvmf_create_subsystem", {"nqn": NQN}),
    ("nvmf_create_subsystem", {"nqn": "not an nqn"}),
    ("nvmf_create_subsystem", {}),
    ("nvmf_create_subsystem", {"nqn": OTHER, "serial_number": "123456789012345678901"}),
    ("nvmf_create_subsystem", {"nqn": OTHER, "allow_any_host": True, "bogus": 1}),
    ("nvmf_create_subsystem", {"nqn": OTHER, "allow_any_host": True}),
    ("nvmf_delete_subsystem", {"nqn": NONE}),
    # listeners
    ("nvmf_subsystem_add_listener", {"nqn": NONE, "listen_address": ADDRESS}),
    ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": {**ADDRESS, "trtype": "NONE"}}),
    ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": {**ADDRESS, "traddr": "192.0.2.1"}}),
    ("nvmf_subsystem_add_listener", {"nqn": NQN}),
    ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": ADDRESS}),
    ("nvmf_subsystem_add_listener", {"nqn": NQN, "listen_address": ADDRESS}),
    ("nvmf_subsystem_add_listener", {"nqn": OTHER, "listen_address": ADDRESS}),
    ("nvmf_subsystem_get_listeners", {"nqn": NQN}),
    ("nvmf_subsystem_get_listeners", {"nqn": NONE}),
    ("nvmf_subsystem_remove_listener", {"nqn": OTHER, "listen_address": {**ADDRESS, "traddr": "127.0.0.2"}}),
    ("nvmf_subsystem_remove_listener", {"nqn": OTHER, "listen_address": ADDRESS}),
    # hosts
    ("nvmf_subsystem_add_host", {"nqn": NQN, "host": HOST}),
    ("nvmf_subsystem_add_host", {"nqn": NQN, "host": HOST}),
    ("nvmf_subsystem_add_host", {"nqn": NONE, "host": HOST}),
    ("nvmf_subsystem_add_host", {"nqn": NQN}),
    ("nvmf_subsystem_remove_host", {"nqn": NQN, "host": HOST + "0"}),
    ("nvmf_subsystem_allow_any_host", {"nqn": NONE, "allow_any_host": True}),
    ("nvmf_subsystem_allow_any_host", {"nqn": NQN, "allow_any_host": True}),
    ("nvmf_subsystem_allow_any_host", {"nqn": NQN, "allow_any_host": False}),
    # namespaces
    ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "none"}}),
    ("nvmf_subsystem_add_ns", {"nqn": NONE, "namespace": {"bdev_name": "a"}}),
    ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "a", "nguid": "12"}}),
    ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "a", "nsid": 9}}),
    ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "a", "nsid": 3, "nguid": "AB" * 16}}),
    ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "b", "nsid": 3}}),
    ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "a"}}),
    ("nvmf_subsystem_add_ns", {"nqn": NQN, "namespace": {"bdev_name": "b", "no_auto_visible": True}}),
    ("nvmf_ns_add_host", {"nqn": NQN, "nsid": 1, "host": HOST}),
    ("nvmf_ns_add_host", {"nqn": NQN, "nsid": 1, "host": HOST}),
    ("nvmf_ns_add_host", {"nqn": NQN, "nsid": 3, "host": HOST}),
    ("nvmf_ns_add_host", {"nqn": NQN, "nsid": 7, "host": HOST}),
    ("nvmf_ns_add_host", {"nqn": NONE, "nsid": 1, "host": HOST}),
    ("nvmf_get_subsystems", {"nqn": NQN}),
    ("nvmf_get_subsystems", {}),
    ("bdev_get_bdevs", {"name": "a"}),
    ("nvmf_ns_remove_host", {"nqn": NQN, "nsid": 1, "host": HOST}),
    ("nvmf_ns_remove_host", {"nqn": NQN, "nsid": 1, "host": HOST}),
    ("nvmf_subsystem_remove_ns", {"nqn": NQN, "nsid": 7}),
    ("nvmf_subsystem_remove_ns", {"nqn": NQN, "nsid": 1}),
    ("nvmf_subsystem_get_controllers", {"nqn": NQN}),
    ("nvmf_subsystem_get_controllers", {"nqn": NONE}),
    ("nvmf_subsystem_get_qpairs", {"nqn": NQN}),
    ("nvmf_get_stats", {}),
    # the way back
    ("nvmf_subsystem_remove_host", {"nqn": NQN, "host": HOST}),
    ("nvmf_delete_subsystem", {"nqn": NQN}),
    ("nvmf_delete_subsystem", {"nqn": NQN}),
    ("nvmf_delete_subsystem", {"nqn": OTHER}),
    ("nvmf_get_subsystems", {}),
    ("bdev_aio_delete", {"name": "a"}),
    ("bdev_aio_delete", {"name": "b"}),
    ("bdev_get_bdevs", {}),
]  # fmt: skip


def _filled(value: Any, words: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name, word in words.items():
            value = value.replace(name, word)
        return value
    if isinstance(value, dict):
        return {name: _filled(one, words) for name, one in value.items()}
    return [_filled(one, words) for one in value] if isinstance(value, list) else value


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(control_socket: Path, directory: Path) -> Transcript:
    """Run the script with SPDK's client; files are made in `directory`."""
    for name in "abc":
        with (directory / f"{name}.vol").open("wb") as file:
            os.truncate(file.fileno(), 64 << 20)
    words = {"{dir}": str(directory), "{port}": str(_free_port())}
    back = {word: name for name, word in words.items()}
    found: Transcript = []
    with JSONRPCClient(str(control_socket)) as client:
        for method, params in STEPS:
            step: dict[str, Any] = {"method": method, "params": params}
            try:
                step["result"] = _filled(getattr(client, method)(**_filled(params, words)), back)
            except JSONRPCException as error:
                step["error"] = _filled(json.loads(re.split(r"response:\n", error.message)[-1]), back)
            found.append(step)
    return found


def shape(value: Any) -> Any:
    """Keys and types of a JSON value; a list is the shapes of its elements, each named once."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        shapes: list[Any] = []
        for one in map(shape, value):
            if one not in shapes:
                shapes.append(one)
        return shapes
    if value is None or isinstance(value, bool | str):
        return type(value).__name__
    return "number"


if __name__ == "__main__":
    transcript = run(Path(sys.argv[1]), Path(sys.argv[2]))
    origin = next(step["result"]["version"] for step in transcript if step["method"] == "spdk_get_version")
    json.dump({"recorded_from": origin, "steps": transcript}, sys.stdout, indent=1)
    print()
