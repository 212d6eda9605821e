"""Waits on requests and counters in asyncio loops."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable
from typing import Any, Literal

import weft
from tests.workers.group.process import exit_of
from tests.workers.group.transfer import raised_by

#: Longer than a test: only an event ends a wait in time.
LONG_SECONDS = 60.0


async def raised_in(wait: Awaitable[None]) -> str:
    """Class of the error that an await raises."""
    try:
        await wait
    except weft.WeftError as error:
        return type(error).__name__
    return "nothing"


def fed(length: int, rounds: int, progress: Any) -> dict[str, Any]:
    """Every rank writes to the next, and awaits requests, arrivals and credits, beside a task."""

    async def send(
        communicator: weft.Communicator, counter: weft.Counter, target: weft.RemoteRegion
    ) -> int:
        outbox, ended = communicator.alloc(length), 0
        page = weft.Page(outbox, 0, target, 0, length)
        for round in range(rounds):
            await counter.wait_for_credit_async(target.peer, timeout=LONG_SECONDS)
            outbox.bytes[:] = (round + communicator.rank) % 251
            request = communicator.write(target.peer, counter, [page])
            await request
            ended += request.done
        return ended

    async def receive(counter: weft.Counter, inbox: weft.Region, before: int) -> int:
        right = 0
        for round in range(rounds):
            await counter.wait_async({before: [length]}, timeout=LONG_SECONDS)
            right += bool((inbox.bytes == (round + before) % 251).all())
            counter.credit(before)
        return right

    async def work(communicator: weft.Communicator) -> dict[str, Any]:
        rank, size = communicator.rank, communicator.world_size
        after, before = (rank + 1) % size, (rank - 1) % size
        inbox, counter = communicator.alloc(length), communicator.counter()
        granted = communicator.share([inbox], [counter])
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        ended, right = await asyncio.gather(
            send(communicator, counter, granted[after][0]), receive(counter, inbox, before)
        )
        await counter.wait_for_credit_async(after, rounds, timeout=LONG_SECONDS)
        ticking.cancel()
        return {"ended": ended, "right": right, "ticked": ticks > 0}

    with weft.init(progress=progress) as communicator:
        result = asyncio.run(work(communicator))
        communicator.barrier()
        return result


def idle() -> dict[str, Any]:
    """Awaits that no arrival ends: release, timeout, cancellation, and CPU time meanwhile."""

    async def work(communicator: weft.Communicator, counter: weft.Counter) -> dict[str, Any]:
        peer, found = 1 - communicator.rank, dict[str, Any]()
        released = asyncio.create_task(raised_in(spare.wait_async({peer: 1}, timeout=LONG_SECONDS)))
        await asyncio.sleep(0)
        spare.release()
        found["released"] = await released
        try:
            await counter.wait_async({peer: 2}, timeout=0.2)
        except weft.errors.WaitTimeoutError as error:
            found["text"] = str(error)
        try:
            async with asyncio.timeout(0.1):
                await counter.wait_async({peer: 2}, timeout=LONG_SECONDS)
        except TimeoutError:
            found["cancelled"] = True
        found["credit"] = await raised_in(counter.wait_for_credit_async(peer, 1, timeout=0.0))
        begin = time.process_time()
        await raised_in(counter.wait_async({peer: 2}, timeout=2.0))
        found["idle"] = time.process_time() - begin < 1.0
        communicator.barrier()
        communicator.signal(peer, counter, round=0)
        await counter.wait_async({peer: 1}, timeout=LONG_SECONDS)
        return found

    with weft.init() as communicator:
        counter, spare = communicator.counter(), communicator.counter()
        communicator.share([], [counter, spare])
        found = asyncio.run(work(communicator, counter))
        communicator.barrier()
        return found


def ended(how: Literal["poison", "close", "leave"], length: int) -> list[str]:
    """Errors of an arrival, a credit and a request that are awaited when the group ends.

    Then the error of a later await, and the callback's.
    """

    async def work(communicator: weft.Communicator) -> list[str]:
        arriving, writing = counters = [communicator.counter() for _ in range(2)]
        mine, peer, called = communicator.alloc(length), 1 - communicator.rank, list[str]()
        granted = communicator.share([mine], counters)
        if communicator.rank == 1:
            communicator.all_gather(b"")
            if how == "poison":
                communicator.poison("before it has ended")
            if how != "leave":
                raised_by(lambda: communicator.all_gather(b"", timeout=LONG_SECONDS))
            return []
        arriving.on({peer: 1}, lambda error: called.append(type(error).__name__))
        page = weft.Page(mine, 0, granted[1][0], 0, length)
        request = communicator.write(1, writing, [page])
        waits = (
            arriving.wait_async({peer: 1}, timeout=LONG_SECONDS),
            writing.wait_for_credit_async(peer, 1, timeout=LONG_SECONDS),
            request.wait_async(timeout=LONG_SECONDS),
        )
        tasks = [asyncio.create_task(raised_in(wait)) for wait in waits]
        await asyncio.sleep(0)
        # The other rank reads nothing meanwhile.
        communicator.all_gather(b"")
        closing = threading.Thread(target=communicator.close)
        if how == "close":
            closing.start()
        errors = list(await asyncio.gather(*tasks))
        errors.append(await raised_in(arriving.wait_async({peer: 1})))
        if how == "close":
            closing.join()
        else:
            while not called:
                raised_by(communicator.poll)
        return [*errors, *called]

    communicator = weft.init()
    try:
        return asyncio.run(work(communicator))
    finally:
        communicator.close()


def loops(rounds: int) -> dict[str, Any]:
    """Loops on several threads, and a thread that waits, share a communicator."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        counters = [communicator.counter() for _ in range(4)]
        communicator.share([], counters)
        right = [0] * len(counters)

        async def echo(at: int) -> None:
            counter = counters[at]
            for _ in range(rounds):
                await counter.wait_for_credit_async(peer, timeout=LONG_SECONDS)
                await communicator.signal(peer, counter)
                await counter.wait_async({peer: 1}, timeout=LONG_SECONDS)
                right[at] += counter.count(peer)
                counter.credit(peer)

        async def both() -> None:
            await asyncio.gather(echo(0), echo(1))

        def waiting() -> None:
            counter = counters[3]
            for _ in range(rounds):
                counter.wait_for_credit(peer, timeout=LONG_SECONDS)
                communicator.signal(peer, counter)
                counter.wait({peer: 1}, timeout=LONG_SECONDS)
                right[3] += counter.count(peer)
                counter.credit(peer)

        threads = [
            threading.Thread(target=lambda: asyncio.run(both())),
            threading.Thread(target=lambda: asyncio.run(echo(2))),
            threading.Thread(target=waiting),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        communicator.barrier()
        return {"right": right}


def beside_a_reader(messages: int) -> dict[str, Any]:
    """A program's own reader of `fileno` and awaits take turns on one communicator."""

    async def work(communicator: weft.Communicator) -> dict[str, Any]:
        peer = 1 - communicator.rank
        awaited, polled = counters = [communicator.counter() for _ in range(2)]
        communicator.share([], counters)
        seen, done = 0, asyncio.Event()

        def turn() -> None:
            nonlocal seen
            while True:
                for number, source, _ in communicator.poll():
                    if number == polled.number:
                        polled.credit(source)
                        seen += 1
                if seen == messages:
                    done.set()
                if communicator.arm():
                    return

        loop = asyncio.get_running_loop()
        loop.add_reader(communicator, turn)
        turn()
        for _ in range(messages):
            for counter in counters:
                await counter.wait_for_credit_async(peer, timeout=LONG_SECONDS)
                await communicator.signal(peer, counter)
            await awaited.wait_async({peer: 1}, timeout=LONG_SECONDS)
            awaited.credit(peer)
        await asyncio.wait_for(done.wait(), LONG_SECONDS)
        loop.remove_reader(communicator)
        communicator.disarm()
        return {"seen": seen}

    with weft.init(progress="epoll") as communicator:
        result = asyncio.run(work(communicator))
        communicator.barrier()
        return result


def forked() -> dict[str, Any]:
    """A child drops an await that it was forked with; the parent's await goes on."""
    with weft.init() as communicator:
        peer, counter = 1 - communicator.rank, communicator.counter()
        communicator.share([], [counter])
        loop = asyncio.new_event_loop()
        wait = counter.wait_async({peer: 1}, timeout=20.0)
        task = loop.create_task(wait)
        loop.run_until_complete(asyncio.sleep(0))
        child = os.fork()
        if child == 0:
            wait.close()
            refused = raised_by(lambda: asyncio.run(counter.wait_async({peer: 1})))
            os._exit(7 if type(refused).__name__ == "ForkError" else 1)
        end = exit_of(child)
        communicator.signal(peer, counter)
        loop.run_until_complete(task)
        loop.close()
        communicator.barrier()
        return {"child": end, "count": counter.count(peer)}
