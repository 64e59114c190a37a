"""What `bdev_get_iostat` of either target counts of bdevs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from forebay.appliance.dataplane.interface import IoStats
from forebay.appliance.dataplane.jsonrpc import JsonRpcClient
from forebay.errors import ProtocolError

__all__ = ["Iostat"]


class Iostat:
    """One answer: the counters of each bdev by its name. Raises `ProtocolError` if that is not what came."""

    def __init__(self, answer: Any) -> None:
        try:
            self._ticks_per_us = answer["tick_rate"] / 1e6
            self.bdevs: dict[str, dict[str, Any]] = {one["name"]: one for one in answer["bdevs"]}
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"bdev_get_iostat: {error!r} in the answer") from error

    @classmethod
    async def ask(cls, rpc: JsonRpcClient) -> Iostat:
        """Ask the target now."""
        return cls(await rpc.call("bdev_get_iostat"))

    def total(self, names: Iterable[str]) -> IoStats:
        """What was read and written by all of these bdevs."""
        bdevs = [self.bdevs[name] for name in names if name in self.bdevs]
        try:
            return IoStats(
                sum(one["bytes_read"] for one in bdevs),
                int(sum(one["read_latency_ticks"] for one in bdevs) / self._ticks_per_us),
                sum(one["bytes_written"] for one in bdevs),
                int(sum(one["write_latency_ticks"] for one in bdevs) / self._ticks_per_us),
            )
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ProtocolError(f"bdev_get_iostat: {error!r} in the answer") from error

    def errors(self, name: str) -> dict[str, int]:
        """How often a bdev answered with an error, by the target's name for that."""
        try:
            return {str(kind): int(number) for kind, number in self.bdevs[name]["io_error"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"bdev_get_iostat: {error!r} in the answer") from error
