"""Resources after closing an all-to-all and a communicator: all are freed."""

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np

import weft
from tests.workers.group.transfer import raised_by
from weft.moe import AllToAll

TOKENS, IDS = np.ones((4, 8), np.float32), np.arange(4)[:, np.newaxis]


def held() -> tuple[set[str], list[str]]:
    """Open descriptors, and Weft memory mappings."""
    gc.collect()
    descriptors = set()
    for link in Path("/proc/self/fd").iterdir():
        # Another thread may close one meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if not (target := os.readlink(link)).endswith("/fd"):
                descriptors.add(f"{link.name} {target}")
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return descriptors, [line for line in maps if "memfd:weft" in line]


def is_idle(
    idle: tuple[set[str], list[str]], now: tuple[set[str], list[str]], world_size: int
) -> bool:
    """True if only doorbells were added: a peer sends its own before its first sleep."""
    more = now[0] - idle[0]
    doorbells = [each for each in more if each.endswith("[eventfd]")]
    return idle[0] <= now[0] and len(more) == len(doorbells) < world_size and now[1] == idle[1]


def make(communicator: weft.Communicator, **options: Any) -> AllToAll:
    return AllToAll(communicator, experts=4, top_k=1, hidden=8, max_tokens=4, **options)


def all_goes(progress: Any, cycles: int) -> dict[str, Any]:
    """Descriptors and mappings before, while and after."""
    before = held()
    with weft.init(progress=progress) as communicator:
        region = communicator.alloc(1 << 16)
        array = communicator.register(np.ones(3))
        idle = held()
        busy, after_each = [], []
        for _ in range(cycles):
            with make(communicator) as all_to_all:
                for _ in range(3):
                    with all_to_all.dispatch(TOKENS, IDS) as received:
                        all_to_all.combine(received, received.tokens)
                unreleased = all_to_all.dispatch(TOKENS, IDS)
                busy.append(len(held()[1]) - len(idle[1]))
            after_each.append(is_idle(idle, held(), communicator.world_size))
        forgotten = make(communicator)
        communicator.barrier()
    after = held()
    assert unreleased.round == 3
    assert forgotten.memory_bytes > 0
    assert (len(region), len(array)) == (1 << 16, 24)
    return {
        "busy": busy,
        "after each": after_each,
        "left": [sorted(after[0] - before[0]), after[1]],
    }


def used_after() -> dict[str, Any]:
    """Calls on a closed all-to-all and its rounds; contents in an array that outlives it."""
    with weft.init() as communicator:
        all_to_all = make(communicator)
        dispatch = all_to_all.dispatch_send(TOKENS, IDS)
        received = dispatch.recv()
        combine = all_to_all.combine_send(received, received.tokens)
        tokens, expert = received.tokens, received.of_expert(0)
        expected = tokens.copy()
        all_to_all.close()
        all_to_all.close()
        calls = {
            "dispatch": lambda: all_to_all.dispatch(TOKENS, IDS),
            "dispatch again": dispatch.recv,
            "combine": lambda: all_to_all.combine(received, TOKENS),
            "combined": combine.recv,
            "tokens": lambda: received.tokens,
            "of expert": lambda: received.of_expert(0),
            "copies": received.copies_sent,
            "release": received.release,
        }
        raised = {name: type(raised_by(call)).__name__ for name, call in calls.items()}
        maps = len(held()[1])
        right = np.array_equal(tokens, expected) and np.array_equal(expert, expected[: len(expert)])
        tokens[:] = 7
        del tokens, expert
        with make(communicator) as another, another.dispatch(TOKENS, IDS) as again:
            right &= np.array_equal(another.combine(again, again.tokens), TOKENS)
        communicator.barrier()
        return {"raised": raised, "right": right, "unmapped": maps - len(held()[1])}


def with_communicator() -> list[str]:
    """Closing the communicator, and the effect on its objects."""
    with weft.init() as communicator:
        all_to_all, region = make(communicator), communicator.alloc(8)
        received = all_to_all.dispatch(TOKENS, IDS)
        communicator.barrier()
    calls = (
        lambda: all_to_all.dispatch(TOKENS, IDS),
        lambda: received.tokens,
        received.release,
        lambda: region.bytes,
        region.release,
    )
    all_to_all.close()
    return [type(raised_by(call)).__name__ for call in calls]


def over_capacity() -> list[Any]:
    """Closing while a rejected round's rows may still be in flight."""
    with weft.init() as communicator:
        raised = []
        for _ in range(5):
            with make(communicator, max_receive_rows=5) as all_to_all:
                error = raised_by(lambda each=all_to_all: each.dispatch(TOKENS, IDS * 0))
                raised.append(type(error).__name__)
        communicator.barrier()
        return raised


def one_fails() -> dict[str, Any]:
    """Rank 0 leaves its block by an error at once; the others' close times out."""
    with weft.init() as communicator:
        failed, lacked = "", ""
        counter = communicator.counter()
        communicator.share([], [counter])
        try:
            with make(communicator) as all_to_all:
                if communicator.rank == 0:
                    raise ZeroDivisionError
                error = raised_by(lambda: all_to_all.close(timeout=0.3))
                lacked = type(error).__name__
        except ZeroDivisionError:
            failed = "ZeroDivisionError"
        closed = raised_by(lambda: all_to_all.dispatch(TOKENS, IDS))
        if communicator.rank == 0:
            counter.wait(dict.fromkeys(range(1, communicator.world_size), 1))
        else:
            communicator.write(0, counter, []).wait()
        return {"failed": failed, "lacked": lacked, "after": type(closed).__name__}


def poisoned() -> dict[str, Any]:
    """In a poisoned group `close` returns at once and frees all memory."""
    with weft.init() as communicator:
        idle = held()
        all_to_all = make(communicator)
        # The poison may precede or follow the others' last calls.
        error = raised_by(lambda: all_to_all.dispatch(TOKENS, IDS).release())
        if communicator.rank == 0:
            communicator.poison("enough")
        while error is None:
            error = raised_by(lambda: all_to_all.dispatch(TOKENS, IDS, timeout=20).release())
        all_to_all.close(timeout=0.0)
        return {"error": type(error).__name__, "maps": len(held()[1]) - len(idle[1])}


def stale() -> list[str]:
    """A released region whose number another one has."""
    with weft.init() as communicator:
        counter = communicator.counter()
        first = communicator.alloc(8)
        first.release()
        second = communicator.alloc(8)
        first.release()
        second.bytes[:] = 1
        calls = (lambda: first.bytes, lambda: communicator.share([first], []))
        raised = [type(raised_by(call)).__name__ for call in calls]
        granted = communicator.share([second], [counter])
        peer = 1 - communicator.rank
        page = weft.Page(first, 0, granted[peer][0], 0, 8)
        write = raised_by(lambda: communicator.write(peer, counter, [page]))
        communicator.barrier()
        return [*raised, type(write).__name__]
