"""Traced kernel timelines on GPUs, one process for each rank."""

from typing import Any

import pytest

from tests import ranks
from tests.triton import test_triton_timeline as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(180)]

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=[1, 2, 4, 8])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    import torch

    # Two ranks may share a GPU.
    if request.param > max(2, torch.cuda.device_count()):
        pytest.skip(f"needs {request.param} GPUs")
    folder = tmp_path_factory.mktemp("timelines")
    return ranks.run(
        "triton.timelines.timelines",
        request.param,
        timeout=170,
        quiet=False,
        folder=str(folder),
        device="cuda",
    )


def test_timelines_are_those_of_the_interpreter(results: list[Any]) -> None:
    interpreted.test_spans_of_all_ranks_are_on_one_clock(results)
    interpreted.test_a_wait_ends_after_the_put_that_it_waits_for(results)
    interpreted.test_spans_beyond_a_trace_are_dropped(results)
    interpreted.test_a_kernel_without_trace_has_the_same_results(results)
    interpreted.test_the_file_has_a_slice_for_each_span(results)
    interpreted.test_bad_arguments_are_rejected(results)


def test_the_error_of_the_clocks_is_below_20_us(results: list[Any]) -> None:
    import torch

    if len(results) > torch.cuda.device_count():
        pytest.skip("ranks that share a GPU take turns of milliseconds")
    for result in results:
        assert max(result["error"]) < 20_000
