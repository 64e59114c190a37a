"""Both stores keep the same promises; RocksDB also those about disks and processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import FAMILIES, MemoryStore, Op, Store
from forebay.errors import DataDirInUse, MetadataCorrupt, Unavailable

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


@pytest.fixture(params=["memory", "rocksdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else RocksStore(tmp_path / "db")
    yield made
    made.close()


def test_get_multi_get_and_scan(store: Store) -> None:
    ops = [Op("blocks", b"a%d" % i, b"%d" % i) for i in range(5)]
    run(store.write([*ops, Op("blocks", b"b", b"x"), Op("meta", b"a1", b"other family")]))
    assert store.get("blocks", b"a1") == b"1" and store.get("blocks", b"zz") is None
    assert store.multi_get("blocks", [b"a3", b"none", b"a0", b"a3"]) == [b"3", None, b"0", b"3"]
    assert store.multi_get("blocks", []) == []
    assert list(store.scan("blocks", prefix=b"a")) == [(b"a%d" % i, b"%d" % i) for i in range(5)]
    assert list(store.scan("blocks", b"a3", b"a")) == [(b"a3", b"3"), (b"a4", b"4")]
    assert list(store.scan("blocks", b"a31")) == [(b"a4", b"4"), (b"b", b"x")]
    assert list(store.scan("blocks", b"c")) == []
    assert [k for k, _ in store.scan("meta")] == [b"a1"]
    assert (store.last_key("blocks"), store.last_key("meta"), store.last_key("owners")) == (b"b", b"a1", None)


def test_batches_apply_in_order(store: Store) -> None:
    async def many() -> None:
        writes = [store.write([Op("blocks", b"k", b"%d" % i), Op("blocks", b"gone", None)]) for i in range(200)]
        await asyncio.gather(*writes, store.write([Op("blocks", b"gone", b"back")]))

    run(many())
    assert store.get("blocks", b"k") == b"199" and store.get("blocks", b"gone") == b"back"


def test_delete_range(store: Store) -> None:
    run(store.write([Op("changes", b"%d" % i, b"") for i in range(9)]))
    run(store.delete_range("changes", b"2", b"5"))
    assert [k for k, _ in store.scan("changes")] == [b"0", b"1", b"5", b"6", b"7", b"8"]
    run(store.delete_range("changes", b"6", b"9"))
    assert store.last_key("changes") == b"5"


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.sampled_from(FAMILIES), st.binary(min_size=1, max_size=2), st.none() | st.binary(max_size=3)),
        max_size=30,
    ),
    st.binary(max_size=2),
    st.binary(max_size=1),
)
def test_rocksdb_is_an_ordered_map(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[str, bytes, bytes | None]],
    start: bytes,
    prefix: bytes,
) -> None:
    model, rocks = MemoryStore(), RocksStore(tmp_path_factory.mktemp("rocks"))
    for store in (model, rocks):
        run(store.write([Op(*change) for change in changes]))
    for family in FAMILIES:
        assert list(rocks.scan(family, start, prefix)) == list(model.scan(family, start, prefix))
        keys = [k for f, k, _ in changes if f == family]
        assert rocks.multi_get(family, keys) == model.multi_get(family, keys)
    rocks.close()


@pytest.mark.parametrize("durable", [True, False])
def test_what_was_written_is_there_after_a_clean_close(tmp_path: Path, durable: bool) -> None:
    first = RocksStore(tmp_path)
    run(first.write([Op("blocks", b"k", b"v")], durable=durable))
    first.close()
    second = RocksStore(tmp_path)
    assert second.get("blocks", b"k") == b"v"
    second.close()


def test_one_flush_serves_all_who_wait_and_none_is_needed_for_what_need_not_be_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RocksStore(tmp_path)
    flushes: list[bool] = []
    database = store._database
    assert database is not None
    inner = database.db

    class Counting:
        def flush_wal(self, sync: bool) -> None:
            flushes.append(sync)
            inner.flush_wal(sync)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    monkeypatch.setattr(database, "db", Counting())
    run(store.write([Op("blocks", b"a", b"")], durable=False))
    assert flushes == []

    async def many() -> None:
        await asyncio.gather(*[store.write([Op("blocks", b"%d" % i, b"")]) for i in range(500)])

    run(many())
    assert flushes and all(flushes) and len(flushes) < 250
    store.close()


def test_a_cancelled_caller_does_not_cancel_its_batch(tmp_path: Path) -> None:
    store = RocksStore(tmp_path)

    async def cancelled() -> None:
        task = asyncio.ensure_future(store.write([Op("blocks", b"k", b"v")]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.write([])  # behind it

    run(cancelled())
    assert store.get("blocks", b"k") == b"v"
    store.close()


def test_a_second_opener_is_refused(tmp_path: Path) -> None:
    store = RocksStore(tmp_path)
    with pytest.raises(DataDirInUse):
        RocksStore(tmp_path)
    script = """if True:
        import sys
        from pathlib import Path
        from forebay.appliance.namespace.rocks import RocksStore
        RocksStore(Path(sys.argv[1]))
    """
    other = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert other.returncode and "DataDirInUse" in other.stderr
    run(store.write([Op("blocks", b"k", b"v")]))
    store.close()


@pytest.mark.parametrize("harm", ["current", "manifest"])
def test_a_directory_that_is_damaged_is_refused(tmp_path: Path, harm: str) -> None:
    store = RocksStore(tmp_path)
    run(store.write([Op("blocks", b"k", b"v")]))
    store.close()
    for file in tmp_path.glob("CURRENT" if harm == "current" else "MANIFEST-*"):
        file.write_bytes(b"damaged")
    with pytest.raises(MetadataCorrupt) as caught:
        RocksStore(tmp_path)
    assert caught.value.field == "metadata_dir"


_FULL = """
import asyncio, resource, signal, sys
from pathlib import Path
from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import Op
from forebay.errors import Unavailable

store = RocksStore(Path(sys.argv[1]))

async def main():
    await store.write([Op("blocks", b"before", b"v")])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    failed = 0
    for i in range(8):
        try:
            await asyncio.wait_for(store.write([Op("blocks", b"big%d" % i, bytes(300_000))]), 20)
        except Unavailable as error:
            assert error.field == "metadata_dir" and error.retriable, error
            failed += 1
    assert failed, "writes beyond the limit were acknowledged"
    assert store.get("blocks", b"before") == b"v", "reads go on"
    print("failed", failed)

asyncio.run(main())
"""


def test_a_disk_that_takes_no_more_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk; the system refuses the write in the same place."""
    done = subprocess.run([sys.executable, "-c", _FULL, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("failed")
    store = RocksStore(tmp_path)
    assert store.get("blocks", b"before") == b"v"
    store.close()


def test_a_directory_that_is_taken_away_is_an_error_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises((MetadataCorrupt, OSError)):
        RocksStore(tmp_path / "file" / "db")


def test_writes_that_keep_coming_do_not_keep_a_store_from_healing(tmp_path: Path) -> None:
    async def keep_writing() -> None:
        store = RocksStore(tmp_path / "db", retry_s=0.5)
        store._problem = Unavailable("it could not be written")  # as a write finds
        refused = 0
        async with asyncio.timeout(15):
            while True:
                try:
                    await store.write([Op("state", b"k", b"v")])
                    break
                except Unavailable:
                    refused += 1
        assert refused and store.problem is None and store.reopened == 1
        assert store.get("state", b"k") == b"v"
        store.close()

    asyncio.run(keep_writing())
