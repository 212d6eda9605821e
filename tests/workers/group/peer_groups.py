"""Peer groups: scatters between real processes, and rejected calls."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import weft
from tests.workers.group.counters import named

LENGTH = 3 << 20
ROUNDS = 4


def content(rank: int, round: int) -> NDArray[np.uint8]:
    """A rank's source bytes in a round."""
    return np.random.default_rng([rank, round]).integers(0, 256, LENGTH, dtype=np.uint8)


def scatters() -> dict[str, Any]:
    """Every rank scatters slices from one source to all others, a round after the other."""
    with weft.init() as communicator:
        rank, size = communicator.rank, communicator.world_size
        inbox, counter = communicator.alloc(LENGTH * size), communicator.counter()
        shared = communicator.share([inbox], [counter])
        source = communicator.alloc(LENGTH)
        peers = [peer for peer in range(size) if peer != rank]
        group = communicator.peer_group(counter, source, [shared[peer][0] for peer in peers])
        # A long write, which is several parts over tcp, a short one, and a signal.
        lengths = [LENGTH - 64, 24, 0]
        ended: list[object] = []
        wrong = []
        for round in range(ROUNDS):
            source.bytes[:] = content(rank, round)
            for peer in peers:
                counter.wait_for_credit(peer, max(0, round))
            writes, at = [], 0
            for length in lengths:
                writes += [(member, at, rank * LENGTH + at, length) for member in range(len(peers))]
                at += length
            # The first names its round; the others continue from it.
            group.scatter(writes, round, done=ended.append).wait()
            for peer in peers:
                # Each write is one page.
                counter.wait({peer: sum(communicator.parts(peer, [each]) for each in lengths)})
                arrived = inbox.bytes[peer * LENGTH : peer * LENGTH + at]
                if not np.array_equal(arrived, content(peer, round)[:at]):
                    wrong.append((round, peer))
                counter.credit(peer)
        communicator.barrier()
        result = {"ended": ended, "wrong": wrong, "next": counter.next_round(peers[0])}
        result |= refused(communicator, counter, source, group, shared, peers[0])
        return result


def refused(
    communicator: weft.Communicator,
    counter: weft.Counter,
    source: weft.Region,
    group: weft.PeerGroup,
    shared: list[list[weft.RemoteRegion]],
    peer: int,
) -> dict[str, str]:
    """Error class names."""
    result = {
        "member": named(lambda: group.scatter([(99, 0, 0, 8)])),
        "round": named(lambda: group.scatter([(0, 0, 0, 8)], 99)),
        "range": named(lambda: group.scatter([(0, LENGTH, 0, 8)])),
        "unshared": named(
            lambda: communicator.peer_group(communicator.counter(), source, shared[peer])
        ),
    }
    communicator.barrier()
    with weft.init(rank=0, world_size=1) as other:
        foreign = other.alloc(8)
        result["foreign"] = named(lambda: communicator.peer_group(counter, foreign, shared[peer]))
    source.release()
    result["released"] = named(lambda: group.scatter([(0, 0, 0, 8)]))
    return result
