"""Slow test file lists: tools/slowest.py."""

import subprocess
import sys
from pathlib import Path

from tests import ROOT

TOOL = ROOT / "tools" / "slowest.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_files_are_sorted_by_the_seconds_of_their_tests(tmp_path: Path) -> None:
    cases = [("tests.test_a", 1.5), ("tests.test_b", 2), ("tests.test_a.TestX", 1), ("tests.c", 0)]
    for record in ("one", "two"):
        body = "".join(f'<testcase classname="{name}" time="{time}"/>' for name, time in cases)
        (tmp_path / f"{record}.xml").write_text(
            f"<testsuites><testsuite>{body}</testsuite></testsuites>"
        )
    done = run("--count", 2, *tmp_path.glob("*.xml"))
    assert done.stdout.splitlines() == [
        "     5.0 s  tests/test_a.py, 4 tests",
        "     4.0 s  tests/test_b.py, 2 tests",
    ]


def test_records_of_pytest_are_read(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("def test_y():\n    pass\n")
    record = tmp_path / "record.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={record}",
    ]
    subprocess.run([*command, "test_x.py"], cwd=tmp_path, check=True, capture_output=True)
    assert run(record).stdout.endswith(" s  test_x.py, 1 tests\n")


def test_a_missing_record_names_the_command_that_makes_one(tmp_path: Path) -> None:
    done = run(tmp_path / "*.xml")
    assert done.returncode == 2
    assert "make test-python" in done.stderr
