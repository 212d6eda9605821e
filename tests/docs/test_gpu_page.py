"""Tables in docs/gpu.md: results for Weft and other systems."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT
from weft.bench.device.cases import CASES
from weft.bench.device.summary import summarise

ROUNDS = ("round", "dispatch", "combine", "nothing")
HALVES = ("dispatch send", "dispatch recv", "combine send", "combine recv")
GEMM_TIMES = ("alone", "with gemm", "gemm alone", "gemm with rounds")
TIMES = {
    "rounds": (*ROUNDS, *HALVES, "cold dispatch", "cold combine", "cold nothing"),
    "modes": ("graph round", "eager round", "compiled round"),
    "harness": ("eager once pair", "eager between pair", "graph once pair", "graph between pair"),
    "late": ("on time dispatch", "on time combine", "late dispatch", "late combine"),
    "gemm": GEMM_TIMES + tuple(f"carveout {name}" for name in GEMM_TIMES),
    "start": (),
}


@pytest.fixture(scope="module")
def page() -> Iterator[ModuleType]:
    directory = ROOT / "benchmarks"
    sys.path.insert(0, str(directory))
    try:
        spec = importlib.util.spec_from_file_location("gpu_page", directory / "gpu_page.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(directory))


def seen(kind: str, *, nccl: bool = True) -> dict[str, Any]:
    """A rank's result for a case."""
    found: dict[str, Any] = {
        "times": {name: [12.5, 12.5, 30.0] for name in TIMES[kind]},
        "wrong": 0,
        "largest_share_of_bound": 0.5,
        "facts": {
            "heap_bytes": 3 << 20,
            "path": "latency",
            "num_sms": 8,
            "positions": 64,
            "build": {"seconds": 2.5, "cached": False},
        },
    }
    if kind == "rounds":
        found |= {"rows_sent": 100, "dispatch_bytes": 125_000, "combine_bytes": 250_000}
        times = {name: [50.0] for name in ("dispatch", "combine", "round")}
        unable = {"backend": "nccl", "unable": "NCCL does not take 2 ranks on 1 GPUs"}
        beside = {"backend": "nccl", "times": times, "graph": True, "wrong": 0}
        found["beside"] = beside if nccl else unable
    elif kind == "modes":
        names = ("dispatch", "combine", *HALVES)
        found |= {"compile_seconds": 4.5, "host_us": dict.fromkeys(names, 7.25)}
    elif kind == "late":
        found |= {"late_rank": 1, "late_us": 200.0}
    elif kind == "start":
        found |= {"constructor_seconds": 3.5, "first_round_seconds": 0.25}
    return found


def records(gpus: int, ranks: int, **changes: Any) -> list[dict[str, Any]]:
    origin = {
        "at": "2026-01-02T03:04:05+00:00",
        "commit": "abcdef",
        "device": "cuda",
        "ranks": ranks,
        "gpus": ["NVIDIA Z9"] * gpus,
        "links": "18 NVLinks each, to a switch",
        "versions": {"torch": "2.11", "cuda": "13.0", "nccl": "2.28", "driver": "580"},
    }
    return [
        {
            "benchmark": "gpu-moe",
            "case": case.name,
            "kind": case.kind,
            "status": "ok",
            "reason": None,
            "workload": case.to_json(),
            "result": summarise([seen(case.kind, nccl=ranks == gpus) for _ in range(ranks)]),
            "seconds": 1.0,
            "origin": origin,
        }
        | changes
        for case in CASES
    ]


def kept(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_page_without_results_says_so_and_draws_nothing(page: ModuleType, tmp_path: Path) -> None:
    none = page.read(tmp_path / "none.jsonl")
    assert none == []
    for name in ("where", "picture", "cold", "modes", "late", "gemm", "start", "sweep", "model"):
        assert page.TABLES[name](none) == page.NOT_MEASURED
    # Other systems' figures are shown in any case.
    assert "| DeepEP V1, 8 NVIDIA H200 (measured) | 36.5 | 64.2 |" in page.TABLES["decode"](none)
    assert not page.draw_decode(none, tmp_path / "picture.svg")
    assert not (tmp_path / "picture.svg").exists()


def test_every_table_has_every_machine(page: ModuleType, tmp_path: Path) -> None:
    file = kept(tmp_path / "r.jsonl", records(1, 2) + records(8, 8))
    found = page.read(file)
    assert page.machine(found[0]) == "8 NVIDIA Z9"
    for name, table in page.TABLES.items():
        if name not in ("picture", "not-measured", "model", "model-checks"):
            text = table(found)
            assert "8 NVIDIA Z9" in text, name
            assert "2 ranks on 1 NVIDIA Z9" in text, name
    decode = page.TABLES["decode"](found).splitlines()
    # 125,000 bytes in 12.5 microseconds are 10 GB/s; NCCL took 50 microseconds.
    cells = ["12.5 / 29.6"] * 3 + ["10.0", "20.0", "50.0", "50.0"]
    row = "| Weft, 8 NVIDIA Z9: cast to fp8 by the kernel, contiguous | "
    assert f"{row}{' | '.join(cells)} |" in decode
    assert "None: all started cases" in page.TABLES["not-measured"](found)


def test_rows_of_others_name_their_machine(page: ModuleType) -> None:
    found = page.TABLES["decode"]([]) + page.TABLES["prefill"]([]) + page.TABLES["harness"]([])
    rows = [line for line in found.splitlines() if line.startswith(("| DeepEP", "| pplx"))]
    assert len(rows) == 14
    assert all("(measured)" in row or "(published)" in row for row in rows)
    machines = ("8 NVIDIA H200", "2 NVIDIA H200", "8 H")
    assert all(any(machine in row for machine in machines) for row in rows)


def test_the_last_record_of_a_case_counts_and_the_twins_never(
    page: ModuleType, tmp_path: Path
) -> None:
    twin, good = records(8, 8)[0], records(8, 8)[0]
    twin["origin"] = twin["origin"] | {"device": "twin"}
    failed = good | {"status": "failed", "reason": "rank 3: Traceback\n  a | b", "result": None}
    skipped = good | {"status": "skipped", "reason": "the budget was spent", "result": None}
    (only,) = page.read(kept(tmp_path / "r.jsonl", [failed, good, skipped, twin]))
    assert only["status"] == "ok"
    (only,) = page.read(kept(tmp_path / "r.jsonl", [good, failed, skipped]))
    assert "| decode, 8 NVIDIA Z9 | failed | a \\| b |" in page.TABLES["not-measured"]([only])
    assert "Z9" not in page.TABLES["decode"]([only])


def test_the_picture_is_drawn_from_the_records(page: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = page.read(kept(tmp_path / "r.jsonl", records(8, 8)))
    assert list(page.bars(found))[:2] == ["Weft, 8 NVIDIA Z9", "NCCL, as many bytes, 8 NVIDIA Z9"]
    assert page.draw_decode(found, tmp_path / "gpu.svg")
    assert 1000 < (tmp_path / "gpu.svg").stat().st_size < 200_000
