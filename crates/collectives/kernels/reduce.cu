// Reductions: all-reduce (one-shot by packets, two-shot by chunks), reduce-scatter, reduce.
//
// Every algorithm combines contributions in rank order, so that all give the same bits.
#include "collectives/bulk.cuh"
#include "collectives/direct.cuh"
#include "collectives/elements.cuh"
#include "collectives/packets.cuh"

namespace weft::collectives {

WEFT_DEVICE void reduce_packets(const Arguments &args) {
    const Channel channel{args, blockIdx.x};
    const Watch watch = watch_of(args, PACKETS);
    const u32 epoch = begin_packets(channel, watch);
    const UserBytes mine = sent_to(args, args.rank), out = received_from(args, args.rank);
    if (epoch != 0 && args.same_for_all != 0) {
        const Part part(args, mine.bytes);
        for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
            const uint4 value = mine.load(static_cast<u64>(part.first + i) * UNIT);
            for (u32 step = 1; step < RANKS; ++step) send_unit(channel.unit(peer_of(args, step), args.rank, epoch, i), value, epoch);
        }
    } else if (epoch != 0) {
        for (u32 step = 1; step < RANKS; ++step) {
            const u32 p = peer_of(args, step);
            const UserBytes from = sent_to(args, p);
            const Part part(args, from.bytes);
            for (u32 i = threadIdx.x; i < part.count; i += blockDim.x)
                send_unit(channel.unit(p, args.rank, epoch, i), from.load(static_cast<u64>(part.first + i) * UNIT), epoch);
        }
    }
    if (epoch != 0) send_credits(channel, epoch);
    const Part part(args, out.bytes);
    for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
        const u64 at = static_cast<u64>(part.first + i) * UNIT;
        bool arrived = epoch != 0;
        const auto contribution = [&](u32 r) {
            uint4 value = make_uint4(0, 0, 0, 0);
            if (r == args.rank) value = mine.load(at);
            else arrived = arrived && wait_unit(watch, channel.unit(args.rank, r, epoch, i), epoch, r, i, value);
            return value;
        };
        Accumulator sum(contribution(0));
        for (u32 r = 1; r < RANKS; ++r) sum.add(contribution(r));
        if (arrived) out.store(at, sum.unit(args.divisor));
        else out.poison(at);
    }
    if (epoch != 0) wait_credits(channel, watch, epoch);
    end_packets(channel, epoch);
}

constexpr u32 SENDERS = 8, REDUCERS = 12, COPIERS = 8;

// Places for a chunk: contributions from all ranks, and the results at all ranks. This rank's places are user memory.
struct Places {
    const u8 *from[RANKS];
    u8 *to[RANKS];

    WEFT_DEVICE Places(const Channel &channel, const Call &call, u32 i, const UserBytes &mine, const UserBytes &out) {
        const u32 rank = channel.args.rank;
#pragma unroll
        for (u32 r = 0; r < RANKS; ++r) {
            from[r] = r == rank ? mine.begin + call.start(i) : channel.chunk(CONTRIBUTED, rank, r, call.base[CONTRIBUTED][r] + i);
            to[r] = r == rank ? out.begin + call.start(i) : channel.chunk(REDUCED, r, rank, call.base[REDUCED][r] + i);
        }
    }
};

// Reduces whole units in a chunk whose places are aligned, and sends the results to all peers if SHARE. All threads in
// the team call this; relaxed.
template <bool SHARE>
WEFT_DEVICE void reduce_units(const Arguments &args, const Places &places, u32 bytes, u32 thread, u32 threads) {
    constexpr u32 UNROLL = RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1; // loads in flight per rank
    const u32 step = threads * UNIT;
    const auto reduce = [&](u32 at, const uint4 *value) {
        Accumulator sum(value[0]);
#pragma unroll
        for (u32 r = 1; r < RANKS; ++r) sum.add(value[r]);
        const uint4 result = sum.unit(args.divisor);
#pragma unroll
        for (u32 r = 0; r < RANKS; ++r)
            if (SHARE || r == args.rank) ptx::store_stream(places.to[r] + at, result);
    };
    u32 at = thread * UNIT;
    for (; at + (UNROLL - 1) * step < bytes; at += UNROLL * step) {
        uint4 value[UNROLL][RANKS];
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i)
#pragma unroll
            for (u32 r = 0; r < RANKS; ++r) value[i][r] = ptx::load_stream(places.from[r] + at + i * step);
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) reduce(at + i * step, value[i]);
    }
    for (; UNROLL > 1 && at < bytes; at += step) {
        uint4 value[RANKS];
#pragma unroll
        for (u32 r = 0; r < RANKS; ++r) value[r] = ptx::load_stream(places.from[r] + at);
        reduce(at, value);
    }
}

