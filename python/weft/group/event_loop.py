"""Awaits in asyncio loops, for the waits on requests and counters."""

from __future__ import annotations

import asyncio
import itertools
import os
import weakref
from typing import TYPE_CHECKING, TypeAlias

from weft import _native

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Start", "ended"]


#: Call that starts an await under a number; `None` if the condition holds.
Start: TypeAlias = "Callable[[_native.Awaits, int], _native.Await | None]"


class LoopAwaits:
    """Awaits in one asyncio loop, over all communicators, which share a descriptor.

    The loop watches the descriptor while there are awaits.
    """

    def __init__(self) -> None:
        self._native = _native.Awaits()
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._futures: dict[int, asyncio.Future[None]] = {}

    async def ended(self, start: Start, timeout: float) -> None:
        """Start an await, and return when it has ended."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        started = start(self._native, number)
        if started is None:
            return
        future = loop.create_future()
        if not self._futures:
            loop.add_reader(self._native.fileno(), self._take)
        self._futures[number] = future
        timer = loop.call_later(timeout, expire, started, future)
        try:
            await future
        finally:
            timer.cancel()
            started.give_up()
            del self._futures[number]
            # A task dropped after the loop ended gets here, too, and one in a forked child, which
            # shares the parent's epoll.
            is_open = not loop.is_closed() and os.getpid() == self._process
            if not self._futures and is_open:
                loop.remove_reader(self._native.fileno())

    def _take(self) -> None:
        for number, error in self._native.take():
            future = self._futures.get(number)
            # A cancelled one has no outcome.
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


def expire(started: _native.Await, future: asyncio.Future[None]) -> None:
    """Give an await up at its timeout, unless it has ended."""
    error = started.give_up()
    if error is not None and not future.done():
        future.set_exception(error)


#: By loop, its awaits.
LOOPS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopAwaits] = (
    weakref.WeakKeyDictionary()
)


async def ended(start: Start, timeout: float) -> None:
    """Return in the running asyncio loop when the await that `start` starts has ended.

    Args:
        start: called once, with the loop's awaits and a number.
        timeout: seconds, finite.

    Raises:
        WaitTimeoutError: after `timeout`, with the missing peers.
        WeftError: as the wait raises it.
    """
    loop = asyncio.get_running_loop()
    awaits = LOOPS.get(loop)
    if awaits is None:
        awaits = LOOPS[loop] = LoopAwaits()
    await awaits.ended(start, timeout)
