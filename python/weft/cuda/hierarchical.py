"""Collectives between GPUs of several hosts: NVLink inside a host, the network between hosts.

Every rank of a host exchanges its part of a tensor with the ranks of equal number on the other
hosts::

    import weft.cuda

    with weft.init() as communicator:
        with weft.cuda.HierarchicalCollectives(communicator) as collectives:
            collectives.all_reduce(gradients)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from weft._host_collectives import HostCall
from weft.cuda.collective_base import written
from weft.cuda.collective_checks import address, check_root, fits, refuse_overlap, rows_of
from weft.cuda.hierarchical_base import HierarchicalBase
from weft.cuda.pipeline import Piece
from weft.errors import ShapeError

if TYPE_CHECKING:
    from weft.cuda.pipeline import Slot

__all__ = ["HierarchicalCollectives"]

#: Type that moves elements, by their bytes.
WORDS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.int64,
}


class HierarchicalCollectives(HierarchicalBase):
    """All-reduce, reduce-scatter, all-gather, broadcast and barrier of GPUs on several hosts.

    Hosts have equal numbers of ranks. A call is cut into pieces. A piece of an all-reduce is
    reduce-scattered between the GPUs of a host by `Collectives`; each rank copies its part to
    pinned memory, all-reduces it with the ranks of equal number on the other hosts, over the
    communicator's providers, and copies it back; an all-gather within the host ends the piece.
    While a piece is on the network, later ones are reduced within the host.

    *Host and stream.* Kernels are in order on torch's current stream, copies on streams of the
    object. A call returns once its last piece has left the network, with the last copy and kernel
    on their streams: so the host waits for the network, and for work before the call on the stream.
    Calls cannot be captured into a CUDA graph.

    All ranks make the same calls in the same order, with equal shapes, dtypes and options, from one
    thread at a time.

    *Tensors* are as of `Collectives`. Calls without arithmetic take any dtype, reductions bool,
    uint8, signed integers, float16, bfloat16, float32 and float64.

    *Reductions.* Contributions of a host are combined in the order of ranks, then the results of
    hosts in the order of their lowest ranks. So all ranks, runs and lengths of pieces give the same
    bits. Those of floating-point sums, products and averages may differ from `Collectives`, which
    adds in the order of all ranks: in 16-bit floats the result of a host is rounded, and each
    addition between hosts. "avg" is the rounded sum divided by the number of ranks, rounded again,
    of integers truncated.

    *Failures.* A wait that times out, a lost rank or another error ends the communicator's group at
    all ranks, so that their calls raise as well. Errors name ranks of the communicator.

    As a context manager it closes itself at the end of the block; if the block raises, on this rank
    alone.

    Args:
        communicator: what `weft.init()` returned.
        device: as of `Collectives`; "twin" for CPU tensors.
        piece_bytes: length of a piece, at least 256 for each rank, equal on all ranks. The memory
            of the object is proportional to it.
        num_sms: as of `Collectives`.
        memory: as of `Collectives`.
        skew_timeout: maximum number of seconds between the calls of two ranks. Between hosts a
            piece has twice this time and one second more, so that an absent rank is named by the
            ranks of its own host.
        timeout: maximum number of seconds to wait for the same construction on all ranks.

    Raises:
        ConfigurationError: if hosts have different numbers of ranks, or an argument is out of
            range.
        ConfigurationMismatchError: if `piece_bytes` or `skew_timeout` differ between ranks.
        RendezvousError, SizeError, AllocationError, ProviderError: as of `Communicator.split` and
            `Collectives`.
    """

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduction over all ranks, at all ranks; in place unless `out` is given.

        Args:
            tensor: contribution of this rank, of any shape.
            op: reduction, as of `Collectives`.
            out: tensor of the same shape and dtype for the result; may be `tensor` itself.

        Returns:
            `out`, or `tensor`.

        Raises:
            ShapeError: if a tensor does not fit, before any launch.
            ConfigurationError: if `op` does not apply to the dtype, or in a capture.
            WaitTimeoutError, GroupPoisonedError: and its kinds: a rank did not call, or was lost.
            ClosedError: after `close`.
        """
        self._enter()
        begin = address(tensor, "tensor", self.device)
        element, reduction, average = self._reduction(op, tensor.dtype)
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
            bytes = count * dtype.itemsize

            def before(slot: Slot) -> torch.Tensor:
                shard = slot.shard[:bytes]
                given = self._padded(source[begin:end], count, slot)
                local.reduce_scatter(given, reduction, out=shard.view(dtype))
                return shard

            def call(slot: Slot) -> HostCall:
                at = slot.sent.data_ptr()
                return HostCall("all_reduce", element, count, at, at, reduction)

            def after(slot: Slot, shard: torch.Tensor) -> None:
                part = shard.view(dtype)
                if average:
                    self._divide(part)
                self._gather(part, target[begin:end], slot)

            return Piece(before, call, bytes, True, after)

        self._run([piece(*cut) for cut in self._cuts(tensor.numel(), dtype.itemsize)])
        return written(result)

    def reduce_scatter(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Reduction over all ranks, part r of it at rank r.

        Args:
            tensor: `[ranks * m, ...]`.
            op: reduction, as of `Collectives`.
            out: `[m, ...]`, allocated if not given. In place: rows `[rank * m, (rank + 1) * m)` of
                `tensor`.

        Returns:
            `[m, ...]`.

        Raises:
            ShapeError, ConfigurationError, WaitTimeoutError, ClosedError: as of `all_reduce`.
        """
        self._enter()
        begin, dtype = address(tensor, "tensor", self.device), tensor.dtype
        element, reduction, average = self._reduction(op, dtype)
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
            columns, bytes = end - begin, (end - begin) * dtype.itemsize

            def before(slot: Slot) -> torch.Tensor:
                ordered = slot.whole[: self.world_size * bytes].view(dtype)
                torch.index_select(
                    source[:, begin:end], 0, self._by_local, out=ordered.view(-1, columns)
                )
                shard = slot.shard[: hosts * bytes]
                local.reduce_scatter(ordered, reduction, out=shard.view(dtype))
                return shard

            def call(slot: Slot) -> HostCall:
                at, into = slot.sent.data_ptr(), slot.received.data_ptr()
                return HostCall("reduce_scatter", element, hosts * columns, at, into, reduction)

            def after(slot: Slot, shard: torch.Tensor) -> None:
                part = shard.view(dtype)
                if average:
                    self._divide(part)
                target[begin:end].copy_(part)

            return Piece(before, call, bytes, False, after)

        self._run([piece(*cut) for cut in self._columns(count, dtype.itemsize)])
        return written(out)

    def all_gather(self, tensor: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Tensors of all ranks, by rank, at all ranks.

        Args:
            tensor: `[m, ...]` of any dtype.
            out: `[ranks * m, ...]`, allocated if not given. In place: `tensor` is its rows
                `[rank * m, (rank + 1) * m)`.

        Returns:
            `[ranks * m, ...]`.

        Raises:
            ShapeError, ConfigurationError, WaitTimeoutError, ClosedError: as of `all_reduce`.
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
        """The tensor of `root`, at all ranks, in place.

        Each rank of the root's host sends a part to the other hosts.

        Args:
            tensor: of any shape and dtype.
            root: rank of the source.

        Returns:
            `tensor`.

        Raises:
            UnknownError: if there is no rank `root`.
            ShapeError, ConfigurationError, WaitTimeoutError, ClosedError: as of `all_reduce`.
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
                    given = self._padded(vector[begin:end], count, slot)
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
        """Work behind it on the stream begins once that before it has ended at all ranks.

        The host waits for the work before it.

        Raises:
            ConfigurationError, WaitTimeoutError, ClosedError: as of `all_reduce`.
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
    """Elements of a dense tensor as integers of at most 8 bytes, in one dimension."""
    word = WORDS[tensor.itemsize]
    if not tensor.numel():
        # Its strides may forbid a view.
        return torch.empty(0, dtype=word, device=tensor.device)
    return tensor.detach().view(-1).view(word)
