"""Wrongly typed arguments: a TypeError names the argument, the types expected and given."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import weft


@pytest.fixture
def group() -> Iterator[Any]:
    with weft.init(rank=0, world_size=1) as communicator:
        yield communicator


SHAPE: dict[str, Any] = {"experts": 4, "top_k": 2, "hidden": 4, "max_tokens": 8}
TOKENS = np.ones((3, 4), np.float32)
IDS = np.zeros((3, 2), np.int64)


def wrong_calls() -> list[tuple[str, Callable[[Any], object]]]:
    """Message parts, and the call that raises it."""
    page = (b"", 0, b"", 0, 8)
    return [
        ("communicator: expected weft.Communicator, got NoneType", made_on(None)),
        ("communicator: expected weft.Communicator, got int", made_on(3)),
        (
            "experts: expected int, got str",
            lambda group: weft.moe.AllToAll(group, **SHAPE | {"experts": "4"}),
        ),
        ("received: expected weft.moe.Received, got ndarray", combined("combine")),
        ("received: expected weft.moe.Received, got ndarray", combined("combine_send")),
        ("counter: expected weft.Counter, got int", lambda group: group.write(0, 0, [])),
        ("counter: expected weft.Counter, got str", lambda group: group.signal(0, "a")),
        ("writes: expected Mapping, got list", lambda g: g.scatter([], g.counter())),
        ("pages: expected weft.Page, got tuple", lambda g: g.write(0, g.counter(), [page])),
        ("pages: expected weft.Page, got int", lambda g: g.write(0, g.counter(), [1])),
        (
            "source of a page: expected weft.Region, got bytes",
            lambda g: g.write(0, g.counter(), [weft.Page(*page)]),  # type: ignore[arg-type]
        ),
        ("regions: expected weft.Region, got ndarray", lambda group: group.share([TOKENS])),
        ("counters: expected weft.Counter, got int", lambda group: group.share([], [7])),
        (
            "source: expected weft.Region, got ndarray",
            lambda g: g.peer_group(g.counter(), TOKENS, []),
        ),
        ("destinations: expected weft.RemoteRegion, got weft.Region", lambda g: member(g)),
        ("expected: expected Mapping, got list", lambda group: group.counter().wait([0])),
        ("timeout: expected a number of seconds, got str", lambda g: g.barrier(timeout="1")),
        ("providers: expected a sequence of str, got str", lambda _: weft.init(providers="tcp")),
        ("providers: expected a sequence of str, got int", lambda _: weft.listen(providers=1)),  # type: ignore[arg-type]
        ("address: expected str, got int", lambda _: weft.connect(5)),  # type: ignore[arg-type]
        ("ranks: expected Sequence or ndarray, got int", lambda _: weft.moe.Placement(5)),  # type: ignore[arg-type]
    ]


def made_on(value: Any) -> Callable[[Any], object]:
    return lambda _: weft.moe.AllToAll(value, **SHAPE)


def combined(name: str) -> Callable[[Any], object]:
    return lambda group: getattr(weft.moe.AllToAll(group, **SHAPE), name)(TOKENS, TOKENS)


def member(group: Any) -> object:
    region = group.alloc(8)
    return group.peer_group(group.counter(), region, [region])


@pytest.mark.parametrize(("message", "call"), wrong_calls(), ids=lambda each: str(each)[:40])
def test_a_wrong_type_is_named(group: Any, message: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError) as raised:
        call(group)
    assert message in str(raised.value)
