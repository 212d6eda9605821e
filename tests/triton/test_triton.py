"""Device functions in `weft.triton` under Triton's interpreter, one process for each rank."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT, ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

pytest.importorskip("triton")

ROUNDS = 6
FIRST = (0, 2**31 - 4, -4)


def run(worker: str, count: int, **arguments: Any) -> list[Any]:
    environment = {"TRITON_INTERPRET": "1"}
    call = f"triton.calls.{worker}"
    return ranks.run(call, count, environment=environment, timeout=100, **arguments)


def wrapped(number: int) -> int:
    """The number as int32."""
    return (number + 2**31) % 2**32 - 2**31


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run("calls", request.param, rounds=ROUNDS)


def test_a_ring_of_puts_and_signals_carries_each_round(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        before = (rank - 1) % len(results)
        for first, rounds in zip(FIRST, result["ring"], strict=True):
            for number, arrived in enumerate(rounds, 1):
                epoch = wrapped(first + number)
                # The remainder has the epoch's sign, as in C.
                tail = abs(epoch) % 1000 * (1 if epoch >= 0 else -1)
                assert arrived == [before * 1000 + tail]


def test_an_all_to_all_reuses_its_buffers_while_counters_wrap(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["all_to_all"] == [True] * len(FIRST)


def test_a_barrier_orders_stores_to_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["barrier"] == [0] * len(FIRST)


def test_one_program_of_each_round_is_the_last(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["slices"] == [[[1, True, 0]] * 3] * 3


def test_claims_of_a_counter_are_distinct(results: list[dict[str, Any]]) -> None:
    claimed = [number for result in results for number in result["claims"]]
    assert sorted(claimed) == list(range(10 * len(results)))


def test_a_context_is_that_of_its_allocation(results: list[dict[str, Any]]) -> None:
    right = {"same": True, "table": True, "distances": True}
    assert [result["context"] for result in results] == [right | {"refused": "RegionError"}] * len(
        results
    )


def test_a_wait_that_expires_names_its_rank_and_ends_those_of_its_peers() -> None:
    check_expired(*run("expired", 2))


def check_expired(waiting: dict[str, Any], other: dict[str, Any]) -> None:
    for found in (waiting, other):
        assert found["outputs"] == found["again"] == [-1, 5]
    assert waiting["error"][0] == "WaitTimeoutError"
    assert waiting["error"][2] == (
        "rank 0 waited for rank 1 in a wait of a Triton kernel (channel 0, slot 7) and timed out: "
        "expected epoch 5, observed 3; rank 1 is lost, stuck or further behind than skew_timeout "
        "allows"
    )
    assert other["error"][0] == "GroupPoisonedError"


def test_the_layout_is_that_of_the_table() -> None:
    ((found, expected),) = run("table_version", 1)
    assert found == expected


def test_each_tile_comes_once_and_those_of_other_ranks_come_first() -> None:
    (found,) = run("orders", 1, grids=40)
    for rows, columns, rank, count, order in found:
        every = [(row, column) for row in range(rows) for column in range(columns)]
        assert sorted((row, column) for row, column, _ in order) == every
        for row, _, destination in order:
            assert destination * rows // count <= row < (destination + 1) * rows // count
        # Destinations ascend from the next rank on; this rank is last.
        steps = [(destination - rank - 1) % count for _, _, destination in order]
        assert steps == sorted(steps)


def test_the_program_of_the_page_passes_values_on(tmp_path: Path) -> None:
    for rank, outputs in enumerate(run("page", 3, folder=str(tmp_path))):
        assert outputs == [(rank - 5) % 3]


@pytest.mark.parametrize("count", [2, 4])
def test_the_example_computes_the_gemv(count: int) -> None:
    example = ROOT / "examples" / "triton_all_to_all.py"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "weft", "run", "-n", str(count), "--"),
            *(sys.executable, str(example)),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[0] equal to torch\n"), done.stderr


def test_an_import_without_triton_names_the_remedy() -> None:
    program = "import sys; sys.modules['triton'] = None; import weft.triton"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: weft.triton: triton is not installed: expected triton 3.6 or later; install"
    )
