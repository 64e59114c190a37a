"""Control methods that SPDK does not have: grants, teardown, barriers, regions and checksums at the target."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from forebay.appliance.dataplane.target.bdev_methods import VERSION
from forebay.appliance.dataplane.target.precedence import Order
from forebay.appliance.dataplane.target.rpc import Later, Method, Params, RpcError
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.dataplane.target.volume import Volume
from forebay.ids import LBA_BYTES, HostIdentity

__all__ = ["PrivateMethods"]

log = logging.getLogger(__name__)

_MAX_ORDER = (1 << 63) - 1


class PrivateMethods:
    """The `forebay_*` methods, bound to a server; `table` lists them. All may be repeated without harm."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def table(self) -> dict[str, Method]:
        """Every method by name."""
        waiting: Iterable[Callable[[Params], Any]] = (
            self.forebay_bdev_set_mode,
            self.forebay_host_teardown,
            self.forebay_teardown_all,
            self.forebay_barrier,
            self.forebay_region_prepare,
            self.forebay_region_release,
            self.forebay_verify,
        )
        at_once: Iterable[Callable[[Params], Any]] = (
            self.forebay_get_info,
            self.forebay_grants_add,
            self.forebay_grants_revoke,
            self.forebay_grants_failed,
            self.forebay_seal,
        )
        return {run.__name__: Method(run, waits=run in waiting) for run in (*waiting, *at_once)}

    def forebay_get_info(self, params: Params) -> Any:
        """Who answers and what it can do. `boot_id` is new with every start of the process."""
        params.finish()
        return {
            "pid": os.getpid(),
            "boot_id": self._server.boot_id,
            "version": VERSION,
            "capabilities": {
                "fencing": True,
                "barrier": True,
                "per_host_visibility": True,
                "qos": False,
                "seal": True,
                "ordered": True,
            },
            "limits": self._server.limits.to_dict(),
            "grants": len(self._server.grants),
        }

    def forebay_bdev_set_mode(self, params: Params) -> bool:
        """`fenced` (as every volume begins) or `raw`."""
        name, mode = params.text("name"), params.text("mode")
        params.finish()
        if mode not in ("fenced", "raw"):
            raise RpcError.invalid_params()
        self._server.set_fenced(name, mode == "fenced")
        return True

    def forebay_grants_add(self, params: Params) -> bool:
        """Grant ranges of a volume to hosts, all or none; -17 if one overlaps another grant.

        Rows are id, first LBA, number of LBAs, and the reference tag that writes must carry.
        """
        volume = self._server.volume(params.text("name"))
        names, rows, order = params.text_rows("hosts", 2), params.rows("grants", 4), _order(params)
        params.finish()
        try:
            hosts = [HostIdentity(host_nqn, str(UUID(host_id))) for host_nqn, host_id in names]
        except ValueError:
            raise RpcError.invalid_params() from None
        if not hosts or any(row[3] > 0xFFFFFFFF for row in rows):
            raise RpcError.invalid_params()
        with self._server.precedence.standing(volume, order):
            self._server.grants.add(
                volume.name, hosts, [(row[0], row[1], row[2], row[3]) for row in rows], volume.lba_count, order
            )
        return True

    def forebay_grants_revoke(self, params: Params) -> Any:
        """End grants; no write under them is under way when this answers. Unknown ids are none, and stay none."""
        ids, order = params.integers("ids"), _order(params)
        params.finish()
        if order is not None:
            self._server.precedence.obey(order[0])  # ids of an earlier daemon are others' by now
        revoked = self._server.grants.revoke_idle(ids, order)
        if revoked is not None:
            return {"revoked": revoked}
        return Later(lambda: {"revoked": self._server.grants.revoke(ids)})

    def forebay_grants_failed(self, params: Params) -> Any:
        """Those of the grants, revoked or not, under which the drive failed a write for another reason than space."""
        ids = params.integers("ids")
        params.finish()
        return {"failed": self._server.grants.take_failed(ids)}

    def forebay_seal(self, params: Params) -> Any:
        """`forebay_grants_revoke`, and then, when no write under the grants is under way any more, `forebay_barrier`.

        Where a flush is nothing (the volume is in memory) and nobody writes, the answer is there at once.
        """
        ids = params.integers("ids")
        volume = self._server.volume(params.text("name"))
        params.finish()
        if self._server.grants.revoke_idle(ids) is not None:
            return _barrier(volume) if volume.in_memory else Later(lambda: _barrier(volume))

        def seal() -> Any:
            self._server.grants.revoke(ids)
            return _barrier(volume)

        return Later(seal)

    def forebay_host_teardown(self, params: Params) -> Any:
        """End every controller of a host; none of its commands can touch media when this answers. Grants stay."""
        host_nqn, host_id = params.text("host_nqn"), params.optional_text("host_id")
        params.finish()
        try:
            ident = str(UUID(host_id)) if host_id is not None else None
        except ValueError:
            raise RpcError.invalid_params() from None
        return {"controllers": self._server.teardown_host(host_nqn, ident)}

    def forebay_teardown_all(self, params: Params) -> Any:
        """End every controller and drop every grant; earlier incarnations are not obeyed any more. See `precedence`."""
        incarnation = params.integer("incarnation", 0, _MAX_ORDER, 0)
        params.finish()
        if incarnation:
            self._server.precedence.obey(incarnation)
        controllers = self._server.teardown(lambda _: True)
        return {"controllers": controllers, "grants": self._server.grants.revoke_all()}

    def forebay_barrier(self, params: Params) -> Any:
        """Everything written to the volume before is on stable media (`flushed`), or nobody knows (`unknown`)."""
        volume = self._server.volume(params.text("name"))
        params.finish()
        return _barrier(volume)

    def _range(self, params: Params) -> tuple[Volume, int, int, Order | None]:
        volume = self._server.volume(params.text("name"))
        most = volume.size_bytes
        offset_bytes, length_bytes = params.integer("offset_bytes", 0, most), params.integer("length_bytes", 1, most)
        order = _order(params)
        params.finish()
        if offset_bytes % LBA_BYTES or length_bytes % LBA_BYTES or offset_bytes + length_bytes > most:
            raise RpcError.invalid_params()
        return volume, offset_bytes, length_bytes, order

    def forebay_region_prepare(self, params: Params) -> bool:
        """Reserve a range's space, reading as zeros; -28 if there is none."""
        volume, offset_bytes, length_bytes, order = self._range(params)
        with self._server.precedence.turn(volume, order), volume.hold():
            volume.prepare_region(offset_bytes, length_bytes)
        return True

    def forebay_region_release(self, params: Params) -> bool:
        """Give a range's space back; done when this answers."""
        volume, offset_bytes, length_bytes, order = self._range(params)
        with self._server.precedence.turn(volume, order), volume.hold():
            volume.release_region(offset_bytes, length_bytes)
        return True

    def forebay_verify(self, params: Params) -> Any:
        """CRC-32C of ranges, each started from its seed; -5 if the drive cannot give the bytes."""
        volume, kind = self._server.volume(params.text("name")), params.text("kind")
        rows = params.rows("ranges", 3)
        params.finish()
        for offset_bytes, length_bytes, seed in rows:
            if offset_bytes + length_bytes > volume.size_bytes or seed > 0xFFFFFFFF:
                raise RpcError.invalid_params()
        if kind != "crc32c":
            raise RpcError.of_errno(errno.EOPNOTSUPP)
        with volume.hold():
            return {"checksums": volume.checksums([(row[0], row[1], row[2]) for row in rows])}


def _order(params: Params) -> Order | None:
    """The parameter ``order``, which may be left out."""
    if not params.has("order"):
        return None
    order = params.integers("order")
    if len(order) != 2 or not all(0 <= part <= _MAX_ORDER for part in order):
        raise RpcError.invalid_params()
    return order[0], order[1]


def _barrier(volume: Volume) -> Any:
    with volume.hold():
        try:
            volume.flush()
        except OSError as error:
            log.error("%s: barrier: %s", volume.name, error)
            raise  # not "unknown", which a target answers that cannot know: what was written is lost perhaps
    return {"result": "flushed"}
