"""One process of an engine, for the tests of sessions that several processes share: `python -m tests.client.engine`.

Arguments: url, token, session token in hex. Reads commands from standard input, a word a line, and answers each on
standard output.
"""

import sys

from forebay.client import Client, ClientOptions


def main(url: str, token: str, session_token: str) -> None:
    with Client.join(
        url, token=token, session_token=bytes.fromhex(session_token), options=ClientOptions(deadline_ms=20_000)
    ) as client:
        print("joined", flush=True)
        for line in sys.stdin:
            verb, _, key = line.strip().partition(" ")
            if verb == "get":
                (result,) = client.get([key.encode()])
                print(result.reason, bytes(result.value or b"").hex(), flush=True)
            elif verb == "put":
                print(client.put([key.encode()], [key.encode() * 3000])[0].reason, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
