"""Several threads, event loops and signal handlers in one process on one communicator."""

import asyncio
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import weft
from tests.workers.group.transfer import raised_by
from weft.moe import AllToAll

#: Timeout for waits that end earlier unless the test fails.
LONG_SECONDS = 40.0
#: Limit for calls that do not wait, on a busy machine.
PROMPT_SECONDS = 10.0
TOKENS, IDS = np.ones((4, 8), np.float32), np.arange(4)[:, np.newaxis]


def make(communicator: weft.Communicator) -> AllToAll:
    return AllToAll(communicator, experts=4, top_k=1, hidden=8, max_tokens=4)


@contextlib.contextmanager
def on_threads(*work: Callable[[], object]) -> Iterator[list[threading.Thread]]:
    """Runs functions beside the block; an error from one of them is raised at its end."""
    raised: list[BaseException] = []

    def run(each: Callable[[], object]) -> None:
        try:
            each()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(each,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(2 * LONG_SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    if raised:
        raise raised[0]


def signals_while_another_waits() -> bool:
    """The peer ends the first thread's wait only after the second thread's signals."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        first, second = communicator.counter(), communicator.counter()
        communicator.share([], [first, second])
        if communicator.rank == 1:
            for _ in range(20):
                second.wait({0: 1}, timeout=PROMPT_SECONDS)
                second.credit(0)
            communicator.signal(0, first, 0)
        else:
            with on_threads(lambda: first.wait({peer: 1}, timeout=LONG_SECONDS)):
                for round in range(20):
                    second.wait_for_credit(peer, round, timeout=PROMPT_SECONDS)
                    communicator.signal(peer, second, round)
        communicator.barrier()
        return True


def handler_calls(call: str, wait: str) -> list[str]:
    """SIGALRM during a wait on rank 0; its handler calls the waiting object."""
    communicator = weft.init()
    counter = communicator.counter()
    communicator.share([], [counter])
    all_to_all = make(communicator)
    if communicator.rank == 1:
        # Until the other is done, or the group is poisoned.
        raised_by(lambda: communicator.all_gather(b"", timeout=LONG_SECONDS))
        communicator.close()
        return []
    within: list[str] = []
    calls: dict[str, Callable[[], object]] = {
        "statistics": communicator.statistics,
        "poison": lambda: communicator.poison("from a handler"),
        "close": communicator.close,
        "all_to_all.close": lambda: all_to_all.close(timeout=PROMPT_SECONDS / 2),
    }
    waits: dict[str, Callable[[], object]] = {
        "counter": lambda: counter.wait({1: 1}, timeout=LONG_SECONDS),
        "short": lambda: counter.wait({1: 1}, timeout=1.0),
        "dispatch": lambda: all_to_all.dispatch(TOKENS, IDS, timeout=LONG_SECONDS),
    }

    def handle(*_: object) -> None:
        within.append(type(raised_by(calls[call])).__name__)

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    begin = time.monotonic()
    error = raised_by(waits[wait])
    assert time.monotonic() - begin < PROMPT_SECONDS, "the wait went on"
    if call == "statistics":
        communicator.all_gather(b"")
    communicator.close()
    return [*within, type(error).__name__]


def eight_beside_a_loop(rounds: int) -> dict[str, Any]:
    """Eight threads signal and wait, while asyncio drives a separate counter."""
    with weft.init(progress="epoll") as communicator:
        peer = 1 - communicator.rank
        looped = communicator.counter()
        counters = [communicator.counter() for _ in range(8)]
        communicator.share([], [looped, *counters])
        made = [0] * len(counters)

        def exchange(index: int) -> None:
            counter = counters[index]
            for round in range(rounds):
                counter.wait_for_credit(peer, round, timeout=LONG_SECONDS)
                communicator.signal(peer, counter, round)
                counter.wait({peer: 1}, timeout=LONG_SECONDS)
                counter.credit(peer)
                made[index] += 1

        async def drive() -> int:
            arrived = sent = 0
            done = asyncio.Event()

            def turn() -> None:
                nonlocal arrived, sent
                while True:
                    communicator.poll()
                    if looped.count(peer):
                        looped.credit(peer)
                        arrived += 1
                    if sent < rounds and looped.credits(peer) >= sent:
                        communicator.signal(peer, looped, sent)
                        sent += 1
                        continue
                    if arrived == rounds and looped.credits(peer) == rounds:
                        done.set()
                    if communicator.arm():
                        return

            loop = asyncio.get_running_loop()
            loop.add_reader(communicator, turn)
            turn()
            await asyncio.wait_for(done.wait(), LONG_SECONDS)
            loop.remove_reader(communicator)
            return arrived

        work = [lambda index=index: exchange(index) for index in range(len(counters))]
        with on_threads(*work):
            arrived = asyncio.run(drive())
        communicator.disarm()
        communicator.barrier()
        return {"made": made, "arrived": arrived}


def callbacks_wake_the_loop(count: int) -> int:
    """Another thread's writes end on the progress thread; the loop runs their callbacks."""
    with weft.init(progress="thread") as communicator:
        peer = 1 - communicator.rank
        counter = communicator.counter()
        inbox, outbox = communicator.alloc(1 << 20), communicator.alloc(1 << 20)
        granted = communicator.share([inbox], [counter])
        page = weft.Page(outbox, 0, granted[peer][0], 0, 1 << 20)
        ended = 0

        async def drive() -> None:
            done = asyncio.Event()

            def finished(error: Exception | None) -> None:
                nonlocal ended
                assert error is None
                ended += 1

            def turn() -> None:
                while True:
                    communicator.poll()
                    if ended == count:
                        done.set()
                    if communicator.arm():
                        return

            loop = asyncio.get_running_loop()
            loop.add_reader(communicator, turn)
            for round in range(count):
                communicator.write(peer, counter, round, [page], done=finished)
                turn()
                while ended <= round:
                    await asyncio.wait_for(asyncio.sleep(0.001), LONG_SECONDS)
                await loop.run_in_executor(None, take)
                await loop.run_in_executor(None, credited, round + 1)
            turn()
            await asyncio.wait_for(done.wait(), LONG_SECONDS)
            loop.remove_reader(communicator)

        def take() -> None:
            counter.wait({peer: [1 << 20]}, timeout=LONG_SECONDS)
            counter.credit(peer)

        def credited(round: int) -> None:
            counter.wait_for_credit(peer, round, timeout=LONG_SECONDS)

        asyncio.run(drive())
        communicator.disarm()
        communicator.barrier()
        return ended


def control_while_another_waits() -> bool:
    """all_gather and share on one thread, an all-to-all on another, and a wait in progress."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        last = communicator.counter()
        communicator.share([], [last])

        def dispatch() -> None:
            with make(communicator) as all_to_all:
                for _ in range(20):
                    with all_to_all.dispatch(TOKENS, IDS) as received:
                        out = all_to_all.combine(received, received.tokens)
                        assert np.array_equal(out, TOKENS)

        with on_threads(lambda: last.wait({peer: 1}, timeout=LONG_SECONDS)):
            for number in range(3):
                gathered = communicator.all_gather(bytes([number]), timeout=PROMPT_SECONDS)
                assert gathered == [bytes([number])] * 2
                another = communicator.counter()
                communicator.share([], [another], timeout=PROMPT_SECONDS)
                communicator.signal(peer, another, 0)
                another.wait({peer: 1}, timeout=PROMPT_SECONDS)
            dispatch()
            communicator.signal(peer, last, 0)
        communicator.barrier()
        return True


def rounds_beside_a_wait() -> bool:
    """Rank 1 dispatches once a second thread on rank 0 has ended one round and begun another."""
    with weft.init() as communicator:
        go = communicator.counter()
        communicator.share([], [go])
        peer = 1 - communicator.rank
        with AllToAll(
            communicator, experts=4, top_k=1, hidden=8, max_tokens=4, channels=3
        ) as all_to_all:
            first = all_to_all.dispatch(TOKENS, IDS)
            combine = all_to_all.combine_send(first, first.tokens * 2)
            dispatched = []
            if communicator.rank == 0:
                second = all_to_all.dispatch_send(TOKENS, IDS)

                def receive() -> None:
                    dispatched.append(second.recv(timeout=LONG_SECONDS))

                with on_threads(receive):
                    time.sleep(0.3)
                    assert not dispatched
                    summed = combine.recv(timeout=PROMPT_SECONDS)
                    first.release()
                    third = all_to_all.dispatch_send(TOKENS, IDS)
                    assert not dispatched
                    communicator.signal(peer, go)
            else:
                go.wait({peer: 1}, timeout=LONG_SECONDS)
                summed = combine.recv()
                first.release()
                second = all_to_all.dispatch_send(TOKENS, IDS)
                third = all_to_all.dispatch_send(TOKENS, IDS)
                dispatched.append(second.recv())
            assert (summed == 2 * TOKENS).all()
            for received in (*dispatched, third.recv()):
                out = all_to_all.combine(received, received.tokens * 3)
                assert (out == 3 * TOKENS).all()
                received.release()
        return True


def rounds_on_threads(rounds: int, channels: int) -> list[int]:
    """One thread begins rounds, others receive, combine and release them; every sum is right."""
    with weft.init() as communicator:
        right: list[int] = []
        with AllToAll(
            communicator, experts=8, top_k=2, hidden=64, max_tokens=32, channels=channels
        ) as all_to_all:
            begun: queue.Queue[Any] = queue.Queue()

            def work() -> None:
                while (task := begun.get(timeout=LONG_SECONDS)) is not None:
                    number, dispatch, tokens, weights = task
                    received = dispatch.recv(timeout=LONG_SECONDS)
                    combine = all_to_all.combine_send(received, received.tokens + 1)
                    out = combine.recv(timeout=LONG_SECONDS)
                    np.testing.assert_allclose(
                        out, (tokens + 1) * weights.sum(1, keepdims=True), rtol=1e-5
                    )
                    received.release()
                    right.append(number)
                    # Channels are used in turn: the next round needs the oldest one.
                    done[number % channels].set()

            done = [threading.Event() for _ in range(channels)]
            random = np.random.default_rng(communicator.rank)
            with on_threads(*[work] * channels):
                for number in range(rounds):
                    if number >= channels:
                        assert done[number % channels].wait(LONG_SECONDS)
                        done[number % channels].clear()
                    tokens = random.normal(size=(32, 64)).astype(np.float32)
                    ids = np.argsort(random.random((32, 8)), axis=1)[:, :2]
                    weights = random.random((32, 2)).astype(np.float32)
                    dispatch = all_to_all.dispatch_send(tokens, ids, weights)
                    begun.put((number, dispatch, tokens, weights))
                for _ in range(channels):
                    begun.put(None)
            communicator.barrier()
        return sorted(right)


def closed_beside_a_wait() -> list[str]:
    """A second thread on rank 0 closes the all-to-all that the first waits on."""
    with weft.init() as communicator:
        all_to_all = make(communicator)
        ended = [""]
        if communicator.rank == 0:

            def receive() -> None:
                ended[0] = type(raised_by(lambda: sent.recv(timeout=LONG_SECONDS))).__name__

            sent = all_to_all.dispatch_send(TOKENS, IDS)
            with on_threads(receive):
                time.sleep(0.3)
                all_to_all.close(timeout=PROMPT_SECONDS)
        else:
            time.sleep(0.3)
            all_to_all.close(timeout=PROMPT_SECONDS)
        communicator.barrier()
        return ended


def barriers_at_once() -> list[str]:
    """Rank 1 enters after one of two threads on rank 0 was rejected; later barriers work."""
    with weft.init() as communicator:
        go = communicator.counter()
        communicator.share([], [go])
        refused: list[str] = []
        if communicator.rank == 0:

            def enter() -> None:
                try:
                    communicator.barrier(timeout=LONG_SECONDS)
                except weft.WeftError as error:
                    refused.append(type(error).__name__)
                    communicator.signal(1, go)

            with on_threads(enter):
                enter()
        else:
            go.wait({0: 1}, timeout=LONG_SECONDS)
            communicator.barrier()
        for _ in range(3):
            communicator.barrier()
        return refused


def interrupted() -> list[str]:
    """Ctrl-C ends only the main thread's wait, not a leading or following thread's."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        mine, other = communicator.counter(), communicator.counter()
        communicator.share([], [mine, other])
        if communicator.rank == 1:
            communicator.all_gather(b"", timeout=LONG_SECONDS)
            communicator.signal(0, other, 0)
            communicator.barrier()
            return []
        ended = []
        with on_threads(lambda: other.wait({peer: 1}, timeout=LONG_SECONDS)):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            begin = time.monotonic()
            try:
                mine.wait({peer: 1}, timeout=LONG_SECONDS)
            except KeyboardInterrupt:
                ended.append("KeyboardInterrupt")
            assert time.monotonic() - begin < PROMPT_SECONDS
            communicator.all_gather(b"")
        communicator.barrier()
        return ended


def exits_while_a_thread_waits() -> bool:
    """The interpreter ends while a daemon thread waits, without calling `close`."""
    communicator = weft.init()
    counter = communicator.counter()
    communicator.share([], [counter])
    waits = threading.Thread(
        target=lambda: raised_by(lambda: counter.wait({1 - communicator.rank: 1}, timeout=1e6)),
        daemon=True,
    )
    waits.start()
    communicator.barrier()
    return True
