// Dispatch for small batches: rows are sent to the ranks of their experts, and placed at their positions there, without
// a barrier or a round trip. A thread team processes one token, for latency.
//
// Every source has slots for all its tokens on every rank, so a row's slot is the count of earlier tokens to that rank,
// which each block computes from only the expert ids. Counts for each expert are sent first, as packets; rows are sent
// as one bulk copy per token and rank. A row's flag is stored when the copy is complete. Positions follow from all
// sources' counts. Rows are placed as they arrive, each by a separate flag.
//
// Memory order between row and flag: the thread that issues a copy waits for its full completion
// (cp.async.bulk.wait_group, not .read), after which the bytes are visible to that thread, and then releases the flag
// at system scope. The receiver acquires the flag, passes a proxy fence, and loads. Reusing a row's memory: the reader
// sends a signal in combine (signals.cuh), and this rank's next dispatch follows its combine, which has received every
// rank's signal. Progress: senders wait on no flag and take tokens by ticket, so one resident block in a launch sends
// all tokens.
#pragma once
#include "moe/counts.cuh"
#include "moe/elements.cuh"
#include "moe/plan.cuh"

namespace weft::moe {

constexpr u32 SEND_THREADS = 256, SEND_WARPS = SEND_THREADS / 32;
constexpr u32 SEND_STAGES = 2; // rows whose copies are in flight
constexpr u32 STAGE_BYTES = (ROW_BYTES + 127) / 128 * 128;
constexpr u32 STAGED_WARPS = 65536 / STAGE_BYTES < 2 ? 2 : 65536 / STAGE_BYTES > 8 ? 8 : 65536 / STAGE_BYTES;
constexpr u32 RECEIVE_WARPS = PATH == PACKETS || LAYOUT == INDEXED ? 8 : STAGED_WARPS;
constexpr u32 RECEIVE_THREADS = RECEIVE_WARPS * 32;
constexpr u32 IDS_BYTES = (MAX_TOKENS * TOP_K * 2 + 15) / 16 * 16;
constexpr u32 SEND_SHARED = SEND_STAGES * STAGE_BYTES + IDS_BYTES;
constexpr u32 RECEIVE_STAGES = LAYOUT == INDEXED ? 0 : PATH == PACKETS ? 1 : RECEIVE_WARPS;
constexpr u32 RECEIVE_SHARED = RECEIVE_STAGES * STAGE_BYTES + (RANKS * LOCAL * 4 + 15) / 16 * 16;

// A thread's token fragment, from the user's row to a staged row with scales. The loads are in flight while the token's
// destinations are computed.
struct Part {
    static constexpr u32 TURNS = ((CAST ? HIDDEN / 8 : WIRE_BYTES / 16) + SEND_THREADS - 1) / SEND_THREADS;
    static constexpr u32 EIGHTS = TURNS <= 1 ? 1 : TURNS <= 2 ? 2 : TURNS <= 4 ? 4 : TURNS <= 8 ? 8 : 16; // a power of two
    Eight eight[CAST ? EIGHTS : 1];
    uint4 raw[CAST ? 1 : TURNS];
    float weight; // weight for this lane's top-k slot

