"""Maps that metadata keep as CBOR."""

from __future__ import annotations

from typing import Any

import cbor2

from forebay.errors import MetadataCorrupt

__all__ = ["load_map"]


def load_map(data: bytes, field: str) -> dict[Any, Any]:
    """The map that ``data`` is. Raises `MetadataCorrupt` naming ``field`` for whatever else it is."""
    try:
        found = cbor2.loads(data)
    except (cbor2.CBORError, ValueError, TypeError, RecursionError) as error:
        raise MetadataCorrupt(f"{field} does not decode: {error}", field=field) from error
    if not isinstance(found, dict):
        raise MetadataCorrupt(f"{field} is no map", field=field)
    return found
