"""Torch operators and the `weft.fused` compiler pass, two processes over gloo."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests import ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(920)]

pytest.importorskip("triton")

MATRIX_OPERATORS = {
    "gemv_all_reduce",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "matmul_all_to_all",
    "all_gather_matmul",
    "all_to_all_matmul",
}

BAGS = "embedding_all_to_all"


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    # Compilers may warn about the machine.
    return ranks.run(
        "fused.compile_calls.calls",
        2,
        environment={"TRITON_INTERPRET": "1"},
        timeout=900,
        quiet=False,
    )


def test_operators_have_results_and_gradients_of_torch(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert set(result["operators"]) == MATRIX_OPERATORS
        for name, found in result["operators"].items():
            # The weight is contiguous in one call, and transposed in the other.
            calls = 1 if name == "gemv_all_reduce" else 2
            assert found == {"close": True, "gradients": True, "fused": calls}, name


def test_operators_of_float8_have_results_of_torch(results: list[dict[str, Any]]) -> None:
    reason = "out_dtype torch.float32: expected bfloat16 or float16"
    for result in results:
        assert set(result["scaled"]) == {
            "scaled_matmul_all_reduce",
            "scaled_matmul_reduce_scatter",
            "scaled_matmul_all_to_all",
            "all_gather_scaled_matmul",
            "all_to_all_scaled_matmul",
        }
        for name, found in result["scaled"].items():
            assert all(found["close"]), name
            assert found["fused_calls"] >= 2, name
            ((own, its, _),) = found["unfused_calls"]
            assert own == name
            assert its.endswith(reason)


def test_embedding_bags_have_results_and_gradients_of_torch(results: list[dict[str, Any]]) -> None:
    reason = "tables of [6, 6] columns"
    for result in results:
        fused, unfused = result["bags"]
        assert fused == {"close": True, "gradients": True, "fused": 1, "unfused": []}
        assert unfused["close"]
        assert unfused["gradients"]
        assert unfused["unfused"] == [["embedding_all_to_all", reason, 1]]


def test_calls_that_kernels_do_not_take_run_unfused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["fallbacks"] == [
            [True, "matmul_all_reduce", "dtype float64"],
            [True, "matmul_all_reduce", "no elements"],
            [True, "gemv_all_reduce", "40 rows; gemv_all_reduce has at most 32"],
            [True, "matmul_reduce_scatter", "dtype float64"],
        ]


def test_gemms_beside_collectives_are_substituted_with_equal_results(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        found = result["graphs"]
        assert all(found["close"].values()), found["close"]
        assert found["substitutions"] == {
            "gemv_all_reduce": 1,
            "matmul_all_reduce": 1,
            "matmul_reduce_scatter": 2,
            "all_gather_matmul": 4,
            "matmul_all_to_all": 1,
            "all_to_all_matmul": 1,
            "embedding_all_to_all": 1,
        }
        assert found["fused_calls"] == 11
        assert found["unfused_calls"] == []
        # Places that are refused, and second GEMMs on gathered rows.
        assert found["gemms"] == 11


def test_refusals_are_counted_and_logged_with_their_reasons(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["graphs"]
        assert found["matches"] == found["lines"] == 18
        assert found["refusals"] == [
            ["all_gather_matmul", "a collective before the matmul needs the gathered rows", 1],
            ["matmul_all_reduce", "a bias is added before the collective", 1],
            ["matmul_all_reduce", "reduction avg; expected sum", 1],
            ["matmul_all_reduce", "the matmul has other users", 1],
            ["matmul_all_to_all", "parts are not known to be equal", 1],
            ["matmul_reduce_scatter", "columns are scattered; expected rows", 1],
            [
                "matmul_reduce_scatter",
                "columns are split between the matmul and the collective",
                1,
            ],
        ]


def test_a_ranking_model_is_fused(results: list[dict[str, Any]]) -> None:
    for result in results:
        close, fixed, dynamic = result["bag_places"]["model"]
        assert close == [True] * 3
        for found, calls in ((fixed, 1), (dynamic, 2)):
            assert found["substitutions"] == {BAGS: 1}
            assert found["fused_calls"] == calls
            assert found["unfused_calls"] == []


def test_a_loaded_ranking_model_runs_unfused_beside_one_without_the_pass(
    results: list[dict[str, Any]],
) -> None:
    (close, loaded), other = (result["bag_places"]["loaded"] for result in results)
    assert close
    assert other[0]
    assert loaded["fused_calls"] == other[1]["matches"] == 0
    assert loaded["unfused_calls"] == [[BAGS, "rank 1 did not compile it within 1 s", 1]]


def test_exchanges_of_bags_are_substituted_or_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["bag_places"]["forms"]
        assert all(found["close"].values()), found["close"]
        assert found["substitutions"] == {BAGS: 4}
        assert found["fused_calls"] == 4
        assert found["matches"] == found["lines"] == 12
        assert found["refusals"] == [
            [BAGS, reason, 1]
            for reason in (
                "clone.default between bags and exchange; expected rows side by side",
                "mode max; expected sum or mean",
                "padding_idx is given",
                "parts are not known to be equal",
                "rows other than those of bags are sent",
                "tables of [6] columns; expected multiples of 4 up to 1024",
                "tables of float16, float32; expected one dtype",
                "the pooled rows have other users",
            )
        ]


def test_bags_with_gradients_are_refused(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert only_refused(result["bag_places"]["training"]) == (
            "gradients of tables; use weft.fused.EmbeddingBags"
        )


def test_gemms_of_float8_beside_collectives_are_substituted(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        found = result["scaled graphs"]
        assert all(found["close"].values()), found["close"]
        assert found["substitutions"] == {
            "scaled_matmul_all_reduce": 1,
            "scaled_matmul_reduce_scatter": 2,
            "scaled_matmul_all_to_all": 1,
            "all_gather_scaled_matmul": 3,
            "all_to_all_scaled_matmul": 1,
        }
        assert found["fused_calls"] == 8
        assert found["unfused_calls"] == []
        assert found["refusals"] == [
            ["scaled_matmul_all_reduce", "result in float32; expected bfloat16 or float16", 1],
            ["scaled_matmul_all_reduce", "the matmul has other users", 1],
        ]


def test_a_graph_of_dynamic_rows_is_compiled_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        close, found = result["dynamic"]
        assert close == [True] * 3
        assert found["substitutions"] == {"matmul_all_reduce": 1, "matmul_reduce_scatter": 1}
        assert found["fused_calls"] == 6


def only_refused(found: list[Any]) -> str:
    """A graph's only refusal reason; its result is right, and it ran unfused."""
    close, counts = found
    assert close
    assert counts["fused_calls"] == 0
    ((_, reason, count),) = counts["refusals"]
    assert count == 1
    return str(reason)