// Reduces a chunk in this rank's slice. All threads in the team call this.
template <bool SHARE>
WEFT_DEVICE void reduce_chunk(const Channel &channel, const Call &call, u32 i, const UserBytes &mine, const UserBytes &out, u32 thread, u32 threads) {
    const Arguments &args = channel.args;
    const Places places(channel, call, i, mine, out);
    const u32 bytes = call.length(i, mine.bytes), whole = mine.aligned ? bytes / UNIT * UNIT : 0;
    reduce_units<SHARE>(args, places, whole, thread, threads);
    for (u32 at = whole + thread * UNIT; at < bytes; at += threads * UNIT) {
        const u64 place = call.start(i) + at;
        const auto contribution = [&](u32 r) { return r == args.rank ? mine.load(place) : ptx::load_stream(places.from[r] + at); };
        Accumulator sum(contribution(0));
#pragma unroll
        for (u32 r = 1; r < RANKS; ++r) sum.add(contribution(r));
        const uint4 result = sum.unit(args.divisor);
#pragma unroll
        for (u32 r = 0; r < RANKS; ++r)
            if (SHARE && r != args.rank) ptx::store_stream(places.to[r] + at, result);
        out.store(place, result);
    }
}

// Reducer team: waits for contributions from all peers, chunk by chunk. All lanes in a team warp call this.
template <bool SHARE> WEFT_DEVICE void reduce_team(const Watch &watch, const Channel &channel, Call &call, u32 warp, Progress<REDUCERS> &reduced) {
    const Arguments &args = channel.args;
    const UserBytes mine = sent_to(args, args.rank), out = received_from(args, args.rank);
    for (u32 i = 0; i < call.most; ++i) {
        bool arrived = true;
        for (u32 p = 0; p < RANKS; ++p)
            if (arrived && i < call.count[p]) arrived = wait_chunk(watch, channel, call, CONTRIBUTED, p, call.base[CONTRIBUTED][p] + i + 1);
        if (!arrived) break;
        reduce_chunk<SHARE>(channel, call, i, mine, out, warp * WARP + lane_of_thread(), REDUCERS * WARP);
        reduced.finish(warp, i + 1);
    }
}

WEFT_DEVICE void reduce_chunks(const Arguments &args) {
    __shared__ Call call;
    __shared__ Progress<SENDERS> sent;
    __shared__ Progress<REDUCERS> reduced;
    const Channel channel{args, blockIdx.x};
    const Watch watch = watch_of(args, CONTRIBUTIONS);
    if (threadIdx.x == 0) sent.clear(), reduced.clear();
    wait_for_previous_kernel();
    call.begin(channel, watch);
    __syncthreads();
    u32 warp = warp_of_thread();
    if (call.failed != 0) {
        // Poisoned below.
    } else if (warp < SENDERS) {
        send_chunks(channel, call, warp, sent, [&](u32 i) {
            return i < RING_CHUNKS / 2 || reduced.wait(i - RING_CHUNKS / 2 + 1, call);
        });
    } else if ((warp -= SENDERS) < REDUCERS) {
        reduce_team<false>(watch, channel, call, warp, reduced);
    } else {
        raise_sent(channel, call, sent);
    }
    end_chunks(args, channel, call, false);
}

// Raises the result flags. All lanes in one warp call this. Memory order: acquires the progress from all warps, then
// each peer's lane releases all complete chunks at once, at system scope.
template <u32 WARPS> WEFT_DEVICE void raise_results(const Channel &channel, const Call &call, const Progress<WARPS> &reduced) {
    const Arguments &args = channel.args;
    for (u32 done = 0; done < call.most;) {
        if (!reduced.wait(done + 1, call)) return;
        done = min(reduced.least(), call.most);
        for (u32 p = lane_of_thread(); p < RANKS; p += WARP)
            if (p != args.rank && call.count[p] != 0) signal(channel.flag(REDUCED, p, args.rank), call.base[REDUCED][p] + min(done, call.count[p]));
        __syncwarp();
    }
}

