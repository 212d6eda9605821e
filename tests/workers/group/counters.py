"""Counters: windows, default rounds, release, strided pages."""

import time
from pathlib import Path
from typing import Any

import numpy as np

import weft
from tests.workers.group.transfer import raised_by


def named(call: Any) -> str:
    """A call error's class name, or "None"."""
    error = raised_by(call)
    return "None" if error is None else type(error).__name__


def resident_bytes() -> int:
    """This process's physical memory."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def ring(window: int, slot: int, rounds: int) -> dict[str, Any]:
    """Rank 0 fills a slot ring at rank 1 with one counter; the owner checks each round."""
    with weft.init() as communicator:
        memory, counter = communicator.alloc(window * slot), communicator.counter(window=window)
        target = communicator.share([memory], [counter])[1 - communicator.rank][0]
        result: dict[str, Any] = {}
        if communicator.rank == 0:
            source = communicator.alloc(window * slot)
            result["ahead"] = 0
            for round in range(rounds):
                at = round % window * slot
                counter.wait_for_credit(1)
                result["ahead"] = max(result["ahead"], round - counter.credits(1))
                source.bytes[at : at + slot] = round % 251
                page = weft.Page(source, at, target, at, slot)
                communicator.write(1, counter, [page]).wait()
                assert counter.next_round(1) == round + 1
                if round == window - 1:
                    # All slots are full: the round after them needs a credit.
                    full = raised_by(lambda: communicator.write(1, counter, []))
                    result["full"] = type(full).__name__
                    communicator.all_gather(b"")
            counter.wait_for_credit(1, rounds + window - 1)
            result["credits"] = counter.credits(1)
            result["credited"] = named(lambda: communicator.write(1, counter, [], round=0))
        else:
            # All slots are full before the first is read.
            counter.wait({0: [slot]}, round=window - 1)
            communicator.all_gather(b"")
            result["beyond"] = named(lambda: counter.count(0, window))
            counts = [counter.count(0, round) for round in range(window)]
            result["counts"] = [each > 0 for each in counts]
            wrong = []
            for round in range(rounds):
                at = round % window * slot
                counter.wait({0: [slot]}, round=round)
                if not (memory.bytes[at : at + slot] == round % 251).all():
                    wrong.append(round)
                counter.credit(0)
            result["wrong"] = wrong
            result["over"] = named(lambda: counter.wait({0: 1}, round=0))
            result["twice"] = named(lambda: counter.credit(0))
            result["open"] = counter.open_round(0)
        communicator.barrier()
        counter.release()
        result["released"] = [named(lambda: counter.count(0)), named(counter.release)]
        return result


def refusals(rounds: int) -> dict[str, Any]:
    """Rejected calls on counters, without effect."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        counter, alone = communicator.counter(), communicator.counter()
        result: dict[str, Any] = {
            "write before share": named(lambda: communicator.signal(peer, counter)),
            "credit before share": named(lambda: counter.credit(peer)),
        }
        communicator.share([], [counter])

        def trade() -> None:
            counter.wait_for_credit(peer)
            communicator.signal(peer, counter).wait()
            counter.wait({peer: 1})
            counter.credit(peer)

        trade()
        counter.wait_for_credit(peer)
        result["shared twice"] = named(lambda: communicator.share([], [counter]))
        result["shared with another"] = named(lambda: communicator.share([], [alone, counter]))
        result["credited round"] = named(lambda: communicator.signal(peer, counter, round=0))
        result["round ahead"] = named(lambda: communicator.signal(peer, counter, round=2))
        communicator.all_gather(b"")
        result["credited twice"] = named(lambda: counter.credit(peer))
        communicator.all_gather(b"")
        for _ in range(rounds):
            trade()
        result["rounds"] = [counter.next_round(peer), counter.open_round(peer)]
        alone.release()
        result["released"] = named(lambda: communicator.share([], [alone]))
        result["window"] = named(lambda: communicator.counter(window=1 << 17))
        result["no window"] = named(lambda: communicator.counter(window=0))
        result["no such peer"] = named(lambda: communicator.counter(peers=[7]))
        other = communicator.counter(window=2 + communicator.rank)
        result["windows differ"] = named(lambda: communicator.share([], [other]))
        communicator.barrier()
        return result


