"""Device functions in `weft.triton` on GPUs, one process for each rank."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.triton import test_triton as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(180)]

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def results(request: pytest.FixtureRequest) -> list[Any]:
    import torch

    # Two ranks may share a GPU.
    if request.param > max(2, torch.cuda.device_count()):
        pytest.skip(f"needs {request.param} GPUs")
    return ranks.run(
        "triton.calls.calls", request.param, timeout=170, quiet=False, rounds=50, device="cuda"
    )


def test_all_functions_give_the_results_of_the_interpreter(results: list[Any]) -> None:
    interpreted.test_a_ring_of_puts_and_signals_carries_each_round(results)
    interpreted.test_an_all_to_all_reuses_its_buffers_while_counters_wrap(results)
    interpreted.test_a_barrier_orders_stores_to_all_ranks(results)
    interpreted.test_one_program_of_each_round_is_the_last(results)
    interpreted.test_claims_of_a_counter_are_distinct(results)
    interpreted.test_a_context_is_that_of_its_allocation(results)


def test_replays_of_a_graph_use_the_next_epochs(results: list[Any]) -> None:
    for result in results:
        assert result["graph"] == result["ring"][interpreted.FIRST.index(2**31 - 4)]


def test_a_wait_that_expires_names_its_rank_and_ends_those_of_its_peers() -> None:
    waiting, other = ranks.run("triton.calls.expired", 2, timeout=100, quiet=False, device="cuda")
    interpreted.check_expired(waiting, other)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("triton_all_to_all.py", "[0] equal to torch\n"),
        ("04_fused_kernel.py", "[0] 5 of 5 results equal those of torch\n"),
    ],
)
def test_the_example_computes_the_gemv(name: str, printed: str) -> None:
    import torch

    count = 4 if torch.cuda.device_count() >= 4 else 2 if torch.cuda.device_count() >= 2 else 1
    example = Path(__file__).parents[2] / "examples" / name
    command = [sys.executable, "-m", "weft", "run", "-n", str(count), "--"]
    done = subprocess.run(
        [*command, sys.executable, str(example)],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
