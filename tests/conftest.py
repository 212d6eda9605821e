import hashlib
import importlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest

from tests import ROOT
from tests.device_group import group

# Machines are shared and busy: an example's duration is not significant.
hypothesis.settings.register_profile("weft", deadline=None, print_blob=True)
hypothesis.settings.load_profile("weft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files by a hash that includes TEST_ORDER, if it is set."""
    if order := os.environ.get("TEST_ORDER"):
        items.sort(key=lambda item: hashlib.sha256(f"{order} {item.path.name}".encode()).digest())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would start after TEST_UNTIL, in seconds since 1970."""
    if item.get_closest_marker("long") and time.time() > float(os.environ.get("TEST_UNTIL", "inf")):
        pytest.skip("no time was left; `make test-long` has no limit")


@pytest.fixture(autouse=True, scope="session")
def failed_tests_end_their_processes() -> Iterator[None]:
    """`with subprocess.Popen(...)` waits without a limit, even after the test's own has passed."""
    leave = subprocess.Popen.__exit__

    def kill_and_leave(process: Any, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            process.kill()
        leave(process, kind, error, trace)

    with mock.patch.object(subprocess.Popen, "__exit__", kill_and_leave):
        yield


@pytest.fixture
def alone() -> Iterator[Any]:
    """A one-twin group."""
    (rank,) = group(1)
    yield rank
    rank.close()


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """GPU benchmark modules by name."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    return importlib.import_module


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A separate Triton cache: kernels are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A folder with an authority and a certificate for 127.0.0.1."""
    script = ROOT / "benchmarks" / "certificates.sh"
    subprocess.run([script, tmp_path], check=True)
    return tmp_path
