// Combine for large batches. A block's warps form groups with one producer and several consumers. The producer warp
// prefetches rows by bulk loads into a ring, with a task for each stage; each consumer warp sums one slice of all rows.
// The send half sums the outputs of a rank's experts for another rank's row, and stores the reply there; the receive
// half sums the replies to a token. If a launch has both halves, a rank's own rows are summed in the receive half,
// without a copy through the heap.
//
// Memory order between reply and flag: all consumer warps in a group store, then meet at a named barrier; one lane
// posts the flag with a release at block scope; the flag warp acquires it, passes a fence at system scope, and stores
// it.
#pragma once
#include "moe/elements.cuh"
#include "moe/owed.cuh"
#include "moe/signals.cuh"

namespace weft::moe::bandwidth {

// Slices: a consumer warp sums SLICE_TURNS times 16 bytes per lane, from rows in the wider type.
constexpr bool WIDE = bytes_of(WEFT_COMBINE_TYPE) == 4 || bytes_of(WEFT_REPLY_TYPE) == 4;
constexpr u32 TURN_ELEMENTS = WARP * (WIDE ? 4 : 8), ROW_TURNS = (HIDDEN + TURN_ELEMENTS - 1) / TURN_ELEMENTS;
constexpr u32 MOST_SLICES = 4, MOST_TURNS = WIDE ? 8 : 7;
constexpr u32 PIECES = (ROW_TURNS + MOST_SLICES * MOST_TURNS - 1) / (MOST_SLICES * MOST_TURNS);
constexpr u32 SLICE_TURNS = (ROW_TURNS + PIECES * MOST_SLICES - 1) / (PIECES * MOST_SLICES);
constexpr u32 SLICES = (ROW_TURNS + PIECES * SLICE_TURNS - 1) / (PIECES * SLICE_TURNS);
constexpr u32 SLICE_ELEMENTS = SLICE_TURNS * TURN_ELEMENTS, PIECE_ELEMENTS = SLICES * SLICE_ELEMENTS;
constexpr u32 PIECE_BYTES = SLICES * SLICE_TURNS * WARP * 16;

// Groups: one producer warp and SLICES consumer warps each. One more warp per block raises flags. If replies equal
// outputs (COPIES), a further warp copies them (copy.cuh), and fewer groups sum received replies.
constexpr bool COPIES = LAYOUT == DENSE && WEFT_COMBINE_TYPE == WEFT_REPLY_TYPE;
constexpr u32 GROUPS = COPIES ? 2 : 3;
constexpr u32 GROUP_WARPS = SLICES + 1, ADD_WARPS = GROUPS * GROUP_WARPS, ADD_THREADS = (ADD_WARPS + 1 + COPIES) * WARP;
constexpr u32 REPLY_TURNS = (RANKS + WARP - 1) / WARP; // ranks per lane
constexpr u32 NO_ROW = ~0u;

// Tasks for a ring stage, in execution order.
enum Task : u32 {
    OUTPUT = 1,    // add an expert's output, times the weight
    REPLY = 2,    // add a reply
    ADD_GIVEN = WEFT_OUTPUT_TYPE == WEFT_REPLY_TYPE ? REPLY : 4, // add a row from the caller, after all replies
    KEEP = 8,      // the sum is this rank's own reply: round it, keep it, and restart at +0
    ADD_KEPT = 16,
    STORE_REPLY = 32, // and restart at +0
    STORE_COMBINED = 64,
    FLAG = 128, // the reply is complete
    STOP = 256,
};

// True if a result slice fits in a stage. If only results are float32, rows to add to them are read in place.
constexpr bool GIVEN_IN_RING = WIDE || bytes_of(WEFT_OUTPUT_TYPE) < 4;

struct Stage {
    u64 to; // destination row for the sum
    float weight;
    u32 task, piece, flag;
};

constexpr u32 ADD_ROOM = (227 * 1024 - 8192) / PIECE_BYTES;
constexpr u32 COPY_STAGES = ADD_ROOM > 24 ? 8 : ADD_ROOM / 3; // stages in the copy warp's ring, if there is one
constexpr u32 COPY_ROOM = COPIES ? COPY_STAGES : 0;
constexpr u32 DEPTH = (ADD_ROOM - COPY_ROOM) / GROUPS > 12 ? 12 : (ADD_ROOM - COPY_ROOM) / GROUPS; // stages in a ring
constexpr u32 ADD_SHARED = (GROUPS * DEPTH + COPY_ROOM) * PIECE_BYTES;
static_assert(DEPTH >= 2, "rows are fetched while others are summed");

// Shared memory for a block's warps.
struct AddBlock {
    FlagQueue<256> flags;
    u64 full[GROUPS][DEPTH], empty[GROUPS][DEPTH];
    Stage stages[GROUPS][DEPTH];
    u64 copied[COPY_STAGES];
    u64 replies[GROUPS][WARP];
    Owed owed;
    u32 item[GROUPS + 1]; // first ticket for each group, and for the copy warp
    u32 lost[GROUPS];     // 1: the producer warp has exited without STOP

