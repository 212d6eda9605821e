"""Callbacks when requests end."""

import sys
import threading
import time
from typing import Any

import numpy as np

import weft
from tests.workers.group.transfer import raised_by


def scattered(length: int) -> dict[str, Any]:
    """Rank 0 scatters to all others, then again from inside the first one's callback."""
    with weft.init() as communicator:
        rank, peers = communicator.rank, range(1, communicator.world_size)
        mine, counter = communicator.alloc(length), communicator.counter()
        granted = communicator.share([mine], [counter])
        ended: list[str] = []
        right = True
        if rank == 0:
            mine.bytes[:] = 5
            half = length // 2

            def scatter(round: int, pages: dict[int, list[weft.Page]]) -> weft.Request:
                def done(error: Exception | None) -> None:
                    ended.append(f"{round} {error}")
                    if round == 0:
                        for peer in peers:
                            counter.wait_for_credit(peer, 1)
                        scatter(1, {peer: [] for peer in peers})

                return communicator.scatter(pages, counter, round=round, done=done)

            pages = {
                peer: [
                    weft.Page(mine, 0, granted[peer][0], half, length - half),
                    weft.Page(mine, 0, granted[peer][0], 0, half),
                ]
                for peer in peers
            }
            request = scatter(0, pages)
            request.wait()
            while len(ended) < 2:
                communicator.poll()
            assert request.done
        else:
            counter.wait({0: communicator.parts(0, [length - length // 2, length // 2])})
            right = bool(np.all(mine.bytes == 5))
            counter.credit(0)
            counter.wait({0: 1})
            assert counter.raised() == {0: 1}
            counter.credit(0)
        communicator.barrier()
        return {"ended": ended, "right": right}


def chained(count: int) -> dict[str, Any]:
    """Signals to a peer, each sent by the previous one's callback, at constant stack depth."""
    with weft.init() as communicator:
        counters = [communicator.counter() for _ in range(2)]
        communicator.share([], counters)
        peer, depths, sent = 1 - communicator.rank, set(), 0

        def done(error: Exception | None) -> None:
            nonlocal sent
            assert error is None
            depth, frame = 0, sys._getframe()
            while frame.f_back is not None:
                depth, frame = depth + 1, frame.f_back
            depths.add(depth)
            if sent < count:
                sent += 1
                communicator.signal(peer, counters[0], round=0, done=done)

        communicator.signal(peer, counters[0], round=0, done=done)
        while sent < count:
            communicator.poll()
        counters[0].wait({peer: count + 1})
        communicator.barrier()
        return {"sent": sent, "depth": max(depths) < 40}


def waiting() -> dict[str, Any]:
    """Waits, in the program and in a callback, end by what due callbacks do.

    Returns the waits on this rank that have ended.
    """
    with weft.init() as communicator:
        first, second, third = counters = [communicator.counter() for _ in range(3)]
        communicator.share([], counters)
        rank, peer = communicator.rank, 1 - communicator.rank
        ended: list[Any] = []
        event = threading.Event()

        def inner(_: Exception | None) -> None:
            ended.append("inner")
            communicator.signal(peer, second)
            event.set()

        def outer(_: Exception | None) -> None:
            communicator.signal(peer, first, round=0, done=inner)
            # The peer's second signal follows this rank's, which `inner` sends.
            second.wait({peer: 1}, timeout=30)
            ended.append("outer")

        def blocked(_: Exception | None) -> None:
            # Another thread's call runs the next callback.
            communicator.signal(peer, third, done=lambda _: event.set())
            ended.append(event.wait(30))

        communicator.signal(peer, first, round=0, done=outer)
        # Both ranks wait: no call in the program runs callbacks meanwhile.
        first.wait({peer: 2}, timeout=30)
        communicator.barrier()
        first.credit(peer)
        second.credit(peer)
        first.wait_for_credit(peer, 1, timeout=30)
        event.clear()
        polling = threading.Thread(target=lambda: poll_until(communicator, event))
        polling.start()
        communicator.signal(peer, first, done=blocked)
        # Either thread may run `blocked`.
        poll_until(communicator, event)
        polling.join()
        first.wait({peer: 1}, timeout=30)
        communicator.barrier()
        while len(ended) < 3:
            communicator.poll()
        return {"ended": ended, "rank": rank}


def poll_until(communicator: weft.Communicator, event: threading.Event) -> None:
    """Calls until an event."""
    until = time.monotonic() + 60
    while not event.is_set() and time.monotonic() < until:
        communicator.poll()
        time.sleep(0.001)


def raising() -> dict[str, Any]:
    """Errors from callbacks are reported without other effects; rejected calls have no callback."""
    caught: list[str] = []
    sys.unraisablehook = lambda raised: caught.append(repr(raised.exc_value))
    with weft.init() as communicator:
        counter = communicator.counter()
        communicator.share([], [counter])
        peer = 1 - communicator.rank
        called: list[object] = []

        def fail(error: Exception | None) -> None:
            raise ZeroDivisionError("in a callback")

        refused = raised_by(lambda: communicator.signal(peer, counter, round=1, done=called.append))
        communicator.signal(peer, counter, done=fail).wait()
        while not caught:
            communicator.poll()
        counter.wait({peer: 1})
        communicator.barrier()
    return {"caught": caught, "refused": type(refused).__name__, "called": len(called)}


def unfinished(length: int, end: str) -> list[str]:
    """An unread write in flight ends with an error when its group ends.

    Returns the error from the callback, and the error from a wait.
    """
    with weft.init() as communicator:
        mine, counter = communicator.alloc(length), communicator.counter()
        granted = communicator.share([mine], [counter])
        ended: list[str] = []

        def done(error: Exception | None) -> None:
            ended.append(type(error).__name__)

        if communicator.rank == 0:
            page = weft.Page(mine, 0, granted[1][0], 0, length)
            request = communicator.write(1, counter, [page], done=done)
            assert ended == [], "the write ended before the peer read it"
            if end == "close":
                communicator.close()
                return [*ended, type(raised_by(request.wait)).__name__]
            communicator.poison("before it has ended")
            while raised_by(communicator.poll) is None or not ended:
                pass
            assert request.done, "a poisoned group sets the source free"
            ended.append(type(raised_by(request.wait)).__name__)
        else:
            raised_by(lambda: communicator.all_gather(b"", timeout=20))
    return ended
