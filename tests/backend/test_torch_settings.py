"""Torch process groups beside other torch and launcher settings."""

from typing import Any

import pytest

from tests.forked_cases import results

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

CASES = {
    "detail": 2,
    "other_plugin": 2,
    "waits_outside": 2,
    "hosts": 4,
    "gradients": 2,
    "gradients_alone": 1,
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    pytest.importorskip("torch")
    return results("backend.settings", CASES, at_once=6)


def test_detailed_debugging_names_mismatched_collectives(found: Any) -> None:
    for each in found["detail"]:
        assert each["value"] == [4.0] * 3
        assert each["received"] == [4.0] * 3
        assert each["wrapper"] == "_ProcessGroupWrapper"
        assert each["objects"] == [0, 1]
        assert "Detected mismatch between collectives on ranks" in each["kind"]
        assert "Detected mismatch between collectives on ranks" in each["size"]


def test_another_plugin_that_was_registered_first_changes_nothing(found: Any) -> None:
    for each in found["other_plugin"]:
        assert each["order"] == ["ANOTHER", "WEFT"]
        assert each["mixed"] == "weft"
        assert each["values"] == [[2.0, 2.0]] * 4


def test_compiled_collectives_may_be_awaited_outside(found: Any) -> None:
    for rank, each in enumerate(found["waits_outside"]):
        moved = [0.0, 1.0, 1.0, 2.0] if rank == 0 else [2.0, 3.0, 3.0, 4.0]
        share = [1.0, 3.0] if rank == 0 else [5.0, 7.0]
        whole = [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
        assert each == [[moved, share, whole, [2.0, 6.0, 10.0, 14.0]]] * 3


def test_fsdp2_averages_and_divides_by_a_factor(found: Any) -> None:
    for each in found["gradients"] + found["gradients_alone"]:
        assert len(each) == 6
        assert all(each.values()), each


def test_locality_is_that_of_the_machine_in_each_group(found: Any) -> None:
    assert [rank["routes"] for rank in found["hosts"]] == [
        [[None, "shm", "tcp", "tcp"], [None, "tcp"]],
        [["shm", None, "tcp", "tcp"]],
        [["tcp", "tcp", None, "shm"], ["tcp", None], [None, "shm"]],
        [["tcp", "tcp", "shm", None], ["shm", None]],
    ]
    assert [rank["value"] for rank in found["hosts"]] == [[8.0], [4.0], [12.0], [12.0]]
