// What the ranks agreed on, as constants, and where everything lies. The offsets are computed by
// `weft_moe::device::DeviceShape` and come as macros, so each shape is compiled for itself.
#pragma once
#include "moe/arguments.cuh"
#include "weft/device.cuh"

// Some shapes have no scales, no lines, one rank: their loops are empty, and compared with nothing.
#pragma nv_diag_suppress 186

namespace weft::moe {

constexpr u32 EXPERTS = WEFT_EXPERTS, LOCAL = WEFT_LOCAL_EXPERTS, TOP_K = WEFT_TOP_K;
constexpr u32 HIDDEN = WEFT_HIDDEN, MAX_TOKENS = WEFT_MAX_TOKENS, CHUNK = WEFT_CHUNK;
constexpr u32 POSITIONS = WEFT_POSITIONS, PAD_TO = WEFT_PAD_TO, EXPERT_CAPACITY = WEFT_EXPERT_CAPACITY;
constexpr u32 SCALES = WEFT_SCALES, SCALE_BLOCK = WEFT_SCALE_BLOCK;
constexpr u32 ROW_BYTES = WEFT_ROW_BYTES, ANSWER_BYTES = WEFT_ANSWER_BYTES;
constexpr u64 ROW_STRIDE = WEFT_ROW_STRIDE, ANSWER_STRIDE = WEFT_ANSWER_STRIDE;
constexpr bool CAST = WEFT_CAST, WEIGHT_AT_COMBINE = WEFT_WEIGHT_AT_COMBINE;

enum Type : u32 { F32 = 0, BF16 = 1, F16 = 2, E4M3 = 3, E5M2 = 4 };
constexpr u32 bytes_of(u32 type) { return type == F32 ? 4 : type == BF16 || type == F16 ? 2 : 1; }
enum Scale : u32 { NO_SCALE = 0, SCALE_F32 = 1, SCALE_E8M0 = 2 };
constexpr u32 SCALE_BYTES = WEFT_SCALE_TYPE == SCALE_F32 ? 4 : WEFT_SCALE_TYPE == SCALE_E8M0 ? 1 : 0;
enum Layout : u32 { CONTIGUOUS = 0, INDEXED = 1, PADDED = 2 };
constexpr u32 LAYOUT = WEFT_LAYOUT;
enum Path : u32 { PACKETS = 0, LATENCY = 1, BANDWIDTH = 2 };
constexpr u32 PATH = WEFT_PATH;

constexpr u32 TOKEN_BYTES = HIDDEN * bytes_of(WEFT_TOKEN_TYPE); // as given
constexpr u32 WIRE_BYTES = HIDDEN * bytes_of(WEFT_WIRE_TYPE);   // as sent
constexpr u32 OUTPUT_BYTES = HIDDEN * bytes_of(WEFT_COMBINE_TYPE);
constexpr u32 COMBINED_BYTES = HIDDEN * bytes_of(WEFT_OUTPUT_TYPE);
constexpr u16 NO_EXPERT = 0xFFFF;

static_assert(WIRE_BYTES % 16 == 0 && OUTPUT_BYTES % 16 == 0 && ANSWER_BYTES % 16 == 0, "rows are copied by 16 bytes");
static_assert(TOP_K <= 32 && RANKS <= 64 && EXPERTS < 0x2000 && MAX_TOKENS <= 0x10000, "what a row's metadata can say");

enum Phase : u32 { DISPATCH_SEND = 0, DISPATCH_RECV = 1, COMBINE_SEND = 2, COMBINE_RECV = 3, PLAN = 4 };

// The words of a channel that its own kernels share.
struct State {
    u64 left[4]; // shares of blocks that have ended, by phase, since the channel was made: see `share`
    // The next piece of work of senders; the operation that comes after puts it back to 0.
    u32 send_ticket, combine_ticket;
    u32 first_epoch; // of round 0; above 0 only where wrap-around is tested
    u32 reserved;
    u32 closed; // at byte 48 (StateWord::Closed): not 0 once the all-to-all was closed, so that a graph that is replayed does nothing
    u32 receive_ticket, add_ticket; // the same of receivers
    u32 sent; // tokens of this round's dispatch; combine may be told another number
    alignas(128) u64 entered[4]; // shares of blocks that have begun, by phase
};
static_assert(sizeof(State) <= 256, "the area of a channel's state");

// A launch of a phase consists of SHARES shares, split among its blocks as evenly as may be, whatever their number:
// so rounds are counted in shares, and launches of different sizes may follow each other.
constexpr u32 SHARES = 1 << 16;
constexpr u32 share(u32 block, u32 blocks) { return SHARES / blocks + (block < SHARES % blocks ? 1 : 0); }

// The epoch of a round. Epochs wrap around; 0 is none, as memory holds it before the first round.
WEFT_DEVICE u32 epoch_of(u32 first_epoch, u64 rounds) {
    const u32 epoch = first_epoch + static_cast<u32>(rounds) + 1;
    return epoch == 0 ? 1u << 31 : epoch;
}

// One expert of a received row.
struct Entry {
    i32 position; // -1: no more
    float weight;
};

// One expert of a row as it travels.
struct Choice {
    u16 expert, index; // index: how many earlier tokens of this source name the expert
    float weight;
};

// The first expert of a rank; of RANKS, the number of experts.
WEFT_DEVICE u32 first_expert(u32 rank) { return static_cast<u32>(static_cast<u64>(rank) * EXPERTS / RANKS); }
WEFT_DEVICE u32 owner(u32 expert) { return static_cast<u32>(((static_cast<u64>(expert) + 1) * RANKS - 1) / EXPERTS); }

// A channel of some rank's heap, as mapped here.
struct Channel {
    u8 *base;

