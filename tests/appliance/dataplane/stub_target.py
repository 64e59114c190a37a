"""A process that answers ``forebay_get_info`` and nothing else: stands for the target where only its life matters."""

import argparse
import asyncio
import json
import os
import signal
import uuid


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket")
    parser.add_argument("--log")
    parser.add_argument("--deaf", action="store_true", help="go on at SIGTERM")
    arguments = parser.parse_args()
    boot_id = str(uuid.uuid4())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            result = {"pid": os.getpid(), "boot_id": boot_id, "version": "stub", "capabilities": {}}
            writer.write(json.dumps({"id": json.loads(line)["id"], "result": result}).encode())

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, (lambda: None) if arguments.deaf else stopped.set)
    await asyncio.start_unix_server(serve, arguments.socket)
    await stopped.wait()


asyncio.run(main())
