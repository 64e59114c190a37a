"""The store on RocksDB, through rocksdict.

One commit thread gathers the batches that wait, writes them without sync and then flushes the log once: a synced
``write`` would hold the GIL through its fsync, ``flush_wal(True)`` does not (docs/adr/0002). The caller's event loop
is told after the flush.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rocksdict import AccessType, BlockBasedOptions, Cache, DBRecoveryMode, Options, Rdict, WriteBatch, WriteOptions

from forebay.appliance.histogram import Histogram
from forebay.appliance.namespace.store import FAMILIES, Op, Store
from forebay.crashpoints import crash_point
from forebay.errors import DataDirInUse, MetadataCorrupt, Unavailable

__all__ = ["RocksStore"]

_log = logging.getLogger(__name__)
_CACHE_BYTES = 64 << 20
_BLOOM_BITS = 10


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


class RocksStore(Store):
    """A RocksDB directory. Raises `DataDirInUse` when another process has it, `MetadataCorrupt` when it cannot open.

    With ``read_only`` nothing in it changes, and every write fails.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        if not read_only:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        cache = Cache(_CACHE_BYTES)
        try:
            self._db = Rdict(
                str(path),
                options=_options(cache),
                column_families={name: _options(cache) for name in FAMILIES},
                access_type=AccessType.read_only(False) if read_only else AccessType.read_write(),
            )
        except Exception as e:  # rocksdict raises bare Exception for all of RocksDB's errors
            if "lock" in str(e).lower():
                raise DataDirInUse(f"{path}: another process has it open", field="metadata_dir") from e
            raise MetadataCorrupt(f"{path}: RocksDB does not open: {e}", field="metadata_dir") from e
        self._families = {name: self._db.get_column_family(name) for name in FAMILIES}
        self._handles = {name: self._db.get_column_family_handle(name) for name in FAMILIES}
        self._no_sync = WriteOptions()
        self.commit_s = Histogram()
        """Seconds from the first batch of a durable commit to the log on stable media."""
        self.failed_commits = 0
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._commit_loop, name="forebay-commit", daemon=True)
        self._thread.start()

    def get(self, family: str, key: bytes) -> bytes | None:
        value: bytes | None = self._families[family].get(key)
        return value

    def multi_get(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return cast("list[bytes | None]", self._families[family].get(list(keys)))

    def scan(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        cursor = self._families[family].iter()
        cursor.seek(max(start, prefix))
        while cursor.valid():
            key = cursor.key()
            if not key.startswith(prefix):
                return
            yield key, cursor.value()
            cursor.next()

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> None:
        loop = asyncio.get_running_loop()
        batch = _Batch(ops, durable, loop, loop.create_future())
        self._queue.put(batch)
        # a cancelled caller must not cancel what is already on its way to the log
        await asyncio.shield(batch.done)

    async def delete_range(self, family: str, start: bytes, stop: bytes) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._families[family].delete_range, start, stop)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._handles.clear()
        for family in self._families.values():
            family.close()
        self._families.clear()
        self._db.close()

    def _commit_loop(self) -> None:
        while True:
            batches = [self._queue.get()]
            while not self._queue.empty():
                batches.append(self._queue.get())
            work = [b for b in batches if b is not None]
            if work:
                self._commit(work)
            if len(work) < len(batches):
                return

    def _commit(self, batches: list[_Batch]) -> None:
        error: Exception | None = None
        began_s = time.perf_counter()
        try:
            write = WriteBatch(raw_mode=True)
            for batch in batches:
                for family, key, value in batch.ops:
                    if value is None:
                        write.delete(key, self._handles[family])
                    else:
                        write.put(key, value, self._handles[family])
            self._db.write(write, self._no_sync)
            crash_point("store.after_write_before_flush")
            if any(batch.durable for batch in batches):
                self._db.flush_wal(True)
                self.commit_s.add(time.perf_counter() - began_s)
        except Exception as e:  # the thread must live: every caller is told instead
            _log.error("metadata write failed: %s", e)
            error = Unavailable(f"metadata cannot be written: {e}", field="metadata_dir")
            self.failed_commits += 1
        for batch in batches:
            try:
                batch.loop.call_soon_threadsafe(_resolve, batch.done, error)
            except RuntimeError:
                # the loop is gone: nobody waits
                continue


def _resolve(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
