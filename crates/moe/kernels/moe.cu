// The kernels of MoE dispatch and combine: what `weft_moe::device` launches, and nothing but who does what.
#include "moe/combine.cuh"
#include "moe/dispatch.cuh"
#include "moe/plan.cuh"

using namespace weft;
using namespace weft::moe;

namespace {

constexpr u32 DISPATCH_SEND_THREADS = SEND_TEAMS * SEND_THREADS;
constexpr u32 DISPATCH_THREADS = DISPATCH_SEND_THREADS + RECEIVE_THREADS;
constexpr u32 ADD_TEAMS = 2; // where combine only receives
constexpr u32 COMBINE_BOTH_THREADS = ANSWER_THREADS + COMBINE_THREADS;
// Launches of both halves that fit on an SM at once. On the bandwidth path they leave other SMs alone instead.
constexpr u32 RESIDENT = PATH == BANDWIDTH ? 1 : 2;

WEFT_DEVICE Round begin(const Arguments &a, u32 first, u32 last, auto meanwhile) {
    return enter(a, channel(a, a.rank), watch(a, first), first, last, meanwhile);
}

// `failed` of a thread of the receiving half; a sender waits for nobody, and cannot fail.
WEFT_DEVICE void end(const Arguments &a, u32 first, u32 last, bool failed) {
    if (!leave(channel(a, a.rank), first, last, failed)) return;
    if (last == DISPATCH_RECV) poison_dispatch(a);
    if (last == COMBINE_RECV) poison_combine(a);
}

} // namespace

extern "C" {

// How to launch each kernel below, in their order: threads of a block, bytes of dynamic shared memory.
__constant__ u32 weft_moe_launch[8][2] = {
    {PLAN_THREADS, 0},
    {PLAN_THREADS, 0},
    {DISPATCH_SEND_THREADS, SEND_SHARED},
    {RECEIVE_THREADS, RECEIVE_SHARED},
    {DISPATCH_THREADS, SEND_SHARED + RECEIVE_SHARED},
    {ANSWER_THREADS, COMBINE_SHARED},
    {ADD_TEAMS * COMBINE_THREADS, 0},
    {COMBINE_BOTH_THREADS, COMBINE_SHARED},
};

__global__ void __launch_bounds__(PLAN_THREADS, 1) moe_plan_count(const __grid_constant__ Arguments a) { plan_count(a); }
__global__ void __launch_bounds__(PLAN_THREADS, 1) moe_plan_scan(const __grid_constant__ Arguments a) { plan_scan(a); }

__global__ void __launch_bounds__(DISPATCH_SEND_THREADS, 1) moe_dispatch_send(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Tickets tickets;
    const u32 number = threadIdx.x / SEND_THREADS;
    const Round round = begin(a, DISPATCH_SEND, DISPATCH_SEND, [&] { prepare_rows(a, number, shared, tickets); });
    if (round.live) send_rows(a, round, number, shared, tickets);
    end(a, DISPATCH_SEND, DISPATCH_SEND, false);
}

__global__ void __launch_bounds__(RECEIVE_THREADS, 1) moe_dispatch_recv(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    const Round round = begin(a, DISPATCH_RECV, DISPATCH_RECV, [] {});
    const bool fine = round.live && receive_rows(a, round, Team{4, threadIdx.x, RECEIVE_THREADS}, shared);
    end(a, DISPATCH_RECV, DISPATCH_RECV, !fine);
}

// Both halves in one launch, side by side in every block, so that rows are placed while others leave.
__global__ void __launch_bounds__(DISPATCH_THREADS, RESIDENT) moe_dispatch(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Tickets tickets;
    const bool sends = threadIdx.x < DISPATCH_SEND_THREADS;
    const u32 number = threadIdx.x / SEND_THREADS;
    const Round round = begin(a, DISPATCH_SEND, DISPATCH_RECV, [&] {
        if (sends) prepare_rows(a, number, shared, tickets);
    });
    bool fine = true;
    if (round.live) {
        if (sends) send_rows(a, round, number, shared, tickets);
        else fine = receive_rows(a, round, Team{4, threadIdx.x - DISPATCH_SEND_THREADS, RECEIVE_THREADS}, shared + SEND_SHARED);
    }
    end(a, DISPATCH_SEND, DISPATCH_RECV, !fine);
}

__global__ void __launch_bounds__(ANSWER_THREADS, 1) moe_combine_send(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Ring ring;
    const Round round = begin(a, COMBINE_SEND, COMBINE_SEND, [&] { prepare_answers(a, ring); });
    if (round.live) {
        if (threadIdx.x < 32) fetch_outputs(a, round, ring, shared);
        else send_answers(a, round, ring, shared);
    }
    end(a, COMBINE_SEND, COMBINE_SEND, false);
}

__global__ void __launch_bounds__(ADD_TEAMS *COMBINE_THREADS, 1) moe_combine_recv(const __grid_constant__ Arguments a) {
    const Round round = begin(a, COMBINE_RECV, COMBINE_RECV, [] {});
    const bool fine = round.live && receive_answers(a, round, threadIdx.x / COMBINE_THREADS, ADD_TEAMS, threadIdx.x % COMBINE_THREADS);
    end(a, COMBINE_RECV, COMBINE_RECV, !fine);
}

__global__ void __launch_bounds__(COMBINE_BOTH_THREADS, RESIDENT) moe_combine(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ Ring ring;
    const Round round = begin(a, COMBINE_SEND, COMBINE_RECV, [&] {
        if (threadIdx.x < ANSWER_THREADS) prepare_answers(a, ring);
    });
    bool fine = true;
    if (round.live) {
        if (threadIdx.x < 32) fetch_outputs(a, round, ring, shared);
        else if (threadIdx.x < ANSWER_THREADS) send_answers(a, round, ring, shared);
        else fine = receive_answers(a, round, 0, 1, threadIdx.x - ANSWER_THREADS);
    }
    end(a, COMBINE_SEND, COMBINE_RECV, !fine);
}

} // extern "C"
