"""Device names as arguments."""

from __future__ import annotations

import sys

from weft.base.arguments import shown
from weft.base.errors import ConfigurationError

__all__ = ["device_number", "device_text"]


def device_text(device: object) -> str:
    """Text for a device given by name or as a torch.device; other objects give no device name."""
    return device if isinstance(device, str) else str(device) if hasattr(device, "type") else ""


def device_number(device: object) -> tuple[str, int]:
    """Kind and ordinal for a device given as "cuda", "cuda:1" or a torch.device."""
    kind, _, number = device_text(device).partition(":")
    # An ordinal has ten digits at most.
    is_number = number.isdecimal() and len(number) <= 10
    if kind not in ("cuda", "twin") or not (is_number or not number):
        raise ConfigurationError(f'device {shown(device)}: expected "cuda" or "cuda:1"')
    if number:
        return kind, int(number)
    torch = sys.modules.get("torch")
    if kind == "cuda" and torch is not None and torch.cuda.is_available():
        return kind, torch.cuda.current_device()
    return kind, 0
