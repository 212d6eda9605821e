"""Measurement recorder: benchmarks/record.py and `weft.bench.record`."""

import json
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from weft.bench import record


def test_records_are_appended_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.jsonl"
    record.append_record(file, {"a": 1})
    record.append_records(file, [{"a": 2}, {"a": 3}])
    lines = file.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["a"] for line in lines] == [1, 2, 3]


def test_benchmarks_and_the_package_describe_a_machine_alike() -> None:
    # Without the package on the path, as before `make build`.
    program = "import json, record; print(json.dumps(record.origin(other='1')))"
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(
        command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert {"at", "commit", "sources", "load", "versions"} < found.keys()
    assert found["versions"]["other"] == "1"
    assert found["machine"] == record.machine()
    assert record.origin()["machine"].keys() == record.machine().keys() | {"load"}
