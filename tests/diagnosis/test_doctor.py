import json

import pytest

from weft import diagnosis
from weft.cli import main
from weft.diagnosis import Finding, cuda, efa, machine, nics, ofi, verbs


def test_everything_required_is_found_here() -> None:
    findings = diagnosis.examine()
    assert [finding.name for finding in findings if finding.required and not finding.found] == []
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    assert {"memfd", "futex", "loopback", "CUDA driver", "gdrcopy", "libibverbs"} <= set(names)
    assert all(finding.detail and finding.follows for finding in findings)


def test_the_table_has_a_row_for_each_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    table, _, verdict = capsys.readouterr().out.partition("\n\n")
    assert len(table.splitlines()) == 2 + len(diagnosis.examine())
    assert verdict == "Weft works here.\n"


def test_what_is_required_and_missing_decides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Finding("memfd", False, "Operation not permitted", "no region can be allocated", True)
    monkeypatch.setattr(machine, "LOOKS", (lambda: absent,))
    for module in (cuda, efa, nics, ofi, verbs):
        monkeypatch.setattr(module, "findings", lambda _: [])
    assert main(["doctor"]) == 1
    assert "MISSING" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "findings": [
            {
                "name": "memfd",
                "found": False,
                "detail": "Operation not permitted",
                "follows": "no region can be allocated",
                "required": True,
            }
        ],
    }


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), (None, None)]
)
def test_the_control_groups_share_is_understood(
    text: str | None, cores: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cgroup_value", lambda _: text)
    assert machine.cgroup_cores() == cores


@pytest.mark.parametrize(("text", "size"), [("max", None), ("4096", 4096), (None, None)])
def test_the_control_groups_memory_is_understood(
    text: str | None, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cgroup_value", lambda _: text)
    assert machine.cgroup_memory() == size
