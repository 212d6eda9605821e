// Message exchange without arithmetic: all-gather, all-to-all, broadcast, gather, scatter, barrier.
#include "collectives/bulk.cuh"
#include "collectives/direct.cuh"
#include "collectives/packets.cuh"

namespace weft::collectives {

WEFT_DEVICE void exchange_packets(const Arguments &args) {
    const Channel channel{args, blockIdx.x};
    const Watch watch = watch_of(args, PACKETS);
    const u32 epoch = begin_packets(channel, watch);
    if (epoch != 0) {
        for (u32 step = 1; step < RANKS; ++step) {
            const u32 p = peer_of(args, step);
            const UserBytes from = sent_to(args, p);
            const Part part(args, from.bytes);
            for (u32 i = threadIdx.x; i < part.count; i += blockDim.x)
                send_unit(channel.unit(p, args.rank, epoch, i), from.load(static_cast<u64>(part.first + i) * UNIT), epoch);
        }
        send_credits(channel, epoch);
    }
    const UserBytes from = sent_to(args, args.rank), to = received_from(args, args.rank);
    if (from.begin != to.begin) {
        const Part part(args, to.bytes);
        for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
            const u64 at = static_cast<u64>(part.first + i) * UNIT;
            to.store(at, from.load(at));
        }
    }
    for (u32 step = 1; step < RANKS; ++step) {
        const u32 p = peer_of(args, RANKS - step);
        const UserBytes out = received_from(args, p);
        const Part part(args, out.bytes);
        for (u32 i = threadIdx.x; i < part.count; i += blockDim.x) {
            const u64 at = static_cast<u64>(part.first + i) * UNIT;
            uint4 value;
            if (epoch != 0 && wait_unit(watch, channel.unit(args.rank, p, epoch, i), epoch, p, i, value)) out.store(at, value);
            else out.poison(at);
        }
    }
    if (epoch != 0) wait_credits(channel, watch, epoch);
    end_packets(channel, epoch);
}

// Copies a message into a rank's output: the grid takes whole units in turn. All threads call this.
WEFT_DEVICE void push_message(const UserBytes &from, const UserBytes &to) {
    if (from.begin == to.begin) return;
    constexpr u32 UNROLL = 8; // loads in flight
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.x * UNIT, whole = from.aligned ? from.bytes / UNIT * UNIT : 0;
    const u64 begin = (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * UNIT;
    for (u64 at = begin; at < whole; at += UNROLL * step) {
        uint4 value[UNROLL];
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k)
            if (at + k * step < whole) value[k] = ptx::load_stream(from.begin + at + k * step);
#pragma unroll
        for (u32 k = 0; k < UNROLL; ++k)
            if (at + k * step < whole) ptx::store_stream(to.begin + at + k * step, value[k]);
    }
    for (u64 at = whole + begin; at < from.bytes; at += step) to.store(at, from.load(at));
}

WEFT_DEVICE void exchange_direct(const Arguments &args) {
    const Channel channel{args, blockIdx.x};
    u32 before;
    bool done = begin_direct(channel, watch_of(args, ENTRY), before);
    done = meet(channel, watch_of(args, ENTRY), before + 1, done);
    if (done)
        for (u32 step = 0; step < RANKS; ++step) {
            const u32 p = peer_of(args, step);
            const UserBytes from = sent_to(args, p);
            push_message(from, sent_to_output(args, p, from.bytes));
        }
    done = meet(channel, watch_of(args, EXIT), before + 2, done);
    end_direct(args, channel, before, done, true);
}

// Entry kernel for a copy-engine call: the copies follow it on the stream, and then the exit. A copy cannot be made
// conditional, so that the copies run even if the entry fails.
WEFT_DEVICE void copy_entry(const Arguments &args) {
    const Channel channel{args, blockIdx.x};
    const Watch watch = watch_of(args, ENTRY);
    u32 before;
    bool done = begin_direct(channel, watch, before);
    done = meet(channel, watch, before + 1, done);
    if (done && threadIdx.x == 0) *channel.meetings() = before + 1;
}

// Exit kernel for a copy-engine call. If the entry failed, the domain is dead.
WEFT_DEVICE void copy_exit(const Arguments &args) {
    const Channel channel{args, blockIdx.x};
    const Watch watch = watch_of(args, EXIT);
    u32 entered;
    bool done = begin_direct(channel, watch, entered);
    done = meet(channel, watch, entered + 1, done);
    end_direct(args, channel, entered - 1, done, true);
}

constexpr u32 SENDERS = 8, RECEIVERS = 8;
constexpr u32 CHUNK_THREADS = (SENDERS + RECEIVERS + 1) * WARP;

