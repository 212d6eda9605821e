"""Mixture-of-experts dispatch and combine: tokens to the ranks of their experts, results back.

Every rank makes the same calls in the same order::

    with (
        weft.init() as communicator,
        AllToAll(communicator, experts=8, top_k=2, hidden=64, max_tokens=128) as all_to_all,
    ):
        with all_to_all.dispatch(tokens, ids, weights) as received:
            outputs = run_experts(received)
            combined = all_to_all.combine(received, outputs)

A token goes once to each rank that owns any of its experts; with `combine="reduce"` the weighted
sum over a rank's experts is formed there, in float32, rounded once, and only that comes back.

Tokens may be 8-bit floats with a scale for each block of elements::

    codes, scales = weft.float8.quantise(tokens, block=128)
    all_to_all = weft.moe.AllToAll(communicator, ..., dtype="float8_e4m3fn", block=128)
    with all_to_all.dispatch(codes, ids, weights, scales=scales) as received:
        run_experts(received.tokens, received.scales)

With `gradients=True` rounds of torch tensors are differentiable.

With `device="cuda"` tokens, ids and weights are torch tensors on a GPU, kernels do what the CPU
does here, and nothing waits on the host: see `weft.cuda`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

import numpy as np

from weft import _native
from weft._array import (
    DTYPES,
    FLOAT8,
    SCALES,
    Array,
    array,
    dtype_name,
    empty_like,
    is_torch,
    view,
)
from weft._routing import expert_ids, router_weights
from weft._timeout import seconds
from weft.errors import ClosedError, ConfigurationError, ShapeError, StageError
from weft.float8 import scale_array, scale_count

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from weft import _gradient as gradient
    from weft.communicator import Communicator

__all__ = ["AllToAll", "Combine", "DeviceOptions", "Dispatch", "Received", "check"]

#: Those on devices: what goes wrong there waits until somebody looks.
_ON_DEVICES: weakref.WeakSet[AllToAll] = weakref.WeakSet()


class DeviceOptions(TypedDict, total=False):
    """Arguments of an all-to-all that have a meaning on a device only: see `weft.cuda.AllToAll`."""

    wire_dtype: object
    expert_capacity: int | None
    max_positions: int | None
    ids_dtype: object
    num_sms: int | None
    concurrent: bool
    path: Literal["packets", "latency", "bandwidth"] | None
    memory: Literal["fd", "ipc"]
    skew_timeout: float
    watchdog: bool


class AllToAll:
    """Dispatch and combine over a communicator, with buffers of its own.

    Any thread may call: no call waits for another thread's wait. Rounds begin in the same order on
    all ranks, and the calls of one round come in order.

    As a context manager it closes itself at the end of the block; if the block raises, on this rank
    alone (the memory then stays until the communicator is closed).

    Args:
        communicator: what `weft.init()` returned.
        experts: experts of all ranks together; rank r owns those from `r * experts // world_size`
            to `(r + 1) * experts // world_size`.
        top_k: expert ids per token.
        hidden: elements per token.
        max_tokens: the most tokens that a rank sends in one round.
        dtype: of tokens: float32, bfloat16 or float16, or float8_e4m3fn or float8_e5m2, which have
            scales; as a name, a numpy or a torch dtype.
        block: elements of a token that share a scale, in 8-bit dtypes.
        scale_dtype: of scales, in 8-bit dtypes: float32 or float8_e8m0fnu (powers of two).
        combine_dtype: of expert outputs; by default `dtype`, or bfloat16 if that is an 8-bit one.
        answer_dtype: of answers on the wire, to which each is rounded once; by default
            `combine_dtype`.
        output_dtype: of the combined result; by default as for expert outputs.
        layout: "contiguous": received tokens are copied so that each expert's stand together;
            "indexed": they stay where they arrived, and each expert has a list of row numbers;
            "padded", on a device only: each expert has `expert_capacity` rows of its own.
        pad_to: in the contiguous layout, each expert's group is padded with zeros to a multiple of
            this many rows.
        combine: "reduce": one answer per token and rank, summed there; "per_expert": one per token
            and expert, summed at the source in top-k order, which gives the bits of a single
            process.
        weighting: "combine": combine multiplies by the router's weights; "expert": the experts did.
        private_rows: rows from each source that travel before all counts are known.
        max_receive_rows: the most tokens that a rank receives in one round. The default is the
            worst case, `world_size * max_tokens`; with less, a round that needs more raises
            `CapacityError` on every rank.
        buffers: rounds that may be under way or held at a time.
        max_bytes: refuse to allocate more than this.
        timeout: seconds to wait for all ranks to make the same call; finite, as every timeout.
        gradients: rounds of torch tensors are differentiable: see "Gradients" in docs/moe.md. It
            takes buffers once more, for the backward pass.
        device: where tokens are. `None` or "cpu": in CPU memory. Anything else makes a
            `weft.cuda.AllToAll`, which has `options` of its own; this needs PyTorch.
        options: `DeviceOptions`.

    Raises:
        SizeError: before anything is allocated, if it cannot fit; says by how much.
        ConfigurationMismatchError: if the ranks' arguments differ.
    """

    #: The all-to-alls of the backward pass, with `gradients=True`.
    _backward: gradient.Backward | None = None

    def __new__(cls, *_: object, device: object = None, **__: object) -> Self:
        """As `pathlib.Path` does, the class for where it is."""
        if cls is AllToAll and not _on_cpu(device):
            try:
                from weft.cuda import AllToAll as OnDevice
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise ConfigurationError(
                    f"device {device} needs PyTorch: pip install 'weft[torch]'"
                ) from error
            return object.__new__(OnDevice)  # type: ignore[return-value]
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
        answer_dtype: object | None = None,
        output_dtype: object | None = None,
        layout: Literal["contiguous", "indexed", "padded"] = "contiguous",
        pad_to: int = 1,
        combine: Literal["reduce", "per_expert"] = "reduce",
        weighting: Literal["combine", "expert"] = "combine",
        private_rows: int | None = None,
        max_receive_rows: int | None = None,
        buffers: int = 2,
        max_bytes: int | None = None,
        timeout: float = 60.0,
        gradients: bool = False,
        device: object = None,
        **options: Unpack[DeviceOptions],
    ) -> None:
        if not _on_cpu(device):
            raise ConfigurationError(
                f"{type(self).__name__} is for the CPU: derive from weft.cuda.AllToAll for {device}"
            )
        if options or layout == "padded":
            named = ", ".join(options) or "layout='padded'"
            raise ConfigurationError(f"{named} is for devices: pass device='cuda' as well")
        self.communicator = communicator
        self.experts, self.top_k, self.hidden = experts, top_k, hidden
        self.max_tokens = max_tokens
        self.layout: str = layout
        self.dtype = dtype_name(dtype, (*DTYPES, *FLOAT8))
        #: The scales' dtype and elements of a block, if tokens have scales.
        self.scales = (dtype_name(scale_dtype, SCALES), block) if self.dtype in FLOAT8 else None
        wide = "bfloat16" if self.scales else self.dtype
        self.combine_dtype = dtype_name(wide if combine_dtype is None else combine_dtype)
        self.answer_dtype = dtype_name(self.combine_dtype if answer_dtype is None else answer_dtype)
        self.output_dtype = dtype_name(wide if output_dtype is None else output_dtype)
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
            answer_dtype=self.answer_dtype,
            output_dtype=self.output_dtype,
            layout=layout,
            pad_to=pad_to,
            combine=combine,
            weighting=weighting,
            private_rows=private_rows,
            max_receive_rows=max_receive_rows,
            buffers=buffers,
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
                "buffers": buffers,
                "max_bytes": max_bytes,
                "timeout": timeout,
            }
            gradient_module().differentiate(
                [self], given, lambda **more: [AllToAll(communicator, **more)], timeout
            )

    @property
    def local_experts(self) -> range:
        """The experts that this rank owns."""
        return range(*self._native.local_experts)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers of this rank."""
        return self._native.sizes()[1] + sum(each.memory_bytes for each in self._others())

    def memory_table(self) -> str:
        """What the buffers hold, as a table; one more for each all-to-all of the backward pass."""
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
            tokens: `[tokens, hidden]` of `dtype`; contiguous, in CPU memory, sent from where it
                lies. Do not change it before `Dispatch.recv` has returned.
            ids: `[tokens, top_k]` expert ids, of an integer dtype; a negative one means none.
            weights: `[tokens, top_k]` router weights, rounded to float32; 1 if not given.
            scales: `[tokens, ceil(hidden / block)]` of `scale_dtype`, if tokens are 8-bit floats;
                may be changed once this returns. float8_e8m0fnu may be given as uint8.

        Raises:
            BufferInUseError: if as many rounds as there are buffers have not been released.
            ShapeError, ExpertError: if the arrays do not fit, or are not in native byte order;
                nothing was sent.
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
            received: what was dispatched.
            outputs: `[positions, hidden]` of `combine_dtype`: a row for each position of the
                received tokens, in the same order (`Received.tokens` in the contiguous layout,
                `Received.rows` in the indexed one). It may be changed once this returns.

        Raises:
            StageError: if another all-to-all received the round, or it was combined before or
                released.
        """
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
        if received._source is not None:
            refuse_out(out)
        if out is not None:
            self._out(out, received.sent)
        return self.combine_send(received, outputs).recv(out=out, timeout=timeout)

    def check(self) -> None:
        """Raise what went wrong where no call of this rank was waiting.

        Raises:
            GroupPoisonedError: and its kinds, if the group is dead; on a device others as well.
        """
        self.communicator.check()

    def close(self, *, timeout: float = 30.0) -> None:
        """Give all memory back; every rank makes this call. A second call does nothing.

        Writes that are under way arrive first; rounds that were not released end. Every later call
        on this, or on a round of it, raises `ClosedError`, and so do waits of other threads. Memory
        that an array still shows stays until that array is gone.

        Raises:
            WaitTimeoutError: if the other ranks do not come. This is closed then all the same, but
                its memory stays until the communicator is closed: peers may be writing to it.
        """
        if not self._closed:
            timeout = seconds(timeout)
            self._end()
            for other in self._others():
                other.close(timeout=timeout)
            self._native.close(timeout)

    def _abandon(self) -> None:
        """Close on this rank alone."""
        if not self._closed:
            self._end()
            for other in self._others():
                other._abandon()
            self._native.abandon()

    def _end(self) -> None:
        self._closed = True
        for received in self._received:
            received._tokens = received._scales = None

    def _others(self) -> tuple[AllToAll, ...]:
        """The all-to-alls of the backward pass."""
        backward = self._backward
        return () if backward is None else (backward.rows, backward.weights)

    def _source(
        self, tokens: Any, ids: Any, weights: Any, count: Any = None
    ) -> gradient.Source | None:
        """What a differentiable round is dispatched from; `None` if it is none."""
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
        # The other ranks may not have raised, and would be waited for in vain.
        if kind is None:
            self.close()
        else:
            self._abandon()

    def _scales(self, scales: object, count: int) -> Array | None:
        """The scales of `count` tokens, if tokens have scales."""
        if (scales is None) != (self.scales is None):
            needed = "needs scales" if self.scales else "has no scales"
            raise ShapeError(f"dtype {self.dtype} {needed}")
        if self.scales is None:
            return None
        dtype, block = self.scales
        return scale_array(scales, (count, scale_count(self.hidden, block)), dtype)

    def _out(self, out: object, sent: int) -> Array:
        """The array that `sent` combined tokens go to, if they fit it."""
        given = array(out, "out", writable=True)
        self._check(given, (sent, self.hidden), self.output_dtype, "out")
        return given

    @staticmethod
    def _check(given: Array, shape: tuple[int, int], dtype: str, what: str) -> None:
        if given.shape != shape:
            raise ShapeError(f"{what} has shape {given.shape}; {shape} is needed")
        if given.dtype != dtype:
            raise ShapeError(f"{what} is of dtype {given.dtype}; {dtype} is needed")


def check() -> None:
    """Raise what went wrong on a device, in any open all-to-all of this process.

    Nothing there waits on the host, so an error is only recorded: ask when a step is done, after
    its stream was synchronised. Also called `weft.check`.

    Raises:
        WaitTimeoutError, PeerLostError, StageError: a wait on the device ended in vain, and outputs
            are no numbers (all bytes 0xFF) since then.
        ExpertError, CapacityError: of a round that is over; they are forgotten once raised.
    """
    for all_to_all in list(_ON_DEVICES):
        all_to_all.check()


def _on_cpu(device: object) -> bool:
    return device is None or str(device) == "cpu"


def gradient_module() -> Any:
    """The module of gradients, which imports torch.

    Raises:
        ConfigurationError: if there is no torch.
    """
    try:
        from weft import _gradient
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError(
            "gradients=True needs PyTorch: pip install 'weft[torch]'"
        ) from error
    return _gradient


def tensor(outputs: Any) -> Any:
    """The outputs of a differentiable round.

    Raises:
        ShapeError: if they are no tensor of torch, and so have no gradient.
    """
    if not is_torch(outputs):
        raise ShapeError(
            f"outputs of a differentiable round is a {type(outputs).__name__}: expected a torch "
            "tensor; pass one, or dispatch under torch.no_grad()"
        )
    return outputs


def detached(value: Any) -> Any:
    """A tensor without its history; anything else as it is."""
    return value.detach() if is_torch(value) else value


class Dispatch:
    """A round whose tokens are on their way."""

    #: Of a differentiable round.
    _source: gradient.Source | None = None

    def __init__(
        self,
        all_to_all: AllToAll,
        number: int,
        tokens: int,
        like: object,
        source: gradient.Source | None,
    ) -> None:
        self._all_to_all = all_to_all
        self._like, self._source = like, source
        self.round = number
        self.sent = tokens

    def recv(self, *, timeout: float = 30.0) -> Received:
        """Wait until every token for this rank's experts is here and this rank's own have left.

        Raises:
            WaitTimeoutError: names who is missing; the call may be repeated.
            CapacityError: on every rank alike; the round is over.
            PeerLostError: and the others of `GroupPoisonedError`.
        """
        native = self._all_to_all._native.dispatch_recv(self.round, seconds(timeout))
        received = Received(self._all_to_all, self, native, self._like)
        if self._source is not None:
            gradient_module().attach(received, self._source)
        return received


class Received:
    """Tokens for this rank's experts. Views of Weft's memory: valid until released.

    Attributes:
        expert_counts: `[local experts]` int64, tokens of each.
        expert_offsets: `[local experts + 1]` int64: local expert e has the positions from
            `expert_offsets[e]` on; its padding follows its tokens.
        rows: `[positions]` int64: the row of `tokens` at each position; -1 for padding. In the
            contiguous layout positions are rows, and this says which slot each was copied from.
        weights: `[positions]` float32, the router's; 0 for padding. A tensor of torch, as are
            `tokens`, and both the caller's own, in a differentiable round.
        expert_load: `[experts]` int64: tokens of every expert of the group in this round.
    """

    #: Of a differentiable round.
    _source: gradient.Source | None = None

    def __init__(
        self, all_to_all: AllToAll, dispatch: Dispatch, native: _native.Received, like: object
    ) -> None:
        self._all_to_all = all_to_all
        self._like = like
        self._released = False
        #: Whether its outputs were sent back.
        self._sent: object = False
        self.round = dispatch.round
        self.sent = dispatch.sent
        self.positions = len(native.slots)
        self.expert_counts: NDArray[np.int64] = np.array(native.expert_counts, dtype=np.int64)
        self.expert_offsets: NDArray[np.int64] = np.array(native.expert_offsets, dtype=np.int64)
        slots = np.array(native.slots, dtype=np.int64)
        self.rows: NDArray[np.int64] = np.where(slots == np.iinfo(np.uint32).max, -1, slots)
        self.weights: NDArray[np.float32] = np.array(native.weights, dtype=np.float32)
        self.expert_load: NDArray[np.int64] = np.array(native.expert_load, dtype=np.int64)
        shape = (native.row_count, all_to_all.hidden)
        self._tokens = view(native.rows, all_to_all.dtype, shape, native.stride, like)
        self._scales: Any = None
        if all_to_all.scales and native.scales is not None:
            dtype, block = all_to_all.scales
            shape = (native.row_count, scale_count(all_to_all.hidden, block))
            self._scales = view(native.scales, dtype, shape, native.scale_stride, like)
        all_to_all._received.add(self)

    @property
    def tokens(self) -> Any:
        """The tokens that were received, in `dtype`.

        In the contiguous layout `[positions, hidden]`, each expert's rows together; in the indexed
        layout `[slots, hidden]`, all slots, of which `rows` names those in use.

        Raises:
            StageError: if the round was released.
            ClosedError: if the all-to-all or the communicator was closed.
        """
        self._alive()
        return self._tokens

    @property
    def scales(self) -> Any:
        """The scales of `tokens`, row by row: `[rows, ceil(hidden / block)]`; 0 for padding.

        `None` if tokens have none.

        Raises:
            StageError, ClosedError: as `tokens`.
        """
        self._alive()
        return self._scales

    def of_expert(self, expert: int) -> Any:
        """The tokens of local expert `expert`: a view (contiguous layout) or a copy (indexed)."""
        return self.tokens[self._rows_of(expert)]

    def scales_of_expert(self, expert: int) -> Any:
        """The scales of the tokens of local expert `expert`: as `of_expert`."""
        if self.scales is None:
            raise ShapeError(f"tokens of dtype {self._all_to_all.dtype} have no scales")
        return self.scales[self._rows_of(expert)]

    def copies_sent(self) -> tuple[int, int]:
        """Rows that this rank sent in the dispatch, and those that a copy per expert would be."""
        return self._all_to_all._native.copies_sent(self.round)

    def release(self) -> None:
        """Give the buffers back; the arrays may not be read any more. Once is enough."""
        if not self._released:
            self._alive()
            self._all_to_all._native.release(self.round)
            self._released, self._tokens, self._scales = True, None, None

    def _own_tokens(self) -> Any:
        """Received rows of torch, in memory that stays."""
        return self._tokens.clone()

    def _rows_of(self, expert: int) -> slice | NDArray[np.int64]:
        begin = int(self.expert_offsets[expert])
        positions = slice(begin, begin + int(self.expert_counts[expert]))
        return self.rows[positions] if self._all_to_all.layout == "indexed" else positions

    def _alive(self) -> None:
        if self._all_to_all._closed:
            raise ClosedError("the all-to-all was closed")
        if self._released:
            raise StageError(f"round {self.round} has been released")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.release()
        except Exception:
            # What the block raised says more than that its round cannot be ended.
            if kind is None:
                raise


class Combine:
    """A round whose answers are on their way."""

    def __init__(self, all_to_all: AllToAll, received: Received, outputs: object) -> None:
        self._all_to_all = all_to_all
        self._received = received
        #: For the backward pass.
        self._outputs = None if received._source is None else outputs

    def recv(self, *, out: Any | None = None, timeout: float = 30.0) -> Any:
        """Wait for all answers and sum them.

        Args:
            out: `[tokens, hidden]` of `output_dtype` to write to; a new array if not given.
            timeout: seconds.

        Returns:
            `[tokens, hidden]` of `output_dtype`, in the order of the tokens sent; of the kind of
            array that was dispatched. A token without experts gives zeros.

        Raises:
            WaitTimeoutError, PeerLostError: as `Dispatch.recv`.
        """
        if self._received._source is None:
            return self._recv(out, timeout)
        refuse_out(out)
        outputs = self._outputs
        return gradient_module().combined(
            self._received, outputs, lambda: self._recv(None, timeout)
        )

    def _recv(self, out: Any | None, timeout: float) -> Any:
        all_to_all = self._all_to_all
        if out is None:
            shape = (self._received.sent, all_to_all.hidden)
            out = empty_like(self._received._like, shape, all_to_all.output_dtype)
        given = all_to_all._out(out, self._received.sent)
        all_to_all._native.combine_recv(self._received.round, given.native(), seconds(timeout))
        return out


def refuse_out(out: object) -> None:
    """Raise if a differentiable result is to be written to an array of the caller's.

    Raises:
        ConfigurationError: if `out` was given.
    """
    if out is not None:
        raise ConfigurationError(
            "out= of a differentiable round: the result is a tensor with a history; leave out= "
            "away, or call under torch.no_grad()"
        )
