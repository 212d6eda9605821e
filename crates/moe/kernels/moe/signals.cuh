// Combine signals: one packet from each rank to each rank, rows or not. Its rows of this round have been read; the
// status holds whether answers follow.
//
// That a rank has read the rows means: their metadata in dispatch_recv, and, where rows stay in place, their tokens by
// the experts, whose kernels ran before this one on the stream. So the other may write rows again
// once it has the signals of all. Its places for answers are free by then, too: they are written
// only by a rank that has received the counts of the next round, which are sent after this is over.
#pragma once
#include "moe/launch.cuh"

namespace weft::moe {

// What a signal holds. Any greater number is how much room a rank would have needed.
enum Status : u32 { ANSWERS = 0, RELEASED_ROWS = 1 };

// What a receiver has to do after the signals of all.
enum class Outcome { SUM, SPOILT, FAILED };

// How much room there is for the rows of a rank, or of each expert.
constexpr u32 ROOM = LAYOUT == PADDED ? EXPERT_CAPACITY : POSITIONS;

// One warp, for all.
WEFT_DEVICE void send_signals(const Arguments &a, const Round &round, u32 needed) {
    const u32 status = a.release ? RELEASED_ROWS : needed != 0 ? needed : ANSWERS;
    for (u32 to = lane_of_thread(); to < RANKS; to += WARP)
        ptx::store_release_sys(channel(a, to).signals() + a.rank, packet(round.epoch, status));
}

// Each warp waits by itself, so that no warp waits for another. The first of the launch tells the host.
WEFT_DEVICE Outcome receive_signals(const Arguments &a, const Round &round, const Watch &watching, bool tells) {
    bool here = true;
    u32 needed = 0;
    for (u32 from = lane_of_thread(); from < RANKS; from += WARP) {
        u32 status = ANSWERS;
        here = here && wait_packet(watching, channel(a, a.rank).signals() + from, round.epoch, from, 0, status);
        if (!here || a.release || status == ANSWERS) continue;
        if (status == RELEASED_ROWS) {
            watching.fail(RELEASED, from, 0, ANSWERS, RELEASED_ROWS);
            here = false;
        } else {
            needed = status;
            if (tells && from != a.rank) watching.notice(CAPACITY, from, 0, status, ROOM);
        }
    }
    if (__any_sync(~0u, !here)) return Outcome::FAILED;
    __syncwarp(); // what one lane has acquired, all read
    return __any_sync(~0u, needed != 0) ? Outcome::SPOILT : Outcome::SUM;
}

// A rank had no room: this round's result is no number. By `threads` threads of the launch.
WEFT_DEVICE void spoil_combined(const Arguments &a, u32 thread, u32 threads) {
    const u64 bytes = static_cast<u64>(a.given) * COMBINED_BYTES;
    for (u64 at = 16ull * thread; at < bytes; at += 16ull * threads)
        ptx::store_stream(reinterpret_cast<u8 *>(a.combined) + at, make_uint4(~0u, ~0u, ~0u, ~0u));
}

WEFT_DEVICE void poison_combine(const Arguments &a) {
    if (!a.release) poison(a.combined, static_cast<u64>(a.given) * COMBINED_BYTES);
}

} // namespace weft::moe
