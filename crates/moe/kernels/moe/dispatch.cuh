// Dispatch: rows to the ranks of their experts, and there to their positions. No barrier, no round trip.
//
// Every source has room for all its tokens on every rank, so a row's slot is how many earlier tokens go
// to that rank: a number that each block works out from the expert ids alone. Counts for each expert
// travel as packets, at once; rows travel as one bulk copy for each token and rank. A row's flag rises when
// its copy is complete. The receiver needs the counts of all sources to know positions, and each row's own
// flag, and nothing else: rows are placed as they come.
//
// Why the flag covers the row: the thread that issues a copy waits for its full completion
// (cp.async.bulk.wait_group, not .read), after which its bytes are visible to that thread, and then releases
// the flag at system scope. The receiver acquires the flag, passes a proxy fence, and loads.
// Why a row's memory is free: its reader signals in combine (see combine.cuh), and this rank's next
// dispatch comes after its own combine has received every rank's signal.
// A sender waits for nobody, and takes tokens by ticket: one resident block of a launch sends them all.
#pragma once
#include "moe/elements.cuh"
#include "moe/launch.cuh"

namespace weft::moe {

constexpr u32 SEND_THREADS = 256, SEND_WARPS = SEND_THREADS / 32;
// Rows of a team whose copies are under way.
constexpr u32 SEND_STAGES = PATH == BANDWIDTH ? 4 : 2;
// A second team sends while the first waits for memory; for one token to a block it has no use.
constexpr u32 SEND_TEAMS = PATH == BANDWIDTH ? 2 : 1;
constexpr u32 STAGE_BYTES = (ROW_BYTES + 127) / 128 * 128;
constexpr u32 STAGED_WARPS = 65536 / STAGE_BYTES < 2 ? 2 : 65536 / STAGE_BYTES > 8 ? 8 : 65536 / STAGE_BYTES;
constexpr u32 RECEIVE_WARPS = PATH == PACKETS || LAYOUT == INDEXED ? 8 : STAGED_WARPS;
constexpr u32 RECEIVE_THREADS = RECEIVE_WARPS * 32;
constexpr u32 IDS_BYTES = PATH == BANDWIDTH ? 0 : (MAX_TOKENS * TOP_K * 2 + 15) / 16 * 16;
constexpr u32 SEND_SHARED = SEND_TEAMS * SEND_STAGES * STAGE_BYTES + IDS_BYTES;
constexpr u32 RECEIVE_STAGES = LAYOUT == INDEXED ? 0 : PATH == PACKETS ? 1 : RECEIVE_WARPS;
constexpr u32 RECEIVE_SHARED = RECEIVE_STAGES * STAGE_BYTES + (RANKS * LOCAL * 4 + 15) / 16 * 16;
constexpr u32 MAX_LOCAL = 1024;
static_assert(LOCAL <= MAX_LOCAL, "counts of a rank's experts are kept in shared memory");

// A thread's part of a token on its way from the user's row to a staged row with scales. It is loaded before
// the token's destinations are worked out, so that memory answers meanwhile.
struct Part {
    static constexpr u32 TURNS = ((CAST ? HIDDEN / 8 : WIRE_BYTES / 16) + SEND_THREADS - 1) / SEND_THREADS;
    Eight eight[CAST ? TURNS : 1];
    uint4 raw[CAST ? 1 : TURNS];

    WEFT_DEVICE void load(const Arguments &a, u32 token, u32 thread) {
        const u8 *row = reinterpret_cast<const u8 *>(a.tokens) + static_cast<u64>(token) * TOKEN_BYTES;
#pragma unroll
        for (u32 i = 0; i < TURNS; ++i) {
            const u32 n = i * SEND_THREADS + thread;
            if constexpr (CAST) {
                if (8 * n < HIDDEN) eight[i].load(row, 8 * n);
                else eight[i].clear();
            } else if (16 * n < WIRE_BYTES) {
                raw[i] = ptx::load_constant(row + 16 * n);
            }
        }
    }

