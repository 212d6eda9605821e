// Agreed shape as constants, with offsets for all areas. `weft_moe::device::DeviceShape` computes the offsets and
// passes them as macros, so each shape is compiled separately.
#pragma once
#include "moe/arguments.cuh"
#include "weft/device.cuh"

// Some shapes have no scales, no lines or one rank: the loops over them are empty.
#pragma nv_diag_suppress 186

namespace weft::moe {

// Tokens name NAMED experts. Each has one or more physical replicas: EXPERTS in all, numbered rank by rank.
constexpr u32 NAMED = WEFT_NAMED_EXPERTS, EXPERTS = WEFT_EXPERTS, LOCAL = WEFT_LOCAL_EXPERTS, TOP_K = WEFT_TOP_K;
constexpr u32 HIDDEN = WEFT_HIDDEN, MAX_TOKENS = WEFT_MAX_TOKENS, CHUNK = WEFT_CHUNK;
constexpr u32 POSITIONS = WEFT_POSITIONS, PAD_TO = WEFT_PAD_TO, EXPERT_CAPACITY = WEFT_EXPERT_CAPACITY;
constexpr u32 SCALES = WEFT_SCALES, SCALE_BLOCK = WEFT_SCALE_BLOCK;
constexpr u32 ROW_BYTES = WEFT_ROW_BYTES, REPLY_BYTES = WEFT_REPLY_BYTES;
constexpr u64 ROW_STRIDE = WEFT_ROW_STRIDE, REPLY_STRIDE = WEFT_REPLY_STRIDE;
constexpr bool CAST = WEFT_CAST, WEIGHT_AT_COMBINE = WEFT_WEIGHT_AT_COMBINE;

enum Type : u32 { F32 = 0, BF16 = 1, F16 = 2, E4M3 = 3, E5M2 = 4 };
constexpr u32 bytes_of(u32 type) { return type == F32 ? 4 : type == BF16 || type == F16 ? 2 : 1; }
enum Scale : u32 { NO_SCALE = 0, SCALE_F32 = 1, SCALE_E8M0 = 2 };
constexpr u32 SCALE_BYTES = WEFT_SCALE_TYPE == SCALE_F32 ? 4 : WEFT_SCALE_TYPE == SCALE_E8M0 ? 1 : 0;
enum ScaleLayout : u32 { ROW = 0, COLUMN = 1, COLUMN_PACKED = 2 };
constexpr u32 SCALE_LAYOUT = WEFT_SCALE_LAYOUT;
enum Layout : u32 { CONTIGUOUS = 0, INDEXED = 1, PADDED = 2, DENSE = 3 };
constexpr u32 LAYOUT = WEFT_LAYOUT;
// Received scales: one scale or a packed word with four per element; columns are aligned to 16 bytes, one set per
// group.
constexpr u32 PLACED_BYTES = SCALE_LAYOUT == COLUMN_PACKED ? 4 : SCALE_BYTES;
constexpr u32 PLACED_COLUMNS = SCALE_LAYOUT == COLUMN_PACKED ? (SCALES + 3) / 4 : SCALES;
constexpr u32 PLACED_ROWS = LAYOUT == PADDED && SCALE_LAYOUT != ROW ? EXPERT_CAPACITY : POSITIONS;
constexpr u32 PLACED_GROUPS = LAYOUT == PADDED && SCALE_LAYOUT != ROW ? LOCAL : 1;
constexpr u64 COLUMN_BYTES = (static_cast<u64>(PLACED_ROWS) * PLACED_BYTES + 15) / 16 * 16;
constexpr u64 PLACED_SCALES = SCALE_LAYOUT == ROW ? static_cast<u64>(POSITIONS) * SCALES * SCALE_BYTES : PLACED_GROUPS * PLACED_COLUMNS * COLUMN_BYTES;
enum Path : u32 { PACKETS = 0, LATENCY = 1, BANDWIDTH = 2 };
constexpr u32 PATH = WEFT_PATH;

constexpr u32 TOKEN_BYTES = HIDDEN * bytes_of(WEFT_TOKEN_TYPE); // input token size
constexpr u32 WIRE_BYTES = HIDDEN * bytes_of(WEFT_WIRE_TYPE);   // token size on the wire
constexpr u32 OUTPUT_BYTES = HIDDEN * bytes_of(WEFT_COMBINE_TYPE);
constexpr u32 COMBINED_BYTES = HIDDEN * bytes_of(WEFT_OUTPUT_TYPE);
constexpr u16 NO_EXPERT = 0xFFFF;

#if WEFT_ID_BYTES == 8
typedef i64 Id;
#else
typedef i32 Id;
#endif

// A named expert's replicas are used round robin: see `replica`. Without maps the physical expert has the same number
// as the named one.
constexpr bool MAPPED = WEFT_MAPPED;
constexpr u32 TURNS = WEFT_TURNS;
constexpr u32 ROWS_BITS = WEFT_ROWS_BITS; // row count width on the wire; the bits above hold the map generation

static_assert(WIRE_BYTES % 16 == 0 && OUTPUT_BYTES % 16 == 0 && REPLY_BYTES % 16 == 0, "rows are copied by 16 bytes");
static_assert(LAYOUT != DENSE || !WEIGHT_AT_COMBINE, "a dense row of outputs has its weights applied");
static_assert(TOP_K <= 32 && RANKS <= 64 && EXPERTS < 0x2000 && MAX_TOKENS <= 0x10000, "limits of a row's metadata");

enum Phase : u32 { DISPATCH_SEND = 0, DISPATCH_RECV = 1, COMBINE_SEND = 2, COMBINE_RECV = 3, PLAN = 4 };

// Channel state words, shared by the kernels on a rank.
struct State {
    // Exit counts by phase, in shares (see `share`), since the channel was created. The host reads them in `set_maps.rs`.
    u64 left[4];
    // Work tickets for the send halves; the operation that follows resets them to 0.
    u32 send_ticket, combine_ticket;
    u32 first_epoch; // offset for all epochs; nonzero only in wrap-around tests
    u32 reserved;
    u32 closed; // at byte 48 (StateWord::Closed): nonzero after a close, so that a replayed graph's kernels return at once
    u32 receive_ticket, add_ticket; // work tickets for the receive halves
    u32 sent; // tokens in this round's dispatch; combine may be passed another number
    alignas(128) u64 entered[4]; // entry counts by phase, in shares
};
static_assert(sizeof(State) <= 256, "the area of a channel's state");

// A phase's launch consists of SHARES shares, split evenly among the blocks. Rounds are counted in shares, so
// consecutive launches may have different grid sizes.
constexpr u32 SHARES = 1 << 16;
constexpr u32 share(u32 block, u32 blocks) { return SHARES / blocks + (block < SHARES % blocks ? 1 : 0); }

// A round's epoch. Epochs wrap around and skip 0, the memory content before the first round.
WEFT_DEVICE u32 epoch_of(u32 first_epoch, u64 rounds) {
    const u32 epoch = first_epoch + static_cast<u32>(rounds) + 1;
    return epoch == 0 ? 1u << 31 : epoch;
}

// A received row's expert: position and weight.
struct Entry {
    i32 position; // -1: end of the list
    float weight;
};

// A row's expert in wire format.
struct Choice {
    u16 expert, index; // index: how many earlier tokens from this source name the expert
    float weight;
};

// A rank's first physical expert (for RANKS: the expert count), and the rank that owns an expert.
#ifdef WEFT_FIRST_EXPERTS
__constant__ u32 FIRST_EXPERTS[RANKS + 1] = {WEFT_FIRST_EXPERTS};
WEFT_DEVICE u32 first_expert(u32 rank) { return FIRST_EXPERTS[rank]; }
WEFT_DEVICE u32 owner(u32 expert) {
    u32 rank = 0;
#pragma unroll 8
    for (u32 r = 1; r < RANKS; ++r) rank += FIRST_EXPERTS[r] <= expert;
    return rank;
}
#else
WEFT_DEVICE u32 first_expert(u32 rank) { return static_cast<u32>(static_cast<u64>(rank) * EXPERTS / RANKS); }
WEFT_DEVICE u32 owner(u32 expert) { return static_cast<u32>(((static_cast<u64>(expert) + 1) * RANKS - 1) / EXPERTS); }
#endif

// Plan words after the sources' row counts: see PlanWord in Rust.
enum PlanWord : u32 { NEEDED = RANKS, SENT, KEY, USED };

// Channel in a rank's heap, as mapped on this rank.
struct Channel {
    u8 *base;
    u8 *plan; // this rank's plan: base for slots, received and entries