    // Called by every thread in the block, before a block barrier.
    WEFT_DEVICE void clear(u32 senders) {
        flags.clear(senders);
        if (threadIdx.x < GROUPS) lost[threadIdx.x] = 0;
        if (threadIdx.x < COPY_STAGES) ptx::mbarrier_init(copied + threadIdx.x, 1);
        if (threadIdx.x < GROUPS * DEPTH) {
            ptx::mbarrier_init(full[0] + threadIdx.x, 1);
            ptx::mbarrier_init(empty[0] + threadIdx.x, SLICES * WARP);
        }
        fence_shared_for_bulk();
    }
};

// Producer warp in a group.
struct Fetcher {
    AddBlock &block;
    u8 *ring;
    u32 group, head = 0, rounds = 0;

    WEFT_DEVICE Fetcher(AddBlock &block, u8 *shared, u32 group) : block(block), ring(shared + group * DEPTH * PIECE_BYTES), group(group) {}

    // Pushes a stage with `bytes` bytes from `from`, possibly 0. False if the wait for an empty stage failed.
    WEFT_DEVICE bool push(const Stage &stage, const void *from, u32 bytes) {
        if (rounds != 0 && !__all_sync(~0u, wait_phase(block.empty[group] + head, (rounds - 1) % 2))) return false;
        if (lane_of_thread() == 0) {
            block.stages[group][head] = stage;
            u64 *full = block.full[group] + head;
            fence_shared_for_bulk(); // after the consumers' ordinary loads from the stage
            if (bytes != 0) {
                ptx::mbarrier_expect(full, bytes);
                ptx::bulk_load(ring + head * PIECE_BYTES, from, bytes, full);
            } else {
                ptx::mbarrier_arrive(full);
            }
        }
        __syncwarp();
        head = head + 1 == DEPTH ? 0 : head + 1;
        if (head == 0) ++rounds;
        return true;
    }

    // Pushes a row slice in `TYPE`.
    template <u32 TYPE> WEFT_DEVICE bool push(Stage stage, u64 row) {
        constexpr u32 BYTES = PIECE_ELEMENTS * bytes_of(TYPE), ROW = HIDDEN * bytes_of(TYPE);
        const u32 begin = stage.piece * BYTES;
        return push(stage, reinterpret_cast<const u8 *>(row) + begin, ROW - begin < BYTES ? ROW - begin : BYTES);
    }

