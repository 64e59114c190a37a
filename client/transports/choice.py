"""One choice of transport for each volume, by what node and machine offer; it falls back, and comes back (ADR 15)."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forebay.client.options import ClientOptions
from forebay.client.transports.base import (
    Capabilities,
    DeviceReadOp,
    Outcome,
    ReadOp,
    Transport,
    TransportState,
    WriteOp,
)
from forebay.client.transports.block_device import BlockDeviceTransport
from forebay.client.transports.kinds import KINDS, Kind, Offer
from forebay.clock import Clock
from forebay.errors import (
    Busy,
    ConnectionLost,
    DeadlineExceeded,
    ForebayError,
    ProtocolError,
    TargetRefused,
    Unavailable,
    VolumeMismatch,
    WriteFenced,
)

__all__ = ["Choice", "ChosenWay"]

_log = logging.getLogger(__name__)

_BACKOFF_MS = (1_000, 60_000)
_STRIKES = 2
_FAIR_MS = 250
"""A deadline that left a transport less than this says nothing of the transport."""
_BROKEN = (Unavailable, ConnectionLost, VolumeMismatch, ProtocolError, TargetRefused, Busy)
"""What says that the way to a volume does not work, rather than that the volume has no such bytes."""


@dataclass(frozen=True, slots=True)
class ChosenWay:
    """How one volume is read now: by which kind, from where, and why not by the ones before it."""

    nsid: int
    transport: str
    place: str
    instead_of: Mapping[str, str]


@dataclass(slots=True)
class _Standing:
    """How a way does for one volume: ``out`` is not to be tried before ``until_ms``.

    ``attempts`` counts how often it was, or stayed, out since it last worked.
    """

    out: bool = False
    attempts: int = 0
    until_ms: int = 0
    strikes: int = 0
    why: str = ""


@dataclass(slots=True, eq=False)
class _Way:
    kind: Kind
    transport: Transport | None = None
    lacks: str = ""
    standing: dict[int, _Standing] = field(default_factory=dict)

    def why_not(self, nsid: int, *, write: bool = False, device: bool = False) -> str | None:
        """Why a volume is not to be reached this way now."""
        transport = self.transport
        if transport is None:
            return self.lacks
        if (standing := self.standing.get(nsid)) is not None and standing.out:
            return standing.why
        if write and not transport.capabilities.writes:
            return "it does not write"
        if device and not transport.capabilities.device_memory:
            return "it does not reach GPU memory"
        return transport.serves(nsid)


class Choice(Transport):
    """All ways to one subsystem's volumes, of which each volume is reached by the best that works. Thread-safe.

    ``nguids`` maps the NSIDs of the volumes to their NGUIDs; its owner may add to it. ``connect``, which whoever owns
    the transport calls from time to time, looks what there is, and tries again what failed.
    """

    def __init__(
        self,
        offer: Offer,
        nguids: Mapping[int, str],
        options: ClientOptions,
        clock: Clock,
        *,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        self._fallbacks: Counter[str] = Counter()
        self._offer = offer
        self._nguids = nguids
        self._options = options
        self._clock = clock
        self._random = random.Random()
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._closed = False
        self._told: dict[int, str] = {}
        only = options.transport
        # What reads by one kind alone may need another to write.
        self._read_only = [kind.name for kind in kinds if only not in ("auto", kind.name)]
        self._ways = [_Way(kind) for kind in kinds if only in ("auto", "block", kind.name)]
        for way in self._ways:
            self._make(way)

    def _make(self, way: _Way) -> None:
        with self._making:  # of two, one would be closed by nobody
            if way.transport is not None:
                return
            way.lacks = way.kind.lacking(self._offer) or ""
            if not way.lacks:
                way.transport = way.kind.make(self._offer, self._nguids, self._options, self._clock)

    # --- the interface ----------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # it changes with what is chosen
        """GPU memory is reached if the way of every volume does, at the moment."""
        ways = [self._select(nsid) for nsid in list(self._nguids)]
        device = bool(ways) and all(way is not None and _transport(way).capabilities.device_memory for way in ways)
        return Capabilities("choice", device_memory=device)

    @property
    def by_target(self) -> bool:
        """Whether the target sees each command, whatever is chosen."""
        return all(way.kind.by_target for way in self._ways)

    def connect(self, deadline_ms: int) -> None:
        if self._closed:
            raise Unavailable("the transport is closed")
        for way in self._ways:
            if way.transport is None:
                self._make(way)
        errors: dict[str, ForebayError] = {}
        for way in self._ways:
            if way.transport is None or not self._worth_trying(way):
                continue
            try:
                way.transport.connect(deadline_ms)
            except ForebayError as e:
                errors[way.kind.name] = e
                self._not_back(way, e)
            else:
                self._back(way)
        if self._closed:
            self.close()  # what was made meanwhile, too
        self._tell()
        for nsid in list(self._nguids):
            chosen = self._select(nsid)
            if chosen is not None and chosen.kind.name in errors:
                raise errors[chosen.kind.name]

    def read(self, ops: Sequence[ReadOp], deadline_ms: int) -> list[Outcome]:
        return self._reads(ops, deadline_ms, device=False)

    def read_device(self, ops: Sequence[DeviceReadOp], deadline_ms: int) -> list[Outcome]:
        return self._reads(ops, deadline_ms, device=True)

    def write(self, ops: Sequence[WriteOp], deadline_ms: int) -> list[Outcome]:
        """Each by the best way that writes; what failed is not tried by another: it may have reached the medium."""
        results: dict[int, Outcome] = {}
        for way, rows in self._by_way(ops, range(len(ops)), set(), results, write=True):
            given_ms = deadline_ms - self._clock.monotonic_ms()
            done = _transport(way).write([ops[i] for i in rows], deadline_ms)
            results.update(zip(rows, done, strict=True))
            self._judge(way, ops, rows, results, given_ms)
        return [results[i] for i in range(len(ops))]

    def serves(self, nsid: int) -> str | None:
        if any(way.why_not(nsid) is None for way in self._ways if way.kind.name not in self._read_only):
            return None
        return "no transport reaches it now"

    def state(self) -> TransportState:
        """That of all ways together; the breaker is that of the last, to which all others fall back."""
        states = [way.transport.state() for way in self._ways if way.transport is not None]
        last = states[-1] if states else TransportState(False, 0, 0, 0, True, 0)
        return replace(
            last,
            connected=any(state.connected for state in states),
            connections=sum(state.connections for state in states),
            reconnects=sum(state.reconnects for state in states),
        )

    def close(self) -> None:
        self._closed = True
        for way in self._ways:
            if way.transport is not None:
                way.transport.close()

    # --- what people and the session ask ----------------------------------------------------------------------------

    @property
    def fallbacks(self) -> Counter[str]:
        """By kind: how often a volume went on by another one because this had failed."""
        with self._lock:
            return self._fallbacks.copy()

    def chosen(self) -> list[ChosenWay]:
        """How each volume is read now."""
        found = []
        for nsid in sorted(self._nguids):
            instead: dict[str, str] = {}
            way = self._select(nsid)
            if way is not None and isinstance(way.transport, BlockDeviceTransport) and not way.transport.path(nsid):
                way = None  # it is the only one that is allowed, and there is no such device
            for other in self._ways:
                if other is way:
                    break
                if other.kind.name not in self._read_only:
                    instead[other.kind.name] = other.why_not(nsid) or ""
            found.append(ChosenWay(nsid, way.kind.name if way else "none", self._place(way, nsid), instead))
        return found

    def _place(self, way: _Way | None, nsid: int) -> str:
        if way is None:
            return ""
        if isinstance(way.transport, BlockDeviceTransport):
            return way.transport.path(nsid)
        address = self._offer.address(way.kind.name)
        return "" if address is None else f"{address.address}:{address.port}"

    # --- choosing ---------------------------------------------------------------------------------------------------

    def _select(
        self, nsid: int, failed: set[tuple[str, int]] | None = None, *, write: bool = False, device: bool = False
    ) -> _Way | None:
        """The first way that works, else the last that could; None if there is none.

        After some have ``failed`` in a call, one that works: trying others would only cost time, and hide why.
        """
        could: _Way | None = None
        for way in self._ways:
            name, transport = way.kind.name, way.transport
            if transport is None or (not write and name in self._read_only) or (failed and (name, nsid) in failed):
                continue
            if (write and not transport.capabilities.writes) or (device and not transport.capabilities.device_memory):
                continue
            if way.why_not(nsid) is None:
                return way
            could = way
        return None if failed else could

    def _by_way(
        self,
        ops: Sequence[ReadOp | DeviceReadOp | WriteOp],
        rows: Sequence[int],
        failed: set[tuple[str, int]],
        results: dict[int, Outcome],
        *,
        write: bool = False,
        device: bool = False,
    ) -> Sequence[tuple[_Way, Sequence[int]]]:
        """Operations by the way that each goes; those that none is left for get their outcome, if they have none."""
        chosen = {nsid: self._select(nsid, failed, write=write, device=device) for nsid in {ops[i].nsid for i in rows}}
        if len(chosen) == 1 and (only := next(iter(chosen.values()))) is not None:
            return [(only, rows)]
        groups: dict[int, tuple[_Way, list[int]]] = {}
        for i in rows:
            way = chosen[ops[i].nsid]
            if way is not None:
                groups.setdefault(id(way), (way, []))[1].append(i)
            elif i not in results:
                error = Unavailable(f"no transport that is allowed here reaches NSID {ops[i].nsid}")
                results[i] = Outcome(error, (None,) * len(ops[i].segments))
        return list(groups.values())

    def _reads(self, ops: Sequence[Any], deadline_ms: int, *, device: bool) -> list[Outcome]:
        results: dict[int, Outcome] = {}
        failed: set[tuple[str, int]] = set()
        rows: Sequence[int] = range(len(ops))
        while rows:
            again: list[int] = []
            for way, mine in self._by_way(ops, rows, failed, results, device=device):
                transport = _transport(way)
                call = transport.read_device if device else transport.read
                given_ms = deadline_ms - self._clock.monotonic_ms()
                whole = len(mine) == len(ops)
                outcomes = call(ops if whole else [ops[i] for i in mine], deadline_ms)
                if whole and not way.standing and all(outcome.error is None for outcome in outcomes):
                    return outcomes  # nearly always
                results.update(zip(mine, outcomes, strict=True))
                # The transport has returned, so nothing of it can write to the views any more: another may.
                blamed = self._judge(way, ops, mine, results, given_ms)
                failed.update((way.kind.name, ops[i].nsid) for i in blamed)
                again += blamed
            rows = again if self._clock.monotonic_ms() < deadline_ms and not self._closed else ()
        return [results[i] for i in range(len(ops))]

    # --- what becomes of ways ---------------------------------------------------------------------------------------

    def _judge(
        self, way: _Way, ops: Sequence[Any], rows: Sequence[int], results: Mapping[int, Outcome], given_ms: int
    ) -> list[int]:
        """Take note of how operations went; which of them failed by the way's fault, before their deadline."""
        blamed = [i for i in rows if _is_broken(results[i].error)]
        worst: dict[int, ForebayError | None] = {}
        for i in rows:
            error = results[i].error
            if isinstance(error, DeadlineExceeded) or (error is None and ops[i].nsid not in worst):
                worst[ops[i].nsid] = error
        worst |= {ops[i].nsid: results[i].error for i in blamed}
        changed = False
        with self._lock:
            for nsid, error in worst.items():
                if error is None and nsid not in way.standing:
                    continue
                standing = way.standing.setdefault(nsid, _Standing())
                if error is None:
                    standing.strikes = 0
                    if not standing.out:
                        standing.attempts = 0
                    continue
                if isinstance(error, DeadlineExceeded):
                    standing.strikes += given_ms >= _FAIR_MS
                    if standing.strikes < _STRIKES and _transport(way).serves(nsid) is None:
                        continue
                if not standing.out and not self._closed and self._others(way):
                    self._put_off(standing, error)
                    self._told.setdefault(nsid, way.kind.name)
                    changed = True
        if changed:
            self._tell()
        return blamed

    def _others(self, way: _Way) -> bool:
        """Whether there is another one to fall back to; the last one is never out."""
        if way is self._ways[-1]:
            return False
        return any(other is not way and other.kind.name not in self._read_only for other in self._ways)

    def _put_off(self, standing: _Standing, error: ForebayError) -> None:
        first_ms, longest_ms = _BACKOFF_MS
        standing.out = True
        standing.attempts += 1
        wait_ms = min(longest_ms, first_ms << min(standing.attempts - 1, 16)) * self._random.uniform(0.5, 1.0)
        standing.until_ms = self._clock.monotonic_ms() + int(wait_ms)
        standing.why = error.message

    def _worth_trying(self, way: _Way) -> bool:
        """Whether `connect` should: the way is in use, may come to be, or failed some time ago."""
        now_ms = self._clock.monotonic_ms()
        out = [standing for standing in list(way.standing.values()) if standing.out]
        if out and all(standing.until_ms > now_ms for standing in out):
            return False
        if out or isinstance(way.transport, BlockDeviceTransport):
            return True
        return any(self._select(nsid) is way for nsid in list(self._nguids)) or not self._nguids

    def _back(self, way: _Way) -> None:
        """A way could be connected: volumes whose time has come use it again; only a read shows that it works."""
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            for standing in way.standing.values():
                if standing.out and standing.until_ms <= now_ms:
                    standing.out, standing.strikes = False, 0

    def _not_back(self, way: _Way, error: ForebayError) -> None:
        with self._lock:
            for standing in way.standing.values():
                if standing.out and standing.until_ms <= self._clock.monotonic_ms():
                    self._put_off(standing, error)

    def _tell(self) -> None:
        """Take note of ways that changed, and say so: from a better one to another it is a fall back."""
        names = [way.kind.name for way in self._ways]
        for one in self.chosen():
            with self._lock:
                before = self._told.get(one.nsid)
                self._told[one.nsid] = one.transport
                fell = before is not None and before in one.instead_of
                if fell and one.transport != "none" and not self._closed:
                    self._fallbacks[str(before)] += 1
            if before != one.transport and not self._closed:
                why = "".join(f"; {name}: {one.instead_of[name]}" for name in names if name in one.instead_of)
                nqn = self._offer.subsystem_nqn
                reached = one.transport != "none"
                how = f"read by {one.transport} ({one.place})" if reached else "not reached by what is allowed here"
                level = logging.WARNING if fell or not reached else logging.INFO
                _log.log(level, "NSID %d of %s is %s%s", one.nsid, nqn, how, why)


def _is_broken(error: ForebayError | None) -> bool:
    return isinstance(error, _BROKEN) and not isinstance(error, WriteFenced)


def _transport(way: _Way) -> Transport:
    assert way.transport is not None, "a way without one is never chosen"
    return way.transport