    WEFT_DEVICE u64 *counts(u32 source) const { return reinterpret_cast<u64 *>(base + WEFT_COUNTS_AT) + source * (LOCAL + 1); }
    WEFT_DEVICE u64 *signals() const { return reinterpret_cast<u64 *>(base + WEFT_SIGNALS_AT); }
    WEFT_DEVICE u32 *row_flag(u32 source, u32 slot) const { return reinterpret_cast<u32 *>(base + WEFT_ROW_FLAGS_AT) + source * MAX_TOKENS + slot; }
    WEFT_DEVICE u8 *row(u32 source, u32 slot) const { return base + WEFT_ROWS_AT + (static_cast<u64>(source) * MAX_TOKENS + slot) * ROW_STRIDE; }
    WEFT_DEVICE u32 *reply_flag(u32 from, u32 slot) const { return reinterpret_cast<u32 *>(base + WEFT_REPLY_FLAGS_AT) + from * MAX_TOKENS + slot; }
    WEFT_DEVICE u8 *reply(u32 from, u32 slot) const { return base + WEFT_REPLIES_AT + (static_cast<u64>(from) * MAX_TOKENS + slot) * REPLY_STRIDE; }
    WEFT_DEVICE State *state() const { return reinterpret_cast<State *>(base + WEFT_STATE_AT); }
    WEFT_DEVICE i32 *slots(u32 token) const { return reinterpret_cast<i32 *>(plan + WEFT_SLOTS_AT) + token * RANKS; }
    WEFT_DEVICE i32 *ids(u32 token) const { return reinterpret_cast<i32 *>(base + WEFT_IDS_AT) + token * TOP_K; }
    WEFT_DEVICE i32 *index(u32 token) const { return reinterpret_cast<i32 *>(base + WEFT_INDEX_AT) + token * TOP_K; }
    WEFT_DEVICE u32 *histogram(u32 chunk) const { return reinterpret_cast<u32 *>(base + WEFT_HISTOGRAM_AT) + chunk * (EXPERTS + RANKS); }
    WEFT_DEVICE i32 *received() const { return reinterpret_cast<i32 *>(plan + WEFT_RECEIVED_AT); }
    WEFT_DEVICE Entry *entries(u32 source, u32 slot) const { return reinterpret_cast<Entry *>(plan + WEFT_ENTRIES_AT) + (static_cast<u64>(source) * MAX_TOKENS + slot) * TOP_K; }
};

WEFT_DEVICE Channel channel(const Arguments &a, u32 rank) {
    u8 *base = reinterpret_cast<u8 *>(a.peer[rank]) + static_cast<u64>(a.channel) * WEFT_CHANNEL_BYTES;
    return Channel{base, a.plan == 0 ? base : reinterpret_cast<u8 *>(a.plan - WEFT_SLOTS_AT)};
}

WEFT_DEVICE Watch watch(const Arguments &a, u32 phase) {
    return Watch{reinterpret_cast<Table *>(a.table), reinterpret_cast<Record *>(a.record),
                 reinterpret_cast<const u32 *>(a.abort), a.rank, a.channel, phase};
}

// Valid token count: the device's count, at most the array rows.
WEFT_DEVICE u32 token_count(const Arguments &a) {
    if (a.count == 0) return a.given;
    const i32 count = *reinterpret_cast<const i32 *>(a.count);
    return count < 0 ? 0 : min(static_cast<u32>(count), a.given);
}

// A layer's replica table, laid out as in `crates/moe/src/device/shape/replica_table.rs`.
struct Map {
    u32 generation, reserved[3];
    u16 turns[NAMED][TURNS]; // physical experts

