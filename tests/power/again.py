"""A node that starts from what a power loss left, recorded in its turn: ``python -m tests.power.again FOLDER``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from forebay import crashpoints
from forebay.errors import OK
from forebay.ids import BlockKey
from tests.power.recording import mark
from tests.power.scenario import POLICIES, SUBJECT

KEYS = ("again0", "again1", "again2")


async def main(folder: Path) -> None:
    """A start, some use, a clean stop and another start."""
    crashpoints.watch(lambda name: mark(f"at {name}"))
    for version in (1, 2):
        rig = SUBJECT.open(folder)
        await rig.start()
        while await rig.node.background():
            pass
        for namespace in rig.node.state.namespaces:
            name = namespace.full_name
            member = await rig.open(name)
            for key in KEYS if name in POLICIES else ():
                mark(f"deleting {name} {key}")
                await rig.node.blocks.delete(member.session, [BlockKey(key.encode())])
                mark(f"deleted {name} {key}")
                mark(f"putting {name} {key} {version}")
                assert await rig.put(member, key.encode(), SUBJECT.value_of(name, key, version)) == OK
                mark(f"put {name} {key} {version}")
        await rig.node.checkpoint()
        await rig.node.close()
        await rig.target.close()
        rig.store.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
