// Combine for small batches: a rank sums expert outputs for a row, and returns one reply. A thread team processes one
// row, for latency.
//
// The reply for row (source, slot) on rank d goes to slot (d, slot) at the source, with a separate flag; the source
// sums a token's replies in rank order. Replies and flags have the same memory order as rows in dispatch.cuh;
// signals.cuh describes the signals.
#pragma once
#include "moe/elements.cuh"
#include "moe/owed.cuh"
#include "moe/signals.cuh"

namespace weft::moe {

// Threads in a team that sums. Two launches fit on an SM, also by registers: kernels from two communicators, each
// waiting for peers, stay co-resident.
constexpr u32 COMBINE_THREADS = 224;
constexpr u32 REPLY_THREADS = COMBINE_THREADS + 32; // the producer warp, then the team that sums
// Stages in a team's ring of expert outputs, and replies in flight; two launches fit on an SM. A batch with a row or
// two for each block has more ring stages, so that a row's outputs are all fetched at once.
constexpr bool FEW_ROWS = MAX_TOKENS <= 256 && REPLY_BYTES <= 16384;
constexpr u32 REPLY_STAGES = REPLY_BYTES <= 8192 ? 6 : REPLY_BYTES <= 16384 && !FEW_ROWS ? 4 : 3;
constexpr u32 RING_ROOM = (112 * 1024 - REPLY_STAGES * REPLY_BYTES) / OUTPUT_BYTES;
constexpr u32 RING = OUTPUT_BYTES <= 8192 ? 6 : FEW_ROWS && RING_ROOM > 3 ? RING_ROOM : 3;
constexpr u32 COMBINE_SHARED = RING * OUTPUT_BYTES + REPLY_STAGES * REPLY_BYTES;

constexpr u32 IN_16 = per_16(WEFT_COMBINE_TYPE); // elements that a thread sums at a time
constexpr u32 SUM_TURNS = (HIDDEN / IN_16 + COMBINE_THREADS - 1) / COMBINE_THREADS;

// Expert output ring: a producer warp fetches outputs row by row; a consumer team sums them.
struct Ring {
    enum Task : u32 { TERM = 0, LAST = 1, EMPTY = 2, STOP = 3 }; // LAST: last term in the row; EMPTY: a row without terms
    u64 full[RING], empty[RING];
    u32 what[RING], source[RING], slot[RING];
    float weight[RING];
    Owed owed;
    u32 item;
};

// Prepares the send half during `enter`: first ticket, owed rows, mbarriers. REPLY_THREADS threads.
WEFT_DEVICE void prepare_replies(const Arguments &a, Ring &ring) {
    const Channel mine = channel(a, a.rank);
    if (threadIdx.x == 32) ring.item = atomicAdd(&mine.state()->combine_ticket, 1);
    if (threadIdx.x >= 64 && threadIdx.x <= 64 + RANKS) ring.owed.load(a, threadIdx.x - 64, true);
    if (threadIdx.x == 33) {
        for (u32 i = 0; i < RING; ++i) ptx::mbarrier_init(ring.full + i, 1), ptx::mbarrier_init(ring.empty + i, COMBINE_THREADS);
        fence_shared_for_bulk();
    }
}

// Producer warp: fetches the terms to sum, row by row, by ticket.
//
// The outputs were written by earlier kernels, so they are visible to bulk copies too.
WEFT_DEVICE void fetch_outputs(const Arguments &a, const Round &round, Ring &ring, u8 *shared) {
    const u32 lane = threadIdx.x % 32;
    const Channel mine = channel(a, a.rank);
    const u8 *outputs = reinterpret_cast<const u8 *>(a.outputs);
    u32 *ticket = &mine.state()->combine_ticket;
    u32 item = ring.item, head = 0;
    // The first ticket is for the signals, which one block sends for all.
    if (item == 0) {
        send_signals(a, round, ring.owed.needed);
        if (lane == 0) item = atomicAdd(ticket, 1);
        item = __shfl_sync(~0u, item, 0);
    }
    // Rows for other ranks come first, since those replies travel.
    const u32 own = ring.owed.rows[a.rank];
    __syncwarp();
    if (lane == 0) ring.owed.rows[a.rank] = 0;
    __syncwarp();
    u32 others = 0;
    for (u32 s = 0; s < RANKS; ++s) others += ring.owed.rows[s];
    u32 source, slot;
    Entry entry;
    const auto find = [&](u32 which) { // row number `which`, with the experts
        bool some = locate(ring.owed.rows, which, a.rank, source, slot);
        if (!some) source = a.rank, slot = which - others, some = slot < own;
        entry = some ? ring.owed.entry_of(a, source, slot) : Entry{-1, 0.0f};
        return some;
    };
    bool fine = true;
    const auto push = [&](u32 what, u32 source, u32 slot, const Entry &entry) { // called by the first lane
        const u32 at = head % RING;
        if (head >= RING) fine = fine && wait_phase(ring.empty + at, (head / RING - 1) % 2);
        if (!fine) return;
        ring.what[at] = what, ring.source[at] = source, ring.slot[at] = slot, ring.weight[at] = entry.weight;
        if (entry.position >= 0) {
            ptx::mbarrier_expect(ring.full + at, OUTPUT_BYTES);
            ptx::bulk_load(shared + at * OUTPUT_BYTES, outputs + static_cast<u64>(entry.position) * OUTPUT_BYTES, OUTPUT_BYTES, ring.full + at);
        } else {
            ptx::mbarrier_arrive(ring.full + at);
        }
        ++head;
    };
    bool some = find(item - 1);
    while (some) {
        // The next row's ticket and experts are loaded while this row's outputs are fetched.
        if (lane == 0) item = atomicAdd(ticket, 1);
        const u32 terms = __popc(__ballot_sync(~0u, entry.position >= 0)); // valid entries come first
        for (u32 k = 0; k < terms; ++k) {
            const Entry term{__shfl_sync(~0u, entry.position, k), __shfl_sync(~0u, entry.weight, k)};
            if (lane == 0) push(k + 1 == terms ? Ring::LAST : Ring::TERM, source, slot, term);
        }
        if (terms == 0 && lane == 0) push(Ring::EMPTY, source, slot, Entry{-1, 0.0f});
        item = __shfl_sync(~0u, item, 0);
        some = find(item - 1);
    }
    if (lane == 0) push(Ring::STOP, 0, 0, Entry{-1, 0.0f});
}

// Consumer team: sums each row's outputs (float32 from +0, products rounded, in top-k order, rounded once) and
// sends the reply. COMBINE_THREADS threads.
WEFT_DEVICE void send_replies(const Arguments &a, const Round &round, Ring &ring, u8 *shared) {
    const Team team{1, threadIdx.x - 32, COMBINE_THREADS};
    u8 *stages = shared + RING * OUTPUT_BYTES;
    // The first thread issues the copies. The others may write the next stage after the previous row's barrier, so at
    // that barrier at most PENDING copies may be in flight.
    constexpr u32 PENDING = REPLY_STAGES - 2, NONE = ~0u;
    u32 pending[PENDING]; // source and slot for each, oldest first
#pragma unroll
    for (u32 i = 0; i < PENDING; ++i) pending[i] = NONE;
    const auto release = [&](u32 which) {
        if (which != NONE) signal(channel(a, which / MAX_TOKENS).reply_flag(a.rank, which % MAX_TOKENS), round.epoch);
    };
    bool failed = false;
    float sum[SUM_TURNS][IN_16] = {};
    for (u32 tail = 0, row = 0;; ++tail) {
        const u32 at = tail % RING;
        const bool fine = wait_phase(ring.full + at, tail / RING % 2);
        const u32 what = ring.what[at];
        // Warps exit together: a warp whose wait failed joins the others at this row's barrier.
        if (!__all_sync(~0u, fine) || what == Ring::STOP) {
            team.all(false);
            failed = !fine;
            break;
        }
        const float weight = WEIGHT_AT_COMBINE ? ring.weight[at] : 1.0f;
#pragma unroll
        for (u32 n = 0; n < SUM_TURNS; ++n) {
            const u32 byte = 16 * (n * COMBINE_THREADS + team.thread);
            if (what == Ring::EMPTY || byte >= OUTPUT_BYTES) continue;
            float x[IN_16];
            widen<WEFT_COMBINE_TYPE>(*reinterpret_cast<const uint4 *>(shared + at * OUTPUT_BYTES + byte), x);
#pragma unroll
            for (u32 j = 0; j < IN_16; ++j) sum[n][j] = __fadd_rn(sum[n][j], __fmul_rn(weight, x[j]));
        }
        const u32 source = ring.source[at], slot = ring.slot[at];
        fence_shared_for_bulk(); // the stage is refilled by a bulk load
        ptx::mbarrier_arrive(ring.empty + at); // by each thread for its own reads, which race checkers can follow
        if (what == Ring::TERM) continue;

        u8 *stage = stages + row++ % REPLY_STAGES * REPLY_BYTES;
#pragma unroll
        for (u32 n = 0; n < SUM_TURNS; ++n) {
            const u32 element = IN_16 * (n * COMBINE_THREADS + team.thread);
            if (element < HIDDEN) narrow<WEFT_REPLY_TYPE>(stage + element * bytes_of(WEFT_REPLY_TYPE), sum[n]);
#pragma unroll
            for (u32 j = 0; j < IN_16; ++j) sum[n][j] = 0.0f;
        }
        u8 *reply = channel(a, source).reply(a.rank, slot);
        if constexpr (PATH == PACKETS) {
            if (!team.all(true)) break;
            for (u32 i = team.thread; i < REPLY_BYTES / 8; i += COMBINE_THREADS) {
                const uint2 v = reinterpret_cast<const uint2 *>(stage)[i];
                ptx::store_relaxed_sys_pair(reply + 16 * i, packet(round.epoch, v.x), packet(round.epoch, v.y));
            }
        } else {
            fence_shared_for_bulk();
            if (!team.all(true)) break;
            if (team.thread == 0) {
                ptx::bulk_store(reply, stage, REPLY_BYTES);
                ptx::bulk_commit();
                ptx::bulk_wait<PENDING>();
                release(pending[0]);
#pragma unroll
                for (u32 i = 0; i + 1 < PENDING; ++i) pending[i] = pending[i + 1];
                pending[PENDING - 1] = source * MAX_TOKENS + slot;
            }
        }
    }
    if (failed) phase_failed(watch(a, COMBINE_SEND), 0);
    if (PATH != PACKETS && team.thread == 0) {
        ptx::bulk_wait<0>();
#pragma unroll
        for (u32 i = 0; i < PENDING; ++i) release(pending[i]);
    }
}

// Loads 16 bytes from a reply; on the packet path, waits for them.
WEFT_DEVICE bool load_reply(const Watch &watching, const u8 *reply, u32 at, u32 epoch, u32 from, u32 slot, uint4 &v) {
    if constexpr (PATH == PACKETS) {
        PollBudget budget;
        for (;;) {
            const ulonglong2 low = ptx::load_relaxed_sys_pair(reply + 2 * at), high = ptx::load_relaxed_sys_pair(reply + 2 * at + 16);
            v = make_uint4(static_cast<u32>(low.x), static_cast<u32>(low.y), static_cast<u32>(high.x), static_cast<u32>(high.y));
            if (low.x >> 32 == epoch && low.y >> 32 == epoch && high.x >> 32 == epoch && high.y >> 32 == epoch) return true;
            if (!budget.more(watching, from, slot, epoch, low.x >> 32)) return false;
        }
    } else {
        v = ptx::load_stream(reply + at);
        return true;
    }
}

constexpr u32 FROM_16 = per_16(WEFT_REPLY_TYPE); // elements that a thread adds at a time
constexpr u32 ADD_TURNS = (HIDDEN / FROM_16 + COMBINE_THREADS - 1) / COMBINE_THREADS;
// Work items per token: on the packet path, row chunks.
constexpr u32 PIECES = PATH == PACKETS ? ADD_TURNS : 1;
// Replies, and turns in each, whose loads a thread has in flight, limited by registers. With two ranks only one reply
// travels.
constexpr u32 ADD_WIDE = PATH != PACKETS && RANKS <= 2 && ADD_TURNS % 2 == 0 ? 2 : 1, TOGETHER = PATH == PACKETS ? 1 : ADD_WIDE == 2 ? 1 : 3;

// The receive half. One team with COMBINE_THREADS threads: team `number` out of `teams` in a block; `thread` is the
// index in the team. False if it failed in this thread.
WEFT_DEVICE bool receive_replies(const Arguments &a, const Round &round, u32 number, u32 teams, u32 thread) {
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, COMBINE_RECV);
    const u32 lane = threadIdx.x % 32;
    const u32 items = a.release ? 0 : token_count(a) * PIECES;

