"""Counted writes: regions, pages, signals, credits."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import weft


def raised_by(call: Any) -> weft.WeftError | None:
    """The error that a call raises."""
    try:
        call()
    except weft.WeftError as error:
        return error
    return None


def ring(length: int, rounds: int) -> dict[str, Any]:
    """Every rank writes to the next, in pages and as a whole, from both region kinds."""
    with weft.init() as communicator:
        rank, size = communicator.rank, communicator.world_size
        after, before = (rank + 1) % size, (rank - 1) % size
        inbox = communicator.alloc(length)
        counter = communicator.counter()
        granted = communicator.share([inbox], [counter])
        target = granted[after][0]
        source = np.empty(length, dtype=np.float32).view(np.uint8)[:length]
        mine = communicator.register(source.view(np.float32))
        allocated = communicator.alloc(length)
        right = 0
        half = length // 2
        for round in range(rounds):
            region, memory = (mine, source) if round % 2 else (allocated, allocated.bytes)
            random = np.random.default_rng([round, rank])
            memory[:] = random.integers(0, 256, length, dtype=np.uint8)
            counter.wait_for_credit(after, round)
            pages = [
                weft.Page(region, 0, target, half, length - half),
                weft.Page(region, length - half, target, 0, half),
            ]
            if round % 3 == 0:
                pages = [weft.Page(region, 0, target, 0, length)]
            request = communicator.write(after, counter, pages, round=round)
            expected = np.random.default_rng([round, before])
            sent = expected.integers(0, 256, length, dtype=np.uint8)
            if round % 3:
                sent = np.concatenate([sent[length - half :], sent[: length - half]])
            request.wait()
            counter.wait({before: 1})
            right += bool(np.array_equal(inbox.bytes, sent)) and counter.count(before) == 1
            assert request.done
            counter.credit(before)
        communicator.barrier()
        return {
            "right": right,
            "lengths": [[region.length for region in of_rank] for of_rank in granted],
            "routes": communicator.routes(),
            "statistics": [each._asdict() for each in communicator.statistics()],
        }


def repeat() -> dict[str, Any]:
    """Ranks whose waits time out before the others join, and that repeat the calls."""
    with weft.init() as communicator:
        rank, last = communicator.rank, communicator.world_size - 1
        region, counter = communicator.alloc(100), communicator.counter()
        folder = Path(os.environ["TEST_RESULTS"])
        errors = []

        def late(call: Any) -> None:
            error = raised_by(call)
            errors.append([type(error).__name__, str(error).split()[0]])

        def gather(round: int, timeout: float = 20) -> list[list[int]]:
            parts = communicator.all_gather(bytes([round, rank]), timeout=timeout)
            return [list(part) for part in parts]

        def wait_for(names: list[str]) -> None:
            while not all((folder / name).exists() for name in names):
                time.sleep(0.01)

        if rank == last:
            wait_for([f"late{other}" for other in range(last)])
        else:
            late(lambda: communicator.share([region], [counter], timeout=0))
            (folder / f"late{rank}").touch()
        granted = communicator.share([region], [counter])
        gathered = gather(0)
        if rank == 0:
            late(lambda: gather(1, timeout=0))
            late(lambda: gather(9, timeout=0))
            (folder / "differs").touch()
        else:
            wait_for(["differs"])
        gathered += gather(1) + gather(2)
        communicator.barrier()
        return {
            "lengths": [each.length for of_rank in granted for each in of_rank],
            "gathered": gathered,
            "errors": errors,
        }


def different() -> list[str]:
    """Rank 0 shares, the others gather."""
    with weft.init() as communicator:
        if communicator.rank == 0:
            error = raised_by(lambda: communicator.share([communicator.alloc(8)]))
        else:
            error = raised_by(lambda: communicator.all_gather(b"data"))
        communicator.barrier()
        return [type(error).__name__, str(error)]


def long_writes(writes: list[list[int]]) -> list[dict[str, Any]]:
    """Rank 0 writes pages with these lengths; rank 1 waits for the raises from `parts`."""
    with weft.init() as communicator:
        rank, longest = communicator.rank, max(sum(lengths) for lengths in writes)
        mine, counter = communicator.alloc(longest), communicator.counter()
        granted = communicator.share([mine], [counter])
        route = communicator.route(1 - rank)
        errors = [raised_by(lambda peer=peer: communicator.parts(peer)) for peer in (rank, 9)]
        assert [type(error).__name__ for error in errors] == ["UnknownError"] * 2
        results: list[dict[str, Any]] = []
        for round, lengths in enumerate(writes):
            random = np.random.default_rng(round).integers(0, 256, longest, dtype=np.uint8)
            parts, length = communicator.parts(1 - rank, lengths), sum(lengths)
            right = True
            if rank == 0:
                counter.wait_for_credit(1, round)
                mine.bytes[:] = random
                starts = np.cumsum([0, *lengths])
                pages = [
                    weft.Page(mine, int(at), granted[1][0], int(at), each)
                    for at, each in zip(starts, lengths, strict=False)
                ]
                communicator.write(1, counter, pages, round=round).wait()
            else:
                counter.wait({0: parts})
                right = bool(np.array_equal(mine.bytes[:length], random[:length]))
                right = right and counter.count(0) == parts
                mine.bytes[:] = 0
                counter.credit(0)
            results.append({"parts": parts, "right": right})
        communicator.barrier()
        statistics = communicator.statistics()[0]
        results.append({"route": list(route), "sent": statistics.parts})
        return results


def by_lengths(writes: list[list[int]]) -> list[bool]:
    """Rank 0 writes pages with these lengths; rank 1 waits for the lengths, and checks at once."""
    with weft.init() as communicator:
        rank, longest = communicator.rank, max(sum(lengths) for lengths in writes)
        mine, counter = communicator.alloc(longest), communicator.counter()
        granted = communicator.share([mine], [counter])
        right = []
        for round, lengths in enumerate(writes):
            if rank == 0:
                counter.wait_for_credit(1, round)
                mine.bytes[:] = round + 1
                starts = np.cumsum([0, *lengths])
                pages = [
                    weft.Page(mine, int(at), granted[1][0], int(at), each)
                    for at, each in zip(starts, lengths, strict=False)
                ]
                communicator.write(1, counter, pages, round=round)
            else:
                # Both sequence kinds, and a number that is not an int.
                expected: Any = [lengths, tuple(lengths)][round % 2]
                counter.wait({0: expected})
                right.append(bool((mine.bytes[: sum(lengths)] == round + 1).all()))
                counter.wait({0: np.int64(counter.count(0))})  # type: ignore[dict-item]
                counter.credit(0)
        communicator.barrier()
        return right


def signals() -> dict[str, Any]:
    """All ranks signal rank 0; missing ones are named, and the wait may be repeated."""
    with weft.init() as communicator:
        counter = communicator.counter()
        communicator.share([], [counter])
        peers = range(1, communicator.world_size)
        result: dict[str, Any] = {}
        if communicator.rank == 1:
            communicator.write(0, counter, []).wait()
        communicator.barrier()
        if communicator.rank == 0:
            for _ in range(2):
                error = raised_by(lambda: counter.wait(dict.fromkeys(peers, 1), timeout=0.05))
                assert isinstance(error, TimeoutError)
                result["missing"] = [list(each) for each in error.missing]
            result["early"] = [list(each) for each in communicator.raised()]
        communicator.barrier()
        if communicator.rank > 1:
            communicator.write(0, counter, []).wait()
        if communicator.rank == 0:
            counter.wait(dict.fromkeys(peers, 1))
            result["counts"] = [counter.count(peer) for peer in peers]
            for peer in peers:
                counter.credit(peer)
            result["credited"] = [counter.count(peer) for peer in peers]
        else:
            counter.wait_for_credit(0, 1)
        communicator.barrier()
        return result


def refused() -> dict[str, str]:
    """Rank 0's rejected calls, and correct operation afterwards."""
    with weft.init() as communicator:
        region, counter = communicator.alloc(64), communicator.counter()
        granted = communicator.share([region], [counter])
        raised: dict[str, str] = {}
        if communicator.rank == 0:
            target = granted[1][0]

            def attempt(
                name: str, offset: int, length: int, *, round: int = 0, to: int = 0, peer: int = 1
            ) -> None:
                page = weft.Page(region, offset, target, to, length)
                error = raised_by(lambda: communicator.write(peer, counter, [page], round=round))
                raised[name] = type(error).__name__
                if isinstance(error, weft.errors.CreditError):
                    assert error.rank == 1

            attempt("beyond the source", 32, 33)
            attempt("beyond the destination", 0, 33, to=32)
            attempt("far beyond", 2**63, 2**63)
            attempt("a round ahead", 0, 8, round=1)
            attempt("no such rank", 0, 8, peer=7)
            error = raised_by(lambda: counter.wait_for_credit(1, 1, timeout=0.02))
            raised["no credit"] = type(error).__name__
            error = raised_by(lambda: counter.wait({9: 1}, timeout=0.02))
            raised["no such peer"] = type(error).__name__
            attempt("in time", 0, 8)
            attempt("the same round again", 0, 8, round=1)
        if communicator.rank == 1:
            counter.wait({0: 1})
        communicator.barrier()
        return raised


