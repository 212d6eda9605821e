"""The dispatch and combine model on up to eight GPUs."""

import copy
import importlib
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT

DIRECTORY = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DIRECTORY))
    try:
        yield importlib.import_module("gpu_page")
    finally:
        sys.path.remove(str(DIRECTORY))


@pytest.fixture(scope="module")
def model(page: ModuleType) -> ModuleType:
    return importlib.import_module("gpu_model")


@pytest.fixture(scope="module")
def limits(page: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = page.reference()["measured"]["limits"]
    return found


@pytest.fixture(scope="module")
def records(page: ModuleType) -> list[dict[str, Any]]:
    """Records for two GPUs in the result file."""
    found = page.good(page.read(page.RESULTS), "rounds")
    return [record for record in found if page.machine(record).startswith("2 ")]


def test_tokens_reach_as_many_ranks_as_counting_says(model: ModuleType) -> None:
    for ranks, experts, top_k in [(2, 4, 1), (2, 6, 3), (4, 8, 2), (8, 8, 8)]:
        chosen = list(itertools.combinations(range(experts), top_k))
        hit = sum(any(expert < experts // ranks for expert in each) for each in chosen)
        assert model.reached(ranks, experts, top_k) == pytest.approx(hit / len(chosen))


def test_bytes_are_those_that_were_counted(
    model: ModuleType, records: list[dict[str, Any]]
) -> None:
    compared = 0
    for record in records:
        workload, counted = record["workload"], record["result"]["bytes"]
        # One token either reaches a rank or does not.
        if workload["routing"] == "uniform" and workload["tokens"] > 1:
            for phase in model.PHASES:
                expected = counted[f"{phase}_per_rank"]
                assert model.moved(workload, phase, 2).link == pytest.approx(expected, rel=0.03)
                compared += 1
    assert compared >= 40


def test_rates_lie_between_those_that_were_measured(
    model: ModuleType, limits: dict[str, Any]
) -> None:
    assert model.link_rate(limits, 7392, 32) == 321
    assert model.link_rate(limits, 7392, 24) == pytest.approx(317)
    assert model.link_rate(limits, 14336, 8) == 333
    assert model.link_rate(limits, 14336, 200) == 343


def test_a_fit_finds_the_terms_that_times_were_made_of(
    model: ModuleType, limits: dict[str, Any], records: list[dict[str, Any]]
) -> None:
    terms = {
        ("decode", "dispatch"): model.Phase(9.0, 1500.0),
        ("decode", "combine"): model.Phase(12.0, 2500.0),
        ("prefill", "dispatch"): model.Phase(20.0, 45.0),
        ("prefill", "combine"): model.Phase(40.0, 70.0),
    }
    truth = model.Model(records, limits)
    truth.phases = terms
    made = copy.deepcopy(records)
    for record in made:
        times = record["result"]["times"]
        for phase in model.PHASES:
            total = truth.predict(record["workload"], phase, 2).total
            times[phase]["slowest_p50_us"] = total + times["nothing"]["slowest_p50_us"]
    found = model.Model.of(made, limits)
    for key, phase in terms.items():
        assert found.phases[key].latency_us == pytest.approx(phase.latency_us), key
        assert found.phases[key].local_gb_per_s == pytest.approx(phase.local_gb_per_s), key
    for case, phases in found.deviations().items():
        for phase in model.PHASES:
            if phase in phases:
                measured, predicted = phases[phase]
                assert measured == pytest.approx(predicted), (case, phase)


def test_a_prediction_is_the_sum_of_its_terms(
    model: ModuleType, limits: dict[str, Any], records: list[dict[str, Any]]
) -> None:
    made = model.Model.of(records, limits)
    workload = made.records["prefill 24"]["workload"]
    two, eight = (made.predict(workload, "combine", ranks) for ranks in (2, 8))
    assert two.peers == 0
    assert eight.peers == pytest.approx(1.6 - 2.54 / 2)
    # 4096 tokens reach 66 % of 7 ranks, 14,336 bytes for each, at 334 GB/s from 24 blocks.
    assert eight.link == pytest.approx(4096 * 0.66183 * 7 * 14336 / 334.0e3, rel=1e-4)
    assert eight.total == eight.latency + eight.peers + max(eight.link, eight.local)
    assert eight.apart > eight.total > two.total
    assert made.one_token(8) > made.one_token(2)


def test_times_that_cannot_be_fitted_make_no_model(
    model: ModuleType, limits: dict[str, Any], records: list[dict[str, Any]]
) -> None:
    assert model.Model.of([], limits) is None
    flat = copy.deepcopy(records)
    for record in flat:
        record["result"]["times"]["dispatch"]["slowest_p50_us"] = 20.0
        record["result"]["times"]["nothing"]["slowest_p50_us"] = 3.0
    assert model.Model.of(flat, limits) is None


def test_the_page_shows_the_model_beside_the_goals(
    page: ModuleType, records: list[dict[str, Any]]
) -> None:
    lines = page.TABLES["model"](records).splitlines()
    assert any(line.startswith("| decode: both |") and line.endswith("| 57.0 |") for line in lines)
    assert any(line.startswith("| 1 token: both |") and line.endswith("| 12.0 |") for line in lines)
    assert sum(line.endswith("| 440 |") for line in lines) == 2
    assert page.TABLES["model-checks"](records).count("fitted") == 8
