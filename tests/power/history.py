"""What was asked for and acknowledged, line by line in the log, and what may be found after a power loss.

====================== ===============================================================================================
line                   meaning
====================== ===============================================================================================
``putting NS KEY V``   a put of version V of KEY began; ``put NS KEY V``: it was acknowledged
``deleting NS KEY``    a delete began; ``deleted NS KEY``: it was acknowledged
``keep NS KEY``        the key is pinned in its record
``evicting NS``        from here on blocks of NS that are not kept may go
``making NS``          a namespace is made; ``made NS``: it was acknowledged
``dropping NS``        a namespace is deleted; ``dropped NS``: it was acknowledged
``at POINT``           that crash point was reached
====================== ===============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.appliance.namespace.records import Durability

__all__ = ["History"]


@dataclass
class History:
    """The lines up to one moment. Versions count from 1; None stands for no block."""

    policies: dict[str, Durability]
    """Namespace to policy."""
    keys: dict[tuple[str, str], set[int | None]] = field(default_factory=dict)
    """What each key may be."""
    made: dict[str, bool | None] = field(default_factory=dict)
    """Whether each namespace is there; None: it may be either."""
    kept: set[tuple[str, str]] = field(default_factory=set)
    evicting: set[str] = field(default_factory=set)
    acknowledged: int = 0

    def read(self, lines: Iterable[str]) -> History:
        """Take these lines in; the history itself."""
        for line in lines:
            self._read(*line.split())
        return self

    def _read(self, kind: str, name: str, key: str = "", version: str = "0") -> None:
        match kind:
            case "making" | "dropping":
                self.made[name] = None
            case "made" | "dropped":
                self.made[name] = kind == "made"
                if kind == "dropped":
                    self.keys = {k: {None} if k[0] == name else v for k, v in self.keys.items()}
            case "putting":
                self.keys.setdefault((name, key), {None}).add(int(version))
            case "put":
                self.keys[name, key] = {int(version)}
                self.acknowledged += 1
            case "deleting":
                self.keys.setdefault((name, key), {None}).add(None)
            case "deleted":
                self.keys[name, key] = {None}
            case "keep":
                self.kept.add((name, key))
            case "evicting":
                self.evicting.add(name)

    def may_be(self, name: str, key: str) -> set[int | None]:
        """The versions that a reader may get."""
        versions = self.keys[name, key]
        safe = self.policies[name] is Durability.FLUSH and (name not in self.evicting or (name, key) in self.kept)
        return versions if safe and self.made.get(name) else versions | {None}
