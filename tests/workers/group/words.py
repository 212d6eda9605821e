"""Words that counters set, and that threads in place of kernels write."""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import weft
from tests.workers.group.process import exit_of

#: Longer than a test: only an event ends a wait in time.
LONG_SECONDS = 60.0


def until(holds: Callable[[], bool]) -> bool:
    """Look until something holds, without a call on a communicator."""
    end = time.monotonic() + LONG_SECONDS
    while not holds() and time.monotonic() < end:
        time.sleep(0.0005)
    return holds()


def set_at_counts(length: int, rounds: int, home: str) -> dict[str, Any]:
    """Each round's bytes are there once the word says so, while this thread makes no call."""
    with weft.init() as communicator:
        peer = (communicator.rank + 1) % communicator.world_size
        before = (communicator.rank - 1) % communicator.world_size
        inbox, outbox = communicator.alloc(length), communicator.alloc(length)
        counter = communicator.counter()
        target = communicator.share([inbox], [counter])[peer][0]
        word = weft.Word("twin", home=home)  # type: ignore[arg-type]
        right = 0
        for round in range(rounds):
            counter.set_word({before: [length]}, word, round + 1)
            outbox.bytes[:] = (round + communicator.rank) % 251
            counter.wait_for_credit(peer, timeout=LONG_SECONDS)
            communicator.write(peer, counter, [weft.Page(outbox, 0, target, 0, length)]).wait()
            # The value only: in GPU memory no other access is allowed.
            assert until(lambda: word.value == round + 1)  # noqa: B023
            right += bool((inbox.bytes == (round + before) % 251).all())
            counter.credit(before)
        communicator.barrier()
        word.check()
        return {"right": right, "home": word.home}


def failures() -> dict[str, Any]:
    """Counts that are not reached any more, and what is refused."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        counter, other = communicator.counter(), communicator.counter()
        communicator.share([], [counter, other])
        word, quiet, late = (weft.Word("twin") for _ in range(3))
        found: dict[str, Any] = {
            "beyond": raised_in(lambda: counter.set_word({peer: 1}, word, 1, round=7)),
            "value": raised_in(lambda: counter.set_word({peer: 1}, word, 1 << 32)),
            "word": raised_in(lambda: counter.set_word({peer: 1}, 5, 1)),  # type: ignore[arg-type]
            "after": word.value,
        }
        counter.set_word({peer: 3}, word, 1, failure_value=9)
        counter.set_word({peer: 3}, quiet, 1)
        other.set_word({peer: 1}, late, 1, failure_value=8)
        communicator.signal(peer, counter).wait()
        counter.wait({peer: 1}, timeout=LONG_SECONDS)
        # A credit before the count.
        counter.credit(peer).wait()
        found["credited"] = [until(lambda: word.value == 9), quiet.value]
        found["errors"] = [raised_in(word.check), raised_in(word.check), raised_in(quiet.check)]
        # One that holds already.
        communicator.signal(peer, other).wait()
        found["late"] = [until(lambda: late.value == 1), raised_in(late.check)]
        other.set_word({peer: 1}, quiet, 4)
        found["at once"] = quiet.value
        communicator.barrier()
        counter.set_word({peer: 1}, word, 2, failure_value=10)
    return found | {"closed": [word.value, raised_in(word.check)]}


def raised_in(call: Callable[[], object]) -> str:
    """Class of a call's error."""
    try:
        call()
    except (weft.WeftError, TypeError) as error:
        return type(error).__name__
    return "nothing"


def watched(changes: int) -> dict[str, Any]:
    """Callbacks for stores by other threads."""
    caught: list[str] = []
    sys.unraisablehook = lambda report: caught.append(repr(report.exc_value))
    word, acknowledged = weft.Word("twin"), threading.Semaphore(0)
    seen: list[tuple[int, int]] = []

    def changed(former: int, value: int) -> None:
        seen.append((former, value))
        acknowledged.release()

    watch = word.on_change(changed)

    def kernel() -> None:
        # As a kernel does, through the memory.
        for value in range(1, changes + 1):
            word.array[0] = value
            assert acknowledged.acquire(timeout=LONG_SECONDS)

    threads = [threading.Thread(target=kernel)]
    for thread in threads:
        thread.start()
        thread.join()
    found: dict[str, Any] = {"chain": seen == [(n, n + 1) for n in range(changes)]}
    watch.close()
    word.value = 1
    at = threading.Event()
    names: list[str] = []

    def reached(former: int, value: int) -> None:
        names.append(threading.current_thread().name)
        found["reached"] = (former, value)
        at.set()

    once = word.on(100, reached)
    found["open"] = once.is_open
    word.array[0] = 103
    found["called"] = at.wait(LONG_SECONDS)
    word.array[0] = 104
    found["open after"] = once.is_open
    found["other thread"] = names != [threading.current_thread().name]
    broken = word.on(0, lambda *_: 1 / 0)
    found["caught"] = [until(lambda: len(caught) == 1), caught]
    wrong: Any = None
    found["refused"] = [
        raised_in(lambda: word.on(-1, reached)),
        raised_in(lambda: word.on(1, wrong)),
    ]
    found["closed"] = (len(seen), watch.is_open, broken.is_open)
    return found


def answered(rounds: int) -> dict[str, Any]:
    """A callback that writes to a peer, once a thread in place of a kernel has raised a word."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        inbox, outbox = communicator.alloc(64), communicator.alloc(64)
        counter = communicator.counter()
        target = communicator.share([inbox], [counter])[peer][0]
        ready, arrived, right = weft.Word("twin"), weft.Word("twin"), 0

        def send(_: int, round: int) -> None:
            counter.wait_for_credit(peer, round - 1, timeout=LONG_SECONDS)
            communicator.write(peer, counter, [weft.Page(outbox, 0, target, 0, 64)]).wait()

        watch = ready.on_change(send)
        for round in range(rounds):
            counter.set_word({peer: [64]}, arrived, round + 1)
            outbox.bytes[:] = round + communicator.rank
            ready.array[0] = round + 1
            assert until(lambda: int(arrived.array[0]) == round + 1)  # noqa: B023
            right += bool((inbox.bytes == round + peer).all())
            # The callback has read the outbox once the peer has its bytes.
            counter.credit(peer).wait()
            counter.wait_for_credit(peer, round + 1, timeout=LONG_SECONDS)
        communicator.barrier()
        watch.close()
        return {"right": right}


def forked() -> dict[str, Any]:
    """A child drops words and watches that it was forked with; the parent's go on."""
    word, changed = weft.Word("twin"), threading.Event()
    watch = word.on_change(lambda *_: changed.set())
    child = os.fork()
    if child == 0:
        names = [raised_in(lambda: word.value), raised_in(lambda: word.on(1, print))]
        watch.close()
        del word, watch
        gc.collect()
        os._exit(7 if names == ["ForkError"] * 2 else 1)
    end = exit_of(child)
    word.value = 1
    return {"child": end, "called": changed.wait(LONG_SECONDS), "open": watch.is_open}
