"""Tables in docs/speed.md, and the instruction count comparison."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT


def load(name: str) -> ModuleType:
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return load("speed_page")


ORIGIN = {
    "commit": "new",
    "at": "2026-01-02T03:04:05+00:00",
    "machine": {"processor": "Z9", "cores": 2},
}
RECORDED = ["", "Recorded at new, 2026-01-02, Z9, 2 cores."]


def line(side: str, size: int, **changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "benchmark": "transfer",
        "path": "shm",
        "pattern": "ping-pong",
        "side": side,
        "bytes": size,
        "p50_us": 0.125,
        "p99_us": 2.0,
        "gb_per_s": 7.5,
        "ratio": None if side == "weft" else 0.5,
        "origin": ORIGIN,
    }
    return given | changes


def test_losses_and_missing_peers_are_shown(table: ModuleType, tmp_path: Path) -> None:
    old = {"origin": ORIGIN | {"commit": "old"}}
    lines = [
        line("one that is gone", 8, **old),
        line("weft", 8, p50_us=99.0, **old),
        line("weft", 8),
        line("memcpy + flag", 8),
        line("weft", 4096),
        line("UCX", 8, benchmark="peers", not_installed="apt-get", bytes=None),
    ]
    del lines[-1]["bytes"]
    file = tmp_path / "transfer.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    rows = table.TABLES["shm"](tmp_path).splitlines()
    assert rows[0] == "|  | Weft | memcpy + flag |"
    assert rows[2:] == [
        "| 8 B | 0.125 / 2.00 µs | 0.125 / 2.00 µs (0.50) |",
        "| 4 KiB | 7.50 GB/s |  |",
        *RECORDED,
    ]
    assert "UCX was not installed: apt-get" in table.TABLES["peers-shm"](tmp_path)
    assert table.TABLES["moe"](tmp_path) == table.NOT_MEASURED


def test_a_run_with_and_without_local_changes_is_one(table: ModuleType, tmp_path: Path) -> None:
    """A run appends its records, which then are local changes: its commit gets a `+` halfway."""
    changed = {"origin": ORIGIN | {"commit": "new+"}}
    lines = [
        line("weft", 8, p50_us=99.0, origin=ORIGIN | {"commit": "old"}),
        line("weft", 64, origin=ORIGIN | {"commit": "old+"}),
        line("weft", 8),
        line("weft", 8, path="tcp", **changed),
    ]
    file = tmp_path / "transfer.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    assert table.TABLES["shm"](tmp_path).splitlines()[2:] == [
        "| 8 B | 0.125 / 2.00 µs |",
        *RECORDED,
    ]
    assert "Recorded at new+, 2026-01-02" in table.TABLES["tcp"](tmp_path)


def test_transfers_between_guests_have_columns_of_the_measured_libraries(
    table: ModuleType, tmp_path: Path
) -> None:
    assert table.rdma(tmp_path) == table.NOT_MEASURED
    case = {"pattern": "ping-pong", "bytes": 8, "weft_us": 20, "perftest_us": 10, "ratio": 0.5}
    stream = case | {"pattern": "stream"}
    ucx = {"ucx_us": 30, "ucx_ratio": 1.5}

    def rows(*outcomes: dict[str, Any]) -> list[str]:
        text = json.dumps({"outcomes": outcomes, "origin": ORIGIN}) + "\n"
        tmp_path.joinpath("rdma.jsonl").write_text(text, encoding="utf-8")
        lines: list[str] = table.rdma(tmp_path).splitlines()
        assert lines[-2:] == RECORDED
        return [lines[0], *lines[2:-2]]

    assert rows(case) == [
        "|  | Weft | perftest | ratio |",
        "| ping-pong, 8 B | 20.0 µs | 10.0 µs | 0.50 |",
    ]
    assert rows(case | ucx, stream) == [
        "|  | Weft | perftest | ratio | UCX | ratio |",
        "| ping-pong, 8 B | 20.0 µs | 10.0 µs | 0.50 | 30.0 µs | 1.50 |",
        "| stream, 8 B | 20.0 µs | 10.0 µs | 0.50 |  |  |",
    ]


def test_more_instructions_than_tolerated_are_a_regression(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    compare = load("instructions").compare
    before = {"shm write": 100.0, "tcp write": 100.0, "null write": 100.0}
    now = {"shm write": 103.0, "tcp write": 101.0, "null write": 90.0, "new": 5.0}
    lines, regressed = compare(before, now, 0.02)
    assert regressed == ["shm write"]
    assert len(lines) == 4
    assert "+3.0%  REGRESSED" in lines[0]