WEFT_DEVICE void exchange_chunks(const Arguments &args) {
    __shared__ Call call;
    __shared__ Progress<SENDERS> sent;
    __shared__ Progress<RECEIVERS> received;
    const Channel channel{args, blockIdx.x};
    const Watch watch = watch_of(args, CONTRIBUTIONS);
    if (threadIdx.x == 0) sent.clear(), received.clear();
    wait_for_previous_kernel();
    call.begin(channel, watch);
    __syncthreads();
    u32 warp = warp_of_thread();
    if (call.failed != 0) {
        // Poisoned below.
    } else if (warp < SENDERS) {
        send_chunks(channel, call, warp, sent, [&](u32 i) {
            return i < RING_CHUNKS / 2 || received.wait(i - RING_CHUNKS / 2 + 1, call);
        });
    } else if ((warp -= SENDERS) < RECEIVERS) {
        const u32 thread = warp * WARP + lane_of_thread(), threads = RECEIVERS * WARP;
        bool arrived = true;
        for (u32 i = 0; i < call.most; ++i) {
            for (u32 step = 1; step < RANKS && arrived; ++step) {
                const u32 p = peer_of(args, RANKS - step), sequence = call.base[CONTRIBUTED][p] + i;
                if (i >= call.count[p]) continue;
                arrived = wait_chunk(watch, channel, call, CONTRIBUTED, p, sequence + 1);
                if (!arrived) break;
                const UserBytes out = received_from(args, p);
                copy_from_ring(channel.chunk(CONTRIBUTED, args.rank, p, sequence), out, call.start(i), call.length(i, out.bytes), thread, threads);
            }
            if (!arrived) break;
            received.finish(warp, i + 1);
        }
        copy_own(args, call, thread, threads);
    } else {
        raise_sent(channel, call, sent);
    }
    end_chunks(args, channel, call, false);
}

#if __CUDA_ARCH__ >= 900
constexpr u32 BULK_THREADS = 5 * WARP;

WEFT_DEVICE void exchange_bulk(const Arguments &args) {
    extern __shared__ __align__(128) u8 stages[];
    __shared__ Call call;
    __shared__ Progress<1> sent, received;
    __shared__ u64 full[SEND_STAGES + 2 * COPY_STAGES];
    __shared__ Arrivals arrivals;
    const Channel channel{args, blockIdx.x};
    const Watch watch = watch_of(args, CONTRIBUTIONS);
    if (threadIdx.x == 0) sent.clear(), received.clear();
    wait_for_previous_kernel();
    call.begin(channel, watch);
    arrivals.begin(call, CONTRIBUTED);
    __syncthreads();
    const u32 warp = warp_of_thread();
    const bool first = lane_of_thread() == 0;
    u8 *copies = stages + SEND_STAGES * CHUNK_CAPACITY, *own = copies + COPY_STAGES * CHUNK_CAPACITY;
    if (call.failed != 0) {
        // Poisoned below.
    } else if (warp == 0) {
        Known<1> consumed{received};
        if (first) send_engine(watch, channel, call, Stages<SEND_STAGES>(stages, full), sent, [&](u32 i) {
            return i < RING_CHUNKS / 2 || consumed.reached(i - RING_CHUNKS / 2 + 1);
        });
    } else if (warp == 1) {
        if (first) receive_engine(watch, channel, call, CONTRIBUTED, Stages<COPY_STAGES>(copies, full + SEND_STAGES), arrivals, received);
    } else if (warp == 2) {
        if (first) own_engine(watch, args, call, Stages<COPY_STAGES>(own, full + SEND_STAGES + COPY_STAGES));
    } else if (warp == 3) {
        raise_sent(channel, call, sent);
    } else {
        arrivals.poll(watch, channel, call, CONTRIBUTED, nullptr);
    }
    end_chunks(args, channel, call, false);
}

constexpr u32 PUSH_STAGES = 7, ENGINES = 2, PUSH_THREADS = 4 * WARP;

// Push engine: copies this block's message chunks into the outputs at the destination ranks, several loads and stores
// ahead. Only one thread calls the functions.
struct PushEngine {
    static constexpr u32 STORES = PUSH_STAGES / 2; // tasks whose stores may read their stages

    // Chunk position: messages at one begin offset in turn, then messages at the next one.
    struct Position {
        u64 begin;
        u32 step = 0;
    };

    const Arguments &args;
    Stages<PUSH_STAGES> stages;
    const u32 first, messages, targets; // first step and message count, and ranks that each message goes to
    u64 most = 0;                // bytes in the longest message
    Position load, store;
    u32 loaded = 0, stored = 0;