    const Outcome outcome = receive_signals(a, round, watching, blockIdx.x == 0 && thread < WARP && number == 0);
    if (outcome == Outcome::FAILED) return false;
    if (outcome == Outcome::SPOILT) {
        spoil_combined(a, (blockIdx.x * teams + number) * COMBINE_THREADS + thread, gridDim.x * teams * COMBINE_THREADS);
        return true;
    }

    constexpr u32 TURNS = (RANKS + 31) / 32;
    for (u32 item = blockIdx.x * teams + number; item < items; item += gridDim.x * teams) {
        const u32 token = item / PIECES, sent = mine.state()->sent;
        bool here = true;
        i32 slot[TURNS];
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n) {
            const u32 from = n * 32 + lane;
            slot[n] = from < RANKS && token < sent ? mine.slots(token)[from] : -1;
            if (PATH != PACKETS && slot[n] >= 0) here &= wait(watching, mine.reply_flag(from, slot[n]), round.epoch, from, slot[n]);
        }
        if (__any_sync(~0u, !here)) return false;
        __syncwarp(); // all lanes read the data that one lane has acquired
        const u32 first_turn = item % PIECES, last_turn = PIECES == 1 ? ADD_TURNS : first_turn + 1;
#pragma unroll 1
        for (u32 turn = first_turn; turn < last_turn; turn += ADD_WIDE) {
            float sum[ADD_WIDE][FROM_16] = {};
            const auto element = [&](u32 w) { return FROM_16 * ((turn + w) * COMBINE_THREADS + thread); };
            const auto real = [&](u32 w) { return turn + w < last_turn && element(w) < HIDDEN; };
#pragma unroll
            for (u32 n = 0; n < TURNS; ++n) {
                // Loads are batched; additions follow in rank order.
                for (u32 has = __ballot_sync(~0u, slot[n] >= 0); has != 0;) {
                    uint4 v[TOGETHER][ADD_WIDE];
                    const u32 some = min(TOGETHER, static_cast<u32>(__popc(has)));
#pragma unroll
                    for (u32 i = 0; i < TOGETHER; ++i) {
                        if (i >= some) continue;
                        const u32 which = __ffs(has) - 1, from = n * 32 + which;
                        has &= has - 1;
                        const u32 at_slot = __shfl_sync(~0u, slot[n], which);
#pragma unroll
                        for (u32 w = 0; w < ADD_WIDE; ++w)
                            if (real(w)) here &= load_reply(watching, mine.reply(from, at_slot), element(w) * bytes_of(WEFT_REPLY_TYPE), round.epoch, from, at_slot, v[i][w]);
                    }
#pragma unroll
                    for (u32 i = 0; i < TOGETHER; ++i) {
#pragma unroll
                        for (u32 w = 0; w < ADD_WIDE; ++w) {
                            if (i >= some || !real(w)) continue;
                            float x[FROM_16];
                            widen<WEFT_REPLY_TYPE>(v[i][w], x);
#pragma unroll
                            for (u32 j = 0; j < FROM_16; ++j) sum[w][j] = __fadd_rn(sum[w][j], x[j]);
                        }
                    }
                }
            }
#pragma unroll
            for (u32 w = 0; w < ADD_WIDE; ++w) {
                if (!real(w)) continue;
                const u64 at = static_cast<u64>(token) * COMBINED_BYTES + element(w) * bytes_of(WEFT_OUTPUT_TYPE);
                for_each_added(a, at, [&](const u8 *row) { add_elements<WEFT_OUTPUT_TYPE>(sum[w], row, 0); });
                narrow<WEFT_OUTPUT_TYPE>(reinterpret_cast<u8 *>(a.combined) + at, sum[w]);
            }
        }
        if (__any_sync(~0u, !here)) return false;
    }
    past_waits(teams * COMBINE_THREADS / WARP);
    return true;
}

} // namespace weft::moe
