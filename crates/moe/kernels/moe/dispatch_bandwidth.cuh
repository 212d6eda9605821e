// Dispatch for large batches: a warp moves whole rows, from the user's array to all destination ranks, or from the
// arrival slot to the positions. Each warp has a stage ring; a block has one row in flight per stage and warp.
//
// The plan (plan.cuh) has every token's slots. A row is loaded in bulk while the previous one is cast or completed with
// metadata, in place, and sent by one bulk copy per rank. One flag warp per block raises all warps' flags, with one
// fence for all flags in the queue (FlagQueue). Memory order between row and flag: the lane that issues a copy waits
// for its full completion (cp.async.bulk.wait_group, not .read), and posts the flag with a release at block scope; the
// flag warp acquires it, passes a fence at system scope, and stores the flag.
#pragma once
#include "moe/counts.cuh"
#include "moe/elements.cuh"

namespace weft::moe::bandwidth {

constexpr u32 START_BYTES = (RANKS * LOCAL * 4 + 15) / 16 * 16;
constexpr u32 SHARED_BUDGET = 227 * 1024 - sizeof(Places) - START_BYTES - 4096; // less the block's other shared memory
// A stage holds the input token and, after the cast in place, the wire row.
constexpr u32 STAGE_BYTES = ((CAST && TOKEN_BYTES > ROW_BYTES ? TOKEN_BYTES : ROW_BYTES) + 127) / 128 * 128;
constexpr u32 SCRATCH_BYTES = CAST ? (SCALES * SCALE_BYTES + 15) / 16 * 16 : 0, SCRATCH_ROOM = (SCRATCH_BYTES + 127) / 128 * 128;
constexpr u32 STAGES = SHARED_BUDGET / (2 * STAGE_BYTES + SCRATCH_ROOM) >= 2 ? 2 : 1;
constexpr u32 WARP_BYTES = STAGES * STAGE_BYTES + SCRATCH_ROOM, FITTING = SHARED_BUDGET / WARP_BYTES;
constexpr u32 RING_WARPS = FITTING < 2 ? 2 : FITTING > 8 ? 8 : FITTING;
// Warps that receive from the start; the sending warps join them after the last token. In the indexed layout a
// receiver needs no ring, so a block has one warp more.
constexpr u32 EARLY = LAYOUT == INDEXED ? 1 : RING_WARPS / 2;
constexpr u32 WARPS = LAYOUT == INDEXED ? RING_WARPS + 1 : RING_WARPS, FIRST_RING = WARPS - RING_WARPS;
constexpr u32 THREADS = (WARPS + 1) * WARP; // the last warp raises flags
constexpr u32 SHARED = RING_WARPS * WARP_BYTES + START_BYTES;
constexpr u32 TURNS = (RANKS + WARP - 1) / WARP; // ranks per lane
constexpr u32 COUNTS_BARRIER = 1, JOIN_BARRIER = 2;
// A launch with both halves copies this rank's own rows directly from the tokens to their positions. Tokens sent before
// the positions are computed are recorded, and their own rows follow after all sends. With a cast, which bounds the
// sending warps, own rows pass through the heap instead, and the receiving warps place them.
constexpr bool STRAIGHT = LAYOUT != INDEXED && !CAST;
constexpr u32 MOST_NOTED = 64; // recorded tokens per warp
static_assert(RING_WARPS * WARP <= 256, "each lane may wait for a place in the queue of flags");

using Ring = LoadRing<STAGES, STAGE_BYTES>;

// Shared memory for a block's warps.
struct Block {
    FlagQueue<256> flags;
    Places places;
    u64 full[RING_WARPS][STAGES];
    u32 item[WARPS]; // each warp's first ticket
    u32 placed;      // 1: `places` is complete, or has failed
    u16 noted[WARPS][MOST_NOTED];

