"""Control methods of SPDK's for the version and for volumes, which SPDK calls bdevs."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from forebay.appliance.dataplane.target.rpc import INTERNAL_ERROR, INVALID_PARAMS, Method, Params, RpcError
from forebay.appliance.dataplane.target.server import Server
from forebay.appliance.dataplane.target.volume import Volume
from forebay.ids import LBA_BYTES

__all__ = ["TICK_RATE", "VERSION", "BdevMethods", "optional_uuid"]

VERSION: Final = "0.1.0"
TICK_RATE: Final = 1_000_000_000
"""Ticks of a second, in answers that have ticks."""
_OTHER_IO_TYPES: Final = (
    "nvme_admin", "nvme_io", "nvme_io_md", "zcopy", "get_zone_info", "zone_management", "zone_append", "compare",
    "compare_and_write", "abort", "seek_hole", "seek_data", "copy", "nvme_iov_md", "nvme_nssr", "write_uncorrectable",
)  # fmt: skip
"""What SPDK's list of I/O types has and no volume here does."""
_NOT_MEASURED: Final = (
    "bytes_copied", "num_copy_ops", "max_read_latency_ticks", "min_read_latency_ticks", "max_write_latency_ticks",
    "min_write_latency_ticks", "max_unmap_latency_ticks", "min_unmap_latency_ticks", "copy_latency_ticks",
    "max_copy_latency_ticks", "min_copy_latency_ticks",
)  # fmt: skip


def optional_uuid(text: str | None) -> UUID | None:
    """A UUID parameter; none if left out."""
    try:
        return UUID(text) if text else None
    except ValueError:
        raise RpcError.invalid_params() from None


class BdevMethods:
    """The methods, bound to a server; `table` lists them."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def table(self) -> dict[str, Method]:
        """Every method by name."""
        return {
            "spdk_get_version": Method(self.spdk_get_version),
            "bdev_aio_create": Method(self.bdev_aio_create),
            "bdev_aio_delete": Method(self.bdev_aio_delete, waits=True),
            "bdev_get_bdevs": Method(self.bdev_get_bdevs),
            "bdev_get_iostat": Method(self.bdev_get_iostat),
        }

    def spdk_get_version(self, params: Params) -> Any:
        """Who this is, in the shape of SPDK's answer."""
        if params.any_left():
            raise RpcError(INVALID_PARAMS, "spdk_get_version method requires no parameters")
        major, minor, patch = map(int, VERSION.split("."))
        return {
            "version": f"Forebay target v{VERSION}",
            "fields": {"major": major, "minor": minor, "patch": patch, "suffix": ""},
        }

    def bdev_aio_create(self, params: Params) -> str:
        """Open a file or block device as a volume, fenced until `forebay_bdev_set_mode` says otherwise."""
        try:
            name, filename = params.text("name"), params.text("filename")
            block_bytes = params.integer("block_size", 0, 1 << 32, LBA_BYTES)
            readonly, uuid = params.flag("readonly", False), optional_uuid(params.optional_text("uuid"))
            params.ignore("fallocate", "nowait")
            params.finish()
        except RpcError:
            raise RpcError(INTERNAL_ERROR, "spdk_json_decode_object failed") from None  # as SPDK has it here
        if not name or "\0" in filename or block_bytes != LBA_BYTES:
            raise RpcError.of_errno(errno.EINVAL)
        if name in self._server.volumes:
            raise RpcError.of_errno(errno.EEXIST)
        volume = Volume(name, Path(filename), readonly=readonly, uuid=uuid or uuid4())
        try:
            self._server.add_volume(volume)
        except OSError:
            volume.close()
            raise
        return name

    def bdev_aio_delete(self, params: Params) -> bool:
        """Close a volume, after taking it out of every subsystem."""
        name = params.text("name")
        params.finish()
        self._server.delete_volume(name)
        return True

    def bdev_get_bdevs(self, params: Params) -> Any:
        """One or all volumes."""
        name = params.optional_text("name")
        params.ignore("timeout")
        params.finish()
        volumes = [self._server.volume(name)] if name is not None else list(self._server.volumes.values())
        claimed = {
            one.volume for each in list(self._server.subsystems.values()) for one in list(each.namespaces.values())
        }
        return [_bdev(volume, volume in claimed) for volume in volumes]

    def bdev_get_iostat(self, params: Params) -> Any:
        """What was read and written, by volume, since it was opened."""
        name, names = params.optional_text("name"), params.texts("names")
        params.ignore("per_channel", "reset_mode")
        params.finish()
        wanted = names if names is not None else [name] if name is not None else list(self._server.volumes)
        return {
            "tick_rate": TICK_RATE,
            "ticks": time.monotonic_ns(),
            "bdevs": [_iostat(self._server.volume(one)) for one in wanted],
        }


def _bdev(volume: Volume, claimed: bool) -> dict[str, Any]:
    identity = str(volume.uuid) if volume.uuid is not None else None
    return {
        "name": volume.name,
        "aliases": [identity] if identity is not None else [],
        "product_name": "AIO disk",
        "block_size": LBA_BYTES,
        "num_blocks": volume.lba_count,
        "preferred_write_alignment": 0,
        "preferred_write_granularity": 0,
        "optimal_write_size": 0,
        "preferred_unmap_alignment": 0,
        "preferred_unmap_granularity": 0,
        **({"uuid": identity} if identity is not None else {}),
        "assigned_rate_limits": {
            "rw_ios_per_sec": 0,
            "rw_mbytes_per_sec": 0,
            "r_mbytes_per_sec": 0,
            "w_mbytes_per_sec": 0,
        },
        "claimed": claimed,
        **({"claim_type": "exclusive_write"} if claimed else {}),
        "zoned": False,
        "supported_io_types": {
            "read": True,
            "write": not volume.readonly,
            "unmap": volume.deallocates,
            "flush": True,
            "reset": False,
            "write_zeroes": volume.deallocates,
            **dict.fromkeys(_OTHER_IO_TYPES, False),
        },
        "driver_specific": {
            "aio": {
                "filename": str(volume.path),
                "block_size_override": True,
                "readonly": volume.readonly,
                "fallocate": True,
                "nowait": False,
                "io": volume.io,
                "mode": "fenced" if volume.fenced else "raw",
            }
        },
    }


def _iostat(volume: Volume) -> dict[str, Any]:
    tally = volume.tally()
    return {
        "name": volume.name,
        "bytes_read": tally.bytes_read,
        "num_read_ops": tally.reads,
        "bytes_written": tally.bytes_written,
        "num_write_ops": tally.writes,
        "read_latency_ticks": tally.read_ns,
        "write_latency_ticks": tally.write_ns,
        "bytes_unmapped": tally.bytes_unmapped,
        "num_unmap_ops": tally.unmaps,
        "unmap_latency_ticks": tally.unmap_ns,
        **dict.fromkeys(_NOT_MEASURED, 0),
        "io_error": {"failed": tally.errors, "no_space": tally.no_space} if tally.errors else {},
    }
