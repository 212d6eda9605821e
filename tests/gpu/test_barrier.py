"""The device barrier: ranks that re-enter it at once, a hundred thousand times, with jitter."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(200)]

ROUNDS = int(os.environ.get("WEFT_ROUNDS", "100000"))

#: Each rank publishes its round count. Between two barriers counts differ by at most the one
#: round that a rank may be ahead.
SOURCE = """
#include "weft/device.cuh"
using namespace weft;
extern "C" __global__ void rounds(Table *table, Record *records, const u32 *abort,
                                  u32 *const *words, u32 *const *counts,
                                  u32 rank, u32 ranks, u32 rounds, u32 *wrong) {
    const Watch watching{table, records, abort, rank, 0, 0};
    const Team team{1, threadIdx.x, blockDim.x};
    u32 random = rank * 2654435761u + 1;
    for (u32 round = 1; round <= rounds; ++round) {
        random = random * 1664525u + 1013904223u;
        if (random >> 29 == 0) __nanosleep(random >> 22 & 1023);
        if (team.thread == 0) ptx::store_relaxed_sys(counts[rank], round);
        if (!barrier(watching, team, words, ranks, round)) { *wrong = ~0u; return; }
        for (u32 r = team.thread; r < ranks; r += team.threads) {
            const u32 seen = ptx::load_relaxed_sys(counts[r]);
            if (seen != round && seen != round + 1) atomicAdd(wrong, 1u);
        }
        team.sync();
    }
}
"""

#: A table's bytes, and the wait limit's offset.
TABLE_BYTES, LIMIT_AT = 1024, 8


def load() -> tuple[Any, Any]:
    """CUDA's driver, and the kernel as machine code."""
    from tests.machine_code import cubin

    return importlib.import_module("cuda.bindings.driver"), cubin((), "sm_90a", SOURCE)


def test_barriers_back_to_back_let_no_rank_pass_another() -> None:
    import torch

    driver, code = load()
    gpus = torch.cuda.device_count()
    ranks = 4
    places = [torch.device("cuda", rank % gpus) for rank in range(ranks)]
    words = [torch.zeros(ranks, dtype=torch.int32, device=place) for place in places]
    counts = [torch.zeros(1, dtype=torch.int32, device=place) for place in places]
    # Kernels can access other GPUs' memory after torch has copied between them.
    for place in places:
        for other in words:
            torch.zeros(ranks, dtype=torch.int32, device=place).copy_(other)
    keep: list[Any] = []
    streams, wrong = [], []
    for rank, place in enumerate(places):
        table = torch.zeros(TABLE_BYTES // 8, dtype=torch.int64, device=place)
        table[LIMIT_AT // 8] = 60_000_000_000
        others = [torch.zeros(64, dtype=torch.int32, device=place) for _ in range(2)]
        found = torch.zeros(1, dtype=torch.int32, device=place)
        lists = [
            torch.tensor([each.data_ptr() for each in all_], dtype=torch.int64, device=place)
            for all_ in (words, counts)
        ]
        torch.cuda.synchronize(place)
        with torch.cuda.device(place):
            stream = torch.cuda.Stream(place)
            _, module = driver.cuModuleLoadData(code)
            _, function = driver.cuModuleGetFunction(module, b"rounds")
            addresses = [t.data_ptr() for t in (table, *others, *lists)]
            values = (*addresses, rank, ranks, ROUNDS, found.data_ptr())
            types = (*[ctypes.c_void_p] * 5, *[ctypes.c_uint32] * 3, ctypes.c_void_p)
            keep += [table, others, lists, module, stream, values, types, function]
            streams.append((place, stream, function, (values, types)))
        wrong.append(found)
    for place, stream, function, arguments in streams:
        with torch.cuda.device(place):
            launch = driver.cuLaunchKernel
            (status,) = launch(function, 1, 1, 1, 64, 1, 1, 0, stream.cuda_stream, arguments, 0)
            assert status == driver.CUresult.CUDA_SUCCESS
    for _, stream, *_ in streams:
        stream.synchronize()
    assert [int(each.item()) for each in wrong] == [0] * ranks
    assert all(int(word) == ROUNDS for each in words for word in each)
