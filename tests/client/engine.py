"""One process of an engine, for the tests of sessions that several processes share: `python -m tests.client.engine`.

Arguments: url, token, session token in hex, schema in hex if it is not the opaque one. Reads commands from standard
input, one a line, and answers each on standard output.
"""

import sys

from forebay.client import Client, ClientOptions, WritePlan
from forebay.schema import Schema


def main(url: str, token: str, session_token: str, schema: str = "") -> None:
    options = ClientOptions(
        deadline_ms=20_000, connect_ms=20_000, attempt_ms=5_000, write_ttl_ms=2_000 if schema else 0
    )
    with Client.join(
        url,
        token=token,
        session_token=bytes.fromhex(session_token),
        schema=Schema.from_cbor(bytes.fromhex(schema)) if schema else None,
        options=options,
    ) as client:
        print("joined", flush=True)
        for line in sys.stdin:
            verb, _, key = line.strip().partition(" ")
            if verb == "get":
                (result,) = client.get([key.encode()])
                print(result.reason, bytes(result.value or b"").hex(), flush=True)
            elif verb == "put":
                print(client.put([key.encode()], [key.encode() * 3000])[0].reason, flush=True)
            elif verb == "allocate":
                print(client.allocate([key.encode()]).to_bytes().hex(), flush=True)
            elif verb == "tiles":
                plan, numbers, *values = key.split()
                results = client.put_tiles(
                    WritePlan.from_bytes(bytes.fromhex(plan)),
                    [int(number) for number in numbers.split(",")],
                    [bytes.fromhex(value) for value in values],
                )
                print(*[result.reason for result in results], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
