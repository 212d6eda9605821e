"""Machine code for a kernel's side of the proxy. Kernels are only compiled, which needs no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cuda.test_kernels import need_tools

if TYPE_CHECKING:
    from tests.machine_code import Kernel

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

SOURCE = """
#include "weft/device.cuh"
using namespace weft;

WEFT_DEVICE Watch watching(Table *table) {
    const u32 *abort = reinterpret_cast<const u32 *>(table->abort);
    return {table, reinterpret_cast<Record *>(table->record), abort, table->rank, 0, 64};
}

extern "C" __global__ void pushes(Table *table, u32 peer, u64 source, u64 destination, u64 length) {
    push(watching(table), command_put(peer, 1, COMMAND_HOLD, 0, source, 1, destination, length));
}

extern "C" __global__ void puts(Table *table, float *bytes, u32 peer, u64 source,
                                u64 destination, u64 length) {
    bytes[threadIdx.x] = 1;
    __syncthreads();
    if (warp_of_thread() != 0) return;
    const Watch watch = watching(table);
    release_commands();
    push(watch, command_put(peer, 1, 0, 0, source, 1, destination, length));
    push(watch, command_signal(peer, 2, 0));
    push(watch, command_scatter(0, 3, 0, 0, source, 1, destination, peer, 0));
    push(watch, command_drained(0));
}

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void bulk_puts(Table *table, void *bytes, u32 peer, u64 length) {
    extern __shared__ __align__(128) u8 stage[];
    if (threadIdx.x == 0) {
        ptx::bulk_store(bytes, stage, 1024);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
    }
    __syncthreads();
    if (warp_of_thread() != 0) return;
    release_commands();
    push(watching(table), command_put(peer, 1, 0, 0, 0, 1, 0, length));
}
#endif

extern "C" __global__ void receives(Table *table, const float *bytes, float *sum,
                                    u32 source, u32 rounds) {
    __shared__ bool arrived;
    if (threadIdx.x == 0) arrived = wait_rounds(watching(table), source, 1, rounds);
    __syncthreads();
    if (arrived) sum[threadIdx.x] = bytes[threadIdx.x];
}

extern "C" __global__ void waits(Table *table, const float *bytes, float *sum,
                                 u32 source, u32 rounds) {
    const Watch watch = watching(table);
    __shared__ bool arrived;
    if (threadIdx.x == 0) arrived = wait_rounds(watch, source, 1, rounds);
    __syncthreads();
    if (arrived) sum[threadIdx.x] = bytes[threadIdx.x];
    __syncthreads();
    if (warp_of_thread() == 0) push(watch, command_release(source, 1, 1));
}
"""

#: Maximum registers for a thread, so that a push fits beside a kernel's own work.
MOST_REGISTERS = 48


@pytest.fixture(params=["sm_80", "sm_90a", "sm_100a"])
def kernels(request: pytest.FixtureRequest) -> dict[str, Kernel]:
    need_tools()
    from tests.machine_code import compiled

    return compiled([], request.param, SOURCE)


def fences(kernel: Kernel, scope: str) -> list[str]:
    """Fences with this scope."""
    lines = [line for line in kernel.code if line.startswith("MEMBAR")]
    return [line for line in lines if scope in line.split()[0].split(".")]


def test_a_quarter_is_one_store_of_16_bytes(kernels: dict[str, Kernel]) -> None:
    for name, commands in ("pushes", 1), ("puts", 4), ("waits", 1):
        kernel = kernels[name]
        # Four lanes store a command's quarters by one instruction.
        assert len(kernel.each("STG.E.128.STRONG.SYS")) == commands, name
        # The other store is the code in a failure record.
        strong = [line.split()[0] for line in kernel.having("STG", "STRONG", "SYS")]
        assert strong.count("STG.E.STRONG.SYS") == len(strong) - commands == 1, name


def test_commands_are_released_by_one_fence(kernels: dict[str, Kernel]) -> None:
    for name, released in ("pushes", 0), ("puts", 1), ("waits", 0):
        # One more precedes the code in a failure record.
        assert len(fences(kernels[name], "SYS")) == released + 1, name
        if name != "waits":
            assert not fences(kernels[name], "GPU"), name
    puts = kernels["puts"]
    assert puts.code.index(fences(puts, "SYS")[0]) < puts.each("STG.E.128.STRONG.SYS")[0]


def test_a_bulk_store_is_complete_before_the_barrier(kernels: dict[str, Kernel]) -> None:
    """Not only read from shared memory: full completion ends with an L1 invalidation."""
    if "bulk_puts" not in kernels:
        pytest.skip("this architecture has no bulk copies")
    code = kernels["bulk_puts"].code
    names = [line.split()[0].partition(".")[0] for line in code]
    waits = names.index("DEPBAR", names.index("UBLKCP"))
    barrier = names.index("BAR", waits)
    assert "CCTL.IVALL" in code[waits:barrier]
    assert "MEMBAR" in names[barrier : names.index("STG", barrier)]


def acquires(kernel: Kernel, width: str = "E") -> list[int]:
    """Positions of loads at system scope, with this part in the name, that acquire."""
    loads = [
        at for at, line in enumerate(kernel.code)
        if {"STRONG", "SYS", width} <= set(line.split()[0].split(".")) and line.startswith("LD")
    ]  # fmt: skip
    return [at for at in loads if any("CCTL.IVALL" in line for line in kernel.code[at : at + 6])]


def test_waits_acquire_in_one_thread(kernels: dict[str, Kernel]) -> None:
    """Each read of the word, by the reader or beside it, acquires before the block's barrier."""
    receives = kernels["receives"]
    barrier = next(at for at, line in enumerate(receives.code) if line.startswith("BAR.SYNC"))
    loads = [at for at, line in enumerate(receives.code) if line.startswith("LD")]
    words = [at for at in receives.each("LDG.E.STRONG.SYS") if at < barrier]
    assert words
    for word in words:
        end = min(at for at in [*loads, barrier] if at > word)
        assert any("CCTL.IVALL" in line for line in receives.code[word:end])
    assert max(receives.each("LDG.E")) > barrier


def test_pushes_acquire_the_count_of_released_tickets(kernels: dict[str, Kernel]) -> None:
    pushes = kernels["pushes"]
    (count,) = acquires(pushes, "64")
    assert count < pushes.each("STG.E.128.STRONG.SYS")[0]


def test_a_words_reader_publishes_with_release_on_its_gpu(kernels: dict[str, Kernel]) -> None:
    waits = kernels["waits"]
    # A new value, and the last one.
    assert len(waits.each("STG.E.64.STRONG.GPU")) == 2
    # One more precedes the exchange that elects the reader.
    assert len(fences(waits, "GPU")) == 3


def test_programs_beside_a_words_reader_acquire_what_it_publishes(
    kernels: dict[str, Kernel],
) -> None:
    code = kernels["receives"].code
    loads = [at for at, line in enumerate(code) if line.startswith("LD")]
    published = kernels["receives"].each("LDG.E.64.STRONG.GPU")
    assert published
    for load in published:
        end = min(at for at in [*loads, len(code)] if at > load)
        assert any("CCTL.IVALL" in line for line in code[load:end])


def test_kernels_keep_to_their_registers(kernels: dict[str, Kernel]) -> None:
    for name in ("pushes", "puts", "waits"):
        assert kernels[name].registers <= MOST_REGISTERS, (name, kernels[name].registers)
        assert not kernels[name].having("LDL") + kernels[name].having("STL"), name
