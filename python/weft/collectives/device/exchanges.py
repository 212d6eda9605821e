"""All-gather, all-to-all, broadcast, gather, scatter and barrier on a device."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Literal, Unpack, overload

from weft.base.errors import ConfigurationError, ShapeError
from weft.collectives.device.base import CollectiveBase, written
from weft.collectives.device.checks import (
    WORDS,
    address,
    check_root,
    refuse_overlap,
    row_splits,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weft.collectives.device.base import Algorithm, CallOptions, CopyOptions
    from weft.gpu.streams import Event

__all__ = ["Exchanges"]


class Exchanges(CollectiveBase):
    """Calls without arithmetic; `weft.cuda.Collectives` describes them."""

    @overload
    def all_gather(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[False] = False,
        **options: Unpack[CopyOptions],
    ) -> torch.Tensor: ...

    @overload
    def all_gather(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[True],
        **options: Unpack[CopyOptions],
    ) -> tuple[torch.Tensor, Event]: ...

    def all_gather(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
        num_sms: int | None = None,
        copy_engine: bool | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """All ranks' tensors, by rank, at all ranks.

        Args:
            tensor: `[m, ...]` with any dtype.
            out: `[ranks * m, ...]`, allocated if not given. In place: `tensor` is its rows
                `[rank * m, (rank + 1) * m)`.
            algorithm: as in `CallOptions`.
            num_sms: as in `CallOptions`.
            copy_engine: as in `CopyOptions`.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            `[ranks * m, ...]`.

        Raises:
            ShapeError, ConfigurationError, ClosedError: as in `all_reduce`.
        """
        if async_finish or previous_event is not None:
            call = partial(
                self.all_gather,
                tensor,
                out=out,
                algorithm=algorithm,
                num_sms=num_sms,
                copy_engine=copy_engine,
            )
            return self._behind(call, (tensor, out), previous_event, async_finish)
        begin = address(tensor, "tensor", self.device)
        result, into = self._whole(tensor, begin, out)
        element, each = WORDS[tensor.itemsize]
        self._native.run(
            self._stream(),
            "all_gather",
            input=begin,
            output=into,
            element=element,
            count=tensor.numel() * each,
            algorithm=algorithm,
            num_sms=num_sms,
            copy_engine=copy_engine,
        )
        return result if out is None else written(result)

    @overload
    def all_to_all(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        async_finish: Literal[False] = False,
        **options: Unpack[CopyOptions],
    ) -> torch.Tensor: ...

    @overload
    def all_to_all(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        async_finish: Literal[True],
        **options: Unpack[CopyOptions],
    ) -> tuple[torch.Tensor, Event]: ...

    def all_to_all(
        self,
        tensor: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        input_splits: Sequence[int] | None = None,
        output_splits: Sequence[int] | None = None,
        algorithm: Algorithm | None = None,
        num_sms: int | None = None,
        copy_engine: bool | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """Exchange rows: part d on rank s becomes part s on rank d.

        Args:
            tensor: `[rows, ...]` with any dtype; without splits, equal parts for all ranks.
            out: `[rows, ...]`, or `[sum(output_splits), ...]`; allocated if not given. It does not
                overlap `tensor`.
            input_splits: rows for each rank. Given on all ranks together with `output_splits`, or
                on none; such calls use "two_shot".
            output_splits: rows from each rank: `input_splits[rank]` on that rank.
            algorithm: as in `CallOptions`.
            num_sms: as in `CallOptions`.
            copy_engine: as in `CopyOptions`.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            Rows by source.

        Raises:
            ShapeError: also if splits do not add up to the row count, or if this rank's two splits
                for itself differ.
            ConfigurationError, ClosedError: as in `all_reduce`.
        """
        if async_finish or previous_event is not None:
            call = partial(
                self.all_to_all,
                tensor,
                out=out,
                input_splits=input_splits,
                output_splits=output_splits,
                algorithm=algorithm,
                num_sms=num_sms,
                copy_engine=copy_engine,
            )
            return self._behind(call, (tensor, out), previous_event, async_finish)
        begin = address(tensor, "tensor", self.device)
        shape, ranks = rows_of(tensor), self.world_size
        element, each = WORDS[tensor.itemsize]
        sent = received = None
        if input_splits is None and output_splits is None:
            if shape[0] % ranks:
                raise ShapeError(
                    f"tensor has {shape[0]} rows: expected a multiple of {ranks} ranks; pass "
                    "input_splits and output_splits on all ranks"
                )
            rows, count = shape[0], tensor.numel() // ranks * each
        else:
            sent, received = self._splits(input_splits, output_splits, shape[0])
            rows, count, row = sum(received), 0, prod(shape[1:]) * each
            sent = [part * row for part in sent]
            received = [part * row for part in received]
        if out is None:
            result, into = self._new((rows, *shape[1:]), tensor.dtype)
        else:
            into, result = self._out(out, (rows, *shape[1:]), tensor.dtype), out
            if begin < into + out.nbytes and into < begin + tensor.nbytes:
                refuse_overlap()
        self._native.run(
            self._stream(),
            "all_to_all",
            input=begin,
            output=into,
            element=element,
            count=count,
            algorithm=algorithm,
            num_sms=num_sms,
            copy_engine=copy_engine,
            sent=sent,
            received=received,
        )
        return result if out is None else written(out)

    @overload
    def broadcast(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        async_finish: Literal[False] = False,
        **options: Unpack[CopyOptions],
    ) -> torch.Tensor: ...

    @overload
    def broadcast(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        async_finish: Literal[True],
        **options: Unpack[CopyOptions],
    ) -> tuple[torch.Tensor, Event]: ...

    def broadcast(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        algorithm: Algorithm | None = None,
        num_sms: int | None = None,
        copy_engine: bool | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """Copy the root's tensor to the tensor on each rank.

        Args:
            tensor: any shape and dtype; read at `root`, written on the other ranks.
            root: source rank.
            algorithm: as in `CallOptions`.
            num_sms: as in `CallOptions`.
            copy_engine: as in `CopyOptions`.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            `tensor`.

        Raises:
            UnknownError: if there is no rank `root`.
            ShapeError, ConfigurationError, ClosedError: as in `all_reduce`.
        """
        if async_finish or previous_event is not None:
            call = partial(
                self.broadcast,
                tensor,
                root,
                algorithm=algorithm,
                num_sms=num_sms,
                copy_engine=copy_engine,
            )
            return self._behind(call, (tensor,), previous_event, async_finish)
        begin = address(tensor, "tensor", self.device)
        check_root(root, self.world_size)
        element, each = WORDS[tensor.itemsize]
        self._native.run(
            self._stream(),
            "broadcast",
            input=begin,
            output=begin,
            element=element,
            count=tensor.numel() * each,
            root=root,
            algorithm=algorithm,
            num_sms=num_sms,
            copy_engine=copy_engine,
        )
        return tensor if root == self.rank else written(tensor)

    @overload
    def gather(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> torch.Tensor | None: ...

    @overload
    def gather(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[True],
        **options: Unpack[CallOptions],
    ) -> tuple[torch.Tensor | None, Event]: ...

    def gather(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
        num_sms: int | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, Event] | None:
        """All ranks' tensors, by rank, at `root`.

        Args:
            tensor: `[m, ...]` with any dtype.
            root: result rank.
            out: only at `root`: `[ranks * m, ...]`, allocated if not given. In place: as in
                `all_gather`.
            algorithm: as in `CallOptions`.
            num_sms: as in `CallOptions`.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            `[ranks * m, ...]` at `root`, `None` on the other ranks.

        Raises:
            UnknownError: if there is no rank `root`.
            ShapeError, ConfigurationError, ClosedError: as in `all_reduce`.
        """
        if async_finish or previous_event is not None:
            call = partial(self.gather, tensor, root, out=out, algorithm=algorithm, num_sms=num_sms)
            return self._behind(call, (tensor, out), previous_event, async_finish)
        begin = into = address(tensor, "tensor", self.device)
        result = None
        rows_of(tensor)
        if self._is_root(root, out):
            result, into = self._whole(tensor, begin, out)
        element, each = WORDS[tensor.itemsize]
        self._native.run(
            self._stream(),
            "gather",
            input=begin,
            output=into,
            element=element,
            count=tensor.numel() * each,
            root=root,
            algorithm=algorithm,
            num_sms=num_sms,
        )
        return result if out is None else written(out)

    @overload
    def scatter(
        self,
        tensor: torch.Tensor | None,
        root: int = 0,
        *,
        out: torch.Tensor,
        async_finish: Literal[False] = False,
        **options: Unpack[CopyOptions],
    ) -> torch.Tensor: ...

    @overload
    def scatter(
        self,
        tensor: torch.Tensor | None,
        root: int = 0,
        *,
        out: torch.Tensor,
        async_finish: Literal[True],
        **options: Unpack[CopyOptions],
    ) -> tuple[torch.Tensor, Event]: ...

    def scatter(
        self,
        tensor: torch.Tensor | None,
        root: int = 0,
        *,
        out: torch.Tensor,
        algorithm: Algorithm | None = None,
        num_sms: int | None = None,
        copy_engine: bool | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """Part r from the root's tensor, at rank r.

        Args:
            tensor: only at `root`: `[ranks * m, ...]` with any dtype.
            root: source rank.
            out: `[m, ...]`. In place at `root`: as in `reduce_scatter`.
            algorithm: as in `CallOptions`.
            num_sms: as in `CallOptions`.
            copy_engine: as in `CopyOptions`.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            `out`.

        Raises:
            UnknownError: if there is no rank `root`.
            ShapeError, ConfigurationError, ClosedError: as in `all_reduce`.
        """
        if async_finish or previous_event is not None:
            call = partial(
                self.scatter,
                tensor,
                root,
                out=out,
                algorithm=algorithm,
                num_sms=num_sms,
                copy_engine=copy_engine,
            )
            return self._behind(call, (tensor, out), previous_event, async_finish)
        begin = into = address(out, "out", self.device)
        rows_of(out, "out")
        check_root(root, self.world_size)
        if (tensor is None) == (root == self.rank):
            raise ConfigurationError(
                f"tensor is {'not ' if tensor is None else ''}given on rank {self.rank}: the root, "
                f"rank {root}, passes it, and other ranks pass None"
            )
        if tensor is not None:
            begin = address(tensor, "tensor", self.device)
            self._part(tensor, begin, out)
        element, each = WORDS[out.itemsize]
        self._native.run(
            self._stream(),
            "scatter",
            input=begin,
            output=into,
            element=element,
            count=out.numel() * each,
            root=root,
            algorithm=algorithm,
            num_sms=num_sms,
            copy_engine=copy_engine,
        )
        return written(out)

    @overload
    def barrier(
        self,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[False] = False,
    ) -> None: ...

    @overload
    def barrier(
        self,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[True],
    ) -> Event: ...

    def barrier(
        self,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> Event | None:
        """Barrier between all ranks' streams; the host does not wait.

        Later work on this stream begins after earlier work on all ranks' streams has ended, with
        all writes to peer memory visible.

        Returns:
            With `async_finish`, an event for when it ends.
        """
        if async_finish or previous_event is not None:
            ended = self._behind(self.barrier, (), previous_event, async_finish)
            return None if ended is None else ended[1]
        self._native.run(self._stream(), "barrier", input=0, output=0, element="uint8", count=0)
        return None

    def _whole(
        self, tensor: torch.Tensor, begin: int, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, int]:
        """Output with all ranks' parts, shaped like `tensor`, and the address."""
        rows, *rest = rows_of(tensor)
        shape = (rows * self.world_size, *rest)
        if out is None:
            return self._new(shape, tensor.dtype)
        into, size = self._out(out, shape, tensor.dtype), tensor.nbytes
        end = into + self.world_size * size
        if begin < end and into < begin + size and begin != into + self.rank * size:
            refuse_overlap(
                f"rows {self.rank * rows} to {(self.rank + 1) * rows} of out as the input"
            )
        return out, into

    def _splits(
        self, sent: Sequence[int] | None, received: Sequence[int] | None, rows: int
    ) -> tuple[list[int], list[int]]:
        """Rows to and from each rank."""
        if sent is None or received is None:
            given, missing = ("output", "input") if sent is None else ("input", "output")
            raise ConfigurationError(
                f"{given}_splits without {missing}_splits: pass both on all ranks, or neither"
            )
        to = row_splits(sent, "input_splits", self.world_size, rows)
        come = row_splits(received, "output_splits", self.world_size, None)
        if to[self.rank] != come[self.rank]:
            raise ShapeError(
                f"rank {self.rank} sends itself {to[self.rank]} rows and expects "
                f"{come[self.rank]}: pass equal numbers in input_splits and output_splits"
            )
        return to, come