    WEFT_DEVICE void load(const Arguments &a, u32 token, u32 thread) {
        const u32 lane = thread % WARP;
        weight = lane < TOP_K ? weight_of(a, token, lane) : 0.0f;
        const u8 *row = reinterpret_cast<const u8 *>(a.tokens) + static_cast<u64>(token) * TOKEN_BYTES;
#pragma unroll
        for (u32 i = 0; i < (CAST ? EIGHTS : TURNS); ++i) {
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
        if constexpr (CAST) cast_eights(eight, [&](u32 i) { return 8 * (i * SEND_THREADS + thread); }, to, to + WEFT_ROW_SCALES_AT);
        else {
#pragma unroll
            for (u32 i = 0; i < TURNS; ++i) {
                const u32 n = i * SEND_THREADS + thread;
                if (16 * n < WIRE_BYTES) *reinterpret_cast<uint4 *>(to + 16 * n) = raw[i];
            }
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

// True if one of a token's experts is in [low, high).
WEFT_DEVICE bool names(const u16 *ids, u32 token, u32 low, u32 high) {
    bool any = false;
    if constexpr (TOP_K == 8) {
        const uint4 v = reinterpret_cast<const uint4 *>(ids)[token];
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) any |= (words[i] & 0xFFFF) - low < high - low || (words[i] >> 16) - low < high - low;
    } else {
#pragma unroll
        for (u32 k = 0; k < TOP_K; ++k) any |= ids[token * TOP_K + k] - low < high - low; // NO_EXPERT is above every range
    }
    return any;
}

// A token's destinations: `slot[d]` for each rank, and the row metadata, from the ids of all earlier tokens. `weight`
// belongs to this lane's top-k slot.
WEFT_DEVICE void plan_token(const u16 *ids, u32 token, float weight, i32 *slot, Choice *choices) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 before = token * TOP_K;
    for (u32 k = warp; k < TOP_K; k += SEND_WARPS) {
        const u16 expert = ids[before + k];
        u32 index = 0;
        if (expert != NO_EXPERT) {
#pragma unroll 4
            for (u32 i = lane; i < before / 8; i += 32) index += matches(reinterpret_cast<const uint4 *>(ids)[i], expert);
            for (u32 i = before / 8 * 8 + lane; i < before; i += 32) index += ids[i] == expert;
        }
        index = __reduce_add_sync(~0u, index);
        const float weight_k = __shfl_sync(~0u, weight, k);
        if (lane == 0) choices[k] = Choice{expert, static_cast<u16>(index), weight_k};
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

// A token's destinations by an earlier round's plan, whose receivers ignore the metadata.
WEFT_DEVICE void kept_token(const Arguments &a, u32 token, i32 *slot, Choice *choices) {
    const u32 thread = threadIdx.x % SEND_THREADS;
    if (thread < RANKS) slot[thread] = channel(a, a.rank).slots(token)[thread];
    if (thread < TOP_K) choices[thread] = Choice{NO_EXPERT, 0, 0.0f};
}

// Sends one rank the counts: tokens for each of its experts, and rows.
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
        if (i == LOCAL || i < high - low) ptx::store_relaxed_sys(line + i, packet(epoch, i == LOCAL ? with_generation(a, bins[i]) : bins[i]));
}

constexpr u32 LINES = RANKS; // tickets for counts, before tickets for tokens

// Prepares the send half during `enter`: validated ids, and the first ticket, whose token is being loaded. One team
// with SEND_THREADS threads.
WEFT_DEVICE void prepare_rows(const Arguments &a, u8 *shared, u32 &ticket, Part &part) {
    const u32 thread = threadIdx.x % SEND_THREADS;
    if (thread == 32) ticket = atomicAdd(&channel(a, a.rank).state()->send_ticket, 1);
    u16 *ids = reinterpret_cast<u16 *>(shared + SEND_STAGES * STAGE_BYTES);
    if (!a.kept) {
        const u32 tokens = token_count(a); // in flight with the ids, which are loaded for all `given` tokens
        for (u32 t = thread; t < a.given; t += SEND_THREADS) {
            u16 clean[TOP_K];
            clean_ids(a, watch(a, DISPATCH_SEND), t, tokens, clean);
            for (u32 k = 0; k < TOP_K; ++k) ids[t * TOP_K + k] = clean[k];
        }
    }
    Team{1, thread, SEND_THREADS}.sync();
    if (ticket >= LINES && ticket - LINES < a.given) part.load(a, ticket - LINES, thread);
}

// The send half. One team with SEND_THREADS threads.
WEFT_DEVICE void send_rows(const Arguments &a, const Round &round, u8 *stages, u32 &ticket, Part &part) {
    __shared__ i32 slot[RANKS];
    const Channel mine = channel(a, a.rank);
    const Team team{1, threadIdx.x % SEND_THREADS, SEND_THREADS};
    const u16 *ids = reinterpret_cast<const u16 *>(stages + SEND_STAGES * STAGE_BYTES);

    const u32 tokens = sent_count(a);
    constexpr u32 TURNS = (RANKS + 31) / 32;
    i32 pending[SEND_STAGES - 1][TURNS]; // slots for this lane's copies in flight, oldest first
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

    if (blockIdx.x == 0 && team.thread == 0) note_sent(a, mine, tokens, round.epoch);
    u32 next = ticket;
    for (u32 turn = 0;; ++turn) {
        if (turn != 0) {
            if (team.thread == 0) ticket = next;
            team.sync();
        }
        const u32 item = ticket;
        if (item >= LINES + tokens) break;
        if (team.thread == 0) next = atomicAdd(&mine.state()->send_ticket, 1);
        if (item < LINES) {
            if (!a.kept) send_counts(a, team, round.epoch, ids, tokens, (a.rank + 1 + item) % RANKS);
            else if (item == 0) send_keys(a, round.epoch, team.thread, SEND_THREADS);
            continue;
        }
        const u32 token = item - LINES;
        u8 *stage = stages + turn % SEND_STAGES * STAGE_BYTES;
        Choice *choices = reinterpret_cast<Choice *>(stage + WEFT_ROW_META_AT);
        if (turn != 0) part.load(a, token, team.thread); // the first one is loaded during `enter`
        if (a.kept) kept_token(a, token, slot, choices);
        else plan_token(ids, token, part.weight, slot, choices);
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
            fence_shared_for_bulk();
            team.sync();
            if (team.thread < 32) {
                i32 now[TURNS];
#pragma unroll
                for (u32 n = 0; n < TURNS; ++n) {
                    const u32 step = n * 32 + team.thread, to = (a.rank + 1 + step) % RANKS;
                    now[n] = step < RANKS ? slot[to] : -1;
                    if (now[n] >= 0) ptx::bulk_store(channel(a, to).row(a.rank, now[n]), stage, ROW_BYTES);
                    if (step < RANKS) mine.slots(token)[to] = now[n];
                }
                ptx::bulk_commit();
                ptx::bulk_wait<SEND_STAGES - 1>(); // frees the next stage
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

// Copies rows to their positions through shared memory, one warp per row. False if a wait in this thread, or in another
// on this rank, failed.
WEFT_DEVICE bool copy_rows(const Arguments &a, const Round &round, const Team &team, const Places &places, u8 *shared, u64 *barriers) {
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, DISPATCH_RECV);
    const u32 warp = team.thread / 32, lane = team.thread % 32;
    u8 *stage = shared + warp * STAGE_BYTES;
    u8 *out = reinterpret_cast<u8 *>(a.out_tokens);
    u32 parity = 0;
    // Consecutive rows go to different blocks, since one SM's store rate is limited.
    for (u32 item = warp * gridDim.x + blockIdx.x; item / RANKS < places.most; item += gridDim.x * RECEIVE_WARPS) {
        const u32 source = (a.rank + 1 + item) % RANKS, slot = item / RANKS;
        if (slot >= places.rows[source]) continue;
        ptx::bulk_wait_read<0>(); // this lane's stores from the stage
        fence_shared_for_bulk();  // and ordinary reads
        __syncwarp();
        bool here = true;
        if (lane == 0) {
            here = wait(watching, mine.row_flag(source, slot), round.epoch, source, slot);
            if (here) {
                fence_global_for_bulk();
                ptx::mbarrier_expect(barriers + warp, ROW_BYTES);
                ptx::bulk_load(stage, mine.row(source, slot), ROW_BYTES, barriers + warp);
            }
        }
        if (!__shfl_sync(~0u, here, 0)) {
            ptx::bulk_wait<0>(); // before outputs are poisoned
            return false;
        }
        if (!__all_sync(~0u, wait_phase(barriers + warp, parity))) {
            phase_failed(watching, parity);
            ptx::bulk_wait<0>();
            return false;
        }
        parity ^= 1;
        const i32 position = place_row(a, places, source, slot, choice_in(stage));
        if (position >= 0) ptx::bulk_store(out + static_cast<u64>(position) * WIRE_BYTES, stage, WIRE_BYTES);
        ptx::bulk_commit();
        place_scales_of(a, stage, position);
    }
    past_waits(RECEIVE_WARPS);
    const bool dead = lane == 0 && watching.dead(); // in flight while the last copies complete
    if (dead) ptx::bulk_wait<0>();
    else ptx::bulk_wait_read<0>(); // the kernel's end completes them
    return !dead;
}

// Indexed layout: rows stay in their slots; one lane records a row's experts.
WEFT_DEVICE bool index_rows(const Arguments &a, const Round &round, const Team &team, const Places &places) {
    const Watch watching = watch(a, DISPATCH_RECV);
    const u32 warp = team.thread / WARP, lane = team.thread % WARP;
    for (u32 item = warp * gridDim.x + blockIdx.x; item / RANKS * WARP < places.most; item += gridDim.x * RECEIVE_WARPS) {
        const u32 source = (a.rank + 1 + item) % RANKS, slot = item / RANKS * WARP + lane;
        if (slot < places.rows[source] && !index_row(a, round, watching, places, source, slot)) return false;
    }
    return true;
}

// Packet path: one block per row. A row has arrived when all packets in it carry the round's epoch.
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
        PollBudget budget;
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n) {
            const u32 i = n * RECEIVE_THREADS + team.thread;
            if (i >= ROW_BYTES / 8) break;
            while (v[n].x >> 32 != round.epoch || v[n].y >> 32 != round.epoch) {
                if (!budget.more(watching, source, slot, round.epoch, v[n].x >> 32)) {
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
            positions[team.thread] = place_row(a, places, source, slot, choice_in(stage));
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
    past_waits(RECEIVE_WARPS);
    return true;
}

// The receive half. One team: the block's last RECEIVE_THREADS threads. False if it failed in this thread.
WEFT_DEVICE bool receive_rows(const Arguments &a, const Round &round, const Team &team, u8 *shared) {
    __shared__ Places places;
    __shared__ u64 barriers[RECEIVE_WARPS];
    if (team.thread == 0) {
        places.start = reinterpret_cast<u32 *>(shared + RECEIVE_STAGES * STAGE_BYTES);
        places.failed = 0;
        for (u32 w = 0; w < RECEIVE_WARPS; ++w) ptx::mbarrier_init(barriers + w, 1);
        fence_shared_for_bulk();
    }
    team.sync();
    if (!receive_plan(a, round, team, places, gridDim.x - 1)) return false; // the last block has the fewest rows
    if constexpr (PATH == PACKETS) return unpack_rows(a, round, team, places, shared);
    else if constexpr (LAYOUT == INDEXED) return index_rows(a, round, team, places);
    else return copy_rows(a, round, team, places, shared, barriers);
}

} // namespace weft::moe
