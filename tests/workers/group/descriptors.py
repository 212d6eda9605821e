"""Regions granted by descriptors, which travel by files."""

from __future__ import annotations

from typing import Any

import numpy as np

import weft
from tests.workers.cuda.device_native import named
from weft.group import descriptors


def exchange(registered: bool) -> dict[str, Any]:
    """Each rank grants a region to the next one, later one to all; both are written to."""
    with weft.init() as communicator:
        rank, ranks = communicator.rank, communicator.world_size
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        counter = communicator.counter()
        communicator.share([], [counter])
        source = communicator.alloc(64)
        found: dict[str, Any] = {"arrived": []}
        for round, peers in enumerate([[before], None]):
            memory = np.zeros(64, np.uint8)
            region = communicator.register(memory) if registered else communicator.alloc(64)
            arrived = memory if registered else region.bytes
            granted = communicator.all_gather(region.descriptor(peers))
            target = communicator.remote_region(granted[after])
            found["target"] = [target.peer, target.length]
            source.bytes[:] = 10 * rank + round + 1
            page = weft.Page(source, 0, target, 0, 64)
            communicator.write(after, counter, [page]).wait()
            counter.wait({before: [64]})
            found["arrived"].append(arrived.tolist())
            counter.credit(before)
            counter.wait_for_credit(after, counter.next_round(after))
            communicator.barrier()
        return found


def refusals() -> dict[str, Any]:
    """Errors for descriptors that are damaged, of other groups, for others, or impossible."""
    with weft.init() as communicator:
        rank, peer = communicator.rank, 1 - communicator.rank
        region = communicator.alloc(64)
        mine = region.descriptor([peer])
        theirs = communicator.all_gather(mine)[peer]
        third = communicator.split([0, 1])
        assert third is not None
        random = np.random.default_rng(rank)
        damaged = []
        for _ in range(200):
            changed = bytearray(theirs)
            changed[random.integers(len(changed))] ^= int(random.integers(1, 256))
            damaged.append(named(lambda: communicator.remote_region(bytes(changed)))[0])  # noqa: B023
        cut = [
            named(lambda: communicator.remote_region(theirs[:length]))[0]  # noqa: B023
            for length in range(0, len(theirs), 7)
        ]
        # A member with the key, but with another format.
        body = theirs[: -descriptors._TAG_BYTES]
        for short in (body[:20], body[:-3], descriptors._MAGIC):
            signed = short + descriptors._tag(communicator._native, short)
            cut.append(named(lambda: communicator.remote_region(signed))[0])  # noqa: B023
        found: dict[str, Any] = {
            "damaged": sorted(set(damaged + cut)),
            "other group": named(lambda: third.remote_region(theirs)),
            "own": named(lambda: communicator.remote_region(mine)),
            "peers": [named(lambda: region.descriptor([each])) for each in (2, rank)],  # noqa: B023
            "none": named(lambda: communicator.remote_region(region.descriptor([]))),
            "read-only": named(lambda: communicator.register(b"0123").descriptor()),
        }
        region.release()
        found["released"] = named(region.descriptor)
        found["length"] = communicator.remote_region(theirs).length
        communicator.barrier()
        return found
