// Combine of small batches: the outputs of a rank's experts for a row are summed at that rank, which returns one
// reply. A team of threads processes one row, for latency.
//
// The reply for row (source, slot) of rank d goes to slot (d, slot) at the source, with a flag of its own;
// the source sums a token's replies in rank order. The memory order of replies and flags is that of rows in
// dispatch.cuh; signals.cuh describes the signals.
//
// On the latency path a launch of both halves passes the sum of a rank's own row in shared memory, from the team that sums
// to the team of the same block that adds the replies to its token.
#pragma once
#include "moe/elements.cuh"
#include "moe/owed.cuh"
#include "moe/signals.cuh"

namespace weft::moe {

// Threads of a team that sums. Two launches fit on an SM, also by registers: kernels of two communicators, each
// with waits for its peers, stay co-resident.
constexpr u32 COMBINE_THREADS = 224;
constexpr u32 REPLY_THREADS = COMBINE_THREADS + 32; // the producer warp, then the team that sums
constexpr u32 IN_16 = per_16(WEFT_COMBINE_TYPE); // elements that a thread sums at a time
constexpr u32 SUM_TURNS = (HIDDEN / IN_16 + COMBINE_THREADS - 1) / COMBINE_THREADS;

// True if a launch of both halves keeps the sums of own rows in the block; longer rows have no registers left for it.
constexpr bool OWN_BESIDE = PATH == LATENCY && SUM_TURNS <= 4 && OUTPUT_BYTES <= 16384 && REPLY_BYTES <= 16384;
// Stages of a team's ring of expert outputs, and of replies in flight; two launches fit on an SM. A batch with a row or two
// for each block has more of the former, so that all outputs of a row are fetched at once.
constexpr bool FEW_ROWS = MAX_TOKENS <= 256 && REPLY_BYTES <= 16384;
constexpr u32 REPLY_STAGES = REPLY_BYTES <= 8192 ? 6 : REPLY_BYTES <= 16384 && !FEW_ROWS ? 4 : 3;
constexpr u32 RING_ROOM = (112 * 1024 - (REPLY_STAGES + OWN_BESIDE) * REPLY_BYTES) / OUTPUT_BYTES;
constexpr u32 RING = OUTPUT_BYTES <= 8192 ? 6 : FEW_ROWS && RING_ROOM > 3 ? RING_ROOM : 3;
constexpr u32 COMBINE_SHARED = RING * OUTPUT_BYTES + REPLY_STAGES * REPLY_BYTES;
constexpr u32 COMBINE_BOTH_SHARED = COMBINE_SHARED + (OWN_BESIDE ? REPLY_BYTES : 0);
static_assert(!OWN_BESIDE || COMBINE_BOTH_SHARED <= 112 * 1024, "two launches fit on an SM");

// Ring of expert outputs: a producer warp fetches them row by row; a consumer team sums them.
struct Ring {
    // LAST: last term of its row; EMPTY: a row without terms; OWN: added for a row whose sum stays in the block.
    enum Task : u32 { TERM = 0, LAST = 1, EMPTY = 2, STOP = 3, OWN = 4 };
    u64 full[RING], empty[RING];
    u64 own_full, own_free; // of the stage of an own row's sum
    u32 given_up;           // 1: a team has failed, so that the others of the block exit too
    u32 what[RING], source[RING], slot[RING];
    float weight[RING];
    Owed owed;
    u32 item;
};

// Preparation of the send half during `enter`: first ticket, owed rows, mbarriers. REPLY_THREADS threads.
WEFT_DEVICE void prepare_replies(const Arguments &a, Ring &ring) {
    const Channel mine = channel(a, a.rank);
    if (threadIdx.x == 32) ring.item = atomicAdd(&mine.state()->combine_ticket, 1);
    if (threadIdx.x >= 64 && threadIdx.x <= 64 + RANKS) ring.owed.load(a, threadIdx.x - 64, true);
    if (threadIdx.x == 33) {
        for (u32 i = 0; i < RING; ++i) ptx::mbarrier_init(ring.full + i, 1), ptx::mbarrier_init(ring.empty + i, COMBINE_THREADS);
        ptx::mbarrier_init(&ring.own_full, COMBINE_THREADS), ptx::mbarrier_init(&ring.own_free, COMBINE_THREADS);
        ring.given_up = 0;
        fence_shared_for_bulk();
    }
}

// Waits for a phase of an mbarrier whose arrivals depend on another team of the block. False if a team has given up, as a team
// whose wait for a peer expires does; so that limit holds here too. The number of polls, which take at least
// 200 ns after a while, is a last resort.
WEFT_DEVICE bool wait_for_team(const Ring &ring, u64 *barrier, u32 parity) {
    constexpr u32 BUSY_POLLS = 4096;
    for (u32 polls = 0; polls != ~0u; ++polls) {
        if (ptx::mbarrier_try_wait(barrier, parity)) return true;
        if (*reinterpret_cast<const volatile u32 *>(&ring.given_up) != 0) return ptx::mbarrier_try_wait(barrier, parity);
        if (polls > BUSY_POLLS) ptx::nanosleep(200);
    }
    return false;
}

// Calls `each(slot)` for the own rows of the tokens of this block, in the order in which `add_replies` takes them, until it
// returns false.
template <class Each> WEFT_DEVICE bool for_own_rows(const Arguments &a, const Ring &ring, Each each) {
    const Channel mine = channel(a, a.rank);
    const u32 tokens = a.release || ring.owed.needed != 0 ? 0 : min(token_count(a), mine.state()->sent);
    for (u32 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const i32 slot = mine.slots(token)[a.rank];
        if (slot >= 0 && !each(static_cast<u32>(slot))) return false;
    }
    return true;
}

WEFT_DEVICE void give_up(Ring &ring) { *reinterpret_cast<volatile u32 *>(&ring.given_up) = 1; }

// Producer warp: fetches the terms of the sums, row by row: those for other ranks by ticket, and then this rank's own, with
// `BESIDE` those of the tokens of this block.
//
// The outputs were written by earlier kernels, so they are visible to bulk copies too.
template <bool BESIDE> WEFT_DEVICE void fetch_outputs(const Arguments &a, const Round &round, Ring &ring, u8 *shared) {
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
    // Rows of other ranks come first, since their replies travel.
    const u32 own = ring.owed.rows[a.rank];
    __syncwarp();
    if (lane == 0) ring.owed.rows[a.rank] = 0;
    __syncwarp();
    u32 others = 0;
    for (u32 s = 0; s < RANKS; ++s) others += ring.owed.rows[s];
    u32 source, slot;
    Entry entry;
    const auto find = [&](u32 which) { // row number `which`, with its experts
        bool some = locate(ring.owed.rows, which, a.rank, source, slot);
        if (!BESIDE && !some) source = a.rank, slot = which - others, some = slot < own;
        entry = some ? ring.owed.entry_of(a, source, slot) : Entry{-1, 0.0f};
        return some;
    };
    bool fine = true;
    const auto push = [&](u32 what, u32 source, u32 slot, const Entry &entry) { // called by the first lane
        const u32 at = head % RING;
        if (head >= RING) fine = fine && wait_for_team(ring, ring.empty + at, (head / RING - 1) % 2);
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
    const auto push_row = [&](u32 own_row) { // all lanes
        const u32 terms = __popc(__ballot_sync(~0u, entry.position >= 0)); // valid entries come first
        for (u32 k = 0; k < terms; ++k) {
            const Entry term{__shfl_sync(~0u, entry.position, k), __shfl_sync(~0u, entry.weight, k)};
            if (lane == 0) push((k + 1 == terms ? Ring::LAST : Ring::TERM) | own_row, source, slot, term);
        }
        if (terms == 0 && lane == 0) push(Ring::EMPTY | own_row, source, slot, Entry{-1, 0.0f});
    };
    bool some = find(item - 1);
    while (some) {
        // The next row's ticket and experts are loaded while this row's outputs are fetched.
        if (lane == 0) item = atomicAdd(ticket, 1);
        push_row(0);
        item = __shfl_sync(~0u, item, 0);
        some = find(item - 1);
    }
    if constexpr (BESIDE) {
        for_own_rows(a, ring, [&](u32 own_slot) {
            source = a.rank, slot = own_slot;
            entry = ring.owed.entry_of(a, source, slot);
            push_row(Ring::OWN);
            return true;
        });
    }
    if (lane == 0) {
        push(Ring::STOP, 0, 0, Entry{-1, 0.0f});
        // Loads end before the block does, also if a team has given up.
        for (u32 i = head < RING ? 0 : head - RING; i < head; ++i) wait_phase(ring.full + i % RING, i / RING % 2);
    }
}

// Consumer team: sums each row's outputs (float32 from +0, products rounded, in top-k order, rounded once) and
// sends the reply. COMBINE_THREADS threads.
template <bool BESIDE> WEFT_DEVICE void send_replies(const Arguments &a, const Round &round, Ring &ring, u8 *shared) {
    const Team team{1, threadIdx.x - 32, COMBINE_THREADS};
    u8 *stages = shared + RING * OUTPUT_BYTES;
    // The first thread issues the copies. The others may write the next stage after the barrier of the previous row,
    // so at that barrier at most PENDING copies may be in flight.
    constexpr u32 PENDING = REPLY_STAGES - 2, NONE = ~0u;
    u32 pending[PENDING]; // source and slot of each, oldest first
#pragma unroll
    for (u32 i = 0; i < PENDING; ++i) pending[i] = NONE;
    const auto release = [&](u32 which) {
        if (which != NONE) signal(channel(a, which / MAX_TOKENS).reply_flag(a.rank, which % MAX_TOKENS), round.epoch);
    };
    bool failed = false;
    float sum[SUM_TURNS][IN_16] = {};
    for (u32 tail = 0, row = 0, own_rows = 0;; ++tail) {
        const u32 at = tail % RING;
        const bool fine = wait_for_team(ring, ring.full + at, tail / RING % 2);
        const u32 what = ring.what[at];
        // Warps exit together: a warp whose wait failed joins the others at the barrier of this row.
        if (!__all_sync(~0u, fine) || what == Ring::STOP) {
            team.all(false);
            failed = !fine;
            break;
        }
        const bool beside = BESIDE && (what & Ring::OWN) != 0;
        if (beside && team.thread == 0) { // no flag waits for a row that does not travel
            ptx::bulk_wait<0>();
#pragma unroll
            for (u32 i = 0; i < PENDING; ++i) release(pending[i]), pending[i] = NONE;
        }
        const float weight = WEIGHT_AT_COMBINE ? ring.weight[at] : 1.0f;
#pragma unroll
        for (u32 n = 0; n < SUM_TURNS; ++n) {
            const u32 byte = 16 * (n * COMBINE_THREADS + team.thread);
            if ((what & Ring::EMPTY) != 0 || byte >= OUTPUT_BYTES) continue;
            float x[IN_16];
            widen<WEFT_COMBINE_TYPE>(*reinterpret_cast<const uint4 *>(shared + at * OUTPUT_BYTES + byte), x);
#pragma unroll
            for (u32 j = 0; j < IN_16; ++j) sum[n][j] = __fadd_rn(sum[n][j], __fmul_rn(weight, x[j]));
        }
        const u32 source = ring.source[at], slot = ring.slot[at];
        fence_shared_for_bulk(); // the stage is refilled by a bulk load
        ptx::mbarrier_arrive(ring.empty + at); // by each thread for its own reads, which race checkers can follow
        if ((what & Ring::STOP) == Ring::TERM) continue;

        u8 *stage = stages + (beside ? REPLY_STAGES : row++ % REPLY_STAGES) * REPLY_BYTES;
        if (beside && own_rows != 0 && !__all_sync(~0u, wait_for_team(ring, &ring.own_free, (own_rows - 1) % 2))) {
            team.all(false);
            failed = true;
            break;
        }
#pragma unroll
        for (u32 n = 0; n < SUM_TURNS; ++n) {
            const u32 element = IN_16 * (n * COMBINE_THREADS + team.thread);
            if (element < HIDDEN) narrow<WEFT_REPLY_TYPE>(stage + element * bytes_of(WEFT_REPLY_TYPE), sum[n]);
#pragma unroll
            for (u32 j = 0; j < IN_16; ++j) sum[n][j] = 0.0f;
        }
        if (beside) {
            ptx::mbarrier_arrive(&ring.own_full);
            ++own_rows;
            continue;
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
    if (failed) phase_failed(watch(a, COMBINE_SEND), 0), give_up(ring);
    if (PATH != PACKETS && team.thread == 0) {
        ptx::bulk_wait<0>();
#pragma unroll
        for (u32 i = 0; i < PENDING; ++i) release(pending[i]);
    }
}

// Loads 16 bytes of a reply; on the packet path, waits for them.
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
// Work items per token: on the packet path, pieces of a row.
constexpr u32 PIECES = PATH == PACKETS ? ADD_TURNS : 1;
// Replies, and turns of each, whose loads a thread has in flight, limited by registers. Of two ranks one reply travels.
constexpr u32 ADD_WIDE = PATH != PACKETS && RANKS <= 2 && ADD_TURNS % 2 == 0 ? 2 : 1, TOGETHER = PATH == PACKETS || ADD_WIDE == 2 ? 1 : 3;

// Adds the replies to each token. One team of COMBINE_THREADS threads: team `number` of `teams` in a block; `thread` is the
// index in the team. With `BESIDE`, the sums of own rows come from the other team of the block, in `own_stage`; else as
// replies. False if it failed in this thread.
template <bool BESIDE> WEFT_DEVICE bool add_replies(const Arguments &a, const Round &round, u32 number, u32 teams, u32 thread, Ring &ring, const u8 *own_stage) {
    const Channel mine = channel(a, a.rank);
    const Watch watching = watch(a, COMBINE_RECV);
    const u32 lane = threadIdx.x % 32;
    const u32 items = a.release ? 0 : token_count(a) * PIECES;
    u32 own_rows = 0;
    const auto take_own = [&] {
        if (wait_for_team(ring, &ring.own_full, own_rows++ % 2)) return true;
        phase_failed(watching, 0);
        return false;
    };

    const Outcome outcome = receive_signals(a, round, watching, blockIdx.x == 0 && thread < WARP && number == 0);
    if (outcome == Outcome::FAILED) return false;
    if (outcome == Outcome::SPOILT) {
        spoil_combined(a, (blockIdx.x * teams + number) * COMBINE_THREADS + thread, gridDim.x * teams * COMBINE_THREADS);
        if constexpr (!BESIDE) return true;
        return __all_sync(~0u, for_own_rows(a, ring, [&](u32) {
            const bool here = take_own();
            ptx::mbarrier_arrive(&ring.own_free);
            return here;
        }));
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
            if (PATH != PACKETS && slot[n] >= 0 && !(BESIDE && from == a.rank)) here &= wait(watching, mine.reply_flag(from, slot[n]), round.epoch, from, slot[n]);
        }
        bool own = false;
        if constexpr (BESIDE) {
#pragma unroll
            for (u32 n = 0; n < TURNS; ++n) own |= __any_sync(~0u, n * 32 + lane == a.rank && slot[n] >= 0);
            if (own) here &= take_own();
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
                            if (!real(w)) continue;
                            else if (BESIDE && from == a.rank) v[i][w] = *reinterpret_cast<const uint4 *>(own_stage + element(w) * bytes_of(WEFT_REPLY_TYPE));
                            else here &= load_reply(watching, mine.reply(from, at_slot), element(w) * bytes_of(WEFT_REPLY_TYPE), round.epoch, from, at_slot, v[i][w]);
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
        if (own) ptx::mbarrier_arrive(&ring.own_free);
    }
    past_waits(teams * COMBINE_THREADS / WARP);
    return true;
}

// The receive half, by one team. False if it failed in this thread.
template <bool BESIDE> WEFT_DEVICE bool receive_replies(const Arguments &a, const Round &round, u32 number, u32 teams, u32 thread, Ring &ring, const u8 *own_stage) {
    const bool fine = add_replies<BESIDE>(a, round, number, teams, thread, ring, own_stage);
    if (BESIDE && !fine) give_up(ring);
    return fine;
}

} // namespace weft::moe
