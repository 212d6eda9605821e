// Combine of large batches. In each group of a block's warps, one fetches rows by bulk loads into a ring, far ahead, and
// says of each what is to be done with it; the others each sum a slice of all rows that come. Sending sums the outputs
// of a rank's experts for a row that another rank dispatched, and stores the answer there; receiving sums the answers
// to a token. Where both are one launch, a rank's own rows are summed as they are received, and take no detour
// through the heap.
//
// Why a flag covers its answer: all warps of a group store, and meet; one lane hands the flag over by a release at
// block scope; the warp that raises flags acquires it, passes a fence at system scope, and stores the flag.
#pragma once
#include "moe/elements.cuh"
#include "moe/signals.cuh"

namespace weft::moe::bandwidth {

// Slices: a warp sums TURNS times 16 bytes for each lane, of rows of the wider type.
constexpr bool WIDE = bytes_of(WEFT_COMBINE_TYPE) == 4 || bytes_of(WEFT_ANSWER_TYPE) == 4;
constexpr u32 TURN_ELEMENTS = WARP * (WIDE ? 4 : 8), ROW_TURNS = (HIDDEN + TURN_ELEMENTS - 1) / TURN_ELEMENTS;
constexpr u32 MOST_SLICES = 4, MOST_TURNS = WIDE ? 8 : 7;
constexpr u32 PIECES = (ROW_TURNS + MOST_SLICES * MOST_TURNS - 1) / (MOST_SLICES * MOST_TURNS);
constexpr u32 SLICE_TURNS = (ROW_TURNS + PIECES * MOST_SLICES - 1) / (PIECES * MOST_SLICES);
constexpr u32 SLICES = (ROW_TURNS + PIECES * SLICE_TURNS - 1) / (PIECES * SLICE_TURNS);
constexpr u32 SLICE_ELEMENTS = SLICE_TURNS * TURN_ELEMENTS, PIECE_ELEMENTS = SLICES * SLICE_ELEMENTS;
constexpr u32 PIECE_BYTES = SLICES * SLICE_TURNS * WARP * 16;

// Groups: a warp that fetches, then those that sum. The last warp of a block raises flags.
constexpr u32 GROUPS = 3;
constexpr u32 GROUP_WARPS = SLICES + 1, ADD_WARPS = GROUPS * GROUP_WARPS, ADD_THREADS = (ADD_WARPS + 1) * WARP;
constexpr u32 ANSWER_TURNS = (RANKS + WARP - 1) / WARP; // ranks of a lane
constexpr u32 NO_ROW = ~0u;

// What is to be done with a stage of the ring. In this order.
enum Task : u32 {
    BEGIN = 1,    // the sum begins at +0
    OUTPUT = 2,   // add an expert's output, times its weight
    ANSWER = 4,   // add an answer
    KEEP = 8,     // the sum is this rank's own answer: round it, keep it, and begin at +0
    ADD_KEPT = 16,
    STORE_ANSWER = 32,
    STORE_COMBINED = 64,
    FLAG = 128, // the answer is complete
    STOP = 256,
};

struct Stage {
    u64 to; // the row that the sum is stored to
    float weight;
    u32 task, piece, flag;
};

constexpr u32 ADD_ROOM = (227 * 1024 - 8192) / (GROUPS * PIECE_BYTES);
constexpr u32 DEPTH = ADD_ROOM > 12 ? 12 : ADD_ROOM; // stages of a ring
constexpr u32 ADD_SHARED = GROUPS * DEPTH * PIECE_BYTES;
static_assert(DEPTH >= 2, "rows are fetched while others are summed");

// What the warps of a block share.
struct AddBlock {
    FlagQueue<256> flags;
    u64 full[GROUPS][DEPTH], empty[GROUPS][DEPTH];
    Stage stages[GROUPS][DEPTH];
    u64 answers[GROUPS][WARP];
    u32 rows[RANKS], needed; // of each source; what this rank needed, if it had no room
    u32 item[GROUPS];        // each group's first ticket
    u32 lost[GROUPS];        // 1: the warp that fetches has left without STOP

