"""One client process of a soak: ``python -m tests.soak.worker GRPC NVME_PORT JOURNAL NUMBER SEED``.

The token is in FOREBAY_TOKEN. It stores, reads, matches, deletes and pins in all namespaces of the soak and verifies
every byte that it reads. Of keys that nobody else writes its journal says what they may be, a line before and a line
after each change, so that the process which comes after a kill knows too. NVMe/TCP goes by NVME_PORT, a proxy.

Lines on standard input say ``pause``, ``settle`` (find out, by reading, what keys of unknown state are; nothing is
pending then) and ``go``; each is answered by a line of JSON with what was counted so far.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from forebay.client import Client, ClientOptions, GetResult, NvmeTcpOptions
from forebay.client.session import Opening
from forebay.client.transports.base import Transport
from forebay.client.transports.controller import SubsystemAddress
from forebay.client.transports.kinds import nvme_tcp
from forebay.clock import Clock
from forebay.errors import ForebayError
from forebay.ids import LBA_BYTES, HostIdentity
from forebay.schema import Schema
from tests.kill.worker import NEVER
from tests.power.history import History
from tests.soak.content import GRID, GRID_BYTES, NAMESPACES, SHARED_KEYS, problem, value_of, write_of

__all__: list[str] = []

_KEPT_KEYS = 40
_PAGES = (5, 147)
"""Sizes of extents, few as those of one model's blocks are: each size takes regions of its own. Lengths are any."""
_OPTIONS = ClientOptions(deadline_ms=8_000, connect_ms=8_000, nvme_tcp=NvmeTcpOptions(connections=2))
_AWAY_S = 0.1
"""Between two attempts to reach a node that does not answer."""
_KEPT = "soak/kept"
_RANKS = "soak/ranks"


