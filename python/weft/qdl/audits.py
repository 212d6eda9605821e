"""MLPerf's audits TEST01 and TEST04: configuration, and log comparison.

Definitions: the folder `compliance` in https://github.com/mlcommons/inference in July 2026 (in
rounds before v5.1, `compliance/nvidia`); both tests have been there since v0.7. TEST04 is required
for models whose work does not depend on the sample, such as resnet50.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from weft.base.errors import ConfigurationError
from weft.base.files import read_text

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Audit", "Verdict", "compare_answers", "compare_rates", "configuration", "score"]

Audit = Literal["TEST01", "TEST04"]
AUDITS: Final = ("TEST01", "TEST04")
SCENARIOS: Final = ("SingleStream", "MultiStream", "Server", "Offline")
#: Keys in LoadGen's detail log with a scenario's result; true if it is a latency.
RESULTS: Final = {
    "Offline": ("result_samples_per_second", False),
    "Server": ("result_completed_samples_per_sec", False),
    "SingleStream": ("early_stopping_latency_ss", True),
    "MultiStream": ("early_stopping_latency_ms", True),
}
#: Longest log that is read: 1 GiB.
MAX_LOG_BYTES: Final = 1 << 30
#: Latencies, ns, up to which the threshold is 20 %.
SHORT: Final = {"SingleStream": 200_000, "MultiStream": 1_600_000}


@dataclass(frozen=True)
class Verdict:
    """Verdict on an audit, or on one part."""

    passed: bool
    #: The comparison, in one line.
    detail: str


def configuration(audit: Audit, answers: int = 64) -> str:
    """Text for an audit's `audit.config`. TEST01 logs about `answers` answers."""
    if audit == "TEST01":
        return (
            "*.*.mode = 2\n"
            "*.*.accuracy_log_rng_seed = 720381539243781796\n"
            f"*.*.accuracy_log_sampling_target = {answers}\n"
        )
    return "".join(
        f"*.{scenario}.mode = 2\n"
        f"*.{scenario}.performance_issue_unique = 0\n"
        f"*.{scenario}.performance_issue_same = 1\n"
        f"*.{scenario}.performance_issue_same_index = 3\n"
        for scenario in SCENARIOS
    )


def compare_answers(accuracy: Path, audited: Path) -> Verdict:
    """TEST01's first part: answers from the performance run equal the accuracy run's.

    Every byte is compared; MLPerf's script compares the first element of each answer.
    """
    known = {entry["qsl_idx"]: entry["data"] for entry in answers(accuracy)}
    logged = answers(audited)
    wrong = sorted(
        {entry["qsl_idx"] for entry in logged if known.get(entry["qsl_idx"]) != entry["data"]}
    )
    if not logged:
        return Verdict(False, f"no answers in {audited}")
    if wrong:
        return Verdict(False, f"{len(wrong)} samples have other answers, the first is {wrong[0]}")
    return Verdict(True, f"{len(logged)} answers equal those of the accuracy run")


def compare_rates(audit: Audit, performance: Path, audited: Path) -> Verdict:
    """Compare results: TEST01 at most 10 % apart, TEST04 at most 10 % faster; 20 % if short."""
    (scenario, before), (other, after) = score(performance), score(audited)
    if scenario != other:
        raise ConfigurationError(
            f"{audited}: scenario {other}, expected {scenario}, as of {performance}"
        )
    is_latency = RESULTS[scenario][1]
    limit = 0.2 if is_latency and before <= SHORT[scenario] else 0.1
    faster = before / after if is_latency else after / before
    passed = faster <= 1 + limit and (audit == "TEST04" or faster >= 1 - limit)
    what = "latency, ns" if is_latency else "samples/s"
    bound = f"at most {1 + limit:g}" if audit == "TEST04" else f"{1 - limit:g} to {1 + limit:g}"
    return Verdict(
        passed, f"{what}: {before:,.0f}, audited {after:,.0f}; speed {faster:.3f} ({bound})"
    )


def score(logs: Path) -> tuple[str, float]:
    """Scenario and result from a valid run's detail log.

    Raises:
        ConfigurationError: there is no such log, or its result is not valid.
    """
    found: dict[str, Any] = {}
    file = logs / "mlperf_log_detail.txt"
    try:
        for line in read_text(file, MAX_LOG_BYTES).splitlines():
            if line.startswith(":::MLLOG "):
                entry = json.loads(line.removeprefix(":::MLLOG "))
                found[entry["key"]] = entry["value"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{file}: not a log of LoadGen: {error}") from None
    if found.get("result_validity") != "VALID":
        raise ConfigurationError(
            f"{file}: the result is {found.get('result_validity', 'missing')}, expected VALID; "
            "run longer, or at a lower rate"
        )
    scenario = str(found["effective_scenario"])
    return scenario, float(found[RESULTS[scenario][0]])


def answers(logs: Path) -> list[dict[str, Any]]:
    """Entries in LoadGen's answer log."""
    file = logs / "mlperf_log_accuracy.json"
    try:
        entries: list[dict[str, Any]] = json.loads(read_text(file, MAX_LOG_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: not a log of LoadGen: {error}") from None
    return entries
