// Direct calls: tensors in the symmetric heap, which peers write and read themselves.
//
// A block meets the block with its number on each peer twice. On entry all earlier work on this rank's stream has
// ended; once all peers have entered, the tensors on all ranks may be accessed. On exit this block's accesses have
// ended; once all peers have exited, later work on the stream has the results, and may change the tensors. A signal
// carries a call digest, which includes the tensor places, so that ranks whose calls differ do not access them. A
// copy-engine call meets in two one-block kernels, with the copies between them.
#pragma once
#include "collectives/channel.cuh"

namespace weft::collectives {

constexpr u32 OTHER_CALL = WEFT_FIRST_CODE; // the peer makes another call

// Begins a call: the number of meetings before it, and true unless the call must not run. All threads call this.
WEFT_DEVICE bool begin_direct(const Channel &channel, const Watch &watch, u32 &before) {
    wait_for_previous_kernel();
    before = *channel.meetings();
    return !channel.closed() && !watch.dead();
}

// Waits until a peer has come to a meeting in this call; false on timeout, or if its call is another. Acquire. The peer
// may have come to the next meeting already: behind the entry that is the exit from the same call, behind the exit the
// entry to the next one, so that digests are compared on entry.
WEFT_DEVICE bool wait_signal(const Watch &watch, const Channel &channel, u32 peer, u32 meeting) {
    const u64 *word = channel.signal(channel.args.rank, peer);
    PollBudget budget;
    for (;;) {
        const u64 signal = ptx::load_acquire_sys(word);
        const u32 seen = static_cast<u32>(signal >> 32), digest = static_cast<u32>(signal);
        if (reached(seen, meeting)) {
            if (watch.phase != ENTRY || digest == channel.args.digest) return true;
            watch.fail(OTHER_CALL, peer, 0, channel.args.digest, digest);
            return false;
        }
        if (!budget.more(watch, peer, 0, meeting, seen)) return false;
    }
}

// Meets all peers; false on timeout, or if their calls differ. All threads in the block call this; if one passes false,
// the block neither signals nor waits. Memory order: the block's accesses before, an exit with release at system scope;
// an acquire, the block's accesses behind. An entry is relaxed: it follows earlier kernels that have ended, which makes
// their writes visible to all GPUs, and it follows no access by this kernel. With a release the call takes longer.
WEFT_DEVICE bool meet(const Channel &channel, const Watch &watch, u32 meeting, bool mine) {
    const Arguments &args = channel.args;
    mine = __syncthreads_and(mine);
    if (mine) {
        for (u32 p = threadIdx.x; p < RANKS; p += blockDim.x)
            if (p != args.rank) {
                u64 *to = channel.signal(p, args.rank);
                const u64 value = packet(meeting, args.digest);
                if (watch.phase == ENTRY) ptx::store_relaxed_sys(to, value);
                else ptx::store_release_sys(to, value);
            }
        for (u32 p = threadIdx.x; p < RANKS; p += blockDim.x)
            if (p != args.rank) mine &= wait_signal(watch, channel, p, meeting);
    }
    return __syncthreads_and(mine);
}

// Ends a call. A failed call fills all its output with 0xFF bytes, since blocks do not have the peers' parts. With
// `keep` it leaves messages whose places in input and output are the same: peers may read them, or other blocks send
// them. All threads call this.
WEFT_DEVICE void end_direct(const Arguments &args, const Channel &channel, u32 before, bool done, bool keep) {
    if (threadIdx.x == 0) start_next_kernel();
    if (done) {
        if (threadIdx.x == 0) *channel.meetings() = before + 2;
        return;
    }
    for (u32 p = 0; p < RANKS; ++p) {
        const UserBytes out = received_from(args, p);
        if (keep && out.begin == sent_to(args, p).begin) continue;
        for (u64 at = threadIdx.x * UNIT; at < out.bytes; at += blockDim.x * UNIT) out.poison(at);
    }
}

// Place for this rank's message in a rank's output.
WEFT_DEVICE UserBytes sent_to_output(const Arguments &args, u32 rank, u64 bytes) {
    const u64 output = rank == args.rank ? args.output : args.output_of[rank];
    return UserBytes{reinterpret_cast<u8 *>(output) + args.message[args.rank].receive_at, bytes, args.element_bytes, args.aligned != 0};
}

} // namespace weft::collectives
