// Chunk calls: chunk rings between blocks, with a flag for each chunk, run by teams of warps.
//
// Teams in a block: senders copy input chunks into peer rings; a ring's receivers reduce or copy what arrives. A
// dedicated warp raises a team's flags, so that no warp that moves data waits for a fence.
//
// # Credits
// In a call, each rank pair exchanges the same number of chunks in both directions; some may be empty. A rank sends
// chunk j to a peer after it has consumed chunk j - RING_CHUNKS / 2 from that peer, which the peer sent after it had
// consumed chunk j - RING_CHUNKS from this rank: the place for chunk j is free. In an all-reduce, a rank also sends
// contribution j after it has consumed result j - RING_CHUNKS from that peer; so the place for result j, which the peer
// sends after contribution j, is free. Sequence numbers continue from call to call.
#pragma once
#include "collectives/channel.cuh"

namespace weft::collectives {

// A call in this block: chunks for each pair, and the sequence numbers at which they begin. In shared memory.
struct Call {
    u32 base[2][RANKS]; // by ring
    u32 count[RANKS];   // chunks per pair, in the longer direction; chunk c in a message belongs to block c % gridDim.x
    u32 most;           // largest count
    u32 failed;         // nonzero once a wait has failed
    u32 chunk_bytes;

    // All threads in the block call this; a block barrier follows.
    WEFT_DEVICE void begin(const Channel &channel, const Watch &watch) {
        const Arguments &args = channel.args;
        for (u32 p = threadIdx.x; p < RANKS; p += blockDim.x) {
            const Message &message = args.message[p];
            base[CONTRIBUTED][p] = *channel.sequence(CONTRIBUTED, p);
            base[REDUCED][p] = *channel.sequence(REDUCED, p);
            count[p] = p == args.rank ? 0 : chunks_of(message.longer, args.chunk_bytes);
        }
        if (threadIdx.x == 0) failed = channel.closed() || watch.dead(), chunk_bytes = args.chunk_bytes;
        __syncthreads();
        if (threadIdx.x == 0) {
            most = 0;
            for (u32 p = 0; p < RANKS; ++p) most = max(most, count[p]);
        }
    }

    // All threads call this after the block's last barrier.
    WEFT_DEVICE void end(const Channel &channel, bool reduced) const {
        for (u32 p = threadIdx.x; p < RANKS; p += blockDim.x) {
            *channel.sequence(CONTRIBUTED, p) = base[CONTRIBUTED][p] + count[p];
            if (reduced) *channel.sequence(REDUCED, p) = base[REDUCED][p] + count[p];
        }
    }

    WEFT_DEVICE bool has_failed() const { return *const_cast<const volatile u32 *>(&failed) != 0; }

    // Offset where this block's chunk begins in its message.
    WEFT_DEVICE u64 start(u32 index) const { return (static_cast<u64>(index) * gridDim.x + blockIdx.x) * chunk_bytes; }
    // Chunk length; 0 behind the message end.
    WEFT_DEVICE u32 length(u32 index, u64 bytes) const {
        const u64 from = start(index);
        return from >= bytes ? 0 : static_cast<u32>(min(static_cast<u64>(chunk_bytes), bytes - from));
    }

    // Number of chunks in a message for this block.
    static WEFT_DEVICE u32 chunks_of(u64 bytes, u32 chunk_bytes) {
        const u64 all = (bytes + chunk_bytes - 1) / chunk_bytes;
        return all <= blockIdx.x ? 0 : static_cast<u32>((all - blockIdx.x - 1) / gridDim.x + 1);
    }
};

// Progress for the warps in a team: chunks that each has finished, in order.
template <u32 WARPS> struct Progress {
    u32 done[WARPS];

    // One thread calls this before a block barrier.
    WEFT_DEVICE void clear() {
        for (u32 i = 0; i < WARPS; ++i) done[i] = 0;
    }

    // All lanes in the team's warp `warp` call this. Releases the accesses by all lanes.
    WEFT_DEVICE void finish(u32 warp, u32 count) {
        __syncwarp();
        if (lane_of_thread() == 0) ptx::store_release_cta(done + warp, count);
    }

    // Waits until all warps have finished `count` chunks; false once the call has failed. All lanes in a warp call
    // this. Acquire. Bounded, since the team's waits are.
    WEFT_DEVICE bool wait(u32 count, const Call &call) const {
        for (;;) {
            bool all = true;
            for (u32 i = lane_of_thread(); i < WARPS; i += WARP) all &= ptx::load_acquire_cta(done + i) >= count;
            const bool done = __all_sync(~0u, all);
            __syncwarp(); // orders the lanes' acquires before later accesses by all lanes
            if (done) return true;
            if (__any_sync(~0u, call.has_failed())) return false;
        }
    }

    // Number of chunks that all warps have finished. All lanes in a warp call this. Acquire.
    WEFT_DEVICE u32 least() const {
        u32 least = ~0u;
        for (u32 i = lane_of_thread(); i < WARPS; i += WARP) least = min(least, ptx::load_acquire_cta(done + i));
        least = __reduce_min_sync(~0u, least);
        __syncwarp();
        return least;
    }

    // As `least`, by one thread.
    WEFT_DEVICE u32 least_alone() const {
        u32 least = ~0u;
        for (u32 i = 0; i < WARPS; ++i) least = min(least, ptx::load_acquire_cta(done + i));
        return least;
    }
};

// Copies whole units between aligned places. All threads in a team call this; relaxed.
WEFT_DEVICE void copy_units(const u8 *from, u8 *to, u32 bytes, u32 thread, u32 threads) {
    constexpr u32 UNROLL = 4; // loads in flight
    const u32 step = threads * UNIT;
    u32 at = thread * UNIT;
    for (; at + (UNROLL - 1) * step < bytes; at += UNROLL * step) {
        uint4 value[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) value[i] = ptx::load_stream(from + at + i * step);
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) ptx::store_stream(to + at + i * step, value[i]);
    }
    for (; at < bytes; at += step) ptx::store_stream(to + at, ptx::load_stream(from + at));
}

