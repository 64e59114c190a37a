"""What the two halves of the connector tell each other; vLLM carries it between its scheduler and its workers.

The scheduler's half sends `StepWork` with every step. A worker tells what it holds once (`WorkerFacts`), and what has
happened since with the output of a step (`WorkerReport`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.connectors.vllm.advice import Advice
from forebay.connectors.vllm.groups import CacheGroup, CacheGroups

__all__ = ["GroupFacts", "Load", "Rows", "Save", "SessionOffer", "StepWork", "WorkerFacts", "WorkerReport"]


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a worker holds of one KV cache group's blocks: whole layers, of some heads.

    ``layers`` are the model's layer numbers, ``heads`` how many KV heads are here, ``bytes_per_head`` K and V of one
    token, ``format`` the order of bytes inside a tile: ``[layer][head][token]`` with whatever the attention backend
    makes of a token's K and V, which is why it is named. A ``mamba`` group has no heads: its one is what a rank holds
    of a layer's state, and ``bytes_per_head`` that state.
    """

    cache: CacheGroup
    layers: tuple[int, ...]
    heads: int
    bytes_per_head: int
    dtype: str
    format: str


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker holds, group by group, and over how many tokens the engine's block hashes are."""

    groups: tuple[GroupFacts, ...]
    hash_tokens: int

    @property
    def cache_groups(self) -> CacheGroups:
        """What all workers hold alike."""
        return CacheGroups(tuple([group.cache for group in self.groups]), self.hash_tokens)


@dataclass(frozen=True, slots=True)
class SessionOffer:
    """For workers that have not joined the session yet. ``number`` counts sessions; ``token`` is a secret."""

    number: int
    token: bytes = field(repr=False)  # vLLM logs what it was doing when it fails
    schema: bytes


@dataclass(frozen=True, slots=True)
class Rows:
    """Blocks of one group: ``keys[i]`` names the engine's block ``blocks[i]``."""

    group: int
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]

    def cut(self, blocks: int) -> list[Rows]:
        """The same in parts of so many blocks at most, in order."""
        starts = range(0, len(self.keys), blocks)
        return [Rows(self.group, self.keys[i : i + blocks], self.blocks[i : i + blocks]) for i in starts]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to read for a request that waits for them, or that this very step computes with (``in_step``)."""

    request: str
    rows: tuple[Rows, ...]
    advice: Advice = field(default_factory=Advice)
    in_step: bool = False

    def __len__(self) -> int:
        return sum(len(rows.keys) for rows in self.rows)


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks of a group that are whole after this step, to be stored; ``parents[i]`` is the key before ``keys[i]``."""

    number: int
    rows: Rows
    parents: tuple[bytes, ...] = ()
    advice: Advice = field(default_factory=Advice)

    def __len__(self) -> int:
        return len(self.rows.keys)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the workers are to do with this step; all of them the same.

    ``plans`` are what several ranks write earlier saves by, by their numbers; ``dropped`` saves have none. ``idle``
    says that nothing is computed in this step, so that waiting a moment costs nobody anything.
    """

    offer: SessionOffer | None = None
    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    plans: tuple[tuple[int, bytes], ...] = ()
    dropped: tuple[int, ...] = ()
    idle: bool = False


@dataclass(slots=True)
class WorkerReport:
    """What happened at the workers since their last report; vLLM adds up those of one step.

    ``joined`` is, by rank, the number of the session that it has joined and its NVMe host there; ``saved`` how many
    ranks have done with a save, well or not; ``failed`` the saves that a rank could not carry out; ``loaded`` how many
    seconds a request's load took at the slowest rank.
    """

    joined: dict[int, tuple[int, str]] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    loaded: dict[str, float] = field(default_factory=dict)

    def add(self, other: WorkerReport) -> None:
        """Take in another worker's report."""
        self.joined |= other.joined
        for number, ranks in other.saved.items():
            self.saved[number] = self.saved.get(number, 0) + ranks
        self.failed |= other.failed
        for request, seconds in other.loaded.items():
            self.loaded[request] = max(seconds, self.loaded.get(request, 0))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.joined or self.saved or self.failed or self.loaded)
