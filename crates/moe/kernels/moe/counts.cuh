// A round's counts: every source sends every rank the token count for each of that rank's experts, and the row count.
// From all sources' counts a receiver computes every position.
#pragma once
#include "moe/launch.cuh"

namespace weft::moe {

constexpr u32 MAX_LOCAL = 1024;
static_assert(LOCAL <= MAX_LOCAL, "counts of a rank's experts are kept in shared memory");

// This call's room for a rank's rows, or for each expert's.
WEFT_DEVICE u32 room_of(const Arguments &a) { return LAYOUT == PADDED ? EXPERT_CAPACITY : static_cast<u32>(a.positions); }

// Positions that a receiver computes from all sources' counts.
struct Places {
    u32 *start;                // [RANKS][LOCAL]: tokens from lower sources for an expert
    u32 offset[LOCAL + 1];     // start of an expert's group
    u32 total[LOCAL];          // an expert's tokens
    u32 rows[RANKS], most;     // rows from each source, and the maximum
    u32 before[RANKS + 1];     // rows from lower sources: start of the source's rows in the dense layout
    u32 failed, needed; // needed: room, if it exceeds the available room
};

// Checks and removes the map generations in the row counts. One team; false for all threads in it on a mismatch.
WEFT_DEVICE bool check_generations(const Arguments &a, const Watch &watching, const Team &team, Places &places) {
    if constexpr (!MAPPED) return true;
    const u32 own = places.rows[a.rank] >> ROWS_BITS;
    team.sync(); // after all have read it
    for (u32 source = team.thread; source < RANKS; source += team.threads) {
        const u32 value = places.rows[source], seen = value >> ROWS_BITS;
        places.rows[source] = min(value & ((1u << ROWS_BITS) - 1), MAX_TOKENS);
        if (seen == own) continue;
        watching.fail(PLACEMENT, source, 0, own, seen);
        places.failed = 1;
    }
    team.sync();
    return places.failed == 0;
}

// Waits for all counts, and computes every offset. One team; false for all threads in it on a failure.
WEFT_DEVICE bool receive_counts(const Arguments &a, const Round &round, const Team &team, Places &places) {
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, DISPATCH_RECV);
    const u32 local = first_expert(a.rank + 1) - first_expert(a.rank);
    for (u32 i = team.thread; i < RANKS * (LOCAL + 1); i += team.threads) {
        const u32 source = i / (LOCAL + 1), e = i % (LOCAL + 1);
        if (e >= local && e != LOCAL) continue; // other ranks have more experts
        u32 value;
        if (!wait_packet(watching, mine.counts(source) + e, round.epoch, source, e, value)) {
            places.failed = 1;
            break;
        }
        if (value >= KEPT && (e != LOCAL || !MAPPED)) { // with maps, a row count's highest bits are the generation
            watching.fail(OTHER_PLAN, source, 0, 0, value & ~KEPT);
            places.failed = 1;
            break;
        }
        if (e == LOCAL) places.rows[source] = MAPPED ? value : min(value, MAX_TOKENS);
        else places.start[source * LOCAL + e] = min(value, MAX_TOKENS);
    }
    team.sync();
    if (places.failed || !check_generations(a, watching, team, places)) return false;
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
            u32 most = 0, rows = 0;
            for (u32 s = 0; s < RANKS; ++s) most = max(most, places.rows[s]), places.before[s] = rows, rows += places.rows[s];
            places.before[RANKS] = rows;
            const u32 used = LAYOUT == DENSE ? rows : places.offset[local];
            places.needed = LAYOUT != PADDED && used > a.positions ? used : 0;
            if (LAYOUT == PADDED && over)
                for (u32 e = 0; e < local; ++e) places.needed = max(places.needed, places.total[e]);
            places.most = places.needed != 0 ? 0 : most;
        }
    }
    team.sync();
    return true;
}

// Adds an expert's token count in this round to the load. Atomic, since rounds on other channels may add concurrently.
WEFT_DEVICE void add_load(const Arguments &a, u32 expert, u32 tokens) {
    if (a.out_load == 0) return;
    if (a.load_bytes == 8) atomicAdd(reinterpret_cast<u64 *>(a.out_load) + expert, static_cast<u64>(tokens));
    else atomicAdd(reinterpret_cast<u32 *>(a.out_load) + expert, tokens);
}

