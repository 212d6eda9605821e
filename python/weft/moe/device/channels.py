"""Channels: one for each round in flight in an all-to-all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.base.errors import ChannelInUseError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["free_channel"]


def free_channel(busy: Sequence[bool], named: int | None) -> int:
    """The channel that the caller names, or the first free one; the same on every rank.

    The first free channel rather than the next, so that code which ends all rounds leaves the state
    unchanged: compiled code is not compiled anew, and replayed graphs keep the same channels.

    Args:
        busy: channels with a round in flight.
        named: the channel that the caller names.

    Raises:
        ConfigurationError: if there is no such channel.
        ChannelInUseError: if it is busy, or all are.
    """
    if named is not None:
        if not 0 <= named < len(busy):
            raise ConfigurationError(
                f"channel is {named}: there are {len(busy)}, from 0 on; pass channels="
            )
        if busy[named]:
            raise ChannelInUseError(f"channel {named} has a round in flight: release it first")
        return named
    for channel, taken in enumerate(busy):
        if not taken:
            return channel
    raise ChannelInUseError(
        f"{len(busy)} rounds are in flight, one on each channel: release one, or pass channels="
    )