    WEFT_DEVICE bool stop() { return push(Stage{0, 0.0f, STOP, 0, 0}, nullptr, 0); }
};

// Terms in a sum: lane i holds the i-th row's address and weight.
struct Terms {
    u64 at = 0;
    float weight = 1.0f;
    u32 count = 0;
};

// Consumer warp: sums slice `slice` of the rows in the group's ring. False if a wait failed.
WEFT_DEVICE bool sum_slices(const Arguments &a, const Watch &watching, AddBlock &block, u8 *shared, u32 group, u32 slice) {
    constexpr u32 PER = WIDE ? 4 : 8; // elements per lane and turn: 16 bytes, or 8 in a narrower type
    const u32 lane = lane_of_thread();
    const u8 *ring = shared + group * DEPTH * PIECE_BYTES;
    float sum[SLICE_TURNS][PER] = {};
    Kept<PER> kept[SLICE_TURNS];
    const auto begin = [&] {
#pragma unroll
        for (u32 n = 0; n < SLICE_TURNS; ++n)
#pragma unroll
            for (u32 j = 0; j < PER; ++j) sum[n][j] = 0.0f;
    };
    for (u32 tail = 0, parity = 0;;) {
        // Bounded: the producer's wait for a peer has a limit, and the producer ends with STOP or sets `lost`.
        while (!__all_sync(~0u, wait_phase(block.full[group] + tail, parity)))
            if (__any_sync(~0u, *reinterpret_cast<volatile u32 *>(&block.lost[group]) != 0)) {
                phase_failed(watching, parity);
                return false;
            }
        // One lane reads the stage's task and broadcasts it.
        Stage stage{};
        if (lane == 0) stage = block.stages[group][tail];
        stage.task = __shfl_sync(~0u, stage.task, 0);
        stage.weight = __shfl_sync(~0u, stage.weight, 0);
        stage.to = __shfl_sync(~0u, stage.to, 0);
        stage.piece = __shfl_sync(~0u, stage.piece, 0);
        const u8 *data = ring + tail * PIECE_BYTES;
        if (stage.task & OUTPUT) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n) add_to<WEFT_COMBINE_TYPE, WEIGHT_AT_COMBINE>(sum[n], data, slice * SLICE_ELEMENTS + n * TURN_ELEMENTS + PER * lane, stage.weight);
        }
        if (stage.task & REPLY) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n) add_to<WEFT_REPLY_TYPE, false>(sum[n], data, slice * SLICE_ELEMENTS + n * TURN_ELEMENTS + PER * lane, 1.0f);
        }
        if constexpr (GIVEN_IN_RING && ADD_GIVEN != REPLY) {
            if (stage.task & ADD_GIVEN) {
#pragma unroll
                for (u32 n = 0; n < SLICE_TURNS; ++n) add_to<WEFT_OUTPUT_TYPE, false>(sum[n], data, slice * SLICE_ELEMENTS + n * TURN_ELEMENTS + PER * lane, 1.0f);
            }
        }
        // Each lane arrives for its own reads, which race checkers can follow; it is also the faster variant.
        ptx::mbarrier_arrive(block.empty[group] + tail);
        if (stage.task & STOP) return true;
        tail = tail + 1 == DEPTH ? 0 : tail + 1;
        if (tail == 0) parity ^= 1;
        if (stage.task & KEEP) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n) kept[n].template keep<WEFT_REPLY_TYPE>(sum[n]);
            begin();
        }
        if (stage.task & ADD_KEPT) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n) kept[n].template add<WEFT_REPLY_TYPE>(sum[n]);
        }
        const u32 first = stage.piece * PIECE_ELEMENTS + slice * SLICE_ELEMENTS + PER * lane;
        u8 *to = reinterpret_cast<u8 *>(stage.to);
        __builtin_assume(__isGlobal(to)); // on this GPU or a peer
        if (stage.task & STORE_REPLY) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n)
                if (first + n * TURN_ELEMENTS < HIDDEN) narrow<WEFT_REPLY_TYPE>(to + (first + n * TURN_ELEMENTS) * bytes_of(WEFT_REPLY_TYPE), sum[n]);
            begin();
        }
        if (stage.task & STORE_COMBINED) {
            if constexpr (!GIVEN_IN_RING) {
                for_each_added(a, stage.to - a.combined, [&](const u8 *row) {
#pragma unroll
                    for (u32 n = 0; n < SLICE_TURNS; ++n)
                        if (first + n * TURN_ELEMENTS < HIDDEN) add_elements<WEFT_OUTPUT_TYPE>(sum[n], row, first + n * TURN_ELEMENTS);
                });
            }
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n)
                if (first + n * TURN_ELEMENTS < HIDDEN) narrow<WEFT_OUTPUT_TYPE>(to + (first + n * TURN_ELEMENTS) * bytes_of(WEFT_OUTPUT_TYPE), sum[n]);
            begin();
        }
        if (stage.task & FLAG) {
            ptx::named_barrier(1 + group, SLICES * WARP);
            if (slice == 0) block.flags.post(lane == 0, stage.flag);
        }
    }
}

