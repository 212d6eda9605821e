// Dispatch of large batches: a warp takes a row from the user's array to all its ranks, or from where it landed
// to its positions, so that a block has a row in flight for each stage of each of its warps.
//
// The plan (plan.cuh) has every token's slots. A row is loaded in bulk while the one before it is cast or
// completed with its metadata, in place, and leaves by one bulk copy for each rank. Its flag is raised by one
// warp of the block for all the others, a fence for as many flags as have come (FlagQueue).
// Why the flag covers the row: the lane that issues a copy waits for its full completion
// (cp.async.bulk.wait_group, not .read), and hands the flag over by a release at block scope; the
// warp that raises flags acquires it, passes a fence at system scope, and stores the flag.
#pragma once
#include "moe/counts.cuh"
#include "moe/elements.cuh"

namespace weft::moe::bandwidth {

constexpr u32 START_BYTES = (RANKS * LOCAL * 4 + 15) / 16 * 16;
constexpr u32 SHARED_BUDGET = 227 * 1024 - sizeof(Places) - START_BYTES - 4096; // less what else a block keeps there
// A token as given and the row as sent lie in one stage: it shrinks in place.
constexpr u32 STAGE_BYTES = ((CAST && TOKEN_BYTES > ROW_BYTES ? TOKEN_BYTES : ROW_BYTES) + 127) / 128 * 128;
constexpr u32 SCRATCH_BYTES = CAST ? (SCALES * SCALE_BYTES + 15) / 16 * 16 : 0, SCRATCH_ROOM = (SCRATCH_BYTES + 127) / 128 * 128;
constexpr u32 STAGES = SHARED_BUDGET / (2 * STAGE_BYTES + SCRATCH_ROOM) >= 2 ? 2 : 1;
constexpr u32 WARP_BYTES = STAGES * STAGE_BYTES + SCRATCH_ROOM, FITTING = SHARED_BUDGET / WARP_BYTES;
constexpr u32 RING_WARPS = FITTING < 2 ? 2 : FITTING > 8 ? 8 : FITTING;
// Warps that receive from the beginning; the others join them when all tokens have left. Where rows stay in place a
// receiver needs no ring, and there is a warp more.
constexpr u32 EARLY = LAYOUT == INDEXED ? 1 : RING_WARPS / 2;
constexpr u32 WARPS = LAYOUT == INDEXED ? RING_WARPS + 1 : RING_WARPS, FIRST_RING = WARPS - RING_WARPS;
constexpr u32 THREADS = (WARPS + 1) * WARP; // the last warp raises flags
constexpr u32 SHARED = RING_WARPS * WARP_BYTES + START_BYTES;
constexpr u32 TURNS = (RANKS + WARP - 1) / WARP; // ranks of a lane
constexpr u32 COUNTS_BARRIER = 1, JOIN_BARRIER = 2;
static_assert(RING_WARPS * WARP <= 256, "each lane may wait for a place in the queue of flags");

using Ring = LoadRing<STAGES, STAGE_BYTES>;

// What the warps of a block share.
struct Block {
    FlagQueue<256> flags;
    Places places;
    u64 full[RING_WARPS][STAGES];
    u32 item[WARPS]; // each warp's first ticket
};

WEFT_DEVICE Ring ring_of(Block &block, u8 *shared) {
    const u32 warp = warp_of_thread() - FIRST_RING;
    return Ring(shared + warp * WARP_BYTES, block.full[warp]);
}

// What warps do while the block enters. Those from `first` on send.
WEFT_DEVICE void prepare_rows(const Arguments &a, Block &block, u32 first) {
    const u32 warp = warp_of_thread();
    if (lane_of_thread() == 0 && warp >= first && warp < WARPS) block.item[warp] = atomicAdd(&channel(a, a.rank).state()->send_ticket, 1);
}

// A token on its way: where it goes, and its metadata.
struct Outgoing {
    u32 token;
    i32 slot[TURNS]; // of this lane's ranks
    Choice choice;   // of this lane's top-k slot

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
        if (lane >= TOP_K) return;
        const i32 id = mine.ids(token)[lane];
        choice = Choice{id < 0 ? NO_EXPERT : static_cast<u16>(id), static_cast<u16>(mine.index(token)[lane]), weight_of(a, token, lane)};
    }
};

// Casts a token to the codes and scales of a row, in place. What is written lies below all that is still to be read.
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

// Makes a staged token the row that travels.
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

