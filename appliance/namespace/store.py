"""Metadata storage: an ordered, durable map in a few column families.

Writes are batches; batches become visible and durable in the order given. That order is what the engine's recovery
rests on: the delete that frees an extent is in the log before the record that uses it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forebay.errors import ForebayError

__all__ = ["FAMILIES", "MemoryStore", "Op", "Store"]

FAMILIES = ("meta", "state", "keyspaces", "regions", "blocks", "owners", "changes")
"""meta: format, node, incarnation, epochs · state: namespaces, volumes, principals, scopes · keyspaces: digest →
schema CBOR · regions: claimed regions · blocks: stored key → record · owners: extent →
stored key · changes: number → stored key, since the last checkpoint of the index."""


class Op(NamedTuple):
    """One change: put, or delete when ``value`` is None."""

    family: str
    key: bytes
    value: bytes | None


class Store(ABC):
    """The interface; see the module."""

    @property
    def problem(self) -> ForebayError | None:
        """Why every write fails at present, or None. It goes away by itself with its cause."""
        return None

    @abstractmethod
    def get(self, family: str, key: bytes) -> bytes | None:
        """The value, or None. This and the other reads raise `MetadataCorrupt`, `Unavailable`."""

    @abstractmethod
    def multi_get(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in the order of ``keys``."""

    @abstractmethod
    def scan(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Pairs in key order from ``start`` on, while keys begin with ``prefix``."""

    @abstractmethod
    def last_key(self, family: str) -> bytes | None:
        """The highest key, or None in an empty family."""

    def deletes(self, family: str, prefix: bytes) -> list[Op]:
        """What to write to delete every key that begins so."""
        return [Op(family, key, None) for key, _ in self.scan(family, prefix=prefix)]

    @abstractmethod
    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> None:
        """Apply all or none. Returns when the batch is durable, or merely accepted with ``durable=False``.

        Raises `NoSpace` or `Unavailable` (with the reason) when the store cannot write. Then nothing of the batch is
        acknowledged, and nobody knows whether it is there.
        """

    @abstractmethod
    async def delete_range(self, family: str, start: bytes, stop: bytes) -> None:
        """Delete keys from ``start`` up to, not including, ``stop``; need not be durable when it returns."""

    @abstractmethod
    def close(self) -> None:
        """Flush and let go."""


class MemoryStore(Store):
    """A store that forgets at exit: for tests of the engine and its simulation only."""

    def __init__(self) -> None:
        self.families: dict[str, dict[bytes, bytes]] = {name: {} for name in FAMILIES}

    def get(self, family: str, key: bytes) -> bytes | None:
        return self.families[family].get(key)

    def multi_get(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.families[family].get(key) for key in keys]

    def scan(self, family: str, start: bytes = b"", prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        table = self.families[family]
        return iter([(k, table[k]) for k in sorted(table) if k >= max(start, prefix) and k.startswith(prefix)])

    def last_key(self, family: str) -> bytes | None:
        return max(self.families[family], default=None)

    async def write(self, ops: Sequence[Op], *, durable: bool = True) -> None:
        for family, key, value in ops:
            if value is None:
                self.families[family].pop(key, None)
            else:
                self.families[family][key] = value

    async def delete_range(self, family: str, start: bytes, stop: bytes) -> None:
        for key in [k for k in self.families[family] if start <= k < stop]:
            del self.families[family][key]

    def close(self) -> None:
        pass
