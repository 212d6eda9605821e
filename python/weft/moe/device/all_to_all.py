"""Dispatch and combine on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch

from weft import _native
from weft.base.arguments import expect, expect_flag
from weft.base.errors import ConfigurationError
from weft.gpu import streams
from weft.gpu.device import place_of
from weft.group.communicator import Communicator
from weft.moe import gradient, rounds
from weft.moe.device import combine as combines
from weft.moe.device import config as configuration
from weft.moe.device import dispatch as dispatches
from weft.moe.device.base import Base
from weft.moe.device.channels import free_channel
from weft.moe.device.combine import Combine, open_round
from weft.moe.device.dispatch import Dispatch, planned_batch
from weft.moe.device.launcher import Batch
from weft.moe.device.planned import Planned
from weft.moe.device.received import Received
from weft.moe.placement import by_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.gpu.streams import Event
    from weft.moe.device.checks import Bias
    from weft.moe.device.config import Arguments
    from weft.moe.device.outputs import Outputs
    from weft.moe.device.planned import Handle
    from weft.moe.placement import Placement

__all__ = ["AllToAll"]


@configuration.documented
class AllToAll(Base):
    """Dispatch and combine between GPUs on one host, with separate channels.

    `weft.moe.AllToAll(..., device=...)` makes one too. All tensors are on `device`, contiguous, and
    tokens and outputs begin at multiples of 16 bytes, as torch allocates them. As a context manager
    it closes itself at the end of the block.

    Args:
        communicator: from `weft.init()`; all ranks are on one host, with one GPU each.
        device: "cuda" (torch's current one), "cuda:1" or a `torch.device`; "twin" does the same on
            the CPU, with CPU tensors.
        watchdog: poll for errors every 0.1 s on a thread: they are logged (logger `weft.cuda`), and
            one that ends the group poisons it at every rank at once. `check` raises them as well.
        dtype: token dtype: float32, bfloat16 or float16, or float8_e4m3fn or float8_e5m2, which
            have scales; as a name, a numpy or a torch dtype.
        block: elements that share a scale, in 8-bit dtypes.
        scale_dtype: scale dtype, in 8-bit dtypes: float32 or float8_e8m0fnu (powers of two).
        combine: "reduce", the only one on a device.
        placement: which experts each rank holds, if not each expert once: a `weft.moe.Placement`,
            or one for each layer that shares this all-to-all, with the same expert count per rank
            in all layers. See "Replicas of experts" in docs/moe.md.
        gradients: rounds are differentiable, in the contiguous and padded layouts and outside
            compiled code: see "Gradients" in docs/moe.md. This doubles the memory, for the backward
            pass.
        {options}

    Raises:
        SizeError: before any allocation, if the memory exceeds a limit; names the excess.
        ConfigurationError: if an argument does not apply to a device.
        ConfigurationMismatchError: if the ranks' arguments differ.
        ProviderError: if there is no such device.
    """

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
        gradients = expect_flag(gradients, "gradients")
        config = configuration.make(**arguments)
        layers = by_layer(placement, config.experts)
        if gradients:
            gradient.refuse(config.wire_dtype, config.layout, placed=bool(layers))
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

            gradient.differentiate([self], arguments, make, config.timeout)

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
        """Start a round: launch the dispatch send half.

        The kernel reads the tensors: do not change them on another stream before it has run.

        Args:
            tokens: `[tokens, hidden]` in `dtype`; at most `max_tokens`.
            ids: `[tokens, top_k]` expert ids in `ids_dtype`; a negative one means none.
            weights: `[tokens, top_k]` router weights, float32; 1 if not given.
            scales: `[tokens, ceil(hidden / block)]` in `scale_dtype`, if tokens are 8-bit floats;
                float8_e8m0fnu may be given as uint8.
            count: `[1]` int32: number of existing tokens, read on the device when the kernels run;
                all if not given. Keep it until combine has run.
            channel: round channel, the same on every rank; by default the first free one. Graphs
                that are replayed at the same time need different ones.
            expert_load: `[experts]` int32 or int64, for all ranks' experts (with a placement, for
                the physical ones: `Placement.logical_load` adds up replicas). On the device, this
                round's token counts are added for this rank's experts, as load balancers such as
                EPLB record them; the sum over ranks is the load of all experts. A round that
                exceeded the positions is not added.
            num_sms: SM limit for this launch, at most the all-to-all's limit; other phases in the
                round may have other limits.
            layer: layer whose placement applies, the same on every rank; see `placement`.
            keep: keep the plan for later rounds: see `Received.handle`. Like `handle`, not in
                compiled code, nor in a differentiable round.
            handle: handle from an earlier round, the same round on every rank. Its plan sends these
                tokens to the same positions. The token count is the earlier round's, and `ids`,
                `weights` and `count` are not given.

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

        Arguments are as in these two. `out` is memory from `empty_outputs` to write to; not in
        compiled code, nor for gradients, nor with `keep`, `handle` or `host_counts`. With
        `host_counts` the call waits for the round's counts, at most for `timeout` seconds (by
        default `skew_timeout`), and makes tensors with exactly that length: see `Dispatch.counts`.

        With `async_finish` the call runs on the device's high-priority communication stream, behind
        the current stream or behind `previous_event`. `Received.event` marks when it ends, and a
        stream that reads the tensors has to wait for it. Without `async_finish` the current stream
        waits for `previous_event` first.
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

    def combine_send(
        self, received: rounds.Received, outputs: torch.Tensor, *, num_sms: int | None = None
    ) -> Combine:
        """Launch the combine send half, for expert outputs.

        Args:
            received: the round.
            outputs: `[positions, hidden]` in `combine_dtype`: one row for each received position,
                in the same order; rows without a token may have any contents. In the padded layout
                also `[local experts, expert_capacity, hidden]`. In the dense layout a row is the
                weighted sum over the token's experts on this rank. Rows behind the last position
                may be left out: if there are fewer than needed, all results are NaN, and `check`
                raises `CapacityError` on every rank.
            num_sms: as in `dispatch_send`.
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
        received: rounds.Received,
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
        received: rounds.Received,
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
        received: rounds.Received,
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
        result and an event.
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
