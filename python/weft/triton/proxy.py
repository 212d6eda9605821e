"""Proxy: a thread that sends what kernels put to ranks of any host.

Kernels store values and descriptors into a ring in memory of the host; the thread makes a counted
write of each, by the providers of the communicator. At the destination its like raises the word.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
import torch

from weft._timeout import seconds
from weft.cuda.device import place_of
from weft.errors import ConfigurationError, OutOfRangeError, WaitTimeoutError
from weft.region import Page
from weft.triton import staged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weft.communicator import Communicator
    from weft.region import Region

__all__ = ["Proxy"]

#: Puts to one peer that may be under way.
_WINDOW: Final = 16
#: Bytes of a descriptor: that of a slot without `ready` and `released`.
_DESCRIPTOR: Final = 32
#: Seconds between two looks of an idle thread.
_NAP: Final = 20e-6
#: Seconds between two checks of the group.
_LOOK: Final = 0.02
#: Mapped for devices, in all contexts (cudaHostRegisterPortable and cudaHostRegisterMapped).
_PINNED: Final = 3


class _Put(NamedTuple):
    """Descriptor of a put, and its slot."""

    rank: int
    word: int
    epoch: int
    bytes: int
    offset: int
    slot: int
    #: Value of the slot's `released` once its source may be reused.
    uses: int


class Proxy:
    """Memory that ranks of all hosts write to, and the thread that sends their kernels' puts.

    Kernels put by `weft.triton.staged_put_signal` and wait by `staged_wait`. All data pass memory
    of the host on both sides, so a put takes a copy over PCIe, a look of the thread, a message and
    another look: use it between hosts, where stores over NVLink do not reach.

    All ranks make it together, with equal arguments, and close it together. From then until it is
    closed its thread makes calls on the communicator.

    Args:
        communicator: of the ranks, on any number of hosts.
        bytes: of `data`, 1 or more.
        words: number of words, 1 or more.
        device: that of the kernels: a GPU, or "twin" for the interpreter.
        slots: puts that may be in the ring.
        slot_bytes: of a put, at most; a multiple of 64, at most 262,144.
        timeout: limit of a wait of a kernel in seconds.

    Attributes:
        data: uint8 `[bytes]`, in memory of the host that the device maps; zero at first.
        words: int32 `[words]`, likewise.
        state: argument of the device functions.

    Raises:
        ConfigurationError: if an argument is out of range.
        ConfigurationMismatchError: if ranks pass different arguments.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        bytes: int,
        words: int,
        device: object = "cuda",
        slots: int = 64,
        slot_bytes: int = 16384,
        timeout: float = 10.0,
    ) -> None:
        if bytes < 1 or words < 1 or slots < 1:
            raise ConfigurationError(
                f"bytes={bytes}, words={words}, slots={slots}: expected 1 or more of each"
            )
        if slot_bytes % 64 or not 64 <= slot_bytes <= 1 << 18:
            raise ConfigurationError(
                f"slot_bytes={slot_bytes}: expected a multiple of 64 from 64 to {1 << 18}"
            )
        limit = seconds(timeout)
        self._group, self._rank = communicator, communicator.rank
        self._slots, self._slot_bytes = slots, slot_bytes
        _, place = place_of(device)
        stride = staged.HEADER_BYTES + slot_bytes
        ranks = communicator.world_size
        self._regions: list[Region] = [
            communicator.alloc(length)
            for length in (
                bytes,
                words * 4,
                ranks * _WINDOW * _DESCRIPTOR,
                staged.RECORD_BYTES + slots * stride,
            )
        ]
        data, flags, arrivals, ring = (region.bytes for region in self._regions)
        self._arrivals = arrivals.reshape(ranks, _WINDOW, _DESCRIPTOR)
        self._record = ring[: staged.RECORD_BYTES].view(np.int32)
        self._ring = ring[staged.RECORD_BYTES :].reshape(slots, stride)
        self._headers = self._ring[:, :8].view(np.int32)
        self._flags: NDArray[np.int32] = flags.view(np.int32)
        self._pinned = place.type == "cuda"
        if self._pinned:
            for each in (data, flags, ring):
                _pin(each)
        self.data, self.words = torch.from_numpy(data), torch.from_numpy(self._flags)
        state = np.zeros(staged.STATE, np.int64)
        state[staged.RING], state[staged.LIMIT] = ring.ctypes.data, int(limit * 1e9)
        state[staged.SLOTS], state[staged.SLOT_BYTES] = slots, slot_bytes
        state[staged.DATA], state[staged.WORDS] = data.ctypes.data, flags.ctypes.data
        self.state = torch.from_numpy(state).to(place)
        self._counter = communicator.counter(window=_WINDOW)
        self._theirs = communicator.share(self._regions[:3], [self._counter])
        self._next = 0
        self._waiting: list[deque[_Put]] = [deque() for _ in range(ranks)]
        self._error: Exception | None = None
        self._stopping = self._has_raised = False
        self._thread = threading.Thread(target=self._run, name="weft proxy", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the waits of kernels.

        Raises:
            WaitTimeoutError: a wait of a kernel expired; it has the rank.
            OutOfRangeError: a descriptor was wrong.
            GroupPoisonedError: and its kinds: a rank was lost, or the group has ended.
        """
        if self._error is not None:
            self._has_raised = True
            raise self._error
        if self._record[0] != 0:
            self._has_raised = True
            source, word, expected, seen = (int(each) for each in self._record[1:5])
            what = "a slot of its ring" if word < 0 else f"word {word}"
            error = WaitTimeoutError(
                f"rank {self._rank} waited for rank {source} in a kernel ({what}) and timed out: "
                f"expected {expected}, observed {seen}"
            )
            error.rank = source
            raise error

    def close(self, *, timeout: float = 30.0) -> None:
        """Send what is in the ring, wait for the other ranks, and end the thread.

        Kernels that put or wait have ended. After an error it does not wait for other ranks.

        Raises:
            WaitTimeoutError: if puts, or other ranks, take longer than `timeout`.
            WeftError: an error of `check`, which has not been called since.
        """
        until = time.monotonic() + seconds(timeout)
        try:
            while self._is_sound() and self._thread.is_alive() and not self._is_drained():
                if time.monotonic() > until:
                    raise WaitTimeoutError(
                        f"proxy of rank {self._rank}: puts are left in its ring after {timeout:g} s"
                    )
                time.sleep(_NAP)
            if self._is_sound() and self._thread.is_alive():
                self._group.barrier(timeout=max(until - time.monotonic(), 0.0))
                self._stop()
                self._counter.release(timeout=max(until - time.monotonic(), 0.0))
        finally:
            self._stop()
            if self._pinned:
                for region in (*self._regions[:2], self._regions[3]):
                    _unpin(region.bytes)
                self._pinned = False
        if not self._has_raised:
            self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()

    def _stop(self) -> None:
        self._stopping = True
        self._thread.join()

    def _is_sound(self) -> bool:
        return self._error is None and self._record[0] == 0

    def _is_drained(self) -> bool:
        return bool((self._headers[:, 0] == self._headers[:, 1]).all())

    def _run(self) -> None:
        """The thread: puts of the ring, then arrivals; it rests if there are none of both."""
        try:
            looked = 0.0
            while not self._stopping:
                if time.monotonic() - looked > _LOOK:
                    looked = time.monotonic()
                    self._group.check()
                found = self._take()
                found |= self._send()
                found |= self._receive()
                if not found:
                    time.sleep(_NAP)
        except Exception as error:
            # Of any kind: kernels would wait for their limits.
            self._error = error
            self._record[0] = 2

    def _take(self) -> bool:
        """Puts that are ready, in the order of their tickets."""
        found = False
        while True:
            slot, uses = self._next % self._slots, self._next // self._slots
            if self._headers[slot, 0] != _word(uses + 1):
                return found
            header = self._ring[slot, 8 : 8 + _DESCRIPTOR]
            rank, word, epoch, length = (int(each) for each in header[:16].view(np.int32))
            put = _Put(rank, word, epoch, length, int(header[16:24].view(np.int64)[0]), slot, uses)
            self._check_put(put)
            self._next += 1
            self._waiting[rank].append(put)
            found = True

    def _check_put(self, put: _Put) -> None:
        """A descriptor within the limits: kernels are trusted no further."""
        for name, value, limit in (
            ("rank", put.rank, self._group.world_size - 1),
            ("word", put.word, len(self._flags) - 1),
            ("number of bytes", put.bytes, self._slot_bytes),
            ("last byte", put.offset + put.bytes, self.data.numel()),
            ("offset", put.offset, self.data.numel()),
        ):
            if not 0 <= value <= limit:
                raise OutOfRangeError(
                    f"put of rank {self._rank}: {name} is {value}: expected 0 to {limit}"
                )

    def _send(self) -> bool:
        """Writes toward peers that have given credit for one more."""
        found = False
        for rank, puts in enumerate(self._waiting):
            while puts and (rank == self._rank or self._may_write(rank)):
                self._write(puts.popleft())
                found = True
        return found

    def _may_write(self, peer: int) -> bool:
        return self._counter.next_round(peer) < self._counter.credits(peer) + _WINDOW

    def _write(self, put: _Put) -> None:
        source, first = self._regions[3], staged.RECORD_BYTES + put.slot * self._ring.shape[1]

        def done(error: Exception | None) -> None:
            # The thread finds an error of the group by its next call.
            self._headers[put.slot, 1] = _word(put.uses + 1)

        if put.rank == self._rank:
            begin = staged.HEADER_BYTES
            values = self._ring[put.slot, begin : begin + put.bytes]
            self.data.numpy()[put.offset : put.offset + put.bytes] = values
            self._flags[put.word] = put.epoch
            done(None)
            return
        data, _, arrivals = self._theirs[put.rank]
        number = self._counter.next_round(put.rank)
        place = (self._rank * _WINDOW + number % _WINDOW) * _DESCRIPTOR
        pages = [Page(source, first + 8, arrivals, place, _DESCRIPTOR)]
        if put.bytes:
            values_at = first + staged.HEADER_BYTES
            pages.append(Page(source, values_at, data, put.offset, put.bytes))
        self._group.write(put.rank, self._counter, pages, round=number, done=done)

    def _receive(self) -> bool:
        """Raises the words of puts that have arrived whole, and credits them."""
        found = False
        for peer in self._counter.peers:
            # A slot is at most 256 KiB and has two pages: one part with all providers.
            while self._counter.count(peer):
                number = self._counter.open_round(peer)
                arrived = self._arrivals[peer, number % _WINDOW]
                _, word, epoch, _ = (int(each) for each in arrived[:16].view(np.int32))
                if not 0 <= word < len(self._flags):
                    raise OutOfRangeError(f"put of rank {peer}: word {word} is out of range")
                self._flags[word] = epoch
                self._counter.credit(peer)
                found = True
        return found


def _word(number: int) -> int:
    """The number as int32, with wrap-around."""
    return (number + 2**31) % 2**32 - 2**31


def _pin(memory: NDArray[np.uint8]) -> None:
    """Pin memory for the GPUs of this process, which have it at the same address (x86)."""
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, _PINNED))


def _unpin(memory: NDArray[np.uint8]) -> None:
    torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data))