    // Every thread of the block, before a barrier of it.
    WEFT_DEVICE void clear(u32 senders) {
        flags.clear(senders);
        if (threadIdx.x < GROUPS) lost[threadIdx.x] = 0;
        if (threadIdx.x >= GROUPS * DEPTH) return;
        ptx::mbarrier_init(full[0] + threadIdx.x, 1);
        ptx::mbarrier_init(empty[0] + threadIdx.x, SLICES);
        fence_shared_for_bulk();
    }
};

// The warp of a group that fetches.
struct Fetcher {
    AddBlock &block;
    u8 *ring;
    u32 group, head = 0, rounds = 0;

    WEFT_DEVICE Fetcher(AddBlock &block, u8 *shared, u32 group) : block(block), ring(shared + group * DEPTH * PIECE_BYTES), group(group) {}

    // A stage with `bytes` from `from`, or none. False if the ring does not empty.
    WEFT_DEVICE bool push(const Stage &stage, const void *from, u32 bytes) {
        if (rounds != 0 && !__all_sync(~0u, wait_phase(block.empty[group] + head, (rounds - 1) % 2))) return false;
        if (lane_of_thread() == 0) {
            block.stages[group][head] = stage;
            u64 *full = block.full[group] + head;
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

    // A piece of a row of `TYPE`.
    template <u32 TYPE> WEFT_DEVICE bool push(Stage stage, u64 row) {
        constexpr u32 BYTES = PIECE_ELEMENTS * bytes_of(TYPE), ROW = HIDDEN * bytes_of(TYPE);
        const u32 begin = stage.piece * BYTES;
        return push(stage, reinterpret_cast<const u8 *>(row) + begin, ROW - begin < BYTES ? ROW - begin : BYTES);
    }

    WEFT_DEVICE bool stop() { return push(Stage{0, 0.0f, STOP, 0, 0}, nullptr, 0); }
};

// Rows that a row is the sum of: lane i has the i-th.
struct Terms {
    u64 at = 0;
    float weight = 1.0f;
    u32 count = 0;
};

// A warp that sums slice `slice` of what its group fetches.
WEFT_DEVICE bool sum_slices(const Watch &watching, AddBlock &block, u8 *shared, u32 group, u32 slice) {
    constexpr u32 PER = WIDE ? 4 : 8; // elements of a lane at a time; of a narrower type, 8 bytes
    const u32 lane = lane_of_thread();
    const u8 *ring = shared + group * DEPTH * PIECE_BYTES;
    float sum[SLICE_TURNS][PER];
    Kept<PER> kept[SLICE_TURNS];
    for (u32 tail = 0, parity = 0;;) {
        // The warp that fetches may wait for a peer, up to the limit, and ends with STOP: so this wait is bounded.
        while (!__all_sync(~0u, wait_phase(block.full[group] + tail, parity)))
            if (__any_sync(~0u, *reinterpret_cast<volatile u32 *>(&block.lost[group]) != 0)) {
                phase_failed(watching, parity);
                return false;
            }
        const Stage stage = block.stages[group][tail];
        const u8 *data = ring + tail * PIECE_BYTES;
        if (stage.task & BEGIN) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n)
#pragma unroll
                for (u32 j = 0; j < PER; ++j) sum[n][j] = 0.0f;
        }
        if (stage.task & OUTPUT) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n) add_to<WEFT_COMBINE_TYPE, WEIGHT_AT_COMBINE>(sum[n], data, slice * SLICE_ELEMENTS + n * TURN_ELEMENTS + PER * lane, stage.weight);
        }
        if (stage.task & ANSWER) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n) add_to<WEFT_ANSWER_TYPE, false>(sum[n], data, slice * SLICE_ELEMENTS + n * TURN_ELEMENTS + PER * lane, 1.0f);
        }
        fence_shared_for_bulk();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(block.empty[group] + tail);
        if (stage.task & STOP) return true;
        tail = tail + 1 == DEPTH ? 0 : tail + 1;
        if (tail == 0) parity ^= 1;
        if (stage.task & KEEP) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n) {
                kept[n].template keep<WEFT_ANSWER_TYPE>(sum[n]);
#pragma unroll
                for (u32 j = 0; j < PER; ++j) sum[n][j] = 0.0f;
            }
        }
        if (stage.task & ADD_KEPT) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n) kept[n].template add<WEFT_ANSWER_TYPE>(sum[n]);
        }
        const u32 first = stage.piece * PIECE_ELEMENTS + slice * SLICE_ELEMENTS + PER * lane;
        u8 *to = reinterpret_cast<u8 *>(stage.to);
        __builtin_assume(__isGlobal(to)); // of this GPU or a peer
        if (stage.task & STORE_ANSWER) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n)
                if (first + n * TURN_ELEMENTS < HIDDEN) narrow<WEFT_ANSWER_TYPE>(to + (first + n * TURN_ELEMENTS) * bytes_of(WEFT_ANSWER_TYPE), sum[n]);
        }
        if (stage.task & STORE_COMBINED) {
#pragma unroll
            for (u32 n = 0; n < SLICE_TURNS; ++n)
                if (first + n * TURN_ELEMENTS < HIDDEN) narrow<WEFT_OUTPUT_TYPE>(to + (first + n * TURN_ELEMENTS) * bytes_of(WEFT_OUTPUT_TYPE), sum[n]);
        }
        if (stage.task & FLAG) {
            ptx::named_barrier(1 + group, SLICES * WARP);
            if (slice == 0) block.flags.post(lane == 0, stage.flag);
        }
    }
}

