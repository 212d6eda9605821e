"""benchmarks/gpu/collectives.py: cases, records and checks, on the CPU twin."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT
from weft import _native

PROGRAM = ROOT / "benchmarks" / "gpu" / "collectives.py"
FIELDS = {"benchmark", "case", "kind", "status", "reason", "workload", "result", "seconds"}
MEMORIES = ["weft", "weft symmetric"]
ALGORITHMS = [*MEMORIES, "weft one_shot", "weft two_shot"]
EXCHANGES = [*MEMORIES, "weft copy engines"]
SWEPT = [f"{name}{sms}" for name in MEMORIES for sms in ("", " 1 SMs", " 2 SMs")]

pytestmark = pytest.mark.torch


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--device", "twin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture
def native() -> None:
    pytest.importorskip("torch")
    if not hasattr(_native, "DeviceCollectives"):
        pytest.skip("needs a native module with DeviceCollectives; this one was built without")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "all_reduce,unknown"], "--cases 'unknown': no such case; expected all_reduce"),
        (["--cases", "all_reduce 8M"], "no case is short enough"),
        (["--sweep", "--cases", "barrier"], "--sweep and --cases: expected one of both"),
        (["--budget", "0"], "--budget 0.0: expected more than 0"),
        (["--ranks", "0"], "--ranks 0: expected 1 or more"),
    ],
)
def test_bad_input_is_rejected_before_a_rank_starts(arguments: list[str], message: str) -> None:
    pytest.importorskip("torch")
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.usefixtures("native")
def test_every_kind_of_case_is_measured_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    names = "all_reduce,all_gather 1K,reduce_scatter 8K,all_to_all 1K,barrier,called"
    names += ",sweep reduce_scatter,sweep all_gather"
    done = run("--json", "--cases", names, "--results", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(done.stdout)["cases"]
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    by_case = {record["case"]: check(record) for record in records}
    assert list(by_case["all_reduce 1K"]) == ALGORITHMS
    assert by_case["all_reduce 64K"]["weft two_shot"]["busbw_gb_per_s"] > 0
    assert list(by_case["all_gather 1K"]) == EXCHANGES
    assert list(by_case["all_to_all 1K"]) == EXCHANGES
    assert list(by_case["barrier"]) == ["weft"]
    assert list(by_case["called"]) == MEMORIES
    for side in by_case["called"].values():
        assert side["host"]["slowest_p50_us"] > 0
    for operation in ("reduce_scatter", "all_gather"):
        assert list(by_case[f"sweep {operation} 64K"]) == SWEPT


def check(record: dict[str, Any]) -> dict[str, Any]:
    """A record's sides, whose status is "ok"."""
    assert record.keys() == {*FIELDS, "origin"}
    assert (record["benchmark"], record["status"]) == ("gpu-collectives", "ok"), record
    assert {"at", "weft", "commit", "machine", "device", "ranks"} <= record["origin"].keys()
    assert record["origin"]["ranks"] == 2
    sides: dict[str, Any] = record["result"]["sides"]
    for name, side in sides.items():
        if side["status"] == "skipped":
            assert name == "weft one_shot", side
            continue
        assert side["status"] == "ok", side
        time = side["time"]
        assert 0 < time["min_us"] <= time["p50_us"] <= time["p99_us"]
        assert time["slowest_rank"] in (0, 1)
        if record["kind"] != "barrier":
            assert side["exact"]
            assert 0 <= side["largest_share_of_bound"] <= 1
    return sides


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.usefixtures("native")
def test_a_case_beyond_the_budget_is_recorded_as_skipped() -> None:
    done = run("--json", "--cases", "barrier", "--budget", "0.5")
    (record,) = json.loads(done.stdout)["cases"]
    assert (record["status"], record["reason"]) == ("skipped", "the budget was spent")
    assert done.returncode == 0


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    directory = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(directory)
    file = directory / "gpu_collectives_page.py"
    spec = importlib.util.spec_from_file_location("gpu_collectives_page", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(kind: str, sides: dict[str, float], **workload: Any) -> str:
    """A result line for a 1 MiB all-reduce on GPUs."""
    times = {
        name: {"status": "ok", "time": {"slowest_p50_us": us, "slowest_p99_us": 2 * us}}
        for name, us in sides.items()
    }
    times["torch one_shot"] = {"status": "failed"}
    origin = {"device": "cuda", "gpus": ["A"], "commit": kind, "at": "2026-11-26", "versions": {}}
    origin["ranks"] = workload.pop("ranks", 2)
    made = {"case": f"{kind} 1M", "kind": kind, "status": "ok", "origin": origin}
    made["workload"] = {"operation": "all_reduce", "bytes": 1 << 20} | workload
    return json.dumps(made | {"result": {"sides": times}})


def test_tables_show_both_kinds_of_memory(
    page: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    collective = {"weft": 8.0, "weft symmetric": 5.0, "weft two_shot": 1.0, "nccl": 20.0}
    swept = {"weft": 1.0, "weft 8 SMs": 21.0, "weft 16 SMs": 16.0, "weft symmetric 8 SMs": 9.0}
    lines = [
        record("collective", collective),
        record("sweep", swept, num_sms=[8, 16]),
        record("sms", {}),
        record("collective", collective, ranks=4),
        record("sweep", swept, num_sms=[8], ranks=4),
    ]
    monkeypatch.setattr(page, "RESULTS", tmp_path / "lines.jsonl")
    (tmp_path / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    blocks = page.blocks()
    assert blocks["times"].splitlines()[2:] == [
        "| collective 1M | 8.00 / 16.0 | 5.00 / 10.0 | 20.0 / 40.0 |  |  |  | 4.00 |"
    ]
    assert blocks["sms"].splitlines() == [
        "| case | memory | 8 | 16 | NCCL, 2026-11-22 |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| all-reduce 1 MiB | ordinary | 21.0 | 16.0 | 17.0 |",
        "| all-reduce 1 MiB | symmetric | 9.00 |  | 17.0 |",
    ]
    assert blocks["times-4"] == blocks["times"]
    assert blocks["sms-4"].splitlines()[2:] == [
        "| all-reduce 1 MiB | ordinary | 21.0 |",
        "| all-reduce 1 MiB | symmetric | 9.00 |",
    ]
    assert "commit sweep" in blocks["where"]
    assert "commit sms" not in blocks["where"]


def test_tables_without_records_are_not_measured(
    page: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RESULTS", "TRAINING"):
        monkeypatch.setattr(page, name, tmp_path / "none.jsonl")
    assert set(page.blocks().values()) == {page.NOT_MEASURED}
