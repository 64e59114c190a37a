"""Mooncake Store's client without memory of its own to give, and, as ``storage``, the process that gives it.

Objects are never overwritten there: every turn has keys of its own, and what an earlier one wrote is removed first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence

from mooncake.store import MooncakeDistributedStore

from perf.peers.slots import Mover, serve

__all__: list[str] = []


def _store(port: str, segment_bytes: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    failed = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 128 << 20, "tcp", "", f"127.0.0.1:{port}")
    if failed:
        raise ConnectionError(f"Mooncake's setup answered {failed}")
    return store


class _Mooncake(Mover):
    def __init__(self, port: str) -> None:
        self._store = _store(port, 0)
        self._turn = 0
        self._held: list[mmap.mmap] = []

    def prepare(self, memory: mmap.mmap) -> None:
        self._held.append(memory)  # registered memory stays
        _done([self._store.register_buffer(_address(memory), len(memory))])

    def put(self, first: int, values: Sequence[memoryview]) -> None:
        keys, places, sizes = self._named(first, values)
        if len(keys) == 1:
            _done([self._store.put_from(keys[0], places[0], sizes[0])])
        else:
            _done(self._store.batch_put_from(keys, places, sizes))

    def get(self, first: int, buffers: Sequence[memoryview]) -> None:
        keys, places, sizes = self._named(first, buffers)
        if len(keys) == 1:
            got = [self._store.get_into(keys[0], places[0], sizes[0])]
        else:
            got = self._store.batch_get_into(keys, places, sizes)
        if got != sizes:
            raise ConnectionError(f"Mooncake read {got}")

    def renew(self) -> None:
        self._turn += 1
        removed = self._store.remove_all(True)
        if removed < 0:
            raise ConnectionError(f"Mooncake's remove_all answered {removed}")

    def _named(self, first: int, pieces: Sequence[memoryview]) -> tuple[list[str], list[int], list[int]]:
        keys = [f"{self._turn}/{first + i}" for i in range(len(pieces))]
        return keys, [_address(piece) for piece in pieces], [len(piece) for piece in pieces]


def _address(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _done(answers: Sequence[int]) -> None:
    if any(answers):
        raise ConnectionError(f"Mooncake answered {list(answers)}")


def _main(what: str, port: str) -> None:
    replies = os.fdopen(os.dup(1), "w")  # the library prints, too
    os.dup2(2, 1)
    if what == "storage":
        store = _store(port, int(sys.argv[3]))
        print("ready", file=replies, flush=True)
        sys.stdin.read()
        store.close()
    else:
        serve(_Mooncake(port), replies)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