// How many groups send before they receive; the others receive from the start. Launches with few blocks are bound by
// summing; launches with many are bound by the links, which one sending group keeps busy while the others receive.
WEFT_DEVICE u32 sending_groups() { return gridDim.x <= 48 ? 2 : 1; }

// Preparation during `enter`: first tickets and owed rows. Groups below `senders` send; `own`: also to this rank itself.
WEFT_DEVICE void prepare_replies(const Arguments &a, AddBlock &block, u32 senders, bool own) {
    u32 *ticket = &channel(a, a.rank).state()->combine_ticket;
    const u32 warp = warp_of_thread();
    if (lane_of_thread() == 0 && warp < senders) block.item[warp] = atomicAdd(ticket, 1);
    if (COPIES && threadIdx.x == (ADD_WARPS + 1) * WARP) block.item[GROUPS] = atomicAdd(ticket, 1);
    if (threadIdx.x >= 64 && threadIdx.x <= 64 + RANKS) block.owed.load(a, threadIdx.x - 64, own);
}

WEFT_DEVICE Terms outputs_of(const Arguments &a, const Entry &entry) {
    const u32 count = __popc(__ballot_sync(~0u, entry.position >= 0)); // valid entries come first
    return Terms{a.outputs + static_cast<u64>(entry.position) * OUTPUT_BYTES, entry.weight, count};
}

// Fetches a row's outputs. `last` is the task for the last one, or for an empty stage if there are none.
WEFT_DEVICE bool fetch_outputs(Fetcher &fetcher, const Terms &terms, Stage stage, u32 last) {
    if (terms.count == 0) {
        stage.task = last;
        return fetcher.push(stage, nullptr, 0);
    }
    for (u32 term = 0; term < terms.count; ++term) {
        stage.task = OUTPUT | (term + 1 == terms.count ? last : 0);
        stage.weight = __shfl_sync(~0u, terms.weight, term);
        if (!fetcher.push<WEFT_COMBINE_TYPE>(stage, __shfl_sync(~0u, terms.at, term))) return false;
    }
    return true;
}

// A producer warp's send half: replies by ticket. The next row's experts are loaded while this row is fetched.
WEFT_DEVICE bool send_replies(const Arguments &a, const Round &round, AddBlock &block, Fetcher &fetcher) {
    const u32 lane = lane_of_thread();
    u32 *ticket = &channel(a, a.rank).state()->combine_ticket;
    u32 item = block.item[fetcher.group];
    if (item == 0) { // the first ticket covers the signals, which any group can send
        send_signals(a, round, block.owed.needed);
        if (lane == 0) item = atomicAdd(ticket, 1);
    }
    const auto find = [&](u32 &row, Entry &entry) {
        u32 source, slot;
        const u32 which = __shfl_sync(~0u, item, 0);
        row = locate(block.owed.rows, which - 1, a.rank, source, slot) ? source * MAX_TOKENS + slot : NO_ROW;
        entry = Entry{-1, 0.0f};
        if (row == NO_ROW) return;
        if (lane == 0) item = atomicAdd(ticket, 1);
        entry = block.owed.entry_of(a, source, slot);
    };
    u32 row, next;
    Entry entry;
    bool fine = true;
    for (find(row, entry); fine && row != NO_ROW; row = next) {
        const Terms terms = outputs_of(a, entry);
        find(next, entry);
        const u64 reply = reinterpret_cast<u64>(channel(a, row / MAX_TOKENS).reply(a.rank, row % MAX_TOKENS));
        for (u32 piece = 0; fine && piece < PIECES; ++piece)
            fine = fetch_outputs(fetcher, terms, Stage{reply, 1.0f, 0, piece, row}, STORE_REPLY | (piece + 1 == PIECES ? FLAG : 0));
    }
    return fine;
}

