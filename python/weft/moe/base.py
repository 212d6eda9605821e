"""Dispatch and combine over a communicator, in CPU memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Unpack

from weft import _native
from weft.base.arguments import expect, expect_flag, expect_text, shown
from weft.base.array import DTYPES, FLOAT8, SCALES, Array, array, dtype_name, is_torch
from weft.base.errors import ConfigurationError, ShapeError, StageError
from weft.base.float8 import scale_array, scale_count
from weft.base.timeout import seconds
from weft.group.communicator import Communicator
from weft.moe.differentiable import detached, gradient_module, refuse_out, tensor
from weft.moe.options import DeviceOnly
from weft.moe.rounds import Combine, Dispatch, Received
from weft.moe.routing import expert_ids, router_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike

    from weft.moe import gradient
    from weft.moe.placement import Placement

__all__ = ["AllToAll", "DeviceOptions"]


class DeviceOptions(DeviceOnly, total=False):
    """Arguments that only apply to a device all-to-all: see `weft.cuda.AllToAll`."""

    watchdog: bool
    placement: Placement | Sequence[Placement] | None


class AllToAll:
    """Dispatch and combine over a communicator, with separate channels.

    Any thread may call: no call waits for another thread's wait. Rounds begin in the same order on
    all ranks, and the calls of one round come in order.

    As a context manager it closes itself at the end of the block. If the block raises, it closes
    only on this rank, and the memory stays until the communicator is closed.

    Args:
        communicator: from `weft.init()`.
        experts: experts on all ranks together; rank r owns `r * experts // world_size` up to, but
            not including, `(r + 1) * experts // world_size`.
        top_k: expert ids per token.
        hidden: elements per token.
        max_tokens: maximum tokens that a rank sends in one round.
        dtype: token dtype: float32, bfloat16 or float16, or float8_e4m3fn or float8_e5m2, which
            have scales; as a name, a numpy or a torch dtype.
        block: elements that share a scale, in 8-bit dtypes.
        scale_dtype: scale dtype, in 8-bit dtypes: float32 or float8_e8m0fnu (powers of two).
        combine_dtype: expert output dtype; by default `dtype`, or bfloat16 if that is an 8-bit one.
        reply_dtype: reply dtype on the wire, to which each reply is rounded once; by default
            `combine_dtype`.
        output_dtype: combined result dtype; by default `dtype`, or bfloat16 if that has 8 bits.
        layout: "contiguous": received tokens are copied so that each expert's stand together;
            "indexed": they stay where they arrived, and each expert has a list of row numbers;
            "padded", on a device only: each expert has a block with `expert_capacity` rows;
            "dense", on a device only: each token once, with local expert ids and weights.
        pad_to: in the contiguous layout, each expert's group is padded with zero rows to a multiple
            of this number, for example 128.
        combine: "reduce": one reply per token and rank, summed there; "per_expert": one per token
            and expert, summed at the source in top-k order, which gives the same bits as a single
            process.
        weighting: "combine": combine multiplies by the router's weights; "expert": the experts did,
            as they must in the dense layout, where it is the default.
        private_rows: rows from each source that travel before all counts are known.
        max_receive_rows: maximum tokens that a rank receives in one round. The default is the worst
            case, `world_size * max_tokens`; with less, a round that needs more raises
            `CapacityError` on every rank.
        channels: rounds in flight, 1 to 4,096: dispatched and not yet released.
        max_bytes: refuse to allocate more than this.
        timeout: seconds to wait for all ranks to make the same call; finite, as every timeout.
        gradients: rounds with torch tensors are differentiable: see "Gradients" in docs/moe.md.
            This doubles the channels, for the backward pass.
        device: where tokens are. `None` or "cpu": in CPU memory. Anything else makes a
            `weft.cuda.AllToAll`, which takes `options`; this needs PyTorch.
        options: `DeviceOptions`.

    Raises:
        SizeError: before any allocation, if the memory exceeds a limit; names the excess.
        ConfigurationMismatchError: if the ranks' arguments differ.
    """

    #: All-to-alls for the backward pass, with `gradients=True`.
    _backward: gradient.Backward | None = None

    #: Class for a device, by device name; `weft.moe.all_to_all` sets it.
    _on_device: ClassVar[Callable[[object], type[AllToAll]]]

    def __new__(cls, *_: object, device: object = None, **__: object) -> Self:
        """The class for `device`, chosen as `pathlib.Path` does."""
        if cls is AllToAll and not _on_cpu(device):
            return object.__new__(AllToAll._on_device(device))  # type: ignore[return-value]
        return object.__new__(cls)

    def __init__(
        self,
        communicator: Communicator,
        *,
        experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: object = "float32",
        block: int = 128,
        scale_dtype: object = "float32",
        combine_dtype: object | None = None,
        reply_dtype: object | None = None,
        output_dtype: object | None = None,
        layout: Literal["contiguous", "indexed", "padded", "dense"] = "contiguous",
        pad_to: int = 1,
        combine: Literal["reduce", "per_expert"] = "reduce",
        weighting: Literal["combine", "expert"] = "combine",
        private_rows: int | None = None,
        max_receive_rows: int | None = None,
        channels: int = 2,
        max_bytes: int | None = None,
        timeout: float = 60.0,
        gradients: bool = False,
        device: object = None,
        **options: Unpack[DeviceOptions],
    ) -> None:
        expect(communicator, Communicator, "communicator")
        for name, text in (("layout", layout), ("combine", combine), ("weighting", weighting)):
            expect_text(text, name)
        gradients = expect_flag(gradients, "gradients")
        if not _on_cpu(device):
            raise ConfigurationError(
                f"{type(self).__name__} is for the CPU: derive from weft.cuda.AllToAll for "
                f"device {shown(device)}"
            )
        if options or layout in ("padded", "dense"):
            named = ", ".join(options) or f"layout={layout!r}"
            raise ConfigurationError(f"{named} is for devices: pass device='cuda' as well")
        self.communicator = communicator
        self.experts, self.top_k, self.hidden = experts, top_k, hidden
        self.max_tokens = max_tokens
        self.layout: str = layout
        self.dtype = dtype_name(dtype, (*DTYPES, *FLOAT8))
        #: Scale dtype and elements per block, if tokens have scales.
        self.scales = (
            (dtype_name(scale_dtype, SCALES, "scale_dtype"), block)
            if self.dtype in FLOAT8
            else None
        )
        wide = "bfloat16" if self.scales else self.dtype
        self.combine_dtype = dtype_or(combine_dtype, wide, "combine_dtype")
        self.reply_dtype = dtype_or(reply_dtype, self.combine_dtype, "reply_dtype")
        self.output_dtype = dtype_or(output_dtype, wide, "output_dtype")
        if gradients:
            gradient_module().refuse(self.dtype, layout)
        self._native = _native.AllToAll(
            communicator._native,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens=max_tokens,
            token_dtype=self.dtype,
            scales=self.scales,
            combine_dtype=self.combine_dtype,
            reply_dtype=self.reply_dtype,
            output_dtype=self.output_dtype,
            layout=layout,
            pad_to=pad_to,
            combine=combine,
            weighting=weighting,
            private_rows=private_rows,
            max_receive_rows=max_receive_rows,
            channels=channels,
            max_bytes=max_bytes,
            timeout=seconds(timeout),
        )
        self._received: weakref.WeakSet[Received] = weakref.WeakSet()
        self._closed = False
        self._weighting: str = weighting
        communicator._all_to_alls.add(self)
        if gradients:
            given = {
                "experts": experts,
                "top_k": top_k,
                "hidden": hidden,
                "max_tokens": max_tokens,
                "pad_to": pad_to,
                "combine": combine,
                "private_rows": private_rows,
                "max_receive_rows": max_receive_rows,
                "channels": channels,
                "max_bytes": max_bytes,
                "timeout": timeout,
            }
            gradient_module().differentiate(
                [self], given, lambda **more: [AllToAll(communicator, **more)], timeout
            )

    @property
    def local_experts(self) -> range:
        """Experts that this rank owns."""
        return range(*self._native.local_experts)

    @property
    def memory_bytes(self) -> int:
        """Bytes in all channels on this rank."""
        return self._native.sizes()[1] + sum(each.memory_bytes for each in self._others())

    def memory_table(self) -> str:
        """Channel memory by area, a table; one more for each backward all-to-all."""
        return "\n".join(
            [self._native.sizes()[0], *(each.memory_table() for each in self._others())]
        )

    def dispatch_send(
        self,
        tokens: Any,
        ids: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        scales: Any | None = None,
    ) -> Dispatch:
        """Start a round.

        Args:
            tokens: `[tokens, hidden]` in `dtype`; contiguous, in CPU memory, sent in place. Do not
                change it before `Dispatch.recv` has returned.
            ids: `[tokens, top_k]` expert ids with an integer dtype; a negative one means none.
            weights: `[tokens, top_k]` router weights, rounded to float32; 1 if not given.
            scales: `[tokens, ceil(hidden / block)]` in `scale_dtype`, if tokens are 8-bit floats;
                may be changed once this returns. float8_e8m0fnu may be given as uint8.

        Raises:
            ChannelInUseError: if every channel is held by a round that was not released.
            ShapeError, ExpertError: if the arrays do not fit, or are not in native byte order;
                the round is not begun.
            ConfigurationError: if a tensor requires a gradient, without `gradients=True`.
        """
        source = self._source(tokens, ids, weights)
        if source is not None:
            tokens, weights = detached(tokens), detached(weights)
        given = array(tokens, "tokens")
        count = given.shape[0] if given.shape else 0
        self._check(given, (count, self.hidden), self.dtype, "tokens")
        routed = expert_ids(ids, (count, self.top_k))
        scaled = None if weights is None else router_weights(weights, (count, self.top_k))
        factors = self._scales(scales, count)
        number = self._native.dispatch_send(
            given.native(),
            (routed.ctypes.data, routed.nbytes, routed),
            None if scaled is None else (scaled.ctypes.data, scaled.nbytes, scaled),
            None if factors is None else factors.native(),
        )
        return Dispatch(self, number, count, tokens, source)

    def dispatch(
        self,
        tokens: Any,
        ids: ArrayLike,
        weights: ArrayLike | None = None,
        *,
        scales: Any | None = None,
        timeout: float = 30.0,
    ) -> Received:
        """`dispatch_send` and then `Dispatch.recv`."""
        timeout = seconds(timeout)
        return self.dispatch_send(tokens, ids, weights, scales=scales).recv(timeout=timeout)

    def combine_send(self, received: Received, outputs: Any) -> Combine:
        """Send the experts' outputs back.

        Args:
            received: the round.
            outputs: `[positions, hidden]` in `combine_dtype`: one row for each received position,
                in the same order (`Received.tokens` in the contiguous layout, `Received.rows` in
                the indexed one). It may be changed once this returns.

        Raises:
            StageError: if another all-to-all received the round, or it was combined before or
                released.
        """
        expect(received, Received, "received")
        if received._all_to_all is not self:
            raise StageError(
                f"round {received.round} was received by another all-to-all: pass what `dispatch` "
                "of this one returned"
            )
        received._alive()
        if received._sent:
            raise StageError(
                f"round {received.round} was combined before: a round is combined once; dispatch "
                "the next one"
            )
        if received._source is not None:
            outputs = tensor(outputs)
            given = array(outputs.detach(), "outputs")
        else:
            given = array(outputs, "outputs")
        self._check(given, (received.positions, self.hidden), self.combine_dtype, "outputs")
        self._native.combine_send(received.round, given.native())
        received._sent = True
        return Combine(self, received, outputs)

    def combine(
        self, received: Received, outputs: Any, *, out: Any | None = None, timeout: float = 30.0
    ) -> Any:
        """`combine_send` and then `Combine.recv`."""
        timeout = seconds(timeout)
        expect(received, Received, "received")
        if received._source is not None:
            refuse_out(out)
        if out is not None:
            self._out(out, received.sent)
        return self.combine_send(received, outputs).recv(out=out, timeout=timeout)

    def check(self) -> None:
        """Raise an error that occurred while no call on this rank was waiting.

        Raises:
            GroupPoisonedError: or a subclass, if the group has ended; on a device others as well.
        """
        self.communicator.check()

    def close(self, *, timeout: float = 30.0) -> None:
        """Free all memory; every rank makes this call. A second call has no effect.

        Writes in flight arrive first; rounds that were not released end. Every later call on this
        all-to-all or its rounds raises `ClosedError`, and so do other threads' waits. Memory behind
        an array stays until the array is gone.

        Raises:
            WaitTimeoutError: if the other ranks do not come. The all-to-all is then closed all the
                same, but its memory stays until the communicator is closed: peers may be writing to
                it.
        """
        if not self._closed:
            timeout = seconds(timeout)
            self._end()
            for other in self._others():
                other.close(timeout=timeout)
            self._native.close(timeout)

    def _abandon(self) -> None:
        """Close on this rank only."""
        if not self._closed:
            self._end()
            for other in self._others():
                other._abandon()
            self._native.abandon()

    def _end(self) -> None:
        self._closed = True
        for received in self._received:
            received._tokens = received._scales = None

    def _others(self) -> tuple[gradient.Exchange, ...]:
        """All-to-alls for the backward pass."""
        backward = self._backward
        return () if backward is None else (backward.rows, backward.weights)

    def _source(
        self, tokens: Any, ids: Any, weights: Any, count: Any = None
    ) -> gradient.Source | None:
        """Inputs to a differentiable round; `None` for any other round."""
        if self._backward is None or not is_torch(tokens):
            return None
        module = gradient_module()
        if not module.torch.is_grad_enabled():
            return None
        source: gradient.Source = module.Source(
            self._backward, tokens, weights, ids, count, self._weighting
        )
        return source

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The other ranks may not have raised: a wait for them would time out.
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _scales(self, scales: object, count: int) -> Array | None:
        """Scales for `count` tokens, if tokens have scales."""
        if (scales is None) != (self.scales is None):
            needed = "needs scales" if self.scales else "has no scales"
            raise ShapeError(f"dtype {self.dtype} {needed}")
        if self.scales is None:
            return None
        dtype, block = self.scales
        return scale_array(scales, (count, scale_count(self.hidden, block)), dtype)

    def _out(self, out: object, sent: int) -> Array:
        """Array for `sent` combined tokens, if it fits them."""
        given = array(out, "out", writable=True)
        self._check(given, (sent, self.hidden), self.output_dtype, "out")
        return given

    @staticmethod
    def _check(given: Array, shape: tuple[int, int], dtype: str, what: str) -> None:
        if given.shape != shape:
            raise ShapeError(f"{what} has shape {given.shape}; {shape} is needed")
        if given.dtype != dtype:
            raise ShapeError(f"{what} is of dtype {given.dtype}; {dtype} is needed")


def dtype_or(dtype: object | None, default: str, what: str) -> str:
    """Name for a dtype without scales, called `what` in errors; `None` is the default."""
    return dtype_name(default if dtype is None else dtype, what=what)


def _on_cpu(device: object) -> bool:
    is_name = isinstance(device, str) or hasattr(device, "type")
    return device is None or (is_name and str(device) == "cpu")
