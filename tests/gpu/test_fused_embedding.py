"""`weft.fused.EmbeddingAllToAll` on GPUs, one process for each rank."""

from typing import Any

import pytest

from tests import ranks
from tests.fused import test_fused_embedding as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(400)]

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=[(1, 1), (2, 40), (4, 8), (8, 4)])
def results(request: pytest.FixtureRequest) -> list[Any]:
    import torch

    count, scale = request.param
    # Up to four ranks may share a GPU: each takes millisecond turns.
    if count > 4 * torch.cuda.device_count():
        pytest.skip(f"needs {-(-count // 4)} GPUs")
    call = "fused.embedding_calls.calls"
    found = ranks.run(call, count, timeout=390, quiet=False, device="cuda", scale=scale)
    expected = {*interpreted.ALL, "forward bfloat16", "graph"}
    assert all(set(result) == expected for result in found)
    return found


def test_results_are_those_of_torch(results: list[Any]) -> None:
    interpreted.check(
        *(results, "forward", "pool", "buffers", "function", "graph", "dense", "sparse", "page")
    )
    interpreted.test_an_index_outside_of_its_table_is_an_error_of_check(results)
    interpreted.test_training_equals_that_of_one_process(results)
    interpreted.test_wrong_arguments_are_refused(results)


def test_a_rank_that_does_not_call_is_named() -> None:
    found = ranks.run("fused.embedding_calls.silent", 2, timeout=100, quiet=False, device="cuda")
    interpreted.check_silent(found)
