"""Devices by name."""

from __future__ import annotations

import torch

from weft.base.arguments import shown
from weft.base.errors import ConfigurationError, ProviderError
from weft.base.nvrtc import show_nvrtc

__all__ = ["place_of"]


def place_of(device: object) -> tuple[str, torch.device]:
    """Native module name for a device, and torch device for tensors.

    Raises:
        ConfigurationError: if it does not name a device.
        ProviderError: if there is no such device here.
    """
    if isinstance(device, str) and device == "twin":
        return "twin", torch.device("cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"device {shown(device)} is not a device: {error}") from error
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
