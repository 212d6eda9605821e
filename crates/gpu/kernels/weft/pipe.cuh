// Bulk-load ring from global to shared memory, and a flag queue to the warp that raises the flags.
#pragma once
#include "weft/team.cuh"
#include "weft/wait.cuh"

namespace weft {

// One warp's bulk loads into a ring with STAGES stages, BYTES bytes each. All lanes call each function; the first
// lane issues. A stage is refilled only after all lanes have passed the proxy fence between ordinary loads and bulk
// copies.
template <u32 STAGES, u32 BYTES> struct LoadRing {
    u8 *stages;
    u64 *full; // [STAGES]
    u32 head = 0, tail = 0;
    u32 parity = 0; // parity for the stage at `tail`

    WEFT_DEVICE LoadRing(u8 *stages, u64 *full) : stages(stages), full(full) {
        if (lane_of_thread() == 0) {
            for (u32 i = 0; i < STAGES; ++i) ptx::mbarrier_init(full + i, 1);
            fence_shared_for_bulk();
        }
        __syncwarp();
    }

    // Issues a load into a free stage: at most STAGES loads are in flight. Only the first lane reads `from`.
    WEFT_DEVICE void push(const void *from, u32 bytes) {
        if (lane_of_thread() == 0) {
            ptx::mbarrier_expect(full + head, bytes);
            ptx::bulk_load(stages + head * BYTES, from, bytes, full + head);
        }
        head = head + 1 == STAGES ? 0 : head + 1;
    }

    WEFT_DEVICE u8 *stage() const { return stages + tail * BYTES; }

    // Waits for the oldest load; false on timeout.
    WEFT_DEVICE bool arrived(const Watch &watch) const {
        if (__all_sync(~0u, wait_phase(full + tail, parity))) return true;
        phase_failed(watch, parity);
        return false;
    }

    // Frees the oldest stage once it has been read, or once its store is complete.
    WEFT_DEVICE void pop() {
        fence_shared_for_bulk();
        __syncwarp();
        tail = tail + 1 == STAGES ? 0 : tail + 1;
        if (tail == 0) parity ^= 1;
    }
};

// Flag queue from a block's warps, whose writes are complete, to the one warp that raises flags: one fence at system
// scope covers all flags present, and the other warps do not wait for it.
template <u32 CAPACITY> struct FlagQueue {
    u32 entry[CAPACITY]; // flag plus 1; 0: empty
    u32 tail, writers;

    // Called by all threads in the block, before a barrier.
    WEFT_DEVICE void clear(u32 warps) {
        for (u32 i = threadIdx.x; i < CAPACITY; i += blockDim.x) entry[i] = 0;
        if (threadIdx.x == 0) tail = 0, writers = warps;
    }

    // Called by all lanes in a warp; lanes with `due` append a flag. The writes behind it are complete.
    WEFT_DEVICE void post(bool due, u32 flag) {
        const u32 all = __ballot_sync(~0u, due), lane = lane_of_thread();
        if (all == 0) return;
        u32 first = 0;
        if (lane == 0) first = atomicAdd(&tail, __popc(all));
        first = __shfl_sync(~0u, first, 0);
        if (!due) return;
        u32 *to = entry + (first + __popc(all & ((1u << lane) - 1))) % CAPACITY;
        __threadfence_block(); // releases the writes that this lane has observed complete
        while (atomicCAS(to, 0u, flag + 1) != 0) {} // the warp that drains never blocks, so this ends
    }

    // Called by all lanes in a warp after the last post.
    WEFT_DEVICE void close() {
        __syncwarp();
        __threadfence_block();
        if (lane_of_thread() == 0) atomicSub(&writers, 1);
    }

    // Called by the raising warp: `raise(flag)` in the lane that holds it, after the fence. Returns after all writers
    // have closed.
    template <class Raise> WEFT_DEVICE void drain(Raise raise) {
        const u32 lane = lane_of_thread();
        for (u32 head = 0;;) {
            const bool last = *reinterpret_cast<volatile u32 *>(&writers) == 0; // read before the entries
            __threadfence_block();
            u32 *from = entry + (head + lane) % CAPACITY;
            const u32 flag = ptx::load_acquire_cta(from);
            const u32 missing = ~__ballot_sync(~0u, flag != 0);
            const u32 some = missing == 0 ? 32 : __ffs(missing) - 1;
            if (some == 0) {
                if (__all_sync(~0u, last)) return;
                ptx::nanosleep(64);
                continue;
            }
            if (lane < some) {
                release_many();
                raise(flag - 1);
                ptx::store_release_cta(from, 0);
            }
            __syncwarp();
            head += some;
        }
    }
};

} // namespace weft