// Flag warp: raises the flags that the other warps post.
WEFT_DEVICE void raise_reply_flags(const Arguments &a, const Round &round, AddBlock &block) {
    block.flags.drain([&](u32 flag) { signal_released(channel(a, flag / MAX_TOKENS).reply_flag(a.rank, flag % MAX_TOKENS), round.epoch); });
}

// True if a rank's own sum, rounded to the reply type as every reply is, stays in registers: outputs and replies then
// have the same layout in lanes.
constexpr bool SUMS_OWN = per_16(WEFT_COMBINE_TYPE) == per_16(WEFT_REPLY_TYPE);

// Waits for the replies to a token and lists them in rank order, this rank's own only if `own`; `low` counts those from
// lower ranks. False if a wait failed.
WEFT_DEVICE bool replies_to(const Arguments &a, const Round &round, const Watch &watching, const i32 (&slot)[REPLY_TURNS], u64 *list, bool own, Terms &replies, u32 &low) {
    const Channel mine = channel(a, a.rank);
    const u32 lane = lane_of_thread();
    bool here = true;
    replies.count = low = 0;
#pragma unroll
    for (u32 n = 0; n < REPLY_TURNS; ++n) {
        const u32 from = n * WARP + lane;
        const bool due = slot[n] >= 0 && (own || from != a.rank);
        if (due) here &= wait(watching, mine.reply_flag(from, slot[n]), round.epoch, from, slot[n]);
        const u32 has = __ballot_sync(~0u, due);
        if (due) list[replies.count + __popc(has & ((1u << lane) - 1))] = reinterpret_cast<u64>(mine.reply(from, slot[n]));
        replies.count += __popc(has);
        low += __popc(__ballot_sync(~0u, due && from < a.rank));
    }
    if (!__all_sync(~0u, here)) return false;
    __syncwarp(); // the first lane fetches data that all lanes have acquired
    fence_global_for_bulk();
    replies.at = list[lane];
    __syncwarp();
    return true;
}

// Token whose replies are summed: reply slots, and the outputs of this rank's own experts.
struct Token {
    u32 id;
    i32 slot[REPLY_TURNS]; // for this lane's ranks
    Entry entry;            // this lane's expert on this rank, if its own sum stays in registers

    // Combine may get more tokens than dispatch sent (`sent`): their sums are 0.
    WEFT_DEVICE void load(const Arguments &a, const Owed &owed, u32 which, u32 tokens, u32 sent, bool own) {
        const i32 *slots = channel(a, a.rank).slots(which);
        id = which < tokens ? which : NO_ROW;
        entry = Entry{-1, 0.0f};
#pragma unroll
        for (u32 n = 0; n < REPLY_TURNS; ++n) slot[n] = -1;
        if (id == NO_ROW || id >= sent) return;
#pragma unroll
        for (u32 n = 0; n < REPLY_TURNS; ++n)
            if (n * WARP + lane_of_thread() < RANKS) slot[n] = slots[n * WARP + lane_of_thread()];
        const i32 mine = own ? -1 : slots[a.rank];
        if (mine >= 0) entry = owed.entry_of(a, a.rank, mine);
    }
};

// Fetches the terms in a token's sum: first this rank's own reply, which is kept, then the others in rank order, then
// the rows that the caller adds.
WEFT_DEVICE bool fetch_token(const Arguments &a, Fetcher &fetcher, const Terms &outputs, const Terms &replies, u32 low, u64 to, u32 piece) {
    const Stage stage{to, 1.0f, 0, piece, 0};
    const bool has_own = outputs.count != 0;
    u32 given = 0;
    if constexpr (GIVEN_IN_RING)
#pragma unroll
        for (u32 i = 0; i < 3; ++i) given += a.added[i] != 0;
    const u32 last = given == 0 ? STORE_COMBINED : 0;
    if (has_own || replies.count == 0) {
        // Without replies from lower ranks, the sum starts as +0 plus the kept reply.
        const u32 then = (has_own ? KEEP : 0) | (has_own && low == 0 ? ADD_KEPT : 0) | (replies.count == 0 ? last : 0);
        if (!fetch_outputs(fetcher, outputs, stage, then)) return false;
    }
    for (u32 term = 0; term < replies.count; ++term) {
        Stage next = stage;
        next.task = REPLY | (has_own && low != 0 && term + 1 == low ? ADD_KEPT : 0) | (term + 1 == replies.count ? last : 0);
        if (!fetcher.push<WEFT_REPLY_TYPE>(next, __shfl_sync(~0u, replies.at, term))) return false;
    }
    if constexpr (GIVEN_IN_RING) {
#pragma unroll 1
        for (u32 i = 0; given != 0; ++i) {
            if (a.added[i] == 0) continue;
            Stage next = stage;
            next.task = ADD_GIVEN | (--given == 0 ? STORE_COMBINED : 0);
            if (!fetcher.push<WEFT_OUTPUT_TYPE>(next, a.added[i] + (to - a.combined))) return false;
        }
    }
    return true;
}

