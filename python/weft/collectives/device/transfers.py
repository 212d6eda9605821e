"""Send, receive and batched messages on a device."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

from weft.base.errors import ConfigurationError, ShapeError, UnknownError
from weft.collectives.device.base import CollectiveBase, written
from weft.collectives.device.checks import address

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weft.gpu.streams import Event

__all__ = ["Receive", "Send", "Transfers"]


class Send(NamedTuple):
    """Message to a rank, for `Collectives.batch`.

    Attributes:
        tensor: any shape and dtype.
        peer: rank that receives it.
    """

    tensor: torch.Tensor
    peer: int


class Receive(NamedTuple):
    """Message from a rank, for `Collectives.batch`.

    Attributes:
        tensor: tensor to fill; any shape and dtype with the message's byte count.
        peer: rank that sends it.
    """

    tensor: torch.Tensor
    peer: int


class Transfers(CollectiveBase):
    """Calls between two ranks; `weft.cuda.Collectives` describes them."""

    @overload
    def send(
        self,
        tensor: torch.Tensor,
        peer: int,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[False] = False,
    ) -> None: ...

    @overload
    def send(
        self,
        tensor: torch.Tensor,
        peer: int,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[True],
    ) -> Event: ...

    def send(
        self,
        tensor: torch.Tensor,
        peer: int,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> Event | None:
        """Send a tensor to a rank, which receives it by `recv`.

        The kernel ends once the message is in the receiver's buffers, which have 32 KiB or more. A
        longer message may wait for the receive: use `batch` where two ranks send to each other.

        Args:
            tensor: any shape and dtype.
            peer: rank that receives it, another than this one.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            With `async_finish`, an event for when it ends.

        Raises:
            UnknownError: if there is no other rank `peer`.
            ShapeError, ConfigurationError, ClosedError: as in `all_reduce`.
        """
        return self._transfer((Send(tensor, peer),), previous_event, async_finish)

    @overload
    def recv(
        self,
        tensor: torch.Tensor,
        peer: int,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def recv(
        self,
        tensor: torch.Tensor,
        peer: int,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[True],
    ) -> tuple[torch.Tensor, Event]: ...

    def recv(
        self,
        tensor: torch.Tensor,
        peer: int,
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, Event]:
        """Fill a tensor with the next message from a rank.

        Args:
            tensor: any shape and dtype with the message's byte count. A different message length
                ends the group with `ConfigurationMismatchError`.
            peer: rank that sends it, another than this one.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            `tensor`.

        Raises:
            UnknownError: if there is no other rank `peer`.
            ShapeError, ConfigurationError, ClosedError: as in `all_reduce`.
        """
        event = self._transfer((Receive(tensor, peer),), previous_event, async_finish)
        return tensor if event is None else (tensor, event)

    @overload
    def batch(
        self,
        messages: Sequence[Send | Receive],
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[False] = False,
    ) -> None: ...

    @overload
    def batch(
        self,
        messages: Sequence[Send | Receive],
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: Literal[True],
    ) -> Event | None: ...

    def batch(
        self,
        messages: Sequence[Send | Receive],
        *,
        previous_event: Event | torch.cuda.Event | None = None,
        async_finish: bool = False,
    ) -> Event | None:
        """Send and receive at the same time, in one kernel.

        No message in a batch waits for another one. Order therefore matters only between messages
        with the same peer and direction, which are matched in list order. The other end may use any
        batch, or `send` or `recv`.

        Args:
            messages: at most 128; a tensor to receive overlaps no other tensor in the batch. An
                empty list launches no kernel.
            previous_event: as in `all_reduce`.
            async_finish: as in `all_reduce`.

        Returns:
            With `async_finish`, an event for when it ends; `None` for an empty list.

        Raises:
            UnknownError: if there is no other rank `peer`.
            ShapeError: also if a tensor to receive overlaps another one.
            ConfigurationError, ClosedError: as in `all_reduce`.
        """
        return self._transfer(messages, previous_event, async_finish)

    def _transfer(
        self,
        messages: Sequence[Send | Receive],
        previous: Event | torch.cuda.Event | None,
        finish: bool,
    ) -> Event | None:
        """Launch a batch; returns an event if it has a separate stream."""
        if not messages:
            self._open()
            return None
        batch = [self._described(message) for message in messages]
        if finish or previous is not None:
            given = [message.tensor for message in messages]
            call = partial(self._transfer, messages, None, False)
            ended = self._behind(call, given, previous, finish)
            return None if ended is None else ended[1]
        if len(batch) > 1:
            check_apart(batch)
        self._native.run_transfers(self._stream(), batch)
        for message in messages:
            if isinstance(message, Receive):
                written(message.tensor)
        return None

    def _described(self, message: Send | Receive) -> tuple[int, bool, int, int]:
        """Peer, direction, address and bytes for a message."""
        if not isinstance(message, (Send, Receive)):
            raise ConfigurationError(
                f"messages contain {type(message).__name__}: expected weft.cuda.Send or "
                "weft.cuda.Receive"
            )
        tensor, peer = message
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise UnknownError(
                f"peer is {peer}: expected a rank from 0 to {self.world_size - 1} other than "
                f"{self.rank}, this one"
            )
        begin = address(tensor, "tensor", self.device)
        return peer, isinstance(message, Receive), begin, tensor.nbytes


def check_apart(batch: Sequence[tuple[int, bool, int, int]]) -> None:
    """Raise if the memory for a receive is also used by another transfer.

    Args:
        batch: as `DeviceCollectives.run_transfers` takes it.
    """
    # Ends of all tensors so far, and of those that are written.
    end = end_written = 0
    for _, receives, begin, length in sorted(batch, key=lambda each: each[2]):
        if length == 0:
            continue
        if begin < end_written or (receives and begin < end):
            raise ShapeError(
                "the tensor of a receive overlaps another one of the batch: pass memory of its own"
            )
        end = max(end, begin + length)
        if receives:
            end_written = max(end_written, begin + length)
