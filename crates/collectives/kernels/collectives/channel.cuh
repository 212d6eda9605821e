// Channel: a block's memory at all ranks, and the rounds.
//
// Block b in a launch exchanges data only with block b on the other ranks. The epoch, sequence numbers, flags, packets
// and rings belong to the block, so that the grid may differ from call to call: all ranks launch equal grids.
#pragma once
#include "weft/team.cuh"
#include "weft/wait.cuh"
#include "collectives/arguments.cuh"

namespace weft::collectives {

constexpr u32 BLOCKS = WEFT_BLOCKS;                 // blocks in the largest grid
constexpr u32 SLOTS = WEFT_SLOTS;                   // message units that a block sends by packets
constexpr u32 RING_CHUNKS = WEFT_RING_CHUNKS;       // chunks per source in a ring
constexpr u32 CHUNK_CAPACITY = WEFT_CHUNK_CAPACITY; // bytes per chunk in a ring
constexpr u32 UNIT = 16;                            // bytes in user memory that a thread handles at a time
constexpr u32 PACKETS_BYTES = 32;                   // a unit as two packets

enum Phase : u32 { PACKETS = WEFT_FIRST_PHASE, CONTRIBUTIONS, RESULTS, ENTRY, EXIT };

// Chunk rings: peer contributions (or the data itself, in calls without arithmetic), and all-reduce results.
enum Ring : u32 { CONTRIBUTED = 0, REDUCED = 1 };

struct Channel {
    const Arguments &args;
    u32 block;

    WEFT_DEVICE u8 *at(u32 rank, u64 offset) const { return reinterpret_cast<u8 *>(args.peer[rank]) + offset; }
    WEFT_DEVICE u8 *own(u64 offset) const { return at(args.rank, offset); }

