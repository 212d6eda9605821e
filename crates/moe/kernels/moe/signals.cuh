// Combine signals: in each round, one packet from each rank to each rank, with or without rows. The signal releases
// the receiver's rows in this round, which the sender has read; the status announces whether replies follow.
//
// A rank has read the rows when dispatch_recv has read the metadata and, if rows stay in place, the experts have
// read the tokens, in kernels before this one on the stream. So a source may write rows again once it has all
// ranks' signals. The reply slots are free by then, too: a rank writes them only after it has received the next
// round's counts, which are sent after this round has ended.
#pragma once
#include "moe/launch.cuh"

namespace weft::moe {

// Signal status. A greater value is the room that the sender needed.
enum Status : u32 { REPLIES = 0, RELEASED_ROWS = 1 };

// Outcome over all ranks' signals.
enum class Outcome { SUM, SPOILT, FAILED };

// Room for a rank's rows, or for each expert's.
constexpr u32 ROOM = LAYOUT == PADDED ? EXPERT_CAPACITY : POSITIONS;

// Room that this rank lacks, for received rows or in the outputs passed to combine; 0 if none. If it lacks
// room, it sends no replies.
WEFT_DEVICE u32 lacking(const Arguments &a) {
    if (a.release) return 0;
    const i32 *received = channel(a, a.rank).received();
    const u32 needed = received[NEEDED], used = received[USED];
    return needed != 0 ? needed : used > a.positions ? used : 0;
}

// Sends this rank's signals to all ranks. One warp in the launch.
WEFT_DEVICE void send_signals(const Arguments &a, const Round &round, u32 needed) {
    // Dispatch has recorded that this rank lacks room.
    if (needed != 0 && channel(a, a.rank).received()[NEEDED] == 0 && lane_of_thread() == 0)
        watch(a, COMBINE_SEND).notice(CAPACITY, a.rank, 0, needed, a.positions);
    const u32 status = a.release ? RELEASED_ROWS : needed != 0 ? needed : REPLIES;
    for (u32 to = lane_of_thread(); to < RANKS; to += WARP)
        ptx::store_release_sys(channel(a, to).signals() + a.rank, packet(round.epoch, status));
}

// Waits for all ranks' signals. Each warp polls separately, without a barrier. The launch's first warp writes the
// notices for the host (`notifies`).
WEFT_DEVICE Outcome receive_signals(const Arguments &a, const Round &round, const Watch &watching, bool notifies) {
    bool here = true;
    u32 needed = 0;
    for (u32 from = lane_of_thread(); from < RANKS; from += WARP) {
        u32 status = REPLIES;
        here = here && wait_packet(watching, channel(a, a.rank).signals() + from, round.epoch, from, 0, status);
        if (!here || a.release || status == REPLIES) continue;
        if (status == RELEASED_ROWS) {
            watching.fail(RELEASED, from, 0, REPLIES, RELEASED_ROWS);
            here = false;
        } else {
            needed = status;
            if (notifies && from != a.rank) watching.notice(CAPACITY, from, 0, status, ROOM);
        }
    }
    if (__any_sync(~0u, !here)) return Outcome::FAILED;
    __syncwarp(); // all lanes read the data that one lane has acquired
    return __any_sync(~0u, needed != 0) ? Outcome::SPOILT : Outcome::SUM;
}

// Fills this round's result with NaN, because a rank lacked room. By `threads` threads in the launch.
WEFT_DEVICE void spoil_combined(const Arguments &a, u32 thread, u32 threads) {
    const u64 bytes = static_cast<u64>(a.given) * COMBINED_BYTES;
    for (u64 at = 16ull * thread; at < bytes; at += 16ull * threads)
        ptx::store_stream(reinterpret_cast<u8 *>(a.combined) + at, make_uint4(~0u, ~0u, ~0u, ~0u));
}

WEFT_DEVICE void poison_combine(const Arguments &a) {
    if (!a.release) poison(a.combined, static_cast<u64>(a.given) * COMBINED_BYTES);
}

} // namespace weft::moe
