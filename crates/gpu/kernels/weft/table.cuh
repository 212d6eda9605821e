// The table of a domain and its records. Generated from crates/gpu/src/domain/table.rs; a test
// compares the two.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

struct Table {
    u32 dead; // a code once the domain is dead, here only
    u32 flagged; // not 0 while a notice is being written
    u64 limit_ns; // how long a wait may take; read each time, so that a captured graph does not freeze it
    u64 looked_ns; // when somebody last looked at the abort word: it lies in host memory, which is far
    u32 version; // the version of this layout
    u32 rank; // this rank
    u32 ranks; // how many there are
    u32 flags_each; // u32 words that each rank has in the flags area
    u64 record; // address of the two records, of 64 bytes each: what killed the domain, and a notice
    u64 abort; // address of the u32 word with which the host ends all waits
    u64 flags; // offset of the flags area from the table: flags_each words for each rank, which it raises
    u64 peers[64]; // every rank's table, as it is mapped here
};

// What the host reads of a failure.
struct Record {
    u32 code; // what happened; written last, with release
    u32 rank; // who wrote it
    u32 phase; // where it stood
    u32 peer; // the other rank, or all ones
    u32 channel; // the channel
    u32 slot; // the row or token
    u32 claim; // taken by the one of several writers on the CPU that may write
    u32 reserved; // 0
    u64 expected; // what should have been there
    u64 seen; // what was there
    u64 more[2]; // 0
};
static_assert(sizeof(Table) == 576 && sizeof(Record) == 64, "as they are declared in Rust");

constexpr u32 TABLE_VERSION = 1;
constexpr u64 TABLE_BYTES = 1024;

} // namespace weft
