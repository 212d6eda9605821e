"""benchmarks/gpu/fused_models.py: cases, records and checks, on the CPU twin beside gloo."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import ROOT
from weft import _native

FOLDER = ROOT / "benchmarks" / "gpu"
FIELDS = {"benchmark", "case", "kind", "status", "reason", "workload", "result", "seconds"}
FIGURES = {"sides", "fused", "best_peer", "of_best_peer", "wrong"}

pytestmark = pytest.mark.torch

pytest.importorskip("triton")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "fused_models.py"), "--device", "twin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "conv"], "--cases 'conv': no such case; expected decode, compile, dlrm"),
        (["--budget", "0"], "--budget 0.0: expected more than 0"),
        (["--ranks", "0"], "--ranks 0: expected 1 or more"),
    ],
)
def test_bad_input_is_rejected_before_a_rank_starts(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.long
@pytest.mark.timeout(520)
def test_models_have_the_results_of_their_references(tmp_path: Path) -> None:
    if not hasattr(_native, "DeviceCollectives"):
        pytest.skip("needs a native module with DeviceCollectives; this one was built without")
    file = tmp_path / "lines.jsonl"
    names = ["decode 4096 1", "compile decode 4096", "compile prefill 4096", "dlrm train"]
    done = run("--json", "--cases", ",".join(names), "--results", str(file))
    records = json.loads(done.stdout)["cases"]
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    found = {record["case"]: check(record) for record in records}
    assert done.returncode == 0, done.stdout + done.stderr
    passes = ["pass on", "pass off"]
    assert list(found.pop("dlrm train")) == ["weft fused", "weft", "gloo"]
    assert {case: list(sides) for case, sides in found.items()} == {
        "decode 4096 1": ["weft fused", "weft fused product", "weft", "gloo"],
        "compile decode 4096": passes,
        "compile prefill 4096": [*passes, *(f"sequence, {each}" for each in passes)],
    }
    for case, name, operators in (
        ("compile decode 4096", "pass on", {"gemv_all_reduce": 2}),
        ("compile prefill 4096", "pass on", {"matmul_all_reduce": 2}),
        (
            "compile prefill 4096",
            "sequence, pass on",
            {"all_gather_matmul": 2, "matmul_reduce_scatter": 2},
        ),
    ):
        side = found[case][name]
        assert side["no_graph"] is None
        assert side["report"]["substitutions"] == operators
        assert side["report"]["fused_calls"].keys() == operators.keys()
        assert side["report"]["refusals"] == side["report"]["unfused_calls"] == []
        assert found[case][name.replace("on", "off")]["report"]["matches"] == {}


def check(record: dict[str, Any]) -> dict[str, Any]:
    """A record's sides, whose status is "ok"."""
    assert record.keys() == {*FIELDS, "origin"}
    assert (record["benchmark"], record["status"]) == ("gpu-fused-models", "ok"), record
    assert {"at", "weft", "commit", "machine", "device", "ranks"} <= record["origin"].keys()
    result = record["result"]
    assert result.keys() == FIGURES
    sides: dict[str, Any] = result["sides"]
    for side in sides.values():
        assert side["status"] == "ok", side
        assert side["error"] < 2e-2
        assert side["time"]["samples"] == 2
    assert result["of_best_peer"] > 0
    return sides


def test_cases_fit_two_and_four_ranks(modules: Any) -> None:
    cases = modules("fused_models_cases")
    names = [case.name for case in cases.CASES]
    assert len(set(names)) == len(names)
    for case in (*cases.CASES, *cases.tiny(cases.CASES)):
        assert case.unable(2) is None
        assert cases.Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    for case in cases.CASES:
        assert case.unable(4) is None
    assert cases.CASES[0].unable(3) == "3 ranks: expected kv_heads 8 as a multiple of 3"


def side(us: float, **more: Any) -> dict[str, Any]:
    """A rank's results on a side, with a time in microseconds."""
    return {"status": "ok", "reason": None, "times": [us], "error": 0.001} | more


def test_figures_compare_the_fastest_sides_and_wrong_ones_are_named(modules: Any) -> None:
    rank, (case, *_) = modules("fused_models_rank"), modules("fused_models_cases").CASES
    found = {"weft fused": side(30.0), "weft fused product": side(20.0), "nccl": side(40.0)}
    result, status, reason = rank.summarise(case, [{"sides": found}] * 2)
    assert (status, reason) == ("ok", None)
    assert (result["fused"], result["best_peer"]) == ("weft fused product", "nccl")
    assert result["of_best_peer"] == 0.5
    found["nccl"] = side(40.0, error=0.3)
    result, status, reason = rank.summarise(case, [{"sides": found}] * 2)
    assert (status, reason) == ("wrong", "nccl: the output's relative error is 0.3")
    assert result["best_peer"] is None
    lost = {"weft fused": {"status": "failed", "reason": "no kernel"}, "nccl": side(40.0)}
    assert rank.summarise(case, [{"sides": lost}])[1:] == ("failed", "no kernel")


def test_the_ranks_end_after_a_wait_that_expired(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, (case, *_) = modules("fused_models_rank"), modules("fused_models_cases").CASES
    reason = "rank 0: WaitTimeoutError: rank 1 did not come"
    sides = {"weft fused": {"status": "failed", "reason": reason}}
    monkeypatch.setattr(rank, "compare", lambda context, case: {"sides": sides})
    context = SimpleNamespace(task={"excluded": {}}, under_way=lambda case, side: None)
    with pytest.raises(RuntimeError, match=f"weft fused: {reason}"):
        rank.measure(context, case)
    context.task["excluded"][f"{case.name}: weft fused"] = reason
    assert rank.measure(context, case) == {"sides": sides}


def test_the_table_has_the_fastest_sides_and_the_others(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = modules("fused_page")
    file = tmp_path / "none.jsonl"
    monkeypatch.setattr(page, "MODELS", file)
    assert page.blocks()["models"] == page.NOT_MEASURED
    rank, cases = modules("fused_models_rank"), modules("fused_models_cases").CASES
    report = {"report": {"substitutions": {"gemv_all_reduce": 2}}}
    found = {"pass on": side(2000.0, **report), "pass off": side(3000.0), "nccl": side(4000.0)}
    result, status, _ = rank.summarise(cases[0], [{"sides": found}])
    origin = {"device": "cuda", "gpus": ["A"], "commit": "c", "at": "2026-11-27", "ranks": 2}
    record = {"case": "compile", "status": status, "result": result}
    file.write_text(json.dumps(record | {"origin": origin | {"versions": {}}}), encoding="utf-8")
    assert page.blocks()["models"].splitlines()[-1] == (
        "| compile, 2 GPUs | pass on | 2.00 / 2.00 | pass off | 3.00 / 3.00 | 1.50 | nccl 4.00 "
        "| 2 gemv_all_reduce |"
    )
