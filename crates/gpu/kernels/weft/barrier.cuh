// Barrier of all ranks.
#pragma once
#include "weft/team.cuh"
#include "weft/wait.cuh"

namespace weft {

// All ranks have come before any leaves: `words[r]` here is raised by rank r. Releases what the team
// stored before it, acquires what the others' teams did. One team of each rank calls it, with epochs that count
// up by one from 1: a rank may be one barrier ahead of another, so a word is waited for with "at least".
WEFT_DEVICE bool barrier(const Watch &watch, const Team &team, u32 *const *peer_words, u32 ranks, u32 epoch) {
    bool all = true;
    team.sync();
    for (u32 r = team.thread; r < ranks; r += team.threads) signal(peer_words[r] + watch.rank, epoch);
    for (u32 r = team.thread; r < ranks; r += team.threads)
        all &= wait_at_least(watch, peer_words[watch.rank] + r, epoch, r, 0);
    return team.all(all);
}

} // namespace weft
