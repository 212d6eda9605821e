"""Regions, counters and rounds from another communicator, peer or all-to-all."""

from collections.abc import Callable
from typing import Any

import numpy as np

import weft
from tests.workers.group.transfer import raised_by
from weft.moe import AllToAll


def refusal(call: Callable[[], Any]) -> list[str]:
    """A call error's class and text."""
    error = raised_by(call)
    return [type(error).__name__, str(error)]


def before_reform() -> dict[str, list[str]]:
    """Rank 2 ends the group and leaves; the others use its objects on the new group."""
    with weft.init() as old:
        stale, old_counter = old.alloc(64), old.counter()
        old_granted = old.share([stale], [old_counter])
        # The poison may arrive while the others are still in it.
        raised_by(old.barrier)
        if old.rank == 2:
            old.poison("this rank leaves")
            return {}
        while raised_by(old.check) is None:
            pass
        with old.reform() as new:
            region, counter = new.alloc(64), new.counter()
            peer = 1 - new.rank
            granted = new.share([region], [counter])[peer][0]
            region.bytes[:] = 9
            good = weft.Page(region, 0, granted, 0, 8)
            source = weft.Page(stale, 0, granted, 0, 8)
            destination = weft.Page(region, 0, old_granted[peer][0], 0, 8)
            raised = {
                "source": refusal(lambda: new.write(peer, counter, [source])),
                "destination": refusal(lambda: new.write(peer, counter, [good, destination])),
                "counter": refusal(lambda: new.write(peer, old_counter, [good])),
                "shared region": refusal(lambda: new.share([stale], [])),
                "shared counter": refusal(lambda: new.share([], [old_counter])),
            }
            new.write(peer, counter, [good]).wait()
            counter.wait({peer: [8]})
            assert (region.bytes[:8] == 9).all()
            new.barrier()
            return raised


def another_peer() -> dict[str, Any]:
    """Rank 0 writes rank 2's page to rank 1, which must be rejected without effect."""
    with weft.init() as communicator:
        region, counter = communicator.alloc(64), communicator.counter()
        granted = communicator.share([region], [counter])
        result: dict[str, Any] = {}
        if communicator.rank == 0:
            source = communicator.alloc(64)
            source.bytes[:] = 7
            pages = {peer: [weft.Page(source, 0, granted[peer][0], 0, 8)] for peer in (1, 2)}
            result["write"] = refusal(lambda: communicator.write(1, counter, pages[2]))
            swapped = {1: pages[2], 2: pages[1]}
            result["scatter"] = refusal(lambda: communicator.scatter(swapped, counter))
            # The write was not sent: the round has not started.
            communicator.scatter(pages, counter).wait()
        else:
            counter.wait({0: [8]})
            result["bytes"] = region.bytes[:16].tolist()
        communicator.barrier()
        return result


def uneven(given: list[list[int]], read_only: int | None = None) -> dict[str, Any]:
    """Each rank shares `given[rank]` regions and counters; then all share equal numbers."""
    with weft.init() as communicator:
        regions, counters = given[communicator.rank]
        mine = [communicator.alloc(8 * (communicator.rank + 1)) for _ in range(regions)]
        if communicator.rank == read_only:
            mine[0] = communicator.register(b"read-only")
        made = [communicator.counter() for _ in range(counters)]
        error = raised_by(lambda: communicator.share(mine, made, timeout=20))
        region, counter = communicator.alloc(8 * (communicator.rank + 1)), communicator.counter()
        granted = communicator.share([region], [counter])
        return {
            "error": [type(error).__name__, str(error)],
            "rank": None if error is None else error.rank,
            "lengths": [[each.length for each in of_rank] for of_rank in granted],
        }


def another_round() -> dict[str, list[str]]:
    """Rounds passed to another all-to-all, or twice; then each to its own."""
    with weft.init() as communicator:
        made: dict[str, Any] = {"experts": 2, "top_k": 1, "hidden": 4, "max_tokens": 4}
        first, second = AllToAll(communicator, **made), AllToAll(communicator, **made)
        tokens, ids = np.ones((4, 4), np.float32), np.arange(4)[:, np.newaxis] % 2
        received = [each.dispatch(tokens * n, ids) for n, each in enumerate((first, second), 1)]
        outputs = [each.tokens.copy() for each in received]
        raised = {
            "another's": refusal(lambda: first.combine(received[1], outputs[1])),
            "another's, sent": refusal(lambda: second.combine_send(received[0], outputs[0])),
        }
        combined = [
            each.combine(mine, out)
            for each, mine, out in zip((first, second), received, outputs, strict=True)
        ]
        assert [each.tolist() for each in combined] == [[[1.0] * 4] * 4, [[2.0] * 4] * 4]
        raised["twice"] = refusal(lambda: first.combine(received[0], outputs[0]))
        received[0].release()
        raised["released"] = refusal(lambda: first.combine(received[0], outputs[0]))
        received[1].release()
        communicator.barrier()
        return raised
