"""Combine on a device: rounds in flight, and the launches that begin them.

`AllToAll` itself launches by native code; launches that native code declines are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weft.base.arguments import expect
from weft.base.errors import StageError
from weft.moe import gradient, rounds
from weft.moe.device.launcher import NOTHING
from weft.moe.device.received import Received

if TYPE_CHECKING:
    from weft.moe.device.base import Base
    from weft.moe.device.checks import Bias
    from weft.moe.device.launcher import Added

__all__ = ["Combine"]


class Combine(rounds.Combine):
    """A round whose replies are in flight."""

    _all_to_all: Base
    _received: Received

    def __init__(self, all_to_all: Base, received: Received, outputs: torch.Tensor | None) -> None:
        super().__init__(all_to_all, received, outputs)
        self._here = False

    def recv(
        self,
        *,
        out: Any | None = None,
        accumulate: bool = False,
        bias: Bias = None,
        num_sms: int | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Launch the receive half, which waits for all replies and sums them.

        Args:
            out: `[tokens, hidden]` in `output_dtype` on the device to write to; a new tensor if not
                given.
            accumulate: add to what `out` contains.
            bias: `[tokens, hidden]` in `output_dtype`, such as shared expert outputs, or two such
                tensors: added to the sum in float32, before `out` is added and before the result is
                rounded.
            num_sms: as in `AllToAll.dispatch_send`.
            timeout: ignored on a device, where `skew_timeout` bounds every wait.

        Returns:
            `[tokens, hidden]` in `output_dtype`, in the order in which tokens were sent. A token
            without experts gives zeros; rows from `count` on are not written.
        """
        all_to_all, received = self._all_to_all, self._received
        all_to_all._open()
        if self._here:
            raise StageError("this round was combined before: `recv` is called once")
        differentiable = received._source is not None
        added = all_to_all._checks.added(
            received.sent, out, bias, accumulate=accumulate, differentiable=differentiable
        )
        self._here = True
        if received._source is not None:
            outputs, self._outputs = self._outputs, None

            def launch() -> torch.Tensor:
                return self._launch_recv(None, num_sms, added)

            return gradient.combined(received, outputs, launch, added[:2])
        if torch.compiler.is_compiling():
            given = received.sent, received._count, *added
            combined = all_to_all._operate("moe_combine_recv", received.round, num_sms, *given)
            return combined if out is None else out.copy_(combined)
        return self._launch_recv(out, num_sms, added)

    def _launch_recv(
        self, out: torch.Tensor | None, num_sms: int | None, added: Added
    ) -> torch.Tensor:
        launcher, channel = self._all_to_all._launcher, self._received.round
        sent, count = self._received.sent, self._received._count
        into = launcher.combined(sent) if out is None else out
        quick, stream = launcher.quick if added is NOTHING else None, launcher.stream()
        if self._received._planned is not None:
            quick = None
        if quick is None or not quick.combine_recv(stream, channel, into, count, sent, num_sms):
            site = self._received._site()
            launcher.combine_recv(channel, sent, count, into, num_sms, added, **site)
        return into


def send(all_to_all: Base, mine: Received, outputs: torch.Tensor, num_sms: int | None) -> None:
    """Launch the send half for a combine whose tensors are not yet checked."""
    rows = _expert_outputs(all_to_all, mine, outputs)
    if torch.compiler.is_compiling():
        all_to_all._operate("moe_combine_send", mine.round, num_sms, rows)
    else:
        all_to_all._launcher.combine_send(mine.round, rows, num_sms, **mine._site())


def both(
    all_to_all: Base,
    mine: Received,
    outputs: torch.Tensor,
    out: torch.Tensor | None,
    bias: Bias,
    num_sms: int | None,
    *,
    accumulate: bool,
) -> torch.Tensor:
    """Launch both halves as one kernel for a combine whose tensors are not yet checked."""
    rows, differentiable = _expert_outputs(all_to_all, mine, outputs), mine._source is not None
    added = all_to_all._checks.added(
        mine.sent, out, bias, accumulate=accumulate, differentiable=differentiable
    )
    given = mine.sent, mine._count
    if not differentiable and torch.compiler.is_compiling():
        combined = all_to_all._operate("moe_combine", mine.round, num_sms, rows, *given, *added)
        return combined if out is None else out.copy_(combined)

    def launch() -> torch.Tensor:
        launcher = all_to_all._launcher
        into = launcher.combined(mine.sent) if out is None else out
        launcher.combine(mine.round, rows, *given, into, num_sms, added, **mine._site())
        return into

    return gradient.combined(mine, rows, launch, added[:2]) if differentiable else launch()


def _expert_outputs(all_to_all: Base, mine: Received, outputs: torch.Tensor) -> torch.Tensor:
    counted = mine._planned is not None and mine._planned.counts is not None
    return all_to_all._checks.expert_outputs(
        outputs, mine.positions, counted=counted, differentiable=mine._source is not None
    )


def open_round(all_to_all: Base, received: rounds.Received) -> Received:
    """A received round that can be combined.

    Raises:
        TypeError: if it is no received round.
        StageError: if another all-to-all received it, or it was combined or released.
    """
    expect(received, rounds.Received, "received")
    if not isinstance(received, Received) or received._all_to_all is not all_to_all:
        raise StageError("this round was received by another all-to-all")
    received._alive()
    if received._sent is not None:
        raise StageError("this round was combined before")
    return received