// The send half of a warp: tokens by ticket, until there are no more.
WEFT_DEVICE void send_rows(const Arguments &a, const Round &round, const Watch &watching, Block &block, Ring &ring, u8 *shared) {
    const u32 lane = lane_of_thread(), warp = warp_of_thread(), tokens = token_count(a);
    u8 *scratch = shared + (warp - FIRST_RING) * WARP_BYTES + STAGES * STAGE_BYTES;
    u32 *ticket = &channel(a, a.rank).state()->send_ticket;
    const auto begin = [&](Outgoing &row, u32 token) {
        row.load(a, token);
        ptx::bulk_wait_read<0>(); // what left from this stage
        __syncwarp();
        ring.push(reinterpret_cast<const u8 *>(a.tokens) + static_cast<u64>(token) * TOKEN_BYTES, TOKEN_BYTES);
    };
    Outgoing now, ahead;
    i32 pending[TURNS]; // slots of the row whose copies are under way
#pragma unroll
    for (u32 n = 0; n < TURNS; ++n) pending[n] = -1;
    const auto post = [&] {
#pragma unroll
        for (u32 n = 0; n < TURNS; ++n)
            block.flags.post(pending[n] >= 0, (a.rank + 1 + n * WARP + lane) % RANKS * MAX_TOKENS + pending[n]);
    };
    u32 item = block.item[warp], next = 0;
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
        ring.pop();
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
}

// The warp that raises flags.
WEFT_DEVICE void raise_flags(const Arguments &a, const Round &round, Block &block) {
    block.flags.drain([&](u32 flag) { signal_released(channel(a, flag / MAX_TOKENS).row_flag(a.rank, flag % MAX_TOKENS), round.epoch); });
}

// A row that is taken: `item` counts slots of all sources in turn, beginning behind this rank. False if this source
// has not so many.
WEFT_DEVICE bool row_of(const Arguments &a, const Places &places, u32 item, u32 &source, u32 &slot) {
    source = (a.rank + 1 + item) % RANKS, slot = item / RANKS;
    return slot < places.rows[source];
}

// Rows that are copied to their positions, by ticket. False if a wait failed, or another's has.
WEFT_DEVICE bool copy_rows(const Arguments &a, const Round &round, const Watch &watching, const Places &places, Ring &ring) {
    const Channel mine = channel(a, a.rank);
    const u32 lane = lane_of_thread();
    u32 *ticket = &mine.state()->receive_ticket;
    u8 *out = reinterpret_cast<u8 *>(a.out_tokens);
    // The next row that there is, once it has landed, on its way into a stage; false at the end. `fine` if no wait failed.
    bool fine = true;
    u32 after = 0;
    if (lane == 0) after = atomicAdd(ticket, 1);
    const auto begin = [&](u32 &source, u32 &slot) {
        for (;;) {
            const u32 item = __shfl_sync(~0u, after, 0);
            if (item / RANKS >= places.most) return false;
            if (lane == 0) after = atomicAdd(ticket, 1);
            if (row_of(a, places, item, source, slot)) break;
        }
        if (lane == 0) {
            fine = wait(watching, mine.row_flag(source, slot), round.epoch, source, slot);
            fence_global_for_bulk();
        }
        fine = __shfl_sync(~0u, fine, 0);
        if (!fine) return false;
        ptx::bulk_wait_read<0>(); // what was stored out of this stage
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
        const i32 position = place_row(a, places, source, slot, reinterpret_cast<const Choice *>(stage + WEFT_ROW_META_AT));
        if (position >= 0) ptx::bulk_store(out + static_cast<u64>(position) * WIRE_BYTES, stage, WIRE_BYTES);
        ptx::bulk_commit();
        if constexpr (SCALE_BYTES != 0)
            for (u32 placed = __ballot_sync(~0u, position >= 0); placed != 0; placed &= placed - 1)
                place_scales(a, stage, __shfl_sync(~0u, position, __ffs(placed) - 1), lane, WARP);
        ring.pop();
        some = STAGES > 1 ? more : begin(next_source, next_slot);
        source = next_source, slot = next_slot;
    }
    const bool dead = lane == 0 && watching.dead(); // its answer comes while the last copies leave
    if (fine && !dead) ptx::bulk_wait_read<0>();   // the end of the kernel completes them
    else ptx::bulk_wait<0>();                      // before outputs are poisoned
    return fine && !dead;
}

// Rows that stay where they landed, by ticket: a lane takes a row.
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
        if (!__all_sync(~0u, here)) return false; // all lanes leave together: the next ticket is shuffled
    }
}

// The receive half of a warp. The first `counting` warps of the block work out positions for all; the others join them.
// Without a ring where rows stay in place. False if this thread saw it fail.
WEFT_DEVICE bool receive_rows(const Arguments &a, const Round &round, Block &block, Ring *ring, u8 *shared, u32 counting) {
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
        if (receive_counts(a, round, team, places) && blockIdx.x == 0) publish_counts(a, team, places);
        if (counting < WARPS) ptx::named_barrier_arrive(JOIN_BARRIER, WARPS * WARP);
    } else {
        ptx::named_barrier(JOIN_BARRIER, WARPS * WARP);
    }
    if (places.failed) return false;
    if constexpr (LAYOUT == INDEXED) return index_rows(a, round, watching, places);
    else return copy_rows(a, round, watching, places, *ring);
}

} // namespace weft::moe::bandwidth
