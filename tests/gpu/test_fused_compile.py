"""Torch operators and the `weft.fused` compiler pass on two GPUs, over NCCL."""

from typing import Any

import pytest

from tests import ranks
from tests.fused import test_fused_compile as interpreted

pytestmark = [pytest.mark.torch, pytest.mark.gpu, pytest.mark.timeout(400)]

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def results() -> list[Any]:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    return ranks.run("fused.compile_calls.calls", 2, timeout=380, quiet=False, device="cuda")


def test_operators_run_as_under_the_interpreter(results: list[Any]) -> None:
    interpreted.test_operators_have_results_and_gradients_of_torch(results)
    interpreted.test_embedding_bags_have_results_and_gradients_of_torch(results)
    interpreted.test_calls_that_kernels_do_not_take_run_unfused(results)


def test_graphs_are_substituted_as_under_the_interpreter(results: list[Any]) -> None:
    interpreted.test_gemms_beside_collectives_are_substituted_with_equal_results(results)
    interpreted.test_refusals_are_counted_and_logged_with_their_reasons(results)
    interpreted.test_a_ranking_model_is_fused(results)
    interpreted.test_a_loaded_ranking_model_runs_unfused_beside_one_without_the_pass(results)
    interpreted.test_exchanges_of_bags_are_substituted_or_refused(results)
    interpreted.test_bags_with_gradients_are_refused(results)
    interpreted.test_a_graph_of_dynamic_rows_is_compiled_once(results)
    interpreted.test_a_tensor_parallel_decoder_is_fused(results)
    interpreted.test_sums_with_norms_behind_become_sequence_parallel(results)
    interpreted.test_a_sequence_parallel_decoder_is_fused_forward_and_backward(results)


def test_ranks_agree_as_under_the_interpreter(results: list[Any]) -> None:
    interpreted.test_places_are_substituted_where_all_ranks_have_them(results)
    interpreted.test_graphs_with_other_collectives_are_not_substituted(results)
    interpreted.test_a_gemm_between_collectives_is_in_one_place(results)
    interpreted.test_a_rank_without_the_pass_has_the_others_substitute_nothing(results)
    interpreted.test_ranks_with_other_flags_substitute_nothing(results)
    interpreted.test_graphs_from_the_cache_run_fused_on_all_ranks_or_on_none(results)
    interpreted.test_communicators_are_made_once_and_closed_with_their_groups(results)


def test_options_of_the_compiler_keep_one_order(results: list[Any]) -> None:
    interpreted.test_options_that_move_collectives_keep_one_order_on_all_ranks(results)


def test_llama_is_fused(results: list[Any]) -> None:
    interpreted.test_a_decoder_of_transformers_is_fused(results)


def test_operators_of_float8_run_as_under_the_interpreter() -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    found = ranks.run("fused.compile_calls.float8", 2, timeout=200, quiet=False, device="cuda")
    interpreted.test_operators_of_float8_have_results_of_torch(found)
    interpreted.test_gemms_of_float8_beside_collectives_are_substituted(found)


def test_operators_are_captured_and_replayed(results: list[Any]) -> None:
    for result in results:
        assert set(result["graph"]) == interpreted.MATRIX_OPERATORS
        assert all(result["graph"].values()), result["graph"]


def test_ranks_choose_the_same_tilings(results: list[Any]) -> None:
    first, *others = (result["tuned"] for result in results)
    assert all(other == first for other in others)
    assert len(first["timed"]) == 2
    assert all(count > 1 for count in first["timed"])