// Loads a kept plan's places, in place of counts. The first block checks that every source uses the same plan. One
// team; false for all its threads on a failure.
WEFT_DEVICE bool take_plan(const Arguments &a, const Round &round, const Team &team, Places &places) {
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, DISPATCH_RECV);
    const u32 key = mine.received()[KEY];
    for (u32 source = team.thread; source < RANKS; source += team.threads) {
        places.rows[source] = mine.received()[source];
        if (blockIdx.x != 0) continue;
        u32 seen;
        if (!wait_packet(watching, mine.counts(source) + LOCAL, round.epoch, source, LOCAL, seen)) {
            places.failed = 1;
        } else if (seen != (KEPT | key)) {
            watching.fail(OTHER_PLAN, source, 0, key, seen < KEPT ? 0 : seen & ~KEPT);
            places.failed = 1;
        }
    }
    if (team.thread == 0) places.needed = mine.received()[NEEDED];
    team.sync();
    if (places.failed) return false;
    if (team.thread == 0) {
        u32 most = 0;
        for (u32 s = 0; s < RANKS; ++s) most = max(most, places.rows[s]);
        places.most = most;
        if (blockIdx.x == 0 && places.needed != 0) watching.notice(CAPACITY, a.rank, 0, places.needed, room_of(a));
    }
    team.sync();
    return true;
}

// Publishes counts and offsets, for the host and for combine. One team in a launch.
WEFT_DEVICE void publish_counts(const Arguments &a, const Team &team, const Places &places) {
    const Channel mine = channel(a, a.rank);
    const u32 local = first_expert(a.rank + 1) - first_expert(a.rank);
    i32 *counts = reinterpret_cast<i32 *>(a.out_counts), *offsets = reinterpret_cast<i32 *>(a.out_offsets);
    i32 *rows = reinterpret_cast<i32 *>(a.out_rows);
    float *weights = reinterpret_cast<float *>(a.out_weights);
    i32 *experts = reinterpret_cast<i32 *>(a.out_experts);
    const bool over = places.needed != 0;
    for (u32 e = team.thread; e < local; e += team.threads) counts[e] = over ? 0 : places.total[e];
    for (u32 e = team.thread; e <= (LAYOUT == DENSE ? RANKS : local); e += team.threads)
        offsets[e] = over ? 0 : LAYOUT == DENSE ? places.before[e] : places.offset[e];
    for (u32 s = team.thread; s <= RANKS; s += team.threads) mine.received()[s] = s == NEEDED ? places.needed : over ? 0 : places.rows[s];
    if (team.thread == 0) mine.received()[USED] = over ? 0 : LAYOUT == DENSE ? places.before[RANKS] : places.offset[local];
    if (over) {
        if (team.thread == 0) watch(a, DISPATCH_RECV).notice(CAPACITY, a.rank, 0, places.needed, room_of(a));
        return;
    }
    for (u32 e = team.thread; e < local; e += team.threads) add_load(a, first_expert(a.rank) + e, places.total[e]);
    // Padding: row -1, weight 0.
    for (u32 e = team.thread / 32; LAYOUT != DENSE && e < local; e += team.threads / 32) {
        for (u32 p = places.offset[e] + places.total[e] + team.thread % 32; p < places.offset[e + 1]; p += 32) {
            rows[p] = -1;
            weights[p] = 0.0f;
            if (experts != nullptr) experts[p] = -1;
        }
    }
}

// Marks positions after the last group with expert -1; without room, all positions. One team in each block.
WEFT_DEVICE void mark_unused(const Arguments &a, const Team &team, const Places &places) {
    if (a.out_experts == 0) return;
    const u32 used = LAYOUT == DENSE || places.needed != 0 ? 0 : places.offset[first_expert(a.rank + 1) - first_expert(a.rank)];
    for (u32 p = used + blockIdx.x * team.threads + team.thread; p < a.positions; p += gridDim.x * team.threads)
        reinterpret_cast<i32 *>(a.out_experts)[p] = -1;
}

// Marks dense rows after the last with expert -1 and weight 0, so that a kernel that reads ids may take the whole
// array. One team in each block.
WEFT_DEVICE void mask_unused_rows(const Arguments &a, const Team &team, const Places &places) {
    const u64 used = places.needed != 0 ? 0 : places.before[RANKS], all = a.positions * TOP_K;
    for (u64 i = used * TOP_K + blockIdx.x * team.threads + team.thread; i < all; i += gridDim.x * team.threads) {
        reinterpret_cast<Id *>(a.out_rows)[i] = -1;
        reinterpret_cast<float *>(a.out_weights)[i] = 0.0f;
    }
}

// Places for this round's rows, by counts or by a kept plan. One team; the team in block `publisher` also publishes
// the counts. False for all its threads on a failure.
WEFT_DEVICE bool receive_plan(const Arguments &a, const Round &round, const Team &team, Places &places, u32 publisher) {
    if (a.kept) return take_plan(a, round, team, places);
    if (!receive_counts(a, round, team, places)) return false;
    if (blockIdx.x == publisher) publish_counts(a, team, places);
    mark_unused(a, team, places);
    if constexpr (LAYOUT == DENSE) mask_unused_rows(a, team, places);
    return true;
}

