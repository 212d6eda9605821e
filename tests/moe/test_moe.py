"""Dispatch and combine between real processes, against a dense reference."""

from typing import Any

import pytest

from tests import ranks

TRANSPORTS = list(ranks.TRANSPORTS)

CASES: list[dict[str, Any]] = [
    {},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "combine": "per_expert"},
    {"dtype": "float16", "combine": "per_expert", "weighting": "expert"},
    {"combine": "per_expert", "top_k": 5, "layout": "indexed"},
    {"combine": "per_expert", "routing": "masked"},
    {"dtype": "bfloat16", "combine_dtype": "float32", "output_dtype": "float32"},
    {"dtype": "bfloat16", "reply_dtype": "float32"},
    {"dtype": "float32", "reply_dtype": "bfloat16", "combine": "per_expert"},
    {"dtype": "float8_e4m3fn", "hidden": 300},
    {"dtype": "float8_e4m3fn", "block": 7, "pad_to": 8, "routing": "masked"},
    {"dtype": "float8_e4m3fn", "block": 16, "layout": "indexed", "reply_dtype": "float32"},
    {"dtype": "float8_e5m2", "scale_dtype": "float8_e8m0fnu", "block": 5, "hidden": 33},
    {"dtype": "float8_e5m2", "block": 8, "private_rows": 3, "combine": "per_expert"},
    {"dtype": "float8_e4m3fn", "scale_dtype": "float8_e8m0fnu", "block": 1, "layout": "indexed"},
    {"dtype": "float8_e4m3fn", "routing": "masked", "combine_dtype": "float32"},
    {"dtype": "float8_e4m3fn", "routing": "empty", "layout": "indexed"},
    {"pad_to": 8},
    {"pad_to": 8, "routing": "masked", "dtype": "bfloat16", "hidden": 33},
    {"layout": "indexed"},
    {"layout": "indexed", "routing": "masked", "dtype": "float16"},
    {"weighting": "expert"},
    {"routing": "some"},
    {"routing": "empty"},
    {"routing": "one"},
    {"routing": "full", "private_rows": 0},
    {"routing": "full", "private_rows": 3, "pad_to": 8},
    {"routing": "masked", "private_rows": 1000},
    {"experts": 7, "top_k": 3},
    {"experts": 3, "top_k": 2, "pad_to": 8},
    {"experts": 1, "top_k": 1},
    {"experts": 2, "top_k": 4, "routing": "masked"},
    {"experts": 33, "top_k": 8, "hidden": 1, "rounds": 2},
    {"hidden": 1000, "max_tokens": 3},
    {"channels": 1},
    {"channels": 3, "rounds": 7},
]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_combined_tokens_equal_a_dense_reference(transport: str) -> None:
    assert ranks.run("moe.rounds.cases", 4, transport, cases=CASES, seed=1) == [[], [], [], []]


@pytest.mark.parametrize(("count", "transport"), [(1, "shm"), (2, "tcp"), (3, "mixed")])
def test_groups_of_any_size(count: int, transport: str) -> None:
    failures = ranks.run("moe.rounds.cases", count, transport, cases=CASES[::2], seed=2)
    assert failures == [[]] * count


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_buffers_are_used_again_for_hundreds_of_rounds(transport: str) -> None:
    assert ranks.run("moe.rounds.many_rounds", 4, transport, rounds=200, seed=3) == [[], [], [], []]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_as_many_rounds_overlap_as_there_are_buffers(transport: str) -> None:
    assert ranks.run("moe.rounds.overlap", 4, transport, rounds=20) == [[], [], [], []]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_parts_that_overtake_each_other_change_nothing(transport: str) -> None:
    hostile = {"WEFT_HOSTILE": "6"}
    cases = ranks.run(
        "moe.rounds.cases", 4, transport, environment=hostile, cases=CASES[::6], seed=6
    )
    rounds = ranks.run(
        "moe.rounds.many_rounds", 4, transport, environment=hostile, rounds=20, seed=7
    )
    overlap = ranks.run("moe.rounds.overlap", 4, transport, environment=hostile, rounds=5)
    assert cases == rounds == overlap == [[], [], [], []]