def pairs() -> dict[str, Any]:
    """Counters between neighbouring even and odd ranks."""
    with weft.init() as communicator:
        rank = communicator.rank
        partner = rank ^ 1
        pair = communicator.counter(peers=[partner])
        odd = communicator.counter(peers=[partner] if rank < 2 else [])
        lopsided = communicator.counter(peers=[1] if rank == 0 else [])
        result: dict[str, Any] = {
            "lopsided": named(lambda: communicator.share([], [pair, lopsided]))
        }
        communicator.share([], [pair, odd])
        stranger = (rank + 2) % 4
        result["stranger"] = named(lambda: communicator.signal(stranger, pair))
        for counter in (pair, odd):
            for peer in counter.peers:
                communicator.signal(peer, counter).wait()
            counter.wait(dict.fromkeys(counter.peers, 1))
            for peer in counter.peers:
                counter.credit(peer)
            counter.wait_for_credit(counter.peers[0], 1) if counter.peers else None
            counter.release()
        communicator.barrier()
        return result


def rounds_by_default() -> dict[str, Any]:
    """Writes, signals and scatters without a round are one round each, toward each peer."""
    with weft.init() as communicator:
        counter = communicator.counter(window=4)
        communicator.share([], [counter])
        result: dict[str, Any] = {}
        if communicator.rank == 0:
            communicator.signal(1, counter)
            communicator.scatter({1: [], 2: []}, counter)
            communicator.signal(1, counter, round=1)
            communicator.scatter({1: [], 2: []}, counter, done=lambda _: None)
            result["next"] = [counter.next_round(1), counter.next_round(2)]
        else:
            last = 3 - communicator.rank
            counter.wait({0: 1}, round=last)
            if communicator.rank == 1:
                counter.wait({0: 2}, round=1)
            result["counts"] = [counter.count(0, round) for round in range(4)]
        communicator.barrier()
        return result


def strided(rows: int, columns: int, block: int) -> dict[str, Any]:
    """Rank 0 writes a column block from a matrix, one page, to a denser matrix of the peer."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        memory, counter = communicator.alloc(rows * block), communicator.counter()
        target = communicator.share([memory], [counter])[peer][0]
        matrix = np.arange(rows * columns, dtype=np.uint32).astype(np.uint8).reshape(rows, columns)
        result: dict[str, Any] = {}
        if communicator.rank == 0:
            source = communicator.register(matrix)
            page = weft.Page(source, 3, target, 0, block, rows, columns, block)
            for name, wrong in {
                "too many": page._replace(count=rows + 1),
                "far too many": page._replace(count=(1 << 20) + 1),
                "far apart": page._replace(source_stride=1 << 63),
            }.items():
                result[name] = named(lambda wrong=wrong: communicator.write(peer, counter, [wrong]))
            communicator.write(peer, counter, [page]).wait()
        else:
            counter.wait({peer: [block] * rows})
            result["right"] = bool(
                np.array_equal(memory.bytes.reshape(rows, block), matrix[:, 3 : 3 + block])
            )
        communicator.barrier()
        return result


def many(times: int) -> int:
    """Counters made, used and released one after the other."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        for _ in range(times):
            # 8 lanes, so that the group has too few for all.
            with communicator.counter(window=7) as counter:
                communicator.share([], [counter])
                communicator.signal(peer, counter)
                counter.wait({peer: 1})
        return times


def many_all_to_alls(times: int) -> int:
    """All-to-alls made, used and closed one after the other."""
    with weft.init() as communicator:
        tokens = np.ones((2, 4), np.float32)
        ids = np.arange(2).reshape(2, 1) + communicator.rank % 2
        right = 0
        for number in range(times):
            # 288 lanes, so that the group has too few for all.
            made = weft.moe.AllToAll(
                communicator, experts=4, top_k=1, hidden=4, max_tokens=2, channels=16
            )
            with made as all_to_all:
                received = all_to_all.dispatch(tokens * number, ids)
                combined = all_to_all.combine(received, received.tokens.copy())
                right += bool((combined == number).all())
                received.release()
        return right


def polled(times: int) -> int:
    """Memory growth in bytes over counter polls while the peer raises it."""
    with weft.init() as communicator:
        peer = 1 - communicator.rank
        counter = communicator.counter()
        communicator.share([], [counter])

        def poll(count: int) -> None:
            for _ in range(count):
                if counter.count(peer):
                    counter.credit(peer)
                counter.credits(peer)
                if counter.credits(peer) == counter.next_round(peer):
                    communicator.signal(peer, counter)

        poll(times // 10)
        before = resident_bytes()
        poll(times)
        grown = resident_bytes() - before
        # The peer's last write is read before the group ends.
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            poll(10)
        communicator.barrier()
        return grown
