"""What the scheduler's half knows of one request: what is stored of it, what is being loaded, what was saved."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from forebay.connectors.keys import block_key
from forebay.connectors.vllm.advice import Advice
from forebay.connectors.vllm.groups import Presence

__all__ = ["Probe", "Tracked", "Whole"]


class Whole(NamedTuple):
    """A block of the engine that is whole, the key of the one before it, and what its request says of it."""

    block: int
    parent: bytes
    advice: Advice


@dataclass(frozen=True, slots=True)
class Probe:
    """What the node said about a request's blocks, by group, from the first on; see `of`.

    ``variant`` is None where none may be shared.
    """

    variant: bytes | None
    reasons: tuple[tuple[str, ...], ...] = ()
    present: tuple[Presence, ...] = ()

    @classmethod
    def of(cls, variant: bytes, reasons: Sequence[Sequence[str]]) -> Probe:
        """From the node's word for each block."""
        present = tuple([Presence([reason == "ok" for reason in row]) for row in reasons])
        return cls(variant, tuple([tuple(row) for row in reasons]), present)

    def has(self, group: int, block: int) -> bool:
        """Whether a block is there, as far as the node was asked."""
        return group < len(self.reasons) and block < len(self.reasons[group]) and self.reasons[group][block] == "ok"


@dataclass(slots=True)
class Tracked:
    """One request of the engine (vLLM's `Request`), from its arrival to its end.

    ``asked_at_ms`` is when the probe was begun, ``preemptions`` how often the request had been preempted then.
    ``start_tokens`` are what the engine had when it last asked, ``wanted_tokens`` how many after them are worth
    loading, ``considered_tokens`` how many were looked at for saving. ``loading`` are the engine's blocks of the load
    under way, where failures are told by block, and ``failed`` whether a rank has said that it lacks one of them, as
    it may before the last one has ended. A request whose load failed is ``computed``: it is not looked up again, so
    that it comes to an end. One that may have been computed with what another connector failed to load is ``spoilt``:
    nothing of it is saved any more.
    """

    request: Any
    probe: Future[Probe] | None = None
    asked_at_ms: int = 0
    preemptions: int = 0
    start_tokens: int = 0
    wanted_tokens: int = 0
    considered_tokens: int = 0
    loading: tuple[int, ...] = ()
    failed: bool = False
    counted: bool = False
    computed: bool = False
    spoilt: bool = False

    def plain(self, *, multimodal: bool) -> bool:
        """Whether its hashes and the schema say all about its blocks: of images only where those are ``multimodal``.

        A resumed session may get some. Embeddings of a prompt may come as items, too.
        """
        if self.request.prompt_embeds is not None:
            return False
        items = self.request.mm_features
        return not items or (multimodal and all(item.modality != "prompt_embeds" for item in items))

    @property
    def answer(self) -> Probe | None:
        """The probe's answer, if it is there."""
        return self.probe.result() if self.probe is not None and self.probe.done() else None

    def lost(self) -> None:
        """A load failed: compute the request, and store what it computes, whatever the node said it had."""
        self.computed = True
        self.considered_tokens = 0
        answer = self.answer
        if answer is not None:
            self.probe = Future()
            self.probe.set_result(Probe(answer.variant))

    def key(self, variant: bytes, hashed: int) -> bytes:
        """The key of the block that ends with a hash. They are read anew each time: a resumed session changes them."""
        return block_key(bytes(self.request.block_hashes[hashed]), variant)
