"""Devices by name, and the compiler of their kernels."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from weft import _native
from weft.errors import ConfigurationError, ProviderError

__all__ = ["place_of", "show_nvrtc"]


def place_of(device: object) -> tuple[str, torch.device]:
    """The native module's name of a device, and the device of its tensors.

    Raises:
        ConfigurationError: if it is no device for this.
        ProviderError: if there is no such device here.
    """
    if device == "twin":
        return "twin", torch.device("cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"{device!r} is not a device: {error}") from error
    if place.type != "cuda":
        raise ConfigurationError(f"device {device}: expected 'cuda', 'cuda:1' or 'twin'")
    if not torch.cuda.is_available():
        raise ProviderError(
            "torch finds no GPU here (see `weft doctor`); device='twin' runs the same protocol "
            "on the CPU"
        )
    number = torch.cuda.current_device() if place.index is None else place.index
    if number >= torch.cuda.device_count():
        raise ProviderError(f"there is no {device}: torch finds {torch.cuda.device_count()} GPUs")
    show_nvrtc()
    return f"cuda:{number}", torch.device("cuda", number)


@cache
def show_nvrtc() -> None:
    """Let the native module find the NVRTC that was installed with PyTorch."""
    wheels = find_spec("nvidia")
    for root in (wheels and wheels.submodule_search_locations) or ():
        for directory in sorted(Path(root).glob("*/lib")):
            _native.add_nvrtc_directory(str(directory))
