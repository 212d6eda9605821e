"""Dispatch and combine on a device."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch

from weft import _gradient, _native, moe
from weft._arguments import expect
from weft._placement import by_layer
from weft._timeout import seconds
from weft.communicator import Communicator
from weft.cuda import combine as combines
from weft.cuda import config as configuration
from weft.cuda import dispatch as dispatches
from weft.cuda import streams
from weft.cuda.channels import free_channel
from weft.cuda.checks import ArgumentChecks
from weft.cuda.combine import Combine, open_round
from weft.cuda.device import place_of
from weft.cuda.dispatch import Dispatch, planned_batch
from weft.cuda.launcher import Batch, Launcher
from weft.cuda.operators import OPERATORS
from weft.cuda.planned import Planned
from weft.cuda.received import Received
from weft.cuda.watchdog import Watchdog
from weft.errors import ClosedError, ConfigurationError
from weft.moe.device_errors import ON_DEVICES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft._native import DeviceAllToAll, DeviceCalls
    from weft._placement import Placement
    from weft.cuda.checks import Bias
    from weft.cuda.config import Arguments, Config
    from weft.cuda.outputs import Outputs
    from weft.cuda.planned import Handle
    from weft.cuda.streams import Event

__all__ = ["AllToAll"]


@configuration.documented
class AllToAll(moe.AllToAll):
    """Dispatch and combine between GPUs of one host, with channels of its own.

    `weft.moe.AllToAll(..., device=...)` makes one too. All tensors are on `device`, contiguous, and
    tokens and outputs begin at multiples of 16 bytes, as torch allocates them. As a context manager
    it closes itself at the end of the block.

    Args:
        communicator: what `weft.init()` returned; its ranks are on one host, a GPU each.
        device: "cuda" (torch's current one), "cuda:1" or a `torch.device`; "twin" runs the same on
            the CPU, with CPU tensors.
        watchdog: poll for errors every 0.1 s on a thread: they are logged (logger `weft.cuda`), and
            one that ends the group poisons it at every rank at once. `check` raises them as well.
        dtype: of tokens: float32, bfloat16 or float16, or float8_e4m3fn or float8_e5m2, which have
            scales; as a name, a numpy or a torch dtype.
        block: elements of a token that share a scale, in 8-bit dtypes.
        scale_dtype: of scales, in 8-bit dtypes: float32 or float8_e8m0fnu (powers of two).
        combine: "reduce", the only one on a device.
        placement: which experts each rank holds, if not each expert once: a `weft.moe.Placement`,
            or one for each of the layers that share this all-to-all, with as many experts on
            each rank in all of them. See "Replicas of experts" in docs/moe.md.
        gradients: rounds are differentiable, in the contiguous and padded layouts and outside of
            compiled code: see "Gradients" in docs/moe.md. It takes memory once more, for the
            backward pass.
        {options}

    Raises:
        SizeError: before any allocation, if the memory exceeds a limit; names the excess.
        ConfigurationError: if an argument does not apply to a device.
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
        placement: Placement | Sequence[Placement] | None = None,
        **arguments: Unpack[Arguments],
    ) -> None:
        expect(communicator, Communicator, "communicator")
        config = configuration.make(**arguments)
        layers = by_layer(placement, config.experts)
        if gradients:
            _gradient.refuse(config.wire_dtype, config.layout, placed=bool(layers))
        name, place = place_of(device)
        native = _native.DeviceAllToAll(
            communicator._native,
            device=name,
            placement=[layer.native for layer in layers],
            **config.native(),
        )
        self.communicator = communicator
        ranks = communicator.rank, communicator.world_size
        self._begin(native, config, place, ranks, layers, watchdog=watchdog)
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
        layers: tuple[Placement, ...],
        *,
        watchdog: bool,
    ) -> None:
        self._native = native
        #: This rank, and how many there are; a local group has no communicator to ask.
        self.rank, self.world_size = ranks
        #: Device of tensors: the CPU for a twin.
        self.device = place
        # Of the ranks that a local group has on this device: see `communication_stream`.
        self._place = 0
        self.experts, self.top_k, self.hidden = config.experts, config.top_k, config.hidden
        self.max_tokens, self.layout = config.max_tokens, config.layout
        self.dtype, self.wire_dtype = config.token_dtype, config.wire_dtype
        #: The scales' dtype and elements of a block, if received tokens have scales.
        self.scales = config.scales
        self.combine_dtype, self.reply_dtype = config.combine_dtype, config.reply_dtype
        self.output_dtype, self.ids_dtype = config.output_dtype, config.ids_dtype
        self._config, self._weighting = config, config.weighting
        self._launcher = Launcher(native, config, place, self.world_size)
        self._experts_here = range(*native.local_experts)
        self._layers = list(layers)
        #: The most positions of a rank in one round.
        self.positions = self._launcher.positions
        local = len(self._experts_here)
        physical = sum(layers[0].slots) if layers else config.experts
        self._checks = ArgumentChecks(config, self._launcher, physical, local)
        #: Rows of each expert in the padded layout.
        self.expert_capacity = self._checks.expert_capacity
        # Read in code that is being compiled, where the launcher would be looked into.
        self._handle, self._workspace = self._launcher.handle, self._launcher.workspace
        self._layout = self._launcher.layout
        self._busy = [False] * config.channels
        self._received = weakref.WeakSet()
        self._closed = False
        ON_DEVICES.add(self)
        self._watchdog = Watchdog(self) if watchdog else None

    @property
    def local_experts(self) -> range:
        """The experts that this rank owns; with a placement, the numbers of its physical ones."""
        return self._experts_here

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Experts of each rank, for each layer; empty if each expert is held once."""
        return tuple(self._layers)

    def set_placement(
        self,
        placement: Placement | Sequence[Placement],
        *,
        layer: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Change which experts ranks hold; every rank calls this with the same arguments.

        It comes between rounds, the same ones on all ranks, and waits until the rank's device is
        idle. Rounds from then on use the new placement, those of captured graphs too, without a new
        compilation or capture. The program moves the experts' weights: between the same two
        rounds. It is no part of a graph, and not called while one is captured.

        Args:
            placement: of the layer, or one for each layer; with as many experts on each rank as
                before.
            layer: of which layer, if there are several and one changes.
            timeout: seconds to wait for all ranks to make the same call.

        Raises:
            ConfigurationMismatchError: if the ranks' arguments differ.
            ConfigurationError: if the placement is of other experts, ranks or numbers of experts on
                them, or there is no such layer.
            StageError: if a round is in flight, here or at a peer. In all of these cases the
                placement is unchanged on every rank.
        """
        self._open()
        first = 0 if layer is None else layer
        given = by_layer(placement, self.experts, first=first)
        if layer is None and len(given) != len(self._layers):
            raise ConfigurationError(
                f"{len(given)} placements are given for {len(self._layers)} layers: give one for "
                "each, or pass layer="
            )
        changes = [(first + at, each.native) for at, each in enumerate(given)]
        self._native.set_placement(changes, seconds(timeout))
        self._layers[first : first + len(given)] = given

    @property
    def path(self) -> str:
        """Transfer path of tokens: "packets", "latency" or "bandwidth"."""
        return self._native.path

    @property
    def num_sms(self) -> int:
        """Multiprocessors that a kernel takes."""
        return self._native.num_sms

    @property
    def build(self) -> dict[str, Any]:
        """Build of its kernels: `seconds`, and true in `cached` if they were cached."""
        return self._native.build

    def dispatch_send(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
        channel: int | None = None,
        expert_load: torch.Tensor | None = None,
        num_sms: int | None = None,
        layer: int = 0,
        keep: bool = False,
        handle: Handle | None = None,
    ) -> Dispatch:
        """Start a round: launch the send half of dispatch.

        The kernel reads the tensors: do not change them on another stream before it has run.

        Args:
            tokens: `[tokens, hidden]` of `dtype`; at most `max_tokens`.
            ids: `[tokens, top_k]` expert ids of `ids_dtype`; a negative one means none.
            weights: `[tokens, top_k]` router weights, float32; 1 if not given.
            scales: `[tokens, ceil(hidden / block)]` of `scale_dtype`, if tokens are 8-bit floats;
                float8_e8m0fnu may be given as uint8.
            count: `[1]` int32: number of the tokens that exist, read on the device when the kernels
                run; all of them if not given. Keep it until combine has run.
            channel: channel of the round, the same on every rank; by default the first free one.
                Graphs that are replayed at the same time need different ones.
            expert_load: `[experts]` int32 or int64, of all ranks' experts (with a placement, of the
                physical ones: `Placement.logical_load` adds up replicas): to those of this rank,
                the tokens that they get in this round are added on the device, as load balancers
                (EPLB) record it; summed over ranks, it is the load of all experts. A round that
                exceeded the positions is not added.
            num_sms: limit of multiprocessors of this launch, at most that of the all-to-all; other
                phases of the round may have other limits.
            layer: layer whose placement applies, the same on every rank; see `placement`.
            keep: keep the plan for later rounds: see `Received.handle`. Not in compiled code, nor
                in a differentiable round; the same holds of `handle`.
            handle: of an earlier round, whose plan sends these tokens to the same positions; of the
                same round on every rank. The number of tokens is that of the earlier round, and
                `ids`, `weights` and `count` are not given.

        Raises:
            ChannelInUseError: if every channel is held by a round that was not released, or the
                channel's was not.
            ShapeError: if the tensors do not fit; the round is not begun. Ids without an expert are
                detected on the device: `check` raises them.
        """
        self._checks.expert_load(expert_load)
        source = None if self._backward is None else self._source(tokens, ids, weights, count)
        batch = Batch(tokens, scales, ids, weights, count, layer)
        if keep or handle is not None or ids is None:
            batch = planned_batch(self, batch, handle, differentiable=source is not None)
            given = tokens.shape[0]
            plan = Planned(self, given, keep=keep, handle=handle, load=expert_load)
            return dispatches.planned_send(self, batch, channel, num_sms, plan)
        quick = None if source is not None else self._quick()
        if quick is not None:
            taken, stream = free_channel(self._busy, channel), self._launcher.stream()
            sent = quick.dispatch_send(
                stream, taken, tokens, scales, ids, weights, count, layer, num_sms
            )
            if sent is not None:
                self._busy[taken] = True
                return Dispatch(self, taken, sent, count, None, expert_load)
        return dispatches.send(self, source, batch, channel, num_sms, expert_load)

    def dispatch(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
        channel: int | None = None,
        expert_load: torch.Tensor | None = None,
        num_sms: int | None = None,
        layer: int = 0,
        out: Outputs | None = None,
        keep: bool = False,
        handle: Handle | None = None,
        host_counts: bool = False,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
        timeout: float | None = None,
    ) -> Received:
        """`dispatch_send` and `Dispatch.recv` as one kernel.

        Arguments are as of the two. `out` is memory of `empty_outputs` to write to; not in compiled
        code, nor for gradients, nor with `keep`, `handle` or `host_counts`. With `host_counts` the
        call waits for the counts of the round, at most for `timeout` seconds (by default
        `skew_timeout`), and makes tensors of exactly that length: see `Dispatch.counts`.

        With `async_finish` the call runs on the device's communication stream, of high priority,
        behind the current stream or behind `previous_event`; `Received.event` is its end, which a
        stream that reads the tensors has to wait for. Without it the current stream waits for
        `previous_event` first.
        """
        if previous_event is not None or async_finish:
            options: dict[str, Any] = {
                "scales": scales,
                "count": count,
                "channel": channel,
                "expert_load": expert_load,
                "layer": layer,
                "num_sms": num_sms,
                "out": out,
                "keep": keep,
                "handle": handle,
                "host_counts": host_counts,
                "timeout": timeout,
            }
            if async_finish and self._backward is not None and torch.is_grad_enabled():
                streams.refuse_apart("in a differentiable round")
            received, event = streams.ordered(
                (self.device, self._place),
                lambda: self.dispatch(tokens, ids, weights, **options),
                (
                    tokens,
                    ids,
                    weights,
                    scales,
                    count,
                    expert_load,
                    None if handle is None else handle._plan,
                ),
                Received._owned,
                previous_event,
                async_finish,
            )
            received.event = event
            return received
        source = None if self._backward is None else self._source(tokens, ids, weights, count)
        batch = Batch(tokens, scales, ids, weights, count, layer)
        if keep or handle is not None or host_counts or ids is None:
            if out is not None:
                raise ConfigurationError(
                    "out= with keep=, handle= or host_counts=: such a round allocates its outputs"
                )
            self._checks.expert_load(expert_load)
            batch = planned_batch(self, batch, handle, differentiable=source is not None)
            if host_counts:
                dispatches.refuse_host_counts(self, handle)
            given = tokens.shape[0]
            plan = Planned(self, given, keep=keep, handle=handle, load=expert_load)
            if not host_counts or handle is not None:
                return dispatches.planned_both(self, batch, channel, num_sms, plan)
            dispatch = dispatches.planned_send(self, batch, channel, num_sms, plan)
            dispatch.counts(timeout=timeout)
            return dispatch.recv(num_sms=num_sms)
        quick = None if source is not None or expert_load is not None else self._quick()
        if quick is not None:
            launcher, taken = self._launcher, free_channel(self._busy, channel)
            outputs = launcher.outputs() if out is None else self._checks.fitting(out)
            stream, to = launcher.stream(), outputs._buffer
            sent = quick.dispatch(
                stream, taken, tokens, scales, ids, weights, count, layer, to, num_sms
            )
            if sent is not None:
                self._busy[taken] = True
                return Received(self, taken, sent, count, outputs, launcher.heap_rows(taken))
        return dispatches.both(self, source, batch, channel, num_sms, expert_load, out)

    def empty_outputs(self) -> Outputs:
        """Memory for `out=` of dispatch: allocated once, for any number of rounds after each other.

        A round that is dispatched to it overwrites the received tensors of an earlier one: use one
        for each round in flight, and read the tensors before the next dispatch to it. All-to-alls
        of the same shape on one device may share it.
        """
        self._open()
        return self._launcher.outputs()

    def combine_send(
        self, received: moe.Received, outputs: torch.Tensor, *, num_sms: int | None = None
    ) -> Combine:
        """Launch the send half of combine, of the experts' outputs.

        Args:
            received: the round.
            outputs: `[positions, hidden]` of `combine_dtype`: a row for each position of the
                received tokens, in the same order; rows of no token may have any contents. In the
                padded layout also `[local experts, expert_capacity, hidden]`. In the dense
                layout a row is the weighted sum of the token's experts on this rank. Rows
                behind the last position may be left away: if there are fewer than are needed, all
                results are NaN, and `check` raises `CapacityError` on every rank.
            num_sms: as of `dispatch_send`.
        """
        mine = open_round(self, received)
        plain = mine._source is None and mine._planned is None
        quick = self._quick() if plain else None
        if quick is not None:
            stream, rows = self._launcher.stream(), self._checks.by_position(outputs)
            if quick.combine_send(stream, mine.round, rows, num_sms):
                mine._sent = Combine(self, mine, outputs)
                return mine._sent
        combines.send(self, mine, outputs, num_sms)
        mine._sent = Combine(self, mine, outputs)
        return mine._sent

    @overload
    def combine(
        self,
        received: moe.Received,
        outputs: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        bias: Bias = None,
        num_sms: int | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[False] = False,
        timeout: float | None = None,
    ) -> torch.Tensor: ...

    @overload
    def combine(
        self,
        received: moe.Received,
        outputs: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        bias: Bias = None,
        num_sms: int | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[True],
        timeout: float | None = None,
    ) -> tuple[torch.Tensor, Event]: ...

    def combine(
        self,
        received: moe.Received,
        outputs: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        bias: Bias = None,
        num_sms: int | None = None,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
        timeout: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """`combine_send` and `Combine.recv` as one kernel; `timeout` is ignored.

        With `async_finish` it runs on the communication stream, as `dispatch` does, and returns the
        result and its event.
        """
        mine = open_round(self, received)
        if previous_event is not None or async_finish:
            if async_finish and mine._source is not None:
                streams.refuse_apart("in a differentiable round")
            options: dict[str, Any] = {"out": out, "accumulate": accumulate, "bias": bias}
            added = [bias] if bias is None or isinstance(bias, torch.Tensor) else bias
            combined, event = streams.ordered(
                (self.device, self._place),
                lambda: self.combine(received, outputs, num_sms=num_sms, **options),
                (outputs, mine._count, out, mine._plan(), *added),
                lambda combined: [combined],
                previous_event,
                async_finish,
            )
            return combined if event is None else (combined, event)
        plain = mine._source is None and mine._planned is None
        quick = self._quick() if plain else None
        if quick is not None and bias is None and not accumulate:
            launcher, count, sent = self._launcher, mine._count, mine.sent
            into = launcher.combined(sent) if out is None else out
            stream, rows = launcher.stream(), self._checks.by_position(outputs)
            if quick.combine(stream, mine.round, rows, into, count, sent, num_sms):
                mine._sent = True
                return into
        combined = combines.both(self, mine, outputs, out, bias, num_sms, accumulate=accumulate)
        mine._sent = True
        return combined

    def check(self) -> None:
        """Raise the error that the device recorded.

        Raises:
            WaitTimeoutError, PeerLostError, StageError: a wait on the device timed out, or launches
                came out of order; all outputs are NaN from this round on.
            ExpertError: a token named an expert that does not exist, or one twice.
            CapacityError: a rank received more than `max_positions` or `expert_capacity`. Both are
                of rounds that are over, and cleared once raised.
        """
        self._open()
        if self._watchdog is not None:
            self._watchdog.raise_noticed()
        self._native.check()

    def _quick(self) -> DeviceCalls | None:
        """Calls that check and launch in native code; none in code that is being compiled."""
        return None if torch.compiler.is_compiling() else self._launcher.quick

    def _operate(self, name: str, channel: int, num_sms: int | None, *arguments: Any) -> Any:
        """Call an operator, in code that is being compiled."""
        return OPERATORS[name](self._handle, channel, num_sms, self._workspace, *arguments)

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the all-to-all was closed")

    def _end(self) -> None:
        super()._end()
        ON_DEVICES.discard(self)
        if self._watchdog is not None:
            self._watchdog.stop()
        self._launcher.end()
