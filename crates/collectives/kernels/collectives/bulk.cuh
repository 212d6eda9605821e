// Chunk calls with bulk copies: the chunks.cuh protocol for aligned tensors, on GPUs with bulk copies.
//
// Engines, one warp each, move chunks through stages in shared memory. The first lane issues all copies, several loads
// and stores ahead; other warps raise the flags.
#pragma once
#include "collectives/chunks.cuh"

#if __CUDA_ARCH__ >= 900
namespace weft::collectives {

constexpr u32 SEND_STAGES = 6, COPY_STAGES = 4, RESULT_STAGES = 4;

// Stages for an engine. Only one thread calls the functions, and begins them.
template <u32 STAGES> struct Stages {
    u8 *data;
    u64 *full; // [STAGES]
    u32 parity = 0, loading = 0; // bits, by stage

    WEFT_DEVICE Stages(u8 *data, u64 *full, bool begin = true) : data(data), full(full) {
        if (!begin) return;
        for (u32 i = 0; i < STAGES; ++i) ptx::mbarrier_init(full + i, 1);
        fence_shared_for_bulk();
    }

    WEFT_DEVICE u8 *at(u32 task) const { return data + task % STAGES * CHUNK_CAPACITY; }

    // Starts to load `bytes`, a multiple of 16 and not 0.
    WEFT_DEVICE void load(u32 task, const u8 *from, u32 bytes) {
        loading |= 1u << task % STAGES;
        ptx::mbarrier_expect(full + task % STAGES, bytes);
        ptx::bulk_load(at(task), from, bytes, full + task % STAGES);
    }

    // Waits for a task's load, if it has one; false on timeout.
    WEFT_DEVICE bool wait(u32 task, const Watch &watch) {
        const u32 stage = task % STAGES, phase = parity >> stage & 1;
        if ((loading >> stage & 1) == 0) return true;
        parity ^= 1u << stage, loading ^= 1u << stage;
        if (wait_phase(full + stage, phase)) return true;
        phase_failed(watch, phase);
        return false;
    }

    // Waits for all copies, after a failure: none may run when the block ends.
    WEFT_DEVICE void drain(const Watch &watch) {
        for (u32 stage = 0; stage < STAGES; ++stage) wait(stage, watch);
        ptx::bulk_wait<0>();
    }
};

// Chunk order in a call: by index, then by peer, from `step` 1 on. Engines that receive take peers backwards.
struct Cursor {
    u32 index = 0, step = 0;

    // Advances to the next chunk, the first one at first; false behind the last one.
    WEFT_DEVICE bool next(const Arguments &args, const Call &call, bool backwards) {
        while (index < call.most) {
            if (++step >= RANKS) {
                step = 0, ++index;
                continue;
            }
            if (index < call.count[peer(args, backwards)]) return true;
        }
        return false;
    }
    WEFT_DEVICE u32 peer(const Arguments &args, bool backwards) const { return peer_of(args, backwards ? RANKS - step : step); }
};

WEFT_DEVICE u32 whole_units(u32 bytes) { return bytes / UNIT * UNIT; }

// Chunks that have arrived from each peer, as last seen by the warp that polls flags.
struct Arrivals {
    u32 seen[RANKS];   // sequence numbers
    u32 fenced[RANKS]; // those that the engine has passed a proxy fence for

    // All threads in the block call this before a barrier.
    WEFT_DEVICE void begin(const Call &call, u32 ring) {
        for (u32 p = threadIdx.x; p < RANKS; p += blockDim.x) seen[p] = fenced[p] = call.base[ring][p];
    }

