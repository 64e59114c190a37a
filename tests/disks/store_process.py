"""A process with a metadata store, told line by line what to do: it is the one that runs under the shim."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from forebay.appliance.namespace.rocks import RocksStore
from forebay.appliance.namespace.store import Op
from forebay.errors import ForebayError


def main() -> None:
    """Answer each line of JSON with one."""
    try:
        store = RocksStore(Path(sys.argv[1]), retry_s=0.05)
    except ForebayError as error:
        print(json.dumps(error.to_dict()), flush=True)
        return
    print(json.dumps({"open": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(store, **json.loads(line))), flush=True)
    store.close()


def _answer(store: RocksStore, call: str, key: str = "", value: str | None = None) -> dict[str, Any]:
    try:
        if call == "write":
            asyncio.run(store.write([Op("blocks", key.encode(), value.encode() if value is not None else None)]))
            return {"ok": True}
        if call == "read":
            found = store.get("blocks", key.encode())
            return {"value": None if found is None else found.decode()}
        if call == "flush":  # RocksDB's own, which its memory table runs into when it is full
            with store._read() as database:
                database.families["blocks"].flush()
            return {"ok": True}
        if call == "all":
            return {"keys": [k.decode() for k, _ in store.scan("blocks")]}
        return {"problem": store.problem and store.problem.to_dict(), "reopened": store.reopened}
    except ForebayError as error:
        return error.to_dict()


if __name__ == "__main__":
    main()
