"""Hints are advice: what is asked to be kept goes last, and goes; urgent blocks get no room beyond their quota."""

from __future__ import annotations

from pathlib import Path

from forebay.appliance.namespace.records import encode_tail
from forebay.errors import OK, QuotaExceeded
from tests.sim.rig import GRID, Rig
from tests.sim.running import on_loop

VALUE = bytes(GRID.groups[0].layout().value_bytes)
BLOCK_BYTES = GRID.groups[0].layout().extent_bytes
FOR_EVER_MS = (1 << 64) - 1


@on_loop
async def test_what_is_to_be_kept_for_ever_is_evicted_last(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "d", capacity_regions=1)
    await rig.start()
    await rig.namespace(quota_bytes=3 * BLOCK_BYTES)
    m = await rig.open()
    assert await rig.put(m, b"kept", VALUE, retain_until_ms=FOR_EVER_MS) == OK
    for key in (b"1", b"2", b"3", b"4"):
        assert await rig.put(m, key, VALUE) == OK
    assert rig.present(m, b"kept", b"1", b"2", b"3", b"4") == [True, False, False, True, True]
    for key in (b"5", b"6", b"7"):
        assert await rig.put(m, key, VALUE, retain_until_ms=FOR_EVER_MS) == OK
    assert rig.present(m, b"kept", b"5", b"6", b"7") == [False, True, True, True], (
        "the oldest of those that are to stay"
    )
    rig.check()


@on_loop
async def test_no_hint_passes_a_quota(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "d", capacity_regions=1)
    await rig.start()
    await rig.namespace(quota_bytes=2 * BLOCK_BYTES, eviction="none")
    m = await rig.open()
    urgent = encode_tail({}, {"priority_class": 1, "expected_reuse": 1 << 31, "session": "s", "final": True})
    for key, status in ((b"1", OK), (b"2", OK), (b"3", QuotaExceeded.code)):
        assert await rig.put(m, key, VALUE, tail=urgent, retain_until_ms=FOR_EVER_MS) == status
    rig.check()
