"""Control methods with the names, parameters and answers of SPDK's `nvmf_tgt`, for subsystems and their parts.

Unknown parameters are refused as SPDK does; ones that mean nothing here are taken and ignored. Where SPDK answers an
unknown subsystem with "Invalid parameters", so does this.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Any

from forebay.appliance.dataplane.target.authentication_methods import host_keys
from forebay.appliance.dataplane.target.bdev_methods import TICK_RATE, optional_uuid
from forebay.appliance.dataplane.target.keyring import HostKeys
from forebay.appliance.dataplane.target.queue import Queue
from forebay.appliance.dataplane.target.rpc import INTERNAL_ERROR, Method, Params, RpcError
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.dataplane.target.subsystems import MAX_CNTLID, ListenAddress, Namespace, Subsystem
from forebay.errors import ConfigInvalid
from forebay.nvmetcp.spec import DISCOVERY_NQN, NQN_MAX_BYTES

__all__ = ["NvmfMethods"]


class NvmfMethods:
    """The methods, bound to a server; `table` lists them."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def table(self) -> dict[str, Method]:
        """Every method by name."""
        quick: Iterable[Callable[[Params], Any]] = (
            self.nvmf_create_transport,
            self.nvmf_get_transports,
            self.nvmf_create_subsystem,
            self.nvmf_get_subsystems,
            self.nvmf_subsystem_add_ns,
            self.nvmf_ns_add_host,
            self.nvmf_subsystem_add_listener,
            self.nvmf_subsystem_get_listeners,
            self.nvmf_subsystem_add_host,
            self.nvmf_subsystem_get_controllers,
            self.nvmf_subsystem_get_qpairs,
            self.nvmf_get_stats,
        )
        waiting: Iterable[Callable[[Params], Any]] = (
            self.nvmf_delete_subsystem,
            self.nvmf_subsystem_remove_ns,
            self.nvmf_ns_remove_host,
            self.nvmf_subsystem_remove_listener,
            self.nvmf_subsystem_remove_host,
            self.nvmf_subsystem_allow_any_host,
        )
        methods = {run.__name__: Method(run) for run in quick}
        methods.update({run.__name__: Method(run, waits=True) for run in waiting})
        return methods

    # --- transport --------------------------------------------------------------------------------------------------

    def nvmf_create_transport(self, params: Params) -> bool:
        """Set limits for connections to come; only TCP exists."""
        if (kind := params.text("trtype")).upper() != "TCP":
            raise RpcError(-32602, f"Invalid transport type '{kind}'")
        names = {
            "max_queue_depth": "max_queue_depth",
            "max_io_qpairs_per_ctrlr": "max_io_queues",
            "in_capsule_data_size": "in_capsule_bytes",
            "max_io_size": "max_command_bytes",
        }
        changes = {ours: params.integer(theirs, 0, 1 << 32, -1) for theirs, ours in names.items() if params.has(theirs)}
        # Other parameters have no meaning here; SPDK takes any without a word.
        if self._server.transport_created:
            raise RpcError(INTERNAL_ERROR, "Transport type 'TCP' already exists")
        try:
            self._server.set_limits(**changes)
        except ConfigInvalid:
            raise RpcError.invalid_params() from None
        self._server.transport_created = True
        return True

    def nvmf_get_transports(self, params: Params) -> Any:
        """The TCP transport, once created."""
        kind = params.optional_text("trtype")
        params.ignore("tgt_name")
        params.finish()
        if not self._server.transport_created:
            if kind is not None:
                raise RpcError.of_errno(errno.ENODEV)
            return []
        if kind not in (None, "TCP"):
            raise RpcError.of_errno(errno.ENODEV)
        limits = self._server.limits
        return [
            {
                "trtype": "TCP",
                "max_queue_depth": limits.max_queue_depth,
                "max_io_qpairs_per_ctrlr": limits.max_io_queues,
                "in_capsule_data_size": limits.in_capsule_bytes,
                "max_io_size": limits.max_command_bytes,
                "io_unit_size": limits.chunk_bytes,
                "max_aq_depth": limits.max_queue_depth,
                "dif_insert_or_strip": False,
                "zcopy": False,
                "c2h_success": True,
                "iobuf_small_cache_size": 0,
                "iobuf_large_cache_size": 0,
                "sock_priority": 0,
                "abort_timeout_sec": 0,
                "ack_timeout": 0,
                "data_wr_pool_size": 0,
                "disable_command_passthru": False,
                "kas": 100,
                "min_kato": 0,
            }
        ]

    # --- subsystems -------------------------------------------------------------------------------------------------

    def _subsystem(self, params: Params) -> Subsystem:
        params.ignore("tgt_name")
        found = self._server.subsystem(params.text("nqn"))
        if found is None:
            raise RpcError.invalid_params()
        return found

    def nvmf_create_subsystem(self, params: Params) -> bool:
        """Create a subsystem without hosts, namespaces or listeners."""
        nqn = params.text("nqn")
        serial, model = params.text("serial_number", "00000000000000000000"), params.text("model_number", "Forebay")
        most = params.integer("max_namespaces", 0, 1 << 20, 32) or 32
        allow_any_host = params.flag("allow_any_host", False)
        first, last = (
            params.integer("min_cntlid", 1, MAX_CNTLID, 1),
            params.integer("max_cntlid", 1, MAX_CNTLID, MAX_CNTLID),
        )
        params.ignore("tgt_name", "ana_reporting", "max_discard_size_kib", "max_write_zeroes_size_kib", "passthrough")
        params.finish()
        sound = nqn.startswith("nqn.") and len(nqn.encode()) <= NQN_MAX_BYTES and nqn.isprintable()
        if first > last or len(serial.encode()) > 20 or len(model.encode()) > 40:
            raise RpcError.invalid_params()
        unable = RpcError(INTERNAL_ERROR, f"Unable to create subsystem {nqn}")
        if not sound or nqn == DISCOVERY_NQN:
            raise unable
        subsystem = Subsystem(
            nqn, serial=serial, model=model, max_namespaces=most, allow_any_host=allow_any_host, cntlids=(first, last)
        )
        try:
            self._server.add_subsystem(subsystem)
        except FileExistsError:
            raise unable from None
        return True

    def nvmf_delete_subsystem(self, params: Params) -> bool:
        """Delete a subsystem; its connections have ended when this answers."""
        subsystem = self._subsystem(params)
        params.finish()
        self._server.delete_subsystem(subsystem)
        return True

    def nvmf_get_subsystems(self, params: Params) -> Any:
        """One or all subsystems; beyond SPDK's fields, a namespace that not all see lists its `hosts`.

        The discovery subsystem comes first; like SPDK's it has no `namespaces`.
        """
        nqn = params.optional_text("nqn")
        params.ignore("tgt_name")
        params.finish()
        wzsl = self._server.limits.mdts
        if nqn is None:
            subsystems = [self._server.discovery, *self._server.subsystems.values()]
            return [_describe(one, wzsl) for one in subsystems]
        found = self._server.subsystem(nqn)
        if found is None:
            raise RpcError.of_errno(errno.ENODEV)
        return [_describe(found, wzsl)]

    def nvmf_subsystem_add_ns(self, params: Params) -> int:
        """Attach a volume; answers its NSID."""
        subsystem, values = self._subsystem(params), params.table("namespace")
        params.finish()
        volume = self._server.volumes.get(values.text("bdev_name"))
        nguid, uuid = values.text("nguid", ""), optional_uuid(values.optional_text("uuid"))
        nsid, hidden = values.integer("nsid", 0, 0xFFFFFFFE, 0), values.flag("no_auto_visible", False)
        values.ignore("anagrpid", "eui64", "ptpl_file")
        values.finish()
        try:
            octets = bytes.fromhex(nguid)
        except ValueError:
            octets = b"?"
        if volume is None or (nguid and len(octets) != 16):
            raise RpcError.invalid_params()
        identity = uuid or volume.uuid
        if not nguid:
            octets = identity.bytes if identity is not None else bytes(16)
        namespace = Namespace(nsid, volume, nguid=octets, uuid=identity, auto_visible=not hidden)
        try:
            self._server.add_namespace(subsystem, namespace)
        except OSError:
            raise RpcError.invalid_params() from None
        return namespace.nsid

    def nvmf_subsystem_remove_ns(self, params: Params) -> bool:
        """Detach a volume; no command on it is under way when this answers."""
        subsystem, nsid = self._subsystem(params), params.integer("nsid", 1, 0xFFFFFFFE)
        params.finish()
        try:
            self._server.remove_namespace(subsystem, nsid)
        except OSError:
            raise RpcError.invalid_params() from None
        return True

    def _hidden_namespace(self, params: Params) -> tuple[Namespace, str]:
        subsystem = self._subsystem(params)
        found = subsystem.namespaces.get(params.integer("nsid", 1, 0xFFFFFFFE))
        host = params.text("host")
        params.finish()
        if found is None or found.auto_visible:
            raise RpcError.invalid_params()
        return found, host

    def nvmf_ns_add_host(self, params: Params) -> bool:
        """Let a host see a namespace that was attached with `no_auto_visible`."""
        namespace, host = self._hidden_namespace(params)
        self._server.show_namespace(namespace, host)
        return True

    def nvmf_ns_remove_host(self, params: Params) -> bool:
        """Take that back."""
        namespace, host = self._hidden_namespace(params)
        self._server.hide_namespace(namespace, host)
        return True

    # --- listeners --------------------------------------------------------------------------------------------------

    def _listen_address(self, params: Params) -> tuple[str, str, int]:
        values = params.table("listen_address")
        params.ignore("secure_channel", "sock_impl", "ana_state")
        params.finish()
        kind, family = values.text("trtype"), values.text("adrfam", "IPv4")
        address, port = values.text("traddr"), values.text("trsvcid", "")
        values.finish()
        families = {"ipv4": "IPv4", "ipv6": "IPv6"}
        number = int(port) if port.isascii() and port.isdigit() else 65_536
        sound = bool(address) and address.isprintable()
        if kind.upper() != "TCP" or family.lower() not in families or number > 65_535 or not sound:
            raise RpcError.invalid_params()
        return families[family.lower()], address, number

    def nvmf_subsystem_add_listener(self, params: Params) -> bool:
        """Listen for a subsystem; `trsvcid` "0" lets the kernel choose a port, which the get methods then show."""
        subsystem = self._subsystem(params)
        family, address, port = self._listen_address(params)
        if not self._server.transport_created:
            raise RpcError.invalid_params()
        try:
            self._server.add_listener(subsystem, family, address, port)
        except OSError:
            raise RpcError.invalid_params() from None
        return True

    def nvmf_subsystem_remove_listener(self, params: Params) -> bool:
        """Stop listening; the subsystem's connections that came this way have ended when this answers."""
        subsystem = self._subsystem(params)
        listener = ListenAddress(*self._listen_address(params))
        try:
            self._server.remove_listener(subsystem, listener)
        except OSError:
            raise RpcError.invalid_params() from None
        return True

    def nvmf_subsystem_get_listeners(self, params: Params) -> Any:
        """Where a subsystem listens."""
        subsystem = self._subsystem(params)
        params.finish()
        return [{"address": one.to_dict()} for one in subsystem.sorted_listeners()]

    # --- hosts ------------------------------------------------------------------------------------------------------

    def nvmf_subsystem_add_host(self, params: Params) -> bool:
        """Allow a host NQN; with keys, for who proves itself by them."""
        subsystem, host = self._subsystem(params), params.text("host")
        keys = host_keys(self._server.keyring, params)
        params.finish()
        if not 1 <= len(host.encode()) <= NQN_MAX_BYTES:
            raise RpcError.invalid_params()
        with self._server.lock:
            if host in subsystem.hosts:
                raise RpcError(INTERNAL_ERROR, "Internal error")
            subsystem.hosts[host] = keys
            self._server.discovery_changed()
        return True

    def nvmf_subsystem_remove_host(self, params: Params) -> bool:
        """Disallow a host NQN; its connections have ended when this answers."""
        subsystem, host = self._subsystem(params), params.text("host")
        params.ignore("timeout_ms")
        params.finish()
        with self._server.lock:
            if host not in subsystem.hosts:
                raise RpcError(INTERNAL_ERROR, "Internal error")
            del subsystem.hosts[host]
            self._server.discovery_changed()
        if not subsystem.allows(host):
            self._server.teardown(lambda one: one.subsystem is subsystem and one.host.nqn == host)
        return True

    def nvmf_subsystem_allow_any_host(self, params: Params) -> bool:
        """Switch the allow-list off or on; on, hosts that are not in it have been cut off when this answers."""
        subsystem, allow = self._subsystem(params), params.flag("allow_any_host")
        params.finish()
        with self._server.lock:
            subsystem.allow_any_host = allow
            self._server.discovery_changed()
        if not allow:
            self._server.teardown(lambda one: one.subsystem is subsystem and not subsystem.allows(one.host.nqn))
        return True

    # --- what is going on -------------------------------------------------------------------------------------------

    def nvmf_subsystem_get_controllers(self, params: Params) -> Any:
        """Controllers of a subsystem."""
        subsystem = self._subsystem(params)
        params.finish()
        with self._server.lock:
            found = sorted(
                (one for one in self._server.controllers if one.subsystem is subsystem), key=lambda one: one.cntlid
            )
            return [
                {
                    "cntlid": one.cntlid,
                    "cntrltype": one.kind,
                    "hostnqn": one.host.nqn,
                    "hostid": one.host.host_id,
                    "num_io_qpairs": sum(1 for qid in one.queues if qid),
                }
                for one in found
            ]

    def nvmf_subsystem_get_qpairs(self, params: Params) -> Any:
        """Connections of a subsystem."""
        subsystem = self._subsystem(params)
        params.finish()
        with self._server.lock:
            return [
                _qpair(queue)
                for queue in self._server.queues
                if queue.controller is not None and queue.controller.subsystem is subsystem
            ]

    def nvmf_get_stats(self, params: Params) -> Any:
        """Counts of the whole target, as one poll group."""
        params.ignore("tgt_name")
        params.finish()
        with self._server.lock:
            bound = [queue for queue in self._server.queues if queue.controller is not None]
            counts = self._server.counts
            group = {
                "name": "forebay",
                "admin_qpairs": counts["admin_qpairs"],
                "io_qpairs": counts["io_qpairs"],
                "current_admin_qpairs": sum(1 for queue in bound if not queue.qid),
                "current_io_qpairs": sum(1 for queue in bound if queue.qid),
                "current_unassociated_qpairs": len(self._server.queues) - len(bound),
                "pending_bdev_io": sum(1 for queue in bound if queue.active is not None),
                "completed_nvme_io": counts["completed_nvme_io"] + sum(queue.commands for queue in bound),
                "refused_connections": counts["refused_connections"],
                "transports": [{"trtype": "TCP"}] if self._server.transport_created else [],
            }
        return {"tick_rate": TICK_RATE, "poll_groups": [group]}


