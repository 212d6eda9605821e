"""Counters for arrived writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

from weft.base.arguments import expect, expect_range
from weft.base.timeout import seconds
from weft.group.event_loop import ended
from weft.group.request import Request
from weft.group.word import Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft import _native
    from weft.group.request import Done

__all__ = ["Counter"]


class Owner(Protocol):
    """Communicator on which a counter is made."""

    _native: _native.Communicator


class Counter:
    """A counter: one lane for each peer and open round, raised by that peer only.

    Rounds toward a peer are numbered from 0; round r may be started once that peer has given
    r - window + 1 credits. Ranks create and share counters in the same order, and each raises its
    peers' counter at the same position.
    """

    def __init__(
        self,
        communicator: Owner,
        number: int,
        window: int = 1,
        peers: Sequence[int] | None = None,
    ) -> None:
        self._native = communicator._native
        self.number = number
        #: Rounds that may be open at a time.
        self.window = window
        others = range(self._native.world_size) if peers is None else sorted(set(peers))
        #: Ranks that it connects.
        self.peers = tuple(peer for peer in others if peer != self._native.rank)

    def wait(
        self,
        expected: Mapping[int, int | list[int] | tuple[int, ...]],
        *,
        round: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Wait until every peer has raised its lane by as much as is expected in this round.

        A write's page lengths and the route determine how often it raises the lane: over tcp a long
        write is several parts. So pass the lengths::

            counter.wait({source: [len(inbox)]})

        Args:
            expected: by peer, the bytes in each page of the write, in order (none for a signal; a
                page with a `count` is `count` pages); or a number of raises, such as a sum over
                `Communicator.parts`.
            round: a round that is open for all these peers; by default each peer's oldest without a
                credit.
            timeout: seconds, finite; the wait may be repeated after `WaitTimeoutError`.

        Raises:
            CreditError: if `round` was credited, or is beyond the window.
        """
        self._native.wait(self.number, round, self._all_raises(expected), seconds(timeout))

    async def wait_async(
        self,
        expected: Mapping[int, int | list[int] | tuple[int, ...]],
        *,
        round: int | None = None,
        timeout: float = 30.0,
    ) -> None:
        """`wait` without blocking the running asyncio loop; several tasks, loops and threads may.

        For example, each request from a peer, answered by a task::

            while True:
                await counter.wait_async({peer: [len(inbox)]}, timeout=3600.0)
                await answer(inbox.bytes)
                counter.credit(peer)

        A thread that belongs to the communicator makes progress meanwhile. Cancel the call to give
        up; what has arrived stays.

        Args:
            expected: as in `wait`.
            round: a round that is open for all these peers; by default each peer's oldest without a
                credit when this is called. A peer that has raised its lane far enough may be
                credited while others are missing.
            timeout: seconds, finite; the call may be repeated after `WaitTimeoutError`.

        Raises:
            CreditError: if `round` was credited, or is beyond the window; or if a round is credited
                before it has reached the count.
            GroupPoisonedError: or the subclass that names the cause, as in `wait`.
            UnknownError: if the counter is released first.
            ClosedError: if the communicator is closed first.
        """
        raises = self._all_raises(expected)

        def start(awaits: _native.Awaits, number: int) -> _native.Await | None:
            return self._native.start_await(self.number, round, raises, awaits, number)

        await ended(start, seconds(timeout))

    def on(
        self,
        expected: Mapping[int, int | list[int] | tuple[int, ...]],
        callback: Done,
        *,
        round: int | None = None,
    ) -> None:
        """Call back once every peer has raised its lane by as much as is expected in a round.

        For example, to credit each round of a peer where it arrives::

            def arrived(error):
                if error is None:
                    handle(inbox.bytes)
                    counter.credit(peer)
                    counter.on({peer: [len(inbox)]}, arrived)

            counter.on({peer: [len(inbox)]}, arrived)

        Args:
            expected: as in `wait`.
            callback: called once, with `None`, or with the error that `wait_async` would raise;
                perhaps before this returns. It runs as `done` in `Communicator.write` does: on a
                thread that makes a call on the communicator. Waits, `count` and `Communicator.poll`
                look for arrivals.
            round: as in `wait_async`.

        Raises:
            CreditError: if `round` was credited, or is beyond the window. As with every error
                raised here, `callback` is not called.
            GroupPoisonedError: or the subclass that names the cause, if the group is poisoned.
        """
        if not callable(callback):
            raise TypeError(f"callback: expected a callable, got {type(callback).__name__}")
        self._native.watch(self.number, round, self._all_raises(expected), callback)

    def set_word(
        self,
        expected: Mapping[int, int | list[int] | tuple[int, ...]],
        word: Word,
        value: int,
        *,
        round: int | None = None,
        failure_value: int | None = None,
    ) -> None:
        """Set a word once every peer has raised its lane by as much as is expected in a round.

        A stream that waits for the word, or a kernel that has acquired it, then sees the bytes. A
        thread of the communicator makes progress until the word is set, so the program may do
        anything meanwhile. For example::

            counter.set_word({peer: [len(inbox)]}, word, round + 1)

        Args:
            expected: as in `wait`.
            word: stays allocated until it is set.
            value: 0 to 2^32 - 1.
            round: as in `wait_async`.
            failure_value: set instead if the count can no longer be reached, so that waits on the
                GPU end: `word.check()` then raises the error. By default the word keeps its value.

        Raises:
            CreditError: if `round` was credited, or is beyond the window. As with every error
                raised here, the word is not set.
            GroupPoisonedError: or the subclass that names the cause, if the group is poisoned.
        """
        expect(word, Word, "word")
        value = expect_range(value, "value", 0, (1 << 32) - 1)
        if failure_value is not None:
            failure_value = expect_range(failure_value, "failure_value", 0, (1 << 32) - 1)
        raises = self._all_raises(expected)
        self._native.watch_word(self.number, round, raises, word._native, value, failure_value)

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
        """`count` for each peer that has raised its lane in the oldest open round."""
        counts = {peer: self.count(peer) for peer in self.peers}
        return {peer: count for peer, count in counts.items() if count}

    def next_round(self, peer: int) -> int:
        """The round that a write toward a peer starts by default: the first without a write."""
        return self._native.next_round(self.number, peer)

    def open_round(self, peer: int) -> int:
        """A peer's oldest round without a credit; `wait` and `count` look at it."""
        return self._native.open_round(self.number, peer)

    def credits(self, peer: int) -> int:
        """Credits that a peer has given: round r may be started once there are r - window + 1."""
        return self._native.credits(self.number, peer)

    def credit(self, peer: int) -> Request:
        """Give a peer credit for the oldest open round, which has been read.

        The peer may write these bytes again, and start one more round.

        Returns:
            The request, which need not be waited for. Over tcp, toward a peer that reads late, the
            credit may stay in this process until the next call: wait before a long computation.

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
            peer: owner of the memory to which the round writes.
            round: from 0; by default `next_round`.
            timeout: seconds, finite; the wait may be repeated after `WaitTimeoutError`.
        """
        self._native.wait_for_credit(peer, self.number, round, seconds(timeout))

    async def wait_for_credit_async(
        self, peer: int, round: int | None = None, *, timeout: float = 30.0
    ) -> None:
        """`wait_for_credit` without blocking the running asyncio loop.

        Args:
            peer: owner of the memory to which the round writes.
            round: from 0; by default `next_round` when this is called.
            timeout: seconds, finite; the call may be repeated after `WaitTimeoutError`.

        Raises:
            GroupPoisonedError, UnknownError, ClosedError: as in `wait_async`.
        """

        def start(awaits: _native.Awaits, number: int) -> _native.Await | None:
            return self._native.start_await_for_credit(peer, self.number, round, awaits, number)

        await ended(start, seconds(timeout))

    def release(self, *, timeout: float = 30.0) -> None:
        """Give the counter back; other counters may then take its lanes.

        All ranks release together, the counters at one position, each once all local requests on it
        have ended (`Request.wait`). The call waits until all writes toward this rank have arrived.
        For a counter that was never shared, only this rank calls it. Later calls on the counter
        raise `UnknownError`, as does a second release.

        Args:
            timeout: seconds, finite, for the other ranks to come. The counter stays after
                `WaitTimeoutError`, and the call may be repeated. A poisoned group needs
                no wait.
        """
        self._native.release_counter(self.number, seconds(timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A rank that left the block by an exception does not meet the others here.
        if kind is None:
            self.release()

    def _all_raises(
        self, expected: Mapping[int, int | list[int] | tuple[int, ...]]
    ) -> list[tuple[int, int]]:
        """Lane raises by peer, from a wait's argument."""
        if type(expected) is not dict:
            expect(expected, Mapping, "expected")
        raises: list[tuple[int, Any]] = list(expected.items())
        for _, each in raises:
            if type(each) is not int:
                return [(peer, self._raises(peer, each)) for peer, each in expected.items()]
        return raises

    def _raises(self, peer: int, expected: int | list[int] | tuple[int, ...]) -> int:
        """Lane raises by one write with these page lengths; a number is returned as it is."""
        if isinstance(expected, (list, tuple)):
            return self._native.parts(peer, list(expected))
        return expected
