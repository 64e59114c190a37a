"""A session with a node and its transports: opened or joined, kept alive, opened anew when it was lost."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import grpc

from forebay.checksum import CRC32C
from forebay.client.options import ClientOptions
from forebay.client.results import VolumeTransport
from forebay.client.rpc import Rpc
from forebay.client.threads import begin
from forebay.client.transports.base import Transport
from forebay.client.transports.choice import Choice, ChosenWay
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.kinds import KINDS, Kind, Offer
from forebay.clock import Clock
from forebay.errors import ForebayError, ProtocolError, SchemaInvalid, SessionExpired, StaleIncarnation, Unavailable
from forebay.ids import BlockKey, HostIdentity
from forebay.nvmetcp.secret import HostSecrets, Secret
from forebay.nvmetcp.spec import DhGroup
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import keys_to_proto, pack, unpack
from forebay.schema import Schema

__all__ = ["Opening", "Route", "Session", "SessionView"]

_log = logging.getLogger(__name__)

_GATHER_LEASES = 256
_GATHER_S = 0.05
"""Leases and failed writes wait this long for others to be given back with."""
_CLOSE_MS = 2_000
"""Closing waits this long for calls of its own, each time."""
_RETRY_MS = (100, 2_000)
"""First and longest wait between attempts to reach a node that does not answer."""
_LOST = (SessionExpired, StaleIncarnation)

_Q = TypeVar("_Q")
_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class Opening:
    """How a session comes to be. With ``join`` (a session's token) it is joined, if that session still lives."""

    namespace: str
    schema: Schema
    generation: int
    scopes: tuple[str, ...] = ()
    join: bytes = b""


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach a volume. ``reads_fenced``: reads go by its target, which refuses those that no lease covers."""

    transport: Transport
    nsid: int
    reads_fenced: bool = False


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as it is now. A call takes one view and keeps to it: ids, host identity and transports belong together.

    ``routes`` are by volume id; ``reply`` is what the node answered.
    """

    reply: pb.SessionReply
    host: HostIdentity
    routes: dict[int, Route]
    scope_ids: tuple[int, ...]
    joined: bool

    def context(self, left_ms: int) -> pb.Context:
        """What every data call carries."""
        reply = self.reply
        return pb.Context(
            session=reply.session,
            incarnation=reply.incarnation,
            generation=reply.generation,
            deadline_ms=min(left_ms, 600_000),
            map_version=reply.map_version,
        )


class Session:
    """The session of one client. Thread-safe. One thread of its own sends heartbeats and gives leases back."""

    def __init__(
        self,
        rpc: Rpc,
        opening: Opening,
        options: ClientOptions,
        clock: Clock,
        *,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        self.rpc = rpc
        self.opening = opening
        self.reopened = 0
        self._options = options
        self._clock = clock
        self._kinds = kinds
        self._random = random.Random()
        self._changing = threading.Lock()  # held while a session is opened or its routes change
        self._wake = threading.Condition()
        self._leases: list[tuple[SessionView, int]] = []
        self._aborts: list[tuple[SessionView, bytes, bool]] = []
        self._closed = False
        self._token_given = False
        self._counting = threading.Lock()  # held for a moment only, while transports are exchanged or asked
        self._transports: dict[Offer, tuple[Choice, dict[int, str]]] = {}
        self._past_reconnects = 0
        self._past_fallbacks: Counter[str] = Counter()
        self._told_fallbacks: Counter[str] = Counter()
        """Those that the node has heard of, or is being told."""
        self._attempts = 0
        self._not_before_ms = 0
        self._view = self._open(clock.monotonic_ms() + options.connect_ms, first=True)
        self._thread = begin(self._keep, "forebay-session")

    # --- what calls use ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> SessionView:
        """The session as it is now."""
        return self._view

    @property
    def token(self) -> bytes:
        """Lets other processes join; from now on this one cannot speak for all of them."""
        self._token_given = True
        return self._view.reply.token

    @property
    def reconnects(self) -> int:
        """How often the data path was connected anew."""
        with self._counting:
            return self._past_reconnects + sum(t.state().reconnects for t, _ in self._transports.values())

    @property
    def fallbacks(self) -> dict[str, int]:
        """By kind of transport: how often a volume went on by another one because this had failed."""
        with self._counting:
            return dict(sum((choice.fallbacks for choice, _ in self._transports.values()), self._past_fallbacks))

    def transports(self, deadline_ms: int) -> list[VolumeTransport]:
        """How each volume is read now, after a look at what there is."""
        self._connect_transports(deadline_ms)
        ways: dict[Transport, dict[int, ChosenWay]] = {
            choice: {one.nsid: one for one in choice.chosen()} for choice, _ in list(self._transports.values())
        }
        found = []
        for volume, route in sorted(self._view.routes.items()):
            way = ways.get(route.transport, {}).get(route.nsid)
            if way is not None:
                found.append(VolumeTransport(volume, way.transport, way.place, way.instead_of))
        return found

    @property
    def closed(self) -> bool:
        return self._closed

    def pause(self, duration_ms: int) -> bool:
        """Wait a while, or until the session is closed; whether it is."""
        with self._wake:
            return self._wake.wait_for(lambda: self._closed, duration_ms / 1000)

    def call(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Q, _A],
        build: Callable[[SessionView, pb.Context], _Q],
        deadline_ms: int,
        *,
        view: SessionView | None = None,
    ) -> tuple[SessionView, _A]:
        """Make one call, and once more in a new session if the old one was lost; ``build`` makes the request.

        With ``view`` the call belongs to that session and is not repeated. Raises what the node answered.
        """
        current = view or self._view
        try:
            request = build(current, current.context(self.rpc.left_ms(deadline_ms)))
            return current, self.rpc.call(method, request, deadline_ms)
        except _LOST:
            if view is not None:
                raise
            current = self.reopen(current, deadline_ms)
            request = build(current, current.context(self.rpc.left_ms(deadline_ms)))
            return current, self.rpc.call(method, request, deadline_ms)

    def route(self, view: SessionView, volume: int, deadline_ms: int) -> Route | None:
        """How to reach a volume; asks the node once if the view does not know it."""
        route = view.routes.get(volume)
        if route is None and view is not self._view:
            route = self._view.routes.get(volume) if self._view.reply.session == view.reply.session else None
        if route is None and self._beat(view, deadline_ms):
            route = self._view.routes.get(volume) if self._view.reply.session == view.reply.session else None
        return route

    def release(self, view: SessionView, lease: int) -> None:
        """Give a lease back, soon and together with others."""
        with self._wake:
            self._leases.append((view, lease))
            if len(self._leases) in (1, _GATHER_LEASES):  # else it is awake, or need not be
                self._wake.notify_all()

    def report(self, view: SessionView, keys: Sequence[BlockKey], deadline_ms: int) -> None:
        """Tell the node of blocks whose bytes did not verify, so that it looks itself and drops what is bad."""
        try:
            context = view.context(self.rpc.left_ms(deadline_ms))
            request = pb.ReleaseRequest(context=context, doubtful=keys_to_proto(keys))
            self.rpc.call(self.rpc.blocks.Release, request, deadline_ms)
        except ForebayError as e:
            _log.info("%d blocks did not verify, and the node could not be told: %s", len(keys), e)

    def abort(self, view: SessionView, write_ids: Sequence[bytes], *, quiesced: bool) -> None:
        """Give up writes, soon; ``quiesced`` says that every command of theirs has completed."""
        with self._wake:
            self._aborts += [(view, write_id, quiesced) for write_id in write_ids]
            self._wake.notify_all()

    def close(self, *, quiesced: bool) -> None:
        """End the session if this process opened it, and every connection. Idempotent.

        In a forked process it does nothing: all of it is the other's, and threads that are not here may hold its locks.
        """
        if self.rpc.forked:
            return
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify_all()
        self._thread.join(_CLOSE_MS / 1000)
        deadline_ms = self._clock.monotonic_ms() + min(self._options.connect_ms, _CLOSE_MS)
        with self._changing:
            view = self._view
            self._use({})
        self._give_back(deadline_ms)
        if not view.joined:
            alone = quiesced and not self._token_given
            try:
                request = pb.CloseSessionRequest(context=view.context(self.rpc.left_ms(deadline_ms)), quiesced=alone)
                self.rpc.call(self.rpc.blocks.CloseSession, request, deadline_ms)
            except ForebayError as e:
                _log.debug("the session was not closed, it will expire: %s", e)
        self.rpc.close()  # which ends whatever call the session's thread is still in
        self._thread.join()

    # --- opening ----------------------------------------------------------------------------------------------------

    def _open(self, deadline_ms: int, *, first: bool = False) -> SessionView:
        opening = self.opening
        reply: pb.SessionReply | None = None
        if opening.join:
            try:
                join = pb.JoinSessionRequest(token=opening.join, deadline_ms=self.rpc.left_ms(deadline_ms))
                reply = self.rpc.call(self.rpc.blocks.JoinSession, join, deadline_ms, patient=first)
            except _LOST:
                if first:
                    raise  # later, when the session it joined has ended, a process goes on in one of its own
        joined = reply is not None
        if reply is None:
            request = pb.OpenSessionRequest(
                namespace=opening.namespace,
                schema=opening.schema.cbor,
                generation=opening.generation,
                scopes=opening.scopes,
                client=self._options.client,
                deadline_ms=self.rpc.left_ms(deadline_ms),
            )
            reply = self.rpc.call(self.rpc.blocks.OpenSession, request, deadline_ms, patient=first)
        if reply.keyspace != opening.schema.keyspace:
            raise SchemaInvalid("the session has another schema than this process", field="schema")
        if reply.checksum_kind not in (0, CRC32C):
            raise ProtocolError(
                f"the node uses checksums of kind {reply.checksum_kind}, which this client cannot check"
            )
        return self._view_of(reply, joined=joined)

    def _view_of(self, reply: pb.SessionReply, *, joined: bool) -> SessionView:
        try:
            host = HostIdentity(reply.host_nqn, reply.host_id, _secrets(reply))
            scope_ids = tuple(unpack("u32", reply.scope_ids, "scope_ids"))
            routes = self._routes(host, reply.endpoints, reply.volumes)
        except ForebayError as e:
            raise ProtocolError(f"the node's answer makes no sense: {e}") from e
        return SessionView(reply, host, routes, scope_ids, joined)

    def _routes(
        self, host: HostIdentity, endpoints: Sequence[pb.Endpoint], volumes: Sequence[pb.Volume]
    ) -> dict[int, Route]:
        """Routes of all volumes; transports that nothing leads to any more are closed."""
        offers: dict[str, Offer] = {}
        for endpoint in endpoints:
            nqn = endpoint.subsystem_nqn
            address = self.rpc.address.host if endpoint.address in ("", "0.0.0.0", "::") else endpoint.address
            known = offers.get(nqn) or Offer(nqn, (), host)
            place = endpoint.transport, SubsystemAddress(address, endpoint.port, nqn)
            offers[nqn] = replace(known, addresses=(*known.addresses, place))
        used: dict[Offer, tuple[Choice, dict[int, str]]] = {}
        routes: dict[int, Route] = {}
        for volume in volumes:
            if volume.endpoint >= len(endpoints):
                raise ProtocolError(f"volume {volume.volume} is at endpoint {volume.endpoint} of {len(endpoints)}")
            endpoint = endpoints[volume.endpoint]
            offer = offers[endpoint.subsystem_nqn]
            way = used.get(offer) or self._transports.get(offer)
            if way is None:
                nguids: dict[int, str] = {}
                way = Choice(offer, nguids, self._options, self._clock, kinds=self._kinds), nguids
            used[offer] = way
            way[1][volume.nsid] = volume.nguid
            # What a block device answers no target has judged.
            routes[volume.volume] = Route(way[0], volume.nsid, endpoint.reads_fenced and way[0].by_target)
        self._use(used)
        return routes

    def _use(self, used: dict[Offer, tuple[Choice, dict[int, str]]]) -> None:
        """Go on with these transports; the others are closed, and what they counted is kept."""
        gone = [choice for offer, (choice, _) in self._transports.items() if offer not in used]
        with self._counting:
            for choice in gone:
                self._past_reconnects += choice.state().reconnects
                self._past_fallbacks.update(choice.fallbacks)
            self._transports = used
        for choice in gone:
            choice.close()

    def recover(self, lost: SessionView, deadline_ms: int) -> bool:
        """`reopen` for those that can go on without; whether there is a session again."""
        try:
            self.reopen(lost, deadline_ms)
        except ForebayError as e:
            _log.info("the session is lost and could not be opened anew: %s", e)
            return False
        return True

    def reopen(self, lost: SessionView, deadline_ms: int) -> SessionView:
        """A new session in place of ``lost``, once for all threads that ask; waits longer after each failure.

        Raises what opening raised.
        """
        left_ms = self.rpc.left_ms(deadline_ms)
        if not self._changing.acquire(timeout=left_ms / 1000):
            raise Unavailable("the session is being opened anew")
        try:
            if self._view.reply.session != lost.reply.session:
                return self._view
            if self._closed:
                raise Unavailable("the client is closed")
            wait_ms = self._not_before_ms - self._clock.monotonic_ms()
            if self._attempts and wait_ms > 0:
                raise Unavailable("opening a new session failed a moment ago", retry_after_ms=wait_ms)
            try:
                limit_ms = self._clock.monotonic_ms() + self._options.connect_ms
                self._view = self._open(min(deadline_ms, limit_ms))
            except ForebayError:
                self._attempts += 1
                self._not_before_ms = self._clock.monotonic_ms() + self._backoff_ms(self._attempts)
                raise
            self._attempts = 0
            self.reopened += 1
            _log.info("opened session %s anew", self._view.reply.session.hex())
            return self._view
        finally:
            self._changing.release()

    def _backoff_ms(self, attempts: int) -> int:
        first_ms, longest_ms = _RETRY_MS
        return int(min(longest_ms, first_ms << min(attempts - 1, 16)) * self._random.uniform(0.5, 1.0))

    # --- the session's own thread -----------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._closed:
            try:
                self._keep_going()
            except Exception:  # without it sessions expire, and leases are given back by nobody
                _log.exception("the session's thread begins anew")
                self.pause(_RETRY_MS[1])

    def _keep_going(self) -> None:
        failures = 0
        next_ms = 0  # the first beat connects the data path
        while True:
            with self._wake:
                if not (self._closed or self._leases or self._aborts):
                    self._wake.wait(max(0, next_ms - self._clock.monotonic_ms()) / 1000)
                if self._leases or self._aborts:
                    self._wake.wait_for(lambda: self._closed or len(self._leases) >= _GATHER_LEASES, _GATHER_S)
                if self._closed:
                    return
            self._give_back(self._clock.monotonic_ms() + self._options.connect_ms)
            if self._clock.monotonic_ms() < next_ms:
                continue
            interval_ms = max(100, (self._view.reply.heartbeat_ms or 3_000) * 3 // 4)
            deadline_ms = self._clock.monotonic_ms() + self._options.connect_ms
            failures = 0 if self._beat(self._view, deadline_ms) else failures + 1
            wait_ms = min(interval_ms, self._backoff_ms(failures)) if failures else interval_ms
            next_ms = self._clock.monotonic_ms() + wait_ms
            self._connect_transports(deadline_ms)

    def _beat(self, view: SessionView, deadline_ms: int) -> bool:
        """One heartbeat: takes over where volumes are now. Opens a new session if this one is gone."""
        fresh = self._take_fallbacks()
        try:
            _, reply = self.call(
                self.rpc.blocks.Heartbeat,
                lambda current, context: pb.HeartbeatRequest(
                    context=context, host_nqn=current.host.nqn, transports=self._in_use(), fallbacks=fresh
                ),
                deadline_ms,
                view=view,
            )
            fresh.clear()  # the node has heard of them
            if not self._changing.acquire(timeout=self.rpc.left_ms(deadline_ms) / 1000):
                return False  # the session is being opened anew, for longer than this call has
            try:
                now = self._view
                current = now.reply.session == view.reply.session and not self._closed
                moved = (reply.volumes, reply.endpoints) != (now.reply.volumes, now.reply.endpoints)
                if current and moved and reply.volumes:
                    merged = pb.SessionReply()
                    merged.CopyFrom(now.reply)
                    del merged.volumes[:], merged.endpoints[:]
                    merged.volumes.extend(reply.volumes)
                    merged.endpoints.extend(reply.endpoints)
                    routes = self._routes(now.host, reply.endpoints, reply.volumes)
                    self._view = replace(now, reply=merged, routes=routes)
            finally:
                self._changing.release()
        except _LOST:
            return self.recover(view, deadline_ms)
        except ForebayError as e:
            _log.info("heartbeat failed: %s", e)
            return False
        finally:
            with self._counting:
                self._told_fallbacks -= fresh
        return True

    def _take_fallbacks(self) -> Counter[str]:
        """Those that the node has not heard of."""
        now = Counter(self.fallbacks)
        with self._counting:
            fresh = now - self._told_fallbacks
            self._told_fallbacks |= now
        return fresh

    def _in_use(self) -> list[str]:
        """The kinds of transport that volumes are read by."""
        return sorted({way.transport for choice, _ in list(self._transports.values()) for way in choice.chosen()})

    def _connect_transports(self, deadline_ms: int) -> None:
        for transport, _ in list(self._transports.values()):
            try:
                transport.connect(deadline_ms)
            except ForebayError as e:
                _log.debug("the data path is down: %s", e)

    def _give_back(self, deadline_ms: int) -> None:
        """Release leases and abort writes that were handed in: one call a session and kind."""
        with self._wake:
            leases, self._leases = self._leases, []
            aborts, self._aborts = self._aborts, []
        held: dict[int, tuple[SessionView, list[int]]] = {}
        for view, lease in leases:
            held.setdefault(id(view), (view, []))[1].append(lease)
        for view, ids in held.values():
            try:
                context = view.context(self.rpc.left_ms(deadline_ms))
                self.rpc.call(
                    self.rpc.blocks.Release, pb.ReleaseRequest(context=context, leases=pack("u64", ids)), deadline_ms
                )
            except ForebayError as e:
                _log.debug("%d leases were not released, they will expire: %s", len(ids), e)
        lost: dict[tuple[int, bool], tuple[SessionView, list[bytes]]] = {}
        for view, write_id, quiesced in aborts:
            lost.setdefault((id(view), quiesced), (view, []))[1].append(write_id)
        for (_, quiesced), (view, write_ids) in lost.items():
            try:
                request = pb.AbortRequest(
                    context=view.context(self.rpc.left_ms(deadline_ms)),
                    write_ids=b"".join(write_ids),
                    quiesced=quiesced,
                    host_nqn=view.host.nqn,
                )
                self.rpc.call(self.rpc.blocks.Abort, request, deadline_ms)
            except ForebayError as e:
                _log.info("%d writes were not aborted, they will expire: %s", len(write_ids), e)


def _secrets(reply: pb.SessionReply) -> HostSecrets | None:
    """What the session brings to authenticate by. Raises `InvalidArgument`.

    They are random keys of the node's, so nothing is gained by a Diffie-Hellman exchange, which takes a while.
    """
    if not reply.host_secret:
        return None
    target = Secret.parse(reply.target_secret) if reply.target_secret else None
    return HostSecrets(Secret.parse(reply.host_secret), target, groups=(DhGroup.NULL,))
