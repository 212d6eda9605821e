// Table of a domain, and records. Generated from crates/gpu/src/table.rs; a test compares
// the two.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

struct Table {
    u32 dead; // code of the failure that ended the domain on this rank; 0: alive
    u32 flagged; // nonzero while a notice is being written
    u64 limit_ns; // limit of a wait; read at each check, so that it also applies to captured graphs
    u64 looked_ns; // time of the last read of the abort word, which is in host memory
    u32 version; // version of this layout
    u32 rank; // this rank
    u32 ranks; // number of ranks
    u32 flags_each; // u32 words of each rank in the flags area
    u64 record; // address of two records of 64 bytes: the fatal one, and a notice
    u64 abort; // address of the u32 word by which the host ends all waits
    u64 flags; // offset of the flags area from the table: flags_each words for each rank, raised by that rank
    u64 peers[64]; // tables of all ranks, as mapped here
};

// Record of a failure, read by the host.
struct Record {
    u32 code; // code of the event; written last, with release
    u32 rank; // rank that wrote it
    u32 phase; // phase of the kernel
    u32 peer; // peer concerned, or all ones
    u32 channel; // channel
    u32 slot; // row or token
    u32 claim; // claimed by the one of several writers on the CPU that writes
    u32 reserved; // 0
    u64 expected; // expected value
    u64 seen; // observed value
    u64 more[2]; // 0
};
static_assert(sizeof(Table) == 576 && sizeof(Record) == 64, "as declared in Rust");

constexpr u32 TABLE_VERSION = 1;
constexpr u64 TABLE_BYTES = 1024;

} // namespace weft
