// Plan for a large batch: slots and indices for all tokens, computed once and stored in device memory. Two
// launches: moe_plan_count makes a histogram for each CHUNK tokens; in moe_plan_scan each block sums the earlier
// chunks' histograms, and the last block sends the counts to all ranks.
#pragma once
#include "moe/launch.cuh"

namespace weft::moe {

constexpr u32 PLAN_THREADS = 256;

// How often `expert` occurs among eight 16-bit ids.
WEFT_DEVICE u32 matches(uint4 ids, u32 expert) {
    const u32 words[4] = {ids.x, ids.y, ids.z, ids.w};
    u32 n = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) n += ((words[i] & 0xFFFF) == expert) + (words[i] >> 16 == expert);
    return n;
}

// True if the channel is between two rounds. The send kernel that follows detects and records calls out of order.
WEFT_DEVICE bool plan_round(const Arguments &a, u32 &epoch) {
    wait_for_previous_kernel();
    const State *state = channel(a, a.rank).state();
    const u64 shares = state->left[DISPATCH_SEND], rounds = shares / SHARES;
    epoch = epoch_of(state->first_epoch, rounds);
    return !watch(a, PLAN).dead() && state->closed == 0 && shares == rounds * SHARES && state->left[DISPATCH_RECV] == shares &&
           state->left[COMBINE_SEND] == shares && state->left[COMBINE_RECV] == shares;
}

WEFT_DEVICE void plan_count(const Arguments &a) {
    __shared__ u32 bins[EXPERTS + RANKS];
    u32 epoch;
    if (!plan_round(a, epoch)) return;
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, PLAN);
    const u32 tokens = token_count(a), begin = blockIdx.x * CHUNK;
    for (u32 i = threadIdx.x; i < EXPERTS + RANKS; i += PLAN_THREADS) bins[i] = 0;
    __syncthreads();
    if (threadIdx.x < CHUNK && begin + threadIdx.x < tokens) {
        const u32 token = begin + threadIdx.x;
        u16 ids[TOP_K];
        clean_ids(a, watching, token, tokens, ids);
        u64 ranks = 0;
#pragma unroll
        for (u32 k = 0; k < TOP_K; ++k) {
            mine.ids(token)[k] = ids[k] == NO_EXPERT ? -1 : ids[k];
            if (ids[k] == NO_EXPERT) continue;
            atomicAdd(&bins[ids[k]], 1u);
            ranks |= 1ull << owner(ids[k]);
        }
        for (; ranks != 0; ranks &= ranks - 1) atomicAdd(&bins[EXPERTS + __ffsll(ranks) - 1], 1u);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < EXPERTS + RANKS; i += PLAN_THREADS) mine.histogram(blockIdx.x)[i] = bins[i];
}

WEFT_DEVICE void plan_scan(const Arguments &a) {
    __shared__ u32 base[EXPERTS + RANKS];
    __shared__ __align__(16) u16 ids[CHUNK * TOP_K];
    __shared__ u64 ranks[CHUNK];
    u32 epoch;
    if (!plan_round(a, epoch)) return;
    const Channel mine = channel(a, a.rank);
    const u32 tokens = token_count(a), begin = blockIdx.x * CHUNK;
    for (u32 i = threadIdx.x; i < EXPERTS + RANKS; i += PLAN_THREADS) {
        u32 sum = 0;
#pragma unroll 32
        for (u32 c = 0; c < blockIdx.x; ++c) sum += mine.histogram(c)[i];
        base[i] = sum;
    }
    if (threadIdx.x < CHUNK) {
        const u32 token = begin + threadIdx.x;
        u64 to = 0;
        for (u32 k = 0; k < TOP_K; ++k) {
            const i32 id = token < tokens ? mine.ids(token)[k] : -1;
            ids[threadIdx.x * TOP_K + k] = id < 0 ? NO_EXPERT : static_cast<u16>(id);
            if (id >= 0) to |= 1ull << owner(id);
        }
        ranks[threadIdx.x] = to;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < CHUNK * TOP_K; i += PLAN_THREADS) {
        const u32 token = i / TOP_K;
        const u16 expert = ids[i];
        if (begin + token >= tokens || expert == NO_EXPERT) continue;
        u32 index = base[expert];
        const u32 before = token * TOP_K;
#pragma unroll 4
        for (u32 j = 0; j < before / 8; ++j) index += matches(reinterpret_cast<const uint4 *>(ids)[j], expert);
        for (u32 j = before / 8 * 8; j < before; ++j) index += ids[j] == expert;
        mine.index(begin + token)[i % TOP_K] = index;
    }
    for (u32 i = threadIdx.x; i < CHUNK * RANKS; i += PLAN_THREADS) {
        const u32 token = i / RANKS, to = i % RANKS;
        if (begin + token >= tokens) continue;
        u32 slot = base[EXPERTS + to];
        for (u32 t = 0; t < token; ++t) slot += ranks[t] >> to & 1;
        mine.slots(begin + token)[to] = ranks[token] >> to & 1 ? static_cast<i32>(slot) : -1;
    }
    if (blockIdx.x + 1 != gridDim.x) return;
    if (threadIdx.x == 0) note_sent(a, mine, tokens, epoch);
    for (u32 i = threadIdx.x; i < EXPERTS + RANKS; i += PLAN_THREADS) {
        const u32 total = base[i] + mine.histogram(blockIdx.x)[i];
        const u32 to = i < EXPERTS ? owner(i) : i - EXPERTS;
        u64 *line = channel(a, to).counts(a.rank);
        ptx::store_relaxed_sys(line + (i < EXPERTS ? i - first_expert(to) : LOCAL), packet(epoch, MAPPED && i >= EXPERTS ? with_generation(a, total) : total));
    }
}

} // namespace weft::moe
