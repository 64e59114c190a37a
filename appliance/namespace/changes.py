"""The log of changes to block records, since the last checkpoint of the index.

Each put or delete of a record carries, in the same batch, an entry ``number → stored key`` in the ``changes`` family.
A start loads the checkpoint and looks up again only the keys that changed since. Numbers are also the sequences of
commits. A change is *settled* when the index shows it; a checkpoint holds all settled changes. One whose write failed
is settled with the next of its key that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forebay.appliance.namespace.store import Op, Store
from forebay.crashpoints import crash_point
from forebay.errors import MetadataCorrupt
from forebay.ids import STORED_PREFIX, StoredKey

__all__ = ["ChangeLog"]

_BASE = b"change_base"
_KEY_BYTES = 8


class ChangeLog:
    """Numbers changes and knows which of them the index shows."""

    def __init__(self, store: Store) -> None:
        self._store = store
        base = store.get("meta", _BASE) or bytes(_KEY_BYTES)
        if len(base) != _KEY_BYTES:
            raise MetadataCorrupt(f"the base of the change log has {len(base)} bytes", field="meta.change_base")
        self.base = int.from_bytes(base, "big")
        """Entries up to this number are forgotten: a checkpoint that is not whole up to here is of no use."""
        last = store.last_key("changes") or bytes(_KEY_BYTES)
        if len(last) != _KEY_BYTES:
            raise MetadataCorrupt(f"the change {last.hex()} does not decode", field="changes")
        self.last = max(self.base, int.from_bytes(last, "big"))
        self._open: dict[int, Sequence[StoredKey]] = {}  # first number of a batch -> its keys
        self._unknown: dict[StoredKey, int] = {}  # keys whose records nobody knows -> their first number of that kind

    def enter(self, stored_keys: Sequence[StoredKey]) -> tuple[range, list[Op]]:
        """Numbers for a batch of changes, and what to write with it. `settle` them when the index shows them.

        When the write fails, `fail` them, or write the same once more.
        """
        numbers = range(self.last + 1, self.last + 1 + len(stored_keys))
        self.last += len(stored_keys)
        self._open[numbers.start] = stored_keys
        return numbers, [Op("changes", _key(n), key) for n, key in zip(numbers, stored_keys, strict=True)]

    def settle(self, numbers: range) -> None:
        """The index shows these, and so nothing of earlier changes of their keys is unknown."""
        for key in self._open.pop(numbers.start):
            self._unknown.pop(key, None)

    def fail(self, numbers: range) -> None:
        """Nobody knows whether the records of these are there, until a later change of their keys is settled."""
        for number, key in zip(numbers, self._open.pop(numbers.start), strict=True):
            self._unknown.setdefault(key, number)

    @property
    def settled(self) -> int:
        """All changes up to this number are in the index."""
        return min((*self._open, *self._unknown.values()), default=self.last + 1) - 1

    def skip_to(self, number: int) -> None:
        """Number later changes above ``number``, which a record carries."""
        self.last = max(self.last, number)

    def after(self, number: int) -> Iterator[tuple[int, StoredKey]]:
        """Logged changes above ``number``, in order. Raises `MetadataCorrupt`."""
        for key, stored in self._store.scan("changes", start=_key(number + 1)):
            if len(key) != _KEY_BYTES or len(stored) <= STORED_PREFIX.size:
                raise MetadataCorrupt(f"the change {key.hex()} does not decode", field="changes")
            yield int.from_bytes(key, "big"), StoredKey(stored)

    async def forget(self, number: int) -> None:
        """A durable checkpoint holds all changes up to ``number``: drop their entries."""
        await self._store.write([Op("meta", _BASE, _key(number))])
        self.base = number
        crash_point("checkpoint.after_base_before_delete")
        await self._store.delete_range("changes", _key(0), _key(number + 1))


def _key(number: int) -> bytes:
    return number.to_bytes(_KEY_BYTES, "big")