WEFT_DEVICE void all_reduce_chunks(const Arguments &args) {
    __shared__ Call call;
    __shared__ Progress<SENDERS> sent;
    __shared__ Progress<REDUCERS> reduced;
    __shared__ Progress<COPIERS> copied;
    const Channel channel{args, blockIdx.x};
    if (threadIdx.x == 0) sent.clear(), reduced.clear(), copied.clear();
    wait_for_previous_kernel();
    call.begin(channel, watch_of(args, CONTRIBUTIONS));
    __syncthreads();
    u32 warp = warp_of_thread();
    if (call.failed != 0) {
        // Poisoned below.
    } else if (warp < SENDERS) {
        send_chunks(channel, call, warp, sent, [&](u32 i) {
            return (i < RING_CHUNKS / 2 || reduced.wait(i - RING_CHUNKS / 2 + 1, call)) && (i < RING_CHUNKS || copied.wait(i - RING_CHUNKS + 1, call));
        });
    } else if ((warp -= SENDERS) < REDUCERS) {
        reduce_team<true>(watch_of(args, CONTRIBUTIONS), channel, call, warp, reduced);
    } else if ((warp -= REDUCERS) < COPIERS) {
        const Watch watch = watch_of(args, RESULTS);
        const u32 thread = warp * WARP + lane_of_thread(), threads = COPIERS * WARP;
        for (u32 i = 0; i < call.most; ++i) {
            // The reducers name a missing peer: the others' results wait for it too.
            bool arrived = reduced.wait(i + 1, call);
            for (u32 step = 1; step < RANKS && arrived; ++step) {
                const u32 p = peer_of(args, RANKS - step), sequence = call.base[REDUCED][p] + i;
                if (i >= call.count[p]) continue;
                arrived = wait_chunk(watch, channel, call, REDUCED, p, sequence + 1);
                if (!arrived) break;
                const UserBytes out = received_from(args, p);
                copy_from_ring(channel.chunk(REDUCED, args.rank, p, sequence), out, call.start(i), call.length(i, out.bytes), thread, threads);
            }
            if (!arrived) break;
            copied.finish(warp, i + 1);
        }
    } else if (warp == COPIERS) {
        raise_sent(channel, call, sent);
    } else {
        raise_results(channel, call, reduced);
    }
    end_chunks(args, channel, call, true);
}

// Reduces this rank's part over all ranks' inputs; the result goes to this rank's output, and to all if SHARE. All
// threads call this. The thread that writes a unit also reads it, so inputs may be the outputs.
template <bool SHARE> WEFT_DEVICE void pull_and_reduce(const Arguments &args) {
    constexpr u32 UNROLL = RANKS <= 2 ? (SHARE ? 8 : 4) : RANKS <= 4 ? 4 : RANKS <= 8 ? 2 : 1; // loads in flight per rank
    const Message &message = args.message[args.rank];
    const UserBytes mine = sent_to(args, args.rank), out = sent_to_output(args, args.rank, mine.bytes);
    const auto source = [&](u32 r) {
        const u64 input = r == args.rank ? args.input : args.input_of[r];
        return UserBytes{reinterpret_cast<u8 *>(input) + message.send_at, mine.bytes, mine.element, mine.aligned};
    };
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x * UNIT, whole = mine.aligned ? mine.bytes / UNIT * UNIT : 0;
    const u64 begin = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * UNIT;
    for (u64 at = begin; at < whole; at += UNROLL * step) {
        uint4 value[UNROLL][RANKS];
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k)
#pragma unroll
            for (u32 r = 0; r < RANKS; ++r)
                if (at + k * step < whole) value[k][r] = ptx::load_stream(source(r).begin + at + k * step);
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k) {
            if (at + k * step >= whole) break;
            Accumulator sum(value[k][0]);
#pragma unroll
            for (u32 r = 1; r < RANKS; ++r) sum.add(value[k][r]);
            const uint4 result = sum.unit(args.divisor);
            if (SHARE) {
#pragma unroll
                for (u32 r = 0; r < RANKS; ++r) ptx::store_stream(sent_to_output(args, r, mine.bytes).begin + at + k * step, result);
            } else {
                ptx::store_stream(out.begin + at + k * step, result);
            }
        }
    }
    // Unaligned tensor units, and the last one.
    for (u64 at = whole + begin; at < mine.bytes; at += step) {
        Accumulator sum(source(0).load(at));
        for (u32 r = 1; r < RANKS; ++r) sum.add(source(r).load(at));
        const uint4 result = sum.unit(args.divisor);
        for (u32 r = 0; r < RANKS; ++r)
            if (SHARE || r == args.rank) sent_to_output(args, r, mine.bytes).store(at, result);
    }
}

