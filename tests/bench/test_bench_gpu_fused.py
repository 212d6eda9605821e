"""benchmarks/gpu/fused.py: cases, records and checks, on the CPU twin; the tables in its page."""

import importlib
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
#: Tiling names in a store comparison on the twin.
TILINGS = ["stream_k False, rows 16, columns 32, inner 16, paced_stores True", "rows 48"]
FIGURES = {
    *("sides", "buffers", "calls", "wrong", "fused", "best_unfused", "speedup", "speedup_nccl"),
    *(
        "speedup_default",
        "computation_us",
        "exchange_us",
        "other_computation",
        "hidden",
        "bound_us",
    ),
}

pytestmark = pytest.mark.torch

pytest.importorskip("triton")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "fused.py"), "--device", "twin", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "gemv,conv"], "--cases 'conv': no such case; expected embedding, gemm_all_to"),
        (["--budget", "0"], "--budget 0.0: expected more than 0"),
        (["--seconds", "0"], "--seconds 0.0: expected more than 0"),
        (["--ranks", "0"], "--ranks 0: expected 1 or more"),
    ],
)
def test_bad_input_is_rejected_before_a_rank_starts(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.long
@pytest.mark.timeout(520)
def test_every_kind_of_case_is_measured_and_checked(tmp_path: Path) -> None:
    if not hasattr(_native, "DeviceCollectives"):
        pytest.skip("needs a native module with DeviceCollectives; this one was built without")
    file = tmp_path / "lines.jsonl"
    names = "embedding,gemm_all_to_all,gemv_norm,norm,ablation embedding,ablation gemm_all_to_all"
    names += ",stores gemm_reduce_scatter,stores gemm_all_to_all"
    names += ",scaled all_gather_gemm,scaled gemm_reduce_scatter"
    done = run("--json", "--cases", names, "--results", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(done.stdout)["cases"]
    assert [json.loads(line) for line in file.read_text().splitlines()] == records
    pooled, sent = (check_ablation(record) for record in records[4:6])
    summed, stored = (check_stores(record) for record in records[6:8])
    assert list(summed) == ["fused", *TILINGS, "weft gemm", "weft alone"]
    symmetric = [f"symmetric {name}" for name in TILINGS]
    assert list(stored) == ["fused", "fused symmetric", *symmetric, "weft gemm", "weft alone"]
    assert all("torch gemm + weft" in check(record) for record in records[8:])
    by_operator = {record["workload"]["operator"]: check(record) for record in records[:4]}
    assert {name: side["status"] for name, side in pooled["sides"].items()} == {
        "fused": "ok",
        "own_last -1": "ok",
        "own_last 1": "skipped",
        "bags 256": "skipped",
    }
    assert pooled["sides"]["own_last 1"]["reason"] == "it is the default"
    assert "tiling.bags is 256: expected at most 16" in pooled["sides"]["bags 256"]["reason"]
    assert pooled["defaults"].keys() == {"own_last", "bags"}
    assert sent["sides"]["group 1"]["status"] == "ok"
    assert "num_sms is 64: 1 to 3 are needed" in sent["sides"]["num_sms 64"]["reason"]
    assert sent["defaults"] == {"group": 8, "num_sms": 3}
    fused = by_operator["gemm_all_to_all"].pop("fused symmetric")
    by_default = by_operator["gemm_all_to_all"].pop("default symmetric")
    assert fused["is_ours"]
    assert by_default["is_ours"]
    words = {
        "embedding_all_to_all": "pool",
        "gemm_all_to_all": "gemm",
        "gemv_all_reduce": "gemv",
        "all_reduce_rms_norm": "norm",
    }
    for operator, word in words.items():
        libraries = ["triton"] if word == "norm" else ["weft", "torch"]
        collectives = ["weft", "nccl"]
        assert list(by_operator[operator]) == [
            "fused",
            *(["fused one_shot", "fused two_shot"] if word in ("gemv", "norm") else []),
            *(["default"] if word in ("gemm", "gemv") else []),
            *(f"{each} {word} + {other}" for each in libraries for other in collectives),
            *(f"{each} {word}" for each in libraries),
            *(f"{each} alone" for each in collectives),
        ]


def check_stores(record: dict[str, Any]) -> dict[str, Any]:
    """Sides of a record with status "ok"; only the tiling that does not fit has no time."""
    assert (record["kind"], record["status"]) == ("stores", "ok"), record
    result: dict[str, Any] = record["result"]
    assert result.keys() == {*FIGURES, "ratios"}
    assert result["hidden"] is not None
    sides: dict[str, Any] = result["sides"]
    for name, side in sides.items():
        assert side["status"] == ("skipped" if name.endswith(TILINGS[1]) else "ok"), side
    return sides


def check_ablation(record: dict[str, Any]) -> dict[str, Any]:
    """Result of a record with status "ok" whose sides with a time are right."""
    assert (record["kind"], record["status"]) == ("ablation", "ok"), record
    result: dict[str, Any] = record["result"]
    assert result.keys() == {*FIGURES, "defaults", "ratios"}
    assert result["sides"].keys() == {"fused", *result["ratios"]}
    for name, side in result["sides"].items():
        if side["status"] != "ok":
            assert result["ratios"][name] is None
            continue
        assert 0 <= side["largest_share_of_bound"] <= 1
        assert name == "fused" or result["ratios"][name] > 0
    return result


def check(record: dict[str, Any]) -> dict[str, Any]:
    """Sides of a record with status "ok"."""
    assert record.keys() == {*FIELDS, "origin"}
    assert (record["benchmark"], record["status"]) == ("gpu-fused", "ok"), record
    assert {"at", "weft", "commit", "machine", "device", "ranks"} <= record["origin"].keys()
    result = record["result"]
    assert result.keys() == FIGURES
    assert result["calls"] % result["buffers"] == 0
    assert result["best_unfused"].endswith(" + weft")
    assert result["speedup"] > 0
    assert result["hidden"] is not None
    sides: dict[str, Any] = result["sides"]
    for name, side in sides.items():
        if name.split()[-1] == "nccl" or name == "nccl alone":
            assert side["status"] == "skipped", side
            continue
        assert side["status"] == "ok", side
        time = side["time"]
        assert 0 < time["min_us"] <= time["p50_us"] <= time["p99_us"]
        assert time["samples"] == 1
        is_call = name.startswith(("fused", "default"))
        assert side["is_whole"] == (is_call or " + " in name)
        if side["is_whole"]:
            assert 0 <= side["largest_share_of_bound"] <= 1
            is_replicated = record["case"].split()[0] in ("gemv_norm", "norm")
            assert side["replicas_equal"] is (True if is_replicated else None)
    return sides


def test_kinds_take_turns_and_buffers_divide_the_calls(modules: Any) -> None:
    cases = modules("fused_cases")
    kinds = [case.kind for case in cases.CASES]
    assert kinds[:8] == ["embedding", "gemm", "gemv", "norm"] * 2
    assert kinds.count("gemv") == kinds.count("gemv_norm")
    assert len({case.name for case in cases.CASES}) == len(kinds)
    for case in cases.CASES:
        assert case.calls % case.buffers == 0
        assert case.buffers > 1
        assert case.unable(2, None) is None
        assert case.unable(4, None) is None
        assert cases.Case.from_json(json.loads(json.dumps(case.to_json()))) == case
        exchange = case.exchange(2)
        assert (exchange.buffers, exchange.bytes % 4) == (case.buffers, 0)
    assert {case.kind for case in cases.choose("gemm")} == {"gemm"}
    assert "ablation" not in kinds
    for case in cases.choose("scaled"):
        (base,) = cases.choose(case.name.removeprefix("scaled "))
        assert (base.operator, base.shape, case.kind) == (case.operator, case.shape, "scaled")
        assert case.calls % case.buffers == 0
        assert case.vector() == base.vector() // (2 if case.is_gathered else 1)
    for case in cases.choose("ablation"):
        assert case.kind == "ablation"
        assert case.unable(2, None) is None
        assert cases.Case.from_json(json.loads(json.dumps(case.to_json()))) == case
        (base,) = cases.choose(case.name.removeprefix("ablation "))
        assert (base.kind, base.shape) == (case.computation, case.shape)
        assert (base.buffers, base.bytes(2)) == (case.buffers, case.bytes(2))
    for case in cases.choose("stores"):
        assert (case.kind, case.is_varied) == ("stores", True)
        (base,) = cases.choose(case.name.removeprefix("stores "))
        assert (base.kind, base.shape) == (case.computation, case.shape)
        assert cases.Case.from_json(json.loads(json.dumps(case.to_json()))) == case
    assert "GiB are free" in cases.CASES[0].unable(2, 1 << 30)
    assert "expected batch 4096 as a multiple of 3" in cases.CASES[0].unable(3, None)


class Stub:
    """A case's data with a reference that only "wrong" misses."""

    def __init__(self, _context: Any, case: Any) -> None:
        self.case = case
        self.references = {0: self}

    def arrange(self, result: Any) -> Any:
        return result

    def judge(self, results: Any) -> float:
        return float(results[0][0])


def way(modules: Any, name: str, result: float, fails_at: int | None = None) -> Any:
    """A side with a result, which fails in one call."""
    torch = importlib.import_module("torch")
    calls = 0

    def call(_slot: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise RuntimeError(f"no call {calls}")
        return torch.full((2,), result, dtype=torch.float16)

    side = SimpleNamespace(name=name, is_whole=True, ours=name == "fused", library_name="")
    side.unable = lambda case: "not here" if name == "unable" else None
    side.ready = side.check = lambda: None
    side.bind = lambda case: modules("fused_sides").Calls(call, lambda turn: None, lambda: None)
    return side


def test_a_side_that_fails_or_is_wrong_leaves_the_others(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures, ranks = modules("fused_measures"), modules("fused_rank")
    (case,) = modules("fused_cases").tiny(modules("fused_cases").choose("gemv"))
    excluded = {f"{case.name}: lost + nccl": "it ended the ranks"}
    ways = [
        way(modules, "fused", 0.5),
        way(modules, "weft gemv + nccl", 0.0),
        way(modules, "broken + weft", 0.0, fails_at=9),
        way(modules, "wrong + weft", 2.0),
        way(modules, "unable", 0.0),
        way(modules, "lost + nccl", 0.0),
    ]
    monkeypatch.setitem(measures.DATA, "gemv", Stub)
    monkeypatch.setattr(measures, "sides_of", lambda context, data: ways)
    found = measures.compare(context_of(modules, excluded), case)
    result, status, reason = ranks.summarise(case, [found])
    assert {name: side["status"] for name, side in result["sides"].items()} == {
        "fused": "ok",
        "weft gemv + nccl": "ok",
        "broken + weft": "failed",
        "wrong + weft": "wrong",
        "unable": "skipped",
        "lost + nccl": "failed",
    }
    assert (status, reason) == ("wrong", "wrong + weft: an error is 2 of its bound")
    assert result["sides"]["broken + weft"]["reason"] == "rank 0: RuntimeError: no call 9"
    assert result["sides"]["lost + nccl"]["reason"] == "it ended the ranks"
    assert result["best_unfused"] == "weft gemv + nccl"
    json.dumps(result, allow_nan=False)


def test_the_ranks_end_after_a_wait_that_expired(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures = modules("fused_measures")
    (case,) = modules("fused_cases").tiny(modules("fused_cases").choose("gemv"))
    lost = way(modules, "fused", 0.5)

    def check() -> None:
        raise modules("weft.errors").WaitTimeoutError("rank 1 did not come")

    lost.check = check
    monkeypatch.setitem(measures.DATA, "gemv", Stub)
    monkeypatch.setattr(measures, "sides_of", lambda context, data: [lost])
    with pytest.raises(RuntimeError, match="fused: rank 0: WaitTimeoutError: rank 1 did not come"):
        measures.compare(context_of(modules, {}), case)


def context_of(modules: Any, excluded: dict[str, str]) -> Any:
    """A single rank's state on the twin."""
    context = SimpleNamespace(
        rank=0,
        ranks=1,
        device=importlib.import_module("weft.bench.device.machine").Twin(),
        task={"excluded": excluded, "seconds": 0.01},
        under_way=lambda case, side: None,
        agree=lambda value: [value],
        free=lambda: None,
    )
    base = modules("harness.context").Context
    context.attempt = lambda work: base.attempt(context, work)
    return context


def side(us: float, **more: Any) -> dict[str, Any]:
    """A side with a median in microseconds."""
    time = {"slowest_p50_us": us, "slowest_p99_us": 2 * us}
    return {"status": "ok", "reason": None, "time": time} | more


def test_figures_compare_the_fused_operator_with_sides_and_parts(modules: Any) -> None:
    ranks = modules("fused_rank")
    case = modules("fused_cases").choose("gemm")[0]
    sides = {
        "fused": side(120.0),
        "fused symmetric": side(110.0),
        "default": side(150.0),
        "default symmetric": side(140.0),
        "weft gemm + weft": side(165.0),
        "weft gemm + nccl": side(176.0),
        "torch gemm + nccl": side(154.0),
        "weft gemm": side(100.0),
        "torch gemm": side(80.0),
        "weft alone": side(50.0),
        "nccl alone": side(60.0),
    }
    assert ranks.figures(case, sides) == {
        "fused": "fused symmetric",
        "best_unfused": "torch gemm + nccl",
        "speedup": 154 / 110,
        "speedup_nccl": 176 / 110,
        "speedup_default": 1.1,
        "computation_us": 100.0,
        "exchange_us": 50.0,
        "other_computation": 0.8,
        "hidden": 0.8,
        "bound_us": 102.0,
    }
    empty = ranks.figures(case, {"fused": {"status": "failed"}})
    assert set(empty.values()) == {None}


def test_tables_show_means_and_losses_and_stay_without_records(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page = modules("fused_page")
    monkeypatch.setattr(page, "RESULTS", tmp_path / "none.jsonl")
    monkeypatch.setattr(page, "MODELS", tmp_path / "no models.jsonl")
    assert set(page.blocks().values()) == {page.NOT_MEASURED}
    ranks, cases = modules("fused_rank"), modules("fused_cases").choose("norm")
    lines = []
    for case, us in zip(cases, (10.0, 40.0), strict=False):
        sides = {"fused": side(us), "triton norm + nccl": side(20.0), "triton norm": side(2.0)}
        result = ranks.figures(case, sides) | {"sides": sides}
        origin = {"device": "cuda", "gpus": ["A"], "commit": "c", "at": "2026-11-27"}
        record = {"case": case.name, "kind": case.kind, "workload": case.to_json()}
        record |= {"status": "ok", "origin": origin | {"versions": {}, "ranks": 2}}
        lines.append(json.dumps(record | {"result": result}))
    lines.append(json.dumps(record | {"case": "skipped", "result": None}))
    (tmp_path / "none.jsonl").write_text("\n".join(lines), encoding="utf-8")
    made = page.blocks()
    assert made["means"].splitlines()[2:] == [
        "| all_reduce_rms_norm, 2 GPUs | 2 | 1.00 | 1.00 |  | 1 |"
    ]
    assert made["losses"].splitlines()[2:] == [
        "| norm 8192 128, 2 GPUs | triton norm + nccl | 0.50 |"
    ]
    assert made["norm"].splitlines()[2] == (
        "| norm 8192 32, 2 GPUs | 10.0 / 20.0 | 20.0 / 40.0 | triton norm + nccl | 2.00 | 2.00 "
        "| 2.00 |  |  |  |  |"
    )
    assert made["gemm"] == page.NOT_MEASURED
    newer = json.loads(lines[0])
    newer["result"]["speedup_default"] = 1.25
    (tmp_path / "none.jsonl").write_text(json.dumps(newer), encoding="utf-8")
    table = page.blocks()["norm"].splitlines()
    assert table[0].endswith("| hidden | / default |")
    assert table[2].endswith("|  | 1.25 |")


def test_ablations_have_a_table_and_a_picture_of_their_own(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    page, ranks = modules("fused_page"), modules("fused_rank")
    monkeypatch.setattr(page, "RESULTS", tmp_path / "lines.jsonl")
    monkeypatch.setattr(page, "MODELS", tmp_path / "no models.jsonl")
    monkeypatch.setattr(page, "PICTURE", tmp_path / "fused-ablation.svg")
    assert page.draw() == []
    lines = []
    for case in modules("fused_cases").choose("ablation")[:2]:
        sides = {"fused": side(100.0)}
        defaults = {size: values[1] for size, values in case.sizes.items()}
        for size, values in case.sizes.items():
            for value in values:
                sides[f"{size} {value}"] = side(100.0 + abs(value) % 60)
            sides[f"{size} {values[1]}"] = {"status": "skipped", "reason": "it is the default"}
            sides[f"{size} {values[0]}"] = {"status": "failed", "reason": "lost"}
        result = ranks.figures(case, sides) | {"sides": sides, "ratios": ranks.ratios(sides)}
        origin = {"device": "cuda", "gpus": ["A"], "commit": "c", "at": "2026-11-27"}
        record = {"case": case.name, "kind": case.kind, "workload": case.to_json()}
        record |= {"status": "ok", "origin": origin | {"versions": {}, "ranks": 2}}
        lines.append(json.dumps(record | {"result": result | {"defaults": defaults}}))
    page.RESULTS.write_text("\n".join(lines), encoding="utf-8")
    made = page.blocks()
    table = made.pop("ablation").splitlines()
    assert table[0].endswith("(../images/fused-ablation.svg)")
    assert table[4:6] == [
        "| embedding 8x128 batch 4096 pooling 4, 2 GPUs | 100 / 200 | `own_last` "
        "| -1: 1.01, 1: 1.01, 4: default, 8: failed |",
        "| embedding 8x128 batch 4096 pooling 4, 2 GPUs | 100 / 200 | `programs` "
        "| 1: failed, 2: default, 3: 1.03, 4: 1.04, 6: 1.06 |",
    ]
    assert "A; commit c" in made.pop("where")
    assert set(made.values()) == {page.NOT_MEASURED}
    pytest.importorskip("matplotlib")
    assert page.draw() == [page.PICTURE]
    assert "<svg" in page.PICTURE.read_text(encoding="utf-8")
