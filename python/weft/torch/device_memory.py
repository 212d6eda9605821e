"""Symmetric memory pool for a process group: tensors that all ranks take at the same place.

All ranks allocate a symmetric heap block together, which takes an exchange on the host and zeroes
it. So blocks whose tensors are gone are reused. The order in which Python frees tensors may differ
between ranks; a block is therefore available once all ranks have reported that theirs is free,
which they exchange when no block with the needed size is available. Between two exchanges an
allocation is local. Each exchange that finds free blocks adds a spare one, up to a limit, so that
loops reach a state with few exchanges.

Memory order: a tensor belongs to the stream that was current at its allocation, as in torch:
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-memory-management. A block whose last
tensor belonged to another stream is ordered after that stream's work, and after asynchronous
operations that used it.
"""

from __future__ import annotations

import logging
import struct
import weakref
from bisect import bisect_right, insort
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, Final

import torch

from weft.base.errors import (
    AllocationError,
    ConfigurationMismatchError,
    DeviceError,
    SizeError,
    SystemCallError,
)
from weft.gpu.memory import memory_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weft.cuda import Collectives

__all__ = ["Pool", "block_bytes"]

logger = logging.getLogger("weft.torch")

#: Errors from an allocation that all ranks make and that fails on all of them. A peer's error is a
#: `DeviceError`.
NO_ROOM: Final = (AllocationError, SizeError, DeviceError, SystemCallError)
#: Minimum block size in bytes.
SHORTEST: Final = 4096
#: Maximum spare blocks per size, beyond the most that were in use at a time, and maximum bytes in
#: spare blocks of all sizes. Counts begin again when the heap is full and free blocks are returned
#: to it.
SPARE_BLOCKS: Final = 15
SPARE_BYTES: Final = 1 << 30


def block_bytes(length: int) -> int:
    """Block size for a tensor of `length` bytes: at most an eighth more, and at least 4096.

    Tensors of similar lengths share blocks.
    """
    step = max(SHORTEST, 1 << max(length.bit_length() - 4, 0))
    return -(-max(length, 1) // step) * step


class Block:
    """Symmetric heap block, which one tensor at a time uses."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        #: Equal on all ranks.
        self.number = number
        #: Keeps the memory.
        self.tensor = tensor
        self.address, self.bytes = tensor.data_ptr(), tensor.nbytes
        #: The last tensor's stream.
        self.stream: torch.cuda.Stream | None = None
        #: End events from asynchronous operations that used it.
        self.events: list[torch.cuda.Event] = []


class Lease:
    """A tensor storage's use of a block, which it owns; also after the pool."""

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: Block) -> None:
        self.block = block