    // Polls a ring's flags until all chunks in the call have arrived, or a wait has failed. All lanes in a warp call
    // this. Memory order: acquires each flag, then releases what it saw to the block.
    //
    // The timeout starts only after all of `earlier` have arrived, if given: a missing peer is named there.
    WEFT_DEVICE void poll(const Watch &watch, const Channel &channel, Call &call, u32 ring, const Arrivals *earlier) {
        constexpr u32 EACH = (RANKS + WARP - 1) / WARP; // peers per lane
        u32 known[EACH];
        PollBudget budget[EACH];
        for (bool first = true, more = true; more; first = false) {
            more = false;
#pragma unroll
            for (u32 k = 0; k < EACH; ++k) {
                const u32 p = lane_of_thread() + k * WARP;
                if (p >= RANKS) continue;
                const u32 begin = call.base[ring][p], last = begin + call.count[p];
                if (first) known[k] = begin;
                if (reached(known[k], last)) continue;
                more = true;
                const u32 now = ptx::load_acquire_sys(channel.flag(ring, channel.args.rank, p));
                if (now != known[k]) {
                    known[k] = now, budget[k] = PollBudget();
                    ptx::store_release_cta(seen + p, now);
                } else if (earlier != nullptr && !earlier->complete(call, CONTRIBUTED)) {
                    budget[k] = PollBudget();
                } else if (!budget[k].more(watch, p, known[k], last, now)) {
                    *const_cast<volatile u32 *>(&call.failed) = 1;
                    more = false;
                }
            }
            more = __any_sync(~0u, more) && !call.has_failed();
        }
    }

    WEFT_DEVICE bool complete(const Call &call, u32 ring) const {
        bool all = true;
        for (u32 p = 0; p < RANKS; ++p) all &= reached(*const_cast<const volatile u32 *>(seen + p), call.base[ring][p] + call.count[p]);
        return all;
    }

    WEFT_DEVICE bool has(u32 peer, u32 sequence) const { return reached(ptx::load_acquire_cta(seen + peer), sequence); }

    // Waits for a chunk; false once the call has failed. Called by one thread; acquire.
    WEFT_DEVICE bool wait(u32 peer, u32 sequence, const Call &call) const {
        while (!has(peer, sequence))
            if (call.has_failed()) return false;
        return true;
    }

