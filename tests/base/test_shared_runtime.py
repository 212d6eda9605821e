"""Libraries that are compiled where they are used share their process's C++ runtime."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from weft.base import compile as _compile

if TYPE_CHECKING:
    from pathlib import Path


def compiler(directory: Path, answer: str) -> str:
    """A compiler that prints a path."""
    path = directory / "c++"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_without_the_link_of_the_runtime_is_given_its_library(tmp_path: Path) -> None:
    assert _compile.shared_runtime(compiler(tmp_path, "libstdc++.so")) == ["-l:libstdc++.so.6"]
    there = compiler(tmp_path, "/usr/lib/gcc/x86_64-linux-gnu/13/libstdc++.so")
    assert _compile.shared_runtime(there) == []


def test_a_library_linked_by_that_option_needs_the_shared_runtime(tmp_path: Path) -> None:
    found = _compile.find_compiler("test", "weft.torch")
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf (binutils)")
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text("#include <iostream>\nvoid show(long n) { std::cout << n; }\n")
    # As if there were only the static library: the linker takes the named one before it.
    static = _compile.shared_runtime(compiler(tmp_path, "libstdc++.so"))
    command = [found, "-shared", "-fPIC", str(source), "-o", str(library), *static]
    command.append("-static-libstdc++")
    subprocess.run(command, check=True)
    shown = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    assert "Shared library: [libstdc++.so.6]" in shown.stdout
    symbols = subprocess.run(
        ["readelf", "-W", "--dyn-syms", library], capture_output=True, text=True, check=True
    )
    # `std::ostream::operator<<(long)`.
    inserts = [line for line in symbols.stdout.splitlines() if "_ZNSolsEl" in line]
    assert inserts
    assert all(" UND " in line for line in inserts), inserts
