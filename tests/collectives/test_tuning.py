"""`weft tune`, its file, and selection by it: no times."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.bench import tuner
from weft.collectives import tuning
from weft.report.tuning import label


def tune(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "tune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_every_collective_and_algorithm_is_measured(tmp_path: Path, provider: str) -> None:
    file = tmp_path / "new" / "times.json"
    result = tune(
        *("--ranks", "3", "--provider", provider, "--max-size", "16K", "--seconds", "1"),
        *("--output", str(file), "--json"),
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written == {"format": "weft-tuning-1", "entries": [found["entry"]]}
    entry = found["entry"]
    assert (entry["provider"], entry["ranks"]) == (provider, 3)
    assert entry["machine"] == tuning.machine_name()
    assert set(entry["constants"]) == {"step_s", "post_s", "byte_s", "add_byte_s", "copy_byte_s"}
    for name in ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all"):
        curves = [each for each in entry["times"] if each["collective"] == name]
        choices = [(each["algorithm"], each["chunks"]) for each in curves]
        # Memory is read in place only over shm, where the kernel permits it.
        read = ("direct-read", 8)
        assert provider == "shm" or read not in choices
        expected = weft._native.CollectiveTimer.candidates(name)
        assert [each for each in choices if each != read] == [
            each for each in expected if each != read
        ]
        # Three ranks' shares: 24 B instead of 16 B, 12 B at least.
        shared = [12, 24, 72, 264, 1032, 4104, 16392]
        sizes = shared if name not in ("all-reduce", "broadcast") else [4**n for n in range(1, 8)]
        assert all([size for size, _ in each["points"]] == sizes for each in curves)
        regrets = [each for each in found["regrets"] if each["collective"] == name]
        assert [each["bytes"] for each in regrets] == sizes
        for each, size in zip(regrets, sizes, strict=True):
            # The selection is the file's fastest.
            times = {
                label(curve["algorithm"], curve["chunks"]): dict(curve["points"])[size]
                for curve in curves
            }
            assert times[each["selected"]] == min(times.values())
            assert each["regret"] >= 1
    assert Path(found["picture"]).read_text(encoding="utf-8").startswith("<?xml")


def test_invalid_options_are_rejected(tmp_path: Path) -> None:
    for arguments, text in (
        (["--ranks", "1"], "--ranks 1: expected at least 2"),
        (["--max-size", "2"], "2: expected at least 4 bytes"),
        (["--plot", str(tmp_path / "x.pdf")], "expected a file name that ends in"),
    ):
        result = tune(*arguments)
        assert result.returncode == 2
        assert text in result.stderr


def curve(algorithm: str, points: list[tuple[int, float]]) -> dict[str, Any]:
    return {"collective": "all-reduce", "algorithm": algorithm, "chunks": 8, "points": points}


def test_crossovers_are_where_lines_meet() -> None:
    times = [
        curve("one-shot", [(100, 1.0), (200, 3.0)]),
        curve("ring", [(100, 2.0), (200, 2.0), (300, 9.0)]),
        curve("tree", [(100, 5.0), (200, 5.0), (300, 5.0)]),
    ]
    assert tuner.crossovers(times) == [
        {"collective": "all-reduce", "bytes": 150, "from": "one-shot", "to": "ring"},
        {"collective": "all-reduce", "bytes": 243, "from": "ring", "to": "tree, 8 chunks"},
    ]


def test_regret_compares_the_selection_with_the_fastest() -> None:
    case = {"collective": "broadcast", "bytes": 64, "selected": ["chain", 2]}
    case["times"] = [["binomial", 8, 2.0], ["chain", 2, 3.0], ["chain", 8, 4.0]]
    (found,) = tuner.regrets([case])
    assert found["regret"] == 1.5
    assert (found["selected"], found["fastest"]) == ("chain, 2 chunks", "binomial")


def test_entries_of_other_groups_stay(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text("damaged", encoding="utf-8")
    first = {"provider": "shm", "ranks": 2, "machine": "this", "at": "1"}
    other, again = first | {"ranks": 4}, first | {"at": "2"}
    for entry in (first, other, again):
        tuning.add_entry(file, entry)
    assert json.loads(file.read_text(encoding="utf-8"))["entries"] == [other, again]
    assert os.listdir(tmp_path) == ["times.json"]


def test_the_place_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEFT_TUNING", raising=False)
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    assert tuning.tuning_file() == tmp_path / "tuning.json"
    assert tuning.source() is None
    monkeypatch.setenv("WEFT_TUNING", str(tmp_path / "mine.json"))
    assert tuning.source() is None
    (tmp_path / "mine.json").write_text("{}", encoding="utf-8")
    assert tuning.source() == (str(tmp_path / "mine.json"), "{}", tuning.machine_name())
