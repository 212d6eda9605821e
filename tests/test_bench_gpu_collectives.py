"""benchmarks/gpu/collectives.py: cases, records and checks, on the CPU twin."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft import _native

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "benchmarks" / "gpu" / "collectives.py"
FIELDS = {"benchmark", "case", "kind", "status", "reason", "workload", "result", "seconds"}
ALGORITHMS = ["weft", "weft one_shot", "weft two_shot"]

pytestmark = pytest.mark.torch


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--device", "twin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


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


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("native")
def test_every_kind_of_case_is_measured_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    names = "all_reduce,all_gather 1K,reduce_scatter 8K,all_to_all 1K,barrier,called"
    names += ",sweep reduce_scatter"
    done = run("--json", "--cases", names, "--results", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(done.stdout)["cases"]
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    by_case = {record["case"]: check(record) for record in records}
    assert list(by_case["all_reduce 1K"]) == ALGORITHMS
    assert by_case["all_reduce 64K"]["weft two_shot"]["busbw_gb_per_s"] > 0
    assert list(by_case["barrier"]) == ["weft"]
    assert by_case["called"]["weft"]["host"]["slowest_p50_us"] > 0
    swept = ["weft", "weft 1 SMs 4096 B", "weft 2 SMs 4096 B"]
    assert list(by_case["sweep reduce_scatter 64K"]) == swept


def check(record: dict[str, Any]) -> dict[str, Any]:
    """The sides of a record, whose status is "ok"."""
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


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("native")
def test_a_case_beyond_the_budget_is_recorded_as_skipped() -> None:
    done = run("--json", "--cases", "barrier", "--budget", "0.5")
    (record,) = json.loads(done.stdout)["cases"]
    assert (record["status"], record["reason"]) == ("skipped", "the budget was spent")
    assert done.returncode == 0