template <bool SHARE> WEFT_DEVICE void reduce_direct(const Arguments &args) {
    const Channel channel{args, blockIdx.x};
    u32 before;
    bool done = begin_direct(channel, watch_of(args, ENTRY), before);
    done = meet(channel, watch_of(args, ENTRY), before + 1, done);
    const bool entered = done;
    if (done) pull_and_reduce<SHARE>(args);
    done = meet(channel, watch_of(args, EXIT), before + 2, done);
    // Peers may still read the vector in an in-place all-reduce.
    end_direct(args, channel, before, done, SHARE && entered);
}

#if __CUDA_ARCH__ >= 900
constexpr u32 BULK_REDUCERS = 16;
// Reducer groups, which take chunks in turn, so that several are in flight.
constexpr u32 GROUPS = 2, GROUP = BULK_REDUCERS / GROUPS;

// Reducer progress: the next chunk index for each warp. One thread calls this before a block barrier.
WEFT_DEVICE void clear_reducers(Progress<BULK_REDUCERS> &reduced) {
    for (u32 i = 0; i < BULK_REDUCERS; ++i) reduced.done[i] = i / GROUP;
}

// Reducer warp: takes its share from each of its group's chunks in this rank's slice. Results go to the output, and to
// stages in shared memory if SHARE, for the engine that sends them. All lanes call this.
template <bool SHARE>
WEFT_DEVICE void reduce_share(const Channel &channel, const Call &call, u32 warp, u8 *stages, const Arrivals &arrivals, const Progress<1> &freed, Progress<BULK_REDUCERS> &reduced) {
    constexpr u32 UNROLL = RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1; // loads in flight per rank
    const Arguments &args = channel.args;
    const UserBytes mine = sent_to(args, args.rank), out = received_from(args, args.rank);
    const u32 lane = lane_of_thread(), step = GROUP * WARP * UNIT;
    for (u32 i = warp / GROUP; i < call.most; i += GROUPS) {
        bool arrived = true;
        for (u32 p = lane; p < RANKS; p += WARP)
            if (i < call.count[p]) arrived &= arrivals.wait(p, call.base[CONTRIBUTED][p] + i + 1, call);
        arrived = __all_sync(~0u, arrived);
        __syncwarp(); // orders the lanes' acquires before later accesses by all lanes
        if (!arrived) return;
        if (SHARE && i >= RESULT_STAGES && !freed.wait(i - RESULT_STAGES + 1, call)) return;
        const u32 bytes = call.length(i, mine.bytes), whole = whole_units(bytes);
        const Places places(channel, call, i, mine, out);
        u8 *stage = stages + i % RESULT_STAGES * CHUNK_CAPACITY;
        for (u32 at = (warp % GROUP * WARP + lane) * UNIT; at < bytes; at += UNROLL * step) {
            uint4 value[UNROLL][RANKS];
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k)
#pragma unroll
                for (u32 r = 0; r < RANKS; ++r)
                    if (at + k * step < whole) value[k][r] = ptx::load_stream(places.from[r] + at + k * step);
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k) {
                const u32 here = at + k * step;
                if (here >= bytes) break;
                if (here >= whole) {
                    // The last slice unit, which is not whole.
#pragma unroll
                    for (u32 r = 0; r < RANKS; ++r) value[k][r] = r == args.rank ? mine.load(call.start(i) + here) : ptx::load_stream(places.from[r] + here);
                }
                Accumulator sum(value[k][0]);
#pragma unroll
                for (u32 r = 1; r < RANKS; ++r) sum.add(value[k][r]);
                const uint4 result = sum.unit(args.divisor);
                if (SHARE) *reinterpret_cast<uint4 *>(stage + here) = result;
                out.store(call.start(i) + here, result);
            }
        }
        if (SHARE) fence_shared_for_bulk();
        reduced.finish(warp, i + GROUPS);
    }
}