    WEFT_DEVICE PushEngine(const Arguments &args, Stages<PUSH_STAGES> stages, u32 first, u32 messages, u32 targets)
        : args(args), stages(stages), first(first), messages(messages), targets(targets),
          load{static_cast<u64>(args.chunk_bytes) * blockIdx.x}, store(load) {
        for (u32 i = 0; i < messages; ++i) most = max(most, args.message[peer_of(args, first + i)].send_bytes);
    }

    WEFT_DEVICE void advance(Position &position) const {
        if (++position.step == messages) position.step = 0, position.begin += static_cast<u64>(args.chunk_bytes) * gridDim.x;
    }

    WEFT_DEVICE u32 length(const Position &position, const UserBytes &from) const {
        return position.begin >= from.bytes ? 0 : static_cast<u32>(min(static_cast<u64>(args.chunk_bytes), from.bytes - position.begin));
    }

    // Starts to load this rank's input into free stages; the peers need not have entered.
    WEFT_DEVICE void fill() {
        for (; load.begin < most && loaded + STORES < stored + PUSH_STAGES; ++loaded, advance(load)) {
            const UserBytes from = sent_to(args, peer_of(args, first + load.step));
            const u32 bytes = whole_units(length(load, from));
            if (bytes != 0) stages.load(loaded, from.begin + load.begin, bytes);
        }
    }

    // Copies everything; false on timeout.
    WEFT_DEVICE bool run(const Watch &watch) {
        while (store.begin < most) {
            fill();
            if (!stages.wait(stored, watch)) {
                stages.drain(watch);
                return false;
            }
            const UserBytes from = sent_to(args, peer_of(args, first + store.step));
            const u32 all = length(store, from), bytes = whole_units(all);
            for (u32 target = 0; target < targets; ++target) {
                const UserBytes to = sent_to_output(args, peer_of(args, first + store.step + target), from.bytes);
                if (from.begin == to.begin) continue;
                if (bytes != 0) ptx::bulk_store(to.begin + store.begin, stages.at(stored), bytes);
                if (all != bytes) to.store(store.begin + bytes, from.load(store.begin + bytes));
            }
            ptx::bulk_commit();
            ptx::bulk_wait_read<STORES - 1>();
            ++stored, advance(store);
        }
        ptx::bulk_wait<0>();
        return true;
    }
};

WEFT_DEVICE void exchange_direct_bulk(const Arguments &args) {
    extern __shared__ __align__(128) u8 stages[];
    __shared__ u64 full[ENGINES * PUSH_STAGES];
    const Channel channel{args, blockIdx.x};
    u32 before;
    bool done = begin_direct(channel, watch_of(args, ENTRY), before);
    // One warp copies to the peers, another one to this rank; a message that goes to all ranks is loaded once.
    const bool same = args.same_for_all != 0, own = warp_of_thread() != 0;
    const bool runs = lane_of_thread() == 0 && warp_of_thread() < ENGINES;
    const u32 at = own ? PUSH_STAGES : 0, messages = own ? !same : same ? 1 : RANKS - 1;
    const Stages<PUSH_STAGES> its_stages(stages + at * CHUNK_CAPACITY, full + at, runs);
    PushEngine engine(args, its_stages, own || same ? 0 : 1, messages, same ? RANKS : 1);
    if (done && runs) engine.fill();
    done = meet(channel, watch_of(args, ENTRY), before + 1, done);
    if (runs) {
        if (done) done = engine.run(watch_of(args, EXIT));
        else engine.stages.drain(watch_of(args, ENTRY));
    }
    done = meet(channel, watch_of(args, EXIT), before + 2, done);
    end_direct(args, channel, before, done, true);
}

#endif

} // namespace weft::collectives

extern "C" __global__ void __launch_bounds__(512) collective_exchange_packets(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::exchange_packets(args); }
extern "C" __global__ void __launch_bounds__(512) collective_exchange_direct(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::exchange_direct(args); }
extern "C" __global__ void __launch_bounds__(32) collective_copy_entry(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::copy_entry(args); }
extern "C" __global__ void __launch_bounds__(32) collective_copy_exit(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::copy_exit(args); }
extern "C" __global__ void __launch_bounds__(weft::collectives::CHUNK_THREADS, 1) collective_exchange_chunks(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::exchange_chunks(args); }
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __launch_bounds__(weft::collectives::PUSH_THREADS, 1) collective_exchange_direct_bulk(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::exchange_direct_bulk(args); }
extern "C" __global__ void __launch_bounds__(weft::collectives::BULK_THREADS, 1) collective_exchange_bulk(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::exchange_bulk(args); }
#endif
