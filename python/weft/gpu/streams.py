"""Calls on a communication stream: events to wait for, and tensors to keep alive."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch

from weft.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Event", "communication_stream", "is_capturing"]

Result = TypeVar("Result")


class Event:
    """The end of a call that was made with `async_finish=True`.

    Attributes:
        event: torch event; `None` for a twin, whose calls have ended when they return.
    """

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Have a stream wait for it; by default the current one."""
        if self.event is not None:
            self.event.wait(stream)

    def query(self) -> bool:
        """True if the call has ended."""
        return self.event is None or self.event.query()

    def synchronize(self) -> None:
        """Wait for it on the host."""
        if self.event is not None:
            self.event.synchronize()


@cache
def communication_stream(device: torch.device, place: int = 0) -> torch.cuda.Stream:
    """High-priority stream on which calls with `async_finish=True` run.

    One for each device, so that calls of several all-to-alls come in the same order on every rank.
    It lives as long as the process: torch's allocator may query it about freed tensors at any time.

    Args:
        device: a GPU.
        place: which of the ranks that a local group has on this device: kernels on one rank
            wait for kernels on the others, and would never end behind each other on one stream.
    """
    del place  # Distinguishes the cached streams.
    return torch.cuda.Stream(device, priority=-1)


def ordered(
    at: tuple[torch.device, int],
    call: Callable[[], Result],
    given: Iterable[torch.Tensor | None],
    made: Callable[[Result], Iterable[torch.Tensor]],
    previous: Event | torch.cuda.Event | None,
    finish: bool,
) -> tuple[Result, Event | None]:
    """Make a call after an event: the result, and an end event if it runs on a separate stream.

    Args:
        at: as in `apart`.
        call: as in `apart`.
        given: as in `apart`.
        made: as in `apart`.
        previous: event that the call comes after.
        finish: whether it runs on the communication stream.
    """
    if torch.compiler.is_compiling():
        refuse_apart("in compiled code")
    if finish:
        return apart(at, call, given, made, previous)
    if previous is not None:
        after(previous, at[0])
    return call(), None


def refuse_apart(where: str) -> NoReturn:
    """Raise since a call cannot run behind events or on a separate stream."""
    raise ConfigurationError(
        f"previous_event= and async_finish= {where}: put the call on a stream of your own instead"
    )


def apart(
    at: tuple[torch.device, int],
    call: Callable[[], Result],
    given: Iterable[torch.Tensor | None],
    made: Callable[[Result], Iterable[torch.Tensor]],
    previous: Event | torch.cuda.Event | None,
) -> tuple[Result, Event]:
    """Make a call on the communication stream: the result, and an end event.

    Args:
        at: arguments for `communication_stream`.
        call: puts kernels on the current stream.
        given: tensors that these kernels read.
        made: result tensors, which the caller's stream reads.
        previous: event before the call; by default one recorded now on the current stream.
    """
    refuse(previous)
    if at[0].type != "cuda":
        return call(), Event(None)
    current, own = torch.cuda.current_stream(at[0]), communication_stream(*at)
    if previous is None:
        own.wait_stream(current)
    else:
        previous.wait(own)
    with torch.cuda.stream(own):
        result = call()
        event = own.record_event()
    # The allocator reuses this memory only after the stream that uses it.
    for tensor in given:
        if tensor is not None:
            tensor.record_stream(own)
    for tensor in made(result):
        tensor.record_stream(current)
    return result, Event(event)


def after(previous: Event | torch.cuda.Event, device: torch.device) -> None:
    """Put the current stream behind an event."""
    refuse(previous)
    if device.type == "cuda":
        previous.wait(torch.cuda.current_stream(device))


def refuse(previous: object) -> None:
    """Raise if a value is no event."""
    if previous is not None and not isinstance(previous, (Event, torch.cuda.Event)):
        raise ConfigurationError(
            f"previous_event is a {type(previous).__name__}: pass a torch.cuda.Event, or what a "
            "call with async_finish=True gave"
        )


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """True if a graph is being captured on a stream."""
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())