    // Called by every thread in the block, before a block barrier.
    WEFT_DEVICE void clear(u32 senders) {
        flags.clear(senders);
        if (threadIdx.x == 0) placed = 0;
    }
};

WEFT_DEVICE Ring ring_of(Block &block, u8 *shared) {
    const u32 warp = warp_of_thread() - FIRST_RING;
    return Ring(shared + warp * WARP_BYTES, block.full[warp]);
}

// Preparation during `enter`: first ticket for each sending warp, from warp `first` on.
WEFT_DEVICE void prepare_rows(const Arguments &a, Block &block, u32 first) {
    const u32 warp = warp_of_thread();
    if (lane_of_thread() == 0 && warp >= first && warp < WARPS) block.item[warp] = atomicAdd(&channel(a, a.rank).state()->send_ticket, 1);
}

// A token to send: destinations and metadata.
struct Outgoing {
    u32 token;
    i32 slot[TURNS]; // for this lane's ranks
    Choice choice;   // for this lane's top-k slot

    WEFT_DEVICE void load(const Arguments &a, u32 which) {
        const Channel mine = channel(a, a.rank);
        const u32 lane = lane_of_thread();
        token = which;
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n) {
            const u32 step = n * WARP + lane;
            slot[n] = step < RANKS ? mine.slots(token)[(a.rank + 1 + step) % RANKS] : -1;
        }
        choice = Choice{NO_EXPERT, 0, 0.0f};
        if (lane >= TOP_K || a.kept) return;
        const i32 id = mine.ids(token)[lane];
        choice = Choice{id < 0 ? NO_EXPERT : static_cast<u16>(id), static_cast<u16>(mine.index(token)[lane]), weight_of(a, token, lane)};
    }
};

// Casts a token to row codes and scales, in place: writes stay below all bytes not yet read.
WEFT_DEVICE void cast_row(u8 *stage, u8 *scratch) {
    constexpr u32 TURN = WARP * 8, ITERATIONS = (HIDDEN + TURN - 1) / TURN, GROUP = Eight::LOADS == 2 ? 8 : 16;
    const u32 lane = lane_of_thread();
#pragma unroll 1
    for (u32 group = 0; group < ITERATIONS; group += GROUP) {
        Eight eight[GROUP];
        const auto first = [&](u32 i) { return (group + i) * TURN + 8 * lane; };
#pragma unroll
        for (u32 i = 0; i < GROUP; ++i) {
            if (first(i) < HIDDEN) eight[i].load_shared(stage, first(i));
            else eight[i].clear();
        }
        __syncwarp();
        cast_eights(eight, first, stage, scratch);
    }
    __syncwarp();
    for (u32 at = 4 * lane; at < SCRATCH_BYTES; at += 4 * WARP)
        *reinterpret_cast<u32 *>(stage + WEFT_ROW_SCALES_AT + at) = *reinterpret_cast<const u32 *>(scratch + at);
}

// Completes a staged token to a wire row: codes, scales and metadata.
WEFT_DEVICE void complete_row(const Arguments &a, const Outgoing &row, u8 *stage, u8 *scratch) {
    const u32 lane = lane_of_thread();
    if constexpr (CAST) {
        cast_row(stage, scratch);
    } else if constexpr (SCALE_BYTES != 0) {
        const u8 *scales = reinterpret_cast<const u8 *>(a.scales) + static_cast<u64>(row.token) * SCALES * SCALE_BYTES;
        for (u32 i = lane; i < SCALES; i += WARP) {
            if constexpr (SCALE_BYTES == 4) reinterpret_cast<u32 *>(stage + WEFT_ROW_SCALES_AT)[i] = reinterpret_cast<const u32 *>(scales)[i];
            else stage[WEFT_ROW_SCALES_AT + i] = scales[i];
        }
    }
    if (lane < TOP_K) reinterpret_cast<Choice *>(stage + WEFT_ROW_META_AT)[lane] = row.choice;
}