def test_places_are_substituted_where_all_ranks_have_them(results: list[dict[str, Any]]) -> None:
    name = "matmul_reduce_scatter"
    (close, first), (others, second) = (result["places"]["different"] for result in results)
    assert close == others == [True] * 5
    for found in (first, second):
        assert found["substitutions"] == {name: 2}
        assert found["fused_calls"] == 2
        assert found["unfused_calls"] == []
    unequal = f"rank 0 has {name} 4x24x16 float32, rank 1 {name} 4x24x24 float32"
    assert first["refusals"] == [
        [name, unequal, 1],
        [name, "rank 1 has no such place", 1],
        [name, "rank 1 refuses: the matmul has other users", 1],
    ]
    assert second["refusals"] == [[name, unequal, 1], [name, "the matmul has other users", 1]]


def test_graphs_with_other_collectives_are_not_substituted(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert only_refused(result["places"]["longer"]) == (
            "ranks do not agree: collectives of rank 1: not equal to rank 0's"
        )


def test_a_gemm_between_collectives_is_in_one_place(results: list[dict[str, Any]]) -> None:
    for result in results:
        close, found = result["places"]["exchanged"]
        assert close == [True]
        assert found["substitutions"] == {"all_to_all_matmul": 1}
        assert found["refusals"] == [["matmul_all_to_all", "the matmul is in another place", 1]]


def test_places_in_another_order_are_refused() -> None:
    from datetime import timedelta

    from torch.distributed import HashStore

    from weft.fused.agreement import Place, agree

    kinds = ["zero", "one", "two", "three"]
    # Positions and turns, in the order in which each rank would run the places.
    orders = [[(0, 1), (1, 1), (2, 2), (3, 3)], [(1, 1), (0, 1), (2, 2), (3, 4)]]
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def verdict(rank: int) -> Any:
        places = [Place(position, turn, kinds[position], None) for position, turn in orders[rank]]
        return agree(store, rank, 2, "order", {"a": "b"}, places, 20.0)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(verdict, range(2)))
    assert found[0] == found[1]
    reason = "rank 1 would run it in another order than rank 0"
    assert found[0].reason is None
    assert found[0].refusals == {0: reason, 1: reason, 3: reason}


