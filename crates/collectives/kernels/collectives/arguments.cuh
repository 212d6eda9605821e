// Kernel argument. Generated from crates/collectives/src/device/arguments.rs; a test compares the two.
#pragma once
#include "weft/ptx.cuh"

namespace weft::collectives {

constexpr u32 RANKS = WEFT_RANKS;

struct Message {
    u64 send_at; // begin in the input
    u64 send_bytes; // bytes to the rank
    u64 receive_at; // begin in the output
    u64 receive_bytes; // bytes from the rank
    u64 longer; // bytes in the pair's longer direction
};

struct Arguments {
    u64 peer[RANKS]; // every rank's memory, as mapped on this rank
    u64 input_of[RANKS]; // direct calls: every rank's input that peers read, as mapped on this rank
    u64 output_of[RANKS]; // direct calls: every rank's output that peers write
    Message message[RANKS]; // bytes exchanged with each rank; for this rank: copied, or its own contribution
    u64 table; // domain table
    u64 record; // failure records, in pinned memory
    u64 abort; // word by which the host ends all waits
    u64 input; // tensor that is sent
    u64 output; // tensor that is written
    u32 rank; // this rank
    u32 element_bytes; // bytes per element: 1, 2, 4 or 8
    u32 aligned; // nonzero if both tensors and all messages in them start at multiples of 16
    u32 same_for_all; // nonzero if all peers are sent the same bytes
    u32 units_per_block; // by packets: message units per block
    u32 chunk_bytes; // by chunks: bytes per chunk, a multiple of 16
    u32 divisor; // rank count for an average, or 0
    u32 digest; // direct calls: call digest, equal on all ranks
};
static_assert(sizeof(Arguments) == 64 * RANKS + 72, "the size in Rust");

} // namespace weft::collectives