// A producer warp's receive half: tokens by ticket. `own`: this rank's replies to itself passed through the heap. False
// if it failed.
WEFT_DEVICE bool receive_replies(const Arguments &a, const Round &round, AddBlock &block, Fetcher &fetcher, bool own) {
    const Watch watching = watch(a, COMBINE_RECV);
    const u32 lane = lane_of_thread();
    const Outcome outcome = receive_signals(a, round, watching, blockIdx.x == 0 && fetcher.group == 0);
    if (outcome == Outcome::FAILED) return false;
    if (outcome == Outcome::SPOILT) {
        spoil_combined(a, (blockIdx.x * GROUPS + fetcher.group) * WARP + lane, gridDim.x * GROUPS * WARP);
        return true;
    }
    State *state = channel(a, a.rank).state();
    const u32 tokens = a.release ? 0 : token_count(a), sent = state->sent;
    u32 item = 0;
    const auto take = [&] {
        if (lane == 0) item = atomicAdd(&state->add_ticket, 1);
    };
    take();
    Token token, next;
    token.load(a, block.owed, __shfl_sync(~0u, item, 0), tokens, sent, own);
    take();
    bool fine = true;
    for (; fine && token.id != NO_ROW; token = next) {
        const Terms outputs = outputs_of(a, token.entry);
        next.load(a, block.owed, __shfl_sync(~0u, item, 0), tokens, sent, own);
        if (next.id != NO_ROW) take();
        Terms replies;
        u32 low;
        if (!replies_to(a, round, watching, token.slot, block.replies[fetcher.group], own, replies, low)) return false;
        const u64 to = a.combined + static_cast<u64>(token.id) * COMBINED_BYTES;
        for (u32 piece = 0; fine && piece < PIECES; ++piece) fine = fetch_token(a, fetcher, outputs, replies, low, to, piece);
    }
    return fine;
}

// Warp role in a launch: groups below `senders` send, and all groups receive if `receives`. False if it failed.
WEFT_DEVICE bool combine_rows(const Arguments &a, const Round &round, AddBlock &block, u8 *shared, u32 senders, bool receives, bool own) {
    const u32 warp = warp_of_thread();
    if (warp == ADD_WARPS) {
        raise_reply_flags(a, round, block);
        return true;
    }
    if (warp >= GROUPS) {
        const u32 group = (warp - GROUPS) / SLICES, slice = (warp - GROUPS) % SLICES;
        const bool fine = sum_slices(a, watch(a, senders != 0 ? COMBINE_SEND : COMBINE_RECV), block, shared, group, slice);
        if (slice == 0 && group < senders) block.flags.close();
        return fine;
    }
    Fetcher fetcher(block, shared, warp);
    bool fine = true;
    if (warp < senders) fine = send_replies(a, round, block, fetcher);
    if (fine && receives) fine = receive_replies(a, round, block, fetcher, own);
    const bool stopped = fetcher.stop();
    if (!stopped) {
        phase_failed(watch(a, senders != 0 ? COMBINE_SEND : COMBINE_RECV), 0);
        *reinterpret_cast<volatile u32 *>(&block.lost[warp]) = 1;
    }
    return stopped && fine;
}

} // namespace weft::moe::bandwidth
