"""Direct collectives on tensors that `weft.symmetric_register` lent, on the twin."""

from typing import Any

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(150)]

pytest.importorskip("torch")


def results(worker: str, count: int, **arguments: Any) -> list[Any]:
    return ranks.run(
        f"backend.registered_collectives.{worker}", count, timeout=120, with_torch=True, **arguments
    )


@pytest.mark.parametrize(("count", "seed"), [(1, 1), (2, 2), (3, 3), (4, 4)])
def test_results_are_those_of_the_heap_whichever_memory_the_tensors_are_in(
    count: int, seed: int
) -> None:
    assert results("results", count, seed=seed, calls=24) == [24 * 5] * count


@pytest.mark.parametrize("what", ["registration", "heap", "offset"])
def test_calls_at_other_places_raise_on_all_ranks(what: str) -> None:
    errors = results("differing", 2, what=what)
    for error in errors:
        assert error.startswith("ConfigurationMismatchError: "), errors
        assert "different direct calls" in error


@pytest.mark.parametrize("shift", [4, 8])
def test_registrations_that_begin_differently_take_chunks(shift: int) -> None:
    for rank, found in enumerate(results("misaligned", 2, shift=shift)):
        here, there = (0, shift) if rank == 0 else (shift, 0)
        for what in ("input", "output"):
            assert found[what] == (
                f"ConfigurationError: direct all_reduce: the registered {what} begins {here} bytes "
                f"behind a multiple of 16 here and {there} at rank {1 - rank}; register tensors "
                "that begin alike, omit algorithm, or use two_shot"
            )
        # A reduce does not access peers' outputs.
        assert found["unused"] == "none"
        assert found["right"]
        assert found["copied"]


def test_a_registration_ends_behind_calls_that_use_it() -> None:
    for found in results("ended", 2):
        assert found["results"]
        assert "direct all_reduce: input and output must be symmetric" in found["refused"]


def test_registrations_end_with_their_communicator() -> None:
    for found in results("closed", 2):
        assert found[0] == "2.0"
        assert [error.split(":")[0] for error in found[1:]] == ["ClosedError"] * 2
