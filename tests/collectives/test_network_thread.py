"""Call thread between hosts, and how it ends."""

from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def test_calls_behind_the_end_raise_instead_of_waiting() -> None:
    from weft.collectives.hosts.pipeline import NetworkError, NetworkThread
    from weft.errors import ClosedError

    class Collectives:
        def __init__(self) -> None:
            self.made: list[Any] = []

        def run(self, call: Any, timeout: float, guard: Any) -> None:
            self.made.append(call)

    collectives: Any = Collectives()
    call: Any = "a call"
    thread = NetworkThread(collectives, (0, 1), 1.0, lambda: None)
    assert thread.submit(lambda: None, call).result(10) is None
    assert thread.stop(10.0)
    with pytest.raises(NetworkError) as raised:
        thread.submit(lambda: None, call).result(10)
    assert isinstance(raised.value.error, ClosedError)
    assert collectives.made == [call]