    WEFT_DEVICE void stage(const Arguments &a, u32 token, u32 thread, u8 *to) const {
#pragma unroll
        for (u32 i = 0; i < TURNS; ++i) {
            const u32 n = i * SEND_THREADS + thread;
            if constexpr (CAST) cast_eight(eight[i], 8 * n, 8 * n < HIDDEN, to, to + WEFT_ROW_SCALES_AT);
            else if (16 * n < WIRE_BYTES) *reinterpret_cast<uint4 *>(to + 16 * n) = raw[i];
        }
        if constexpr (!CAST && SCALE_BYTES != 0) {
            const u8 *scales = reinterpret_cast<const u8 *>(a.scales) + static_cast<u64>(token) * SCALES * SCALE_BYTES;
            for (u32 i = thread; i < SCALES; i += SEND_THREADS) {
                if constexpr (SCALE_BYTES == 4) reinterpret_cast<u32 *>(to + WEFT_ROW_SCALES_AT)[i] = reinterpret_cast<const u32 *>(scales)[i];
                else to[WEFT_ROW_SCALES_AT + i] = scales[i];
            }
        }
    }
};

// Ids in shared memory, by eights: a token's may begin anywhere.
WEFT_DEVICE u32 matches(uint4 ids, u32 expert) {
    const u32 words[4] = {ids.x, ids.y, ids.z, ids.w};
    u32 n = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) n += ((words[i] & 0xFFFF) == expert) + (words[i] >> 16 == expert);
    return n;
}

// Whether one of a token's experts is in [low, high).
WEFT_DEVICE bool names(const u16 *ids, u32 token, u32 low, u32 high) {
    bool any = false;
    if constexpr (TOP_K == 8) {
        const uint4 v = reinterpret_cast<const uint4 *>(ids)[token];
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) any |= (words[i] & 0xFFFF) - low < high - low || (words[i] >> 16) - low < high - low;
    } else {
#pragma unroll
        for (u32 k = 0; k < TOP_K; ++k) any |= ids[token * TOP_K + k] - low < high - low; // none is beyond all
    }
    return any;
}

// Where a token's rows go: `slot[d]` for each rank, and the metadata, from the ids of all tokens before it.
WEFT_DEVICE void plan_token(const Arguments &a, const u16 *ids, u32 token, i32 *slot, Choice *choices) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 before = token * TOP_K;
    for (u32 k = warp; k < TOP_K; k += SEND_WARPS) {
        const u16 expert = ids[before + k];
        const float weight = lane == 0 ? weight_of(a, token, k) : 0.0f; // it comes while ids are counted
        u32 index = 0;
        if (expert != NO_EXPERT) {
#pragma unroll 4
            for (u32 i = lane; i < before / 8; i += 32) index += matches(reinterpret_cast<const uint4 *>(ids)[i], expert);
            for (u32 i = before / 8 * 8 + lane; i < before; i += 32) index += ids[i] == expert;
        }
        index = __reduce_add_sync(~0u, index);
        if (lane == 0) choices[k] = Choice{expert, static_cast<u16>(index), weight};
    }
    for (u32 d = warp; d < RANKS; d += SEND_WARPS) {
        const u32 low = first_expert(d), high = first_expert(d + 1);
        u32 earlier = 0;
#pragma unroll 4
        for (u32 t = lane; t < token; t += 32) earlier += names(ids, t, low, high);
        earlier = __reduce_add_sync(~0u, earlier);
        if (lane == 0) slot[d] = names(ids, token, low, high) ? static_cast<i32>(earlier) : -1;
    }
}

