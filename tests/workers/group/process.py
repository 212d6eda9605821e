"""A rank as a process: forks, signals, threads, idleness, silence."""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import weft
from tests.workers.group.transfer import raised_by
from weft.group import group
from weft.moe import AllToAll

#: Longer than a test: only an interrupt ends a wait in time.
LONG_SECONDS = 40.0


def fork() -> dict[str, Any]:
    """Errors from a child forked after `weft.init()`, and a working parent."""
    with weft.init() as communicator:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            calls = (communicator.barrier, weft.init, lambda: communicator.alloc(8))
            names = []
            for call in calls:
                try:
                    call()
                    names.append("nothing")
                except weft.WeftError as error:
                    names.append(type(error).__name__)
            communicator.close()
            os.write(writer, ",".join(names).encode())
            os._exit(0)
        os.close(writer)
        reports = os.read(reader, 1000).decode().split(",")
        os.waitpid(child, 0)
        communicator.barrier()
        return {"reports": reports}


#: A child that has not ended by then hangs.
CHILD_SECONDS = 30.0


def fork_while_waiting(drop: bool) -> dict[str, Any]:
    """Exit codes from rank 0's children that were forked while one of its threads waits."""
    with weft.init() as communicator:
        all_to_all = AllToAll(communicator, experts=2, top_k=1, hidden=4, max_tokens=4)
        region, counter = communicator.alloc(64), communicator.counter()
        communicator.share([region], [counter])
        ends: list[str] = []
        if communicator.rank == 0:
            ended: list[str] = []

            def wait() -> None:
                try:
                    counter.wait({1: 1}, timeout=2.0)
                except weft.errors.WaitTimeoutError:
                    ended.append("WaitTimeoutError")

            thread = threading.Thread(target=wait)
            thread.start()
            time.sleep(0.3)
            child = os.fork()
            if child == 0:
                calls = [
                    communicator.barrier,
                    lambda: counter.wait({1: 1}, timeout=2.0),
                    lambda: communicator.alloc(64),
                    lambda: all_to_all.dispatch(np.ones((1, 4), np.float32), [[0]]),
                ]
                refused = [raised_by(call) for call in calls]
                if drop:
                    # Garbage collection does the rest.
                    group.OPEN.clear()
                    communicator.close = all_to_all.close = lambda **_: None  # type: ignore[method-assign]
                else:
                    all_to_all.close()
                    communicator.close()
                names = {type(error).__name__ for error in refused}
                sys.exit(7 if names == {"ForkError"} else f"errors in the child: {names}")
            ends = [exit_of(child)]
            thread.join()
            ends += ended
        communicator.barrier()
        return {"ends": ends}


def exit_of(child: int) -> str:
    """A child's status, once it has ended; one that hangs is killed."""
    until = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"exit {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


@contextmanager
def interrupted(after: float) -> Iterator[list[float]]:
    """SIGINT `after` some seconds; the time until KeyboardInterrupt."""
    took: list[float] = []
    sent = []

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after, send)
    timer.start()
    try:
        yield took
    except KeyboardInterrupt:
        took.append(time.monotonic() - sent[0])
    timer.join()


def interrupt(wait: str) -> list[float]:
    """Ctrl-C while rank 0 waits for rank 1; afterwards both continue."""
    with weft.init() as communicator:
        if wait == "construct":
            return construct(communicator)
        all_to_all = AllToAll(communicator, experts=2, top_k=1, hidden=4, max_tokens=4)
        counter = communicator.counter()
        communicator.share([], [counter])
        tokens, ids = np.ones((4, 4), np.float32), np.arange(4)[:, np.newaxis] % 2
        waits: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: all_to_all.dispatch(tokens, ids, timeout=LONG_SECONDS),
            "signal": lambda: counter.wait({1: 1}, timeout=LONG_SECONDS),
            "all_gather": lambda: communicator.all_gather(b"", timeout=LONG_SECONDS),
        }
        took: list[float] = []
        if communicator.rank == 0:
            with interrupted(0.3) as took:
                waits[wait]()
            communicator.signal(1, counter)
        else:
            counter.wait({0: 1}, timeout=LONG_SECONDS)
        if wait != "all_gather":
            communicator.barrier()
        return took


def construct(communicator: weft.Communicator) -> list[float]:
    """Ctrl-C while rank 0 waits for rank 1 to make the same all-to-all."""
    took: list[float] = []
    counter = communicator.counter()
    communicator.share([], [counter])
    if communicator.rank == 0:
        with interrupted(0.3) as took:
            AllToAll(communicator, experts=2, top_k=1, hidden=4, max_tokens=4, timeout=LONG_SECONDS)
        communicator.signal(1, counter)
    else:
        counter.wait({0: 1}, timeout=LONG_SECONDS)
    return took


def interrupt_init() -> list[float]:
    """Ctrl-C while a rank waits for one that never joins."""
    with interrupted(0.3) as took:
        weft.init(world_size=2, rank=0, timeout=LONG_SECONDS)
    return took


def waiting(seconds: float) -> dict[str, float]:
    """Rank 0 waits for rank 1: CPU time, and another thread's progress."""
    with weft.init() as communicator:
        all_to_all = AllToAll(communicator, experts=2, top_k=1, hidden=4, max_tokens=4)
        tokens, ids = np.ones((4, 4), np.float32), np.arange(4)[:, np.newaxis] % 2
        communicator.barrier()
        if communicator.rank == 1:
            time.sleep(seconds)
        steps = 0
        stop = threading.Event()

        def count() -> None:
            nonlocal steps
            while not stop.wait(0.1):
                steps += 1

        thread = threading.Thread(target=count)
        thread.start()
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        received = all_to_all.dispatch(tokens, ids)
        after, ended = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        stop.set()
        thread.join()
        received.release()
        communicator.barrier()
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"waited": ended - began, "share": used / (ended - began), "steps": steps}


def talkative() -> None:
    """Calls of every kind, and an error, which is raised without output."""
    with weft.init() as communicator:
        all_to_all = AllToAll(communicator, experts=2, top_k=1, hidden=4, max_tokens=4)
        with all_to_all.dispatch(np.ones((1, 4), np.float32), [[0]]) as received:
            all_to_all.combine(received, received.tokens)
        try:
            # Rank 0 may have left the barrier, and its poison arrived, before the others leave.
            communicator.barrier()
            if communicator.rank == 0:
                communicator.poison("for the silence")
            communicator.barrier()
        except weft.errors.GroupPoisonedError:
            pass
