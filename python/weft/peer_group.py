"""Peer groups: scatters to peers that were resolved once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft._arguments import expect
from weft.counter import Counter
from weft.region import Region, RemoteRegion, check_group
from weft.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft import _native
    from weft.request import Done

__all__ = ["PeerGroup"]


class PeerGroup:
    """A counter, a source region and a region of each of several peers.

    `Communicator.peer_group` makes it. Routes, keys and lengths are looked up then, so a scatter
    over the group costs less than `Communicator.scatter` of the same writes: only offsets and
    lengths are checked. It stays valid until its counter or one of its regions is released.
    """

    def __init__(
        self,
        counter: Counter,
        source: Region,
        destinations: Sequence[RemoteRegion],
        group: _native.Communicator,
    ) -> None:
        expect(counter, Counter, "counter")
        expect(source, Region, "source")
        check_group(counter._native, group, "the counter")
        check_group(source._group, group, "the source")
        for destination in destinations:
            expect(destination, RemoteRegion, "destinations")
            check_group(destination._group, group, "a destination")
        #: The destinations, in the order that writes number them.
        self.members = tuple(destinations)
        remotes = [(each.peer, each.key, each.length) for each in destinations]
        self._native = group.peer_group(counter.number, source._native, remotes)

    def scatter(
        self,
        writes: Sequence[tuple[int, int, int, int]],
        round: int | None = None,
        *,
        done: Done | None = None,
    ) -> Request:
        """Writes to several members as one request, which ends when all of them have.

        Args:
            writes: for each, the member's place in the group, the first byte read in the source,
                the first byte written in the member's region, and the length in bytes (0: a
                signal). A member may be written to several times.
            round: the same toward every member; by default the next one toward each.
            done: as in `Communicator.write`, called once for all.

        Raises:
            UnknownError: if the group has no such member, or its counter or one of its regions was
                released. As with every error that is raised here, no byte was written.
            CreditError, RegionError: as `Communicator.write`.
        """
        return Request(self._native.scatter(writes, round, done))
