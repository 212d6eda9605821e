// Exchange of messages without arithmetic: all-gather, all-to-all, broadcast, gather, scatter, barrier.
#include "collectives/bulk.cuh"
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

#endif

} // namespace weft::collectives

extern "C" __global__ void __launch_bounds__(512) collective_exchange_packets(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::exchange_packets(args); }
extern "C" __global__ void __launch_bounds__(weft::collectives::CHUNK_THREADS, 1) collective_exchange_chunks(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::exchange_chunks(args); }
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __launch_bounds__(weft::collectives::BULK_THREADS, 1) collective_exchange_bulk(const __grid_constant__ weft::collectives::Arguments args) { weft::collectives::exchange_bulk(args); }
#endif
