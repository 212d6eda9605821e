"""`AllToAll` by token location: CPU memory, or a device."""

from __future__ import annotations

from weft.base.arguments import shown
from weft.base.errors import ConfigurationError
from weft.moe.base import AllToAll, DeviceOptions

__all__ = ["AllToAll", "DeviceOptions"]


def on_device(device: object) -> type[AllToAll]:
    """The all-to-all class for a device, which needs torch.

    Raises:
        ConfigurationError: if there is no torch.
    """
    try:
        from weft.moe.device.all_to_all import AllToAll as OnDevice
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError(
            f"device {shown(device)} needs PyTorch: pip install 'weft[torch]'"
        ) from error
    return OnDevice


AllToAll._on_device = staticmethod(on_device)
