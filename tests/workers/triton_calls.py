"""`weft.triton` between processes: Triton's interpreter on the twin's shared memory."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

import weft
import weft.triton
from weft.cuda import symmetric
from weft.triton import layout
from workers import device_native
from workers import triton_kernels as kernels

#: Epochs before the first round: at zero, and before both places where int32 wraps around.
FIRST = (0, 2**31 - 4, -4)


def _empty(*shape: int) -> torch.Tensor:
    return weft.symmetric_empty(shape, torch.int32, device="twin")


def _list(tensor: torch.Tensor) -> list[Any]:
    found: list[Any] = tensor.tolist()
    return found


def _words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def calls(rounds: int) -> dict[str, Any]:
    """Results of all kernels that need peers."""
    with weft.init() as communicator:
        return {
            "ring": [_ring(communicator, first, rounds) for first in FIRST],
            "all_to_all": [_all_to_all(communicator, first, rounds) for first in FIRST],
            "barrier": [_barriers(communicator, first) for first in FIRST],
            "slices": [_slices(communicator, programs) for programs in (1, 5, 32)],
            "claims": _claims(communicator),
            "context": _contexts(communicator),
        }


def _ring(communicator: weft.Communicator, first: int, rounds: int) -> list[list[int]]:
    length, window = 16, 2
    block = _empty(2 + window * length)
    words, data = block[:2], block[2:]
    words.fill_(first)
    epoch, outputs = _words(first), torch.zeros(length, dtype=torch.int32)
    context = weft.triton.context(block)
    communicator.barrier()
    found = []
    for _ in range(rounds):
        kernels.ring[(1,)](data, words, context, outputs, epoch, length, window)
        found.append(sorted(set(outputs.tolist())))
    weft.check()
    communicator.barrier()
    return found


def _all_to_all(communicator: weft.Communicator, first: int, rounds: int) -> bool:
    rank, ranks = communicator.rank, communicator.world_size
    length = 21
    block = _empty(2 * ranks + ranks * length)
    words, data = block[: 2 * ranks], block[2 * ranks :]
    words.fill_(first)
    epoch, outputs = _words(first), torch.zeros(ranks, length, dtype=torch.int32)
    context = weft.triton.context(block)
    communicator.barrier()
    right = True
    columns = torch.arange(length, dtype=torch.int32)
    for number in range(rounds):
        inputs = torch.stack([columns + 100 * to + 10000 * rank + number for to in range(ranks)])
        kernels.all_to_all[(1,)](data, inputs, words, context, outputs, epoch, length, 32)
        for source in range(ranks):
            right &= torch.equal(outputs[source], columns + 100 * rank + 10000 * source + number)
    weft.check()
    communicator.barrier()
    return right


def _barriers(communicator: weft.Communicator, first: int) -> int:
    ranks = communicator.world_size
    block = _empty(2 * ranks)
    words, data = block[:ranks], block[ranks:]
    words.fill_(first)
    epoch, errors = _words(first), _words(-1)
    context = weft.triton.context(block)
    communicator.barrier()
    kernels.barriers[(1,)](data, words, context, errors, epoch, 6)
    weft.check()
    communicator.barrier()
    return int(errors)


def _slices(communicator: weft.Communicator, programs: int) -> list[Any]:
    """Number of last programs, and correctness of what arrived, in each of three rounds."""
    length = 4
    count = programs * length
    block = _empty(1 + count)
    words, data = block[:1], block[1:]
    mask, last = _words(0), torch.zeros(programs, dtype=torch.int32)
    outputs = torch.zeros(count, dtype=torch.int32)
    context = weft.triton.context(block)
    found = []
    for epoch in (1, 2, 3):
        kernels.slices[(programs,)](data, words, mask, context, last, epoch, length)
        kernels.receive[(1,)](data, words, context, outputs, epoch, count, 128)
        right = torch.equal(outputs, torch.arange(count, dtype=torch.int32) + epoch)
        found.append([int(last.sum()), right, int(mask)])
        communicator.barrier()
    weft.check()
    return found


def _claims(communicator: weft.Communicator) -> list[int]:
    words, outputs = _empty(1), torch.zeros(10, dtype=torch.int32)
    context = weft.triton.context(words)
    communicator.barrier()
    kernels.claims[(1,)](words, context, outputs, 10)
    communicator.barrier()
    return _list(outputs)


def _contexts(communicator: weft.Communicator) -> dict[str, Any]:
    """A context is that of its allocation; its distances are those of the addresses."""
    tensor, other = _empty(40), _empty(3 << 20)
    context = weft.triton.context(tensor)
    distances = [
        weft.symmetric_peer(other, to).data_ptr() - other.data_ptr()
        for to in range(communicator.world_size)
    ]
    found = weft.triton.context(other)
    return {
        "same": weft.triton.context(tensor[5:]) is context,
        "version": _table_version(tensor) == layout.LAYOUT_VERSION,
        "table": int(found[0]) == symmetric.table(other) == symmetric.table(tensor),
        "distances": found[2 : 2 + communicator.world_size].tolist() == distances,
        "refused": device_native.named(lambda: weft.triton.context(torch.zeros(3)))[0],
    }


def _table_version(tensor: torch.Tensor) -> int:
    at = symmetric.table(tensor) + layout.TABLE_VERSION
    return int.from_bytes(ctypes.string_at(at, 4), sys.byteorder)


def expired() -> dict[str, Any]:
    """Rank 0 waits for a word that rank 1 does not raise, and rank 1 for rank 0 meanwhile."""
    with weft.init() as communicator:
        block = _empty(3)
        context = weft.triton.context(block, timeout=0.3 if communicator.rank == 0 else 40.0)
        outputs = _words(5, 5)
        communicator.barrier()
        # The word is two rounds behind.
        block[0] = 3
        kernels.receive[(1,)](block[1:], block[:1], context, outputs, 5, 2, 2)
        error = device_native.named(weft.check)
        again = outputs.tolist()
        # Later waits end at once.
        kernels.receive[(1,)](block[1:], block[:1], context, outputs, 6, 2, 2)
        return {"outputs": again, "again": outputs.tolist(), "error": error}


def orders(grids: int) -> list[list[Any]]:
    """Orders of tiles of random grids."""
    generator, found = random.Random(1), []
    for _ in range(grids):
        rows, columns = generator.randint(1, 20), generator.randint(1, 9)
        ranks = generator.randint(1, 9)
        rank = generator.randrange(ranks)
        outputs = torch.full((256, 3), -1, dtype=torch.int32)
        kernels.tiles[(1,)](outputs, rows, columns, rank, ranks, 256)
        found.append([rows, columns, rank, ranks, outputs[: rows * columns].tolist()])
    return found
