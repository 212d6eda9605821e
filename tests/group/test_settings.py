"""Settings that have to be equal on all ranks."""

import pytest

from tests.ranks import run


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([1, 1, 1, 1], ""),
        ([1, 1, 2, 3], "rank 0 passed size=1, rank 2 size=2: expected equal values"),
        ([1, 2, 2, 2], "rank 0 passed size=1, rank 1 size=2: expected equal values"),
    ],
)
def test_rank_0_and_the_first_that_differs_from_it_are_named(values: list[int], error: str) -> None:
    assert run("group.settings.compared", 4, "shm", values=values) == [error] * 4