// The line for one rank: how many tokens name each of its experts, and how many rows come.
WEFT_DEVICE void send_counts(const Arguments &a, const Team &team, u32 epoch, const u16 *ids, u32 tokens, u32 to) {
    __shared__ u32 bins[LOCAL + 1];
    const u32 low = first_expert(to), high = first_expert(to + 1);
    for (u32 i = team.thread; i <= LOCAL; i += SEND_THREADS) bins[i] = 0;
    team.sync();
    u32 rows = 0;
    for (u32 t = team.thread; t < tokens; t += SEND_THREADS) {
        for (u32 k = 0; k < TOP_K; ++k) {
            const u32 id = ids[t * TOP_K + k];
            if (id >= low && id < high) atomicAdd(&bins[id - low], 1u);
        }
        rows += names(ids, t, low, high);
    }
    rows = __reduce_add_sync(~0u, rows);
    if (team.thread % 32 == 0 && rows != 0) atomicAdd(&bins[LOCAL], rows);
    team.sync();
    u64 *line = channel(a, to).counts(a.rank);
    for (u32 i = team.thread; i <= LOCAL; i += SEND_THREADS)
        if (i == LOCAL || i < high - low) ptx::store_relaxed_sys(line + i, packet(epoch, bins[i]));
}

// The first piece of work of each team, taken before the round is known.
struct Tickets {
    u32 item[SEND_TEAMS];
};

// What senders do while the block enters. One team of SEND_THREADS threads.
WEFT_DEVICE void prepare_rows(const Arguments &a, u32 number, u8 *shared, Tickets &tickets) {
    const u32 thread = threadIdx.x % SEND_THREADS;
    if (thread == 32) tickets.item[number] = atomicAdd(&channel(a, a.rank).state()->send_ticket, 1);
    if constexpr (PATH != BANDWIDTH) {
        u16 *ids = reinterpret_cast<u16 *>(shared + SEND_TEAMS * SEND_STAGES * STAGE_BYTES);
        const u32 tokens = token_count(a); // it comes while ids do, of tokens too that may not exist
        for (u32 t = thread; t < a.given; t += SEND_THREADS) {
            u16 clean[TOP_K];
            clean_ids(a, watch(a, DISPATCH_SEND), t, tokens, clean);
            for (u32 k = 0; k < TOP_K; ++k) ids[t * TOP_K + k] = clean[k];
        }
    }
}

