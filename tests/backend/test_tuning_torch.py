"""Algorithm selection in torch process groups: by a file, and with reproducible sums."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run
from weft.collectives import tuning

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
CONSTANTS = {"step_s": 1e-6, "post_s": 0.0, "byte_s": 1e-9, "add_byte_s": 1e-9, "copy_byte_s": 0.0}


@pytest.fixture(autouse=True)
def torch() -> Any:
    return pytest.importorskip("torch")


def results(worker: str, file: Path, **variables: str) -> list[Any]:
    environment = {"WEFT_TUNING": str(file), "WEFT_LOG": "tuner"} | variables
    return run(
        worker,
        3,
        environment=environment,
        backend="weft",
        quiet=False,
        timeout=120,
        with_torch=True,
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file by which a ring is the fastest all-reduce, and two-shot the second."""
    times = [
        {"collective": "all-reduce", "algorithm": algorithm, "chunks": 8, "points": [[4, seconds]]}
        for algorithm, seconds in (("ring", 1e-6), ("two-shot", 2e-6), ("one-shot", 4e-6))
    ]
    machine = tuning.machine_name()
    entry = {"provider": "shm", "ranks": 3, "machine": machine, "constants": CONSTANTS}
    path = tmp_path / "times.json"
    path.write_text(tuning.text_of([entry | {"times": times}]), encoding="utf-8")
    return path


def test_groups_select_by_the_file_and_sums_are_reproducible_on_request(file: Path) -> None:
    for found in results("backend.tuning.sums", file):
        # The default group's ring adds in another order.
        assert found["found"] == {"default": False, "option": True, "split": True}
        ring, *ordered = found["messages"]
        start = "all-reduce of 12000 bytes, 3 ranks: "
        assert ring.startswith(start + "ring, measured 3000.0 us; two-shot 2.00x, one-shot 4.00x")
        for each in ordered:
            assert each.startswith(start + "two-shot, measured 6000.0 us, in rank order; one-shot")
        assert len(ordered) == 2, "once for each shape and group"


def test_the_variable_requests_reproducible_sums_of_all_groups(file: Path) -> None:
    for found in results("backend.tuning.sums", file, WEFT_REPRODUCIBLE="1"):
        assert found["found"] == {"default": True, "option": True, "split": True}


def test_a_damaged_file_is_named_by_every_rank(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text('{"format": "weft-tuning-1",\n "entries": [}', encoding="utf-8")
    errors = results("backend.tuning.rejected", file)
    where = f"tuning file: {file}: not valid: expected value at line 2 column 14"
    assert errors[0].startswith(f"ConfigurationError: {where}")
    for error in errors[1:]:
        assert "rank 0" in error
        assert where in error
