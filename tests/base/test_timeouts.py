"""Invalid timeouts are rejected alike by every call that waits."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import weft
from weft import errors

REFUSED = [math.nan, math.inf, -math.inf, -1.0, -1e-300]
#: Extremely long timeouts; some exceed a 64-bit nanosecond count.
LARGE: list[float] = [1e9, 1e10, 1e300, 10**400]


def waits(communicator: weft.Communicator) -> dict[str, Callable[[float], Any]]:
    """Every call with a timeout, in an order in which all end at once in a one-rank group."""
    counter = communicator.counter()
    all_to_all = weft.moe.AllToAll(communicator, experts=1, top_k=1, hidden=4, max_tokens=1)
    tokens, ids = np.ones((1, 4), np.float32), np.zeros((1, 1), np.int64)
    rounds: list[Any] = []

    def dispatch(timeout: float) -> None:
        rounds.append(all_to_all.dispatch(tokens, ids, timeout=timeout))

    return {
        "barrier": lambda t: communicator.barrier(timeout=t),
        "all_gather": lambda t: communicator.all_gather(b"", timeout=t),
        "share": lambda t: communicator.share([], [counter], timeout=t),
        "wait": lambda t: counter.wait({}, timeout=t),
        "write": lambda t: communicator.scatter({}, counter).wait(timeout=t),
        "AllToAll": lambda t: weft.moe.AllToAll(
            communicator, experts=1, top_k=1, hidden=4, max_tokens=1, timeout=t
        ),
        "dispatch": dispatch,
        "combine": lambda t: all_to_all.combine(rounds[0], rounds[0].tokens, timeout=t),
        "close": lambda t: all_to_all.close(timeout=t),
    }


@pytest.mark.parametrize("timeout", LARGE)
def test_a_large_timeout_is_taken(timeout: float) -> None:
    with weft.init(rank=0, world_size=1, timeout=timeout) as communicator:
        for call in waits(communicator).values():
            call(timeout)


@pytest.mark.parametrize("timeout", REFUSED)
def test_what_is_no_time_is_refused(timeout: float) -> None:
    with weft.init(rank=0, world_size=1) as communicator:
        calls = waits(communicator)
        calls["dispatch"](1.0)
        for name, call in calls.items():
            with pytest.raises(ValueError, match="finite number of seconds") as raised:
                call(timeout)
            assert isinstance(raised.value, errors.ConfigurationError), name
            assert str(raised.value).startswith(f"timeout {timeout}: ")
        with pytest.raises(errors.ConfigurationError):
            communicator.counter().wait_for_credit(0, 0, timeout=timeout)
        with pytest.raises(errors.ConfigurationError):
            communicator.reform(timeout=timeout)
        # The rejected call closed no object.
        calls["close"](1.0)


@pytest.mark.parametrize("argument", ["timeout", "silence_timeout", "spin"])
@pytest.mark.parametrize("value", REFUSED)
def test_init_refuses_what_is_no_time(argument: str, value: float) -> None:
    given: dict[str, Any] = {argument: value}
    with pytest.raises(errors.ConfigurationError, match=f"^{argument} "):
        weft.init(rank=0, world_size=1, **given)