// Removes this rank's own row from the rows sent through the heap; returns the slot, or -1.
WEFT_DEVICE i32 take_own(Outgoing &row) {
    constexpr u32 LAST = (RANKS - 1) % WARP; // lane in the last step, which is this rank
    const i32 slot = __shfl_sync(~0u, row.slot[TURNS - 1], LAST);
    if (lane_of_thread() == LAST) row.slot[TURNS - 1] = -1;
    return slot;
}

// Records the experts in an own row whose stage is complete, and copies the scales; returns this lane's position, or
// -1.
WEFT_DEVICE i32 place_own(const Arguments &a, const Places &places, const Outgoing &row, i32 slot, const u8 *stage) {
    if (slot < 0 || places.failed || places.needed != 0) return -1;
    __syncwarp(); // orders all stage writes before the reads
    const i32 position = place_row(a, places, a.rank, slot, row.choice);
    place_scales_of(a, stage, position);
    return position;
}

WEFT_DEVICE void store_own(const Arguments &a, i32 position, const u8 *stage) {
    if (position >= 0) ptx::bulk_store(reinterpret_cast<u8 *>(a.out_tokens) + static_cast<u64>(position) * WIRE_BYTES, stage, WIRE_BYTES);
}

// Sends the own rows of a warp's recorded tokens, after positions are computed. False if a wait failed.
WEFT_DEVICE bool send_noted(const Arguments &a, const Watch &watching, const Block &block, Ring &ring, u8 *shared, u32 count) {
    const u32 warp = warp_of_thread();
    u8 *scratch = shared + (warp - FIRST_RING) * WARP_BYTES + STAGES * STAGE_BYTES;
    for (u32 i = 0; i < count; ++i) {
        Outgoing row;
        row.load(a, block.noted[warp][i]);
        const i32 slot = take_own(row);
        ptx::bulk_wait_read<0>(); // previous stores from this stage
        __syncwarp();
        ring.push(reinterpret_cast<const u8 *>(a.tokens) + static_cast<u64>(row.token) * TOKEN_BYTES, TOKEN_BYTES);
        u8 *stage = ring.stage();
        if (!ring.arrived(watching)) {
            ptx::bulk_wait<0>(); // before outputs are poisoned
            return false;
        }
        complete_row(a, row, stage, scratch);
        const i32 position = place_own(a, block.places, row, slot, stage);
        ring.pop();
        store_own(a, position, stage);
        ptx::bulk_commit();
    }
    return true;
}

