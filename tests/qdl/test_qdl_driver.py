"""Copies between slots and a device, by a CUDA driver for tests that delays them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests import ROOT

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a libcuda.so.1 that has all functions in the crates/cuda table."""
    folder = tmp_path_factory.mktemp("driver")
    source = (ROOT / "tests/workers/qdl/driver.c").read_text(encoding="utf-8")
    table = (ROOT / "crates/cuda/src/driver.rs").read_text(encoding="utf-8")
    names = re.findall(
        r"^    (cu\w+)\(", table.partition("functions! {")[2].partition("\n}\n")[0], re.M
    )
    assert "cuMemcpy2DAsync_v2" in names
    defined = set(re.findall(r"^unsigned (cu\w+)\(", source, re.M))
    others = "".join(
        f"unsigned {name}(void) {{ return 999; }}\n" for name in names if name not in defined
    )
    (folder / "driver.c").write_text(source + others, encoding="utf-8")
    command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(folder / "driver.c"), "-lpthread"], check=True)
    return folder


def run(
    driver: Path, provider: str, fail_at: int = 0, sync_fails: int = 0, device_fails: int = 0
) -> dict[str, Any]:
    numbers = map(str, (fail_at, sync_fails, device_fails))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/workers/qdl/lanes.py"), provider, *numbers],
        env=os.environ | {"LD_LIBRARY_PATH": str(driver)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("provider", ["shm", "tcp"])
def test_batches_are_copied_before_the_model_and_before_their_answers(
    driver: Path, provider: str
) -> None:
    found = run(driver, provider)
    assert (found["wrong"], found["failed"], found["errors"]) == (0, 0, [])
    # Fixed-size inputs in neighbouring slots, and their outputs.
    assert found["rows"] > 2 * found["strided"] > 0
    # Query and answer slots for three front ends, until their memory is freed.
    assert found["registered"] == found["unregistered"] == 6


@pytest.mark.parametrize("fail_at", [1, 40, 41, 42, 43])
def test_a_copy_that_fails_costs_its_batch_alone(driver: Path, fail_at: int) -> None:
    found = run(driver, "shm", fail_at)
    assert found["wrong"] == 0
    assert 0 < found["failed"] <= 16
    (error,) = found["errors"]
    assert "failed: fake (FAKE, 1)" in error
    assert found["registered"] == found["unregistered"] == 6


@pytest.mark.parametrize("sync_fails", [1, 100])
def test_copies_end_before_their_memory_if_a_wait_fails(driver: Path, sync_fails: int) -> None:
    found = run(driver, "shm", sync_fails=sync_fails)
    assert found["wrong"] == 0
    assert 0 < found["failed"] <= 32
    assert 0 < len(found["errors"]) <= 2
    assert all("failed: fake (FAKE, 1)" in error for error in found["errors"])
    assert found["registered"] == found["unregistered"] == 6


def test_memory_is_leaked_if_copies_cannot_be_awaited(driver: Path) -> None:
    found = run(driver, "shm", sync_fails=100, device_fails=1)
    assert found["wrong"] == 0
    assert found["failed"] > 600
    assert all("failed: fake (FAKE, 1)" in error for error in found["errors"])
    # Its unregistration during a copy would end the process.
    assert (found["registered"], found["unregistered"]) == (6, 0)
