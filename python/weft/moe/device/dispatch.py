"""Dispatch on a device: rounds in flight, and the launches that begin them.

`AllToAll` itself launches by native code; launches that native code declines are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.base.errors import ConfigurationError, StageError
from weft.base.timeout import seconds
from weft.gpu.tensors import is_tensor
from weft.moe import gradient, rounds
from weft.moe.device.channels import free_channel
from weft.moe.device.outputs import Arrived, Outputs
from weft.moe.device.planned import Handle, HostCounts, Planned, refuse, refuse_columns
from weft.moe.device.received import Received
from weft.moe.device.rows import HeapRows

if TYPE_CHECKING:
    from weft.moe.device.base import Base
    from weft.moe.device.launcher import Batch

__all__ = ["Dispatch"]


class Dispatch(rounds.Dispatch):
    """A round whose dispatch is in flight."""

    _all_to_all: Base
    #: Set in a round with a separate plan or arrays.
    _planned: Planned | None = None

    def __init__(
        self,
        all_to_all: Base,
        channel: int,
        given: int,
        count: torch.Tensor | None,
        source: gradient.Source | None,
        load: torch.Tensor | None = None,
    ) -> None:
        self._all_to_all, self._source, self._load = all_to_all, source, load
        #: Channel number.
        self.round = channel
        #: Tokens on this rank; with `count`, fewer may exist.
        self.sent = given
        self._count = count
        self._here = False

    def recv(
        self,
        *,
        num_sms: int | None = None,
        out: Outputs | None = None,
        timeout: float | None = None,
    ) -> Received:
        """Launch the receive half, which waits for every token for this rank's experts.

        Args:
            num_sms: as in `AllToAll.dispatch_send`.
            out: as in `AllToAll.dispatch`.
            timeout: ignored on a device, where `skew_timeout` bounds every wait.
        """
        all_to_all = self._all_to_all
        all_to_all._open()
        if self._here:
            raise StageError("this round was received before: `recv` is called once")
        all_to_all._checks.dispatch_out(out, differentiable=self._source is not None)
        if (plan := self._planned) is not None:
            if out is not None:
                raise ConfigurationError(
                    "out= of a round with a plan or counts of its own: it allocates its outputs"
                )
            self._here = True
            return self._planned_received(plan, plan.receive(self.round, num_sms))
        self._here = True
        if torch.compiler.is_compiling():
            arrived = all_to_all._operate("moe_dispatch_recv", self.round, num_sms, self._load)
            return self._compiled(arrived)
        launcher = all_to_all._launcher
        outputs = launcher.outputs() if out is None else out
        quick, to = launcher.quick if self._load is None else None, outputs._buffer
        if quick is None or not quick.dispatch_recv(launcher.stream(), self.round, to, num_sms):
            launcher.dispatch_recv(self.round, to, num_sms, self._load)
        return self._received(outputs, launcher.heap_rows(self.round))

    def counts(self, *, timeout: float | None = None) -> HostCounts:
        """Wait on the host for this rank's counts in the round.

        `recv` then makes tensors with exactly that length instead of the worst case, and
        `Received.positions` is the number of positions in use. Counts come from all ranks, behind
        the work already on this rank's stream.

        Args:
            timeout: seconds; by default `skew_timeout`.

        Raises:
            WaitTimeoutError: if they did not come in time; the call may be repeated.
            StageError: if the round was received, or the stream is being captured.
        """
        all_to_all = self._all_to_all
        all_to_all._open()
        if self._here:
            raise StageError("this round was received before: call `counts` before `recv`")
        if self._source is not None:
            raise ConfigurationError("counts on the host of a differentiable round")
        refuse_capture(all_to_all.device)
        if self._planned is None:
            refuse_columns(all_to_all)
            self._planned = Planned(all_to_all, self.sent, load=self._load)
        limit = all_to_all._config.skew_timeout if timeout is None else seconds(timeout, "timeout")
        return self._planned.count(self.round, limit)

    def _received(self, outputs: Outputs, heap_rows: HeapRows | None) -> Received:
        self._here = True
        received = Received(
            self._all_to_all, self.round, self.sent, self._count, outputs, heap_rows
        )
        if self._source is not None:
            received._arrived = outputs.arrived()
            gradient.attach(received, self._source)
        return received

    def _planned_received(self, plan: Planned, arrived: Arrived) -> Received:
        """Received round with a separate plan or arrays."""
        heap_rows = self._all_to_all._launcher.heap_rows(self.round)
        received = Received(
            self._all_to_all, self.round, self.sent, self._count, arrived, heap_rows
        )
        received._planned, received.positions = plan, plan.positions
        if self._source is not None:
            self._source.round.handle = plan.handle
            gradient.attach(received, self._source)
        return received

    def _compiled(self, buffer: torch.Tensor) -> Received:
        """Received round in compiled code, which copies rows from the heap."""
        all_to_all, heap_rows = self._all_to_all, None
        if all_to_all.layout == "indexed":
            heap_rows = HeapRows(*all_to_all._operate("moe_landed", self.round, None))
        return self._received(Outputs(all_to_all._layout, buffer), heap_rows)


def send(
    all_to_all: Base,
    source: gradient.Source | None,
    batch: Batch,
    channel: int | None,
    num_sms: int | None,
    load: torch.Tensor | None,
) -> Dispatch:
    """Launch the send half for a dispatch whose tensors are not yet checked."""
    all_to_all._open()
    checked = all_to_all._checks.batch(batch, differentiable=source is not None)
    taken = free_channel(all_to_all._busy, channel)
    dispatch = Dispatch(all_to_all, taken, batch.tokens.shape[0], batch.existing, source, load)
    if torch.compiler.is_compiling():
        all_to_all._operate("moe_dispatch_send", taken, num_sms, *checked)
    elif source is not None:
        dispatch._planned = Planned(all_to_all, dispatch.sent, keep=True, load=load)
        dispatch._planned.send(taken, checked, num_sms)
    else:
        all_to_all._launcher.dispatch_send(taken, checked, num_sms)
    all_to_all._busy[taken] = True
    return dispatch


def both(
    all_to_all: Base,
    source: gradient.Source | None,
    batch: Batch,
    channel: int | None,
    num_sms: int | None,
    load: torch.Tensor | None,
    out: Outputs | None,
) -> Received:
    """Launch both halves as one kernel for a dispatch whose tensors are not yet checked."""
    checks, differentiable = all_to_all._checks, source is not None
    checks.dispatch_out(out, differentiable=differentiable)
    checks.expert_load(load)
    all_to_all._open()
    checked = checks.batch(batch, differentiable=differentiable)
    taken = free_channel(all_to_all._busy, channel)
    dispatch = Dispatch(all_to_all, taken, batch.tokens.shape[0], batch.existing, source)
    if torch.compiler.is_compiling():
        arrived = all_to_all._operate("moe_dispatch", taken, num_sms, load, *checked)
        received = dispatch._compiled(arrived)
    elif source is not None:
        plan = Planned(all_to_all, dispatch.sent, keep=True, load=load)
        dispatch._here = True
        received = dispatch._planned_received(plan, plan.both(taken, checked, num_sms))
    else:
        launcher = all_to_all._launcher
        outputs = launcher.outputs() if out is None else out
        launcher.dispatch(taken, checked, outputs._buffer, num_sms, load)
        received = dispatch._received(outputs, launcher.heap_rows(taken))
    all_to_all._busy[taken] = True
    return received


def planned_send(
    all_to_all: Base,
    batch: Batch,
    channel: int | None,
    num_sms: int | None,
    plan: Planned,
) -> Dispatch:
    """Launch the send half for a dispatch with a separate plan or arrays."""
    taken = free_channel(all_to_all._busy, channel)
    plan.send(taken, batch, num_sms)
    all_to_all._busy[taken] = True
    dispatch = Dispatch(all_to_all, taken, batch.tokens.shape[0], batch.existing, None)
    dispatch._planned = plan
    return dispatch


def planned_both(
    all_to_all: Base,
    batch: Batch,
    channel: int | None,
    num_sms: int | None,
    plan: Planned,
) -> Received:
    """Launch both halves for a dispatch with a separate plan or arrays."""
    taken = free_channel(all_to_all._busy, channel)
    dispatch = Dispatch(all_to_all, taken, batch.tokens.shape[0], batch.existing, None)
    dispatch._planned = plan
    arrived = plan.both(taken, batch, num_sms)
    all_to_all._busy[taken] = dispatch._here = True
    return dispatch._planned_received(plan, arrived)


def planned_batch(
    all_to_all: Base, batch: Batch, handle: Handle | None, *, differentiable: bool
) -> Batch:
    """Batch for a round with a separate plan, if all tensors fit."""
    all_to_all._open()
    is_tensor(batch.tokens, "tokens")
    others = batch.ids, batch.weights, batch.existing
    refuse(all_to_all, handle, batch.tokens, others, differentiable=differentiable)
    return all_to_all._checks.batch(batch._replace(layer=0), differentiable=False)


def refuse_host_counts(all_to_all: Base, handle: Handle | None) -> None:
    """Raise if a dispatch cannot wait on the host for the counts."""
    if handle is None:
        refuse_capture(all_to_all.device)
    elif handle._counts is None:
        raise ConfigurationError(
            "host_counts= with a handle whose round had none: pass it with that round too"
        )


def refuse_capture(device: torch.device) -> None:
    """Raise if a device's current stream is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise StageError(
            "counts on the host while the stream is captured: the host would wait for a kernel "
            "that does not run; end the capture first"
        )