// Result engine: sends results to all peers. A warp's first lane calls this. Memory order: acquires the progress from
// the reducers, which have passed a proxy fence; publishes a chunk in `shared` once its bulk stores are complete.
WEFT_DEVICE void result_engine(const Channel &channel, const Call &call, const u8 *stages, const Progress<BULK_REDUCERS> &reduced, Progress<1> &freed, Progress<1> &shared) {
    const Arguments &args = channel.args;
    const u64 bytes_of_slice = args.message[args.rank].send_bytes;
    Known<BULK_REDUCERS> complete{reduced};
    for (u32 i = 0; i < call.most; ++i) {
        // While the next chunk is not complete, those in flight are waited for and published.
        if (!complete.reached(i + 1)) {
            ptx::bulk_wait<0>();
            ptx::store_release_cta(freed.done, i);
            ptx::store_release_cta(shared.done, i);
            while (!complete.reached(i + 1))
                if (call.has_failed()) return;
        }
        // A partial last unit is sent as a whole one: the ring has room.
        const u32 bytes = (call.length(i, bytes_of_slice) + UNIT - 1) / UNIT * UNIT;
        for (u32 step = 1; step < RANKS && bytes != 0; ++step) {
            const u32 p = peer_of(args, step);
            ptx::bulk_store(channel.chunk(REDUCED, p, args.rank, call.base[REDUCED][p] + i), stages + i % RESULT_STAGES * CHUNK_CAPACITY, bytes);
        }
        ptx::bulk_commit();
        ptx::bulk_wait_read<1>();
        ptx::store_release_cta(freed.done, i);
        ptx::bulk_wait<2>();
        if (i >= 1) ptx::store_release_cta(shared.done, i - 1);
    }
    ptx::bulk_wait<0>();
    ptx::store_release_cta(freed.done, call.most);
    ptx::store_release_cta(shared.done, call.most);
}

WEFT_DEVICE void reduce_bulk(const Arguments &args) {
    extern __shared__ __align__(128) u8 stages[];
    __shared__ Call call;
    __shared__ Progress<1> sent, unused;
    __shared__ Progress<BULK_REDUCERS> reduced;
    __shared__ Arrivals arrivals;
    __shared__ u64 full[SEND_STAGES];
    const Channel channel{args, blockIdx.x};
    const Watch watch = watch_of(args, CONTRIBUTIONS);
    if (threadIdx.x == 0) sent.clear(), clear_reducers(reduced);
    wait_for_previous_kernel();
    call.begin(channel, watch);
    arrivals.begin(call, CONTRIBUTED);
    __syncthreads();
    const u32 warp = warp_of_thread();
    if (call.failed != 0) {
        // Poisoned below.
    } else if (warp < BULK_REDUCERS) {
        reduce_share<false>(channel, call, warp, nullptr, arrivals, unused, reduced);
    } else if (warp == BULK_REDUCERS) {
        Known<BULK_REDUCERS> consumed{reduced};
        if (lane_of_thread() == 0) send_engine(watch, channel, call, Stages<SEND_STAGES>(stages, full), sent, [&](u32 i) {
            return i < RING_CHUNKS / 2 || consumed.reached(i - RING_CHUNKS / 2 + 1);
        });
    } else if (warp == BULK_REDUCERS + 1) {
        raise_sent(channel, call, sent);
    } else {
        arrivals.poll(watch, channel, call, CONTRIBUTED, nullptr);
    }
    end_chunks(args, channel, call, false);
}

