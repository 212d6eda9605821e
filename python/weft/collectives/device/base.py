"""Setup, launches and closing for device collectives, below `weft.cuda.Collectives`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypedDict

import torch

from weft.base.errors import ClosedError, ConfigurationError, ShapeError
from weft.base.timeout import seconds
from weft.collectives.device.checks import (
    REDUCTIONS,
    address,
    check_root,
    fits,
    refuse_op,
    refuse_overlap,
    rows_of,
)
from weft.gpu import streams
from weft.gpu.errors import ON_DEVICES
from weft.gpu.memory import allocator
from weft.gpu.order import ChannelOrder
from weft.gpu.streams import is_capturing
from weft.gpu.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weft._native import DeviceCollectives
    from weft.gpu.streams import Event

__all__ = ["Algorithm", "CallOptions", "CollectiveBase", "CopyOptions", "written"]

#: Data transport in a call: packets, chunks with flags, or straight between tensors.
Algorithm: TypeAlias = Literal["one_shot", "two_shot", "direct"]


class CallOptions(TypedDict, total=False):
    """Options for every `Collectives` call; the first two are equal on all ranks.

    Attributes:
        algorithm: "one_shot", "two_shot" or, for symmetric tensors, "direct"; by default the
            fastest one for the size.
        num_sms: maximum SMs for this call, at most the constructor's limit.
        previous_event: event to wait for before the call.
    """

    algorithm: Algorithm | None
    num_sms: int | None
    previous_event: Event | torch.cuda.Event | None


class CopyOptions(CallOptions, total=False):
    """Options for calls that copy engines can make: all but the event are equal on all ranks.

    Attributes:
        copy_engine: True: copy engines move the bytes, and the output is symmetric; False: kernels
            do; None: the constructor's choice. True excludes `algorithm`.
    """

    copy_engine: bool | None


class CollectiveBase:
    """A rank's native object, device, stream order, and closing."""

    def _begin(
        self, native: DeviceCollectives, place: torch.device, ranks: tuple[int, int], watchdog: bool
    ) -> None:
        self._native = native
        #: This rank, and the rank count; a local group has no communicator.
        self.rank, self.world_size = ranks
        #: Tensor device: the CPU for a twin.
        self.device = place
        # Among the ranks that a local group has on this device: see `communication_stream`.
        self._place = 0
        self._empty = allocator(place)
        self._on_gpu = place.type == "cuda"
        self._order = ChannelOrder(is_capturing)
        #: Stream handle for the last eager call.
        self._last: int | None = None
        if self._on_gpu:
            self._current = partial(torch._C._cuda_getCurrentRawStream, place.index)
        self._closed = False
        ON_DEVICES.add(self)
        self._watchdog = Watchdog(self) if watchdog else None

    @property
    def num_sms(self) -> int:
        """Maximum SMs per call."""
        return self._native.blocks

    @property
    def memory_bytes(self) -> int:
        """Device memory on this rank, in bytes."""
        return self._native.nbytes

    def prepare(self, op: str, dtype: torch.dtype) -> None:
        """Compile and load a reduction's kernels now, rather than at the first call.

        Compilation takes a few seconds, once for each user and GPU architecture;
        `compile_collectives` compiles ahead of time, without a GPU. If ranks share a context, the
        first call may wait for running kernels: prepare beforehand. Calls without arithmetic are
        always prepared.

        Args:
            op: as in `all_reduce`.
            dtype: tensor dtype.
        """
        self._open()
        element, reduction, _ = REDUCTIONS.get((op, dtype)) or refuse_op(op, dtype)
        self._native.prepare(reduction, element)

    def check(self) -> None:
        """Raise the error that the device recorded.

        Raises:
            WaitTimeoutError: a wait on the device timed out; it names the rank that did not come.
            PeerLostError, GroupPoisonedError: the group has ended.
        """
        self._open()
        if self._watchdog is not None:
            self._watchdog.raise_noticed()
        self._native.check()

    def close(self, *, timeout: float = 30.0) -> None:
        """Free all memory; every rank makes this call. A second call has no effect.

        Kernels in flight end first. Every later call raises `ClosedError`. Kernels in a graph that
        is replayed afterwards fill their outputs with 0xFF bytes; a graph with copy engine calls
        must not be replayed.

        Raises:
            WaitTimeoutError: if the other ranks do not come. The object is then closed all the
                same, but its memory stays until the communicator is closed: peers may be writing to
                it.
        """
        if not self._closed:
            limit = seconds(timeout)
            self._end()
            self._native.close(limit)

    def _abandon(self) -> None:
        """Close on this rank only."""
        if not self._closed:
            self._end()
            self._native.abandon()

    def _end(self) -> None:
        self._closed = True
        ON_DEVICES.discard(self)
        if self._watchdog is not None:
            self._watchdog.stop()

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the collectives were closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The other ranks may not have raised: a wait for them would time out.
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _stream(self) -> int:
        """The current stream, behind the last call."""
        self._open()
        if not self._on_gpu:
            return 0
        handle: int = self._current()
        here = torch._C._cuda_getDevice() == self.device.index
        if here and handle == self._last and not torch._C._cuda_isCurrentStreamCapturing():
            return handle
        stream = torch.cuda.current_stream(self.device)
        capturing = is_capturing(stream)
        self._order.follow(stream, capturing)
        if not capturing:
            self._last = handle
        return handle

    def _behind(
        self,
        call: Callable[[], Any],
        given: Iterable[torch.Tensor | None],
        previous: Event | torch.cuda.Event | None,
        finish: bool,
    ) -> Any:
        """Make a call after an event; returns the result, and an event if on a separate stream."""
        result, event = streams.ordered(
            (self.device, self._place),
            call,
            given,
            lambda made: () if made is None else (made,),
            previous,
            finish,
        )
        return result if event is None else (result, event)

    def _out(self, out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Address of an output, if it fits."""
        into = address(out, "out", self.device)
        fits(out, "out", shape, dtype)
        return into

    def _like(self, tensor: torch.Tensor, begin: int, out: torch.Tensor) -> int:
        """Address of an output like `tensor`, which it may be itself."""
        into = self._out(out, tensor.shape, tensor.dtype)
        if abs(into - begin) < tensor.nbytes and into != begin:
            refuse_overlap("the input itself")
        return into

    def _is_root(self, root: int, out: torch.Tensor | None) -> bool:
        """True on the root, the only rank that may pass `out`."""
        check_root(root, self.world_size)
        if root == self.rank:
            return True
        if out is not None:
            raise ConfigurationError(
                f"out is given on rank {self.rank}: the root, rank {root}, is the only one with a "
                "result"
            )
        return False

    def _part(
        self, tensor: torch.Tensor, begin: int, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, int, int]:
        """Output shaped like a part of `tensor`, address and element count."""
        rows, *rest = rows_of(tensor)
        each, over = divmod(rows, self.world_size)
        if over:
            raise ShapeError(
                f"tensor has {rows} rows: expected a multiple of {self.world_size} ranks; pad it"
            )
        count = tensor.numel() // self.world_size
        if out is None:
            return (*self._new((each, *rest), tensor.dtype), count)
        into, size = self._out(out, (each, *rest), tensor.dtype), out.nbytes
        end = begin + self.world_size * size
        if begin < into + size and into < end and into != begin + self.rank * size:
            refuse_overlap(f"rows {self.rank * each} to {(self.rank + 1) * each} of the input")
        return out, into, count

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        """A dense tensor and the address."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size or 1
        made = self._empty(shape, tuple(strides[::-1]), dtype)
        return made, made.data_ptr()


def written(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor after recording the change for autograd, which may have saved it."""
    if not tensor.is_inference():
        torch._C._increment_version((tensor,))
    return tensor
