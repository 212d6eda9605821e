"""Setup, errors and closing for `weft.cuda.HierarchicalCollectives`."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from typing import TYPE_CHECKING, Final, Literal, NoReturn, Self

import torch

from weft.base.arguments import expect
from weft.base.errors import (
    ClosedError,
    ConfigurationError,
    ShapeError,
    WeftError,
)
from weft.base.timeout import seconds
from weft.collectives.device.checks import REDUCTIONS, refuse_op
from weft.collectives.device.collectives import Collectives
from weft.collectives.host import ELEMENTS, HostCollectives
from weft.collectives.hosts import pipeline
from weft.collectives.hosts.hierarchy import Hierarchy, cause, renumbered
from weft.collectives.hosts.pipeline import NetworkError, NetworkThread, Piece, Slot, Slots
from weft.gpu.errors import ON_DEVICES
from weft.group.communicator import Communicator
from weft.group.group import one_line
from weft.group.sharing import check_equal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weft.gpu.order import ChannelOrder

__all__ = ["HierarchicalBase"]

#: Chunk size in bytes.
PIECE_BYTES: Final = 8 << 20
#: Minimum chunk size per rank in bytes, so that all ranks' parts are aligned.
LEAST_BYTES: Final = 256
#: Parts of a chunk are multiples of this many bytes, except in the last chunk.
PART_BYTES: Final = 128


class HierarchicalBase:
    """A rank's two groups, chunks in flight, errors on both levels, and closing."""

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
        #: This rank, and the rank count.
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.communicator = communicator
        self._hierarchy = Hierarchy.of(communicator.hosts, self.rank)
        least = LEAST_BYTES * self.world_size
        if piece_bytes < least:
            raise ConfigurationError(
                f"piece_bytes {piece_bytes}: expected at least {least} for {self.world_size} "
                "ranks; pass more"
            )
        settings = {"piece_bytes": piece_bytes, "skew_timeout": limit}
        check_equal(communicator, settings, timeout)

        def left() -> float:
            return max(until - time.monotonic(), 0.0)

        with contextlib.ExitStack() as made:
            within = communicator.split(self._hierarchy.within, timeout=left())
            assert within is not None, "this rank is in its list"
            made.callback(within.close)
            across = communicator.split(self._hierarchy.across, timeout=left())
            assert across is not None, "this rank is in its list"
            made.callback(across.close)
            within.is_internal = across.is_internal = True
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
            #: Tensor device: the CPU for a twin.
            self.device = self._local.device
            self._on_gpu = self.device.type == "cuda"
            self._piece_bytes = piece_bytes
            self._slots = Slots(self.device, piece_bytes, within.world_size)
            self._network = HostCollectives(across, left())
            made.pop_all()
        # `check` on this object numbers ranks as the communicator does.
        ON_DEVICES.discard(self._local)
        ON_DEVICES.add(self)
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
        # Closed with the communicator, as all-to-alls are.
        communicator._all_to_alls.add(self)

    @property
    def num_hosts(self) -> int:
        """Host count."""
        return len(self._hierarchy.hosts)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks on this host."""
        return self._hierarchy.within

    @property
    def memory_bytes(self) -> int:
        """Device memory on this rank, in bytes."""
        return self._local.memory_bytes + self._slots.nbytes[0]

    @property
    def host_memory_bytes(self) -> int:
        """Pinned host memory in bytes; ordinary memory for a twin."""
        return self._slots.nbytes[1]

    def prepare(self, op: str, dtype: torch.dtype) -> None:
        """Compile and load a reduction's kernels now, as in `Collectives`.

        Args:
            op: as in `all_reduce`.
            dtype: tensor dtype.
        """
        self._open()
        reduction = self._reduction(op, dtype)[1]
        self._local.prepare(reduction, self._wide(reduction, dtype))

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
            WaitTimeoutError: if the other ranks do not come; the object is then closed all the
                same.
        """
        if self._closed or os.getpid() != self._process:
            return
        until, ranks = time.monotonic() + seconds(timeout), self._hierarchy.within
        try:
            self._local.close(timeout=timeout)
            ranks = self._hierarchy.across
            # Both ends have finished the last calls.
            self._across.barrier(timeout=max(until - time.monotonic(), 0.0))
        except WeftError as error:
            raise renumbered(error, ranks) from None
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Close on this rank only."""
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        ON_DEVICES.discard(self)
        self._local._abandon()
        self._network.end_waits()
        # Waits on the GPU have ended with the host collectives.
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
        """Streams that the last kernels used."""
        return self._local._order

    def _enter(self) -> None:
        """Raise if calls are impossible."""
        self._open()
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "collectives of several hosts in the capture of a CUDA graph: the host makes the "
                "calls between hosts; call them outside of the capture"
            )

    def _reduction(self, op: str, dtype: torch.dtype) -> tuple[str, str, bool]:
        """Element name, reduction name, and true if the sum is to be divided for an average."""
        element, reduction, average = REDUCTIONS.get((op, dtype)) or refuse_op(op, dtype)
        if element not in ELEMENTS:
            raise ShapeError(
                f"{op} of {element} between hosts: expected one of {', '.join(ELEMENTS)}; cast the "
                "tensor"
            )
        return element, reduction, average and dtype is not torch.bool

    @staticmethod
    def _wide(reduction: str, dtype: torch.dtype) -> torch.dtype:
        """Dtype for sums and products in transit: float32 for 16-bit floats, so they round once."""
        is_short = dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if is_short and reduction in ("sum", "product") else dtype

    def _cuts(self, count: int, width: int) -> Iterator[tuple[int, int]]:
        """Chunk ends in a vector; each chunk but the last is divided evenly among local ranks."""
        step = self._piece_bytes // (PART_BYTES * self._local.world_size)
        return _ranges(count, step * PART_BYTES * self._local.world_size // width)

    def _columns(self, count: int, width: int) -> Iterator[tuple[int, int]]:
        """Chunk ends in the parts of all ranks."""
        step = self._piece_bytes // (PART_BYTES * self.world_size)
        return _ranges(count, step * PART_BYTES // width)

    def _padded(
        self, given: torch.Tensor, count: int, slot: Slot, dtype: torch.dtype
    ) -> torch.Tensor:
        """Vector with `count` elements in a dtype for each local rank."""
        total = count * self._local.world_size
        if given.numel() == total and given.dtype is dtype:
            return given
        whole = slot.whole[: total * dtype.itemsize].view(dtype)
        whole[: given.numel()].copy_(given)
        whole[given.numel() :].zero_()
        return whole

    def _gather(self, part: torch.Tensor, target: torch.Tensor, slot: Slot) -> None:
        """All-gather a host's parts; elements behind the target are dropped."""
        total = part.numel() * self._local.world_size
        if total == target.numel():
            self._local.all_gather(part, out=target)
            return
        whole = slot.whole[: total * part.itemsize].view(part.dtype)
        self._local.all_gather(part, out=whole)
        target.copy_(whole[: target.numel()])

    def _finished(self, part: torch.Tensor, dtype: torch.dtype, average: bool) -> torch.Tensor:
        """A result in the final dtype; for an average, the sum is divided before it is rounded."""
        if average and not dtype.is_floating_point:
            return part.copy_(torch.div(part, self.world_size, rounding_mode="trunc"))
        if part.dtype is dtype and not average:
            return part
        if average:
            # A divisor on the device: with a Python number torch multiplies by the inverse.
            divisor = torch.full((1,), self.world_size, dtype=part.dtype, device=self.device)
            part.copy_(part / divisor)
        result = part.to(dtype)
        # NaNs from the device, and from torch's conversions, have other bits.
        return result.masked_fill_(result.isnan(), math.nan)

    def _run(self, pieces: list[Piece], meet: bool = False) -> None:
        """Run a call's chunks; `meet`: the ranks on the host meet first.

        If a call's first step is between hosts, a rank could otherwise wait for a rank whose
        neighbours are late, and be named itself.
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
            # The other ranks wait until this call ends.
            with contextlib.suppress(WeftError):
                self._fail(WeftError(f"{type(error).__name__} in a call"), ())
            raise

    def _guard(self) -> None:
        """Raise if the whole group or this host's group has failed, for the network thread."""
        for group, ranks in ((self.communicator, None), (self._local, self._hierarchy.within)):
            try:
                group.check()
            except WeftError as error:
                raise NetworkError(error, ranks) from None

    def _fail(self, error: WeftError, ranks: tuple[int, ...] | None) -> NoReturn:
        """End the group at all ranks and raise an error; `ranks`: the ranks that it numbers."""
        if self._closed or isinstance(error, ClosedError):
            raise error
        with self._failing:
            if self._failure is None:
                self._failure = cause(error, ranks or (), self.communicator)
                text = one_line(self._failure)
                # The whole group first: the other ranks raise that error.
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
