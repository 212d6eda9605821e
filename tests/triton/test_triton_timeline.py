"""Traced kernel timelines, under Triton's interpreter with a process for each rank."""

from typing import Any

import pytest

from tests import ranks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

pytest.importorskip("triton")

COUNT = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(
        "triton.timelines.timelines",
        COUNT,
        environment={"TRITON_INTERPRET": "1"},
        timeout=100,
        folder=str(tmp_path_factory.mktemp("timelines")),
    )


def test_spans_of_all_ranks_are_on_one_clock(results: list[dict[str, Any]]) -> None:
    count = len(results)
    for result in results:
        assert result["spans"] == results[0]["spans"]
        assert [span[:3] for span in result["spans"]] == [
            [rank, program, name]
            for rank in range(count)
            for program in range(3)
            for name in ("all", "compute", "put", "wait")
        ]
        assert result["dropped"] == [0, 2 * count]
        assert min(begin for *_, begin, _ in result["spans"]) == 0
        for rank in range(count):
            for program in range(3):
                check_program([span for span in result["spans"] if span[:2] == [rank, program]])


def check_program(spans: list[list[Any]]) -> None:
    (_, _, _, begin, end), *parts = spans
    times = [begin, *(time for part in parts for time in part[3:]), end]
    assert times == sorted(times)
    assert end > begin


def test_a_wait_ends_after_the_put_that_it_waits_for(results: list[dict[str, Any]]) -> None:
    found = {tuple(span[:3]): span[3:] for span in results[0]["spans"]}
    error, count = results[0]["clock_error"], len(results)
    for rank in range(count):
        for program in range(3):
            sent, _ = found[rank, program, "put"]
            _, arrived = found[(rank + 1) % count, program, "wait"]
            assert arrived >= sent - error


def test_processes_of_a_host_have_one_clock_within_the_error(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        assert result["ahead"][0] == result["error"][0] == 0
        assert all(
            abs(ahead) <= error
            for ahead, error in zip(result["ahead"], result["error"], strict=True)
        )
        # One in 32 barriers is without a long interruption by other processes.
        assert max(result["error"]) < 1_000_000_000


def test_spans_beyond_a_trace_are_dropped(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["small"] == [
            [rank, program, name]
            for rank in range(len(results))
            for program in range(2)
            for name in ("compute", "put", "wait")
        ]
        assert [span[0] for span in result["alone"]] == [0] * 12


def test_a_kernel_without_trace_has_the_same_results(results: list[dict[str, Any]]) -> None:
    passed = 4
    for rank, result in enumerate(results):
        # Each pass adds the rank that the values leave.
        route = [(rank - step) % len(results) for step in range(1, passed + 1)]
        assert result["outputs"] == [sum(route)]


def test_the_file_has_a_slice_for_each_span(results: list[dict[str, Any]]) -> None:
    for result in results:
        slices = [event for event in result["file"]["traceEvents"] if event["ph"] == "X"]
        assert len(slices) == len(result["spans"])
        assert result["file"]["otherData"]["clock_error_ns"] == result["clock_error"]


def test_bad_arguments_are_rejected(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["unnamed"][0] == "ConfigurationError"
        assert "expected 0 to 1; pass a name for each kind" in result["unnamed"][2]
        assert result["shape"][0] == "ShapeError"
        assert "[programs, 1 + capacity, 3]" in result["shape"][2]
        assert result["empty"][0] == "ConfigurationError"


def test_clocks_are_bounded_by_common_barriers() -> None:
    import numpy as np

    from weft.triton.timelines import aligned

    generator = np.random.default_rng(1)
    shift = (0, 5_000_000_000, -123_456)
    for step in (1, 32, 1024):
        times: list[list[list[int]]] = [[], [], []]
        now = 10**18
        for _ in range(50):
            arrivals = now + generator.integers(0, 40_000, 3)
            departures = arrivals.max() + generator.integers(1_000, 9_000, 3)
            now = int(departures.max())
            for rank, its in enumerate(times):
                its.append([int(arrivals[rank]) + shift[rank], int(departures[rank]) + shift[rank]])
        read = [np.array(its) // step * step for its in times]
        found = aligned(read, None)  # type: ignore[arg-type]
        assert found.resolution_ns == step
        for ahead, error, true in zip(found.ahead_ns, found.error_ns, shift, strict=True):
            assert abs(ahead - true) <= error <= 9_000 + 2 * step
