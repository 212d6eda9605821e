"""Byte offsets and codes of the table, of records and of contexts.

Generated from crates/gpu/src/table.rs and crates/gpu/src/user_kernels.rs; a test compares
both.
"""

from typing import Final

#: Version of the table's layout.
LAYOUT_VERSION: Final = 3

#: Bytes reserved for the table.
TABLE_BYTES: Final = 1024

#: Limit of ranks.
MAX_RANKS: Final = 64

#: Failure code that ended the domain on this rank.
TABLE_DEAD: Final = 0

#: Nonzero while a notice is being written.
TABLE_FLAGGED: Final = 4

#: Wait limit.
TABLE_LIMIT_NS: Final = 8

#: Last time the abort word, which is in host memory, was read.
TABLE_LOOKED_NS: Final = 16

#: Layout version.
TABLE_VERSION: Final = 24

#: This rank.
TABLE_RANK: Final = 28

#: World size.
TABLE_RANKS: Final = 32

#: U32 words per rank in the flags area.
TABLE_FLAGS_EACH: Final = 36

#: Address of two 64-byte records.
TABLE_RECORD: Final = 40

#: Address of the u32 word with which the host ends all waits.
TABLE_ABORT: Final = 48

#: Flags area offset from the table.
TABLE_FLAGS: Final = 56

#: All ranks' tables, as mapped here.
TABLE_PEERS: Final = 64

#: Address of the proxy's command slots.
TABLE_RING: Final = 576

#: Next ticket for a command, counted by kernels.
TABLE_TICKET: Final = 584

#: Address of the u64 count of tickets whose slots are free.
TABLE_RELEASED: Final = 592

#: That count when a kernel last read it.
TABLE_SEEN_RELEASED: Final = 600

#: Address of the u32 lengths that SCATTER commands name.
TABLE_LIST: Final = 608

#: Address of the words that proxies raise.
TABLE_WORDS: Final = 616

#: Address of the u64 that the proxy's thread increments while it runs.
TABLE_ALIVE: Final = 624

#: Command slots, a power of two.
TABLE_SLOTS: Final = 632

#: U32 words per rank in the words.
TABLE_WORDS_EACH: Final = 636

#: This rank in the proxy's group, which has all hosts' ranks.
TABLE_PROXY_RANK: Final = 640

#: World size of the proxy's group.
TABLE_PROXY_RANKS: Final = 644

#: 1 while one of this GPU's waiting pushes reads the count of free tickets for all.
TABLE_POLLER: Final = 648

#: U32 lengths at list.
TABLE_LENGTHS: Final = 652

#: Address of the u64 by which each word's waits elect one reader.
TABLE_READERS: Final = 656

#: Event code.
RECORD_CODE: Final = 0

#: Rank that wrote it.
RECORD_RANK: Final = 4

#: Kernel phase.
RECORD_PHASE: Final = 8

#: Peer concerned, or all ones.
RECORD_PEER: Final = 12

#: Channel.
RECORD_CHANNEL: Final = 16

#: Row or token.
RECORD_SLOT: Final = 20

#: Claimed by the CPU writer that writes, if there are several.
RECORD_CLAIM: Final = 24

#: 0.
RECORD_RESERVED: Final = 28

#: Expected value.
RECORD_EXPECTED: Final = 32

#: Observed value.
RECORD_SEEN: Final = 40

#: 0.
RECORD_MORE: Final = 48

#: Address of the domain's table.
CONTEXT_TABLE: Final = 0

#: This rank.
CONTEXT_RANK: Final = 8

#: Number of ranks.
CONTEXT_RANKS: Final = 12

#: Latest time at which a program has checked a wait, common to its threads.
CONTEXT_CLOCK: Final = 16

#: Last value of the abort word that a program has read, common to its threads.
CONTEXT_ABORTED: Final = 24

#: 0.
CONTEXT_RESERVED: Final = 28

#: Bytes from the tensor here to that of each rank, modulo 2^64.
CONTEXT_SHIFTS: Final = 32

#: Bytes of a context.
CONTEXT_BYTES: Final = 544

#: Code of an expired wait.
CODE_TIMEOUT: Final = 1

#: Code of a wait that the host ended.
CODE_ABORTED: Final = 2

#: Code of a rank that passed other arguments.
CODE_DISAGREEMENT: Final = 64

#: Phase: a wait of a Triton kernel.
PHASE_WAIT: Final = 64

#: Phase: a barrier of a Triton kernel.
PHASE_BARRIER: Final = 65

#: Phase: a wait for a proxy's word.
PHASE_PROXY_WAIT: Final = 66

#: Phase: a push to the proxy's ring.
PHASE_PROXY_PUSH: Final = 67
