// Put: copy to a peer by a thread team, optionally followed by a flag.
#pragma once
#include "weft/team.cuh"
#include "weft/order.cuh"

namespace weft {

// Copies `bytes` to a peer; size and addresses are multiples of 16. Relaxed: put_signal releases.
WEFT_DEVICE void put(const Team &team, void *to, const void *from, u64 bytes) {
    for (u64 at = 16ull * team.thread; at < bytes; at += 16ull * team.threads)
        ptx::store_stream(static_cast<u8 *>(to) + at, ptx::load_stream(static_cast<const u8 *>(from) + at));
}

// put, and then signal. Release: a thread that has waited for `epoch` observes the bytes.
WEFT_DEVICE void put_signal(const Team &team, void *to, const void *from, u64 bytes, u32 *word, u32 epoch) {
    put(team, to, from, bytes);
    team.sync();
    if (team.thread == 0) signal(word, epoch);
}

} // namespace weft