// Groups that send before they receive; the others receive from the beginning. Few blocks are bound by what they sum, many
// by the links, which then shall not lie idle while rows are received.
WEFT_DEVICE u32 sending_groups() { return gridDim.x <= 48 ? 2 : 1; }

// What warps do while the block enters. Groups up to `senders` send; `own`: answers of this rank to itself too.
WEFT_DEVICE void prepare_answers(const Arguments &a, AddBlock &block, u32 senders, bool own) {
    const Channel mine = channel(a, a.rank);
    if (lane_of_thread() == 0 && warp_of_thread() < senders) block.item[warp_of_thread()] = atomicAdd(&mine.state()->combine_ticket, 1);
    if (threadIdx.x >= 128 && threadIdx.x <= 128 + RANKS) {
        const u32 source = threadIdx.x - 128;
        const u32 value = a.release ? 0 : mine.received()[source];
        if (source < RANKS) block.rows[source] = source == a.rank && !own ? 0 : value;
        else block.needed = value;
    }
}

// This lane's expert of a received row.
WEFT_DEVICE Entry entry_of(const Arguments &a, u32 source, u32 slot) {
    return lane_of_thread() < TOP_K ? channel(a, a.rank).entries(source, slot)[lane_of_thread()] : Entry{-1, 0.0f};
}

WEFT_DEVICE Terms outputs_of(const Arguments &a, const Entry &entry) {
    const u32 count = __popc(__ballot_sync(~0u, entry.position >= 0)); // they stand in front
    return Terms{a.outputs + static_cast<u64>(entry.position) * OUTPUT_BYTES, entry.weight, count};
}

// Fetches the outputs of a row; `last` goes with the last of them, or with a stage of its own if there are none.
WEFT_DEVICE bool fetch_outputs(Fetcher &fetcher, const Terms &terms, Stage stage, u32 last) {
    if (terms.count == 0) {
        stage.task = BEGIN | last;
        return fetcher.push(stage, nullptr, 0);
    }
    for (u32 term = 0; term < terms.count; ++term) {
        stage.task = OUTPUT | (term == 0 ? BEGIN : 0) | (term + 1 == terms.count ? last : 0);
        stage.weight = __shfl_sync(~0u, terms.weight, term);
        if (!fetcher.push<WEFT_COMBINE_TYPE>(stage, __shfl_sync(~0u, terms.at, term))) return false;
    }
    return true;
}

