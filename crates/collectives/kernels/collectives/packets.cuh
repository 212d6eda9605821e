// Packet calls: a 16-byte unit travels as two packets of two words, each word with the epoch, so that the data is its
// own flag and no fence is needed.
//
// In every call, each rank pair exchanges at least one unit in both directions (a credit if a message has no bytes),
// and waits for it. So a rank that begins its second call after this one has received data from a peer's call in
// between, and that peer has left this one: two memory halves alternate.
#pragma once
#include "collectives/channel.cuh"

namespace weft::collectives {

// Memory order: relaxed 8-byte stores, each a word and its epoch, written and read whole.
WEFT_DEVICE void send_unit(u8 *to, uint4 value, u32 epoch) {
    ptx::store_relaxed_sys_pair(to, packet(epoch, value.x), packet(epoch, value.y));
    ptx::store_relaxed_sys_pair(to + 16, packet(epoch, value.z), packet(epoch, value.w));
}

// Waits for a unit with `epoch`; false on timeout.
WEFT_DEVICE bool wait_unit(const Watch &watch, const u8 *from, u32 epoch, u32 peer, u32 slot, uint4 &value) {
    PollBudget budget;
    for (;;) {
        const ulonglong2 low = ptx::load_relaxed_sys_pair(from), high = ptx::load_relaxed_sys_pair(from + 16);
        const u32 epochs[4] = {static_cast<u32>(low.x >> 32), static_cast<u32>(low.y >> 32), static_cast<u32>(high.x >> 32), static_cast<u32>(high.y >> 32)};
        u32 seen = epoch; // the first epoch that differs
#pragma unroll
        for (u32 i = 4; i-- > 0;) seen = epochs[i] == epoch ? seen : epochs[i];
        if (seen == epoch) {
            value = make_uint4(static_cast<u32>(low.x), static_cast<u32>(low.y), static_cast<u32>(high.x), static_cast<u32>(high.y));
            return true;
        }
        if (!budget.more(watch, peer, slot, epoch, seen)) return false;
    }
}

// A block's message part, in units.
struct Part {
    u32 first, count;

    WEFT_DEVICE Part(const Arguments &args, u64 bytes) {
        const u32 units = static_cast<u32>((bytes + UNIT - 1) / UNIT);
        first = min(blockIdx.x * args.units_per_block, units);
        count = min(args.units_per_block, units - first);
    }
};

// Begins a call: the epoch, or 0 if the call must not run. All threads call this.
WEFT_DEVICE u32 begin_packets(const Channel &channel, const Watch &watch) {
    wait_for_previous_kernel();
    const u32 epoch = *channel.epoch() + 1;
    // Epochs wrap around to 2, which follows an odd one.
    return channel.closed() || watch.dead() ? 0 : epoch == 0 ? 2 : epoch;
}

// Ends a call; the other threads have read the epoch. Called by all threads.
WEFT_DEVICE void end_packets(const Channel &channel, u32 epoch) {
    __syncthreads();
    if (threadIdx.x == 0) {
        start_next_kernel();
        if (epoch != 0) *channel.epoch() = epoch;
    }
}

// Sends the credits for messages without bytes in this block.
WEFT_DEVICE void send_credits(const Channel &channel, u32 epoch) {
    const Arguments &args = channel.args;
    for (u32 p = threadIdx.x; p < RANKS; p += blockDim.x)
        if (p != args.rank && Part(args, args.message[p].send_bytes).count == 0)
            send_unit(channel.unit(p, args.rank, epoch, SLOTS), make_uint4(0, 0, 0, 0), epoch);
}

// Waits for credits from peers whose message has no bytes in this block.
WEFT_DEVICE void wait_credits(const Channel &channel, const Watch &watch, u32 epoch) {
    const Arguments &args = channel.args;
    uint4 unused;
    for (u32 p = threadIdx.x; p < RANKS; p += blockDim.x)
        if (p != args.rank && Part(args, args.message[p].receive_bytes).count == 0)
            wait_unit(watch, channel.unit(args.rank, p, epoch, SLOTS), epoch, p, SLOTS, unused);
}

} // namespace weft::collectives
