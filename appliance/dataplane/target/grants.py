"""Write grants: which hosts may write which LBAs of a fenced volume, and who is writing there right now.

A write counts itself in on the grants that cover it before it touches media and out after, under the lock that
`revoke` takes; so when `revoke` returns, nothing under those grants can reach media any more (design §6.4).
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from threading import Condition

from forebay.appliance.dataplane.target.precedence import Order
from forebay.errors import AlreadyExists, InvalidArgument
from forebay.ids import HostIdentity

__all__ = ["Grant", "GrantTable"]


class Grant:
    """One live grant: `[slba, end)` of a volume for some hosts. Changed only under the table's lock.

    Only commands that carry its tag are under it (0: those that carry none), so that one which a host sent under an
    earlier grant of the same place never passes for one of this.
    """

    __slots__ = ("end", "grant_id", "hosts", "revoked", "slba", "tag", "volume", "writers")

    def __init__(
        self, grant_id: int, volume: str, hosts: frozenset[HostIdentity], lbas: tuple[int, int], tag: int
    ) -> None:
        self.grant_id = grant_id
        self.volume = volume
        self.hosts = hosts
        self.slba, self.end = lbas
        self.tag = tag
        self.writers = 0
        self.revoked = False


_start = attrgetter("slba")
_MOST_FAILED = 65_536
"""What is remembered of failed writes that nobody asks for."""
_MOST_ENDED = 65_536
"""What is remembered of grants that were revoked before they came."""


class GrantTable:
    """All grants of the target."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._by_id: dict[int, Grant] = {}
        self._by_volume: dict[str, list[Grant]] = {}  # by slba; also revoked ones that still have writers
        self._failed: dict[int, None] = {}  # grants under which the drive refused a write, the oldest first
        self._ended: dict[int, Order] = {}  # ids that were revoked and not there, the oldest first

    def __len__(self) -> int:
        return len(self._by_id)

    def add(
        self,
        volume: str,
        hosts: Collection[HostIdentity],
        rows: Sequence[tuple[int, int, int, int]],
        lba_count: int,
        order: Order | None = None,
    ) -> None:
        """Add `(grant id, slba, nlb, tag)` rows for these hosts, all or none.

        A row that is live already, equal in all parts, is left as it is, so that a request whose answer was lost can
        be sent again. Raises `InvalidArgument` for a range outside the volume, `AlreadyExists` for one that overlaps
        another grant, live or still draining, or for an id that is taken, and OSError (ESTALE) for one that was
        revoked by a later order: the place is another's by now.
        """
        holders = frozenset(hosts)
        with self._changed:
            grants = self._by_volume.get(volume, [])
            fresh: list[Grant] = []
            for grant_id, slba, nlb, tag in rows:
                if nlb < 1 or slba < 0 or slba + nlb > lba_count:
                    raise InvalidArgument(f"grant {grant_id} of {nlb} LBAs at {slba}", field="grants", limit=lba_count)
                known = self._by_id.get(grant_id)
                if known is None:
                    if order is not None and order < self._ended.get(grant_id, order):
                        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
                    fresh.append(Grant(grant_id, volume, holders, (slba, slba + nlb), tag))
                elif known.revoked or (known.volume, known.hosts, known.slba, known.end, known.tag) != (
                    volume,
                    holders,
                    slba,
                    slba + nlb,
                    tag,
                ):
                    raise AlreadyExists(f"grant id {grant_id} is taken", field="grants")
            if len({grant.grant_id for grant in fresh}) != len(fresh):
                raise AlreadyExists("a grant id stands twice", field="grants")
            merged = list(grants)  # so that nothing has changed if one of them does not fit
            for grant in fresh:
                at = bisect_left(merged, grant.slba, key=_start)
                for other in merged[max(0, at - 1) : at + 1]:
                    if other.slba < grant.end and grant.slba < other.end:
                        raise AlreadyExists(f"grants {other.grant_id} and {grant.grant_id} overlap", field="grants")
                merged.insert(at, grant)
            self._by_volume[volume] = merged
            self._by_id.update((grant.grant_id, grant) for grant in fresh)

    def covers(self, volume: str, host: HostIdentity, slba: int, nlb: int, *, tag: int = 0) -> bool:
        """Whether the host's live grants of that tag cover the range without a gap."""
        with self._changed:
            return self._covering(volume, host, (slba, slba + nlb), tag) is not None

    def begin_write(self, volume: str, host: HostIdentity, slba: int, nlb: int, *, tag: int = 0) -> list[Grant] | None:
        """Count a media write in on the grants that cover it; None if the range is not covered. See `end_write`."""
        with self._changed:
            covering = self._covering(volume, host, (slba, slba + nlb), tag)
            for grant in covering or ():
                grant.writers += 1
            return covering

    def end_write(self, grants: Iterable[Grant]) -> None:
        """Count a media write out."""
        with self._changed:
            for grant in grants:
                grant.writers -= 1
                if grant.revoked and not grant.writers:
                    self._changed.notify_all()

    def note_failed(self, grants: Iterable[Grant]) -> None:
        """The drive failed a write under these. See `take_failed`."""
        with self._changed:
            self._failed.update((grant.grant_id, None) for grant in grants)
            while len(self._failed) > _MOST_FAILED:
                del self._failed[next(iter(self._failed))]

    def take_failed(self, grant_ids: Iterable[int]) -> list[int]:
        """Those of the grants, revoked or not, under which the drive failed a write; each is told once."""
        with self._changed:
            failed = [grant_id for grant_id in grant_ids if grant_id in self._failed]
            for grant_id in failed:
                self._failed.pop(grant_id, None)
            return failed

    def revoke(self, grant_ids: Iterable[int]) -> int:
        """End grants; returns when no write under them is under way, with how many there were. Unknown ids do nothing.

        A second revoke of a grant that still drains waits for it too.
        """
        with self._changed:
            return self._end(self._known(grant_ids))

    def revoke_idle(self, grant_ids: Collection[int], order: Order | None = None) -> int | None:
        """`revoke` that never waits: None if a write is under way. None begins after, and `revoke` waits for those.

        With an order, what is not there is not added by an earlier one either.
        """
        with self._changed:
            if order is not None:
                self._ended.update((grant_id, order) for grant_id in grant_ids if grant_id not in self._by_id)
                while len(self._ended) > _MOST_ENDED:
                    del self._ended[next(iter(self._ended))]
            ending = self._known(grant_ids)
            for grant in ending:
                grant.revoked = True
            return None if any(grant.writers for grant in ending) else self._end(ending)

    def revoke_all(self, volume: str | None = None) -> int:
        """`revoke` every grant, of one volume or of all."""
        with self._changed:
            return self._end([grant for grant in self._by_id.values() if volume in (None, grant.volume)])

    def _known(self, grant_ids: Iterable[int]) -> list[Grant]:
        return [grant for grant_id in set(grant_ids) if (grant := self._by_id.get(grant_id)) is not None]

    def _end(self, grants: list[Grant]) -> int:
        for grant in grants:
            grant.revoked = True
        self._changed.wait_for(lambda: not any(grant.writers for grant in grants))
        for grant in grants:
            # Two revokes may have waited for the same grant; the first one takes it out.
            if self._by_id.get(grant.grant_id) is grant:
                del self._by_id[grant.grant_id]
                listed = self._by_volume[grant.volume]
                del listed[bisect_left(listed, grant.slba, key=_start)]
                if not listed:
                    del self._by_volume[grant.volume]
        return len(grants)

    def _covering(self, volume: str, host: HostIdentity, lbas: tuple[int, int], tag: int) -> list[Grant] | None:
        slba, end = lbas
        grants = self._by_volume.get(volume, [])
        at = bisect_right(grants, slba, key=_start) - 1
        found: list[Grant] = []
        while 0 <= at < len(grants):
            grant = grants[at]
            if not grant.slba <= slba < grant.end or grant.revoked or host not in grant.hosts or grant.tag != tag:
                return None
            found.append(grant)
            slba = grant.end
            if slba >= end:
                return found
            at += 1
        return None
