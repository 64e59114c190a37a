"""A run of the benchmark: a namespace of its own, workers, sides in turns, and everything gone at the end."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.bench.movers import KEY_BYTES, REMOVED, Operation, Work
from forebay.cli.bench.report import Comparison, Result
from forebay.cli.bench.worker import Worker, WorkerSettings
from forebay.cli.context import Session
from forebay.cli.demo.signals import ignored
from forebay.cli.sizes import format_size
from forebay.errors import CapacityShort, ForebayError, InvalidArgument, NotFound, PermissionDenied, ValueSize
from forebay.ids import MAX_VALUE_BYTES, align_up
from forebay.measure.redis_peer import RedisServer, missing_redis
from forebay.measure.samples import Side, interleave, process_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.client import NodeStatus

__all__ = ["BenchOptions", "run_bench"]

TENANT = "forebay-bench"
"""Of the namespaces that runs create."""
_REGION_BYTES = 64 << 20
_MATCH_BLOCK_BYTES = 4096
_DELETE_KEYS = 1000


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure. ``working_bytes`` and ``slot_bytes`` are of all threads together."""

    operations: tuple[Operation, ...]
    block_bytes: tuple[int, ...]
    batches: tuple[int, ...]
    match_keys: int
    working_bytes: int
    slot_bytes: int
    rounds: int
    seconds: float | None
    processes: int
    threads: int
    references: bool
    durability: str

    @property
    def lanes(self) -> int:
        """Threads of all processes."""
        return self.processes * self.threads

    def works(self) -> Iterator[Work]:
        """The comparisons. Raises `InvalidArgument` where the working set is too small for one."""
        for operation in self.operations:
            if operation == "match":
                calls = max(1, self.slot_bytes // (self.match_keys * KEY_BYTES * self.lanes * 16))
                yield Work("match", _MATCH_BLOCK_BYTES, self.match_keys, self.match_keys, calls)
                continue
            for size in self.block_bytes:
                if not 1 <= size <= MAX_VALUE_BYTES:
                    raise ValueSize(f"blocks of {size} bytes", field="size", limit=f"1 to {MAX_VALUE_BYTES}")
                for batch in self.batches:
                    count = self.working_bytes // (size * self.lanes) // batch * batch
                    if not count:
                        need = size * self.lanes * batch
                        raise InvalidArgument(
                            f"{self.lanes} threads with batches of {batch} blocks of {format_size(size)} need a "
                            f"working set of {format_size(need)}",
                            field="working-set",
                            limit=need,
                        )
                    yield Work(operation, size, batch, count, max(1, self.slot_bytes // (size * batch * self.lanes)))

    def need_bytes(self) -> int:
        """Space that the node must have free: what is stored at one time, in regions for each size of block."""
        stored = [
            (w.count if w.operation != "put" else 2 * w.calls * w.batch) * align_up(w.block_bytes) * self.lanes
            for w in self.works()
        ]
        return align_up(max(stored), _REGION_BYTES) + 2 * _REGION_BYTES


def run_bench(session: Session, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure the node. Its namespace, or its keys where it may create none, are gone when this returns or raises.

    Raises `InvalidArgument`, `CapacityShort`, `PermissionDenied`, and `Unavailable` when the node fails or does not
    store and find.
    """
    works = list(options.works())
    url, token = session.locate()
    with session.admin() as admin:
        status = _status(admin)
    missing = missing_redis() if options.references else None
    result = Result(
        options.processes,
        options.threads,
        _local_servers(session, status) is not None,
        options.durability if status is not None else "of the namespace",
        ", ".join(sorted({d.io for d in status.drives if d.io})) if status is not None else "",
        missing,
    )
    with ExitStack() as stack:
        namespace, prefix = stack.enter_context(_place(session, options, status, say))
        redis = None
        if options.references and not missing:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-bench-")))
            redis = stack.enter_context(RedisServer(folder))
            result.redis_version = redis.version
        workers = [
            stack.enter_context(
                Worker(
                    WorkerSettings(
                        url,
                        token,
                        namespace,
                        prefix + b"/%d" % number,
                        options.threads,
                        redis.port if redis is not None else 0,
                    )
                )
            )
            for number in range(options.processes)
        ]
        for worker in workers:
            worker.answer()
        names = ["forebay", *(["tcp"] if options.references else []), *(["redis"] if redis is not None else [])]
        shared = {"forebay": _local_servers(session, status) or (), "redis": (redis.pid,) if redis is not None else ()}
        for work in works:
            say(f"{work.operation}, {_described(work)}")
            result.comparisons.append(_compare(options, work, workers, names, shared))
    return result


def _described(work: Work) -> str:
    if work.operation == "match":
        return f"{work.batch} keys"
    return f"blocks of {format_size(work.block_bytes)}, batches of {work.batch}"


def _status(admin: Any) -> NodeStatus | None:
    try:
        found: NodeStatus = admin.status()
        return found
    except PermissionDenied:
        return None


def _local_servers(session: Session, status: NodeStatus | None) -> tuple[int, ...] | None:
    """Daemon and target, if they are processes of this machine whose clocks can be read."""
    try:
        about = json.loads((session.data_dir / "node.json").read_text())
        if status is None or (about["node"], about["incarnation"]) != (status.node, status.incarnation):
            return None
        pids = (int(about["pid"]), status.target_pid)
        for pid in pids:
            process_cpu_s(pid)
        return pids
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _place(
    session: Session, options: BenchOptions, status: NodeStatus | None, say: Callable[[str], None]
) -> Iterator[tuple[str, bytes]]:
    """Namespace and first bytes of the keys: a namespace of its own, or keys of its own where it may create none."""
    name = f"{TENANT}/{secrets.token_hex(4)}"
    prefix = b"bench/" + secrets.token_hex(4).encode()
    need = options.need_bytes()
    if status is None:
        _need_delete(session, prefix)
        say(f"this token may create no namespace: keys of its own in {session.namespace}, removed at the end")
        try:
            yield session.namespace, prefix
        finally:
            with ignored():
                _remove_keys(session, prefix, say)
        return
    free = sum(drive.free_bytes for drive in status.drives)
    if free < need:
        raise CapacityShort(
            f"the run stores {format_size(need)} and the node has {format_size(free)} in free regions; nothing of "
            "others is evicted for it: take a smaller --working-set",
            field="working-set",
            limit=free,
        )
    with session.admin() as admin:
        for info in admin.list_namespaces():
            if info.name.startswith(f"{TENANT}/") and not info.sessions:
                say(f"{info.name} was left by a run that was killed: `forebay namespace rm {info.name} --force`")
        admin.create_namespace(name, quota_bytes=need, durability=options.durability, eviction="none")
    try:
        yield name, prefix
    finally:
        with ignored(), session.admin() as admin:
            try:
                admin.delete_namespace(name, force=True)
            except NotFound:
                say(f"{name} is gone already")
            except ForebayError as e:
                say(f"{name} could not be removed ({e.message}): `forebay namespace rm {name} --force`")


def _need_delete(session: Session, prefix: bytes) -> None:
    """Raise `PermissionDenied` before anything is stored that could not be removed."""
    with session.client() as client:
        if client.delete([prefix]) == ["permission_denied"]:
            raise PermissionDenied(
                f"the run removes what it stores: the token needs the right 'delete' in {session.namespace}",
                field="rights",
            )


def _remove_keys(session: Session, prefix: bytes, say: Callable[[str], None]) -> None:
    with session.client() as client:
        keys = [block.key for block in client.list(prefix)]
        left: Counter[str] = Counter()
        for first in range(0, len(keys), _DELETE_KEYS):
            left.update(why for why in client.delete(keys[first : first + _DELETE_KEYS]) if why not in REMOVED)
    if left:
        say(f"{left.total()} keys could not be removed ({', '.join(left)}): they begin with {prefix.decode()}")


def _all_do(workers: Sequence[Worker], what: str, side: str) -> None:
    _tell(workers, what, side)


def _tell(workers: Sequence[Worker], what: str, argument: object) -> list[Any]:
    """All at once; their answers."""
    for worker in workers:
        worker.ask(what, argument)
    return [worker.answer() for worker in workers]


def _compare(
    options: BenchOptions,
    work: Work,
    workers: Sequence[Worker],
    names: Sequence[str],
    shared: dict[str, tuple[int, ...]],
) -> Comparison:
    _tell(workers, "begin", work)
    latencies: dict[str, list[list[float]]] = {name: [] for name in names}
    sides = []
    for name in names:
        own = [pid for pids in _tell(workers, "open", name) for pid in pids]

        def slot(name: str = name) -> int:
            slots = _tell(workers, "slot", name)
            latencies[name].append([s for one in slots for s in one.calls_s])
            return sum(one.bytes for one in slots)

        sides.append(
            Side(
                name,
                slot,
                servers=(*shared.get(name, ()), *own),
                before=partial(_all_do, workers, "prepare", name),
                after=partial(_all_do, workers, "close", name),
                clients=tuple(worker.pid for worker in workers),
            )
        )
    samples = interleave(sides, options.rounds, limit_s=options.seconds)
    # the first slot of each warmed up
    calls = {name: [s for slot in slots[1:] for s in slot] for name, slots in latencies.items()}
    return Comparison(work.operation, work.block_bytes, work.batch, samples, calls, remote=not shared["forebay"])
