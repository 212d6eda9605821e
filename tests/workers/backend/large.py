"""Collectives and messages with more bytes and elements than 31 and 32 bits count."""

from __future__ import annotations

import resource
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from tests.workers.backend.process_group import start

if TYPE_CHECKING:
    from collections.abc import Callable

    Case = Callable[[int], bool]

#: Vector bytes with one copy in each rank, and with a second one.
LONG, HALF = (1 << 32) + 13, (1 << 31) + 26
#: Value period: prime, so that no displaced block has the right ones.
PERIOD = 251
#: Values that are compared at once.
BLOCK = PERIOD << 18


def vector(length: int, first: int = 0, factor: int = 1) -> Any:
    """Element values from `first` on, times a factor, modulo 256."""
    period = (torch.arange(first, first + PERIOD) % PERIOD * factor).to(torch.uint8)
    values = torch.empty(length, dtype=torch.uint8)
    whole = length // PERIOD * PERIOD
    values[:whole].view(whole // PERIOD, PERIOD).copy_(period)
    values[whole:].copy_(period[: length - whole])
    return values


def is_vector(values: Any, first: int = 0, factor: int = 1) -> bool:
    """True if a tensor has these values, without a second tensor with its length."""
    expected = vector(BLOCK, first, factor)
    return all(torch.equal(each, expected[: len(each)]) for each in values.split(BLOCK))


def all_reduce(rank: int) -> bool:
    values = vector(LONG, factor=1 + rank)
    distributed.all_reduce(values)
    return is_vector(values, factor=3)


def broadcast(rank: int) -> bool:
    values = vector(LONG) if rank == 1 else torch.empty(LONG, dtype=torch.uint8)
    distributed.broadcast(values, 1)
    return is_vector(values)


def message(rank: int) -> bool:
    if rank == 0:
        distributed.send(vector(LONG), 1)
        return True
    values = torch.empty(LONG, dtype=torch.uint8)
    distributed.recv(values, 0)
    return is_vector(values)


def uneven(rank: int) -> bool:
    """All one rank's input to the other, whose input is empty."""
    lengths = [[0, LONG], [0, 0]]
    values = vector(sum(lengths[rank]))
    received = [row[rank] for row in lengths]
    result = torch.empty(sum(received), dtype=torch.uint8)
    distributed.all_to_all_single(result, values, received, lengths[rank])
    return is_vector(result)


def all_to_all(rank: int) -> bool:
    values, result = vector(HALF, rank), torch.empty(HALF, dtype=torch.uint8)
    distributed.all_to_all_single(result, values)
    first, second = result.chunk(2)
    start = rank * (HALF // 2)
    return is_vector(first, start) and is_vector(second, start + 1)


def all_gather(rank: int) -> bool:
    result = torch.empty(HALF, dtype=torch.uint8)
    distributed.all_gather_into_tensor(result, vector(HALF // 2, rank))
    first, second = result.chunk(2)
    return is_vector(first) and is_vector(second, 1)


def reduce_scatter(rank: int) -> bool:
    result = torch.empty(HALF // 2, dtype=torch.uint8)
    distributed.reduce_scatter_tensor(result, vector(HALF, factor=1 + rank))
    return is_vector(result, rank * (HALF // 2), factor=3)


def gather(rank: int) -> bool:
    share = HALF // 2
    parts = [torch.empty(share, dtype=torch.uint8) for _ in range(2)] if rank == 0 else None
    distributed.gather(vector(share, rank), parts)
    return parts is None or all(is_vector(part, first) for first, part in enumerate(parts))


def reduce(rank: int) -> bool:
    """Doubles: an element's index fits 32 bits, its byte offset does not."""
    values = torch.full(((1 << 28) + 3,), 1.0 + rank, dtype=torch.float64)
    distributed.reduce(values, 0, distributed.ReduceOp.AVG)
    return rank != 0 or all(bool((each == 1.5).all()) for each in values.split(1 << 24))


CASES: list[Case] = [
    all_reduce,
    broadcast,
    message,
    uneven,
    all_to_all,
    all_gather,
    reduce_scatter,
    gather,
    reduce,
]


def run(provider: str) -> dict[str, Any]:
    """Each case's result, and the most memory on this rank in GiB."""
    rank, _ = start("weft", timedelta(seconds=200))
    found = {}
    for case in CASES:
        found[case.__name__] = case(rank)
        distributed.barrier()
    distributed.destroy_process_group()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"{provider}: rank {rank} had {most:.1f} GiB")
    return found