// A warp's send half: tokens by ticket, until none remain. With `OWN`, own rows go directly to their positions. Returns
// how many tokens were recorded.
template <bool OWN> WEFT_DEVICE u32 send_rows(const Arguments &a, const Round &round, const Watch &watching, Block &block, Ring &ring, u8 *shared) {
    const u32 lane = lane_of_thread(), warp = warp_of_thread(), tokens = sent_count(a);
    u8 *scratch = shared + (warp - FIRST_RING) * WARP_BYTES + STAGES * STAGE_BYTES;
    u32 *ticket = &channel(a, a.rank).state()->send_ticket;
    const auto begin = [&](Outgoing &row, u32 token) {
        row.load(a, token);
        ptx::bulk_wait_read<0>(); // previous stores from this stage
        __syncwarp();
        ring.push(reinterpret_cast<const u8 *>(a.tokens) + static_cast<u64>(token) * TOKEN_BYTES, TOKEN_BYTES);
    };
    Outgoing now, ahead;
    i32 pending[TURNS]; // slots for the row whose copies are in flight
#pragma unroll
    for (u32 n = 0; n < TURNS; ++n) pending[n] = -1;
    const auto post = [&] {
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n)
            block.flags.post(pending[n] >= 0, (a.rank + 1 + n * WARP + lane) % RANKS * MAX_TOKENS + pending[n]);
    };
    u32 item = block.item[warp], next = 0, noted = 0;
    bool placed = false;
    // This lane's position for the own row in `stage`; -1 if it has none or the token is recorded for later.
    const auto own_position = [&](const u8 *stage) {
        const i32 slot = take_own(now);
        if (slot < 0) return -1;
        // With a full list, a warp waits for the counts; the wait for counts is bounded.
        while (!placed) {
            placed = __any_sync(~0u, ptx::load_acquire_cta(&block.placed) != 0);
            if (noted < MOST_NOTED) break;
            ptx::nanosleep(64);
        }
        __syncwarp(); // all lanes read the data that one lane has acquired
        if (placed) return place_own(a, block.places, now, slot, stage);
        if (lane == 0) block.noted[warp][noted] = static_cast<u16>(now.token);
        ++noted;
        return -1;
    };
    if (a.kept && item == 0) { // otherwise the plan kernels do this
        send_keys(a, round.epoch, lane, WARP);
        if (lane == 0) note_sent(a, channel(a, a.rank), tokens, round.epoch);
    }
    if (item < tokens) begin(now, item);
    while (item < tokens) {
        if (lane == 0) next = atomicAdd(ticket, 1);
        if constexpr (STAGES == 1) {
            if (!ring.arrived(watching)) break;
        }
        next = __shfl_sync(~0u, next, 0);
        if (STAGES > 1 && next < tokens) begin(ahead, next);
        u8 *stage = ring.stage();
        if (STAGES > 1 && !ring.arrived(watching)) break;
        complete_row(a, now, stage, scratch);
        i32 position = -1;
        if constexpr (OWN) position = own_position(stage);
        ring.pop();
        if constexpr (OWN) store_own(a, position, stage);
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n)
            if (now.slot[n] >= 0) ptx::bulk_store(channel(a, (a.rank + 1 + n * WARP + lane) % RANKS).row(a.rank, now.slot[n]), stage, ROW_BYTES);
        ptx::bulk_commit();
        ptx::bulk_wait<1>();
        post();
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n) pending[n] = now.slot[n];
        if (STAGES == 1 && next < tokens) begin(ahead, next);
        now = ahead;
        item = next;
    }
    ptx::bulk_wait<0>();
    post();
    block.flags.close();
    return noted;
}

// Flag warp: raises the flags that the other warps post.
WEFT_DEVICE void raise_flags(const Arguments &a, const Round &round, Block &block) {
    block.flags.drain([&](u32 flag) { signal_released(channel(a, flag / MAX_TOKENS).row_flag(a.rank, flag % MAX_TOKENS), round.epoch); });
}

// Row for ticket `item`: round robin over the sources, starting after this rank, without this rank if not `OWN`. False
// if the source has fewer rows.
template <bool OWN> constexpr u32 SOURCES = OWN || RANKS == 1 ? RANKS : RANKS - 1;
template <bool OWN> WEFT_DEVICE bool row_of(const Arguments &a, const Places &places, u32 item, u32 &source, u32 &slot) {
    source = (a.rank + 1 + item % SOURCES<OWN>) % RANKS, slot = item / SOURCES<OWN>;
    return (OWN || RANKS > 1) && slot < places.rows[source];
}

