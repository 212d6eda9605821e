"""Collectives for a process group on a GPU, as the C++ library calls them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from weft.base.errors import ConfigurationError
from weft.group.communicator import Communicator
from weft.group.options import made_options

if TYPE_CHECKING:
    from weft import _native
    from weft.cuda import Collectives, HierarchicalCollectives
    from weft.torch.device_memory import Pool

__all__ = ["DeviceCalls"]

#: Device for new groups. Tests set "twin": operations on CPU tensors run in the kernels' twin.
kind = "cuda"

#: Seconds between two polls on a stream.
PAUSE: Final = 0.001
#: Minimum time limit in seconds for the first operation, which compiles kernels.
SHORTEST_START: Final = 60.0


class DeviceCalls:
    """A group's launches on a GPU; the first operation makes `weft.cuda.Collectives`.

    Ranks on several hosts have `weft.cuda.HierarchicalCollectives`, whose calls wait on the host.

    The C++ library orders the streams, and has one call at a time.

    Args:
        communicator: the group's communicator; the C++ library closes it.
        timeout: seconds; longest wait of a kernel for a peer.
        num_sms: maximum SMs for an operation; by default as in `Collectives`.
        copy_engine: as in `Collectives`.
    """

    #: Seconds that a closing group leaves to operations on the GPU, before it ends the waits.
    end_grace = 30.0

    def __init__(
        self,
        communicator: _native.Communicator,
        timeout: float,
        num_sms: int | None = None,
        copy_engine: bool = False,
    ) -> None:
        self._communicator, self._timeout = communicator, timeout
        self._num_sms, self._copy_engine = num_sms, copy_engine
        self._process = os.getpid()
        #: True if CPU tensors are served, for tests.
        self.is_twin = kind == "twin"
        self._collectives: Collectives | HierarchicalCollectives | None = None
        self._run: Any = None
        self._transfer: Any = None
        self._stream: Any = None
        #: Stream for asynchronous operations; `None` on a twin.
        self._own: torch.cuda.Stream | None = None
        self._pool: Pool | None = None

    def start(self, index: int) -> tuple[int, int, int] | None:
        """Make the collectives for a GPU; every rank makes this call.

        Returns:
            Number, device and device kind of the stream for asynchronous operations; `None` on a
            twin.
        """
        if not self.is_twin and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "the first operation of a process group on its GPU allocates memory, which a "
                "capture forbids; run one operation before the capture"
            )
        # Not imported at the top, since groups on the CPU import this module too.
        from weft.cuda import Collectives, HierarchicalCollectives
        from weft.gpu.streams import communication_stream

        options = made_options(None, "caller", None, None, 0)
        communicator = Communicator(self._communicator, options)
        device = "twin" if self.is_twin else f"cuda:{index}"
        timeout = max(self._timeout, SHORTEST_START)
        collectives: Collectives | HierarchicalCollectives
        if len(set(communicator.hosts)) > 1:
            from weft.torch.hosts import AddressCalls

            if self._copy_engine:
                raise ConfigurationError(
                    "Options(copy_engine=True) of a group on several hosts: expected one host; "
                    "omit it"
                )
            collectives = HierarchicalCollectives(
                communicator,
                device=device,
                num_sms=self._num_sms,
                skew_timeout=self._timeout,
                timeout=timeout,
            )
            calls = AddressCalls(collectives)
            self._run, self._transfer, self._stream = calls.run, calls.transfer, calls.stream
        else:
            collectives = Collectives(
                communicator,
                device=device,
                num_sms=self._num_sms,
                skew_timeout=self._timeout,
                timeout=timeout,
                copy_engine=self._copy_engine,
            )
            native = collectives._native
            self._run, self._transfer = native.run, native.run_transfers
            self._stream = collectives._stream
        self._collectives = collectives
        if self.is_twin:
            return None
        self._own = own = communication_stream(collectives.device)
        return own.stream_id, own.device_index, own.device_type

    def run(
        self,
        operation: str,
        given: int,
        into: int,
        element: str,
        count: int,
        root: int,
        reduction: str | None,
        average: bool,
        sent: list[int] | None,
        received: list[int] | None,
    ) -> None:
        """Put a call on the current stream; arguments are the same as in the native module."""
        stream = self._stream()
        self._run(
            stream,
            operation,
            input=given,
            output=into,
            element=element,
            count=count,
            root=root,
            reduction=reduction,
            average=average,
            sent=sent,
            received=received,
        )
        self._record(stream, (given, into))

    def transfer(self, batch: list[tuple[int, bool, int, int]]) -> None:
        """Put messages on the current stream; `batch` is the same as in the native module."""
        from weft.collectives.device.transfers import check_apart

        check_apart(batch)
        stream = self._stream()
        self._transfer(stream, batch)
        self._record(stream, tuple(address for _, _, address, _ in batch))

    def _record(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Keep memory for a call's tensors on the stream for asynchronous operations."""
        # Memory from a capture stays with the graph.
        pool, own = self._pool, self._own
        if pool is None or own is None or stream != own.cuda_stream or self.is_capturing():
            return
        pool.record(addresses, own)

    def allocate(self, length: int) -> torch.Tensor | None:
        """A tensor of `length` bytes in symmetric memory, uninitialised; every rank calls this.

        Returns:
            `None` if a rank has no room, in a capture, whose graph needs the memory for longer, and
            on several hosts.
        """
        from weft.cuda import Collectives

        assert self._collectives is not None, "the C++ library has called `start`"
        if self.is_capturing() or not isinstance(self._collectives, Collectives):
            return None
        if self._pool is None:
            from weft.torch.device_memory import Pool

            self._pool = Pool(self._collectives, self._timeout)
        return self._pool.take(length)

    def is_capturing(self) -> bool:
        """True if the current stream is being captured."""
        return not self.is_twin and torch.cuda.is_current_stream_capturing()

    def check(self) -> None:
        """Raise the error that the GPU recorded."""
        if self._collectives is not None:
            self._collectives.check()

    def settle(self) -> bool:
        """Wait for all calls for at most `end_grace`; false if some have not ended."""
        collectives = self._collectives
        if collectives is None or self.is_twin or os.getpid() != self._process:
            return True
        stream = collectives._order._eager
        until = time.monotonic() + self.end_grace
        while stream is not None and not stream.query():
            if time.monotonic() > until:
                return False
            time.sleep(PAUSE)
        return True

    def end(self) -> None:
        """Free all GPU memory on this rank; a second call has no effect."""
        collectives, self._collectives = self._collectives, None
        self._run = self._transfer = self._stream = self._pool = None
        if collectives is not None and os.getpid() == self._process:
            collectives._abandon()