@pytest.mark.parametrize("layout", ["contiguous", "indexed"])
def test_received_tokens_are_views_until_released(layout: str) -> None:
    for result in ranks.run("moe.rounds.views", 2, layout=layout):
        assert result["addresses"] == 1
        assert not result["owned"]
        assert result["shared"] == (layout == "contiguous")
        assert result["raised"] == ["ChannelInUseError", "StageError"] * 3
        assert f"{result['bytes']}" in result["table"].replace(",", "")


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    for result in ranks.run("moe.rounds.refused", 2):
        assert {name: error for name, error, _ in result} == {
            "tokens' shape": "ShapeError",
            "tokens' rank": "ShapeError",
            "tokens' dtype": "ShapeError",
            "unsupported dtype": "ShapeError",
            "not contiguous": "ShapeError",
            "no array": "ShapeError",
            "ids' shape": "ShapeError",
            "weights' shape": "ShapeError",
            "too many tokens": "ShapeError",
            "expert out of range": "ExpertError",
            "expert twice": "ExpertError",
            "outputs' shape": "ShapeError",
            "outputs' dtype": "ShapeError",
            "out's shape": "ShapeError",
            "a round after all that": "right",
        }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_round_beyond_the_capacity_fails_everywhere_and_the_next_one_works(
    transport: str,
) -> None:
    for result in ranks.run("moe.rounds.capacity", 4, transport):
        assert result == {"named": [3, 3, 3], "wrong": [None, None, None]}


def test_scales_must_fit_the_tokens() -> None:
    for result in ranks.run("moe.rounds.refused_scales", 2):
        assert result == {
            "none": "ShapeError: dtype float8_e4m3fn needs scales",
            "shape": "ShapeError: scales has shape (3, 4); (3, 3) is needed",
            "dtype": "ShapeError: scales is of dtype float8_e8m0fnu; float32 is needed",
            "not wanted": "ShapeError: dtype float32 has no scales",
            "bytes": "None",
        }


def test_a_request_that_cannot_fit_says_by_how_much() -> None:
    [(error, message)] = ranks.run("moe.rounds.constructed", 1, differing={}, max_bytes=1000)
    assert error == "SizeError"
    assert "1000 allowed" in message
    assert "too many" in message


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"experts": 0}, "ConfigurationError"),
        ({"hidden": 0}, "ConfigurationError"),
        ({"channels": 0}, "ConfigurationError"),
        ({"dtype": "float64"}, "ConfigurationError"),
        ({"dtype": "float8_e4m3fn", "block": 0}, "ConfigurationError"),
        ({"dtype": "float8_e4m3fn", "scale_dtype": "float16"}, "ConfigurationError"),
        ({"combine_dtype": "float8_e4m3fn"}, "ConfigurationError"),
        ({"reply_dtype": "float8_e5m2"}, "ConfigurationError"),
        ({"layout": "sideways"}, "ConfigurationError"),
        ({"combine": "multiply"}, "ConfigurationError"),
    ],
)
def test_arguments_without_meaning_are_refused(options: dict[str, Any], error: str) -> None:
    [(raised, _)] = ranks.run("moe.rounds.constructed", 1, differing={}, **options)
    assert raised == error


@pytest.mark.parametrize(
    "differing",
    [
        {"hidden": 16},
        {"top_k": 1},
        {"dtype": "bfloat16"},
        {"reply_dtype": "bfloat16"},
        {"dtype": "float8_e4m3fn", "combine_dtype": "float32"},
    ],
)
def test_ranks_that_were_told_different_things_are_refused(differing: dict[str, Any]) -> None:
    for error, _ in ranks.run("moe.rounds.constructed", 2, differing=differing):
        assert error == "ConfigurationMismatchError"


@pytest.mark.parametrize(
    ("argument", "value", "default"),
    [
        ("weighting", "expert", "combine"),
        ("combine", "per_expert", "reduce"),
        ("layout", "indexed", "contiguous"),
        ("pad_to", 8, 1),
        ("channels", 3, 2),
        ("max_tokens", 17, 16),
        ("experts", 5, 4),
        # Each of these is impossible separately.
        ("top_k", 0, 2),
        ("hidden", 2**31, 8),
        ("private_rows", 3, 16),
        ("max_receive_rows", 20, "none"),
        ("max_bytes", 1 << 30, "none"),
    ],
)
def test_an_argument_that_differs_is_named_with_both_values(
    argument: str, value: object, default: object
) -> None:
    first, second = ranks.run("moe.rounds.constructed", 2, differing={argument: value})
    assert f"rank 1 has {argument} {value}, this rank {default}" in first[1]
    assert f"rank 0 has {argument} {default}, this rank {value}" in second[1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("device", [False, True])
def test_an_all_to_all_that_finds_no_memory_keeps_none(transport: str, device: bool) -> None:
    results = ranks.run("moe.rounds.no_memory", 2, transport, device=device)
    class_of_peer = "DeviceError" if device else "AllocationError"
    assert [each["error"] for each in results] == [class_of_peer, "AllocationError"]
    assert results[0]["rank"] == 1
    assert [each["kept"] for each in results] == [0, 0]
    assert [each["after"] for each in results] == ["right"] * 2
