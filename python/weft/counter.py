"""Counters, by whose lanes arrival is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft._timeout import seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.communicator import Communicator

__all__ = ["Counter"]


class Counter:
    """A counter: one lane for each peer, raised by that peer alone.

    Rounds on a lane are numbered from 0; a peer may start round r once it has been given r credits.
    Ranks that create their counters in the same order and share them raise those of equal position.
    """

    def __init__(self, communicator: Communicator, number: int) -> None:
        self._native = communicator._native
        self.number = number

    def wait(
        self,
        expected: Mapping[int, int | list[int] | tuple[int, ...]],
        *,
        timeout: float = 30.0,
    ) -> None:
        """Wait until every peer has raised its lane by as much as is expected in this round.

        How often a write raises its lane follows from the lengths of its pages and from the route:
        over tcp a long write is several parts. So pass the lengths::

            counter.wait({source: [len(inbox)]})

        Args:
            expected: by peer, the bytes of each page of its write, in order (none for a signal);
                or a number of raises, such as a sum of `Communicator.parts`.
            timeout: seconds, finite; the wait may be repeated after `WaitTimeoutError`.
        """
        raises: Any = list(expected.items())
        for _, each in raises:
            if type(each) is not int:
                raises = [(peer, self._raises(peer, each)) for peer, each in expected.items()]
                break
        self._native.wait(self.number, raises, seconds(timeout))

    def count(self, peer: int) -> int:
        """Raises by a peer since the last credit to it; their bytes are visible."""
        return self._native.count(self.number, peer)

    def raised(self) -> dict[int, int]:
        """The peers whose lanes stand above the last credit to them, with `count` of each."""
        peers = (peer for peer in range(self._native.world_size) if peer != self._native.rank)
        counts = {peer: self.count(peer) for peer in peers}
        return {peer: count for peer, count in counts.items() if count}

    def credits(self, peer: int) -> int:
        """Credits that a peer has given: its round r may be started once there are r."""
        return self._native.credits(self.number, peer)

    def credit(self, peer: int) -> None:
        """Tell a peer that its round has been read: it may write these bytes again."""
        self._native.credit(peer, self.number)

    def wait_for_credit(self, peer: int, round: int, *, timeout: float = 30.0) -> None:
        """Wait until a peer has given the credit that `round` needs.

        Args:
            peer: the owner of the memory that the round writes to.
            round: from 0; round r needs r credits.
            timeout: seconds, finite; the wait may be repeated after `WaitTimeoutError`.
        """
        self._native.wait_for_credit(peer, self.number, round, seconds(timeout))

    def _raises(self, peer: int, expected: int | list[int] | tuple[int, ...]) -> int:
        """By how much a lane rises by one write of pages of these lengths; a number stays one."""
        if isinstance(expected, (list, tuple)):
            return self._native.parts(peer, list(expected))
        return expected