    WEFT_DEVICE u64 *counts(u32 source) const { return reinterpret_cast<u64 *>(base + WEFT_COUNTS_AT) + source * (LOCAL + 1); }
    WEFT_DEVICE u64 *signals() const { return reinterpret_cast<u64 *>(base + WEFT_SIGNALS_AT); }
    WEFT_DEVICE u32 *row_flag(u32 source, u32 slot) const { return reinterpret_cast<u32 *>(base + WEFT_ROW_FLAGS_AT) + source * MAX_TOKENS + slot; }
    WEFT_DEVICE u8 *row(u32 source, u32 slot) const { return base + WEFT_ROWS_AT + (static_cast<u64>(source) * MAX_TOKENS + slot) * ROW_STRIDE; }
    WEFT_DEVICE u32 *answer_flag(u32 from, u32 slot) const { return reinterpret_cast<u32 *>(base + WEFT_ANSWER_FLAGS_AT) + from * MAX_TOKENS + slot; }
    WEFT_DEVICE u8 *answer(u32 from, u32 slot) const { return base + WEFT_ANSWERS_AT + (static_cast<u64>(from) * MAX_TOKENS + slot) * ANSWER_STRIDE; }
    WEFT_DEVICE State *state() const { return reinterpret_cast<State *>(base + WEFT_STATE_AT); }
    WEFT_DEVICE i32 *slots(u32 token) const { return reinterpret_cast<i32 *>(base + WEFT_SLOTS_AT) + token * RANKS; }
    WEFT_DEVICE i32 *ids(u32 token) const { return reinterpret_cast<i32 *>(base + WEFT_IDS_AT) + token * TOP_K; }
    WEFT_DEVICE i32 *index(u32 token) const { return reinterpret_cast<i32 *>(base + WEFT_INDEX_AT) + token * TOP_K; }
    WEFT_DEVICE u32 *histogram(u32 chunk) const { return reinterpret_cast<u32 *>(base + WEFT_HISTOGRAM_AT) + chunk * (EXPERTS + RANKS); }
    WEFT_DEVICE i32 *received() const { return reinterpret_cast<i32 *>(base + WEFT_RECEIVED_AT); }
    WEFT_DEVICE Entry *entries(u32 source, u32 slot) const { return reinterpret_cast<Entry *>(base + WEFT_ENTRIES_AT) + (static_cast<u64>(source) * MAX_TOKENS + slot) * TOP_K; }
};

WEFT_DEVICE Channel channel(const Arguments &a, u32 rank) {
    return Channel{reinterpret_cast<u8 *>(a.peer[rank]) + static_cast<u64>(a.channel) * WEFT_CHANNEL_BYTES};
}

WEFT_DEVICE Watch watch(const Arguments &a, u32 phase) {
    return Watch{reinterpret_cast<Table *>(a.table), reinterpret_cast<Record *>(a.record),
                 reinterpret_cast<const u32 *>(a.abort), a.rank, a.channel, phase};
}

// The tokens that exist: what the device says, but not more than there are rows.
WEFT_DEVICE u32 token_count(const Arguments &a) {
    if (a.count == 0) return a.given;
    const i32 said = *reinterpret_cast<const i32 *>(a.count);
    return said < 0 ? 0 : min(static_cast<u32>(said), a.given);
}

// Validated expert ids of a token, of `tokens` that exist. NO_EXPERT: negative, out of range or repeated; the last two
// leave an ExpertError notice.
WEFT_DEVICE void clean_ids(const Arguments &a, const Watch &watch, u32 token, u32 tokens, u16 (&ids)[TOP_K]) {
#pragma unroll
    for (u32 k = 0; k < TOP_K; ++k) {
#if WEFT_ID_BYTES == 8
        const i64 id = reinterpret_cast<const i64 *>(a.ids)[token * TOP_K + k];
#else
        const i64 id = reinterpret_cast<const i32 *>(a.ids)[token * TOP_K + k];
#endif
        bool wrong = id >= EXPERTS;
        u16 clean = id < 0 || wrong ? NO_EXPERT : static_cast<u16>(id);
#pragma unroll
        for (u32 earlier = 0; earlier < k; ++earlier) wrong |= clean != NO_EXPERT && ids[earlier] == clean;
        ids[k] = wrong ? NO_EXPERT : clean;
        if (wrong && token < tokens) watch.notice(EXPERT, a.rank, token, EXPERTS, static_cast<u64>(id));
    }
}

WEFT_DEVICE float weight_of(const Arguments &a, u32 token, u32 k) {
    return a.weights == 0 ? 1.0f : reinterpret_cast<const float *>(a.weights)[token * TOP_K + k];
}

} // namespace weft::moe
