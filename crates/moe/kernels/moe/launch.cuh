// Entry and exit for the blocks in a launch, and how they divide the work.
#pragma once
#include "moe/shape.cuh"

namespace weft::moe {

// A block's round.
struct Round {
    u32 epoch;
    bool live; // false on a dead communicator: the block exits
};

// This block's round, in shared memory to save a register.
__shared__ Round round_here;
// Warps in this block that have passed the last wait for a peer.
__shared__ u32 warps_past_waits;

// Block entry, called by all threads in the block, in a launch with phases `first` to `last`. `meanwhile()` runs in all
// threads while loads are in flight, after the previous kernel has ended; it must be independent from the round.
//
// A block adds a share to the entry counts for its phases. The number of complete launches counted before is the round,
// since the other blocks in the launch add up to less than one. The epoch follows from the entry count, so a replayed
// graph gets the next one. The exit counts must equal that round in this launch's phases and later ones, and one more
// in earlier ones. Concurrent launches on one channel, or calls out of order, violate this and fail the communicator.
//
// Entry counts are added before the previous kernel in the stream has ended: all blocks in all earlier kernels have
// entered by then, since a kernel starts after every block in the preceding kernel has started and passed its own
// entry.
template <class Meanwhile>
WEFT_DEVICE Round enter(const Arguments &a, const Channel &mine, const Watch &watch, u32 first, u32 last, Meanwhile meanwhile) {
    Round &round = round_here;
    State *state = mine.state();
    u64 entered = 0;
    u32 left[4]; // lower 32 bits, sufficient for the comparison
    u32 dead = 0, first_epoch = 0;
    const bool asks = threadIdx.x == blockDim.x - 1; // the last warp has the least work in `meanwhile`
    if (asks) {
        const u64 own_share = share(blockIdx.x, gridDim.x);
        entered = atomicAdd(&state->entered[first], own_share);
        for (u32 p = first + 1; p <= last; ++p) atomicAdd(&state->entered[p], own_share);
        warps_past_waits = 0;
    }
    wait_for_previous_kernel();
    if (asks) {
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
            // In this launch's phases, finished blocks have already added their exit shares.
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

// Called once by each of the block's `warps` warps that wait for peers, after the last wait: the next kernel may start
// while this one ends.
WEFT_DEVICE void past_waits(u32 warps) {
    if (lane_of_thread() == 0 && atomicAdd(&warps_past_waits, 1) + 1 == warps) start_next_kernel();
}

// Block exit, called by all threads in the block; `failed`: a wait in this thread failed. True if outputs must be
// poisoned.
WEFT_DEVICE bool leave(const Channel &mine, u32 first, u32 last, bool failed) {
    const bool poisoned = __syncthreads_or(failed || !round_here.live);
    if (threadIdx.x == 0) {
        start_next_kernel();
        State *state = mine.state();
        if (first == DISPATCH_SEND && blockIdx.x == 0) state->combine_ticket = state->add_ticket = 0;
        if (first == COMBINE_SEND && blockIdx.x == 0) state->send_ticket = state->receive_ticket = 0;
        for (u32 p = first; p <= last; ++p) atomicAdd(&state->left[p], static_cast<u64>(share(blockIdx.x, gridDim.x)));
    }
    return poisoned;
}

// Count packet flag: it holds a kept plan's key.
constexpr u32 KEPT = 1u << 31;

// Key for a plan made in this round, equal on every rank; nonzero.
WEFT_DEVICE u32 own_key(const Arguments &a, u32 epoch) { return max((a.number * 0x9E3779B1u ^ epoch) & ~KEPT, 1u); }

// Records the sent token count for combine, and the key for a later round with this plan. One thread.
WEFT_DEVICE void note_sent(const Arguments &a, const Channel &mine, u32 tokens, u32 epoch) {
    mine.state()->sent = tokens;
    if (a.kept) return;
    mine.received()[SENT] = tokens;
    mine.received()[KEY] = own_key(a, epoch);
}

// Sends every rank the kept plan's key, in place of counts. By `threads` threads.
WEFT_DEVICE void send_keys(const Arguments &a, u32 epoch, u32 thread, u32 threads) {
    const u32 key = channel(a, a.rank).received()[KEY];
    for (u32 i = thread; i < RANKS * (LOCAL + 1); i += threads)
        ptx::store_relaxed_sys(channel(a, i / (LOCAL + 1)).counts(a.rank) + i % (LOCAL + 1), packet(epoch, KEPT | key));
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

// Row number `item` in round-robin order over the sources, starting after `rank`, so that ranks write to
// different peers. False past the last row.
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