class _Worker:
    def __init__(self, url: str, nvme_port: int, journal: Path, number: int, seed: int) -> None:
        self._url, self._nvme_port, self._number = url, nvme_port, number
        self._chance = random.Random(seed)
        self._history = History({})
        if journal.exists():
            self._history.read(line for line in journal.read_text().splitlines())
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.going = threading.Event()
        self.paused = threading.Event()
        self.settling = False
        self._clients: dict[str, Client] = {}
        self._second: Client | None = None
        self._joined = b""
        self._pinned: list[bytes] = []
        self._never = threading.Event()

    # ------------------------------------------------------------------------------------------------ clients

    def _by_proxy(
        self,
        subsystem: SubsystemAddress,
        host: HostIdentity,
        nguids: Mapping[int, str],
        options: ClientOptions,
        clock: Clock,
    ) -> Transport:
        address = SubsystemAddress("127.0.0.1", self._nvme_port, subsystem.nqn)
        return nvme_tcp(address, host, nguids, options, clock)

    def _client(self, name: str) -> Client:
        """The client of a namespace; raises where the node is away."""
        found = self._clients.get(name)
        if found is None:
            opening = Opening(name, self._schema(name), 0)
            found = Client(self._url, opening, options=_OPTIONS, transport=self._by_proxy)
            self._clients[name] = found
        return found

    @staticmethod
    def _schema(name: str) -> Schema:
        return GRID if name == _RANKS else Schema.opaque()

    def _other_rank(self, leader: Client) -> Client:
        """The second rank, in the leader's session as it is now: that may have ended and been opened anew."""
        if self._second is None or self._joined != leader.join_token:
            if self._second is not None:
                self._second.close()
            self._second, self._joined = None, leader.join_token
            opening = Opening(_RANKS, GRID, 0, join=self._joined)
            self._second = Client(self._url, opening, options=_OPTIONS, transport=self._by_proxy)
        return self._second

    # ------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Work until the process is ended."""
        acts: list[tuple[int, Callable[[], None]]] = [
            (8, self._read_shared),
            (5, self._write_shared),
            (1, self._delete_shared),
            (1, self._look),
            (1, self._pin),
            (4, self._kept),
            (3, self._brief),
            (4, self._ranks),
        ]
        weights, doing = [w for w, _ in acts], [act for _, act in acts]
        opening = list(NAMESPACES)
        while True:
            if not self.going.is_set() and not opening:
                self.paused.set()
                self.going.wait()
                self.paused.clear()
            try:
                if opening:  # all of them, before anything is counted
                    client = self._client(opening[-1])
                    if opening.pop() == _RANKS:
                        self._other_rank(client)
                elif self.settling:
                    self._settle()
                    self.settling = False
                    self.going.clear()
                else:
                    self._chance.choices(doing, weights)[0]()
                    self.counts["calls"] += 1
            except ForebayError as error:  # opening a session; an open client never raises for what a node does
                self.counts[f"away_{type(error).__name__}"] += 1
                self._never.wait(_AWAY_S)

    def _note(self, what: str, results: Sequence[str]) -> None:
        for result in results:
            self.counts[f"{what}_{result}"] += 1
        if any(result in ("unavailable", "deadline_exceeded") for result in results):
            self._never.wait(_AWAY_S)

    def _verified(self, key: bytes, result: GetResult) -> bytes | None:
        """The value that was read, looked at; None for a miss."""
        if not result.hit or result.value is None:
            return None
        value = bytes(result.value)
        found = problem(key, value)
        if found is not None:
            self.wrong.append(f"{key!r}: {found}")
        self.counts["blocks_verified"] += 1
        self.counts["bytes_verified"] += len(value)
        return value

    def _length(self, pages: Sequence[int]) -> int:
        """Bytes of a value that takes one of these."""
        return self._chance.choice(pages) * LBA_BYTES - self._chance.randrange(LBA_BYTES)

    def _shared_keys(self, count: int) -> list[bytes]:
        return [b"s%d" % i for i in self._chance.sample(range(SHARED_KEYS), count)]

    # ------------------------------------------------------------------------------------------------ acts

    def _read_shared(self) -> None:
        keys, client = self._shared_keys(8), self._client("soak/shared")
        if self._chance.random() < 0.5:
            results = client.get(keys)
        else:
            buffers = [bytearray(_PAGES[-1] * LBA_BYTES) for _ in keys]
            results = client.get_into(keys, buffers)
        self._note("get", [result.reason for result in results])
        for key, result in zip(keys, results, strict=True):
            self._verified(key, result)

    def _write_shared(self) -> None:
        keys = self._shared_keys(3)
        values = [value_of(key, self._chance.getrandbits(63), self._length(_PAGES)) for key in keys]
        self._note("put", [result.reason for result in self._client("soak/shared").put(keys, values)])

    def _delete_shared(self) -> None:
        self._note("delete", self._client("soak/shared").delete(self._shared_keys(2)))

    def _look(self) -> None:
        client, keys = self._client("soak/shared"), self._shared_keys(64)
        self._note("match", list(set(client.match(keys).reasons)))
        client.touch(keys[:8])
        self._note("wait", client.wait(keys[:1], 20))

    def _pin(self) -> None:
        client = self._client("soak/shared")
        if self._pinned:
            client.pin(self._pinned, pinned=False)
            self._pinned = []
        else:
            self._pinned = self._shared_keys(4)
            self._note("pin", client.pin(self._pinned))

    def _brief(self) -> None:
        client, key = self._client("soak/brief"), b"b%d" % self._chance.randrange(200)
        if self._chance.random() < 0.5:
            value = value_of(key, self._chance.getrandbits(63), self._length(_PAGES[:1]))
            self._note("brief_put", [result.reason for result in client.put([key], [value])])
        else:
            (result,) = client.get([key])
            self._note("brief_get", [result.reason])
            self._verified(key, result)

    def _ranks(self) -> None:
        """A leader and a second rank write a block together, or one reads; now and then a rank gives up half-way."""
        leader = self._client(_RANKS)
        keys = [b"r%d" % i for i in self._chance.sample(range(120), 2)]
        if self._chance.random() < 0.5:
            results = leader.get(keys)
            self._note("ranks_get", [result.reason for result in results])
            for key, result in zip(keys, results, strict=True):
                self._verified(key, result)
            return
        if self._chance.random() < 0.5:
            self._note("ranks_delete", leader.delete(keys))
        second = self._other_rank(leader)
        values = [value_of(key, self._chance.getrandbits(63), GRID_BYTES) for key in keys]
        plan = leader.allocate(keys)
        self._note("ranks_plan", plan.reasons)
        half, gives_up = GRID_BYTES // 2, self._chance.random() < 0.1
        leader.put_tiles(plan, [0, 1], [value[:half] for value in values])
        if gives_up:
            if self._chance.random() < 0.5:
                leader.abort(plan)
            return
        done = second.put_tiles(plan, [2, 3], [value[half:] for value in values])
        self._note("ranks_put", [result.reason for result in done])

    # ------------------------------------------------------------------------------------------------ kept keys

    def _say(self, kind: str, key: bytes, write: int = 0) -> None:
        line = f"{kind} {_KEPT} {key.decode()}" + (f" {write}" if kind.startswith("put") else "")
        os.write(self._journal, (line + "\n").encode())
        self._history.read([line])

    def _may_be(self, key: bytes) -> set[int | None]:
        return self._history.keys.get((_KEPT, key.decode()), {None})

    def _kept(self) -> None:
        """Keys of this worker alone: what was acknowledged is there, with the bytes of that write."""
        client = self._client(_KEPT)
        key = b"w%d-%d" % (self._number, self._chance.randrange(_KEPT_KEYS))
        state = self._may_be(key)
        if len(state) > 1 or (None not in state and self._chance.random() < 0.7):
            self._check_kept(key, client.get([key])[0])
        elif state == {None}:
            write = self._chance.getrandbits(62) + 1
            self._say("putting", key, write)
            (put,) = client.put([key], [value_of(key, write, self._length(_PAGES[:1]))])
            self._note("kept_put", [put.reason])
            if (
                put.present
            ):  # at once, or by an attempt of this very call whose answer was lost: there is no other writer
                self._say("put", key, write)
        else:
            self._say("deleting", key)
            (told,) = client.delete([key])
            self._note("kept_delete", [told])
            if told in ("ok", "absent"):
                self._say("deleted", key)

    def _check_kept(self, key: bytes, result: GetResult) -> None:
        state = self._may_be(key)
        self._note("kept_get", [result.reason])
        value = self._verified(key, result)
        if value is not None:
            if write_of(value) not in state:
                self.wrong.append(f"{key!r}: write {write_of(value)}, may be {state}")
        elif result.reason in NEVER and None not in state:
            self.wrong.append(f"{key!r}: {result.reason}, may be {state}")

    def _settle(self) -> None:
        """Read what is not known for sure. The node was started again since: nothing of then can still come."""
        client = self._client(_KEPT)
        unsure = [key.encode() for (_, key), state in self._history.keys.items() if len(state) > 1]
        for key in unsure:
            while True:
                (result,) = client.get([key])
                if result.hit or result.reason in NEVER:
                    break
                self._never.wait(_AWAY_S)
            self._check_kept(key, result)
            if result.value is not None:
                self._say("put", key, write_of(bytes(result.value)))
            else:
                self._say("deleted", key)
            self.counts["settled"] += 1


def main() -> None:
    """Work, and do as told."""
    grpc, nvme_port, journal, number, seed = sys.argv[1:]
    worker = _Worker(f"forebay://{grpc}", int(nvme_port), Path(journal), int(number), int(seed))
    worker.going.set()
    threading.Thread(target=worker.run, daemon=True).start()
    for line in sys.stdin:
        word = line.strip()
        if word == "pause":
            worker.going.clear()
        else:
            worker.settling = word == "settle"
            worker.paused.clear()
            worker.going.set()
        if word != "go":
            worker.paused.wait()
        print(json.dumps({"counts": worker.counts, "wrong": worker.wrong}), flush=True)


if __name__ == "__main__":
    main()