def test_a_rank_without_the_pass_has_the_others_substitute_nothing(
    results: list[dict[str, Any]],
) -> None:
    enabled, other = (result["disagreement"]["absent"] for result in results)
    assert only_refused(enabled) == ("ranks do not agree: rank 1 did not compile it within 1 s")
    assert other[0]
    assert other[1]["matches"] == other[1]["fused_calls"] == 0


def test_ranks_with_other_flags_substitute_nothing(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert only_refused(result["disagreement"]["flags"]) == (
            "ranks do not agree: settings of rank 1: not equal to rank 0's"
        )


def test_graphs_from_the_cache_run_fused_on_all_ranks_or_on_none(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        (missed, first), (hit, second) = (result["disagreement"][name] for name in ("miss", "hit"))
        assert missed
        assert hit
        assert first["substitutions"] == {"matmul_reduce_scatter": 1}
        assert second["matches"] == 0
        assert first["fused_calls"] == second["fused_calls"] == 1
    # Rank 1 has compiled its graph without the pass.
    (close, loaded), other = (result["disagreement"]["loaded"] for result in results)
    assert close
    assert other[0]
    assert loaded["fused_calls"] == 0
    assert loaded["unfused_calls"] == [
        ["matmul_reduce_scatter", "rank 1 did not compile it within 1 s", 1]
    ]


def test_keys_of_the_cache_depend_on_flags_measurements_and_other_passes(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["uuid"] == {
            "distinct": 6,
            "again": True,
            "calls": 1,
            "restored": True,
            "without": None,
        }


def test_a_tensor_parallel_decoder_is_fused(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["decoder"]
        assert found["close"]
        assert found["substitutions"] == {"gemv_all_reduce": 2}
        assert found["fused_calls"] == found["matches"] == found["lines"] == 2


def test_a_sequence_parallel_decoder_is_fused_forward_and_backward(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        found = result["sequence"]
        assert found["close"]
        assert found["gradients"]
        # Two gathers and two scatters in the forward pass, two gathers in the backward pass.
        assert found["substitutions"] == {"all_gather_matmul": 4, "matmul_reduce_scatter": 2}
        assert found["fused_calls"] == found["lines"] == 6


def test_sums_with_norms_behind_become_sequence_parallel(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["prefill"]
        assert all(its["close"] for its in found.values())
        # Each layer's two sums; the last one's rows are gathered without a GEMM.
        assert found["even"]["substitutions"] == {
            "sequence_parallel": 1,
            "matmul_reduce_scatter": 4,
            "all_gather_matmul": 3,
        }
        assert found["odd"]["substitutions"] == {"matmul_all_reduce": 4}
        assert found["trained"]["substitutions"] == {"matmul_all_reduce": 4}
        ((operator, reason, count),) = found["trained"]["refusals"]
        assert (operator, count) == ("sequence_parallel", 1)
        assert "all-gathers for 4 all-reduces" in reason


def test_ranks_compare_the_form_of_what_becomes_sequence_parallel(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        found = result["unequal"]
        close, counts = found["unequal"]
        assert close == [True] * len(close)
        assert counts["substitutions"] == {}
        (reason,) = (each[1] for each in counts["refusals"] if each[0] == "sequence_parallel")
        assert reason.startswith("rank 0 has sequence_parallel")
        assert ", rank 1 has " in reason or ", rank 1 sequence_parallel" in reason
        # None of these graphs is loaded from a cache.
        assert found["uuid"] is None
        assert found["symbol"] == [True] * 3
        assert found["rows"] == [True, True]


def test_options_that_move_collectives_keep_one_order_on_all_ranks(
    results: list[dict[str, Any]],
) -> None:
    for name, found in results[0]["options"].items():
        for result in results:
            own = result["options"][name]
            if "torch" in found:
                # A torch pass ends the compilation without Weft's, too.
                assert "torch" in own
                continue
            assert own["close"] == [True] * 3, name
            assert own["substitutions"] == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
            assert own["unfused_calls"] == [], name
            assert own["order"] == found["order"], name
        assert "torch" not in found or name in ("scheduled", "gathers bucketed")
        if name == "bucketed":
            assert len(found["order"]) == 6
        if name == "reduce-overhead":
            # The last call is a replay.
            assert found["order"] == []
        elif "torch" not in found:
            fused = [each for each in found["order"] if each.startswith("weft_fused::")]
            assert len(fused) == 2, name
            assert len(found["order"]) >= 4, name
            assert found["fused_calls"] == 6, name


def test_a_decoder_of_transformers_is_fused(results: list[dict[str, Any]]) -> None:
    for result in results:
        if (found := result["llama"]) is None:
            pytest.skip("needs transformers")
        assert found["close"]
        assert found["substitutions"] == {"gemv_all_reduce": 4}
        assert found["fused_calls"] == 4


def test_the_choice_is_the_fastest_of_the_slowest_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        found, chosen = result["tuning"], ["columns=64,rows=32", {"rows": 32, "columns": 64}]
        # The last candidate is no tiling.
        assert found["timed"] == 5
        assert found["fused"] == 1
        assert found["choice"] == found["stored"] == found["class"] == chosen
        assert found["other"] is None
        assert found["slow"] == ["unfused", None]
        assert found["composed"] == [["composed", None], True]
        assert found["unfused"] == [
            ["all_gather_matmul", "composed is faster by measurement", 1],
            ["matmul_all_to_all", "unfused is faster by measurement", 1],
        ]
        assert found["doubts"] == [
            None,
            "no gain: measured",
            "no gain: 40 rows; expected 2048 or more",
        ]


def test_communicators_are_made_once_and_closed_with_their_groups(
    results: list[dict[str, Any]],
) -> None:
    for rank, result in enumerate(results):
        assert result["groups"] == {
            "same": True,
            "distinct": True,
            "ranks": [rank, 2],
            "open": True,
            "closed": True,
        }


def test_a_damaged_table_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.fused import tuning

    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    assert tuning.own_table().entries == {}
    head = {"format": "weft-fused-tuning-1"}
    right = {"choice": "default", "tiling": None}
    for text in ("", "[]", "{", json.dumps({"entries": {"a": right}}), json.dumps(head)):
        tuning.tuning_file().write_text(text)
        assert tuning.own_table().entries == {}
    mixed = {"a": right, "b": {"choice": 3}, "c": {"choice": "x", "tiling": 4}}
    tuning.tuning_file().write_text(json.dumps({**head, "entries": mixed}))
    assert tuning.own_table().entries == {"a": right}


def test_gains_are_expected_by_rows_and_bytes() -> None:
    import torch

    from weft.errors import ConfigurationError
    from weft.fused import gains
    from weft.fused.graph import compiler
    from weft.fused.tables import Shape, Table

    def doubt(name: str, *sizes: int, ranks: int = 2) -> str | None:
        device, dtype = torch.device("cpu"), torch.float16
        return gains.doubt(name, Shape(*sizes), dtype, ranks, device, Table())

    assert doubt("gemv_all_reduce", 1, 8192, 4096) is None
    assert doubt("gemv_all_reduce", 1, 8192, 4096, ranks=1) == "no gain: 1 rank"
    assert doubt("matmul_all_reduce", 4096, 8192, 4096) is None
    assert doubt("matmul_all_reduce", 4096, 64, 4096) == (
        "no gain: 524288 bytes; expected 1048576 or more"
    )
    assert doubt("all_gather_matmul", 4096, 8192, 256) == (
        "no gain: inner size 256; expected 512 or more"
    )
    # Rows with one-byte elements are gathered; results with two-byte elements are scattered.
    assert doubt("all_gather_scaled_matmul", 1024, 8192, 1024) is None
    assert doubt("all_gather_scaled_matmul", 1023, 8192, 1024) == (
        "no gain: 1023 rows; expected 1024 or more"
    )
    assert doubt("scaled_matmul_reduce_scatter", 2048, 255, 1024) == (
        "no gain: 1044480 bytes; expected 1048576 or more"
    )
    short, wide = Shape(5, 24, 16), Shape(5, 25, 16)
    assert gains.kernel_of("matmul_all_reduce", short, is_straight=True) == "gemv_all_reduce"
    for shape, is_straight in ((short, False), (wide, True), (Shape(33, 24, 16), True)):
        name = gains.kernel_of("matmul_all_reduce", shape, is_straight)
        assert name == "matmul_all_reduce"
    with pytest.raises(ConfigurationError, match="operators other: expected some of gemv_all"):
        compiler.enable(operators=["other"])