// The send half of a group: answers by ticket. The experts of the next row come while this one is fetched.
WEFT_DEVICE bool send_answers(const Arguments &a, const Round &round, AddBlock &block, Fetcher &fetcher) {
    const u32 lane = lane_of_thread();
    u32 *ticket = &channel(a, a.rank).state()->combine_ticket;
    u32 item = block.item[fetcher.group];
    if (item == 0) { // the first ticket is for the signals, which any group can send for all
        send_signals(a, round, block.needed);
        if (lane == 0) item = atomicAdd(ticket, 1);
    }
    const auto find = [&](u32 &row, Entry &entry) {
        u32 source, slot;
        const u32 which = __shfl_sync(~0u, item, 0);
        row = locate(block.rows, which - 1, a.rank, source, slot) ? source * MAX_TOKENS + slot : NO_ROW;
        entry = Entry{-1, 0.0f};
        if (row == NO_ROW) return;
        if (lane == 0) item = atomicAdd(ticket, 1);
        entry = entry_of(a, source, slot);
    };
    u32 row, next;
    Entry entry;
    bool fine = true;
    for (find(row, entry); fine && row != NO_ROW; row = next) {
        const Terms terms = outputs_of(a, entry);
        find(next, entry);
        const u64 answer = reinterpret_cast<u64>(channel(a, row / MAX_TOKENS).answer(a.rank, row % MAX_TOKENS));
        for (u32 piece = 0; fine && piece < PIECES; ++piece)
            fine = fetch_outputs(fetcher, terms, Stage{answer, 1.0f, 0, piece, row}, STORE_ANSWER | (piece + 1 == PIECES ? FLAG : 0));
    }
    return fine;
}

// The warp that raises flags.
WEFT_DEVICE void raise_answer_flags(const Arguments &a, const Round &round, AddBlock &block) {
    block.flags.drain([&](u32 flag) { signal_released(channel(a, flag / MAX_TOKENS).answer_flag(a.rank, flag % MAX_TOKENS), round.epoch); });
}

// A rank's own sum counts as an answer does, rounded to the answers' type. It need not pass through memory where sums
// lie in lanes as answers do.
constexpr bool SUMS_OWN = per_16(WEFT_COMBINE_TYPE) == per_16(WEFT_ANSWER_TYPE);

// The answers to a token, in rank order, once they are there, without this rank's own if `own` is false; `low` of them
// are of lower ranks. False if a wait failed.
WEFT_DEVICE bool answers_to(const Arguments &a, const Round &round, const Watch &watching, const i32 (&slot)[ANSWER_TURNS], u64 *list, bool own, Terms &answers, u32 &low) {
    const Channel mine = channel(a, a.rank);
    const u32 lane = lane_of_thread();
    bool here = true;
    answers.count = low = 0;
#pragma unroll
    for (u32 n = 0; n < ANSWER_TURNS; ++n) {
        const u32 from = n * WARP + lane;
        const bool due = slot[n] >= 0 && (own || from != a.rank);
        if (due) here &= wait(watching, mine.answer_flag(from, slot[n]), round.epoch, from, slot[n]);
        const u32 has = __ballot_sync(~0u, due);
        if (due) list[answers.count + __popc(has & ((1u << lane) - 1))] = reinterpret_cast<u64>(mine.answer(from, slot[n]));
        answers.count += __popc(has);
        low += __popc(__ballot_sync(~0u, due && from < a.rank));
    }
    if (!__all_sync(~0u, here)) return false;
    __syncwarp(); // what one lane has acquired, the first fetches
    fence_global_for_bulk();
    answers.at = list[lane];
    __syncwarp();
    return true;
}

// A token whose answers are summed: where they lie, and this rank's own share of them.
struct Token {
    u32 id;
    i32 slot[ANSWER_TURNS]; // of this lane's ranks
    Entry entry;            // of this rank's experts, where their outputs are summed here

