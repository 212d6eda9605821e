// Counts of a round: every source tells every rank how many tokens name each of its experts, and how many rows
// come. From the counts of all sources a receiver works out every position.
#pragma once
#include "moe/launch.cuh"

namespace weft::moe {

constexpr u32 MAX_LOCAL = 1024;
static_assert(LOCAL <= MAX_LOCAL, "counts of a rank's experts are kept in shared memory");

// What a receiver works out of the counts of all sources.
struct Places {
    u32 *start;                // [RANKS][LOCAL]: tokens of lower sources for an expert
    u32 offset[LOCAL + 1];     // where an expert's group begins
    u32 total[LOCAL];          // tokens of an expert
    u32 rows[RANKS], most;     // rows from each source, and the most of any
    u32 failed, needed; // needed: how much room, if there is less
};

// Waits for all counts, and computes every offset. One team; false for all of it if that failed.
WEFT_DEVICE bool receive_counts(const Arguments &a, const Round &round, const Team &team, Places &places) {
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, DISPATCH_RECV);
    const u32 local = first_expert(a.rank + 1) - first_expert(a.rank);
    for (u32 i = team.thread; i < RANKS * (local + 1); i += team.threads) {
        const u32 source = i / (local + 1), e = i % (local + 1);
        u32 value;
        if (!wait_packet(watching, mine.counts(source) + (e == local ? LOCAL : e), round.epoch, source, e, value)) {
            places.failed = 1;
            break;
        }
        if (e == local) places.rows[source] = min(value, MAX_TOKENS);
        else places.start[source * LOCAL + e] = min(value, MAX_TOKENS);
    }
    team.sync();
    if (places.failed) return false;
    for (u32 e = team.thread; e < local; e += team.threads) {
        u32 sum = 0;
        for (u32 s = 0; s < RANKS; ++s) {
            const u32 count = places.start[s * LOCAL + e];
            places.start[s * LOCAL + e] = sum;
            sum += count;
        }
        places.total[e] = sum;
    }
    team.sync();
    if (team.thread < 32) {
        u32 carry = 0;
        bool over = false;
        for (u32 begin = 0; begin < local; begin += 32) {
            const u32 e = begin + team.thread;
            const u32 total = e < local ? places.total[e] : 0;
            if constexpr (LAYOUT == PADDED) {
                if (e < local) places.offset[e] = e * EXPERT_CAPACITY;
                over |= total > EXPERT_CAPACITY;
            } else {
                u32 sum = (total + PAD_TO - 1) / PAD_TO * PAD_TO;
                const u32 own = sum;
#pragma unroll
                for (u32 step = 1; step < 32; step *= 2) {
                    const u32 lower = __shfl_up_sync(~0u, sum, step);
                    if (team.thread >= step) sum += lower;
                }
                if (e < local) places.offset[e] = carry + sum - own;
                carry += __shfl_sync(~0u, sum, 31);
            }
        }
        over = __any_sync(~0u, over);
        if (team.thread == 0) {
            places.offset[local] = LAYOUT == PADDED ? local * EXPERT_CAPACITY : carry;
            u32 most = 0;
            for (u32 s = 0; s < RANKS; ++s) most = max(most, places.rows[s]);
            places.needed = LAYOUT != PADDED && places.offset[local] > POSITIONS ? places.offset[local] : 0;
            if (LAYOUT == PADDED && over)
                for (u32 e = 0; e < local; ++e) places.needed = max(places.needed, places.total[e]);
            places.most = places.needed != 0 ? 0 : most;
        }
    }
    team.sync();
    return true;
}

// Publishes counts and offsets, for the host and for combine. One team of the first block.
WEFT_DEVICE void publish_counts(const Arguments &a, const Team &team, const Places &places) {
    const Channel mine = channel(a, a.rank);
    const u32 local = first_expert(a.rank + 1) - first_expert(a.rank);
    i32 *counts = reinterpret_cast<i32 *>(a.out_counts), *offsets = reinterpret_cast<i32 *>(a.out_offsets);
    i32 *rows = reinterpret_cast<i32 *>(a.out_rows);
    float *weights = reinterpret_cast<float *>(a.out_weights);
    const bool over = places.needed != 0;
    for (u32 e = team.thread; e < local; e += team.threads) counts[e] = over ? 0 : places.total[e];
    for (u32 e = team.thread; e <= local; e += team.threads) offsets[e] = over ? 0 : places.offset[e];
    for (u32 s = team.thread; s <= RANKS; s += team.threads) mine.received()[s] = s == RANKS ? places.needed : over ? 0 : places.rows[s];
    if (over) {
        if (team.thread == 0) watch(a, DISPATCH_RECV).notice(CAPACITY, a.rank, 0, places.needed, LAYOUT == PADDED ? EXPERT_CAPACITY : POSITIONS);
        return;
    }
    // Padding holds nobody's token.
    for (u32 e = team.thread / 32; e < local; e += team.threads / 32) {
        for (u32 p = places.offset[e] + places.total[e] + team.thread % 32; p < places.offset[e + 1]; p += 32) {
            rows[p] = -1;
            weights[p] = 0.0f;
        }
    }
}

