"""Chunk pipeline for collectives over several hosts: host copies and the network thread.

The calling thread launches kernels and copies. A separate thread makes the calls between hosts in
chunk order, each once the copy to the host has ended.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from weft.base import threads
from weft.base.errors import ClosedError, WeftError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft.collectives.host import HostCall, HostCollectives

__all__ = ["NetworkError", "NetworkThread", "Piece", "Slot", "Slots", "run"]

#: Chunks in flight at a time.
SLOTS: Final = 3
#: Slot areas begin at multiples of this many bytes.
ALIGNMENT: Final = 256


class NetworkError(Exception):
    """Failed call between hosts; `ranks`: the ranks that the error numbers, if any."""

    def __init__(self, error: WeftError, ranks: tuple[int, ...] | None) -> None:
        super().__init__(str(error))
        self.error, self.ranks = error, ranks


class NetworkThread:
    """Thread that makes consecutive calls between hosts.

    Args:
        collectives: for the ranks with equal local numbers.
        ranks: whole-group numbers for these ranks.
        timeout: maximum seconds per call.
        guard: called before a call and several times a second during it; raises `NetworkError` to
            end it.
    """

    def __init__(
        self,
        collectives: HostCollectives,
        ranks: tuple[int, ...],
        timeout: float,
        guard: Callable[[], None],
    ) -> None:
        self._collectives, self._ranks, self._timeout = collectives, ranks, timeout
        self._guard = guard
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], HostCall, Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._stopping, self._stopped = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="weft network", daemon=True)
        threads.start(self._thread)

    def submit(self, ready: Callable[[], None], call: HostCall) -> Future[None]:
        """Make a call once `ready` has returned; the future raises `NetworkError`.

        After `stop`, which another thread may call, it raises the same error.
        """
        done: Future[None] = Future()
        with self._stopping:
            if self._stopped:
                done.set_exception(NetworkError(ClosedError("the collectives were closed"), None))
            else:
                self._calls.put((ready, call, done))
        return done

    def stop(self, timeout: float) -> bool:
        """End the thread after the submitted calls; false if it did not end in time."""
        with self._stopping:
            self._stopped = True
            self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failed: Exception | None = None
        while (task := self._calls.get()) is not None:
            ready, call, done = task
            try:
                # Calls after a failure would wait for calls that the other ranks do not make.
                if failed is not None:
                    raise failed
                ready()
                self._guard()
                self._collectives.run(call, self._timeout, self._guard)
            except WeftError as error:
                failed = NetworkError(error, self._ranks)
                done.set_exception(failed)
            except Exception as error:
                failed = error
                done.set_exception(error)
            else:
                done.set_result(None)


class Slot(NamedTuple):
    """Memory for a chunk in flight, as bytes.

    Attributes:
        whole: device memory for all ranks' chunk.
        shard: device memory for the part with this rank's local number.
        sent: pinned host memory that is sent to other hosts.
        received: pinned host memory for data from them.
    """

    whole: torch.Tensor
    shard: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor


class Slots:
    """Slots, and streams for the copies between them.

    Args:
        device: tensor device.
        piece_bytes: chunk size.
        local_ranks: ranks per host.
    """

    def __init__(self, device: torch.device, piece_bytes: int, local_ranks: int) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        shard_bytes = -(-piece_bytes // local_ranks)

        def made(length: int, **where: Any) -> torch.Tensor:
            # Zeros: padding behind a vector is reduced as well.
            rounded = -(-length // ALIGNMENT) * ALIGNMENT
            return torch.zeros(rounded, dtype=torch.uint8, **where)

        # Not as inference-mode tensors, which later calls outside that mode could not change.
        with torch.inference_mode(False):
            self._slots = [
                Slot(
                    made(piece_bytes, device=device),
                    made(shard_bytes, device=device),
                    made(shard_bytes, pin_memory=self._on_gpu),
                    made(shard_bytes, pin_memory=self._on_gpu),
                )
                for _ in range(SLOTS)
            ]
        if self._on_gpu:
            self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
            # Calls may be on another stream than this one, which fills the memory.
            torch.cuda.current_stream(device).synchronize()

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes on the device, and in pinned host memory."""
        each = self._slots[0]
        here = each.whole.nbytes + each.shard.nbytes
        return SLOTS * here, SLOTS * (each.sent.nbytes + each.received.nbytes)

    def of(self, number: int) -> Slot:
        """Slot for a chunk."""
        return self._slots[number % SLOTS]

    def download(self, given: torch.Tensor | None, slot: Slot) -> Callable[[], None]:
        """Copy bytes to the host behind the current stream; the result waits for the copy.

        Without bytes it only waits for the current stream, whose earlier work has read the slot.
        """
        if not self._on_gpu:
            if given is not None:
                slot.sent[: given.numel()].copy_(given)
            return _ready
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            if given is not None:
                slot.sent[: given.numel()].copy_(given, non_blocking=True)
            event = self._down.record_event()
        return lambda: event.synchronize()

    def upload(self, slot: Slot, source: torch.Tensor, length: int) -> torch.Tensor:
        """Copy host bytes to the slot's shard; the current stream waits for them."""
        target = slot.shard[:length]
        if not self._on_gpu:
            return target.copy_(source[:length])
        with torch.cuda.stream(self._up):
            target.copy_(source[:length], non_blocking=True)
            event = self._up.record_event()
        torch.cuda.current_stream(self.device).wait_event(event)
        return target

    def synchronize(self) -> None:
        """Wait for the copies on the host."""
        if self._on_gpu:
            self._down.synchronize()
            self._up.synchronize()


class Piece(NamedTuple):
    """A chunk in a call.

    Attributes:
        before: launches all work before the network; returns the bytes to copy to the host.
        call: call between hosts, from the slot's host memory.
        bytes: result length between hosts.
        in_place: the result is where the input was.
        after: launches all work after the network, on the result in the slot's shard.
    """

    before: Callable[[Slot], torch.Tensor | None]
    call: Callable[[Slot], HostCall]
    bytes: int
    in_place: bool
    after: Callable[[Slot, torch.Tensor], None]


def run(pieces: list[Piece], slots: Slots, network: NetworkThread) -> None:
    """Run all chunks; returns when the last has left the network and all copies are launched.

    Launch order is the same on all ranks on a host. A slot is reused behind the last use on the
    current stream.
    """
    ends: list[Future[None]] = []

    def begin(number: int) -> None:
        slot, piece = slots.of(number), pieces[number]
        ready = slots.download(piece.before(slot), slot)
        ends.append(network.submit(ready, piece.call(slot)))

    for number in range(min(SLOTS, len(pieces))):
        begin(number)
    for number, piece in enumerate(pieces):
        ends[number].result()
        slot = slots.of(number)
        source = slot.sent if piece.in_place else slot.received
        piece.after(slot, slots.upload(slot, source, piece.bytes))
        if number + SLOTS < len(pieces):
            begin(number + SLOTS)


def _ready() -> None:
    """Wait for a copy that has already ended."""