// Records one of a row's experts at its position and returns it; -1 for experts on other ranks.
WEFT_DEVICE i32 place(const Arguments &a, const Places &places, u32 source, u32 slot, const Choice &choice) {
    const u32 low = first_expert(a.rank), local = first_expert(a.rank + 1) - low;
    const u32 e = choice.expert - low; // unsigned: experts on lower ranks wrap to values above `local`
    if (choice.expert == NO_EXPERT || e >= local) return -1;
    const u32 position = places.offset[e] + places.start[source * LOCAL + e] + choice.index;
    if (position >= a.positions) return -1; // only if a peer's metadata contradict the counts
    reinterpret_cast<i32 *>(a.out_rows)[position] = source * MAX_TOKENS + slot;
    reinterpret_cast<float *>(a.out_weights)[position] = choice.weight;
    if (a.out_experts != 0) reinterpret_cast<i32 *>(a.out_experts)[position] = e;
    return position;
}

// Records a dense row's experts, one lane per top-k slot: the local id and the weight, or -1 and 0. One warp; returns
// the row in the first lane, -1 in the others.
WEFT_DEVICE i32 place_dense(const Arguments &a, const Places &places, u32 source, u32 slot, const Choice &choice) {
    const u32 lane = lane_of_thread(), row = places.before[source] + slot;
    const u32 low = first_expert(a.rank), local = first_expert(a.rank + 1) - low;
    if (lane < TOP_K) {
        const u32 e = choice.expert - low; // unsigned: experts on lower ranks wrap to values above `local`
        const bool here = choice.expert != NO_EXPERT && e < local;
        reinterpret_cast<Id *>(a.out_rows)[static_cast<u64>(row) * TOP_K + lane] = here ? static_cast<i32>(e) : -1;
        reinterpret_cast<float *>(a.out_weights)[static_cast<u64>(row) * TOP_K + lane] = here ? choice.weight : 0.0f;
    }
    return lane == 0 ? static_cast<i32>(row) : -1;
}

// Records a row's experts, one per lane, in top-k order for combine. One warp; returns the lane's position, or -1.
WEFT_DEVICE i32 place_pairs(const Arguments &a, const Places &places, u32 source, u32 slot, const Choice &choice) {
    const u32 lane = threadIdx.x % 32;
    if (a.kept) return lane < TOP_K ? channel(a, a.rank).entries(source, slot)[lane].position : -1;
    const i32 position = place(a, places, source, slot, choice);
    const u32 placed = __ballot_sync(~0u, position >= 0);
    Entry *entries = channel(a, a.rank).entries(source, slot);
    if (position >= 0) entries[__popc(placed & ((1u << lane) - 1))] = Entry{position, choice.weight};
    if (lane < TOP_K && lane >= __popc(placed)) entries[lane] = Entry{-1, 0.0f};
    return position;
}

// This lane's expert in a staged row.
WEFT_DEVICE Choice choice_in(const u8 *stage) {
    const u32 lane = lane_of_thread();
    return lane < TOP_K ? reinterpret_cast<const Choice *>(stage + WEFT_ROW_META_AT)[lane] : Choice{NO_EXPERT, 0, 0.0f};
}

// Places a row whose experts are `choice`, one per lane. One warp; returns a position in each lane that has one, -1 in
// the others.
WEFT_DEVICE i32 place_row(const Arguments &a, const Places &places, u32 source, u32 slot, const Choice &choice) {
    if constexpr (LAYOUT == DENSE) return place_dense(a, places, source, slot, choice);
    else return place_pairs(a, places, source, slot, choice);
}