WEFT_DEVICE void all_reduce_bulk(const Arguments &args) {
    extern __shared__ __align__(128) u8 stages[];
    __shared__ Call call;
    __shared__ Progress<1> sent, freed, shared, copied;
    __shared__ Progress<BULK_REDUCERS> reduced;
    __shared__ u64 full[SEND_STAGES + COPY_STAGES];
    __shared__ Arrivals contributions, arrivals;
    const Channel channel{args, blockIdx.x};
    if (threadIdx.x == 0) sent.clear(), freed.clear(), shared.clear(), copied.clear(), clear_reducers(reduced);
    wait_for_previous_kernel();
    call.begin(channel, watch_of(args, CONTRIBUTIONS));
    contributions.begin(call, CONTRIBUTED), arrivals.begin(call, REDUCED);
    __syncthreads();
    const u32 warp = warp_of_thread();
    const bool first = lane_of_thread() == 0;
    u8 *copies = stages + SEND_STAGES * CHUNK_CAPACITY, *results = copies + COPY_STAGES * CHUNK_CAPACITY;
    if (call.failed != 0) {
        // Poisoned below.
    } else if (warp < BULK_REDUCERS) {
        reduce_share<true>(channel, call, warp, results, contributions, freed, reduced);
    } else if (warp == BULK_REDUCERS) {
        Known<BULK_REDUCERS> consumed{reduced};
        Known<1> results{copied};
        if (first) send_engine(watch_of(args, CONTRIBUTIONS), channel, call, Stages<SEND_STAGES>(stages, full), sent, [&](u32 i) {
            return (i < RING_CHUNKS / 2 || consumed.reached(i - RING_CHUNKS / 2 + 1)) && (i < RING_CHUNKS || results.reached(i - RING_CHUNKS + 1));
        });
    } else if (warp == BULK_REDUCERS + 1) {
        if (first) receive_engine(watch_of(args, RESULTS), channel, call, REDUCED, Stages<COPY_STAGES>(copies, full + SEND_STAGES), arrivals, copied);
    } else if (warp == BULK_REDUCERS + 2) {
        if (first) result_engine(channel, call, results, reduced, freed, shared);
    } else if (warp == BULK_REDUCERS + 3) {
        raise_sent(channel, call, sent);
    } else if (warp == BULK_REDUCERS + 4) {
        raise_results(channel, call, shared);
    } else if (warp == BULK_REDUCERS + 5) {
        contributions.poll(watch_of(args, CONTRIBUTIONS), channel, call, CONTRIBUTED, nullptr);
    } else {
        arrivals.poll(watch_of(args, RESULTS), channel, call, REDUCED, &contributions);
    }
    end_chunks(args, channel, call, true);
}

#endif

} // namespace weft::collectives

using weft::collectives::Arguments;
extern "C" __global__ void __launch_bounds__(512) collective_reduce_packets(const __grid_constant__ Arguments args) { weft::collectives::reduce_packets(args); }
extern "C" __global__ void __launch_bounds__(512, 1) collective_reduce_direct(const __grid_constant__ Arguments args) { weft::collectives::reduce_direct<false>(args); }
extern "C" __global__ void __launch_bounds__(512, 1) collective_all_reduce_direct(const __grid_constant__ Arguments args) { weft::collectives::reduce_direct<true>(args); }
extern "C" __global__ void __launch_bounds__((weft::collectives::SENDERS + weft::collectives::REDUCERS + 1) * 32, 1) collective_reduce_chunks(const __grid_constant__ Arguments args) { weft::collectives::reduce_chunks(args); }
extern "C" __global__ void __launch_bounds__((weft::collectives::SENDERS + weft::collectives::REDUCERS + weft::collectives::COPIERS + 2) * 32, 1) collective_all_reduce_chunks(const __grid_constant__ Arguments args) { weft::collectives::all_reduce_chunks(args); }
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __launch_bounds__((weft::collectives::BULK_REDUCERS + 3) * 32, 1) collective_reduce_bulk(const __grid_constant__ Arguments args) { weft::collectives::reduce_bulk(args); }
extern "C" __global__ void __launch_bounds__((weft::collectives::BULK_REDUCERS + 7) * 32, 1) collective_all_reduce_bulk(const __grid_constant__ Arguments args) { weft::collectives::all_reduce_bulk(args); }
#endif
