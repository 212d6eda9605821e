"""Hooks and fixtures that all tests have."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest


def item(file: str, *marks: str) -> Any:
    return SimpleNamespace(path=Path(file), get_closest_marker=lambda name: name in marks or None)


def test_files_are_ordered_by_the_hash_and_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [item(f"test_{number // 2}.py") for number in range(40)]
    monkeypatch.delenv("TEST_ORDER", raising=False)
    found = [each.path for each in sorted_by_hook(tests)]
    assert found == [each.path for each in tests]
    orders = []
    for order in ("one", "other", "one"):
        monkeypatch.setenv("TEST_ORDER", order)
        found = sorted_by_hook(tests)
        assert [each.path for each in found[::2]] == [each.path for each in found[1::2]]
        orders.append([tests.index(each) for each in found])
    assert orders[0] == orders[2] != orders[1]


def sorted_by_hook(tests: list[Any]) -> list[Any]:
    copied = list(tests)
    conftest.pytest_collection_modifyitems(copied)
    return copied


def test_long_tests_do_not_begin_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_UNTIL", str(time.time() + 1000))
    conftest.pytest_runtest_setup(item("test_a.py", "long"))
    monkeypatch.setenv("TEST_UNTIL", str(time.time() - 1))
    conftest.pytest_runtest_setup(item("test_a.py"))
    with pytest.raises(pytest.skip.Exception, match="no time was left"):
        conftest.pytest_runtest_setup(item("test_a.py", "long"))


def test_a_failed_test_does_not_wait_for_what_it_started() -> None:
    with pytest.raises(ZeroDivisionError), subprocess.Popen(["sleep", "1000"]) as process:
        raise ZeroDivisionError
    assert process.returncode == -9
    with subprocess.Popen(["true"]) as process:
        pass
    assert process.returncode == 0