def closed() -> list[str]:
    """Calls after the end; closing twice."""
    communicator = weft.init()
    region = communicator.alloc(64)
    kept = region.bytes
    communicator.close()
    communicator.close()
    kept[:] = 7
    calls = (communicator.barrier, lambda: communicator.alloc(64), region.release)
    return [type(raised_by(call)).__name__ for call in calls]


def poisoned() -> dict[str, Any]:
    """Rank 0 ends the group; the others raise the cause, in any call."""
    with weft.init() as communicator:
        counter = communicator.counter()

        def share_and_wait() -> None:
            # The poison may arrive during the others' `share`.
            communicator.share([], [counter])
            counter.wait({0: 1}, timeout=20)

        if communicator.rank == 0:
            communicator.share([], [counter])
            communicator.poison("the sea is rough")
            error = raised_by(communicator.check)
        else:
            error = raised_by(share_and_wait)
        return {"error": type(error).__name__, "message": str(error)}


class UnprintableError(Exception):
    """An exception whose `__str__` raises."""

    def __str__(self) -> str:
        raise ZeroDivisionError


#: Exceptions that end the block on rank 1, by name.
ENDS: dict[str, BaseException] = {
    "an error": ValueError("no\n  such\tfile"),
    "a long error": RuntimeError("x" * 10_000),
    "no text": KeyError(),
    "unprintable": UnprintableError(),
    "Ctrl-C": KeyboardInterrupt(),
    "exit 3": SystemExit(3),
    "exit 0": SystemExit(0),
    "exit": SystemExit(),
}


def raises_in_block(end: str) -> dict[str, Any]:
    """Rank 1 leaves its block by an exception while the others wait for it."""
    raised: BaseException | None = None
    error: weft.WeftError | None = None
    try:
        with weft.init() as communicator:
            counter = communicator.counter()
            communicator.share([], [counter])
            if communicator.rank == 1:
                # All ranks have left `share` before the exception.
                communicator.all_gather(b"")
                raise ENDS[end]

            def wait() -> None:
                # The exception may arrive before the third rank's message.
                communicator.all_gather(b"")
                counter.wait({1: 1}, timeout=10)

            error = raised_by(wait)
    except BaseException as caught:
        raised = caught
    return {
        "raised": type(raised).__name__,
        "error": type(error).__name__,
        "message": str(error),
        "rank": None if error is None else error.rank,
    }
