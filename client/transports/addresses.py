"""The addresses that a name stands for, by a deadline: the system's resolver has none."""

from __future__ import annotations

import socket
from typing import NamedTuple

from forebay.client.threads import begin
from forebay.errors import ConnectionLost, DeadlineExceeded

__all__ = ["SocketAddress", "addresses_of"]


class SocketAddress(NamedTuple):
    """An address family, and the address as Python's sockets have it."""

    family: int
    address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


def addresses_of(name: str, port: int, left_ms: int) -> list[SocketAddress]:
    """All addresses of ``name``, the best first; a numeric one is looked up nowhere.

    Raises `ConnectionLost` where it has none, `Unavailable` where no thread can ask, and `DeadlineExceeded` after
    ``left_ms``: the look-up goes on then, in a thread that ends with it.
    """
    try:
        return _ask(name, port, socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        pass
    answers: list[list[SocketAddress] | OSError] = []

    def ask() -> None:
        try:
            answers.append(_ask(name, port, 0))
        except (OSError, UnicodeError) as e:  # the latter from names that no encoding of names has
            answers.append(e if isinstance(e, OSError) else OSError(str(e)))

    begin(ask, "forebay-resolve").join(left_ms / 1000)
    if not answers:
        raise DeadlineExceeded(f"looking up {name} took too long")
    if isinstance(answers[0], OSError):
        raise ConnectionLost(f"looking up {name}: {answers[0]}")
    return answers[0]


def _ask(name: str, port: int, flags: int) -> list[SocketAddress]:
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
    return [SocketAddress(family, address) for family, _, _, _, address in found]
