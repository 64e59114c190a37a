"""The data calls of the control service: messages to the engine and back, columns on both sides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import cbor2
import numpy as np

from forebay.appliance.control.admission import Admission
from forebay.appliance.control.calls import MAX_DEADLINE_MS, Method, Stream, finish
from forebay.appliance.namespace.desired_state import Principal
from forebay.appliance.namespace.events import BlockEvent
from forebay.appliance.namespace.node import Node
from forebay.appliance.namespace.records import encode_tail
from forebay.appliance.namespace.sessions import TRANSPORTS, Session
from forebay.appliance.namespace.writes import Allocation, TileSum
from forebay.errors import (
    OK,
    Absent,
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    KeySize,
    PermissionDenied,
    StaleIncarnation,
    StaleMap,
)
from forebay.ids import DEFAULT_SCOPE, MAX_KEY_BYTES, BlockKey, HostIdentity, split_stored_key
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import key_bytes, keys_from_proto, keys_to_proto, pack, rows16, unpack

__all__ = ["MAP_VERSION", "DataCalls"]

MAP_VERSION = 1
"""Cluster map of a node that stands alone."""
_MOST_FALLBACKS = 1_000
"""Of what one heartbeat says of a transport, this counts at most."""
_MAX_LIST = 10_000
_DEFAULT_LIST = 1_000
_MAX_TAIL_BYTES = 4096
_RETRY_MS = 20

_MAX_AWAITED = 1 << 19
"""Keys of all calls of Wait together: each takes some hundred bytes for as long as it is waited for."""
_AWAITED_RETRY_MS = 500

T = TypeVar("T")


class DataCalls:
    """The service `forebay.v1.Blocks`."""

    def __init__(self, node: Node, name: str, load_us: Callable[[int], int]) -> None:
        self._node = node
        self._name = name
        self._load_us = load_us
        self._awaited = Admission(_MAX_AWAITED, "keys waited for", retry_after_ms=_AWAITED_RETRY_MS)

    def methods(self) -> list[Method[Any, Any] | Stream[Any, Any]]:
        """All calls of the service."""
        return [
            Method("OpenSession", pb.OpenSessionRequest, self.open_session),
            Method("JoinSession", pb.JoinSessionRequest, self.join_session),
            Method("Heartbeat", pb.HeartbeatRequest, self.heartbeat, relieves=True),
            Method("CloseSession", pb.CloseSessionRequest, self.close_session, relieves=True),
            Method("Match", pb.MatchRequest, self.match),
            Method("Keyspaces", pb.KeyspacesRequest, self.keyspaces),
            Method("Acquire", pb.AcquireRequest, self.acquire),
            Method("Release", pb.ReleaseRequest, self.release, relieves=True),
            Method("Allocate", pb.AllocateRequest, self.allocate),
            Method("Commit", pb.CommitRequest, self.commit),
            Method("Abort", pb.AbortRequest, self.abort, relieves=True),
            Method("Touch", pb.TouchRequest, self.touch),
            Method("Pin", pb.PinRequest, self.pin),
            Method("Delete", pb.DeleteRequest, self.delete),
            Method("Stat", pb.StatRequest, self.stat),
            Method("List", pb.ListRequest, self.listing),
            Stream("Wait", pb.WaitRequest, self.wait),
            Stream("Watch", pb.WatchRequest, self.watch),
        ]

    # ------------------------------------------------------------------------------------------------ the context

    def _session(self, principal: Principal, context: pb.Context, right: str | None) -> tuple[Session, int]:
        """The session a call belongs to, and its time in ms. Raises what design §5 has for each field."""
        deadline_ms = _deadline(context.deadline_ms, "context.deadline_ms")
        if context.incarnation != self._node.meta.incarnation:
            raise StaleIncarnation(field="context.incarnation")
        session = self._node.sessions.get(context.session, principal.name)
        if context.generation != session.generation:
            raise InvalidArgument(
                f"generation {context.generation} is not the session's",
                field="context.generation",
                limit=session.generation,
            )
        if context.map_version not in (0, MAP_VERSION):
            raise StaleMap(field="context.map_version", limit=MAP_VERSION)
        if right is not None:
            session.access.need(right)
        return session, deadline_ms

    @staticmethod
    def _keys(session: Session, message: pb.Keys) -> list[BlockKey]:
        """The keys of a call, all in scopes of the session and groups of its schema."""
        keys = keys_from_proto(message)
        for scope in {k.scope for k in keys} if message.scopes else {0}:
            if scope not in session.scopes:
                raise PermissionDenied(f"scope id {scope} is not one of the session's", field="keys.scopes")
        groups = len(session.schema.groups)
        if message.groups and max(k.group for k in keys) >= groups:
            raise InvalidArgument("a group is not in the schema", field="keys.groups", limit=f"0 to {groups - 1}")
        return keys

    @staticmethod
    def _plain_keys(session: Session, message: pb.Keys) -> list[bytes]:
        """`_keys` of a call without groups and scopes."""
        keys = key_bytes(message)
        if DEFAULT_SCOPE not in session.scopes:
            raise PermissionDenied(f"scope id {DEFAULT_SCOPE} is not one of the session's", field="keys.scopes")
        return keys

    def _read(self, principal: Principal, request: Any, right: str = "read") -> tuple[Session, list[BlockKey], int]:
        session, deadline_ms = self._session(principal, request.context, right)
        return session, self._keys(session, request.keys), deadline_ms

    # ------------------------------------------------------------------------------------------------ sessions

    async def open_session(self, principal: Principal, request: pb.OpenSessionRequest) -> pb.SessionReply:
        deadline_ms = _deadline(request.deadline_ms, "deadline_ms")
        work = self._node.open_session(
            principal,
            request.namespace,
            schema_cbor=request.schema,
            generation=request.generation,
            scopes=list(request.scopes),
            client=request.client,
        )
        session, host, scopes = await finish(work, deadline_ms, lambda opened: self._node.end_session(opened[0]))
        return await self._describe(session, host, scopes)

    async def join_session(self, principal: Principal, request: pb.JoinSessionRequest) -> pb.SessionReply:
        deadline_ms = _deadline(request.deadline_ms, "deadline_ms")
        session, host = await finish(self._node.join_session(principal, request.token), deadline_ms)
        return await self._describe(session, host, list(session.scopes))

    async def _describe(self, session: Session, host: HostIdentity, scopes: Sequence[int]) -> pb.SessionReply:
        limits, secrets = self._node.limits, host.secrets
        return pb.SessionReply(
            host_secret=secrets.host.text() if secrets is not None else "",
            target_secret=secrets.controller.text() if secrets is not None and secrets.controller is not None else "",
            session=session.id,
            token=session.token,
            incarnation=self._node.meta.incarnation,
            namespace_id=session.namespace,
            keyspace=session.schema.keyspace,
            generation=session.generation,
            scope_ids=pack("u32", scopes),
            host_nqn=host.nqn,
            host_id=host.host_id,
            endpoints=await self._endpoints(session),
            volumes=self._volumes(session),
            heartbeat_ms=limits.heartbeat_ms,
            expiry_ms=limits.expiry_ms,
            lease_ttl_ms=limits.lease_ttl_ms,
            map_version=MAP_VERSION,
            node=self._name,
            rights=",".join(sorted(session.access.rights)),
            checksum_kind=1,
        )

    async def _endpoints(self, session: Session) -> list[pb.Endpoint]:
        return [
            pb.Endpoint(
                transport=found.transport,
                address=found.address,
                port=found.port,
                subsystem_nqn=found.subsystem_nqn,
                reads_fenced=found.reads_fenced,
            )
            for found in await self._node.endpoints(session)
        ]

    def _volumes(self, session: Session) -> list[pb.Volume]:
        return [pb.Volume(volume=v.volume, nsid=v.nsid, nguid=v.nguid) for v in self._node.volumes(session)]

    async def heartbeat(self, principal: Principal, request: pb.HeartbeatRequest) -> pb.HeartbeatReply:
        session, deadline_ms = self._session(principal, request.context, None)
        if request.host_nqn in session.hosts:
            session.transports[request.host_nqn] = tuple(name for name in request.transports if name in TRANSPORTS)
        for name in set(TRANSPORTS).intersection(request.fallbacks):
            self._node.engine.counters[f"fallbacks_{name}"] += min(request.fallbacks[name], _MOST_FALLBACKS)
        return pb.HeartbeatReply(
            heartbeat_ms=self._node.limits.heartbeat_ms,
            map_version=MAP_VERSION,
            endpoints=await finish(self._endpoints(session), deadline_ms),
            volumes=self._volumes(session),
        )

    async def close_session(self, principal: Principal, request: pb.CloseSessionRequest) -> pb.CloseSessionReply:
        session, deadline_ms = self._session(principal, request.context, None)
        await finish(self._node.end_session(session), deadline_ms)
        return pb.CloseSessionReply()

    # ------------------------------------------------------------------------------------------------ reading

    async def match(self, principal: Principal, request: pb.MatchRequest) -> pb.MatchReply:
        blocks = self._node.blocks
        if request.keys.groups or request.keys.scopes:
            session, keys, _ = self._read(principal, request)
            found = blocks.match(session, keys)
        else:
            session, _ = self._session(principal, request.context, "read")
            found = blocks.match_plain(session, self._plain_keys(session, request.keys))
        reply = pb.MatchReply(
            status=found.status.tobytes(),
            prefix_groups=pack("u16", list(found.prefix)),
            prefix_lengths=pack("u32", list(found.prefix.values())),
            load_us=self._load_us(found.present_bytes),
            present_bytes=found.present_bytes,
        )
        if found.elsewhere is not None:
            reply.elsewhere_keyspace, reply.elsewhere_generation = found.elsewhere
        return reply

    async def keyspaces(self, principal: Principal, request: pb.KeyspacesRequest) -> pb.KeyspacesReply:
        session, _ = self._session(principal, request.context, "read")
        places = self._node.engine.places.of(session.namespace)
        return pb.KeyspacesReply(
            keyspaces=b"".join(place.keyspace for place in places),
            generations=pack("u64", [place.generation for place in places]),
            schemas=[self._node.verification.schema(place.keyspace).cbor for place in places],
        )

    async def acquire(self, principal: Principal, request: pb.AcquireRequest) -> pb.AcquireReply:
        session, keys, deadline_ms = self._read(principal, request)
        longest = self._node.limits.lease_ttl_ms
        ttl_ms = min(request.lease_ttl_ms or longest, longest)
        blocks = self._node.blocks
        located = blocks.acquire_at_once(session, keys, ttl_ms)
        if located is None:
            work = blocks.acquire(session, keys, ttl_ms)
            located = await finish(work, deadline_ms, lambda late: _run(blocks.release, session, [late.lease]))
        return pb.AcquireReply(
            status=located.status.tobytes(),
            lease=located.lease,
            lease_ttl_ms=located.lease_ttl_ms,
            volumes=located.volumes.tobytes(),
            offsets=located.offsets.tobytes(),
            lengths=located.lengths.tobytes(),
            value_lengths=located.value_lengths.tobytes(),
            write_ids=located.write_ids.tobytes(),
            tiles=located.tiles.tobytes(),
            checksums=located.checksums,
            checksum_kind=1,
        )

    async def release(self, principal: Principal, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        session, deadline_ms = self._session(principal, request.context, None)
        released = self._node.blocks.release(session, unpack("u64", request.leases, "leases"))
        if request.HasField("doubtful"):
            session.access.need("read")
            await finish(self._node.blocks.doubt(session, self._keys(session, request.doubtful)), deadline_ms)
        return pb.ReleaseReply(released=released)

    async def touch(self, principal: Principal, request: pb.TouchRequest) -> pb.TouchReply:
        session, keys, _ = self._read(principal, request)
        return pb.TouchReply(status=self._node.blocks.touch(session, keys).tobytes())

    async def pin(self, principal: Principal, request: pb.PinRequest) -> pb.PinReply:
        session, keys, deadline_ms = self._read(principal, request, "pin" if request.persistent else "read")
        work = self._node.blocks.pin(session, keys, request.pinned, request.persistent)
        return pb.PinReply(status=(await finish(work, deadline_ms)).tobytes())

    async def delete(self, principal: Principal, request: pb.DeleteRequest) -> pb.DeleteReply:
        session, keys, deadline_ms = self._read(principal, request, "delete")
        status, size = await finish(self._node.blocks.delete(session, keys), deadline_ms)
        return pb.DeleteReply(status=status.tobytes(), freed_bytes=size)

    async def stat(self, principal: Principal, request: pb.StatRequest) -> pb.StatReply:
        session, keys, _ = self._read(principal, request)
        found = self._node.blocks.stat(session, keys)
        reply = pb.StatReply(status=pack("u16", [OK if one else Absent.code for one in found]))
        columns: dict[str, tuple[str, list[int]]] = {
            "value_lengths": ("u64", [s.record.value_bytes if s else 0 for s in found]),
            "extent_lengths": ("u64", [s.record.extent.length_bytes if s else 0 for s in found]),
            "tiles": ("u16", [len(s.record.checksums) if s else 0 for s in found]),
            "created_unix_ms": ("u64", [s.record.created_ms if s else 0 for s in found]),
            "pins": ("u16", [s.pins if s else 0 for s in found]),
            "leases": ("u16", [s.leases if s else 0 for s in found]),
            "volumes": ("u32", [s.record.extent.volume if s else 0 for s in found]),
            "offsets": ("u64", [s.record.extent.offset_bytes if s else 0 for s in found]),
            "policies": ("u8", [s.record.policy if s else 0 for s in found]),
        }
        for name, (kind, values) in columns.items():
            setattr(reply, name, pack(kind, values))
        reply.write_ids = b"".join(s.record.write_id if s else bytes(16) for s in found)
        if any(s.record.tail for s in found if s):
            reply.about.extend(s.record.tail if s else b"" for s in found)
        return reply

    async def listing(self, principal: Principal, request: pb.ListRequest) -> pb.ListReply:
        session, _ = self._session(principal, request.context, "read")
        if request.limit > _MAX_LIST:
            raise InvalidArgument(f"limit {request.limit}", field="limit", limit=f"0 to {_MAX_LIST}")
        if request.scope not in session.scopes:
            raise PermissionDenied(f"scope id {request.scope} is not one of the session's", field="scope")
        groups = len(session.schema.groups)
        if request.group >= groups:
            raise InvalidArgument(
                f"group {request.group} is not in the schema", field="group", limit=f"0 to {groups - 1}"
            )
        for name in ("prefix", "after"):
            if len(getattr(request, name)) > MAX_KEY_BYTES:
                raise KeySize(f"{name} is longer than a key", field=name, limit=f"0 to {MAX_KEY_BYTES}")
        page, following = self._node.blocks.listing(
            session,
            group=request.group,
            scope=request.scope,
            prefix=request.prefix,
            after=request.after,
            limit=request.limit or _DEFAULT_LIST,
        )
        return pb.ListReply(
            keys=keys_to_proto([BlockKey(b.key, request.group, request.scope) for b in page]),
            value_lengths=pack("u64", [b.value_bytes for b in page]),
            created_unix_ms=pack("u64", [b.created_ms for b in page]),
            next=following,
        )

    # ------------------------------------------------------------------------------------------------ writing

    async def allocate(self, principal: Principal, request: pb.AllocateRequest) -> pb.AllocateReply:
        session, keys, deadline_ms = self._read(principal, request, "write")
        sizes = unpack("u64", request.value_lengths, "value_lengths", len(keys)) if request.value_lengths else None
        hosts = self._writers(session, request)
        longest = self._node.limits.write_ttl_ms
        ttl_ms = min(request.ttl_ms or longest, longest)
        writes = self._node.writes
        work = writes.allocate(
            session,
            keys,
            sizes,
            hosts=hosts,
            ttl_ms=ttl_ms,
            tails=_tails(request, len(keys)),
            retain_until_ms=request.hints.retain_until_unix_ms,
        )

        async def take_back(rows: list[Allocation]) -> None:
            # nobody was told of these write ids, so nobody can have a command under them
            await writes.abort(session, [r.write_id for r in rows if r.extent is not None], quiesced=hosts)

        rows = await finish(work, deadline_ms, take_back)
        extents = [r.extent for r in rows]
        return pb.AllocateReply(
            status=pack("u16", [r.status for r in rows]),
            write_ids=b"".join(r.write_id for r in rows),
            volumes=pack("u32", [x.volume if x else 0 for x in extents]),
            offsets=pack("u64", [x.offset_bytes if x else 0 for x in extents]),
            lengths=pack("u64", [x.length_bytes if x else 0 for x in extents]),
            ttl_ms=ttl_ms,
            write_tag=max(r.tag for r in rows),
            retry_after_ms=_RETRY_MS if any(r.status not in (OK, AlreadyExists.code) for r in rows) else 0,
        )

    def _writers(self, session: Session, request: pb.AllocateRequest) -> list[HostIdentity]:
        """Who will write: the hosts named, all of the session, or the caller alone."""
        if request.session_hosts and request.host_nqns:
            raise InvalidArgument("hosts are named beside all of the session", field="host_nqns")
        caller = self._host(session, request.host_nqn)
        if request.session_hosts:
            return list(session.hosts.values())
        return [self._host(session, nqn) for nqn in dict.fromkeys(request.host_nqns)] or [caller]

    @staticmethod
    def _host(session: Session, nqn: str) -> HostIdentity:
        host = session.hosts.get(nqn)
        if host is None:
            raise InvalidArgument(f"host {nqn!r} did not join this session", field="host_nqn")
        return host

    async def commit(self, principal: Principal, request: pb.CommitRequest) -> pb.CommitReply:
        session, deadline_ms = self._session(principal, request.context, "write")
        write_ids = rows16(request.write_ids, "write_ids")
        sums = unpack("u32", request.checksums, "checksums")
        if request.tile_counts:
            counts = unpack("u16", request.tile_counts, "tile_counts", len(write_ids))
            tiles = unpack("u16", request.tiles, "tiles", len(sums))
        else:
            known = [session.writes.get(w) for w in write_ids]
            counts = [w.layout.tiles if w is not None else 0 for w in known]
            if None in known:  # a repeated commit: its grid is gone, and not needed
                counts[known.index(None)] = max(0, len(sums) - sum(counts))
            tiles = [t for count in counts for t in range(count)]
        if sum(counts) != len(sums) or not write_ids:
            raise InvalidArgument(
                f"{len(sums)} checksums for {sum(counts)} tiles of {len(write_ids)} blocks", field="checksums"
            )
        pairs = iter([TileSum(t, s) for t, s in zip(tiles, sums, strict=True)])
        rows = [(w, [next(pairs) for _ in range(count)]) for w, count in zip(write_ids, counts, strict=True)]
        host = self._host(session, request.host_nqn) if request.host_nqn else None
        status = await finish(self._node.writes.commit(session, rows, host=host), deadline_ms)
        return pb.CommitReply(status=pack("u16", status))

    async def abort(self, principal: Principal, request: pb.AbortRequest) -> pb.AbortReply:
        session, deadline_ms = self._session(principal, request.context, None)
        quiesced = [self._host(session, request.host_nqn)] if request.quiesced else []
        work = self._node.writes.abort(session, rows16(request.write_ids, "write_ids"), quiesced=quiesced)
        return pb.AbortReply(aborted=await finish(work, deadline_ms))

    # ------------------------------------------------------------------------------------------------ streams

    async def wait(self, principal: Principal, request: pb.WaitRequest) -> AsyncGenerator[pb.WaitReply, None]:
        session, keys, deadline_ms = self._read(principal, request)
        place = self._awaited.enter(principal.name, len(keys))
        try:
            async with aclosing(self._await(session, keys, deadline_ms, request.pending_only)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            place.leave()

    async def _await(
        self, session: Session, keys: list[BlockKey], deadline_ms: int, pending_only: bool
    ) -> AsyncGenerator[pb.WaitReply, None]:
        clock, waiters, writes = self._node.engine.clock, self._node.engine.waiters, self._node.writes
        until_ms = clock.monotonic_ms() + deadline_ms
        _, digests, rows = self._node.blocks.find(session, keys)
        codes = dict.fromkeys(np.flatnonzero(rows >= 0).tolist(), OK)
        waiting: dict[asyncio.Future[int], int] = {}
        for i in np.flatnonzero(rows < 0).tolist():
            digest = digests[i].tobytes()
            if pending_only and writes.pending(digest) is None:
                codes[i] = Absent.code
            else:
                waiting[waiters.add(digest)] = i
        try:
            if codes:
                yield pb.WaitReply(indices=pack("u32", list(codes)), status=pack("u16", list(codes.values())))
            while waiting:
                left_ms = until_ms - clock.monotonic_ms()
                done, _ = await asyncio.wait(
                    waiting, timeout=max(0, left_ms) / 1000, return_when=asyncio.FIRST_COMPLETED
                )
                codes = {waiting.pop(f): f.result() for f in done}
                if not done:
                    codes = dict.fromkeys(waiting.values(), DeadlineExceeded.code)
                yield pb.WaitReply(indices=pack("u32", list(codes)), status=pack("u16", list(codes.values())))
                if not done:
                    return
        finally:
            for future, i in waiting.items():
                waiters.drop(digests[i].tobytes(), future)

    async def watch(self, principal: Principal, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchReply, None]:
        session, deadline_ms = self._session(principal, request.context, "read")
        clock, events = self._node.engine.clock, self._node.engine.events
        until_ms = clock.monotonic_ms() + deadline_ms
        after = request.after_sequence if request.log else events.sequence
        if request.log and request.log != events.log:
            gap = BlockEvent(events.sequence, "resync", session.namespace)
            yield pb.WatchReply(log=events.log, events=[_event(gap)])
            after = events.sequence
        else:
            yield pb.WatchReply(log=events.log)  # so that the watcher knows it is heard, and from where
        while (left_ms := until_ms - clock.monotonic_ms()) > 0:
            found, after = events.since(after, session.namespace)
            mine = [e for e in found if not e.stored_key or split_stored_key(e.stored_key)[3].scope in session.scopes]
            self._node.blocks.require_open(session)  # session and rights may have gone since
            session.access.need("read")
            if mine:
                yield pb.WatchReply(log=events.log, events=[_event(e) for e in mine])
            try:
                await asyncio.wait_for(events.grown(after), left_ms / 1000)
            except TimeoutError:
                return


def _deadline(deadline_ms: int, field: str) -> int:
    if not 1 <= deadline_ms <= MAX_DEADLINE_MS:
        raise InvalidArgument(f"{field} is {deadline_ms}", field=field, limit=f"1 to {MAX_DEADLINE_MS}")
    return deadline_ms


async def _run(call: Callable[..., T], *args: Any) -> T:
    return call(*args)


def _tails(request: pb.AllocateRequest, count: int) -> list[bytes]:
    """The CBOR tail of each block: what the writer described and hinted. Raises `InvalidArgument`."""
    hints = {field.name: value for field, value in request.hints.ListFields()}
    if not request.HasField("describe"):
        return [_bounded(encode_tail({}, hints))] * count
    describe = request.describe
    parents = (
        keys_from_proto(describe.parents, "describe.parents", allow_empty_key=True)
        if describe.HasField("parents")
        else [BlockKey(b"")] * count
    )
    if len(parents) != count:
        raise InvalidArgument(f"{len(parents)} parents for {count} keys", field="describe.parents")
    hashes = (
        unpack("u64", describe.token_hashes, "describe.token_hashes", count) if describe.token_hashes else [0] * count
    )
    shared = {
        name: value for name, value in (("block_tokens", describe.block_tokens), ("adapter", describe.adapter)) if value
    }
    return [
        _bounded(encode_tail({**shared, "parent": parent.key, "token_hash": token_hash}, hints))
        for parent, token_hash in zip(parents, hashes, strict=True)
    ]


def _bounded(tail: bytes) -> bytes:
    if len(tail) > _MAX_TAIL_BYTES:
        raise InvalidArgument(f"hints and describe take {len(tail)} bytes", field="describe", limit=_MAX_TAIL_BYTES)
    return tail


def _event(event: BlockEvent) -> pb.Event:
    message = pb.Event(
        sequence=event.sequence,
        kind=event.kind,
        generation=event.generation,
        reason=event.reason,
        value_length=event.value_bytes,
    )
    if event.stored_key:
        _, keyspace, generation, block = split_stored_key(event.stored_key)
        message.key, message.group, message.scope = block.key, block.group, block.scope
        message.keyspace, message.generation = keyspace, generation
        if event.tail:
            message.describe = cbor2.dumps(cbor2.loads(event.tail).get("d", {}), canonical=True)
    return message
