"""The store on RocksDB, through rocksdict.

One commit thread gathers the batches that wait, writes them without sync and then flushes the log once: a synced
``write`` would hold the GIL through its fsync, ``flush_wal(True)`` does not (docs/adr/0002). The caller's event loop
is told after the flush.

After a write or flush that failed nobody knows what the log holds, and RocksDB takes no more writes, often for ever (a
full disk it may get over, an I/O error never: docs/adr/0002). So whatever failed, the store refuses to write until it
has seen its file system take a small file durably, and has closed and opened the database again: then what is in it is
what the log gave back. Reads go on from the database as it was; only while it is opened they are refused, too.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rocksdict import AccessType, BlockBasedOptions, Cache, DBRecoveryMode, Options, Rdict, WriteBatch, WriteOptions

from forebay.appliance.directories import make_directory, probe_directory
from forebay.appliance.histogram import Histogram
from forebay.appliance.namespace.store import FAMILIES, Op, Store
from forebay.crashpoints import crash_point
from forebay.errors import DataDirInUse, ForebayError, MetadataCorrupt, NoSpace, Unavailable

__all__ = ["RocksStore"]

_log = logging.getLogger(__name__)
_CACHE_BYTES = 64 << 20
_BLOOM_BITS = 10
_RETRY_S = 1.0
"""Between two attempts to get a store back that takes no writes."""
_READERS_S = 5.0
"""How long a reopening waits for those who read."""
_PROBE_BYTES = 1 << 20


@dataclass(slots=True)
class _Batch:
    ops: Sequence[Op]
    durable: bool
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


def _options(cache: Cache) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    options.set_max_open_files(256)
    options.set_keep_log_file_num(4)
    options.set_max_total_wal_size(64 << 20)
    table = BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_bloom_filter(_BLOOM_BITS, False)
    table.set_cache_index_and_filter_blocks(True)
    options.set_block_based_table_factory(table)
    return options


class _Database:
    """RocksDB, open. Raises what `_error` makes of it."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        cache = Cache(_CACHE_BYTES)
        try:
            self.db = Rdict(
                str(path),
                options=_options(cache),
                column_families={name: _options(cache) for name in FAMILIES},
                access_type=AccessType.read_only(False) if read_only else AccessType.read_write(),
            )
            self.families = {name: self.db.get_column_family(name) for name in FAMILIES}
            self.handles = {name: self.db.get_column_family_handle(name) for name in FAMILIES}
        except Exception as e:  # rocksdict raises bare Exception for all of RocksDB's errors
            raise _error(path, "metadata do not open", e, opening=True) from e
        self.readers = 0

    def close(self) -> None:
        """Let go of it. After a failed write RocksDB complains once more here, and closes all the same."""
        self.handles.clear()
        for one in (*self.families.values(), self.db):
            try:
                one.close()
            except Exception as e:
                _log.info("RocksDB, closing: %s", e)
        self.families.clear()


def _error(path: Path, what: str, error: Exception, *, opening: bool = False) -> ForebayError:
    """RocksDB's error as ours: its words are all that tells them apart."""
    text = str(error)
    if "No space left" in text or "Disk quota" in text:
        return NoSpace(
            f"{path}: {what}: no space left on its file system: free some, and writes go on by themselves",
            field="metadata_dir",
        )
    if "Input/output error" in text or "Read-only file system" in text:
        return Unavailable(
            f"{path}: {what}: the drive failed ({text}): see to it, and writes go on by themselves",
            field="metadata_dir",
        )
    if opening and "lock" in text.lower():
        return DataDirInUse(f"{path}: another process has it open", field="metadata_dir")
    if opening or "Corruption" in text:
        return MetadataCorrupt(
            f"{path}: {what}: {text}: restore the directory, or move it away and start once with --start-empty",
            field="metadata_dir",
        )
    return Unavailable(f"{path}: {what}: {text}", field="metadata_dir")