    WEFT_DEVICE bool closed() const { return *reinterpret_cast<const volatile u32 *>(own(WEFT_AT_CLOSED)) != 0; }
    // Epoch in the block's last packet call.
    WEFT_DEVICE volatile u32 *epoch() const { return reinterpret_cast<volatile u32 *>(own(WEFT_AT_EPOCHS)) + block; }
    // Chunks that this block has exchanged with a peer through a ring.
    WEFT_DEVICE volatile u32 *sequence(u32 ring, u32 peer) const {
        return reinterpret_cast<volatile u32 *>(own(WEFT_AT_SEQUENCES)) + (ring * BLOCKS + block) * RANKS + peer;
    }
    // Flag at `rank`: chunks from `source` that have arrived there.
    WEFT_DEVICE u32 *flag(u32 ring, u32 rank, u32 source) const {
        return reinterpret_cast<u32 *>(at(rank, WEFT_AT_FLAGS)) + (ring * BLOCKS + block) * WEFT_FLAG_WORDS + source;
    }
    // Meeting count for this block: each direct call has two.
    WEFT_DEVICE volatile u32 *meetings() const { return reinterpret_cast<volatile u32 *>(own(WEFT_AT_MEETINGS)) + block; }
    // Signal at `rank`: the last meeting that `source` has reached, and its call digest.
    WEFT_DEVICE u64 *signal(u32 rank, u32 source) const {
        return reinterpret_cast<u64 *>(at(rank, WEFT_AT_SIGNALS)) + block * WEFT_FLAG_WORDS + source;
    }
    // Unit at `rank` from `source`, as two packets. Unit SLOTS is the credit for a message without bytes.
    WEFT_DEVICE u8 *unit(u32 rank, u32 source, u32 epoch, u32 slot) const {
        const u32 row = (block * 2 + (epoch & 1)) * RANKS + source;
        return at(rank, WEFT_AT_PACKETS) + (static_cast<u64>(row) * (SLOTS + 1) + slot) * PACKETS_BYTES;
    }
    // Place for a chunk from `source` in a ring at `rank`.
    WEFT_DEVICE u8 *chunk(u32 ring, u32 rank, u32 source, u32 sequence) const {
        const u64 row = (static_cast<u64>(ring) * BLOCKS + block) * RANKS + source;
        return at(rank, WEFT_AT_RINGS) + (row * RING_CHUNKS + sequence % RING_CHUNKS) * CHUNK_CAPACITY;
    }
};

WEFT_DEVICE Watch watch_of(const Arguments &args, u32 phase) {
    return Watch{reinterpret_cast<Table *>(args.table), reinterpret_cast<Record *>(args.record),
                 reinterpret_cast<const u32 *>(args.abort), args.rank, blockIdx.x, phase};
}

// Peer at a step from 1 on. Each rank starts with its successor, so that they do not all write to one peer.
WEFT_DEVICE u32 peer_of(const Arguments &args, u32 step) {
    const u32 peer = args.rank + step;
    return peer >= RANKS ? peer - RANKS : peer;
}

// Unaligned tensor units, and the last one in a message, are read and written by elements: `bytes` bytes, `element`
// bytes each. Not inlined, to keep them out of the hot code, with arguments in registers.
namespace cold {

__device__ __noinline__ uint4 load_elements(const u8 *from, u32 bytes, u32 element) {
    u64 half[2] = {0, 0};
    for (u32 at = 0; at < bytes; at += element) {
        u64 value;
        if (element == 1) value = *reinterpret_cast<const volatile u8 *>(from + at);
        else if (element == 2) value = *reinterpret_cast<const volatile u16 *>(from + at);
        else if (element == 4) value = *reinterpret_cast<const volatile u32 *>(from + at);
        else value = *reinterpret_cast<const volatile u64 *>(from + at);
        value <<= at % 8 * 8;
        if (at < 8) half[0] |= value;
        else half[1] |= value;
    }
    return make_uint4(static_cast<u32>(half[0]), static_cast<u32>(half[0] >> 32), static_cast<u32>(half[1]), static_cast<u32>(half[1] >> 32));
}

__device__ __noinline__ void store_elements(u8 *to, u32 bytes, u32 element, uint4 value) {
    const u64 low = value.x | static_cast<u64>(value.y) << 32, high = value.z | static_cast<u64>(value.w) << 32;
    for (u32 at = 0; at < bytes; at += element) {
        const u64 rest = (at < 8 ? low : high) >> at % 8 * 8;
        if (element == 1) *reinterpret_cast<volatile u8 *>(to + at) = static_cast<u8>(rest);
        else if (element == 2) *reinterpret_cast<volatile u16 *>(to + at) = static_cast<u16>(rest);
        else if (element == 4) *reinterpret_cast<volatile u32 *>(to + at) = static_cast<u32>(rest);
        else *reinterpret_cast<volatile u64 *>(to + at) = rest;
    }
}

} // namespace cold

// User memory, read and written in units.
struct UserBytes {
    u8 *begin;
    u64 bytes;
    u32 element; // bytes per element
    bool aligned;

    WEFT_DEVICE bool whole(u64 at) const { return aligned && at + UNIT <= bytes; }
    WEFT_DEVICE u32 rest(u64 at) const { return static_cast<u32>(min(static_cast<u64>(UNIT), bytes - at)); }

    WEFT_DEVICE uint4 load(u64 at) const {
        return whole(at) ? ptx::load_stream(begin + at) : cold::load_elements(begin + at, rest(at), element);
    }

    WEFT_DEVICE void store(u64 at, uint4 value) const {
        if (whole(at)) ptx::store_stream(begin + at, value);
        else cold::store_elements(begin + at, rest(at), element, value);
    }

    WEFT_DEVICE void poison(u64 at) const { store(at, make_uint4(~0u, ~0u, ~0u, ~0u)); }
};

// Bytes that this rank sends to a rank, and where they go at the receiver: see Message in Rust.
WEFT_DEVICE UserBytes sent_to(const Arguments &args, u32 rank) {
    const Message &message = args.message[rank];
    return UserBytes{reinterpret_cast<u8 *>(args.input) + message.send_at, message.send_bytes, args.element_bytes, args.aligned != 0};
}

// Output bytes from a rank.
WEFT_DEVICE UserBytes received_from(const Arguments &args, u32 rank) {
    const Message &message = args.message[rank];
    return UserBytes{reinterpret_cast<u8 *>(args.output) + message.receive_at, message.receive_bytes, args.element_bytes, args.aligned != 0};
}

} // namespace weft::collectives
