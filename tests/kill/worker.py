"""One client of the kill rounds: ``python -m tests.kill.worker URL NAMESPACE JOURNAL SEED``.

The token is in FOREBAY_TOKEN. It stores, reads and deletes, and writes what it begins and what was acknowledged to its
journal, a line each, as in `tests.power.history`; a line is in the file before the worker goes on, so it is there after
a kill. A key whose state is not known for sure (a call that failed, or that nobody saw end) is never touched again.
Lines on its standard input say ``pause`` and ``go``.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from forebay.client import Client, ClientOptions, connect
from forebay.errors import ForebayError
from tests.kill.blocks import SCHEMA, value_of
from tests.power.history import History

__all__ = ["NEVER"]

NEVER = frozenset({"absent", "checksum_mismatch", "media_error", "corrupt"})
"""Reasons for a miss that a block which was acknowledged may never have."""
_KEYS = 48
_BATCH = 4
_PACE_S = 0.01
"""Between two calls, so that a machine with few cores gets to other things."""
_AWAY_S = 0.05
"""Between two looks at a node that does not answer."""
_OPTIONS = ClientOptions(deadline_ms=5_000, connect_ms=5_000)


class _Worker:
    def __init__(self, url: str, namespace: str, journal: Path, seed: int) -> None:
        self._url, self._namespace = url, namespace
        self._chance = random.Random(seed)
        lines = journal.read_text().splitlines() if journal.exists() else []
        self._handle = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._state: dict[str, int | None] = {}
        """Keys of which it is known what they are: a version, or None."""
        self._unsure: set[str] = set()
        self._made = 0
        self._restore(lines)
        self.go = threading.Event()
        self._never = threading.Event()

    def _restore(self, lines: list[str]) -> None:
        keys = History({}).read(line for line in lines if not line.startswith("note")).keys
        for (_, key), versions in keys.items():
            self._made = max(self._made, int(key.partition("-")[2]) + 1)
            if len(versions) > 1:
                self._unsure.add(key)
            else:
                (self._state[key],) = versions

    def _say(self, *words: object) -> None:
        os.write(self._handle, (" ".join(map(str, words)) + "\n").encode())

    def run(self) -> None:
        while True:
            try:
                with connect(self._url, namespace=self._namespace, schema=SCHEMA, options=_OPTIONS) as client:
                    while True:
                        self._step(client)
            except ForebayError as error:  # the node is away; a client that was connected never raises
                self._say("note", "connect", type(error).__name__)
                self._never.wait(_AWAY_S)

    def _step(self, client: Client) -> None:
        if not self.go.is_set():
            print("paused", flush=True)
            self.go.wait()
        self._never.wait(_PACE_S)
        known = sorted(key for key in self._state if key not in self._unsure)
        there = [key for key in known if self._state[key] is not None]
        way = self._chance.random()
        if len(there) < _KEYS // 2 or (way < 0.4 and len(there) < _KEYS):
            self._put(client, [key for key in known if self._state[key] is None])
        elif way < 0.6:
            self._delete(client, self._chance.choice(there))
        else:
            self._get(client, self._chance.sample(there, _BATCH))

    def _put(self, client: Client, gone: list[str]) -> None:
        keys = self._chance.sample(gone, min(_BATCH, len(gone)))
        while len(keys) < _BATCH:
            keys.append(f"k-{self._made}")
            self._made += 1
        versions = [self._next_version(key) for key in keys]
        for key, version in zip(keys, versions, strict=True):
            self._say("putting", self._namespace, key, version)
        values = [value_of(self._namespace, k, v) for k, v in zip(keys, versions, strict=True)]
        results = client.put([key.encode() for key in keys], values)
        for key, version, result in zip(keys, versions, results, strict=True):
            # present: it was stored by an attempt of this very call whose answer was lost, there is no other writer
            if result.stored or result.present:
                self._say("put", self._namespace, key, version)
                self._state[key] = version
            else:
                self._say("note", "put", result.reason)
                self._unsure.add(key)
        if not all(result.stored or result.present for result in results):
            self._wait_for_node(client)

    def _next_version(self, key: str) -> int:
        return self._chance.getrandbits(31) + 1 if key in self._state else 1

    def _delete(self, client: Client, key: str) -> None:
        self._say("deleting", self._namespace, key)
        (reason,) = client.delete([key.encode()])
        if reason == "ok" or reason == "absent":
            self._say("deleted", self._namespace, key)
            self._state[key] = None
        else:
            self._say("note", "delete", reason)
            self._unsure.add(key)
            self._wait_for_node(client)

    def _wait_for_node(self, client: Client) -> None:
        """Until the daemon answers and the target gives a block: else each moment without them costs keys."""
        there = next((key for key in self._state if key not in self._unsure and self._state[key] is not None), None)
        while self.go.is_set():
            if there is None and client.match([b"k-0"]).reasons[0] in ("ok", "absent"):
                return
            if there is not None:
                (result,) = client.get([there.encode()])
                if result.hit or result.reason == "absent":  # which a volatile one may be
                    return
            self._never.wait(_AWAY_S)

    def _get(self, client: Client, keys: list[str]) -> None:
        for key, result in zip(keys, client.get([key.encode() for key in keys]), strict=True):
            version = self._state[key]
            assert version is not None
            if not result.hit or result.value is None:
                wrong = result.reason in NEVER and not self._namespace.endswith("volatile")
                self._say("wrong" if wrong else "note", "get", key, result.reason)
            elif bytes(result.value) != value_of(self._namespace, key, version):
                self._say("wrong", "get", key, version, "other bytes")
            else:
                self._say("note", "got")


def main() -> None:
    url, namespace, journal, seed = sys.argv[1:]
    worker = _Worker(url, namespace, Path(journal), int(seed))
    worker.go.set()
    threading.Thread(target=worker.run, daemon=True).start()
    for line in sys.stdin:
        worker.go.set() if line.strip() == "go" else worker.go.clear()


if __name__ == "__main__":
    main()
