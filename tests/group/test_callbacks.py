"""Request callbacks."""

import pytest

from tests import ranks


@pytest.mark.parametrize("transport", ranks.TRANSPORTS)
@pytest.mark.parametrize("length", [16, 3 << 20])
def test_a_scatter_ends_once_for_all_its_peers(transport: str, length: int) -> None:
    first, *others = ranks.run("group.callbacks.scattered", 4, transport, length=length)
    assert first["ended"] == ["0 None", "1 None"]
    assert all(other["right"] for other in others)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_callback_may_make_the_next_call_for_ever(transport: str) -> None:
    for result in ranks.run("group.callbacks.chained", 2, transport, count=2000):
        assert result == {"sent": 2000, "depth": True}


def test_waits_end_by_callbacks_that_are_due_meanwhile() -> None:
    for found in ranks.run("group.callbacks.waiting", 2, "tcp"):
        # The later rank's wait may find its signal there.
        assert sorted(found["ended"][:2]) == ["inner", "outer"]
        assert found["ended"][2] is True


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_a_callback_raises_is_neither_lost_nor_fatal(transport: str) -> None:
    for result in ranks.run("group.callbacks.raising", 2, transport):
        assert result["caught"] == ["ZeroDivisionError('in a callback')"]
        assert result["refused"] == "CreditError"
        assert result["called"] == 0


@pytest.mark.parametrize(
    ("end", "waited"), [("poison", "GroupPoisonedError"), ("close", "ClosedError")]
)
def test_a_request_that_fails_hands_its_error_to_the_callback_and_the_wait(
    end: str, waited: str
) -> None:
    first, _ = ranks.run("group.callbacks.unfinished", 2, "tcp", length=200 << 20, end=end)
    assert first == ["WriteFailedError", waited]
