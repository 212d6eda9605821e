"""Counters' callbacks."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import weft
from tests.workers.group.transfer import raised_by

#: Longer than a test: only an event ends a wait in time.
LONG_SECONDS = 60.0


def called_back(length: int, rounds: int) -> dict[str, Any]:
    """A callback reads each round of all peers, credits it, and asks for the next."""
    with weft.init() as communicator:
        rank, size = communicator.rank, communicator.world_size
        peers = [peer for peer in range(size) if peer != rank]
        inbox, outbox = communicator.alloc(size * length), communicator.alloc(length)
        counter = communicator.counter()
        granted = communicator.share([inbox], [counter])
        right, errors = 0, list[str]()

        def arrived(error: Exception | None) -> None:
            nonlocal right
            if error is not None:
                errors.append(repr(error))
                return
            for peer in peers:
                part = inbox.bytes[peer * length : (peer + 1) * length]
                right += bool((part == right // len(peers) + peer).all())
                counter.credit(peer)
            if right < rounds * len(peers):
                counter.on({peer: [length] for peer in peers}, arrived)

        counter.on({peer: [length] for peer in peers}, arrived)
        for round in range(rounds):
            for peer in peers:
                # Waits run callbacks.
                counter.wait_for_credit(peer, timeout=LONG_SECONDS)
            outbox.bytes[:] = round + rank
            pages = {
                peer: [weft.Page(outbox, 0, granted[peer][0], rank * length, length)]
                for peer in peers
            }
            communicator.scatter(pages, counter).wait()
        for peer in peers:
            counter.wait_for_credit(peer, rounds, timeout=LONG_SECONDS)
        poll_until(communicator, lambda: right == rounds * len(peers))
        communicator.barrier()
        return {"right": right, "errors": errors}


def poll_until(communicator: weft.Communicator, holds: Callable[[], bool]) -> None:
    """Polls until something holds."""
    until = time.monotonic() + LONG_SECONDS
    while not holds() and time.monotonic() < until:
        communicator.poll()


def refused() -> dict[str, Any]:
    """Callbacks that end with errors, or are not called."""
    caught: list[str] = []
    sys.unraisablehook = lambda raised: caught.append(repr(raised.exc_value))
    communicator = weft.init()
    peer = 1 - communicator.rank
    counter, released, last = counters = [communicator.counter(window=2) for _ in range(3)]
    communicator.share([], counters)
    called: dict[str, str] = {}

    def note(name: str) -> Callable[[Exception | None], None]:
        return lambda error: called.update({name: type(error).__name__})

    def fail(_: Exception | None) -> None:
        raise ZeroDivisionError("in a callback")

    found: dict[str, Any] = {
        "beyond": type(raised_by(lambda: counter.on({peer: 1}, note("none"), round=2))).__name__,
        "no peer": type(raised_by(lambda: counter.on({7: 1}, note("none")))).__name__,
    }
    communicator.signal(peer, counter, round=0)
    counter.wait({peer: 1})
    # It holds: the callback is due at once.
    counter.on({peer: 1}, note("at once"))
    counter.on({peer: 1}, fail)
    # More than arrives: the credit ends it.
    counter.on({peer: 2}, note("credited"))
    counter.on({peer: 1}, note("next round"), round=1)
    assert "credited" not in called
    counter.credit(peer)
    counter.wait_for_credit(peer, 2)
    communicator.signal(peer, counter, round=1)
    poll_until(communicator, lambda: "next round" in called)
    released.on({peer: 1}, note("released"))
    communicator.barrier()
    released.release()
    last.on({peer: 1}, note("closed"))
    communicator.barrier()
    communicator.close()
    found["after"] = type(raised_by(lambda: last.on({peer: 1}, note("none")))).__name__
    return {**found, "called": called, "caught": caught}


def threaded(rounds: int) -> dict[str, Any]:
    """Two threads each answer a peer's signals by callbacks, and poll until both are done."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        counters = [communicator.counter() for _ in range(2)]
        communicator.share([], counters)
        seen = [0, 0]

        def answer(at: int) -> None:
            counter = counters[at]

            def arrived(error: Exception | None) -> None:
                assert error is None
                seen[at] += counter.count(peer)
                counter.credit(peer)
                if seen[at] < rounds:
                    counter.on({peer: 1}, arrived)

            counter.on({peer: 1}, arrived)
            for round in range(rounds):
                counter.wait_for_credit(peer, round, timeout=LONG_SECONDS)
                communicator.signal(peer, counter, round=round)
            poll_until(communicator, lambda: seen == [rounds, rounds])

        threads = [threading.Thread(target=answer, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        communicator.barrier()
        return {"seen": seen}
