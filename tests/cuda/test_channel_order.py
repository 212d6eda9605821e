"""Order between streams that share a channel, with streams that only record their waits."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytestmark = pytest.mark.torch

pytest.importorskip("torch")
order: Any = importlib.import_module("weft.gpu.order")


class Stream:
    """A stream, its capture state, and the streams that it waits for."""

    def __init__(self, *, capturing: bool = False) -> None:
        self.capturing = capturing
        self.waited: list[Stream] = []

    def wait_stream(self, stream: Stream) -> None:
        # CUDA rejects one, and the other adds the stream to the capture.
        assert stream.capturing == self.capturing
        self.waited.append(stream)


def channel() -> Any:
    return order.ChannelOrder(lambda stream: stream.capturing)


def test_an_eager_call_waits_for_the_last_on_another_stream() -> None:
    here, there, calls = Stream(), Stream(), channel()
    for stream in (here, here, there, there, here):
        calls.follow(stream)
    assert here.waited == [there]
    assert there.waited == [here]


def test_streams_of_one_capture_are_ordered() -> None:
    first, second, calls = Stream(capturing=True), Stream(capturing=True), channel()
    for stream in (first, second, second, first):
        calls.follow(stream)
    assert second.waited == [first]
    assert first.waited == [second]


def test_a_capture_waits_for_nothing_outside_of_it() -> None:
    eager, captured, calls = Stream(), Stream(capturing=True), channel()
    calls.follow(eager)
    calls.follow(captured)
    assert captured.waited == []


def test_an_eager_call_waits_for_the_one_before_a_capture() -> None:
    before, captured, after, calls = Stream(), Stream(capturing=True), Stream(), channel()
    calls.follow(before)
    calls.follow(captured)
    captured.capturing = False
    calls.follow(after)
    assert after.waited == [before]


def test_a_stream_that_was_eager_is_part_of_a_capture_once_it_is_captured() -> None:
    stream, fork, calls = Stream(), Stream(), channel()
    calls.follow(stream)
    stream.capturing = fork.capturing = True
    calls.follow(stream)
    calls.follow(fork)
    assert fork.waited == [stream]


def test_captures_that_ended_and_captures_that_go_on_are_no_part_of_others() -> None:
    first, second = Stream(capturing=True), Stream(capturing=True)
    eager, other, calls = Stream(), Stream(), channel()
    calls.follow(eager)
    calls.follow(first)
    first.capturing = False
    calls.follow(second)
    assert second.waited == []
    # The eager stream is being captured now, so its earlier work cannot be waited for through it.
    eager.capturing = True
    calls.follow(other)
    assert other.waited == []
