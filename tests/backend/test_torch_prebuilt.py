"""The backend's C++ library in a wheel: where it is looked for, and when it is compiled again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

CODE = """
import pathlib, sys
from weft.torch import build
build.PREBUILT = pathlib.Path(sys.argv[1])
print(build.load().__file__)
"""


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A library where a wheel has it."""
    import torch

    from weft.torch import build

    path = tmp_path / "prebuilt" / build.prebuilt(torch.__version__).name
    path.parent.mkdir()
    shutil.copy(build.built(), path)
    return path


def load(directory: Path) -> subprocess.CompletedProcess[str]:
    """Load in a process without a compiler and with an empty cache."""
    return subprocess.run(
        [sys.executable, "-c", CODE, str(directory)],
        env={"CXX": "no-such-compiler", "WEFT_CACHE_DIR": str(directory.parent / "empty")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_wheel_with_the_library_needs_no_compiler(ready: Path) -> None:
    process = load(ready.parent)
    assert process.stdout == f"{ready}\n", process.stderr
    assert not (ready.parent.parent / "empty").exists()


def test_a_library_that_cannot_be_loaded_is_compiled_again(ready: Path) -> None:
    ready.write_bytes(b"of another machine")
    process = load(ready.parent)
    assert f"{ready} cannot be loaded, so it is compiled here" in process.stderr
    assert "backend weft: no C++ compiler (CXX=no-such-compiler)" in process.stderr


def test_a_library_of_another_torch_is_not_loaded(ready: Path) -> None:
    other = ready.with_name(ready.name.replace("2.11.", "2.11.9"))
    assert other != ready
    ready.rename(other)
    process = load(ready.parent)
    assert "cannot be loaded" not in process.stderr
    assert "no C++ compiler" in process.stderr


def test_the_name_depends_on_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.torch import build

    before = build.prebuilt("2.11.0")
    sources = tmp_path / "shim"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.prebuilt("2.11.0") == before
    with (sources / "module.cpp").open("a") as file:
        file.write("\n")
    assert build.prebuilt("2.11.0") != before
