"""Dispatch and combine on a device."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Unpack

import torch

from weft import _gradient, _native, moe
from weft._array import refuse_gradient
from weft.cuda import config as configuration
from weft.cuda.device import place_of
from weft.cuda.launcher import Batch, Launcher
from weft.cuda.operators import OPERATORS
from weft.cuda.received import Combine, Dispatch, Received
from weft.cuda.watchdog import Watchdog
from weft.errors import (
    BufferInUseError,
    ClosedError,
    ConfigurationError,
    ShapeError,
    StageError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft._native import DeviceAllToAll
    from weft.communicator import Communicator
    from weft.cuda.config import Arguments, Config

__all__ = ["AllToAll", "local_group"]


class AllToAll(moe.AllToAll):
    """Dispatch and combine between GPUs of one host, with buffers of its own.

    `weft.moe.AllToAll(..., device=...)` makes one too. All tensors are on `device`, contiguous, and
    tokens and outputs begin at multiples of 16 bytes, as torch allocates them. As a context manager
    it closes itself at the end of the block.

    Args:
        communicator: what `weft.init()` returned; its ranks are on one host, a GPU each.
        device: "cuda" (torch's current one), "cuda:1" or a `torch.device`; "twin" runs the same on
            the CPU, with CPU tensors.
        watchdog: look for errors every 0.1 s on a thread: they are logged (logger `weft.cuda`), and
            if one ends the group, every rank is told at once. `check` raises them still.
        experts: experts of all ranks together; rank r owns those from `r * experts // world_size`
            to `(r + 1) * experts // world_size`.
        top_k: expert ids per token.
        hidden: elements per token; rows of tokens, answers and results are multiples of 16 bytes.
        max_tokens: the most tokens that a rank sends in one round.
        dtype: of tokens: float32, bfloat16 or float16, or float8_e4m3fn or float8_e5m2, which have
            scales; as a name, a numpy or a torch dtype.
        wire_dtype: of tokens on their way and as received; by default `dtype`. "float8_e4m3fn"
            makes the kernel cast tokens to codes with scales, as they leave.
        block: elements of a token that share a scale, in 8-bit dtypes.
        scale_dtype: of scales, in 8-bit dtypes: float32 or float8_e8m0fnu (powers of two).
        combine_dtype: of expert outputs; by default `dtype`, or bfloat16 if that is an 8-bit one.
        answer_dtype: of answers on their way, to which each is rounded once; by default
            `combine_dtype`.
        output_dtype: of the combined result; by default as for expert outputs.
        layout: "contiguous": received tokens are copied so that each expert's stand together;
            "indexed": they stay where they arrived, and each expert has a list of row numbers;
            "padded": each expert has `expert_capacity` rows.
        pad_to: in the contiguous layout, each expert's group begins at a multiple of this many
            rows.
        expert_capacity: rows of each expert in the padded layout; by default the worst case.
        max_positions: the most positions of a rank in one round, in the other layouts; by default
            the worst case.
        weighting: "combine": combine multiplies by the router's weights; "expert": the experts did.
        combine: "reduce", the only one on a device.
        ids_dtype: of expert ids: int64 or int32.
        buffers: rounds that may be under way or held at a time.
        num_sms: the most multiprocessors that a kernel takes; by default what is fastest.
        concurrent: its calls may be under way beside those of the communicator's other concurrent
            all-to-alls on the device, in an order that differs between ranks: the constructor then
            refuses launches that do not fit on the GPU at once. Not needed where one stream orders
            all calls, the same on every rank.
        path: "packets", "latency" or "bandwidth"; by default by `max_tokens`.
        memory: how peers' memory is shared: "fd" or "ipc".
        skew_timeout: seconds that a kernel waits for a peer, which may be that much behind.
        max_bytes: refuse to allocate more than this.
        timeout: seconds to wait for all ranks to make the same call.
        gradients: rounds are differentiable, in the contiguous and padded layouts and outside of
            compiled code: see "Gradients" in docs/moe.md. It takes memory once more, for the
            backward pass.

    Raises:
        SizeError: before anything is allocated, if it cannot fit; says by how much.
        ConfigurationError: if an argument has no meaning on a device; says why.
        ConfigurationMismatchError: if the ranks' arguments differ.
        ProviderError: if there is no such device.
    """

    _native: DeviceAllToAll  # type: ignore[assignment]

    def __init__(
        self,
        communicator: Communicator,
        *,
        device: object = "cuda",
        watchdog: bool = False,
        gradients: bool = False,
        **arguments: Unpack[Arguments],
    ) -> None:
        config = configuration.make(**arguments)
        if gradients:
            _gradient.refuse(config.wire_dtype, config.layout)
        name, place = place_of(device)
        native = _native.DeviceAllToAll(communicator._native, device=name, **config.native())
        self.communicator = communicator
        ranks = communicator.rank, communicator.world_size
        self._begin(native, config, place, ranks, watchdog=watchdog)
        communicator._all_to_alls.add(self)
        if gradients:

            def make(**more: Any) -> list[AllToAll]:
                return [AllToAll(communicator, device=device, watchdog=watchdog, **more)]

            _gradient.differentiate([self], arguments, make, config.timeout)

    def _begin(
        self,
        native: DeviceAllToAll,
        config: Config,
        place: torch.device,
        ranks: tuple[int, int],
        *,
        watchdog: bool,
    ) -> None:
        self._native = native
        #: This rank, and how many there are; a local group has no communicator to ask.
        self.rank, self.world_size = ranks
        #: Where tensors are: the CPU for a twin.
        self.device = place
        self.experts, self.top_k, self.hidden = config.experts, config.top_k, config.hidden
        self.max_tokens, self.layout = config.max_tokens, config.layout
        self.dtype, self.wire_dtype = config.token_dtype, config.wire_dtype
        #: The scales' dtype and elements of a block, if received tokens have scales.
        self.scales = config.scales
        self.combine_dtype, self.answer_dtype = config.combine_dtype, config.answer_dtype
        self.output_dtype, self.ids_dtype = config.output_dtype, config.ids_dtype
        self._config, self._weighting = config, config.weighting
        self._launcher = Launcher(native, config, place, self.world_size)
        self._experts_here = range(*native.local_experts)
        #: The most positions of a rank in one round.
        self.positions = self._launcher.positions
        # Read in code that is being compiled, where the launcher would be looked into.
        self._handle, self._workspace = self._launcher.handle, self._launcher.workspace
        self._busy = [False] * config.buffers
        self._received = weakref.WeakSet()
        self._closed = False
        moe._ON_DEVICES.add(self)
        self._watchdog = Watchdog(self) if watchdog else None

    @property
    def local_experts(self) -> range:
        """The experts that this rank owns."""
        return self._experts_here

    @property
    def path(self) -> str:
        """How tokens travel: "packets", "latency" or "bandwidth"."""
        return self._native.path

    @property
    def num_sms(self) -> int:
        """Multiprocessors that a kernel takes."""
        return self._native.num_sms

    @property
    def build(self) -> dict[str, Any]:
        """How its kernels were made: `seconds` it took, and whether they were `cached`."""
        return self._native.build

    def dispatch_send(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
        channel: int | None = None,
        num_sms: int | None = None,
    ) -> Dispatch:
        """Start a round: launch what sends the tokens.

        The tensors are read by the kernel; do not change them before on another stream.

        Args:
            tokens: `[tokens, hidden]` of `dtype`; at most `max_tokens`.
            ids: `[tokens, top_k]` expert ids of `ids_dtype`; a negative one means none.
            weights: `[tokens, top_k]` router weights, float32; 1 if not given.
            scales: `[tokens, ceil(hidden / block)]` of `scale_dtype`, if tokens are 8-bit floats;
                float8_e8m0fnu may be given as uint8.
            count: `[1]` int32: how many of the tokens exist, read on the device when the kernels
                run; all of them if not given. Keep it until combine has run.
            channel: which of the `buffers` the round has, the same on every rank; by default the
                first that is free. Graphs that are replayed at the same time need different ones.
            num_sms: the most multiprocessors that this launch takes, at most those that the
                all-to-all was made with; the other phases of the round may take others.

        Raises:
            BufferInUseError: if as many rounds as there are buffers have not been released, or the
                channel's was not.
            ShapeError: if the tensors do not fit; nothing was sent. Ids that no expert has are
                found on the device: `check` raises them.
        """
        source = self._source(tokens, ids, weights, count)
        if source is not None:
            tokens, weights = moe.detached(tokens), moe.detached(weights)
        batch, given = self._batch(tokens, ids, weights, scales, count)
        taken = self._free(channel)
        if torch.compiler.is_compiling():
            self._operate("moe_dispatch_send", taken, num_sms, *batch)
        else:
            self._launcher.dispatch_send(taken, batch, num_sms)
        self._busy[taken] = True
        return Dispatch(self, taken, given, count, source)

    def dispatch(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
        channel: int | None = None,
        num_sms: int | None = None,
        timeout: float | None = None,
    ) -> Received:
        """`dispatch_send` and `Dispatch.recv` as one kernel; `timeout` has no meaning here."""
        source = self._source(tokens, ids, weights, count)
        if source is not None:
            tokens, weights = moe.detached(tokens), moe.detached(weights)
        batch, given = self._batch(tokens, ids, weights, scales, count)
        taken = self._free(channel)
        dispatch = Dispatch(self, taken, given, count, source)
        if torch.compiler.is_compiling():
            received = dispatch._received(self._operate("moe_dispatch", taken, num_sms, *batch))
        else:
            received = dispatch._received(self._launcher.dispatch(taken, batch, num_sms))
        self._busy[taken] = True
        return received

    def combine_send(
        self, received: moe.Received, outputs: torch.Tensor, *, num_sms: int | None = None
    ) -> Combine:
        """Launch what sends the experts' outputs back.

        Args:
            received: what was dispatched.
            outputs: `[positions, hidden]` of `combine_dtype`: a row for each position of the
                received tokens, in the same order; rows of no token may hold anything.
            num_sms: as of `dispatch_send`.
        """
        mine = self._combines(received, outputs)
        if torch.compiler.is_compiling():
            self._operate("moe_combine_send", mine.round, num_sms, outputs)
        else:
            self._launcher.combine_send(mine.round, outputs, num_sms)
        mine._sent = Combine(self, mine, outputs)
        return mine._sent

    def combine(
        self,
        received: moe.Received,
        outputs: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        num_sms: int | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """`combine_send` and `Combine.recv` as one kernel; `timeout` has no meaning here."""
        mine = self._combines(received, outputs)
        if mine._source is not None:
            moe.refuse_out(out)
        self._check_out(out, mine.sent)
        rows = mine.sent, mine._count
        if mine._source is not None:

            def launch() -> torch.Tensor:
                return self._launcher.combine(mine.round, outputs, *rows, None, num_sms)

            combined = _gradient.combined(mine, outputs, launch)
        elif torch.compiler.is_compiling():
            combined = self._operate("moe_combine", mine.round, num_sms, outputs, *rows)
            if out is not None:
                combined = out.copy_(combined)
        else:
            combined = self._launcher.combine(mine.round, outputs, *rows, out, num_sms)
        mine._sent = Combine(self, mine, None)
        mine._sent._here = True
        return combined

    def check(self) -> None:
        """Raise what the device recorded.

        Raises:
            WaitTimeoutError, PeerLostError, StageError: a wait on the device ended in vain, or
                launches came out of order; outputs are no numbers since then.
            ExpertError: a token named an expert that there is not, or one twice.
            CapacityError: a rank received more than `max_positions` or `expert_capacity`. Both are
                of rounds that are over, and forgotten once raised.
        """
        self._open()
        if self._watchdog is not None:
            self._watchdog.raise_noticed()
        self._native.check()

    def _operate(self, name: str, channel: int, num_sms: int | None, *arguments: Any) -> Any:
        """Call an operator, in code that is being compiled."""
        return OPERATORS[name](self._handle, channel, num_sms, self._workspace, *arguments)

    def _free(self, named: int | None) -> int:
        """The channel that the caller names, or the first that no round has.

        It is the same on every rank, as all calls are.

        The first and not the next, so that code which ends its rounds leaves all as it was: a
        compiler finds nothing to compile anew, and a graph that is replayed is in nobody's way.
        """
        if named is not None:
            if not 0 <= named < len(self._busy):
                raise ConfigurationError(
                    f"channel is {named}: there are {len(self._busy)}, from 0 on; pass buffers="
                )
            if self._busy[named]:
                raise BufferInUseError(f"channel {named} has a round under way: release it first")
            return named
        for channel, busy in enumerate(self._busy):
            if not busy:
                return channel
        raise BufferInUseError(
            f"{len(self._busy)} rounds are under way, as many as there are buffers: release one, "
            "or pass buffers="
        )

    def _batch(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        count: torch.Tensor | None,
    ) -> tuple[Batch, int]:
        """What is sent, if it fits."""
        self._open()
        _is_tensor(tokens, "tokens")
        given = tokens.shape[0] if tokens.ndim else 0
        self._check_tensor(tokens, (given, self.hidden), self.dtype, "tokens")
        if given > self.max_tokens:
            raise ShapeError(f"{given} tokens are given; max_tokens is {self.max_tokens}")
        self._check_tensor(ids, (given, self.top_k), self.ids_dtype, "ids")
        if weights is not None:
            self._check_tensor(weights, (given, self.top_k), "float32", "weights")
        if (scales is None) == self._config.scales_given:
            needed = "needs scales" if scales is None else "has no scales"
            raise ShapeError(f"dtype {self.dtype} {needed}")
        if scales is not None and self.scales is not None:
            _is_tensor(scales, "scales")
            dtype = self.scales[0]
            if dtype == "float8_e8m0fnu" and scales.dtype == torch.uint8:
                scales = scales.view(torch.float8_e8m0fnu)
            self._check_tensor(scales, (given, self._config.scale_columns), dtype, "scales")
        if count is not None:
            self._check_tensor(count, (1,), "int32", "count")
        return Batch(tokens, scales, ids, weights, count), given

    def _combines(self, received: moe.Received, outputs: torch.Tensor) -> Received:
        """The round whose outputs are given, if they fit it."""
        if not isinstance(received, Received) or received._all_to_all is not self:
            raise StageError("this round was received by another all-to-all")
        received._alive()
        if received._sent is not None:
            raise StageError("this round was combined before")
        shape = (self.positions, self.hidden)
        given = outputs if received._source is None else moe.detached(outputs)
        self._check_tensor(given, shape, self.combine_dtype, "outputs")
        return received

    def _check_out(self, out: torch.Tensor | None, given: int) -> None:
        if out is not None:
            self._check_tensor(out, (given, self.hidden), self.output_dtype, "out")

    def _check_tensor(
        self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str, what: str
    ) -> None:
        _is_tensor(tensor, what)
        if tensor.shape != shape:
            raise ShapeError(f"{what} has shape {tuple(tensor.shape)}; {shape} is needed")
        if tensor.dtype != getattr(torch, dtype):
            raise ShapeError(f"{what} is of dtype {tensor.dtype}; torch.{dtype} is needed")
        if tensor.device != self.device:
            raise ShapeError(f"{what} is on {tensor.device}; this all-to-all is on {self.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            refuse_gradient(tensor, what)

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the all-to-all was closed")

    def _end(self) -> None:
        super()._end()
        moe._ON_DEVICES.discard(self)
        if self._watchdog is not None:
            self._watchdog.stop()
        self._launcher.end()


def local_group(
    world_size: int,
    devices: Sequence[object] | None = None,
    *,
    watchdog: bool = False,
    gradients: bool = False,
    **arguments: Unpack[Arguments],
) -> list[AllToAll]:
    """All ranks in this process: an `AllToAll` for each, in rank order, without a communicator.

    For one process that drives several GPUs, and for tests. Kernels of one rank wait for those of
    the others: launch every rank's before waiting for any. With "twin", whose calls do their work
    at once, each rank's calls are made on a thread of its own.

    Args:
        world_size: how many ranks.
        devices: of each rank, as `AllToAll` takes them; by default "cuda:0" and on.
        watchdog: as of `AllToAll`; a thread for each rank.
        gradients: as of `AllToAll`.
        arguments: as of `AllToAll`.
    """
    config = configuration.make(**arguments)
    if gradients:
        _gradient.refuse(config.wire_dtype, config.layout)
    given = [f"cuda:{rank}" for rank in range(world_size)] if devices is None else devices
    if len(given) != world_size:
        raise ConfigurationError(f"{len(given)} devices are given for {world_size} ranks")
    names, places = zip(*map(place_of, given), strict=True)
    natives = _native.DeviceAllToAll.local_group(world_size, list(names), **config.native())
    group = []
    for rank, (native, place) in enumerate(zip(natives, places, strict=True)):
        member = object.__new__(AllToAll)
        member._begin(native, config, place, (rank, world_size), watchdog=watchdog)
        group.append(member)
    if gradients:

        def make(**more: Any) -> list[AllToAll]:
            return local_group(world_size, given, watchdog=watchdog, **more)

        _gradient.differentiate(group, arguments, make, config.timeout)
    return group


def _is_tensor(value: object, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{what} is a {type(value).__name__}, not a torch tensor")