    // Combine may be told of more tokens than dispatch was, `sent`: their sums are 0.
    WEFT_DEVICE void load(const Arguments &a, u32 which, u32 tokens, u32 sent, bool own) {
        const i32 *slots = channel(a, a.rank).slots(which);
        id = which < tokens ? which : NO_ROW;
        entry = Entry{-1, 0.0f};
#pragma unroll
        for (u32 n = 0; n < ANSWER_TURNS; ++n) slot[n] = -1;
        if (id == NO_ROW || id >= sent) return;
#pragma unroll
        for (u32 n = 0; n < ANSWER_TURNS; ++n)
            if (n * WARP + lane_of_thread() < RANKS) slot[n] = slots[n * WARP + lane_of_thread()];
        const i32 mine = own ? -1 : slots[a.rank];
        if (mine >= 0) entry = entry_of(a, a.rank, mine);
    }
};

// Fetches what a token is the sum of: this rank's own answer first, which is kept, then all others in rank order.
WEFT_DEVICE bool fetch_token(Fetcher &fetcher, const Terms &outputs, const Terms &answers, u32 low, u64 to, u32 piece) {
    const Stage stage{to, 1.0f, 0, piece, 0};
    const bool has_own = outputs.count != 0;
    const u32 last = STORE_COMBINED;
    if (has_own || answers.count == 0) {
        // No answers of lower ranks: the sum goes on from +0 plus the kept one.
        const u32 then = (has_own ? KEEP : 0) | (has_own && low == 0 ? ADD_KEPT : 0) | (answers.count == 0 ? last : 0);
        if (!fetch_outputs(fetcher, outputs, stage, then)) return false;
    }
    for (u32 term = 0; term < answers.count; ++term) {
        Stage next = stage;
        next.task = ANSWER | (term == 0 && !has_own ? BEGIN : 0) | (has_own && low != 0 && term + 1 == low ? ADD_KEPT : 0) | (term + 1 == answers.count ? last : 0);
        if (!fetcher.push<WEFT_ANSWER_TYPE>(next, __shfl_sync(~0u, answers.at, term))) return false;
    }
    return true;
}

// The receive half of a group: tokens by ticket. `own`: this rank's answers to itself were sent as well. False if
// it failed.
WEFT_DEVICE bool receive_answers(const Arguments &a, const Round &round, AddBlock &block, Fetcher &fetcher, bool own) {
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
    token.load(a, __shfl_sync(~0u, item, 0), tokens, sent, own);
    take();
    bool fine = true;
    for (; fine && token.id != NO_ROW; token = next) {
        const Terms outputs = outputs_of(a, token.entry);
        next.load(a, __shfl_sync(~0u, item, 0), tokens, sent, own);
        if (next.id != NO_ROW) take();
        Terms answers;
        u32 low;
        if (!answers_to(a, round, watching, token.slot, block.answers[fetcher.group], own, answers, low)) return false;
        const u64 to = a.combined + static_cast<u64>(token.id) * COMBINED_BYTES;
        for (u32 piece = 0; fine && piece < PIECES; ++piece) fine = fetch_token(fetcher, outputs, answers, low, to, piece);
    }
    return fine;
}

// A warp of a launch in which groups up to `senders` send, and all receive if `receives`. False if it failed.
WEFT_DEVICE bool combine_rows(const Arguments &a, const Round &round, AddBlock &block, u8 *shared, u32 senders, bool receives, bool own) {
    const u32 warp = warp_of_thread();
    if (warp == ADD_WARPS) {
        raise_answer_flags(a, round, block);
        return true;
    }
    if (warp >= GROUPS) {
        const u32 group = (warp - GROUPS) / SLICES, slice = (warp - GROUPS) % SLICES;
        const bool fine = sum_slices(watch(a, senders != 0 ? COMBINE_SEND : COMBINE_RECV), block, shared, group, slice);
        if (slice == 0 && group < senders) block.flags.close();
        return fine;
    }
    Fetcher fetcher(block, shared, warp);
    bool fine = true;
    if (warp < senders) fine = send_answers(a, round, block, fetcher);
    if (fine && receives) fine = receive_answers(a, round, block, fetcher, own);
    const bool stopped = fetcher.stop();
    if (!stopped) {
        phase_failed(watch(a, senders != 0 ? COMBINE_SEND : COMBINE_RECV), 0);
        *reinterpret_cast<volatile u32 *>(&block.lost[warp]) = 1;
    }
    return stopped && fine;
}

} // namespace weft::moe::bandwidth