// The send half. One team of SEND_THREADS threads.
WEFT_DEVICE void send_rows(const Arguments &a, const Round &round, u32 number, u8 *shared, Tickets &tickets) {
    __shared__ i32 slots[SEND_TEAMS][RANKS];
    const Channel mine = channel(a, a.rank);
    const Team team{1 + number, threadIdx.x % SEND_THREADS, SEND_THREADS};
    i32 *slot = slots[number];
    u8 *stages = shared + number * SEND_STAGES * STAGE_BYTES;
    const u16 *ids = reinterpret_cast<const u16 *>(shared + SEND_TEAMS * SEND_STAGES * STAGE_BYTES);
    u32 *ticket = &mine.state()->send_ticket;

    const u32 tokens = token_count(a);
    // First come the lines of counts; on the bandwidth path the plan has sent them.
    constexpr u32 LINES = PATH == BANDWIDTH ? 0 : RANKS;
    constexpr u32 TURNS = (RANKS + 31) / 32;
    i32 pending[SEND_STAGES - 1][TURNS]; // rows whose copies are under way, by this lane, oldest first
#pragma unroll
    for (u32 i = 0; i < SEND_STAGES - 1; ++i)
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n) pending[i][n] = -1;
    const auto release = [&](const i32 (&rows)[TURNS]) {
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n) {
            if (rows[n] < 0) continue;
            const u32 to = (a.rank + 1 + n * 32 + team.thread) % RANKS;
            signal(channel(a, to).row_flag(a.rank, rows[n]), round.epoch);
        }
    };

    u32 next = tickets.item[number];
    for (u32 turn = 0;; ++turn) {
        if (turn != 0) {
            if (team.thread == 0) tickets.item[number] = next;
            team.sync();
        }
        const u32 item = tickets.item[number];
        if (item >= LINES + tokens) break;
        if (team.thread == 0) next = atomicAdd(ticket, 1);
        if (item < LINES) {
            send_counts(a, team, round.epoch, ids, tokens, (a.rank + 1 + item) % RANKS);
            continue;
        }
        const u32 token = item - LINES;
        u8 *stage = stages + turn % SEND_STAGES * STAGE_BYTES;
        Choice *choices = reinterpret_cast<Choice *>(stage + WEFT_ROW_META_AT);
        Part part;
        part.load(a, token, team.thread);
        if constexpr (PATH == BANDWIDTH) {
            if (team.thread < RANKS) slot[team.thread] = mine.slots(token)[team.thread];
            if (team.thread < TOP_K) {
                const i32 id = mine.ids(token)[team.thread];
                const u16 expert = id < 0 ? NO_EXPERT : static_cast<u16>(id);
                choices[team.thread] = Choice{expert, static_cast<u16>(mine.index(token)[team.thread]), weight_of(a, token, team.thread)};
            }
        } else {
            plan_token(a, ids, token, slot, choices);
        }
        part.stage(a, token, team.thread, stage);
        if constexpr (PATH == PACKETS) {
            team.sync();
            if (team.thread < RANKS) mine.slots(token)[team.thread] = slot[team.thread];
            for (u32 n = 0; n < RANKS; ++n) {
                const u32 to = (a.rank + 1 + n) % RANKS;
                if (slot[to] < 0) continue;
                u8 *row = channel(a, to).row(a.rank, slot[to]);
                for (u32 i = team.thread; i < ROW_BYTES / 8; i += SEND_THREADS) {
                    const uint2 v = reinterpret_cast<const uint2 *>(stage)[i];
                    ptx::store_relaxed_sys_pair(row + 16 * i, packet(round.epoch, v.x), packet(round.epoch, v.y));
                }
            }
        } else {
            ptx::fence_proxy_async();
            team.sync();
            if (team.thread < 32) {
                i32 now[TURNS];
#pragma unroll
                for (u32 n = 0; n < TURNS; ++n) {
                    const u32 step = n * 32 + team.thread, to = (a.rank + 1 + step) % RANKS;
                    now[n] = step < RANKS ? slot[to] : -1;
                    if (now[n] >= 0) ptx::bulk_store(channel(a, to).row(a.rank, now[n]), stage, ROW_BYTES);
                    if (PATH != BANDWIDTH && step < RANKS) mine.slots(token)[to] = now[n];
                }
                ptx::bulk_commit();
                ptx::bulk_wait<SEND_STAGES - 1>(); // whose stage comes next
                release(pending[0]);
#pragma unroll
                for (u32 n = 0; n < TURNS; ++n) {
#pragma unroll
                    for (u32 i = 0; i + 1 < SEND_STAGES - 1; ++i) pending[i][n] = pending[i + 1][n];
                    pending[SEND_STAGES - 2][n] = now[n];
                }
            }
        }
    }
    if (PATH != PACKETS && team.thread < 32) {
        ptx::bulk_wait<0>();
#pragma unroll
        for (u32 i = 0; i < SEND_STAGES - 1; ++i) release(pending[i]);
    }
}

// What a receiver works out of the counts of all sources.
struct Places {
    u32 *start;                // [RANKS][LOCAL]: tokens of lower sources for an expert
    u32 offset[LOCAL + 1];     // where an expert's group begins
    u32 total[LOCAL];          // tokens of an expert
    u32 rows[RANKS], most;     // rows from each source, and the most of any
    u32 failed, overflowed;
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
        else places.start[source * LOCAL + e] = value;
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
            places.overflowed = over || places.offset[local] > POSITIONS;
            u32 most = 0;
            for (u32 s = 0; s < RANKS; ++s) most = max(most, places.rows[s]);
            places.most = places.overflowed ? 0 : most;
        }
    }
    team.sync();
    return true;
}

