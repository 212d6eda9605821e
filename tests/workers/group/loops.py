"""A communicator in the program's own event loop."""

import asyncio
import selectors
import time
from typing import Any

import weft
from tests.workers.group.transfer import raised_by

#: Longer than a test: only an event ends a sleep in time.
LONG_SECONDS = 30.0


def selected(rounds: int, length: int) -> dict[str, Any]:
    """Ranks 0 and 1 write to each other in turns; both sleep only in a selector."""
    with weft.init(progress="epoll") as communicator:
        rank, peer = communicator.rank, 1 - communicator.rank
        inbox, outbox = communicator.alloc(length), communicator.alloc(length)
        counter = communicator.counter()
        granted = communicator.share([inbox], [counter])
        page = weft.Page(outbox, 0, granted[peer][0], 0, length)
        parts = communicator.parts(peer, [length])
        sent = right = 0

        def send() -> None:
            nonlocal sent
            outbox.bytes[:] = (sent + rank) % 251
            communicator.write(peer, counter, [page], round=sent)
            sent += 1

        with selectors.DefaultSelector() as selector:
            selector.register(communicator, selectors.EVENT_READ)
            if rank == 0:
                # Rank 1 sleeps by then, unless the machine is very busy.
                time.sleep(0.2)
                send()
            while right < rounds:
                communicator.poll()
                if counter.raised() == {peer: parts}:
                    right += bool((inbox.bytes == (right + peer) % 251).all())
                    counter.credit(peer)
                    if sent < rounds:
                        send()
                    continue
                if communicator.arm():
                    assert selector.select(LONG_SECONDS), "no event woke it"
        communicator.disarm()
        communicator.barrier()
        return {"right": right, "credits": counter.credits(peer)}


def come_across() -> list[object]:
    """Rank 0's poll on its credits also takes rank 1's writes: it must not sleep afterwards."""
    with weft.init(progress="epoll") as communicator:
        peer = 1 - communicator.rank
        counter = communicator.counter()
        communicator.share([], [counter])
        seen: list[object] = []
        if communicator.rank == 1:
            communicator.signal(peer, counter)
        else:
            while counter.count(peer) == 0:
                counter.credits(peer)
            # Over shm a count is visible shortly before the dirty bit that wakes.
            time.sleep(0.1)
            counter.credits(peer)
            reports = [communicator.arm(), communicator.poll(), communicator.arm()]
            seen = [reports[0], reports[1] == [(counter.number, peer, 1)], reports[2]]
            communicator.disarm()
        communicator.barrier()
        return seen


def driven_by_asyncio(messages: int) -> dict[str, Any]:
    """Every rank signals the next, whose event loop returns a credit, beside another task."""

    async def run(communicator: weft.Communicator, counter: weft.Counter) -> dict[str, Any]:
        rank, size = communicator.rank, communicator.world_size
        after, before = (rank + 1) % size, (rank - 1) % size
        arrived = sent = ticks = 0
        done = asyncio.Event()

        def turn() -> None:
            nonlocal arrived, sent
            while True:
                for number, peer, count in communicator.poll():
                    assert (number, peer, count) == (counter.number, before, 1)
                    counter.credit(before)
                    arrived += 1
                if sent < messages and counter.credits(after) >= sent:
                    communicator.signal(after, counter, round=sent)
                    sent += 1
                    continue
                if arrived == messages and counter.credits(after) == messages:
                    done.set()
                if communicator.arm():
                    return

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0)
                ticks += 1

        ticking = asyncio.create_task(tick())
        loop = asyncio.get_running_loop()
        loop.add_reader(communicator, turn)
        turn()
        await asyncio.wait_for(done.wait(), LONG_SECONDS)
        loop.remove_reader(communicator)
        ticking.cancel()
        return {"arrived": arrived, "sent": sent, "ticked": ticks > 0}

    with weft.init(progress="epoll") as communicator:
        counter = communicator.counter()
        communicator.share([], [counter])
        result = asyncio.run(run(communicator, counter))
        communicator.barrier()
        return result


def poisoned() -> str:
    """Poison wakes a rank that sleeps in a selector, and a poll raises the cause."""
    with weft.init(progress="epoll") as communicator:
        if communicator.rank == 0:
            communicator.poison("wake up")
        error = None
        with selectors.DefaultSelector() as selector:
            selector.register(communicator, selectors.EVENT_READ)
            while error is None:
                error = raised_by(communicator.poll)
                if error is None and communicator.arm():
                    assert selector.select(LONG_SECONDS), "no event woke it"
        return f"{type(error).__name__}: {error}"


def closed() -> list[str]:
    """An event loop's calls on a closed communicator."""
    with weft.init(progress="epoll") as communicator:
        counter = communicator.counter()
    calls = (
        communicator.fileno,
        communicator.arm,
        communicator.disarm,
        communicator.poll,
        counter.raised,
        lambda: communicator.parts(0),
    )
    return [type(raised_by(call)).__name__ for call in calls]
