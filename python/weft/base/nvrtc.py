"""NVRTC, CUDA's run-time compiler, in NVIDIA's Python packages."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from weft import _native

__all__ = ["nvrtc_folders", "show_nvrtc"]


def nvrtc_folders() -> list[str]:
    """Folders in NVIDIA's Python packages that may have NVRTC."""
    package = find_spec("nvidia")
    places = (package.submodule_search_locations or ()) if package else ()
    found = (folder for place in places for folder in sorted(Path(place).glob("*/lib")))
    return [str(folder) for folder in found if any(folder.glob("libnvrtc.so.*"))]


@cache
def show_nvrtc() -> None:
    """Let the native module find the NVRTC that was installed with PyTorch."""
    for folder in nvrtc_folders():
        _native.add_nvrtc_directory(folder)
