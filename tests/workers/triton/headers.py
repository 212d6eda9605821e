"""CUDA C++ device headers, compiled for the host, beside the functions in `weft.triton`."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

import weft
import weft.triton
from tests.workers.triton import kernels
from tests.workers.triton.calls import FIRST
from weft.gpu import symmetric
from weft.triton import layout

_U32 = ctypes.c_uint32


def _library(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    pointer = ctypes.c_void_p
    library.put_signal.argtypes = [pointer, pointer, ctypes.c_uint64, pointer, _U32]
    library.signal_word.argtypes = [pointer, _U32]
    library.wait_at_least.argtypes = [pointer, pointer, _U32, _U32, _U32, _U32]
    library.barrier.argtypes = [pointer, pointer, _U32, _U32]
    for function in (library.reached, library.wait_at_least, library.barrier):
        function.restype = ctypes.c_bool
    return library


def together(library: str, rounds: int) -> dict[str, Any]:
    """Rounds of ranks that use the headers (the even ones) and Triton (the odd ones) by turns."""
    headers = _library(library)
    with weft.init() as communicator:
        return {
            "ring": [_ring(headers, communicator, first, rounds) for first in FIRST],
            "barriers": [_barriers(headers, communicator, first) for first in FIRST],
        }


def _ring(
    headers: ctypes.CDLL, communicator: weft.Communicator, first: int, rounds: int
) -> list[list[int]]:
    """The kernel `ring`, or the same by the headers."""
    rank, ranks = communicator.rank, communicator.world_size
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    length, window = 16, 2
    block = weft.symmetric_empty(4 + window * length, torch.int32, device="twin")
    words, data = block[:4], block[4:]
    words.fill_(first)
    epochs = torch.tensor([first], dtype=torch.int32)
    outputs = torch.zeros(length, dtype=torch.int32)
    context = weft.triton.context(block)
    table, arrived = symmetric.table(block), words.data_ptr()
    communicator.barrier()
    found = []
    for number in range(1, rounds + 1):
        if rank % 2:
            kernels.ring[(1,)](data, words, context, outputs, epochs, length, window)
        else:
            epoch = first + number
            slot = epoch % 2**32 % window
            fine = headers.wait_at_least(table, arrived + 4, epoch - window, after, 0, 64)
            theirs = weft.symmetric_peer(block, after)
            values = torch.full((length,), rank * 1000 + number, dtype=torch.int32)
            into = theirs[4 + slot * length :]
            sizes = (values.nbytes, theirs.data_ptr(), epoch)
            headers.put_signal(into.data_ptr(), values.data_ptr(), *sizes)
            fine &= headers.wait_at_least(table, arrived, epoch, before, 0, 64)
            outputs = data[slot * length :][:length].clone() if fine else outputs.fill_(-1)
            headers.signal_word(weft.symmetric_peer(words[1:], before).data_ptr(), epoch)
        found.append(sorted(set(outputs.tolist())))
    weft.check()
    communicator.barrier()
    return found


def _barriers(headers: ctypes.CDLL, communicator: weft.Communicator, first: int) -> int:
    """The kernel `barriers`, or the same by the headers: error count."""
    rank, ranks = communicator.rank, communicator.world_size
    block = weft.symmetric_empty(2 * ranks, torch.int32, device="twin")
    words, data = block[:ranks], block[ranks:]
    words.fill_(first)
    epochs, errors = torch.tensor([first], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    context = weft.triton.context(block)
    table = symmetric.table(block)
    theirs = [weft.symmetric_peer(block, to) for to in range(ranks)]
    addresses = (ctypes.c_void_p * ranks)(*(each.data_ptr() for each in theirs))
    communicator.barrier()
    count = 5
    if rank % 2:
        kernels.barriers[(1,)](data, words, context, errors, epochs, count)
    else:
        for epoch in range(first + 1, first + 1 + 2 * count, 2):
            for each in theirs:
                # As int32.
                each[ranks + rank] = (epoch + 2**31) % 2**32 - 2**31
            errors += not headers.barrier(table, addresses, epoch, 65)
            errors += int((data != data[rank]).sum())
            errors += not headers.barrier(table, addresses, epoch + 1, 65)
    weft.check()
    communicator.barrier()
    return int(errors)


def failures(library: str) -> dict[str, Any]:
    """Tables and records after expired and aborted waits, from the headers and from Triton."""
    headers = _library(library)
    found: dict[str, Any] = {}
    for name, aborted in (("expired", 0), ("aborted", 1), ("barrier", 0)):
        for side in ("headers", "triton"):
            table = np.zeros(layout.TABLE_BYTES, np.uint8)
            record, abort = np.zeros(128, np.uint8), np.array([aborted], np.uint32)
            fields = {
                layout.TABLE_LIMIT_NS: 50_000_000 if not aborted else 2**64 - 1,
                layout.TABLE_RECORD: record.ctypes.data,
                layout.TABLE_ABORT: abort.ctypes.data,
            }
            for at, value in fields.items():
                table[at : at + 8].view(np.uint64)[0] = value
            table[layout.TABLE_RANK : layout.TABLE_RANK + 4].view(np.uint32)[0] = 3
            table[layout.TABLE_RANKS : layout.TABLE_RANKS + 4].view(np.uint32)[0] = 5
            # One rank is late at a barrier.
            words = torch.tensor([5, 6, 5, 5, -9], dtype=torch.int32)
            address, late = table.ctypes.data, words[4:].data_ptr()
            if side == "triton":
                fine = _waited(table, words, barrier=name == "barrier")
            elif name == "barrier":
                everywhere = (ctypes.c_void_p * 5)(*[words.data_ptr()] * 5)
                fine = headers.barrier(address, everywhere, 5, layout.PHASE_BARRIER)
            else:
                fine = headers.wait_at_least(address, late, 5, 4, 7, layout.PHASE_WAIT)
            # Only the clock differs.
            looked = table[layout.TABLE_LOOKED_NS : layout.TABLE_LOOKED_NS + 8].view(np.uint64)
            was_looked, looked[0] = bool(looked[0]), 0
            table[layout.TABLE_RECORD : layout.TABLE_ABORT + 8] = 0
            found[f"{name} {side}"] = [fine, was_looked, table.tolist(), record.tolist()]
    return found


def _waited(
    table: np.ndarray[Any, np.dtype[np.uint8]], words: torch.Tensor, *, barrier: bool
) -> bool:
    """Outcome in Triton with this table: rank 3 of 5 waits for rank 4, or for all."""
    halves = np.zeros(layout.CONTEXT_BYTES // 4, np.uint32)
    halves.view(np.uint64)[layout.CONTEXT_TABLE // 8] = table.ctypes.data
    halves[layout.CONTEXT_RANK // 4] = 3
    halves[layout.CONTEXT_RANKS // 4] = 5
    context = torch.from_numpy(halves.view(np.int64))
    outputs = torch.zeros(1, dtype=torch.int32)
    if barrier:
        kernels.meet[(1,)](words, context, outputs, 5)
    else:
        kernels.wait_for[(1,)](words[4:], context, outputs, 5, 4, 7)
    return bool(outputs)


def reader(state: list[list[int]], source: int, word: int, rounds: int) -> dict[str, Any]:
    """A kernel's wait for a word in host memory, with this state of the words and their readers."""
    words, readers = np.array(state[0], np.uint32), np.array(state[1], np.uint64)
    table = np.zeros(layout.TABLE_BYTES, np.uint8)
    record, abort = np.zeros(128, np.uint8), np.zeros(1, np.uint32)
    for at, value in {
        layout.TABLE_LIMIT_NS: 50_000_000,
        layout.TABLE_RECORD: record.ctypes.data,
        layout.TABLE_ABORT: abort.ctypes.data,
        layout.TABLE_RING: 1,
        layout.TABLE_WORDS: words.ctypes.data,
        layout.TABLE_READERS: readers.ctypes.data,
    }.items():
        table[at : at + 8].view(np.uint64)[0] = value
    for at, value in {
        layout.TABLE_WORDS_EACH: len(words) // 2,
        layout.TABLE_PROXY_RANKS: 2,
    }.items():
        table[at : at + 4].view(np.uint32)[0] = value
    state64 = np.zeros(layout.CONTEXT_BYTES // 8, np.uint64)
    state64[layout.CONTEXT_TABLE // 8] = table.ctypes.data
    context, outputs = torch.from_numpy(state64.view(np.int64)), torch.zeros(1, dtype=torch.int32)
    wanted = (rounds + 2**31) % 2**32 - 2**31
    kernels.remote_receive[(1,)](context, outputs, source, word, wanted)
    return {
        "fine": bool(outputs[0]),
        "words": words.tolist(),
        "readers": readers.tolist(),
        "record": record.tolist(),
    }


def comparisons(library: str, pairs: list[list[int]]) -> dict[str, list[list[int]]]:
    """`reached` for each pair, by both."""
    headers = _library(library)
    seen, epochs = torch.tensor(pairs, dtype=torch.int32).unbind(1)
    outputs = torch.zeros(2, len(pairs), dtype=torch.int32)
    kernels.comparisons[(1,)](seen.contiguous(), epochs.contiguous(), outputs, len(pairs))
    return {
        "headers": [[int(headers.reached(_U32(a), _U32(b))), a + 1] for a, b in pairs],
        "triton": outputs.T.tolist(),
    }