class Pool:
    """Symmetric memory for a group's tensors.

    Every rank makes the same calls in the same order, outside captures.

    Args:
        collectives: the group's collectives.
        timeout: seconds; longest wait for the other ranks' same call.
    """

    def __init__(self, collectives: Collectives, timeout: float) -> None:
        self._collectives, self._timeout = collectives, timeout
        #: By number: blocks that tensors use or that other ranks' tensors may use.
        self._taken: dict[int, Block] = {}
        #: By bytes: blocks that are free on all ranks, in the same order there.
        self._free: defaultdict[int, deque[Block]] = defaultdict(deque)
        #: Numbers of blocks whose tensors are gone here. Finalisers append, on any thread.
        self._dropped: deque[int] = deque()
        #: Numbers reported as gone, until all ranks report them.
        self._gone: set[int] = set()
        #: Addresses for all blocks in order, and the blocks.
        self._addresses: list[int] = []
        self._blocks: dict[int, Block] = {}
        #: By bytes, spare blocks; and total bytes.
        self._spare: defaultdict[int, int] = defaultdict(int)
        self._spare_bytes = 0
        #: Exchanges and blocks so far.
        self._exchanges = self._made = 0
        self._has_warned = False

    def take(self, length: int) -> torch.Tensor | None:
        """A tensor with `length` uninitialised bytes at the same place on all ranks.

        Returns:
            `None` if a rank has no room; then on all ranks.

        Raises:
            ConfigurationMismatchError: if ranks ask for different sizes.
            WaitTimeoutError: if other ranks do not ask for one.
        """
        size = block_bytes(length)
        if not self._free[size]:
            self._agree(size)
            if self._free[size]:
                self._add_spare(size)
        block = self._free[size].popleft() if self._free[size] else self._grow(size)
        if block is None:
            return None
        self._order(block)
        self._taken[block.number] = block
        lease = Lease(block)
        weakref.finalize(lease, self._dropped.append, block.number).atexit = False
        rows = memory_at(block.address, (1, max(length, 1)), self._collectives.device, lease)
        return rows[0][:length]

    def record(self, addresses: Iterable[int], stream: torch.cuda.Stream | None) -> None:
        """Record that an asynchronous operation on `stream` uses the memory at these addresses."""
        if stream is None or not self._addresses:
            return
        blocks = {block.number: block for block in map(self._at, addresses) if block is not None}
        if blocks:
            event = stream.record_event()
            for block in blocks.values():
                # A group's operations are in one order: the last ends last.
                block.events = [event]

    def _at(self, address: int) -> Block | None:
        """The block at an address."""
        before = bisect_right(self._addresses, address)
        if before == 0:
            return None
        block = self._blocks[self._addresses[before - 1]]
        return block if address < block.address + block.bytes else None

    def _order(self, block: Block) -> None:
        """Put the current stream behind the work that used the block."""
        if self._collectives.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self._collectives.device)
        if block.stream is not None and block.stream != current:
            current.wait_stream(block.stream)
        for event in block.events:
            current.wait_event(event)
        block.stream, block.events = current, []

    def _agree(self, size: int) -> None:
        """Exchange which blocks are free; every rank makes this call, with the same size."""
        while self._dropped:
            self._gone.add(self._dropped.popleft())
        own = sorted(self._gone)
        request = self._exchanges, size
        self._exchanges += 1
        payload = struct.pack(f"<{2 + len(own)}Q", *request, *own)
        communicator: Any = self._collectives.communicator
        common = set(own)
        for rank, given in enumerate(communicator._native.all_gather(payload, self._timeout)):
            count, asked, *gone = struct.unpack(f"<{len(given) // 8}Q", given)
            if (count, asked) != request:
                raise ConfigurationMismatchError(
                    f"allocate_tensor of {size} bytes (exchange {request[0]}): rank {rank} asks for"
                    f" {asked} bytes (exchange {count}); allocate equal tensors in the same order"
                )
            common &= set(gone)
        for number in sorted(common):
            block = self._taken.pop(number)
            self._free[block.bytes].append(block)
        self._gone -= common

    def _add_spare(self, size: int) -> None:
        """Add a free block, unless there are enough; every rank makes this call."""
        if self._spare[size] >= SPARE_BLOCKS or self._spare_bytes + size > SPARE_BYTES:
            return
        block = self._grow(size, is_spare=True)
        if block is None:
            self._spare[size] = SPARE_BLOCKS
            return
        self._spare[size] += 1
        self._spare_bytes += size
        self._free[size].append(block)

    def _grow(self, size: int, *, is_spare: bool = False) -> Block | None:
        """A new block; `None` if a rank has no room, with a warning unless it is a spare one."""
        for has_retried in (False, True):
            try:
                tensor = self._collectives.symmetric_empty(size, torch.uint8, timeout=self._timeout)
            except NO_ROOM as error:
                # If the group has failed, `check` raises that error instead.
                self._collectives.check()
                if is_spare:
                    return None
                if not has_retried and self._release():
                    continue
                level = logging.DEBUG if self._has_warned else logging.WARNING
                self._has_warned = True
                logger.log(
                    level,
                    "no symmetric memory for a tensor of %d bytes, which torch allocates instead; "
                    "its operations take copies: %s",
                    size,
                    error,
                )
                return None
            block = Block(self._made, tensor)
            self._made += 1
            insort(self._addresses, block.address)
            self._blocks[block.address] = block
            return block
        return None

    def _release(self) -> bool:
        """Return all free blocks to the heap, equally on all ranks; false if there are none."""
        blocks = [block for free in self._free.values() for block in free]
        self._free.clear()
        self._spare.clear()
        self._spare_bytes = 0
        for block in blocks:
            self._addresses.remove(block.address)
            del self._blocks[block.address]
        return bool(blocks)
