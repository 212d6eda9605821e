// Domain table, and records. Generated from crates/gpu/src/table.rs; a test compares the two.
#pragma once
#include "weft/ptx.cuh"

namespace weft {

struct Table {
    u32 dead; // failure code that ended the domain on this rank; 0: alive
    u32 flagged; // nonzero while a notice is being written
    u64 limit_ns; // wait limit; read at each check, so that it also applies to captured graphs
    u64 looked_ns; // last time the abort word, which is in host memory, was read
    u32 version; // layout version
    u32 rank; // this rank
    u32 ranks; // world size
    u32 flags_each; // u32 words per rank in the flags area
    u64 record; // address of two 64-byte records: the fatal one, and a notice
    u64 abort; // address of the u32 word with which the host ends all waits
    u64 flags; // flags area offset from the table: flags_each words for each rank, raised by that rank
    u64 peers[64]; // all ranks' tables, as mapped here
    u64 ring; // address of the proxy's command slots; 0 without a proxy
    u64 ticket; // next ticket for a command, counted by kernels
    u64 released; // address of the u64 count of tickets whose slots are free
    u64 seen_released; // that count when a kernel last read it
    u64 list; // address of the u32 lengths that SCATTER commands name
    u64 words; // address of the words that proxies raise: words_each for each rank
    u64 alive; // address of the u64 that the proxy's thread increments while it runs
    u32 slots; // command slots, a power of two
    u32 words_each; // u32 words per rank in the words
    u32 proxy_rank; // this rank in the proxy's group, which has all hosts' ranks
    u32 proxy_ranks; // world size of the proxy's group
    u32 poller; // 1 while one of this GPU's waiting pushes reads the count of free tickets for all
    u32 lengths; // u32 lengths at list
    u64 readers; // address of the u64 by which each word's waits elect one reader; 0 if all waits read the words
};

// Failure record, read by the host.
struct Record {
    u32 code; // event code; written last, with release
    u32 rank; // rank that wrote it
    u32 phase; // kernel phase
    u32 peer; // peer concerned, or all ones
    u32 channel; // channel
    u32 slot; // row or token
    u32 claim; // claimed by the CPU writer that writes, if there are several
    u32 reserved; // 0
    u64 expected; // expected value
    u64 seen; // observed value
    u64 more[2]; // 0
};
static_assert(sizeof(Table) == 664 && sizeof(Record) == 64, "as declared in Rust");

constexpr u32 TABLE_VERSION = 3;
constexpr u64 TABLE_BYTES = 1024;

} // namespace weft
