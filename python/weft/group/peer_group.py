"""Peer groups: scatters to peers resolved once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.base.arguments import expect, expect_list
from weft.group.counter import Counter
from weft.group.region import Region, RemoteRegion, check_group
from weft.group.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft import _native
    from weft.group.request import Done

__all__ = ["PeerGroup"]


class PeerGroup:
    """A counter, a source region, and one region at each of several peers.

    `Communicator.peer_group` makes it and looks up routes, keys and lengths. A scatter over the
    group therefore costs less than `Communicator.scatter` with the same writes: only offsets and
    lengths are checked. It stays valid until the counter or any region is released.
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
        destinations = expect_list(destinations, "destinations")
        for destination in destinations:
            expect(destination, RemoteRegion, "destinations")
            check_group(destination._group, group, "a destination")
        #: Destinations; writes refer to them by position.
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
        """Write to several members as one request, which ends when all writes have.

        Args:
            writes: for each write, the member's position in the group, the first byte read in the
                source, the first byte written in the member's region, and the length in bytes (0: a
                signal). Several writes may go to one member.
            round: the same toward every member; by default each member's next one.
            done: as in `Communicator.write`, called once for all.

        Raises:
            UnknownError: if the group has no such member, or the counter or a region was released.
                As with every error raised here, no byte was written.
            CreditError, RegionError: as in `Communicator.write`.
        """
        return Request(self._native.scatter(writes, round, done))
