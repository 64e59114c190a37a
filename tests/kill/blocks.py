"""The blocks of the kill rounds: their schema, the bytes of each version of a key, and how their nodes are set up."""

from __future__ import annotations

import random

from tests.sim.rig import grid

__all__ = ["SCHEMA", "WITHOUT_HTTP", "value_of"]

SCHEMA = grid(12_345)
"""Four tiles a block, of a length that is no multiple of anything."""
WITHOUT_HTTP = {"FOREBAY_HTTP_ENABLED": "false"}
"""Nobody here asks for it, and a start takes half of its time for it."""
_VALUE_BYTES = SCHEMA.groups[0].layout().value_bytes


def value_of(namespace: str, key: str, version: int) -> bytes:
    """What a version of a key holds: no two have a tile in common."""
    return random.Random(f"{namespace}|{key}|{version}").randbytes(_VALUE_BYTES)
