// Device-side barrier across all ranks.
#pragma once
#include "weft/team.cuh"
#include "weft/wait.cuh"

namespace weft {

// Returns once all ranks have entered; rank r raises `words[r]`. Releases the team's earlier stores, acquires
// the other teams' stores. One team per rank calls it, with epochs 1, 2, 3, ...: a rank may be one barrier
// ahead of another, so each word must be at least the epoch.
WEFT_DEVICE bool barrier(const Watch &watch, const Team &team, u32 *const *peer_words, u32 ranks, u32 epoch) {
    bool all = true;
    team.sync();
    for (u32 r = team.thread; r < ranks; r += team.threads) signal(peer_words[r] + watch.rank, epoch);
    for (u32 r = team.thread; r < ranks; r += team.threads)
        all &= wait_at_least(watch, peer_words[watch.rank] + r, epoch, r, 0);
    return team.all(all);
}

} // namespace weft
