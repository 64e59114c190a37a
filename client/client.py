"""The client: batched calls on blocks, one result a key. What the node does never raises from here; mistakes do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from forebay.client.advice import check_describe, hints_to_proto
from forebay.client.answers import column, event, keyspaces, stats
from forebay.client.buffers import destination, readable
from forebay.client.layouts import check_tiles, group_of, selected_bytes
from forebay.client.options import ClientOptions
from forebay.client.plans import WritePlan, plan_values, value_lengths
from forebay.client.reader import Reader
from forebay.client.results import (
    ClientStats,
    Describe,
    GetResult,
    Hints,
    KeyspaceInfo,
    ListedBlock,
    MatchResult,
    PutResult,
    StatResult,
    TilesResult,
    VolumeTransport,
    WatchEvent,
)
from forebay.client.rpc import NodeAddress, Rpc, find_token
from forebay.client.session import Opening, Session, SessionView
from forebay.client.transports.kinds import KINDS, TransportFactory, tcp_kind
from forebay.client.waiter import wait_visible
from forebay.client.writer import Wanted, Writer
from forebay.clock import Clock, SystemClock
from forebay.errors import (
    OK,
    AlreadyExists,
    ForebayError,
    InvalidArgument,
    Pending,
    ProtocolError,
    Unavailable,
    ValueSize,
    reason,
)
from forebay.ids import MAX_BATCH_KEYS, MAX_KEY_BYTES, BlockKey, check_keys
from forebay.proto import forebay_pb2 as pb
from forebay.proto.columns import key_bytes_to_proto, keys_from_proto, keys_to_proto
from forebay.schema import Schema

__all__ = ["Client", "Key", "connect"]

Key = bytes | BlockKey
"""A key alone is of group 0 and the default scope."""

# Inside the class `list` is a method.
_Blocks = list[BlockKey]
_Reads = list[GetResult]
_Writes = list[PutResult]
_Words = list[str]
_Stats = list[StatResult]
_Tiles = list[TilesResult]
_Keyspaces = list[KeyspaceInfo]
_Transports = list[VolumeTransport]
_PAGE = 1_000
_WATCH_RETRY_MS = 200


def connect(
    url: str = "forebay://127.0.0.1:7470",
    *,
    namespace: str = "default/default",
    schema: Schema | None = None,
    generation: int = 0,
    token: str | None = None,
    scopes: Sequence[str] = (),
    options: ClientOptions | None = None,
    clock: Clock | None = None,
) -> Client:
    """Open a session with a node.

    Without a ``schema`` it is the opaque one: a block is any bytes. Without a ``token`` it is taken from FOREBAY_TOKEN
    or from the admin token of a node's data directory on this host. ``scopes`` are the end tenants to act for.

    Raises `Unauthenticated`, `PermissionDenied`, `NamespaceNotFound`, `StaleGeneration`, `Unavailable`,
    `DeadlineExceeded`, and `InvalidArgument` for arguments that can never work.
    """
    opening = Opening(namespace, schema or Schema.opaque(), generation, tuple(scopes))
    return Client(url, opening, token=token, options=options, clock=clock)


class Client:
    """A session with a node. Thread-safe; a context manager. Make one with `connect`, or `Client.join`.

    A key is ``bytes`` or a `BlockKey`. Calls take batches and a ``deadline_ms``, a duration that they do not outlive
    (`ClientOptions.deadline_ms` without). Arguments that can never work raise `InvalidArgument` before anything is
    sent; whatever happens to the node gives results with a reason. ``transport`` makes the way to each endpoint.
    """

    def __init__(
        self,
        url: str,
        opening: Opening,
        *,
        token: str | None = None,
        options: ClientOptions | None = None,
        clock: Clock | None = None,
        transport: TransportFactory | None = None,
    ) -> None:
        if not 0 <= opening.generation < 1 << 64:
            raise InvalidArgument(f"generation {opening.generation}", field="generation", limit="64 bits")
        self._options = options or ClientOptions()
        self._clock = clock or SystemClock()
        self._schema = opening.schema
        self._counting = threading.Lock()
        self._hits = self._stored = self._bytes_read = self._bytes_written = 0
        self._misses: Counter[str] = Counter()
        rpc = Rpc(
            NodeAddress(url),
            find_token(token),
            self._clock,
            self._options.attempt_ms,
            streams=self._options.call_stream,
        )
        try:
            kinds = KINDS if transport is None else (tcp_kind(transport),)
            self._session = Session(rpc, opening, self._options, self._clock, kinds=kinds)
        except BaseException:
            rpc.close()
            raise
        self._reader = Reader(self._session, self._options, self._clock)
        self._writer = Writer(self._session, self._options, self._clock)

    @classmethod
    def join(
        cls,
        url: str = "forebay://127.0.0.1:7470",
        *,
        session_token: bytes,
        namespace: str = "default/default",
        schema: Schema | None = None,
        generation: int = 0,
        token: str | None = None,
        scopes: Sequence[str] = (),
        options: ClientOptions | None = None,
        clock: Clock | None = None,
    ) -> Client:
        """Join the session of another process of this engine by its `join_token`; the other arguments as there.

        Should that session end, this process goes on in one of its own. Raises as `connect` does, `SessionExpired`
        when the session is gone, and `SchemaInvalid` when it has another schema.
        """
        opening = Opening(namespace, schema or Schema.opaque(), generation, tuple(scopes), join=bytes(session_token))
        return cls(url, opening, token=token, options=options, clock=clock)

    # --- reading ----------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[Key], *, deadline_ms: int | None = None) -> MatchResult:
        """What of ``keys`` is present now. Takes no lease."""
        (columns, count), until_ms = self._columns(keys), self._until(deadline_ms)
        try:
            _, reply = self._session.call(
                self._session.rpc.blocks.Match,
                lambda _, context: pb.MatchRequest(context=context, keys=columns),
                until_ms,
            )
            status = column("u16", reply.status, "status", count)
            groups = column("u16", reply.prefix_groups, "prefix_groups")
            prefix = dict(zip(groups, column("u32", reply.prefix_lengths, "prefix_lengths", len(groups)), strict=True))
        except ForebayError as e:
            return MatchResult((False,) * count, (reason(e.code),) * count, {}, 0.0, 0)
        words = {code: reason(code) for code in set(status)}
        return MatchResult(
            tuple([code == OK for code in status]),
            tuple([words[code] for code in status]),
            prefix,
            reply.load_us / 1000,
            reply.present_bytes,
            (reply.elsewhere_keyspace, reply.elsewhere_generation) if reply.elsewhere_keyspace else None,
        )

    def keyspaces(self, *, deadline_ms: int | None = None) -> _Keyspaces:
        """What blocks of the namespace were lately stored under, the last used first. Raises what the node answers."""
        _, reply = self._session.call(
            self._session.rpc.blocks.Keyspaces,
            lambda _, context: pb.KeyspacesRequest(context=context),
            self._until(deadline_ms),
        )
        return keyspaces(reply)

    def get(
        self,
        keys: Sequence[Key],
        *,
        tiles: Sequence[int] | None = None,
        hints: Hints | None = None,
        deadline_ms: int | None = None,
    ) -> _Reads:
        """Read blocks into new memory: all their tiles, or ``tiles``, back to back in that order."""
        blocks, until_ms = self._keys(keys), self._until(deadline_ms)
        self._least_bytes(blocks, tiles)
        return self._counted(self._reader.read(blocks, None, tiles, hints_to_proto(hints), until_ms))

    def get_into(
        self,
        keys: Sequence[Key],
        buffers: Sequence[Any],
        *,
        tiles: Sequence[int] | None = None,
        hints: Hints | None = None,
        deadline_ms: int | None = None,
    ) -> _Reads:
        """Read blocks into ``buffers``, one a key: writable contiguous buffers of the host, or CUDA tensors of one GPU.

        As in `get`, from the start of each buffer on. What comes into a GPU's memory is there when this returns, for
        whatever stream; what no transport brings there directly goes through pinned host memory. After a miss the
        contents of its buffer are undefined; nothing writes to any of them once this has returned. Where the schema
        fixes the size, a buffer too small raises `ValueSize`; for opaque blocks it is a miss of that reason.
        """
        blocks, until_ms = self._keys(keys), self._until(deadline_ms)
        if len(buffers) != len(blocks):
            raise InvalidArgument(f"{len(buffers)} buffers for {len(blocks)} keys", field="buffers", limit=len(blocks))
        views = [destination(buffer, f"buffers[{i}]") for i, buffer in enumerate(buffers)]
        least = self._least_bytes(blocks, tiles)
        for i, (block, view) in enumerate(zip(blocks, views, strict=True)):
            if len(view) < least[block.group]:
                raise ValueSize(
                    f"buffers[{i}] has {len(view)} bytes", field=f"buffers[{i}]", limit=f"at least {least[block.group]}"
                )
        return self._counted(self._reader.read(blocks, views, tiles, hints_to_proto(hints), until_ms))

    # --- writing ----------------------------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        *,
        hints: Hints | None = None,
        describe: Describe | None = None,
        deadline_ms: int | None = None,
    ) -> _Writes:
        """Store whole blocks, each a buffer of its tiles back to back. What is present already is not written again.

        Raises `DuplicateKey`, `ValueSize` and their kin before anything is sent. The buffers must not change meanwhile.
        """
        blocks, until_ms = self._keys(keys, unique=True), self._until(deadline_ms)
        if len(values) != len(blocks):
            raise InvalidArgument(f"{len(values)} values for {len(blocks)} keys", field="values", limit=len(blocks))
        views = [readable(value, f"values[{i}]") for i, value in enumerate(values)]
        sizes = [len(view) for view in views]
        for i, block in enumerate(blocks):
            try:
                group_of(self._schema, block).layout(sizes[i])
            except ValueSize as e:
                raise ValueSize(f"values[{i}]: {e.message}", field=f"values[{i}]", limit=e.limit) from None
        check_describe(describe, len(blocks))
        codes = self._writer.put(Wanted(blocks, sizes, hints_to_proto(hints), describe), views, until_ms)
        with self._counting:
            self._stored += codes.count(OK)
            self._bytes_written += sum(size for size, code in zip(sizes, codes, strict=True) if code == OK)
        return [PutResult(code == OK, code in (OK, AlreadyExists.code), reason(code)) for code in codes]

    # --- writing in a group of ranks (docs/ranks.md) ----------------------------------------------------------------

    def allocate(
        self,
        keys: Sequence[Key],
        *,
        lengths: Sequence[int] | None = None,
        hosts: Sequence[str] | None = None,
        hints: Hints | None = None,
        describe: Describe | None = None,
        deadline_ms: int | None = None,
    ) -> WritePlan:
        """Plan blocks for the ranks of this session: the leader's call, whose plan all ranks `put_tiles` by.

        ``lengths``, each value's bytes, are needed for opaque blocks only. ``hosts`` are the `host_nqn` of the
        processes that will write; without, all that have joined the session so far. Who joins later may not write.
        """
        blocks, until_ms = self._keys(keys, unique=True), self._until(deadline_ms)
        check_describe(describe, len(blocks))
        if hosts is not None and (isinstance(hosts, str) or not hosts):
            raise InvalidArgument("hosts is a sequence of at least one host NQN", field="hosts")
        sizes = value_lengths(self._schema, blocks, lengths)
        return self._writer.allocate(Wanted(blocks, sizes, hints_to_proto(hints), describe), hosts, until_ms)

    def put_tiles(
        self,
        plan: WritePlan,
        tiles: Sequence[int] | None,
        values: Sequence[Any],
        *,
        deadline_ms: int | None = None,
    ) -> _Tiles:
        """Write and commit this rank's tiles (None: all) of a plan's blocks; the last rank makes them visible.

        ``values`` are, for each block of the plan, a buffer of these tiles back to back in the order given; for blocks
        that are not to be written it is not looked at. Call it again for other tiles, or for blocks that `take` picks.
        A block whose tiles could not be written is given up for all ranks, unless this process may not write at all.
        """
        until_ms = self._until(deadline_ms)
        views = plan_values(self._schema, plan, tiles, values)
        codes = self._writer.put_tiles(plan, tiles, views, until_ms)
        results = []
        for write, code in zip(plan.writes, codes, strict=True):
            done = write.code == OK and code in (OK, Pending.code)
            results.append(TilesResult(done, code in (OK, AlreadyExists.code), reason(code)))
        with self._counting:
            self._stored += codes.count(OK)
            self._bytes_written += sum(len(v) for v, result in zip(views, results, strict=True) if result.committed)
        return results

    def abort(self, plan: WritePlan, *, deadline_ms: int | None = None) -> int:
        """Give up a plan's blocks that are not visible yet, for all ranks; how many there were.

        Their other ranks are cut off, and connect again: nothing of theirs can reach the extents any more.
        """
        return self._writer.abort(plan, self._until(deadline_ms))

    # --- the life of blocks -----------------------------------------------------------------------------------------

    def wait(self, keys: Sequence[Key], timeout_ms: int, *, pending_only: bool = False) -> _Words:
        """Wait until blocks are visible: ``ok``; ``absent`` once who wrote it is gone; ``deadline_exceeded``.

        A block that nobody writes yet is waited for, too; with ``pending_only`` it is ``absent`` at once, which is
        for who knows that it was being written (`allocate` said so) and wants the end of that.
        """
        codes = wait_visible(self._session, self._keys(keys), self._until(timeout_ms), pending_only)
        return [reason(code) for code in codes]

    def delete(self, keys: Sequence[Key], *, deadline_ms: int | None = None) -> _Words:
        """Delete blocks: ``ok``, ``absent``, ..."""
        return self._statuses(
            self._session.rpc.blocks.Delete,
            keys,
            lambda context, columns: pb.DeleteRequest(context=context, keys=columns),
            deadline_ms,
        )

    def pin(
        self, keys: Sequence[Key], *, pinned: bool = True, persistent: bool = False, deadline_ms: int | None = None
    ) -> _Words:
        """Keep blocks from being evicted while this session lives, or let them go: ``ok``, ``absent``, ...

        A ``persistent`` pin outlives the session, until it is taken back as one; it needs the right ``pin``.
        """
        return self._statuses(
            self._session.rpc.blocks.Pin,
            keys,
            lambda context, columns: pb.PinRequest(context=context, keys=columns, pinned=pinned, persistent=persistent),
            deadline_ms,
        )

    def touch(self, keys: Sequence[Key], *, hints: Hints | None = None, deadline_ms: int | None = None) -> _Words:
        """Say that blocks were of use, without reading them."""
        advice = hints_to_proto(hints)
        return self._statuses(
            self._session.rpc.blocks.Touch,
            keys,
            lambda context, columns: pb.TouchRequest(context=context, keys=columns, hints=advice),
            deadline_ms,
        )

    def stat(self, keys: Sequence[Key], *, deadline_ms: int | None = None) -> _Stats:
        """What the node knows of each block, or why it tells nothing: ``absent``, ``unavailable``, ..."""
        (columns, count), until_ms = self._columns(keys), self._until(deadline_ms)
        try:
            _, reply = self._session.call(
                self._session.rpc.blocks.Stat,
                lambda _, context: pb.StatRequest(context=context, keys=columns),
                until_ms,
            )
            return stats(reply, count)
        except ForebayError as e:
            return [StatResult(reason(e.code))] * count

    def list(
        self, prefix: bytes = b"", *, group: int = 0, scope: int = 0, deadline_ms: int | None = None
    ) -> Iterator[ListedBlock]:
        """The visible blocks whose keys begin with ``prefix``, in the order of their keys; asks page by page.

        Unlike the calls on keys it raises what the node answers, since there is no result that could carry it. Each
        page has the deadline for itself.
        """
        if len(prefix) > MAX_KEY_BYTES:
            raise InvalidArgument(f"a prefix of {len(prefix)} bytes", field="prefix", limit=MAX_KEY_BYTES)
        if not 0 <= group < 1 << 16 or not 0 <= scope < 1 << 32:
            raise InvalidArgument(f"group {group}, scope {scope}", field="group", limit="16 and 32 bits")
        return self._pages(bytes(prefix), group, scope, deadline_ms)

    def _pages(self, prefix: bytes, group: int, scope: int, deadline_ms: int | None) -> Iterator[ListedBlock]:
        after = b""
        while True:
            cursor = after

            def request(_: SessionView, context: pb.Context, cursor: bytes = cursor) -> pb.ListRequest:
                return pb.ListRequest(
                    context=context, prefix=prefix, limit=_PAGE, after=cursor, group=group, scope=scope
                )

            _, page = self._session.call(self._session.rpc.blocks.List, request, self._until(deadline_ms))
            if page.keys.data:
                try:
                    blocks = keys_from_proto(page.keys)
                except InvalidArgument as e:
                    raise ProtocolError(f"a page of the listing is malformed: {e.message}") from e
                lengths = column("u64", page.value_lengths, "value_lengths", len(blocks))
                created = column("u64", page.created_unix_ms, "created_unix_ms", len(blocks))
                for block, length_bytes, at in zip(blocks, lengths, created, strict=True):
                    # The columns of group and scope hold what was asked for, and may be left out.
                    yield ListedBlock(block.key, block.group or group, block.scope or scope, length_bytes, at)
            if not page.next:
                return
            if page.next == after:
                raise ProtocolError("a listing that does not advance")
            after = page.next

    def watch(self, after_sequence: int = 0, log: int = 0) -> Iterator[WatchEvent]:
        """Events of the namespace, for ever: from now on, or after ``(log, sequence)`` of an event seen before.

        Goes on by itself when the node restarts. An event ``resync`` says that some were lost. Close the iterator to
        end it. Raises what the node answers, except that it is away.
        """
        if not 0 <= after_sequence < 1 << 64 or not 0 <= log < 1 << 64:
            raise InvalidArgument(f"sequence {after_sequence}, log {log}", field="after_sequence", limit="64 bits")
        return self._follow(after_sequence, log)

    def _follow(self, after_sequence: int, log: int) -> Iterator[WatchEvent]:
        while True:
            view = self._session.view
            request = pb.WatchRequest(context=view.context(600_000), after_sequence=after_sequence, log=log)
            try:
                for reply in self._session.rpc.stream(self._session.rpc.blocks.Watch, request, None):
                    if log and reply.log != log and all(message.kind != "resync" for message in reply.events):
                        yield WatchEvent(reply.log, 0, "resync")
                    log = reply.log
                    for message in reply.events:
                        after_sequence = message.sequence
                        yield event(log, message)
            except Unavailable:
                if self._session.closed:
                    raise
            except ForebayError as e:
                if not e.retriable:
                    raise
                self._session.recover(view, self._until(None))
            if self._session.pause(_WATCH_RETRY_MS):
                return

    # --- the session ------------------------------------------------------------------------------------------------

    @property
    def host_nqn(self) -> str:
        """The NVMe host identity of this process in its session, for `allocate`. Another one in another session."""
        return self._session.view.host.nqn

    @property
    def join_token(self) -> bytes:
        """What other processes of this engine join with (`Client.join`). It is a secret."""
        return self._session.token

    @property
    def incarnation(self) -> int:
        """Which start of its daemon the node told last; a log of events (`watch`) is of one."""
        return int(self._session.view.reply.incarnation)

    @property
    def schema(self) -> Schema:
        """What the session's blocks are made by."""
        return self._schema

    @property
    def scope_ids(self) -> dict[str, int]:
        """The scope id of each scope that was named, for `BlockKey.scope`."""
        return dict(zip(self._session.opening.scopes, self._session.view.scope_ids, strict=False))

    @property
    def stats(self) -> ClientStats:
        """Counters so far."""
        with self._counting:
            return ClientStats(
                hits=self._hits,
                misses=dict(self._misses),
                stored=self._stored,
                bytes_read=self._bytes_read,
                bytes_written=self._bytes_written,
                reconnects=self._session.reconnects,
                reopened=self._session.reopened,
                fallbacks=self._session.fallbacks,
            )

    def transports(self, *, deadline_ms: int | None = None) -> _Transports:
        """How each volume is read now, after a look at what this machine has."""
        return self._session.transports(self._until(deadline_ms))

    def close(self) -> None:
        """Give back leases, end the session if it was opened here, and disconnect. Idempotent."""
        self._session.close(quiesced=self._writer.quiesced)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- shared -----------------------------------------------------------------------------------------------------

    def _until(self, deadline_ms: int | None) -> int:
        left_ms = self._options.deadline_ms if deadline_ms is None else deadline_ms
        if not 1 <= left_ms <= 600_000:
            raise InvalidArgument(f"deadline_ms is {left_ms}", field="deadline_ms", limit="1 to 600000")
        return self._clock.monotonic_ms() + left_ms

    def _keys(self, keys: Sequence[Key], *, unique: bool = False) -> _Blocks:
        blocks = [BlockKey(key) if type(key) is bytes else _block(key, i) for i, key in enumerate(keys)]
        check_keys(blocks, unique=unique)
        for block in blocks:
            if block.group:
                group_of(self._schema, block)
        return blocks

    def _least_bytes(self, blocks: _Blocks, tiles: Sequence[int] | None) -> dict[int, int]:
        """By group: what a buffer must have for ``tiles``, as far as is known before; raises where they do not fit."""
        least: dict[int, int] = {}
        for block in blocks:
            if block.group not in least:
                group = group_of(self._schema, block)
                check_tiles(group, tiles)
                least[block.group] = 0 if group.kind == "opaque" else selected_bytes(group.layout(), tiles)
        return least

    def _columns(self, keys: Sequence[Key]) -> tuple[pb.Keys, int]:
        """`_keys` as they are sent, and how many; no object is made of plain ones, of which there may be thousands."""
        raw: Sequence[Any] = list(keys)
        if len(raw) <= MAX_BATCH_KEYS and set(map(type, raw)) == {bytes}:
            lengths = set(map(len, raw))
            if min(lengths) >= 1 and max(lengths) <= MAX_KEY_BYTES:
                return key_bytes_to_proto(raw), len(raw)
        return keys_to_proto(self._keys(raw)), len(raw)

    def _statuses(self, method: Any, keys: Sequence[Key], build: Any, deadline_ms: int | None) -> _Words:
        (columns, count), until_ms = self._columns(keys), self._until(deadline_ms)
        try:
            _, reply = self._session.call(method, lambda _, context: build(context, columns), until_ms)
            return [reason(code) for code in column("u16", reply.status, "status", count)]
        except ForebayError as e:
            return [reason(e.code)] * count

    def _counted(self, results: _Reads) -> _Reads:
        with self._counting:
            for result in results:
                if result.hit:
                    self._hits += 1
                    self._bytes_read += result.length_bytes
                else:
                    self._misses[result.reason] += 1
        return results


def _block(key: Any, index: int) -> BlockKey:
    if isinstance(key, BlockKey):
        if not 0 <= key.group < 1 << 16 or not 0 <= key.scope < 1 << 32:
            raise InvalidArgument(f"keys[{index}] has group {key.group}, scope {key.scope}", field=f"keys[{index}]")
        return key
    if isinstance(key, bytes):
        return BlockKey(bytes(key))
    raise InvalidArgument(f"keys[{index}] is {type(key).__name__}, not bytes or BlockKey", field=f"keys[{index}]")
