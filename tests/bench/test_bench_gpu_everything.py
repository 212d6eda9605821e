"""benchmarks/gpu/everything.py: order, time shares and failures, and a run on the CPU twin."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

PROGRAM = ROOT / "benchmarks" / "gpu" / "everything.py"

pytestmark = pytest.mark.torch


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PROGRAM.parent)
    spec = importlib.util.spec_from_file_location("everything", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "everything", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.timeout(300)
def test_all_programs_run_on_the_twin(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--device", "twin", "--budget", "240", "--json"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    programs = json.loads(done.stdout)["programs"]
    names = ["collectives", "fused", "fused models", "training", "moe", "several hosts", "queries"]
    assert [(each["program"], each["status"]) for each in programs] == [(n, "ok") for n in names]
    assert done.returncode == 0
    files = {path.name for path in tmp_path.iterdir()}
    kinds = (
        "collectives",
        "fused",
        "fused_models",
        "training",
        "moe",
        "hierarchical",
        "queries",
    )
    assert files == {f"gpu_{kind}.jsonl" for kind in kinds}


def test_others_run_behind_one_that_fails_or_hangs(
    everything: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everything, "GRACE_SECONDS", -18.0)

    def program(name: str, share: float, text: str) -> Any:
        return everything.Stage(name, share, [sys.executable, "-c", text])

    stages = [
        program("fails", 0.5, "raise SystemExit(3)"),
        program("hangs", 0.5, "import time; time.sleep(60)"),
        program("runs", 1.0, "import sys; sys.exit(sys.argv[1] != '--budget')"),
    ]
    outcomes = everything.run_all(stages, 41.0, True)
    statuses = [each["status"] for each in outcomes]
    assert statuses[0] == "failed with status 3"
    assert statuses[1].startswith("killed after ")
    assert statuses[2] == "ok"
    assert everything.run_all(stages[:1], 20.0, True)[0]["status"] == "skipped"


def test_pretended_hosts_need_an_even_number_of_ranks(everything: Any) -> None:
    names = {
        ranks: [each.name for each in everything.stages("cuda", ranks, None)] for ranks in (3, 4)
    }
    assert "several hosts" in names[4]
    assert [each for each in names[4] if each != "several hosts"] == names[3]
