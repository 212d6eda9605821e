"""Recommendation model constants from fused operator benchmark records."""

import json
from pathlib import Path
from typing import Any

import pytest

from reproductions import pages
from weft.sim import dlrm_records
from weft.sim.dlrm_records import Measured


def record(case: Measured, **changed: Any) -> dict[str, Any]:
    """A `benchmarks/gpu/run.sh fused` record, as far as it is read."""
    shape = {
        "tables": case.tables,
        "dim": case.dimension,
        "batch": case.batch * case.ranks,
        "pooling": case.pooling,
    }
    time = None if case.fused_s is None else {"slowest_p50_us": case.fused_s * 1e6}
    result = {
        "computation_us": case.pooling_s * 1e6,
        "exchange_us": case.exchange_s * 1e6,
        "fused": None if time is None else "fused",
        "sides": {"fused": {"time": time} if time else {"status": "failed"}},
    }
    made: dict[str, Any] = {"case": case.name, "kind": "embedding", "status": "ok"}
    made |= {"workload": {"shape": shape}, "result": result}
    return made | {"origin": {"device": "cuda", "ranks": case.ranks}} | changed


def synthetic(batch: int, pooling: int, ranks: int = 2) -> Measured:
    """A case with 3e12 B/s and 4 us, and with 3.5e11 B/s and 6 us; the parts overlap perfectly."""
    case = Measured(f"batch {batch} x {pooling}", ranks, batch, 8, 128, pooling, 1.0, 1.0, None)
    pooling_s = 4e-6 + case.gathered / 3e12
    exchange_s = 6e-6 + case.sent * (ranks - 1) / 3.5e11
    fused_s = max(pooling_s, exchange_s) + 8e-6
    return case._replace(pooling_s=pooling_s, exchange_s=exchange_s, fused_s=fused_s)


CASES = [synthetic(batch, pooling) for batch in (256, 2048, 8192) for pooling in (1, 10, 70)]


def written(folder: Path, records: list[dict[str, Any]]) -> Path:
    path = folder / "gpu_fused.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path


def test_constants_of_synthetic_records_are_found(tmp_path: Path) -> None:
    path = written(tmp_path, [record(case) for case in CASES])
    constants = dlrm_records.calibrate(dlrm_records.read(path))
    assert constants == pytest.approx((4e-6, 3e12, 6e-6, 3.5e11), rel=1e-6)
    for each in dlrm_records.compare(CASES, constants):
        limit = 0.02 if each.what == "not fused" else 0.35
        assert abs(each.error) < limit, each


def test_other_records_are_left_out_and_later_ones_count(tmp_path: Path) -> None:
    first, second = CASES[:2]
    records = [
        record(first._replace(pooling_s=9.0)),
        record(first),
        record(second, status="failed"),
        record(second, kind="gemv"),
        record(second, origin={"device": "twin", "ranks": 2}),
        record(second._replace(fused_s=None)),
    ]
    found = dlrm_records.read(written(tmp_path, records))
    assert [case.name for case in found] == [first.name, second.name]
    assert found[0].pooling_s == pytest.approx(first.pooling_s)
    assert found[1].fused_s is None
    assert len(dlrm_records.compare(found, dlrm_records.calibrate(found))) == 3


def test_one_case_has_rates_without_latencies() -> None:
    constants = dlrm_records.calibrate(CASES[:1])
    assert constants.launch_s == constants.message_latency_s == 0
    assert constants.gather_bytes_per_s == pytest.approx(CASES[0].gathered / CASES[0].pooling_s)


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, [record(CASES[0]), {"kind": "embedding", "status": "ok"}])
    with pytest.raises(ValueError, match="line 2 is not a record of gpu-fused: KeyError"):
        dlrm_records.read(path)


def test_the_page_shows_errors_of_each_case_or_that_there_are_none(tmp_path: Path) -> None:
    assert pages.measured(tmp_path / "missing.jsonl") == "None measured yet."
    text = pages.measured(written(tmp_path, [record(case) for case in CASES]))
    assert "| rate of gathering | 3000 GB/s |" in text
    assert text.count("| not fused |") == text.count("| fused |") == len(CASES)