// What the host and combine want to know of the counts. One team of the first block.
WEFT_DEVICE void publish_counts(const Arguments &a, const Team &team, const Places &places) {
    const Channel mine = channel(a, a.rank);
    const u32 local = first_expert(a.rank + 1) - first_expert(a.rank);
    i32 *counts = reinterpret_cast<i32 *>(a.out_counts), *offsets = reinterpret_cast<i32 *>(a.out_offsets);
    i32 *rows = reinterpret_cast<i32 *>(a.out_rows);
    float *weights = reinterpret_cast<float *>(a.out_weights);
    const bool over = places.overflowed;
    for (u32 e = team.thread; e < local; e += team.threads) counts[e] = over ? 0 : places.total[e];
    for (u32 e = team.thread; e <= local; e += team.threads) offsets[e] = over ? 0 : places.offset[e];
    for (u32 s = team.thread; s <= RANKS; s += team.threads) mine.received()[s] = s == RANKS ? over : over ? 0 : places.rows[s];
    if (over) {
        u32 needed = places.offset[local];
        if (LAYOUT == PADDED) {
            needed = 0;
            for (u32 e = 0; e < local; ++e) needed = max(needed, places.total[e]);
        }
        if (team.thread == 0) watch(a, DISPATCH_RECV).notice(CAPACITY, a.rank, 0, needed, LAYOUT == PADDED ? EXPERT_CAPACITY : POSITIONS);
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

// Rows that are copied to their positions: a warp takes a row through shared memory. False if a wait failed,
// or if another's has.
WEFT_DEVICE bool copy_rows(const Arguments &a, const Round &round, const Team &team, const Places &places, u8 *shared, u64 *barriers) {
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, DISPATCH_RECV);
    const u32 warp = team.thread / 32, lane = team.thread % 32;
    u8 *stage = shared + warp * STAGE_BYTES;
    u8 *out = reinterpret_cast<u8 *>(a.out_tokens);
    u32 parity = 0;
    for (u32 item = blockIdx.x * RECEIVE_WARPS + warp; item / RANKS < places.most; item += gridDim.x * RECEIVE_WARPS) {
        const u32 source = (a.rank + 1 + item) % RANKS, slot = item / RANKS;
        if (slot >= places.rows[source]) continue;
        ptx::bulk_wait_read<0>(); // what this lane stored out of the stage
        __syncwarp();
        bool here = true;
        if (lane == 0) {
            here = wait(watching, mine.row_flag(source, slot), round.epoch, source, slot);
            if (here) {
                ptx::fence_proxy_async();
                ptx::mbarrier_expect(barriers + warp, ROW_BYTES);
                ptx::bulk_load(stage, mine.row(source, slot), ROW_BYTES, barriers + warp);
            }
        }
        if (!__shfl_sync(~0u, here, 0)) {
            ptx::bulk_wait_read<0>();
            return false;
        }
        while (!ptx::mbarrier_try_wait(barriers + warp, parity)) {}
        parity ^= 1;
        const i32 position = place_row(a, places, source, slot, reinterpret_cast<const Choice *>(stage + WEFT_ROW_META_AT));
        if (position >= 0) ptx::bulk_store(out + static_cast<u64>(position) * WIRE_BYTES, stage, WIRE_BYTES);
        ptx::bulk_commit();
        if constexpr (SCALE_BYTES != 0)
            for (u32 placed = __ballot_sync(~0u, position >= 0); placed != 0; placed &= placed - 1)
                place_scales(a, stage, __shfl_sync(~0u, position, __ffs(placed) - 1), lane, 32);
    }
    const bool dead = lane == 0 && watching.dead(); // its answer comes while the last copies leave
    ptx::bulk_wait_read<0>();                      // the end of the kernel completes them
    return !dead;
}

// Rows that stay where they landed: a lane takes a row.
WEFT_DEVICE bool index_rows(const Arguments &a, const Round &round, const Team &team, const Places &places) {
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, DISPATCH_RECV);
    const u32 warp = team.thread / 32, lane = team.thread % 32;
    for (u32 item = blockIdx.x * RECEIVE_WARPS + warp; item / RANKS * 32 < places.most; item += gridDim.x * RECEIVE_WARPS) {
        const u32 source = (a.rank + 1 + item) % RANKS, slot = item / RANKS * 32 + lane;
        if (slot >= places.rows[source]) continue;
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
    }
    return true;
}

