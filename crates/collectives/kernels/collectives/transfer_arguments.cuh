// Send and receive kernel argument. Generated from crates/collectives/src/device/transfers.rs; a test compares the two.
#pragma once
#include "collectives/arguments.cuh"

namespace weft::collectives {

constexpr u32 TRANSFERS = 128;

struct Transfer {
    u64 at; // this rank's tensor
    u64 bytes; // its bytes
    u32 peer; // rank at the other end
    u32 receives; // nonzero for a receive
};

struct TransferArguments {
    u64 peer[RANKS]; // every rank's memory, as mapped on this rank
    Transfer transfer[TRANSFERS]; // by direction and peer, in batch order among equal ones
    u64 table; // domain table
    u64 record; // failure records, in pinned memory
    u64 abort; // word by which the host ends all waits
    u32 rank; // this rank
    u32 count; // transfers in the batch
};
static_assert(sizeof(TransferArguments) == 8 * RANKS + 3104, "the size in Rust");

} // namespace weft::collectives
