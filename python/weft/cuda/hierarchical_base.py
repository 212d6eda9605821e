"""Life of collectives of several hosts, below the calls of `weft.cuda.HierarchicalCollectives`."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self

import torch

from weft._arguments import expect
from weft._group import one_line
from weft._host_collectives import ELEMENTS, HostCollectives
from weft._timeout import seconds
from weft.communicator import Communicator
from weft.cuda import pipeline
from weft.cuda.collective_checks import REDUCTIONS, refuse_op
from weft.cuda.collectives import Collectives
from weft.cuda.hierarchy import Hierarchy, cause, renumbered
from weft.cuda.pipeline import NetworkError, NetworkThread, Piece, Slot, Slots
from weft.errors import (
    ClosedError,
    ConfigurationError,
    ConfigurationMismatchError,
    ShapeError,
    WeftError,
)
from weft.moe.device_errors import ON_DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.cuda.order import ChannelOrder

__all__ = ["HierarchicalBase"]

#: Bytes of a piece.
PIECE_BYTES: Final = 8 << 20
#: Least bytes of a piece for each rank, so that parts of all ranks are aligned.
LEAST_BYTES: Final = 256
#: Bytes of which the parts of a piece are a multiple, apart from the last piece's.
PART_BYTES: Final = 128


class HierarchicalBase:
    """The two groups of a rank, its pieces in flight, errors of both levels, and the end."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        device: object = "cuda",
        piece_bytes: int = PIECE_BYTES,
        num_sms: int | None = None,
        memory: Literal["fd", "ipc"] = "fd",
        skew_timeout: float = 30.0,
        timeout: float = 60.0,
    ) -> None:
        expect(communicator, Communicator, "communicator")
        limit, until = seconds(skew_timeout, "skew_timeout"), time.monotonic() + seconds(timeout)
        #: This rank, and the number of ranks.
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.communicator = communicator
        self._hierarchy = Hierarchy.of(communicator.hosts, self.rank)
        least = LEAST_BYTES * self.world_size
        if piece_bytes < least:
            raise ConfigurationError(
                f"piece_bytes {piece_bytes}: expected at least {least} for {self.world_size} "
                "ranks; pass more"
            )
        self._check_alike({"piece_bytes": piece_bytes, "skew_timeout": limit}, timeout)

        def left() -> float:
            return max(until - time.monotonic(), 0.0)

        with contextlib.ExitStack() as made:
            within = communicator.split(self._hierarchy.within, timeout=left())
            assert within is not None, "this rank is in its list"
            made.callback(within.close)
            across = communicator.split(self._hierarchy.across, timeout=left())
            assert across is not None, "this rank is in its list"
            made.callback(across.close)
            self._within, self._across = within, across
            self._local = Collectives(
                within,
                device=device,
                num_sms=num_sms,
                memory=memory,
                skew_timeout=limit,
                timeout=left(),
            )
            made.callback(self._local._abandon)
            #: Device of tensors: the CPU for a twin.
            self.device = self._local.device
            self._on_gpu = self.device.type == "cuda"
            self._piece_bytes = piece_bytes
            self._slots = Slots(self.device, piece_bytes, within.world_size)
            self._network = HostCollectives(across, left())
            made.pop_all()
        # `check` of this object numbers ranks as the communicator does.
        ON_DEVICES.discard(self._local)  # type: ignore[arg-type]
        ON_DEVICES.add(self)  # type: ignore[arg-type]
        alone = within.world_size == 1
        self._thread = NetworkThread(
            self._network, self._hierarchy.across, limit if alone else 2 * limit + 1, self._guard
        )
        self._by_local = torch.tensor(self._hierarchy.order, device=self.device)
        self._last: torch.cuda.Event | None = None
        self._failure: WeftError | None = None
        # A signal handler may check while its thread does.
        self._failing = threading.RLock()
        self._closed, self._process = False, os.getpid()
        # Closed with the communicator, as its all-to-alls are.
        communicator._all_to_alls.add(self)  # type: ignore[arg-type]

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self._hierarchy.hosts)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks of this host."""
        return self._hierarchy.within

    @property
    def memory_bytes(self) -> int:
        """Bytes of device memory of this rank."""
        return self._local.memory_bytes + self._slots.nbytes[0]

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of pinned memory of the host; ordinary memory of a twin."""
        return self._slots.nbytes[1]

    def prepare(self, op: str, dtype: torch.dtype) -> None:
        """Compile and load the kernels of a reduction now, as of `Collectives`.

        Args:
            op: as of `all_reduce`.
            dtype: of the tensors.
        """
        self._open()
        self._local.prepare(self._reduction(op, dtype)[1], dtype)

    def check(self) -> None:
        """Raise the error that ended the object, or that the device recorded.

        Raises:
            WaitTimeoutError: a wait on the device timed out; it names the rank that did not come.
            PeerLostError, GroupPoisonedError: the group has ended.
        """
        self._open()
        try:
            self._local.check()
        except WeftError as error:
            self._fail(error, self._hierarchy.within)
        self.communicator.check()

    def close(self, *, timeout: float = 30.0) -> None:
        """Free all memory; every rank makes this call.

        A second call has no effect, nor has one in a forked child. Every later call raises
        `ClosedError`.

        Raises:
            WaitTimeoutError: if the other ranks do not come; this is closed then all the same.
        """
        if self._closed or os.getpid() != self._process:
            return
        until, ranks = time.monotonic() + seconds(timeout), self._hierarchy.within
        try:
            self._local.close(timeout=timeout)
            ranks = self._hierarchy.across
            # The other ends of the last calls have ended as well.
            self._across.barrier(timeout=max(until - time.monotonic(), 0.0))
        except WeftError as error:
            raise renumbered(error, ranks) from None
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Close on this rank alone."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        ON_DEVICES.discard(self)  # type: ignore[arg-type]
        self._local._abandon()
        self._network.end_waits()
        # Waits on the GPU have ended with the collectives of the host.
        if self._thread.stop(10.0):
            self._slots.synchronize()
            self._network.close()
        self._within.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The other ranks may not have raised: a wait for them would time out.
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the collectives were closed")
        if self._failure is not None:
            self._raise(self._failure)

    @property
    def _order(self) -> ChannelOrder:
        """Streams of the last kernels."""
        return self._local._order

    def _enter(self) -> None:
        """Raise if calls are impossible."""
        self._open()
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "collectives of several hosts in the capture of a CUDA graph: the host makes the "
                "calls between hosts; call them outside of the capture"
            )

    def _check_alike(self, settings: dict[str, Any], timeout: float) -> None:
        """Raise on all ranks if settings differ."""
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        given = self.communicator.all_gather(text.encode(), timeout=timeout)
        for rank, other in enumerate(given):
            if other != given[0]:
                raise ConfigurationMismatchError(
                    f"rank 0 passed {given[0].decode()}, rank {rank} {other.decode()}: expected "
                    "equal values"
                )

    def _reduction(self, op: str, dtype: torch.dtype) -> tuple[str, str, bool]:
        """Names of element and reduction, and true for an average to be divided."""
        element, reduction, average = REDUCTIONS.get((op, dtype)) or refuse_op(op, dtype)
        if element not in ELEMENTS:
            raise ShapeError(
                f"{op} of {element} between hosts: expected one of {', '.join(ELEMENTS)}; cast the "
                "tensor"
            )
        return element, reduction, average and dtype is not torch.bool

    def _cuts(self, count: int, width: int) -> Iterator[tuple[int, int]]:
        """Ends of pieces of a vector; each but the last is divided evenly among local ranks."""
        step = self._piece_bytes // (PART_BYTES * self._local.world_size)
        return _ranges(count, step * PART_BYTES * self._local.world_size // width)

    def _columns(self, count: int, width: int) -> Iterator[tuple[int, int]]:
        """Ends of pieces of the parts of all ranks."""
        step = self._piece_bytes // (PART_BYTES * self.world_size)
        return _ranges(count, step * PART_BYTES // width)

    def _padded(self, given: torch.Tensor, count: int, slot: Slot) -> torch.Tensor:
        """A vector of `count` elements for each local rank."""
        total = count * self._local.world_size
        if given.numel() == total:
            return given
        whole = slot.whole[: total * given.itemsize].view(given.dtype)
        whole[: given.numel()].copy_(given)
        whole[given.numel() :].zero_()
        return whole

    def _gather(self, part: torch.Tensor, target: torch.Tensor, slot: Slot) -> None:
        """All-gather of the parts of a host; elements behind the target are dropped."""
        total = part.numel() * self._local.world_size
        if total == target.numel():
            self._local.all_gather(part, out=target)
            return
        whole = slot.whole[: total * part.itemsize].view(part.dtype)
        self._local.all_gather(part, out=whole)
        target.copy_(whole[: target.numel()])

    def _divide(self, part: torch.Tensor) -> None:
        """Quotient of a sum by the number of ranks, in place."""
        if not part.dtype.is_floating_point:
            part.copy_(torch.div(part, self.world_size, rounding_mode="trunc"))
            return
        # A divisor on the device: torch multiplies by the inverse of a number.
        wide = torch.float64 if part.dtype is torch.float64 else torch.float32
        divisor = torch.full((1,), self.world_size, dtype=wide, device=self.device)
        part.copy_(part.to(wide) / divisor)
        # NaN of the device, and of torch's conversions, have other bits.
        part.masked_fill_(part.isnan(), math.nan)

    def _run(self, pieces: list[Piece], meet: bool = False) -> None:
        """Make the pieces of a call; `meet`: the ranks of the host meet first.

        A call whose first step is between hosts would have a rank wait for one whose neighbours are
        late, and be named itself.
        """
        if not pieces:
            return
        guard = torch.cuda.device(self.device) if self._on_gpu else contextlib.nullcontext()
        try:
            with guard:
                if self._last is not None:
                    torch.cuda.current_stream(self.device).wait_event(self._last)
                if meet:
                    self._local.barrier()
                pipeline.run(pieces, self._slots, self._thread)
                if self._on_gpu:
                    self._last = torch.cuda.current_stream(self.device).record_event()
        except NetworkError as failure:
            self._fail(failure.error, failure.ranks)
        except WeftError as error:
            self._fail(error, self._hierarchy.within)
        except BaseException as error:
            # The other ranks wait for the rest of this call.
            with contextlib.suppress(WeftError):
                self._fail(WeftError(f"{type(error).__name__} in a call"), ())
            raise

    def _guard(self) -> None:
        """Raise if the whole group or that of this host has failed, for the network's thread."""
        for group, ranks in ((self.communicator, None), (self._local, self._hierarchy.within)):
            try:
                group.check()
            except WeftError as error:
                raise NetworkError(error, ranks) from None

    def _fail(self, error: WeftError, ranks: tuple[int, ...] | None) -> NoReturn:
        """End the group at all ranks and raise an error; `ranks`: those that it numbers."""
        if self._closed or isinstance(error, ClosedError):
            raise error
        with self._failing:
            if self._failure is None:
                self._failure = cause(error, ranks or (), self.communicator)
                text = one_line(self._failure)
                # The whole group first: its error is the one that other ranks raise.
                for group in (self.communicator, self._within, self._across):
                    with contextlib.suppress(WeftError):
                        group.poison(text)
        self._raise(self._failure)

    def _raise(self, failure: WeftError) -> NoReturn:
        again = type(failure)(str(failure))
        again.rank, again.missing = failure.rank, failure.missing
        raise again from None


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + step, count)) for begin in range(0, count, step))
