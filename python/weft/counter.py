"""Counters of arrived writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from weft._arguments import expect
from weft._timeout import seconds
from weft.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.communicator import Communicator

__all__ = ["Counter"]


class Counter:
    """A counter: one lane for each peer and open round, raised by that peer alone.

    Rounds toward a peer are numbered from 0; round r may be started once that peer has given
    r - window + 1 credits. Ranks that create their counters in the same order and share them raise
    those of equal position.
    """

    def __init__(
        self,
        communicator: Communicator,
        number: int,
        window: int = 1,
        peers: Sequence[int] | None = None,
    ) -> None:
        self._native = communicator._native
        self.number = number
        #: Rounds that may be open at a time.
        self.window = window
        others = range(self._native.world_size) if peers is None else sorted(set(peers))
        #: The ranks that it connects.
        self.peers = tuple(peer for peer in others if peer != self._native.rank)

    def wait(
        self,
        expected: Mapping[int, int | list[int] | tuple[int, ...]],
        *,
        round: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Wait until every peer has raised its lane by as much as is expected in this round.

        How often a write raises its lane follows from the lengths of its pages and from the route:
        over tcp a long write is several parts. So pass the lengths::

            counter.wait({source: [len(inbox)]})

        Args:
            expected: by peer, the bytes of each page of its write, in order (none for a signal; a
                page with a `count` is `count` pages); or a number of raises, such as a sum of
                `Communicator.parts`.
            round: an open round of all these peers; by default the oldest of each without a credit.
            timeout: seconds, finite; the wait may be repeated after `WaitTimeoutError`.

        Raises:
            CreditError: if `round` was credited, or is beyond the window.
        """
        if type(expected) is not dict:
            expect(expected, Mapping, "expected")
        raises: Any = list(expected.items())
        for _, each in raises:
            if type(each) is not int:
                raises = [(peer, self._raises(peer, each)) for peer, each in expected.items()]
                break
        self._native.wait(self.number, round, raises, seconds(timeout))

    def count(self, peer: int, round: int | None = None) -> int:
        """Raises by a peer in a round; the bytes that they count are visible.

        Args:
            peer: the rank that raises.
            round: an open one; by default the oldest without a credit.

        Raises:
            CreditError: if `round` was credited, or is beyond the window.
        """
        return self._native.count(self.number, peer, round)

    def raised(self) -> dict[int, int]:
        """The peers that have raised their lane in the oldest open round, with `count` of each."""
        counts = {peer: self.count(peer) for peer in self.peers}
        return {peer: count for peer, count in counts.items() if count}

    def next_round(self, peer: int) -> int:
        """The round that a write toward a peer starts by default: the first without a write."""
        return self._native.next_round(self.number, peer)

    def open_round(self, peer: int) -> int:
        """The oldest round of a peer that has no credit yet; `wait` and `count` look at it."""
        return self._native.open_round(self.number, peer)

    def credits(self, peer: int) -> int:
        """Credits that a peer has given: round r may be started once there are r - window + 1."""
        return self._native.credits(self.number, peer)

    def credit(self, peer: int) -> Request:
        """Give a peer credit for its oldest open round, which has been read.

        The peer may write these bytes again, and start one more round.

        Returns:
            The request, which need not be waited for. Over tcp, toward a peer that reads late, the
            credit may stay in this process until its next call: wait before a long computation.

        Raises:
            CreditError: if no part of that round has arrived, or the round was credited before.
            NotSharedError: if the counter was not shared yet.
        """
        return Request(self._native.credit(peer, self.number))

    def wait_for_credit(
        self, peer: int, round: int | None = None, *, timeout: float = 30.0
    ) -> None:
        """Wait until a peer has given the credit that a round needs.

        Args:
            peer: the owner of the memory that the round writes to.
            round: from 0; by default the next one, that of `next_round`.
            timeout: seconds, finite; the wait may be repeated after `WaitTimeoutError`.
        """
        self._native.wait_for_credit(peer, self.number, round, seconds(timeout))

    def release(self, *, timeout: float = 30.0) -> None:
        """Give the counter back; other counters may take its lanes then.

        All ranks of the group release together, the counters of one position, each once its own
        requests on it have ended (`Request.wait`). The call waits until all that was written toward
        this rank has arrived. A counter that was never shared is released by this rank alone. Later
        calls on the counter raise `UnknownError`, as does a second release.

        Args:
            timeout: seconds, finite, for the other ranks to come. The counter stays after
                `WaitTimeoutError`, and the call may be repeated. No wait in a poisoned group.
        """
        self._native.release_counter(self.number, seconds(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A rank that left the block by an exception does not meet the others here.
        if kind is None:
            self.release()

    def _raises(self, peer: int, expected: int | list[int] | tuple[int, ...]) -> int:
        """By how much a lane rises by one write of pages of these lengths; a number stays one."""
        if isinstance(expected, (list, tuple)):
            return self._native.parts(peer, list(expected))
        return expected
