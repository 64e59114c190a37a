"""What the scheduler's half knows of one request: what is stored of it, what is being loaded, what was saved."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from forebay.connectors.keys import block_key

__all__ = ["Probe", "Tracked"]


@dataclass(frozen=True, slots=True)
class Probe:
    """What the node said about a request's blocks, from the first on. ``variant`` is None where none may be shared."""

    variant: bytes | None
    reasons: tuple[str, ...] = ()

    def present(self, first: int) -> int:
        """How many blocks in a row are there from ``first`` on."""
        count = 0
        for reason in self.reasons[first:]:
            if reason != "ok":
                break
            count += 1
        return count

    def has(self, block: int) -> bool:
        """Whether a block is there, as far as the node was asked."""
        return block < len(self.reasons) and self.reasons[block] == "ok"


@dataclass(slots=True)
class Tracked:
    """One request of the engine (vLLM's `Request`), from its arrival to its end.

    ``asked_at_ms`` is when the probe was begun, ``preemptions`` how often the request had been preempted then.
    ``first`` is the first block that the engine lacked when it last asked, ``wanted`` how many from there on are worth
    loading, ``considered`` how many blocks were looked at for saving. ``loading`` are the engine's blocks of the load
    under way, and ``failed`` whether a rank has said that it lacks one of them, as it may before the last one has
    ended. A request whose load failed is ``computed``: it is not looked up again, so that it comes to an end.
    """

    request: Any
    probe: Future[Probe] | None = None
    asked_at_ms: int = 0
    preemptions: int = 0
    first: int = 0
    considered: int = 0
    loading: tuple[int, ...] = ()
    failed: bool = False
    counted: bool = False
    wanted: int = 0
    computed: bool = False

    @property
    def plain(self) -> bool:
        """Whether its hashes say all about its blocks: identifiers of images do not. A resumed session may get some."""
        return not self.request.mm_features and self.request.prompt_embeds is None

    @property
    def answer(self) -> Probe | None:
        """The probe's answer, if it is there."""
        return self.probe.result() if self.probe is not None and self.probe.done() else None

    def lost(self) -> None:
        """A load failed: compute the request, and store what it computes, whatever the node said it had."""
        self.computed = True
        answer = self.answer
        if answer is not None:
            self.probe = Future()
            self.probe.set_result(Probe(answer.variant))

    def keys(self, variant: bytes, blocks: range) -> tuple[bytes, ...]:
        """The keys of some of its blocks. The hashes are read anew each time: a resumed session changes them."""
        hashes = self.request.block_hashes
        return tuple([block_key(bytes(hashes[i]), variant) for i in blocks])
