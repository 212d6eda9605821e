"""All-reduce, reduce-scatter and reduce on a device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, Unpack, overload

from weft.collectives.device.base import CollectiveBase, written
from weft.collectives.device.checks import REDUCTIONS, address, refuse_op

if TYPE_CHECKING:
    import torch

    from weft.collectives.device.base import Algorithm, CallOptions
    from weft.gpu.streams import Event

__all__ = ["Reductions"]


class Reductions(CollectiveBase):
    """Calls with arithmetic; `weft.cuda.Collectives` describes them."""

    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> torch.Tensor: ...

    @overload
    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[True],
        **options: Unpack[CallOptions],
    ) -> tuple[torch.Tensor, Event]: ...

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
        num_sms: int | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """Reduction over all ranks, at all ranks; in place unless `out` is given.

        With `async_finish` this and every other call runs on the device's high-priority
        communication stream, behind the current stream or behind `previous_event`. It returns the
        result and an event for when it ends; a stream that reads the result has to wait for that
        event. Without `async_finish` the current stream waits for `previous_event` first.

        Args:
            tensor: this rank's contribution, in any shape.
            op: reduction, for example "avg".
            out: result tensor with the same shape and dtype; may be `tensor` itself.
            algorithm: as in `CallOptions`; "one_shot" has a byte limit.
            num_sms: as in `CallOptions`.
            previous_event: as in `CallOptions`.
            async_finish: run on the communication stream.

        Returns:
            `out`, or `tensor`.

        Raises:
            ShapeError: if a tensor does not fit, before any launch.
            ConfigurationError: if `op` does not apply to the dtype, or the vector exceeds the
                algorithm's limit.
            WaitTimeoutError, GroupPoisonedError: or a subclass, if an earlier call failed.
            ClosedError: after `close`.
        """
        if async_finish or previous_event is not None:
            call = partial(
                self.all_reduce, tensor, op, out=out, algorithm=algorithm, num_sms=num_sms
            )
            return self._behind(call, (tensor, out), previous_event, async_finish)
        begin = into = address(tensor, "tensor", self.device)
        dtype, result = tensor.dtype, tensor
        element, reduction, average = REDUCTIONS.get((op, dtype)) or refuse_op(op, dtype)
        if out is not None and out is not tensor:
            into, result = self._like(tensor, begin, out), out
        self._native.run(
            self._stream(),
            "all_reduce",
            input=begin,
            output=into,
            element=element,
            count=tensor.numel(),
            reduction=reduction,
            average=average,
            algorithm=algorithm,
            num_sms=num_sms,
        )
        return written(result)

    @overload
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> torch.Tensor: ...

    @overload
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[True],
        **options: Unpack[CallOptions],
    ) -> tuple[torch.Tensor, Event]: ...

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
        num_sms: int | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """Reduction over all ranks, with part r at rank r.

        Args:
            tensor: `[ranks * m, ...]`.
            op: reduction.
            out: `[m, ...]`, allocated if not given. In place: rows `[rank * m, (rank + 1) * m)` in
                `tensor`.
            algorithm: as in `CallOptions`.
            num_sms: as in `CallOptions`.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            `[m, ...]`.

        Raises:
            ShapeError, ConfigurationError, ClosedError: as in `all_reduce`.
        """
        if async_finish or previous_event is not None:
            call = partial(
                self.reduce_scatter, tensor, op, out=out, algorithm=algorithm, num_sms=num_sms
            )
            return self._behind(call, (tensor, out), previous_event, async_finish)
        begin, dtype = address(tensor, "tensor", self.device), tensor.dtype
        element, reduction, average = REDUCTIONS.get((op, dtype)) or refuse_op(op, dtype)
        result, into, count = self._part(tensor, begin, out)
        self._native.run(
            self._stream(),
            "reduce_scatter",
            input=begin,
            output=into,
            element=element,
            count=count,
            reduction=reduction,
            average=average,
            algorithm=algorithm,
            num_sms=num_sms,
        )
        return result if out is None else written(result)

    @overload
    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[False] = False,
        **options: Unpack[CallOptions],
    ) -> torch.Tensor | None: ...

    @overload
    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        async_finish: Literal[True],
        **options: Unpack[CallOptions],
    ) -> tuple[torch.Tensor | None, Event]: ...

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int = 0,
        op: str = "sum",
        *,
        out: torch.Tensor | None = None,
        algorithm: Algorithm | None = None,
        num_sms: int | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, Event] | None:
        """Reduction over all ranks, at `root`; in place there unless `out` is given.

        Args:
            tensor: this rank's contribution, in any shape; unchanged on other ranks.
            root: result rank.
            op: reduction.
            out: only at `root`: tensor with the same shape and dtype, or `tensor` itself.
            algorithm: as in `CallOptions`.
            num_sms: as in `CallOptions`.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            The result at `root`, `None` on the other ranks.

        Raises:
            UnknownError: if there is no rank `root`.
            ShapeError, ConfigurationError, ClosedError: as in `all_reduce`.
        """
        if async_finish or previous_event is not None:
            call = partial(
                self.reduce, tensor, root, op, out=out, algorithm=algorithm, num_sms=num_sms
            )
            return self._behind(call, (tensor, out), previous_event, async_finish)
        begin = into = address(tensor, "tensor", self.device)
        dtype, result = tensor.dtype, tensor
        element, reduction, average = REDUCTIONS.get((op, dtype)) or refuse_op(op, dtype)
        here = self._is_root(root, out)
        if out is not None and out is not tensor:
            into, result = self._like(tensor, begin, out), out
        self._native.run(
            self._stream(),
            "reduce",
            input=begin,
            output=into,
            element=element,
            count=tensor.numel(),
            root=root,
            reduction=reduction,
            average=average,
            algorithm=algorithm,
            num_sms=num_sms,
        )
        return written(result) if here else None
