// How the blocks of a launch begin and end, and how they share out work.
#pragma once
#include "moe/shape.cuh"

namespace weft::moe {

// Round of a block: its epoch.
struct Round {
    u32 epoch;
    bool live; // false on a dead communicator: the block exits
};

// The round of this block, for its end: kept here rather than in a register all the while.
__shared__ Round round_here;

// All threads of the block. `first` is the first phase of this launch. `meanwhile()` runs in all threads while
// memory answers; it must not depend on the round, nor write what another launch may still read.
//
// A block adds its share to what has entered its phases. What had entered before, in whole launches, is its
// round: the others of its own launch do not make up another one. So nobody has to raise an epoch, and a
// replayed graph finds the next one. As many rounds must have left the phases of this launch, and those after
// it; one more those before it. Two launches at once on one channel, or calls out of order, show in that at
// once, and kill the communicator.
template <class Meanwhile>
WEFT_DEVICE Round enter(const Arguments &a, const Channel &mine, const Watch &watch, u32 first, u32 last, Meanwhile meanwhile) {
    Round &round = round_here;
    State *state = mine.state();
    u64 entered = 0;
    u32 left[4]; // the lower halves, which suffice to compare
    u32 dead = 0, first_epoch = 0;
    const bool asks = threadIdx.x == blockDim.x - 1; // whose warp has the least to do meanwhile
    if (asks) {
        const u64 own_share = share(blockIdx.x, gridDim.x);
        entered = atomicAdd(&state->entered[first], own_share);
        for (u32 p = first + 1; p <= last; ++p) atomicAdd(&state->entered[p], own_share);
#pragma unroll
        for (u32 p = 0; p < 4; ++p) left[p] = static_cast<u32>(*reinterpret_cast<volatile u64 *>(&state->left[p]));
        first_epoch = *reinterpret_cast<volatile u32 *>(&state->first_epoch);
        dead = *reinterpret_cast<volatile u32 *>(&watch.table->dead) | *reinterpret_cast<volatile u32 *>(&state->closed);
    }
    meanwhile();
    if (asks) {
        const u64 rounds = entered / SHARES;
        round.epoch = epoch_of(first_epoch, rounds);
        round.live = dead == 0;
#pragma unroll
        for (u32 p = 0; p < 4; ++p) {
            // Of the phases of this launch, blocks that are done have left already.
            const bool own = p >= first && p <= last;
            const u64 expected = rounds + (p < first ? 1 : 0);
            const u32 ahead = left[p] - static_cast<u32>(expected) * SHARES;
            if (ahead < (own ? SHARES : 1) || !round.live) continue;
            const bool running = p == first || left[p] % SHARES != 0;
            watch.fail(running ? CONCURRENT : ORDER, a.rank, p, expected, state->left[p] / SHARES);
            round.live = false;
        }
    }
    __syncthreads();
    return round;
}

// All threads of the block, at its end; `failed` if one of its waits did. True if outputs are to be poisoned.
WEFT_DEVICE bool leave(const Channel &mine, u32 first, u32 last, bool failed) {
    const bool poisoned = __syncthreads_or(failed || !round_here.live);
    if (threadIdx.x == 0) {
        State *state = mine.state();
        if (first == DISPATCH_SEND && blockIdx.x == 0) state->combine_ticket = state->add_ticket = 0;
        if (first == COMBINE_SEND && blockIdx.x == 0) state->send_ticket = state->receive_ticket = 0;
        for (u32 p = first; p <= last; ++p) atomicAdd(&state->left[p], static_cast<u64>(share(blockIdx.x, gridDim.x)));
    }
    return poisoned;
}

// Fills memory with 0xFF bytes: NaN in every float type.
__device__ __noinline__ void poison(u64 address, u64 bytes) {
    if (address == 0) return;
    u8 *to = reinterpret_cast<u8 *>(address);
    const u64 whole = bytes / 16 * 16;
    for (u64 at = 16ull * threadIdx.x; at < whole; at += 16ull * blockDim.x)
        ptx::store_stream(to + at, make_uint4(~0u, ~0u, ~0u, ~0u));
    for (u64 at = whole + threadIdx.x; at < bytes; at += blockDim.x) to[at] = 0xFF;
}

// The `item`th of all rows, taken from the sources in turn while they have any, beginning behind `rank`, so
// that ranks do not all write to one. False if there are not so many.
WEFT_DEVICE bool locate(const u32 *rows, u32 item, u32 rank, u32 &source, u32 &slot) {
    for (u32 level = 0;;) {
        u32 active = 0, next = ~0u;
        for (u32 s = 0; s < RANKS; ++s)
            if (rows[s] > level) active += 1, next = min(next, rows[s]);
        if (active == 0) return false;
        const u64 here = static_cast<u64>(next - level) * active;
        if (item < here) {
            slot = level + item / active;
            u32 nth = item % active;
            for (u32 step = 1;; ++step) {
                source = rank + step < RANKS ? rank + step : rank + step - RANKS;
                if (rows[source] > level && nth-- == 0) return true;
            }
        }
        item -= static_cast<u32>(here);
        level = next;
    }
}

} // namespace weft::moe
