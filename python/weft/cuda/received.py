"""Rounds under way on a device, and what they brought."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weft import _gradient, moe
from weft.errors import ConfigurationError, StageError

if TYPE_CHECKING:
    from weft.cuda.all_to_all import AllToAll
    from weft.cuda.launcher import Arrived

__all__ = ["Combine", "Dispatch", "Received"]


class Dispatch(moe.Dispatch):
    """A round whose tokens are on their way."""

    _all_to_all: AllToAll

    def __init__(
        self,
        all_to_all: AllToAll,
        channel: int,
        given: int,
        count: torch.Tensor | None,
        source: _gradient.Source | None,
    ) -> None:
        self._all_to_all, self._source = all_to_all, source
        #: Which of the buffers it has.
        self.round = channel
        #: Tokens that this rank gave; `count` may say that fewer of them exist.
        self.sent = given
        self._count = count
        self._here = False

    def recv(self, *, num_sms: int | None = None, timeout: float | None = None) -> Received:
        """Launch what waits until every token for this rank's experts is here; returns at once.

        Args:
            num_sms: as of `AllToAll.dispatch_send`.
            timeout: has no meaning on a device, where `skew_timeout` bounds every wait.
        """
        all_to_all = self._all_to_all
        all_to_all._open()
        if self._here:
            raise StageError("this round was received before: `recv` is called once")
        self._here = True
        if torch.compiler.is_compiling():
            return self._received(all_to_all._operate("moe_dispatch_recv", self.round, num_sms))
        return self._received(all_to_all._launcher.dispatch_recv(self.round, num_sms))

    def _received(self, arrived: Arrived | tuple[torch.Tensor, ...]) -> Received:
        self._here = True
        received = Received(self, arrived)
        if self._source is not None:
            _gradient.attach(received, self._source)
        return received


class Received(moe.Received):
    """Tokens for this rank's experts, on its device. Nothing here waits but what says so.

    `tokens` are, in the contiguous and padded layouts, `[positions, hidden]`, allocated by torch
    and the caller's own. In the indexed layout they are a view of Weft's memory,
    `[world_size * max_tokens, hidden]` with a stride between rows, valid until combine is sent or
    the round released; in compiled code a copy of all of it. Their dtype is `wire_dtype`. Rows that
    `rows` does not name hold nothing: they are not written, so they may be no numbers.

    Attributes:
        positions: the most positions there can be, whatever was received.
        expert_counts: `[local experts]` int32 on the device, tokens of each.
        expert_offsets: `[local experts + 1]` int32 on the device: local expert e has the positions
            from `expert_offsets[e]` on; its padding follows its tokens.
        rows: `[positions]` int32 on the device: the row at each position, `source * max_tokens +
            slot`, in the indexed layout a row of `tokens`; -1 for padding. Positions behind
            `expert_offsets[-1]` are not written.
        weights: `[positions]` float32 on the device, the router's; 0 for padding.
    """

    _all_to_all: AllToAll
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor

    def __init__(self, dispatch: Dispatch, arrived: Arrived | tuple[torch.Tensor, ...]) -> None:
        all_to_all = dispatch._all_to_all
        self._all_to_all = all_to_all
        self._released = False
        self._sent: Combine | None = None
        self._count = dispatch._count
        self.round, self.sent = dispatch.round, dispatch.sent
        self.positions = all_to_all.positions
        tokens, scales, counts, offsets, rows, weights = arrived
        self._tokens = tokens
        self._scales = scales if all_to_all.scales else None
        self.expert_counts, self.expert_offsets = counts, offsets
        self.rows, self.weights = rows, weights

    def of_expert(self, expert: int) -> torch.Tensor:
        """The tokens of local expert `expert`: a view, or a copy in the indexed layout.

        Its offset and count come to the host first: this waits for the stream, and cannot be used
        in a CUDA graph. Kernels read `expert_offsets` and `expert_counts` on the device instead.
        """
        return super().of_expert(expert)

    def scales_of_expert(self, expert: int) -> torch.Tensor:
        """The scales of the tokens of local expert `expert`: as `of_expert`, waiting alike."""
        return super().scales_of_expert(expert)

    def copies_sent(self) -> tuple[int, int]:
        """Not to be had: rows are counted on the device alone.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("rows sent are not counted on a device")

    def release(self) -> None:
        """Give the buffers back; the round is over. Once is enough.

        A round that was not combined is ended at its sources too: every rank makes this call then,
        in place of combine.
        """
        if self._released:
            return
        self._alive()
        all_to_all = self._all_to_all
        if self._sent is None:
            if torch.compiler.is_compiling():
                all_to_all._operate("moe_release", self.round, None)
            else:
                all_to_all._launcher.release(self.round)
        elif not self._sent._here:
            self._sent.recv()
        self._released, self._tokens, self._scales = True, None, None
        # That names this round in turn: memory would wait for the garbage collector.
        self._sent = None
        all_to_all._busy[self.round] = False

    def _own_tokens(self) -> torch.Tensor:
        return self._tokens

    def _alive(self) -> None:
        self._all_to_all._open()
        if self._released:
            raise StageError("the round has been released")


class Combine(moe.Combine):
    """A round whose answers are on their way."""

    _all_to_all: AllToAll
    _received: Received

    def __init__(
        self, all_to_all: AllToAll, received: Received, outputs: torch.Tensor | None
    ) -> None:
        super().__init__(all_to_all, received, outputs)
        self._here = False

    def recv(
        self,
        *,
        out: Any | None = None,
        num_sms: int | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Launch what waits for all answers and sums them; returns at once.

        Args:
            out: `[tokens, hidden]` of `output_dtype` on the device to write to; a new tensor if not
                given.
            num_sms: as of `AllToAll.dispatch_send`.
            timeout: has no meaning on a device, where `skew_timeout` bounds every wait.

        Returns:
            `[tokens, hidden]` of `output_dtype`, in the order of the tokens sent. A token without
            experts gives zeros; rows from `count` on are not written.
        """
        all_to_all, received = self._all_to_all, self._received
        all_to_all._open()
        if self._here:
            raise StageError("this round was combined before: `recv` is called once")
        if received._source is not None:
            moe.refuse_out(out)
        all_to_all._check_out(out, received.sent)
        self._here = True
        if received._source is not None:
            outputs, self._outputs = self._outputs, None
            return _gradient.combined(received, outputs, lambda: self._launch_recv(None, num_sms))
        if torch.compiler.is_compiling():
            combined = all_to_all._operate(
                "moe_combine_recv", received.round, num_sms, received.sent, received._count
            )
            return combined if out is None else out.copy_(combined)
        return self._launch_recv(out, num_sms)

    def _launch_recv(
        self, out: torch.Tensor | None = None, num_sms: int | None = None
    ) -> torch.Tensor:
        received, launcher = self._received, self._all_to_all._launcher
        return launcher.combine_recv(received.round, received.sent, received._count, out, num_sms)
