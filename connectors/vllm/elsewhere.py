"""Misses whose blocks the namespace has under another keyspace or generation: counted as such, and said once."""

from __future__ import annotations

import logging
import threading

from forebay.client import Client, MatchResult
from forebay.errors import ForebayError

__all__ = ["Elsewhere"]

_log = logging.getLogger("vllm.forebay")

_MOST_TOLD = 16
"""Places that a user is told of; who has more of them has been told enough."""


class Elsewhere:
    """Explains the answers to one engine's lookups. Thread-safe; asks the node once about each place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: set[tuple[bytes, int]] = set()

    def explained(self, client: Client, found: MatchResult, deadline_ms: int) -> tuple[str, ...]:
        """The reasons of a `MatchResult`.

        The node looks for the first absent block elsewhere. Where that is, those behind it are taken to be: each one's
        key holds all tokens before it.
        """
        reasons = found.reasons
        why = next((word for word in reasons if word.startswith(("other_", "stale_"))), None)
        if found.elsewhere is None or why is None:
            return reasons
        self._tell(client, found.elsewhere, why, deadline_ms)
        return tuple([why if word == "absent" else word for word in reasons])

    def _tell(self, client: Client, place: tuple[bytes, int], why: str, deadline_ms: int) -> None:
        with self._lock:
            if place in self._told or len(self._told) >= _MOST_TOLD:
                return
            self._told.add(place)
        keyspace, generation = place
        if why != "other_keyspace":
            _log.warning(
                "blocks of these prompts are stored under generation %d of the same keyspace, and this engine has "
                "another one: it computes them",
                generation,
            )
            return
        differences = ["(the node does not say what differs)"]
        try:
            known = {
                (info.keyspace, info.generation): info.schema for info in client.keyspaces(deadline_ms=deadline_ms)
            }
            if place in known:
                differences = client.schema.differences(known[place])
        except ForebayError as e:
            differences = [f"(the node does not say what differs: {e})"]
        _log.warning(
            "blocks of these prompts are stored in keyspace %s, and this engine is in %s: it computes them; what "
            "differs, here and there: %s",
            keyspace.hex()[:16],
            client.schema.keyspace.hex()[:16],
            "; ".join(differences),
        )
