"""Byte offsets and codes of the table, of records and of contexts.

Generated from crates/gpu/src/table.rs and crates/gpu/src/user_kernels.rs; a test compares
both.
"""

from typing import Final

#: Version of the table's layout.
LAYOUT_VERSION: Final = 1

#: Bytes reserved for the table.
TABLE_BYTES: Final = 1024

#: Limit of ranks.
MAX_RANKS: Final = 64

#: Code of the failure that ended the domain on this rank.
TABLE_DEAD: Final = 0

#: Nonzero while a notice is being written.
TABLE_FLAGGED: Final = 4

#: Limit of a wait.
TABLE_LIMIT_NS: Final = 8

#: Time of the last read of the abort word, which is in host memory.
TABLE_LOOKED_NS: Final = 16

#: Version of this layout.
TABLE_VERSION: Final = 24

#: This rank.
TABLE_RANK: Final = 28

#: Number of ranks.
TABLE_RANKS: Final = 32

#: U32 words of each rank in the flags area.
TABLE_FLAGS_EACH: Final = 36

#: Address of two records of 64 bytes.
TABLE_RECORD: Final = 40

#: Address of the u32 word by which the host ends all waits.
TABLE_ABORT: Final = 48

#: Offset of the flags area from the table.
TABLE_FLAGS: Final = 56

#: Tables of all ranks, as mapped here.
TABLE_PEERS: Final = 64

#: Code of the event.
RECORD_CODE: Final = 0

#: Rank that wrote it.
RECORD_RANK: Final = 4

#: Phase of the kernel.
RECORD_PHASE: Final = 8

#: Peer concerned, or all ones.
RECORD_PEER: Final = 12

#: Channel.
RECORD_CHANNEL: Final = 16

#: Row or token.
RECORD_SLOT: Final = 20

#: Claimed by the one of several writers on the CPU that writes.
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

#: Phase: a wait of a Triton kernel.
PHASE_WAIT: Final = 64

#: Phase: a barrier of a Triton kernel.
PHASE_BARRIER: Final = 65
