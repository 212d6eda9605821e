"""Collectives between GPUs of several hosts: NVLink inside a host, the network between hosts.

Every rank on a host exchanges one part of a tensor with the ranks that have the same local number
on the other hosts::

    import weft.cuda

    with weft.init() as communicator:
        with weft.cuda.HierarchicalCollectives(communicator) as collectives:
            collectives.all_reduce(gradients)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from weft.base.errors import ShapeError
from weft.collectives.device.base import written
from weft.collectives.device.checks import address, check_root, fits, refuse_overlap, rows_of
from weft.collectives.host import HostCall
from weft.collectives.hosts.base import HierarchicalBase
from weft.collectives.hosts.pipeline import Piece

if TYPE_CHECKING:
    from weft.collectives.hosts.pipeline import Slot

__all__ = ["HierarchicalCollectives"]

#: Type that moves elements, by element bytes.
WORDS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.int64,
}


class HierarchicalCollectives(HierarchicalBase):
    """All-reduce, reduce-scatter, all-gather, broadcast and barrier for GPUs on several hosts.

    Hosts have equal rank counts. A call is cut into chunks. For an all-reduce, `Collectives`
    reduce-scatters a chunk between the host's GPUs; each rank copies one part to pinned memory,
    all-reduces it over the communicator's providers with the ranks that have the same local number
    on the other hosts, and copies it back; an all-gather within the host ends the chunk. While a
    chunk is on the network, later ones are reduced within the host.

    *Host and stream.* Kernels are in order on torch's current stream, copies on the object's own
    streams. A call returns once the last chunk has left the network, with the last copy and kernel
    enqueued: so the host waits for the network, and for earlier work on the stream. Calls cannot be
    captured into a CUDA graph.

    All ranks make the same calls in the same order, with equal shapes, dtypes and options, from one
    thread at a time.

    *Tensors* are as in `Collectives`. Calls without arithmetic take any dtype, reductions bool,
    uint8, signed integers, float16, bfloat16, float32 and float64.

    *Reductions.* A host's contributions are combined in rank order, then the host results, with
    hosts ordered by lowest rank. So all ranks, runs and chunk sizes give the same bits. For
    floating-point sums, products and averages, the bits may differ from `Collectives`, which adds
    in global rank order. Sums, products and averages of 16-bit floats travel as float32, in twice
    the bytes, and are rounded once, after the division; an integer "avg" is truncated.

    *Failures.* A wait that times out, a lost rank or another error ends the communicator's group at
    all ranks, so that all calls raise. Errors name communicator ranks.

    As a context manager it closes itself at the end of the block; if the block raises, it closes
    only on this rank.

    Args:
        communicator: from `weft.init()`.
        device: as in `Collectives`; "twin" for CPU tensors.
        piece_bytes: chunk size, at least 256 for each rank, equal on all ranks. The object's memory
            is proportional to it.
        num_sms: as in `Collectives`.
        memory: as in `Collectives`.
        skew_timeout: maximum seconds between two ranks' calls. Between hosts a chunk has one second
            more than twice this time, so that an absent rank is named by the ranks on its own host.
        timeout: maximum seconds to wait for all ranks to construct theirs.

    Raises:
        ConfigurationError: if hosts have different rank counts, or an argument is out of range.
        ConfigurationMismatchError: if `piece_bytes` or `skew_timeout` differ between ranks.
        RendezvousError, SizeError, AllocationError, ProviderError: as in `Communicator.split` and
            `Collectives`.
    """

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduction over all ranks, at all ranks; in place unless `out` is given.

        Args:
            tensor: this rank's contribution, in any shape.
            op: reduction, as in `Collectives`, for example "avg".
            out: result tensor with the same shape and dtype; may be `tensor` itself.

        Returns:
            `out`, or `tensor`.

        Raises:
            ShapeError: if a tensor does not fit, before any launch.
            ConfigurationError: if `op` does not apply to the dtype, or in a capture.
            WaitTimeoutError, GroupPoisonedError: or a subclass: a rank did not call, or was lost.
            ClosedError: after `close`.
        """
        self._enter()
        begin = address(tensor, "tensor", self.device)
        _, reduction, average = self._reduction(op, tensor.dtype)
        wide = self._wide(reduction, tensor.dtype)
        element = self._reduction(op, wide)[0]
        result = tensor
        if out is not None and out is not tensor:
            into = address(out, "out", self.device)
            fits(out, "out", tensor.shape, tensor.dtype)
            if abs(into - begin) < tensor.nbytes and into != begin:
                refuse_overlap("the input itself")
            result = out
        source, target = tensor.detach().reshape(-1), result.detach().reshape(-1)
        local, dtype = self._local, tensor.dtype

        def piece(begin: int, end: int) -> Piece:
            count = -(-(end - begin) // local.world_size)
            bytes = count * wide.itemsize

            def before(slot: Slot) -> torch.Tensor:
                shard = slot.shard[:bytes]
                given = self._padded(source[begin:end], count, slot, wide)
                local.reduce_scatter(given, reduction, out=shard.view(wide))
                return shard

            def call(slot: Slot) -> HostCall:
                at = slot.sent.data_ptr()
                return HostCall("all_reduce", element, count, at, at, reduction)

            def after(slot: Slot, shard: torch.Tensor) -> None:
                part = self._finished(shard.view(wide), dtype, average)
                self._gather(part, target[begin:end], slot)

            return Piece(before, call, bytes, True, after)

        self._run([piece(*cut) for cut in self._cuts(tensor.numel(), wide.itemsize)])
        return written(result)

    def reduce_scatter(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduction over all ranks, with part r at rank r.

        Args:
            tensor: `[ranks * m, ...]`.
            op: reduction, as in `Collectives`.
            out: `[m, ...]`, allocated if not given. In place: rows `[rank * m, (rank + 1) * m)` in
                `tensor`.

        Returns:
            `[m, ...]`.

        Raises:
            ShapeError, ConfigurationError, WaitTimeoutError, ClosedError: as in `all_reduce`.
        """
        self._enter()
        begin, dtype = address(tensor, "tensor", self.device), tensor.dtype
        _, reduction, average = self._reduction(op, dtype)
        wide = self._wide(reduction, dtype)
        element = self._reduction(op, wide)[0]
        rows, *rest = rows_of(tensor)
        each, over = divmod(rows, self.world_size)
        if over:
            raise ShapeError(
                f"tensor has {rows} rows: expected a multiple of {self.world_size} ranks; pad it"
            )
        if out is None:
            out = torch.empty((each, *rest), dtype=dtype, device=self.device)
        else:
            into = address(out, "out", self.device)
            fits(out, "out", (each, *rest), dtype)
            own = begin + self.rank * out.nbytes
            if begin < into + out.nbytes and into < begin + tensor.nbytes and into != own:
                refuse_overlap(f"rows {self.rank * each} to {(self.rank + 1) * each} of the input")
        count = out.numel()
        source, target = tensor.detach().reshape(self.world_size, count), out.detach().reshape(-1)
        local, hosts = self._local, self.num_hosts

        def piece(begin: int, end: int) -> Piece:
            columns, bytes = end - begin, (end - begin) * wide.itemsize

            def before(slot: Slot) -> torch.Tensor:
                ordered = slot.whole[: self.world_size * bytes].view(wide)
                torch.index_select(
                    source[:, begin:end].to(wide), 0, self._by_local, out=ordered.view(-1, columns)
                )
                shard = slot.shard[: hosts * bytes]
                local.reduce_scatter(ordered, reduction, out=shard.view(wide))
                return shard

            def call(slot: Slot) -> HostCall:
                at, into = slot.sent.data_ptr(), slot.received.data_ptr()
                return HostCall("reduce_scatter", element, hosts * columns, at, into, reduction)

            def after(slot: Slot, shard: torch.Tensor) -> None:
                target[begin:end].copy_(self._finished(shard.view(wide), dtype, average))

            return Piece(before, call, bytes, False, after)

        self._run([piece(*cut) for cut in self._columns(count, wide.itemsize)])
        return written(out)

    def all_gather(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """All ranks' tensors, by rank, at all ranks.

        Args:
            tensor: `[m, ...]` with any dtype.
            out: `[ranks * m, ...]`, allocated if not given. In place: `tensor` is its rows
                `[rank * m, (rank + 1) * m)`.

        Returns:
            `[ranks * m, ...]`.

        Raises:
            ShapeError, ConfigurationError, WaitTimeoutError, ClosedError: as in `all_reduce`.
        """
        self._enter()
        begin = address(tensor, "tensor", self.device)
        rows, *rest = rows_of(tensor)
        shape = (self.world_size * rows, *rest)
        if out is None:
            out = torch.empty(shape, dtype=tensor.dtype, device=self.device)
        else:
            into = address(out, "out", self.device)
            fits(out, "out", shape, tensor.dtype)
            own = into + self.rank * tensor.nbytes
            if begin < into + out.nbytes and into < begin + tensor.nbytes and begin != own:
                refuse_overlap("the input is its rows of this rank")
        source = _words(tensor)
        count, width = source.numel(), source.itemsize
        target = _words(out).view(self.world_size, count)
        local, hosts = self._local, self.num_hosts

        def piece(begin: int, end: int) -> Piece:
            columns, bytes = end - begin, (end - begin) * width

            def before(slot: Slot) -> torch.Tensor:
                return source[begin:end].view(torch.uint8)

            def call(slot: Slot) -> HostCall:
                at, into = slot.sent.data_ptr(), slot.received.data_ptr()
                return HostCall("all_gather", "uint8", hosts * bytes, at, into)

            def after(slot: Slot, shard: torch.Tensor) -> None:
                gathered = slot.whole[: self.world_size * bytes]
                local.all_gather(shard, out=gathered)
                ordered = gathered.view(source.dtype).view(-1, columns)
                target[:, begin:end].index_copy_(0, self._by_local, ordered)

            return Piece(before, call, hosts * bytes, False, after)

        self._run([piece(*cut) for cut in self._columns(count, width)], meet=True)
        return written(out)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """The tensor from `root`, at all ranks, in place.

        Each rank on the root's host sends a part to the other hosts.

        Args:
            tensor: any shape and dtype.
            root: source rank.

        Returns:
            `tensor`.

        Raises:
            UnknownError: if there is no rank `root`.
            ShapeError, ConfigurationError, WaitTimeoutError, ClosedError: as in `all_reduce`.
        """
        self._enter()
        address(tensor, "tensor", self.device)
        check_root(root, self.world_size)
        host, first = self._hierarchy.place(root)
        vector, local = _words(tensor), self._local
        width = vector.itemsize

        def piece(begin: int, end: int) -> Piece:
            count = -(-(end - begin) // local.world_size)
            bytes = count * width

            def before(slot: Slot) -> torch.Tensor | None:
                if self._hierarchy.host != host:
                    return None
                given, shard = None, slot.shard[:bytes]
                if self.rank == root:
                    given = self._padded(vector[begin:end], count, slot, vector.dtype)
                local.scatter(given, first, out=shard.view(vector.dtype))
                return shard

            def call(slot: Slot) -> HostCall:
                at = slot.sent.data_ptr()
                return HostCall("broadcast", "uint8", bytes, at, at, root=host)

            def after(slot: Slot, shard: torch.Tensor) -> None:
                self._gather(shard.view(vector.dtype), vector[begin:end], slot)

            return Piece(before, call, bytes, True, after)

        self._run([piece(*cut) for cut in self._cuts(vector.numel(), width)], meet=True)
        return written(tensor)

    def barrier(self) -> None:
        """Later work on the stream begins once earlier work has ended at all ranks.

        The host waits for the earlier work.

        Raises:
            ConfigurationError, WaitTimeoutError, ClosedError: as in `all_reduce`.
        """
        self._enter()

        def before(slot: Slot) -> None:
            self._local.barrier()

        def call(slot: Slot) -> HostCall:
            at = slot.sent.data_ptr()
            return HostCall("all_reduce", "uint8", 1, at, at, "max")

        def after(slot: Slot, shard: torch.Tensor) -> None:
            """The stream is empty up to here on all ranks."""

        self._run([Piece(before, call, 1, True, after)])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements as integers with at most 8 bytes, in one dimension."""
    word = WORDS[tensor.itemsize]
    if not tensor.numel():
        # The strides may forbid a view.
        return torch.empty(0, dtype=word, device=tensor.device)
    return tensor.detach().view(-1).view(word)