class RocksStore(Store):
    """A RocksDB directory.

    Raises `DataDirInUse` when another process has it, `MetadataCorrupt` when it cannot open, `NoSpace` or `Unavailable`
    when its drive is full or fails. With ``read_only`` nothing in it changes, and every write fails. It tries every
    ``retry_s`` to get over a write that failed.
    """

    def __init__(self, path: Path, *, read_only: bool = False, retry_s: float = _RETRY_S) -> None:
        if not read_only:
            try:
                make_directory(path)  # RocksDB makes stable what is in it, not that it is there
            except OSError as e:
                raise _error(path, "the directory cannot be made", e, opening=True) from e
        self._path = path
        self._read_only = read_only
        self._retry_s = retry_s
        self._database: _Database | None = _Database(path, read_only=read_only)
        self._reading = threading.Condition()
        self._no_sync = WriteOptions()
        self.commit_s = Histogram()
        """Seconds from the first batch of a durable commit to the log on stable media."""
        self.failed_commits = 0
        self.reopened = 0
        """How often the database was opened again after a write that failed."""
        self._problem: ForebayError | None = None
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._commit_loop, name="forebay-commit", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> ForebayError | None:
        # a new one each time: one that is raised again and again grows by each place that it passed
        found = self._problem
        return None if found is None else type(found)(found.message, field=found.field, limit=found.limit)

    @contextmanager
    def _read(self) -> Iterator[_Database]:
        """The database, which is not closed meanwhile. Raises `Unavailable` while it is opened, `MetadataCorrupt`."""
        with self._reading:
            database = self._database
            if database is None:
                raise Unavailable("metadata are being opened again", field="metadata_dir", retry_after_ms=100)
            database.readers += 1
        try:
            yield database
        except ForebayError:
            raise
        except Exception as e:  # rocksdict raises bare Exception for all of RocksDB's errors
            raise _error(self._path, "metadata cannot be read", e) from e
        finally:
            with self._reading:
                database.readers -= 1
                self._reading.notify_all()

    def get(self, family: str, key: bytes) -> bytes | None:
        with self._read() as database:
            value: bytes | None = database.families[family].get(key)
        return value

    def multi_get(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._read() as database:
            return cast("list[bytes | None]", database.families[family].get(list(keys)))

    def scan(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        with self._read() as database:
            cursor: Any = database.families[family].iter()
            try:
                cursor.seek(max(start, prefix))
                while cursor.valid():
                    key = cursor.key()
                    if not key.startswith(prefix):
                        return
                    yield key, cursor.value()
                    cursor.next()
                cursor.status()  # what cannot be read looks like the end of the table
            finally:
                del cursor  # it keeps the database open

    def last_key(self, family: str) -> bytes | None:
        with self._read() as database:
            cursor: Any = database.families[family].iter()
            try:
                cursor.seek_to_last()
                found: bytes | None = cursor.key() if cursor.valid() else None
                cursor.status()  # what cannot be read looks like the end of the table
            finally:
                del cursor  # it keeps the database open
        return found

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> None:
        loop = asyncio.get_running_loop()
        batch = _Batch(ops, durable, loop, loop.create_future())
        self._queue.put(batch)
        # a cancelled caller must not cancel what is already on its way to the log
        await asyncio.shield(batch.done)

    async def delete_range(self, family: str, start: bytes, stop: bytes) -> None:
        def delete() -> None:
            with self._read() as database:
                database.families[family].delete_range(start, stop)

        await asyncio.get_running_loop().run_in_executor(None, delete)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        with self._reading:
            database, self._database = self._database, None
        if database is not None:
            database.close()

    # ------------------------------------------------------------------------------------------------ the commit thread

    def _commit_loop(self) -> None:
        heal_at_s: float | None = None
        while True:
            batches = self._next_batches(heal_at_s)
            work = [b for b in batches if b is not None]
            if work:
                self._commit(work)
            if len(work) < len(batches):
                return
            # what was on its way when a write failed has failed by now, too: nothing lands ahead of what is tried again
            if heal_at_s is not None and time.monotonic() >= heal_at_s:
                self._heal()
                heal_at_s = None
            heal_at_s = None if self._problem is None else heal_at_s or time.monotonic() + self._retry_s

    def _next_batches(self, until_s: float | None) -> list[_Batch | None]:
        """All that wait, at least one; nothing when it is time to try to heal."""
        try:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            batches = [self._queue.get(timeout=left_s)]
        except queue.Empty:
            return []
        while not self._queue.empty():
            batches.append(self._queue.get())
        return batches

    def _commit(self, batches: list[_Batch]) -> None:
        error = self.problem or self._write(batches)
        for batch in batches:
            try:
                batch.loop.call_soon_threadsafe(_resolve, batch.done, error)
            except RuntimeError:
                # the loop is gone: nobody waits
                continue

    def _write(self, batches: list[_Batch]) -> ForebayError | None:
        database = self._database
        if database is None:
            return Unavailable("metadata are closed", field="metadata_dir")
        began_s = time.perf_counter()
        try:
            write = WriteBatch(raw_mode=True)
            for batch in batches:
                for family, key, value in batch.ops:
                    if value is None:
                        write.delete(key, database.handles[family])
                    else:
                        write.put(key, value, database.handles[family])
            database.db.write(write, self._no_sync)
            crash_point("store.after_write_before_flush")
            if any(batch.durable for batch in batches):
                database.db.flush_wal(True)
                self.commit_s.add(time.perf_counter() - began_s)
        except Exception as e:  # the thread must live: every caller is told instead
            self.failed_commits += 1
            error = _error(self._path, "metadata cannot be written", e)
            _log.error("%s", error)
            if not self._read_only:
                self._problem = error
            return error
        return None

    def _heal(self) -> None:
        """Open the database again if its file system takes writes; else later."""
        try:
            probe_directory(self._path, _PROBE_BYTES)
            with self._reading:
                if self._database is not None:
                    database, self._database = self._database, None
                    if not self._reading.wait_for(lambda: not database.readers, _READERS_S):
                        self._database = database
                        raise Unavailable("metadata are being read", field="metadata_dir")
                    database.close()
                    del database
            opened = _Database(self._path, read_only=False)
        except ForebayError as error:
            self._problem = error
            return
        except OSError as error:
            self._problem = _error(self._path, "metadata cannot be written", error)
            return
        with self._reading:
            self._database = opened
        self._problem = None
        self.reopened += 1
        _log.warning("%s: metadata can be written again", self._path)


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
