"""benchmarks/gpu/training.py: cases, records and checks, on the CPU twin beside gloo."""

import importlib
import json
import os
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
DECODED = [f"decode {hidden} {tokens}" for hidden in (4096, 8192) for tokens in (1, 4, 16)]

pytestmark = pytest.mark.torch


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "training.py"), "--device", "twin", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | environment,
    )


@pytest.fixture
def native() -> None:
    pytest.importorskip("torch")
    if not hasattr(_native, "DeviceCollectives"):
        pytest.skip("needs a native module with DeviceCollectives; this one was built without")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "bert,gpt"], "--cases 'gpt': no such case; expected resnet50, bert, decode"),
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
def test_every_case_has_the_losses_or_outputs_of_its_reference(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    done = run("--json", "--results", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(done.stdout)["cases"]
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    by_case = {record["case"]: check(record) for record in records}
    assert list(by_case) == ["resnet50 ddp", "bert ddp", *DECODED, "bert fsdp2"]
    for case, sides in by_case.items():
        symmetric = ["weft symmetric"] if case == "bert fsdp2" else []
        assert list(sides) == ["weft", *symmetric, "gloo"]
        for side in sides.values():
            assert side["status"] == "ok", side
            if case in DECODED:
                assert side["error"] < 2e-2
                continue
            assert side["loss_difference"] < 1e-4
            assert side["gradient_difference"] < 1e-4
            assert side["last_loss"] < side["losses"][0]
            assert side["replicas_equal"] is (None if case == "bert fsdp2" else True)


def check(record: dict[str, Any]) -> dict[str, Any]:
    """A record's sides, whose status is "ok"."""
    assert record.keys() == {*FIELDS, "origin"}
    assert (record["benchmark"], record["status"]) == ("gpu-training", "ok"), record
    assert {"at", "weft", "commit", "machine", "device", "ranks"} <= record["origin"].keys()
    assert record["origin"]["ranks"] == 2
    sides: dict[str, Any] = record["result"]["sides"]
    for side in sides.values():
        if side["status"] == "ok":
            time = side["time"]
            assert 0 < time["min_us"] <= time["p50_us"] <= time["p99_us"]
            assert time["samples"] == 4
    return sides


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.usefixtures("native")
def test_a_side_that_fails_is_recorded_and_the_others_are_measured() -> None:
    done = run("--json", "--cases", "bert ddp,decode 4096 1", GLOO_SOCKET_IFNAME="none0")
    assert done.returncode == 0, done.stdout + done.stderr
    for record in json.loads(done.stdout)["cases"]:
        sides = check(record)
        assert sides["weft"]["status"] == "ok"
        assert sides["gloo"]["status"] == "failed"
        assert "none0" in sides["gloo"]["reason"]


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.usefixtures("native")
def test_cases_that_ranks_or_the_budget_exclude_are_recorded_as_skipped() -> None:
    done = run("--json", "--cases", "decode 4096 1", "--ranks", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = json.loads(done.stdout)["cases"]
    reason = "3 ranks: expected a divisor of the 4 heads of keys and values"
    assert (record["status"], record["reason"], record["result"]) == ("skipped", reason, None)
    (record,) = json.loads(run("--json", "--cases", "bert ddp", "--budget", "0.5").stdout)["cases"]
    assert (record["status"], record["reason"]) == ("skipped", "the budget was spent")


class Steps:
    """Steps on a side that fails in its ninth, if it is called so."""

    def __init__(self, _context: Any, _case: Any, side: Any, _data: Any) -> None:
        self.name, self.count = side.name, 0

    def step(self) -> None:
        self.count += 1
        if self.name == "broken" and self.count == 9:
            raise RuntimeError("no ninth step")

    def facts(self) -> dict[str, Any]:
        return {"error": 1.0 if self.name == "peer" else 0.0}


def test_a_side_that_fails_within_its_steps_leaves_the_others(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures, cases = modules("training_measures"), modules("training_cases")
    ranks, context_of = modules("training_rank"), modules("harness.context")
    (case,) = cases.tiny([cases.CASES[2]])
    monkeypatch.setitem(measures.PROGRAMS, "decode", (lambda context, case: None, Steps))
    names = ("weft", "broken", "peer")
    sides = [SimpleNamespace(name=name, ready=lambda: None, check=lambda: None) for name in names]
    device = importlib.import_module("weft.bench.device.machine").Twin()
    context = SimpleNamespace(
        rank=0,
        ranks=1,
        device=device,
        task={"excluded": {f"{case.name}: left": "it ended the ranks"}},
        sides={"decode": [*sides, SimpleNamespace(name="left")]},
        under_way=lambda case, side: None,
        communicator=SimpleNamespace(barrier=lambda timeout: None),
        agree=lambda value: [value],
    )
    context.attempt = lambda work: context_of.Context.attempt(context, work)
    found = measures.compare(context, case)
    result, status, reason = ranks.summarise(case, [found])
    assert (status, reason) == ("wrong", "peer: the output's relative error is 1")
    assert {name: side["status"] for name, side in result["sides"].items()} == {
        "weft": "ok",
        "broken": "failed",
        "peer": "wrong",
        "left": "failed",
    }
    assert result["sides"]["broken"]["reason"] == "rank 0: RuntimeError: no ninth step"
    assert result["sides"]["left"]["reason"] == "it ended the ranks"


def trained(**changed: Any) -> dict[str, Any]:
    """A rank's facts."""
    found: dict[str, Any] = {"status": "ok", "reason": None, "times": [1.0], "digest": 5}
    found |= {"losses": [2.0, 1.5], "squares": [4.0, 4.0], "last_loss": 1.0}
    return found | changed


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([trained(), trained()], None),
        ([trained(digest=6), trained()], "parameters differ between ranks"),
        ([trained(losses=[2.0, 1.6])] * 2, "losses differ by 0.0667 of the reference's"),
        ([trained(squares=[16.0, 4.0])] * 2, "gradient_norms differ by 1 of the reference's"),
        ([trained(last_loss=float("nan"))] * 2, "the last loss is not finite"),
    ],
)
def test_results_beyond_rounding_are_wrong(
    modules: Any, ranks: list[dict[str, Any]], reason: str | None
) -> None:
    case = modules("training_cases").CASES[0]
    gathered = [{"sides": {"weft": each, "nccl": trained()}} for each in ranks]
    result, status, text = modules("training_rank").summarise(case, gathered)
    assert status == ("ok" if reason is None else "wrong")
    assert text == (reason and f"weft: {reason}")
    json.dumps(result, allow_nan=False)


def test_the_table_has_a_row_for_each_case_and_number_of_ranks(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = modules("gpu_collectives_page")
    monkeypatch.setattr(page, "TRAINING", tmp_path / "none.jsonl")
    assert page.blocks()["steps"] == page.NOT_MEASURED
    times = {"weft": 2000.0, "weft symmetric": 1900.0, "nccl": 3800.0}
    sides: dict[str, Any] = {
        name: {"status": "ok", "time": {"slowest_p50_us": us, "slowest_p99_us": 2 * us}}
        for name, us in times.items()
    }
    sides["torch one_shot"] = {"status": "failed"}
    origin = {"device": "cuda", "gpus": ["A"], "commit": "c", "at": "2026-11-27", "versions": {}}
    record = {"case": "bert fsdp2", "status": "ok", "result": {"sides": sides}}
    lines = [json.dumps(record | {"origin": origin | {"ranks": ranks}}) for ranks in (2, 4)]
    (tmp_path / "none.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert page.blocks()["steps"].splitlines()[2:] == [
        f"| bert fsdp2, {ranks} GPUs | 2.00 / 4.00 | 1.90 / 3.80 | 3.80 / 7.60 |  | 2.000 |"
        for ranks in (2, 4)
    ]