def _describe(subsystem: Subsystem, wzsl: int) -> dict[str, Any]:
    common = {
        "nqn": subsystem.nqn,
        "subtype": "Discovery" if subsystem.discovery else "NVMe",
        "listen_addresses": [one.to_dict() for one in subsystem.sorted_listeners()],
        "allow_any_host": subsystem.allow_any_host,
        "hosts": [_host(nqn, keys) for nqn, keys in sorted(subsystem.hosts.items())],
    }
    if subsystem.discovery:
        return common
    namespaces = []
    for nsid, one in sorted(subsystem.namespaces.items()):
        entry: dict[str, Any] = {"nsid": nsid, "bdev_name": one.volume.name, "name": one.volume.name}
        if any(one.nguid):
            entry["nguid"] = one.nguid.hex().upper()
        if one.uuid is not None:
            entry["uuid"] = str(one.uuid)
        if not one.auto_visible:
            entry["no_auto_visible"] = True
            entry["hosts"] = [{"nqn": host} for host in sorted(one.hosts)]
        namespaces.append(entry)
    return {
        **common,
        "serial_number": subsystem.serial,
        "model_number": subsystem.model,
        "max_namespaces": subsystem.max_namespaces,
        "passthrough": False,
        "min_cntlid": subsystem.cntlids[0],
        "max_cntlid": subsystem.cntlids[1],
        "dmrsl": 0,
        "wzsl": wzsl,
        "namespaces": namespaces,
    }


def _host(nqn: str, keys: HostKeys | None) -> dict[str, str]:
    shown = {"nqn": nqn}
    if keys is not None:
        shown["dhchap_key"] = keys.name
        if keys.controller_name is not None:
            shown["dhchap_ctrlr_key"] = keys.controller_name
    return shown


def _qpair(queue: Queue) -> dict[str, Any]:
    assert queue.controller is not None, "a queue that is listed is bound"
    peer, _, port = queue.peer.rpartition(":")
    shown: dict[str, Any] = {
        "cntlid": queue.controller.cntlid,
        "qid": queue.qid,
        "state": "enabled",
        "hostnqn": queue.controller.host.nqn,
        "listen_address": queue.listener.to_dict(),
        "peer_address": {"trtype": "TCP", "adrfam": queue.listener.family, "traddr": peer, "trsvcid": port},
    }
    if queue.proof is not None:
        shown["auth"] = {"state": "completed" if queue.proof.given else "negotiate"}
        if queue.proof.agreed is not None:
            hash_id, group = queue.proof.agreed
            shown["auth"] |= {"digest": hash_id.name.lower(), "dhgroup": group.name.lower()}
    return shown