    // As `wait`, for bulk loads. One proxy fence covers all chunks that have arrived.
    WEFT_DEVICE bool wait_for_bulk(u32 peer, u32 sequence, const Call &call) {
        if (reached(fenced[peer], sequence)) return true;
        if (!wait(peer, sequence, call)) return false;
        fenced[peer] = ptx::load_acquire_cta(seen + peer);
        fence_global_for_bulk();
        return true;
    }
};

// Team progress as one thread last saw it.
template <u32 WARPS> struct Known {
    const Progress<WARPS> &progress;
    u32 least = 0;

    WEFT_DEVICE bool reached(u32 count) {
        if (least < count) least = progress.least_alone();
        return least >= count;
    }
};

// Sender engine: sends contributions. `ready(index)` is true if the chunks at that index have credits. A warp's first
// lane calls this. Memory order: publishes a chunk once its bulk store is complete.
template <class Credits>
WEFT_DEVICE void send_engine(const Watch &watch, const Channel &channel, Call &call, Stages<SEND_STAGES> stages, Progress<1> &sent, Credits ready) {
    constexpr u32 STORES = 4; // in flight
    const Arguments &args = channel.args;
    Cursor now, ahead;
    bool more = ahead.next(args, call, false);
    u32 loaded = 0, stored = 0;
    while (now.next(args, call, false)) {
        for (; more && loaded + 1 < stored + SEND_STAGES; ++loaded) {
            const UserBytes from = sent_to(args, ahead.peer(args, false));
            const u32 bytes = whole_units(call.length(ahead.index, from.bytes));
            if (bytes != 0) stages.load(loaded, from.begin + call.start(ahead.index), bytes);
            more = ahead.next(args, call, false);
        }
        const u32 p = now.peer(args, false);
        const UserBytes from = sent_to(args, p);
        const u32 length = call.length(now.index, from.bytes), bytes = whole_units(length);
        if (!stages.wait(stored, watch)) {
            *const_cast<volatile u32 *>(&call.failed) = 1;
            return stages.drain(watch);
        }
        if (!ready(now.index)) {
            // Credits depend on the chunks in flight: without them the peers would wait too.
            ptx::bulk_wait<0>();
            ptx::store_release_cta(sent.done, stored);
            while (!ready(now.index))
                if (call.has_failed()) return stages.drain(watch);
        }
        u8 *to = channel.chunk(CONTRIBUTED, p, args.rank, call.base[CONTRIBUTED][p] + now.index);
        if (bytes != 0) ptx::bulk_store(to, stages.at(stored), bytes);
        ptx::bulk_commit();
        if (length != bytes) ptx::store_stream(to + bytes, from.load(call.start(now.index) + bytes));
        ++stored;
        ptx::bulk_wait_read<1>();
        ptx::bulk_wait<STORES>();
        // After a wait for credits this falls back by at most STORES; readers only wait for values to be reached.
        if (stored > STORES) ptx::store_release_cta(sent.done, stored - STORES);
    }
    ptx::bulk_wait<0>();
    ptx::store_release_cta(sent.done, stored);
}

// Copy engine: copies chunks from a ring to the output. `copied` counts the indices whose chunks have all left the
// ring. A warp's first lane calls this. Memory order: acquires the arrival, then a proxy fence; then bulk loads.
WEFT_DEVICE void receive_engine(const Watch &watch, const Channel &channel, Call &call, u32 ring, Stages<COPY_STAGES> stages, Arrivals &arrivals, Progress<1> &copied) {
    const Arguments &args = channel.args;
    Cursor now, ahead;
    bool more = ahead.next(args, call, true);
    u32 loaded = 0, stored = 0;
    while (now.next(args, call, true)) {
        for (; more && loaded + 1 < stored + COPY_STAGES; ++loaded) {
            const u32 p = ahead.peer(args, true), sequence = call.base[ring][p] + ahead.index;
            // Wait only for this turn's chunk; load later ones if they have arrived.
            if (loaded > stored && !arrivals.has(p, sequence + 1)) break;
            if (!arrivals.wait_for_bulk(p, sequence + 1, call)) return stages.drain(watch);
            const UserBytes out = received_from(args, p);
            const u32 bytes = whole_units(call.length(ahead.index, out.bytes));
            if (bytes != 0) stages.load(loaded, channel.chunk(ring, args.rank, p, sequence), bytes);
            more = ahead.next(args, call, true);
        }
        const u32 p = now.peer(args, true);
        const UserBytes out = received_from(args, p);
        const u64 begin = call.start(now.index);
        const u32 length = call.length(now.index, out.bytes), bytes = whole_units(length);
        if (!stages.wait(stored, watch)) {
            *const_cast<volatile u32 *>(&call.failed) = 1;
            return stages.drain(watch);
        }
        if (length != bytes) out.store(begin + bytes, ptx::load_stream(channel.chunk(ring, args.rank, p, call.base[ring][p] + now.index) + bytes));
        if (bytes != 0) ptx::bulk_store(out.begin + begin, stages.at(stored), bytes);
        ptx::bulk_commit();
        ++stored;
        // Indices before this one have left the ring; this one too, if no peer follows.
        Cursor next = now;
        const bool last = !next.next(args, call, true) || next.index != now.index;
        ptx::store_release_cta(copied.done, now.index + last);
        ptx::bulk_wait_read<1>();
    }
    ptx::bulk_wait<0>();
}

// Copies this rank's message to itself, if it goes elsewhere. A warp's first lane calls this.
WEFT_DEVICE void own_engine(const Watch &watch, const Arguments &args, Call &call, Stages<COPY_STAGES> stages) {
    const UserBytes from = sent_to(args, args.rank), to = received_from(args, args.rank);
    if (from.begin == to.begin) return;
    const u32 count = Call::chunks_of(to.bytes, call.chunk_bytes);
    u32 loaded = 0;
    for (u32 i = 0; i < count; ++i) {
        for (; loaded < count && loaded + 1 < i + COPY_STAGES; ++loaded) {
            const u32 bytes = whole_units(call.length(loaded, to.bytes));
            if (bytes != 0) stages.load(loaded, from.begin + call.start(loaded), bytes);
        }
        const u32 length = call.length(i, to.bytes), bytes = whole_units(length);
        if (!stages.wait(i, watch)) {
            *const_cast<volatile u32 *>(&call.failed) = 1;
            return stages.drain(watch);
        }
        if (bytes != 0) ptx::bulk_store(to.begin + call.start(i), stages.at(i), bytes);
        ptx::bulk_commit();
        if (length != bytes) to.store(call.start(i) + bytes, from.load(call.start(i) + bytes));
        ptx::bulk_wait_read<1>();
    }
    ptx::bulk_wait<0>();
}

} // namespace weft::collectives
#endif