// Waits for a row that stays in the slot, and records the experts (indexed layout). One lane per row.
WEFT_DEVICE bool index_row(const Arguments &a, const Round &round, const Watch &watching, const Places &places, u32 source, u32 slot) {
    const Channel mine = channel(a, a.rank);
    if (!wait(watching, mine.row_flag(source, slot), round.epoch, source, slot)) return false;
    if (a.kept) return true;
    const u8 *choices = mine.row(source, slot) + WEFT_ROW_META_AT;
    Entry *entries = mine.entries(source, slot);
    u32 placed = 0;
#pragma unroll
    for (u32 k = 0; k < TOP_K; k += 2) {
        const uint4 v = ptx::load_stream(choices + 8 * k); // the row size is a multiple of 16
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
    const u8 *scales = stage + WEFT_ROW_SCALES_AT;
    if constexpr (SCALE_BYTES != 0 && SCALE_LAYOUT != ROW) {
        const u64 group = position / PLACED_ROWS * PLACED_COLUMNS * COLUMN_BYTES;
        u8 *to = reinterpret_cast<u8 *>(a.out_scales) + group + position % PLACED_ROWS * PLACED_BYTES;
        for (u32 i = thread; i < PLACED_COLUMNS; i += threads) {
            if constexpr (PLACED_BYTES == 4) {
                u32 word = reinterpret_cast<const u32 *>(scales)[i];
                if (SCALE_LAYOUT == COLUMN_PACKED && SCALES % 4 != 0 && i == SCALES / 4) word &= (1u << SCALES % 4 * 8) - 1;
                *reinterpret_cast<u32 *>(to + i * COLUMN_BYTES) = word;
            } else {
                to[i * COLUMN_BYTES] = scales[i];
            }
        }
    } else if constexpr (SCALE_BYTES != 0) {
        u8 *to = reinterpret_cast<u8 *>(a.out_scales) + static_cast<u64>(position) * SCALES * SCALE_BYTES;
        for (u32 i = thread; i < SCALES; i += threads) {
            if constexpr (SCALE_BYTES == 4) reinterpret_cast<u32 *>(to)[i] = reinterpret_cast<const u32 *>(scales)[i];
            else to[i] = scales[i];
        }
    }
}

// Copies a staged row's scales to this lane's position, if it has one. One warp.
WEFT_DEVICE void place_scales_of(const Arguments &a, const u8 *stage, i32 position) {
    if constexpr (SCALE_BYTES != 0)
        for (u32 placed = __ballot_sync(~0u, position >= 0); placed != 0; placed &= placed - 1)
            place_scales(a, stage, __shfl_sync(~0u, position, __ffs(placed) - 1), lane_of_thread(), WARP);
}

// A round's counts for the host, which sizes the outputs by them: counts and offsets as in `publish_counts`, the
// needed room if it exceeds the available, and last the ticket `given`, by a release. One block, after the send half.
constexpr u32 COUNT_THREADS = 256, NOT_COUNTED = 1u << 31;

WEFT_DEVICE void send_counts_to_host(const Arguments &a) {
    __shared__ Places places;
    __shared__ u32 start[RANKS * LOCAL];
    wait_for_previous_kernel();
    const State *state = channel(a, a.rank).state();
    const Team team{0, threadIdx.x, COUNT_THREADS};
    const u64 shares = state->left[DISPATCH_RECV];
    const Round round{epoch_of(state->first_epoch, shares / SHARES), state->left[DISPATCH_SEND] == shares + SHARES && state->closed == 0};
    if (threadIdx.x == 0) places.start = start, places.failed = 0;
    team.sync();
    const bool fine = round.live && receive_counts(a, round, team, places);
    const u32 local = first_expert(a.rank + 1) - first_expert(a.rank);
    for (u32 e = threadIdx.x; e <= local; e += COUNT_THREADS) {
        if (e < local) reinterpret_cast<i32 *>(a.out_counts)[e] = fine ? places.total[e] : 0;
        reinterpret_cast<i32 *>(a.out_offsets)[e] = fine ? places.offset[e] : 0;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    u32 *told = reinterpret_cast<u32 *>(a.out_rows);
    told[0] = fine ? places.needed : 0;
    ptx::store_release_sys(told + 1, fine ? a.given : a.given | NOT_COUNTED);
}

// Poisons the dispatch outputs: 0xFF bytes, counts 0.
WEFT_DEVICE void poison_dispatch(const Arguments &a) {
    const u32 local = first_expert(a.rank + 1) - first_expert(a.rank);
    poison(a.out_tokens, a.positions * WIRE_BYTES);
    poison(a.out_scales, SCALE_LAYOUT == ROW ? a.positions * SCALES * SCALE_BYTES : PLACED_SCALES);
    const u64 notes = LAYOUT == DENSE ? a.positions * TOP_K : a.positions;
    poison(a.out_rows, notes * (LAYOUT == DENSE ? sizeof(Id) : 4));
    poison(a.out_weights, notes * 4);
    poison(a.out_experts, 4 * a.positions);
    if (a.kept) return;
    for (u32 e = threadIdx.x; e < local; e += blockDim.x) reinterpret_cast<i32 *>(a.out_counts)[e] = 0;
    for (u32 e = threadIdx.x; e <= (LAYOUT == DENSE ? RANKS : local); e += blockDim.x) reinterpret_cast<i32 *>(a.out_offsets)[e] = 0;
}

} // namespace weft::moe