// Copies rows to their positions, by ticket. False if a wait in this warp, or in another on this rank, failed.
template <bool OWN> WEFT_DEVICE bool copy_rows(const Arguments &a, const Round &round, const Watch &watching, const Places &places, Ring &ring) {
    const Channel mine = channel(a, a.rank);
    const u32 lane = lane_of_thread();
    u32 *ticket = &mine.state()->receive_ticket;
    u8 *out = reinterpret_cast<u8 *>(a.out_tokens);
    // Waits for the next row and starts loading it into a stage. False at the end, or if a wait failed (`fine` false).
    bool fine = true;
    u32 after = 0;
    if (lane == 0) after = atomicAdd(ticket, 1);
    const auto begin = [&](u32 &source, u32 &slot) {
        for (;;) {
            const u32 item = __shfl_sync(~0u, after, 0);
            if (item / SOURCES<OWN> >= places.most) return false;
            if (lane == 0) after = atomicAdd(ticket, 1);
            if (row_of<OWN>(a, places, item, source, slot)) break;
        }
        if (lane == 0) {
            fine = wait(watching, mine.row_flag(source, slot), round.epoch, source, slot);
            fence_global_for_bulk();
        }
        fine = __shfl_sync(~0u, fine, 0);
        if (!fine) return false;
        ptx::bulk_wait_read<0>(); // previous stores from this stage
        __syncwarp();
        ring.push(mine.row(source, slot), ROW_BYTES);
        return true;
    };
    u32 source, slot, next_source = 0, next_slot = 0;
    bool some = begin(source, slot);
    while (some && fine) {
        const bool more = STAGES > 1 && begin(next_source, next_slot);
        if (!ring.arrived(watching)) {
            ptx::bulk_wait<0>();
            return false;
        }
        u8 *stage = ring.stage();
        const i32 position = place_row(a, places, source, slot, choice_in(stage));
        if (position >= 0) ptx::bulk_store(out + static_cast<u64>(position) * WIRE_BYTES, stage, WIRE_BYTES);
        ptx::bulk_commit();
        place_scales_of(a, stage, position);
        ring.pop();
        some = STAGES > 1 ? more : begin(next_source, next_slot);
        source = next_source, slot = next_slot;
    }
    const bool dead = lane == 0 && watching.dead(); // in flight while the last copies complete
    if (fine && !dead) ptx::bulk_wait_read<0>();   // the kernel's end completes them
    else ptx::bulk_wait<0>();                      // before outputs are poisoned
    return fine && !dead;
}

// Indexed layout: rows stay in their slots. Tickets with one row per lane.
WEFT_DEVICE bool index_rows(const Arguments &a, const Round &round, const Watch &watching, const Places &places) {
    u32 *ticket = &channel(a, a.rank).state()->receive_ticket;
    const u32 lane = lane_of_thread();
    for (;;) {
        u32 item = 0;
        if (lane == 0) item = atomicAdd(ticket, 1);
        item = __shfl_sync(~0u, item, 0);
        const u32 source = (a.rank + 1 + item) % RANKS, slot = item / RANKS * WARP + lane;
        if (item / RANKS * WARP >= places.most) return !__any_sync(~0u, lane == 0 && watching.dead());
        const bool here = slot >= places.rows[source] || index_row(a, round, watching, places, source, slot);
        if (!__all_sync(~0u, here)) return false; // all lanes exit together, since the next ticket is shuffled
    }
}

// A warp's receive half. The block's first `counting` warps compute the positions for all; the others join after
// sending. `ring` is null in the indexed layout. `OWN`: own rows came through the heap; otherwise the warp has recorded
// `noted` of them. False if it failed in this thread.
template <bool OWN> WEFT_DEVICE bool receive_rows(const Arguments &a, const Round &round, Block &block, Ring *ring, u8 *shared, u32 counting, u32 noted) {
    const Watch watching = watch(a, DISPATCH_RECV);
    Places &places = block.places;
    const u32 warp = warp_of_thread();
    if (warp < counting) {
        const Team team{COUNTS_BARRIER, threadIdx.x, counting * WARP};
        if (team.thread == 0) {
            places.start = reinterpret_cast<u32 *>(shared + RING_WARPS * WARP_BYTES);
            places.failed = 0;
        }
        team.sync();
        receive_plan(a, round, team, places, 0);
        if (!OWN && team.thread == 0) ptx::store_release_cta(&block.placed, 1);
        if (counting < WARPS) ptx::named_barrier_arrive(JOIN_BARRIER, WARPS * WARP);
    } else {
        ptx::named_barrier(JOIN_BARRIER, WARPS * WARP);
    }
    if (places.failed) return false;
    if constexpr (LAYOUT == INDEXED) {
        return index_rows(a, round, watching, places);
    } else {
        if (!OWN && !send_noted(a, watching, block, *ring, shared, noted)) return false;
        return copy_rows<OWN>(a, round, watching, places, *ring);
    }
}

} // namespace weft::moe::bandwidth