// Notes one expert of a row at its position; -1 if the expert is not of this rank.
WEFT_DEVICE i32 place(const Arguments &a, const Places &places, u32 source, u32 slot, const Choice &choice) {
    const u32 low = first_expert(a.rank), local = first_expert(a.rank + 1) - low;
    const u32 e = choice.expert - low; // of a lower rank, or none: far beyond `local`
    if (choice.expert == NO_EXPERT || e >= local) return -1;
    const u32 position = places.offset[e] + places.start[source * LOCAL + e] + choice.index;
    if (position >= POSITIONS) return -1; // no honest peer's
    reinterpret_cast<i32 *>(a.out_rows)[position] = source * MAX_TOKENS + slot;
    reinterpret_cast<float *>(a.out_weights)[position] = choice.weight;
    return position;
}

// Notes a row's experts, a lane for each, so that combine finds them in top-k order. One warp.
WEFT_DEVICE i32 place_row(const Arguments &a, const Places &places, u32 source, u32 slot, const Choice *choices) {
    const u32 lane = threadIdx.x % 32;
    Choice choice{NO_EXPERT, 0, 0.0f};
    if (lane < TOP_K) choice = choices[lane];
    const i32 position = place(a, places, source, slot, choice);
    const u32 placed = __ballot_sync(~0u, position >= 0);
    Entry *entries = channel(a, a.rank).entries(source, slot);
    if (position >= 0) entries[__popc(placed & ((1u << lane) - 1))] = Entry{position, choice.weight};
    if (lane < TOP_K && lane >= __popc(placed)) entries[lane] = Entry{-1, 0.0f};
    return position;
}

// Notes the experts of a row that stays where it landed, once it is there. A lane takes a row.
WEFT_DEVICE bool index_row(const Arguments &a, const Round &round, const Watch &watching, const Places &places, u32 source, u32 slot) {
    const Channel mine = channel(a, a.rank);
    if (!wait(watching, mine.row_flag(source, slot), round.epoch, source, slot)) return false;
    const u8 *choices = mine.row(source, slot) + WEFT_ROW_META_AT;
    Entry *entries = mine.entries(source, slot);
    u32 placed = 0;
#pragma unroll
    for (u32 k = 0; k < TOP_K; k += 2) {
        const uint4 v = ptx::load_stream(choices + 8 * k); // the row ends at a multiple of 16
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 2 && k + i < TOP_K; ++i) {
            const Choice choice{static_cast<u16>(words[2 * i]), static_cast<u16>(words[2 * i] >> 16), __uint_as_float(words[2 * i + 1])};
            const i32 position = place(a, places, source, slot, choice);
            if (position >= 0) entries[placed++] = Entry{position, choice.weight};
        }
    }
    for (; placed < TOP_K; ++placed) entries[placed] = Entry{-1, 0.0f};
    return true;
}

// Copies a staged row's scales to `position`, by `threads` threads.
WEFT_DEVICE void place_scales(const Arguments &a, const u8 *stage, u32 position, u32 thread, u32 threads) {
    if constexpr (SCALE_BYTES != 0) {
        u8 *to = reinterpret_cast<u8 *>(a.out_scales) + static_cast<u64>(position) * SCALES * SCALE_BYTES;
        for (u32 i = thread; i < SCALES; i += threads) {
            if constexpr (SCALE_BYTES == 4) reinterpret_cast<u32 *>(to)[i] = reinterpret_cast<const u32 *>(stage + WEFT_ROW_SCALES_AT)[i];
            else to[i] = stage[WEFT_ROW_SCALES_AT + i];
        }
    }
}

// Poisons the outputs of dispatch: 0xFF bytes, counts 0.
WEFT_DEVICE void poison_dispatch(const Arguments &a) {
    const u32 local = first_expert(a.rank + 1) - first_expert(a.rank);
    poison(a.out_tokens, static_cast<u64>(POSITIONS) * WIRE_BYTES);
    poison(a.out_scales, static_cast<u64>(POSITIONS) * SCALES * SCALE_BYTES);
    poison(a.out_rows, 4ull * POSITIONS);
    poison(a.out_weights, 4ull * POSITIONS);
    for (u32 e = threadIdx.x; e <= local; e += blockDim.x) {
        if (e < local) reinterpret_cast<i32 *>(a.out_counts)[e] = 0;
        reinterpret_cast<i32 *>(a.out_offsets)[e] = 0;
    }
}

} // namespace weft::moe
