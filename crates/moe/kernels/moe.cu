// MoE dispatch and combine entry points, with the role of each warp. `weft_moe::device` launches them.
#include "moe/plan.cuh"
#if WEFT_PATH == 2
#include "moe/combine_bandwidth.cuh"
#include "moe/copy.cuh"
#include "moe/dispatch_bandwidth.cuh"
#else
#include "moe/combine.cuh"
#include "moe/dispatch.cuh"
#endif

using namespace weft;
using namespace weft::moe;

namespace {

WEFT_DEVICE Round begin(const Arguments &a, u32 first, u32 last, auto meanwhile) {
    return enter(a, channel(a, a.rank), watch(a, first), first, last, meanwhile);
}

// Block exit; `failed`: a wait in this thread failed. A failed receive phase poisons the outputs.
WEFT_DEVICE void end(const Arguments &a, u32 first, u32 last, bool failed) {
    if (!leave(channel(a, a.rank), first, last, failed)) return;
    if (last == DISPATCH_RECV) poison_dispatch(a);
    if (last == COMBINE_RECV) poison_combine(a);
}

} // namespace

extern "C" {

__global__ void __launch_bounds__(PLAN_THREADS, 1) moe_plan_count(const __grid_constant__ Arguments a) { plan_count(a); }
__global__ void __launch_bounds__(PLAN_THREADS, 1) moe_plan_scan(const __grid_constant__ Arguments a) { plan_scan(a); }
__global__ void __launch_bounds__(COUNT_THREADS, 1) moe_counts(const __grid_constant__ Arguments a) { send_counts_to_host(a); }

} // extern "C"

#if WEFT_PATH == 2

// Kernels for large batches. A launch leaves the other SMs free; one warp per block raises flags for the others.
extern "C" {

using namespace weft::moe::bandwidth;

// Launch parameters in `Kernel::ALL` order: threads per block, dynamic shared memory in bytes.
__constant__ u32 weft_moe_launch[9][2] = {
    {PLAN_THREADS, 0}, {PLAN_THREADS, 0}, {THREADS, SHARED}, {THREADS, SHARED}, {THREADS, SHARED},
    {ADD_THREADS, ADD_SHARED}, {ADD_THREADS, ADD_SHARED}, {ADD_THREADS, ADD_SHARED}, {COUNT_THREADS, 0},
};

__global__ void __launch_bounds__(THREADS, 1) moe_dispatch_send(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Block block;
    block.clear(RING_WARPS);
    const u32 warp = warp_of_thread();
    const Round round = begin(a, DISPATCH_SEND, DISPATCH_SEND, [&] { prepare_rows(a, block, FIRST_RING); });
    if (round.live && warp == WARPS) raise_flags(a, round, block);
    if (round.live && warp >= FIRST_RING && warp < WARPS) {
        Ring ring = ring_of(block, shared);
        send_rows<false>(a, round, watch(a, DISPATCH_SEND), block, ring, shared);
    }
    end(a, DISPATCH_SEND, DISPATCH_SEND, false);
}

__global__ void __launch_bounds__(THREADS, 1) moe_dispatch_recv(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Block block;
    const Round round = begin(a, DISPATCH_RECV, DISPATCH_RECV, [] {});
    bool fine = round.live;
    if (round.live && warp_of_thread() < WARPS) {
        if constexpr (LAYOUT == INDEXED) {
            fine = receive_rows<true>(a, round, block, nullptr, shared, WARPS, 0);
        } else {
            Ring ring = ring_of(block, shared);
            fine = receive_rows<true>(a, round, block, &ring, shared, WARPS, 0);
        }
    }
    end(a, DISPATCH_RECV, DISPATCH_RECV, !fine);
}

// Send and receive half in one launch: rows are placed while others are sent.
__global__ void __launch_bounds__(THREADS, 1) moe_dispatch(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Block block;
    block.clear(WARPS - EARLY);
    const u32 warp = warp_of_thread();
    const Round round = begin(a, DISPATCH_SEND, DISPATCH_RECV, [&] { prepare_rows(a, block, EARLY); });
    bool fine = round.live;
    if (round.live && warp == WARPS) raise_flags(a, round, block);
    if (round.live && warp < FIRST_RING) fine = receive_rows<!STRAIGHT>(a, round, block, nullptr, shared, EARLY, 0);
    if (round.live && warp >= FIRST_RING && warp < WARPS) {
        Ring ring = ring_of(block, shared);
        u32 noted = 0;
        if (warp >= EARLY) noted = send_rows<STRAIGHT>(a, round, watch(a, DISPATCH_SEND), block, ring, shared);
        fine = receive_rows<!STRAIGHT>(a, round, block, &ring, shared, EARLY, noted);
    }
    end(a, DISPATCH_SEND, DISPATCH_RECV, !fine);
}

__global__ void __launch_bounds__(ADD_THREADS, 1) moe_combine_send(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ AddBlock block;
    block.clear(GROUPS + COPIES);
    const Round round = begin(a, COMBINE_SEND, COMBINE_SEND, [&] { prepare_replies(a, block, GROUPS, true); });
    bool fine = round.live;
    if constexpr (COPIES) fine = fine && copy_rows(a, round, block, shared);
    else fine = fine && combine_rows(a, round, block, shared, GROUPS, false, true);
    end(a, COMBINE_SEND, COMBINE_SEND, !fine);
}

__global__ void __launch_bounds__(ADD_THREADS, 1) moe_combine_recv(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ AddBlock block;
    block.clear(0);
    const Round round = begin(a, COMBINE_RECV, COMBINE_RECV, [] {});
    const bool fine = round.live && (warp_of_thread() > ADD_WARPS || combine_rows(a, round, block, shared, 0, true, true));
    end(a, COMBINE_RECV, COMBINE_RECV, !fine);
}

__global__ void __launch_bounds__(ADD_THREADS, 1) moe_combine(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ AddBlock block;
    const u32 senders = COPIES ? 0 : sending_groups();
    block.clear(COPIES ? 1 : senders);
    const Round round = begin(a, COMBINE_SEND, COMBINE_RECV, [&] { prepare_replies(a, block, senders, !SUMS_OWN); });
    bool fine = round.live;
    if (fine && COPIES && warp_of_thread() > ADD_WARPS) fine = copy_beside(a, round, block, shared);
    else fine = fine && combine_rows(a, round, block, shared, senders, true, !SUMS_OWN);
    end(a, COMBINE_SEND, COMBINE_RECV, !fine);
}

} // extern "C"