// Rows of packets: a block takes a row, which is there when all of its packets are of this round.
WEFT_DEVICE bool unpack_rows(const Arguments &a, const Round &round, const Team &team, Places &places, u8 *stage) {
    __shared__ i32 positions[32];
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, DISPATCH_RECV);
    constexpr u32 TURNS = (ROW_BYTES / 8 + RECEIVE_THREADS - 1) / RECEIVE_THREADS;
    for (u32 item = blockIdx.x; item / RANKS < places.most; item += gridDim.x) {
        const u32 source = (a.rank + 1 + item) % RANKS, slot = item / RANKS;
        if (slot >= places.rows[source]) continue;
        const u8 *row = mine.row(source, slot);
        ulonglong2 v[TURNS];
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n) {
            const u32 i = n * RECEIVE_THREADS + team.thread;
            if (i < ROW_BYTES / 8) v[n] = ptx::load_relaxed_sys_pair(row + 16 * i);
        }
        Patience patience;
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n) {
            const u32 i = n * RECEIVE_THREADS + team.thread;
            if (i >= ROW_BYTES / 8) break;
            while (v[n].x >> 32 != round.epoch || v[n].y >> 32 != round.epoch) {
                if (!patience.more(watching, source, slot, round.epoch, v[n].x >> 32)) {
                    places.failed = 1;
                    break;
                }
                v[n] = ptx::load_relaxed_sys_pair(row + 16 * i);
            }
            reinterpret_cast<uint2 *>(stage)[i] = make_uint2(static_cast<u32>(v[n].x), static_cast<u32>(v[n].y));
        }
        team.sync();
        if (places.failed) return false;
        if (team.thread < 32)
            positions[team.thread] = place_row(a, places, source, slot, reinterpret_cast<const Choice *>(stage + WEFT_ROW_META_AT));
        team.sync();
        for (u32 k = 0; k < TOP_K; ++k) {
            const i32 position = positions[k];
            if (position < 0) continue;
            u8 *out = reinterpret_cast<u8 *>(a.out_tokens) + static_cast<u64>(position) * WIRE_BYTES;
            for (u32 at = 16 * team.thread; at < WIRE_BYTES; at += 16 * RECEIVE_THREADS)
                ptx::store_stream(out + at, *reinterpret_cast<const uint4 *>(stage + at));
            place_scales(a, stage, position, team.thread, RECEIVE_THREADS);
        }
        team.sync();
    }
    return true;
}

// The receive half. One team of RECEIVE_THREADS threads, the block's last. False if this thread saw it fail.
WEFT_DEVICE bool receive_rows(const Arguments &a, const Round &round, const Team &team, u8 *shared) {
    __shared__ Places places;
    __shared__ u64 barriers[RECEIVE_WARPS];
    if (team.thread == 0) {
        places.start = reinterpret_cast<u32 *>(shared + RECEIVE_STAGES * STAGE_BYTES);
        places.failed = 0;
        for (u32 w = 0; w < RECEIVE_WARPS; ++w) ptx::mbarrier_init(barriers + w, 1);
        ptx::fence_proxy_async();
    }
    team.sync();
    if (!receive_counts(a, round, team, places)) return false;
    if (blockIdx.x == 0) publish_counts(a, team, places);
    if constexpr (PATH == PACKETS) return unpack_rows(a, round, team, places, shared);
    else if constexpr (LAYOUT == INDEXED) return index_rows(a, round, team, places);
    else return copy_rows(a, round, team, places, shared, barriers);
}

// Outputs that nobody shall take for results.
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
