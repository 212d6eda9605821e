// Rows that still need replies from this rank, and the expert outputs for each.
#pragma once
#include "moe/signals.cuh"

namespace weft::moe {

struct Owed {
    u32 rows[RANKS];   // from each source
    u32 before[RANKS]; // rows from lower sources: start of the source's outputs in the dense layout
    u32 needed;        // room that this rank lacked; 0 if none

    // Called by threads 0 to RANKS. `own`: includes this rank's rows to itself.
    WEFT_DEVICE void load(const Arguments &a, u32 thread, bool own) {
        const i32 *received = channel(a, a.rank).received();
        const u32 lacks = lacking(a);
        if (thread == RANKS) {
            needed = lacks;
            return;
        }
        rows[thread] = a.release || lacks != 0 || (thread == a.rank && !own) ? 0 : received[thread];
        if constexpr (LAYOUT == DENSE) {
            u32 lower = 0;
            for (u32 s = 0; s < thread; ++s) lower += received[s];
            before[thread] = lower;
        }
    }

    // This lane's expert in a row. In the dense layout a row has one output, already summed over experts.
    WEFT_DEVICE Entry entry_of(const Arguments &a, u32 source, u32 slot) const {
        const u32 lane = lane_of_thread();
        if constexpr (LAYOUT == DENSE) return Entry{lane == 0 ? static_cast<i32>(before[source] + slot) : -1, 1.0f};
        return lane < TOP_K ? channel(a, a.rank).entries(source, slot)[lane] : Entry{-1, 0.0f};
    }
};

} // namespace weft::moe
