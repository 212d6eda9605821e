"""Both ends of a pair over copy, which write page lists to each other's device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import numpy as np

import weft
from weft.bench.transfer_memory import memory_on

if TYPE_CHECKING:
    from weft.group.pair import Provider

#: Provider by device.
PROVIDERS: Final[dict[str, Provider]] = {"cuda": "copy", "twin": "copy-twin"}
ROUNDS: Final = 20
PAGES: Final = 300
LENGTH: Final = 1008


def dial(address: str, device: str) -> None:
    """The connecting end; exit status 1 if a byte was wrong."""
    with weft.connect(address, providers=[PROVIDERS[device]], timeout=100) as pair:
        right = right_rounds(pair, device)
    sys.exit(int(right != ROUNDS))


def right_rounds(pair: weft.Communicator, device: str) -> int:
    """Rounds in which each page of the peer's list arrived in its place."""
    memory, peer, right = memory_on(device, pair.rank), 1 - pair.rank, 0
    source, inbox = (pair.alloc(PAGES * LENGTH, device=memory.device) for _ in range(2))
    sent, arrived = (memory.array(region).reshape(PAGES, LENGTH) for region in (source, inbox))
    counter = pair.counter()
    (remote,) = pair.share([inbox], [counter])[peer]
    order = np.random.default_rng(PAGES).permutation(PAGES)
    pages = [
        weft.Page(source, LENGTH * page, remote, LENGTH * int(place), LENGTH)
        for page, place in enumerate(order)
    ]
    for number in range(ROUNDS):
        mine, theirs = (
            np.random.default_rng((number, rank)).integers(0, 256, (PAGES, LENGTH), np.uint8)
            for rank in (pair.rank, peer)
        )
        memory.put(sent, np.arange(PAGES), mine)
        counter.wait_for_credit(peer, number)
        request = pair.write(peer, counter, pages, round=number)
        counter.wait({peer: [LENGTH] * PAGES})
        expected = np.empty_like(theirs)
        expected[order] = theirs
        right += memory.is_equal(arrived, expected)
        request.wait()
        counter.credit(peer)
    pair.barrier()
    return right