// Copies a chunk from user memory to a place in a ring. All threads in a team call this; relaxed.
WEFT_DEVICE void copy_to_ring(const UserBytes &from, u64 begin, u32 bytes, u8 *to, u32 thread, u32 threads) {
    const u32 whole = from.aligned ? bytes / UNIT * UNIT : 0;
    copy_units(from.begin + begin, to, whole, thread, threads);
    for (u32 at = whole + thread * UNIT; at < bytes; at += threads * UNIT) ptx::store_stream(to + at, from.load(begin + at));
}

// Copies a chunk from a place in a ring to user memory. All threads in a team call this.
WEFT_DEVICE void copy_from_ring(const u8 *from, const UserBytes &to, u64 begin, u32 bytes, u32 thread, u32 threads) {
    const u32 whole = to.aligned ? bytes / UNIT * UNIT : 0;
    copy_units(from, to.begin + begin, whole, thread, threads);
    for (u32 at = whole + thread * UNIT; at < bytes; at += threads * UNIT) to.store(begin + at, ptx::load_stream(from + at));
}

// Copies this block's chunks in this rank's message to itself, if it goes elsewhere.
WEFT_DEVICE void copy_own(const Arguments &args, const Call &call, u32 thread, u32 threads) {
    const UserBytes from = sent_to(args, args.rank), to = received_from(args, args.rank);
    if (from.begin == to.begin) return;
    const u32 count = Call::chunks_of(to.bytes, call.chunk_bytes), step = threads * UNIT;
    for (u32 i = 0; i < count; ++i) {
        const u64 begin = call.start(i);
        const u32 bytes = call.length(i, to.bytes), whole = to.aligned ? bytes / UNIT * UNIT : 0;
        copy_units(from.begin + begin, to.begin + begin, whole, thread, threads);
        for (u32 at = whole + thread * UNIT; at < bytes; at += step) to.store(begin + at, from.load(begin + at));
    }
}

// Waits until `count` chunks have arrived from a peer; false on timeout, which fails the call. All lanes in a warp call
// this; acquire.
WEFT_DEVICE bool wait_chunk(const Watch &watch, const Channel &channel, Call &call, u32 ring, u32 peer, u32 count) {
    bool arrived = true;
    if (lane_of_thread() == 0) {
        arrived = wait_at_least(watch, channel.flag(ring, channel.args.rank, peer), count, peer, count);
        if (!arrived) *const_cast<volatile u32 *>(&call.failed) = 1;
    }
    arrived = __shfl_sync(~0u, arrived, 0);
    __syncwarp(); // orders the acquire before later accesses by all lanes
    return arrived;
}

// Sender team: sends contributions. `may_send(index)` waits for the credits for chunks at that index. All lanes in a
// team warp call this.
template <u32 WARPS, class Credits>
WEFT_DEVICE void send_chunks(const Channel &channel, const Call &call, u32 warp, Progress<WARPS> &sent, Credits may_send) {
    const Arguments &args = channel.args;
    const u32 thread = warp * WARP + lane_of_thread();
    u32 steps = 0;
    for (u32 i = 0; i < call.most; ++i) {
        if (!may_send(i)) return;
        for (u32 step = 1; step < RANKS; ++step) {
            const u32 p = peer_of(args, step);
            if (i >= call.count[p]) continue;
            const UserBytes from = sent_to(args, p);
            u8 *to = channel.chunk(CONTRIBUTED, p, args.rank, call.base[CONTRIBUTED][p] + i);
            copy_to_ring(from, call.start(i), call.length(i, from.bytes), to, thread, WARPS * WARP);
            sent.finish(warp, ++steps);
        }
    }
}

// Raises the contribution flags, in `send_chunks` order. All lanes in one warp call this. Memory order: acquires the
// progress from all senders, then one release fence at system scope for all complete chunks.
template <u32 WARPS> WEFT_DEVICE void raise_sent(const Channel &channel, const Call &call, const Progress<WARPS> &sent) {
    const Arguments &args = channel.args;
    u32 steps = 0, complete = 0;
    for (u32 i = 0; i < call.most; ++i) {
        for (u32 step = 1; step < RANKS; ++step) {
            const u32 p = peer_of(args, step);
            if (i >= call.count[p]) continue;
            if (++steps > complete) {
                if (!sent.wait(steps, call)) return;
                complete = sent.least();
                release_many();
            }
            if (lane_of_thread() == 0) signal_released(channel.flag(CONTRIBUTED, p, args.rank), call.base[CONTRIBUTED][p] + i + 1);
        }
    }
}

// Fills this block's part in all outputs with 0xFF bytes.
WEFT_DEVICE void poison_outputs(const Arguments &args, const Call &call) {
    for (u32 p = 0; p < RANKS; ++p) {
        const UserBytes out = received_from(args, p);
        for (u32 i = 0; i < Call::chunks_of(out.bytes, call.chunk_bytes); ++i)
            for (u32 at = threadIdx.x * UNIT; at < call.length(i, out.bytes); at += blockDim.x * UNIT) out.poison(call.start(i) + at);
    }
}

// Ends a chunk call. All threads in the block call this.
WEFT_DEVICE void end_chunks(const Arguments &args, const Channel &channel, const Call &call, bool reduced) {
    __syncthreads();
    if (threadIdx.x == 0) start_next_kernel();
    if (call.failed != 0) poison_outputs(args, call);
    else call.end(channel, reduced);
}

} // namespace weft::collectives
