// Team: warps in a block that share a named barrier.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

constexpr u32 WARP = 32;

struct Team {
    u32 name, thread, threads;
    WEFT_DEVICE void sync() const { ptx::named_barrier(name, threads); }
    // sync; true if `mine` is true in all threads.
    WEFT_DEVICE bool all(bool mine) const { return ptx::named_barrier_all(name, threads, mine); }
};

WEFT_DEVICE u32 lane_of_thread() { return threadIdx.x % WARP; }
WEFT_DEVICE u32 warp_of_thread() { return threadIdx.x / WARP; }

} // namespace weft