#else

namespace {

constexpr u32 DISPATCH_THREADS = SEND_THREADS + RECEIVE_THREADS;
constexpr u32 ADD_TEAMS = 2; // per moe_combine_recv block
constexpr u32 COMBINE_BOTH_THREADS = REPLY_THREADS + COMBINE_THREADS;
// Resident blocks per SM in launches with both halves; the packet path has few blocks, which may use more
// registers.
constexpr u32 RESIDENT = PATH == PACKETS ? 1 : 2;

} // namespace

extern "C" {

// Launch parameters in `Kernel::ALL` order: threads per block, dynamic shared memory in bytes.
__constant__ u32 weft_moe_launch[9][2] = {
    {PLAN_THREADS, 0},
    {PLAN_THREADS, 0},
    {SEND_THREADS, SEND_SHARED},
    {RECEIVE_THREADS, RECEIVE_SHARED},
    {DISPATCH_THREADS, SEND_SHARED + RECEIVE_SHARED},
    {REPLY_THREADS, COMBINE_SHARED},
    {ADD_TEAMS * COMBINE_THREADS, 0},
    {COMBINE_BOTH_THREADS, COMBINE_SHARED},
    {COUNT_THREADS, 0},
};

__global__ void __launch_bounds__(SEND_THREADS, 1) moe_dispatch_send(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 ticket;
    Part part;
    const Round round = begin(a, DISPATCH_SEND, DISPATCH_SEND, [&] { prepare_rows(a, shared, ticket, part); });
    if (round.live) send_rows(a, round, shared, ticket, part);
    end(a, DISPATCH_SEND, DISPATCH_SEND, false);
}

__global__ void __launch_bounds__(RECEIVE_THREADS, 1) moe_dispatch_recv(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    const Round round = begin(a, DISPATCH_RECV, DISPATCH_RECV, [] {});
    const bool fine = round.live && receive_rows(a, round, Team{4, threadIdx.x, RECEIVE_THREADS}, shared);
    end(a, DISPATCH_RECV, DISPATCH_RECV, !fine);
}

// Send and receive half in one launch, side by side in every block: rows are placed while others are sent.
__global__ void __launch_bounds__(DISPATCH_THREADS, RESIDENT) moe_dispatch(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ u32 ticket;
    const bool sends = threadIdx.x < SEND_THREADS;
    Part part; // for the sending threads
    const Round round = begin(a, DISPATCH_SEND, DISPATCH_RECV, [&] {
        if (sends) prepare_rows(a, shared, ticket, part);
    });
    bool fine = round.live;
    if (round.live) {
        if (sends) send_rows(a, round, shared, ticket, part);
        else fine = receive_rows(a, round, Team{4, threadIdx.x - SEND_THREADS, RECEIVE_THREADS}, shared + SEND_SHARED);
    }
    end(a, DISPATCH_SEND, DISPATCH_RECV, !fine);
}

__global__ void __launch_bounds__(REPLY_THREADS, 1) moe_combine_send(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Ring ring;
    const Round round = begin(a, COMBINE_SEND, COMBINE_SEND, [&] { prepare_replies(a, ring); });
    if (round.live) {
        if (threadIdx.x < 32) fetch_outputs(a, round, ring, shared);
        else send_replies(a, round, ring, shared);
    }
    end(a, COMBINE_SEND, COMBINE_SEND, false);
}

__global__ void __launch_bounds__(ADD_TEAMS *COMBINE_THREADS, 1) moe_combine_recv(const __grid_constant__ Arguments a) {
    const Round round = begin(a, COMBINE_RECV, COMBINE_RECV, [] {});
    const bool fine = round.live && receive_replies(a, round, threadIdx.x / COMBINE_THREADS, ADD_TEAMS, threadIdx.x % COMBINE_THREADS);
    end(a, COMBINE_RECV, COMBINE_RECV, !fine);
}

__global__ void __launch_bounds__(COMBINE_BOTH_THREADS, RESIDENT) moe_combine(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Ring ring;
    const Round round = begin(a, COMBINE_SEND, COMBINE_RECV, [&] {
        if (threadIdx.x < REPLY_THREADS) prepare_replies(a, ring);
    });
    const bool receives = threadIdx.x >= REPLY_THREADS;
    if (round.live && threadIdx.x < 32) fetch_outputs(a, round, ring, shared);
    else if (round.live && !receives) send_replies(a, round, ring, shared);
    const bool fine = round.live && (!receives || receive_replies(a, round, 0, 1, threadIdx.x - REPLY_THREADS));
    end(a, COMBINE_SEND, COMBINE_RECV, !fine);
}

} // extern "C"

#endif