    WEFT_DEVICE static const Map &of(const Arguments &a) { return *reinterpret_cast<const Map *>(a.map); }
};
static_assert(sizeof(Map) >= 16 + 2 * NAMED * TURNS, "as it is declared in Rust");

// Physical expert for a named expert and a token: round robin over the replicas by token number, offset by rank.
WEFT_DEVICE u16 replica(const Arguments &a, u16 expert, u32 token) {
    return Map::of(a).turns[expert][(token + a.rank) % TURNS];
}

// Row count in wire format, with the generation of the replica table that selected the rows.
WEFT_DEVICE u32 with_generation(const Arguments &a, u32 rows) {
    if constexpr (!MAPPED) return rows;
    else return rows | Map::of(a).generation << ROWS_BITS;
}

// How many tokens dispatch sends: the valid ones, or as many as in the kept plan.
WEFT_DEVICE u32 sent_count(const Arguments &a) {
    return a.kept ? min(static_cast<u32>(channel(a, a.rank).received()[SENT]), a.given) : token_count(a);
}

// A token's validated physical experts; `tokens` exist. NO_EXPERT: the id is negative, out of range or repeated; the
// last two leave an ExpertError notice.
WEFT_DEVICE void clean_ids(const Arguments &a, const Watch &watch, u32 token, u32 tokens, u16 (&ids)[TOP_K]) {
#pragma unroll
    for (u32 k = 0; k < TOP_K; ++k) {
        const i64 id = reinterpret_cast<const Id *>(a.ids)[token * TOP_K + k];
        bool wrong = id >= NAMED;
        u16 clean = id < 0 || wrong ? NO_EXPERT : static_cast<u16>(id);
#pragma unroll
        for (u32 earlier = 0; earlier < k; ++earlier) wrong |= clean != NO_EXPERT && ids[earlier] == clean;
        ids[k] = wrong ? NO_EXPERT : clean;
        if (wrong && token < tokens) watch.notice(EXPERT, a.rank, token, NAMED, static_cast<u64>(id));
    }
    if constexpr (MAPPED) {
#pragma unroll
        for (u32 k = 0; k < TOP_K; ++k)
            if (ids[k] != NO_EXPERT) ids[k] = replica(a, ids[k], token);
    }
}

WEFT_DEVICE float weight_of(const Arguments &a, u32 token, u32 k) {
    return a.weights == 0 ? 1.0f : reinterpret_cast<const float *>(a.weights)[token * TOP_K + k];
}

} // namespace weft::moe
