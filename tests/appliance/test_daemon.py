"""What the daemon makes of its configuration and of what metadata say."""

from __future__ import annotations

import asyncio

from forebay.appliance.daemon import _most_blocks
from forebay.appliance.namespace.store import MemoryStore, Op
from forebay.ids import LBA_BYTES

REGION = 64 << 20


def test_blocks_of_a_drive_that_shrank_or_is_away_have_a_place_in_the_index() -> None:
    store = MemoryStore()
    assert _most_blocks(store, 4, REGION) == 4 * REGION // LBA_BYTES
    asyncio.run(store.write([Op("regions", n.to_bytes(8, "big"), (4096).to_bytes(4, "big")) for n in range(6)]))
    assert _most_blocks(store, 4, REGION) == 6 * REGION // LBA_BYTES
    assert _most_blocks(store, 1 << 20, REGION) == 1 << 28
