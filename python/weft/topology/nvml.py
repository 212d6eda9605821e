"""GPUs and NVLinks, as NVML reports them."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from weft.diagnosis.libraries import load

__all__ = ["nvml_gpus"]

#: `NVML_NVLINK_MAX_LINKS` in the newest supported NVML.
MOST_LINKS: Final = 18
SUCCESS: Final = 0
ENABLED: Final = 1


class PciInfo(ctypes.Structure):
    """`nvmlPciInfo_t`, version 3."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


def nvml_gpus(library: Any = None) -> list[dict[str, Any]] | None:
    """GPUs with PCI addresses, names, NVLinks and whether they are cut up; None without NVML.

    What an NVML call refuses is left out: `nvlinks` has the far end's PCI address for each link
    that is up. `library` is NVML, by default the installed one.
    """
    library = library or load("libnvidia-ml.so.1")
    if library is None or library.nvmlInit_v2() != SUCCESS:
        return None
    try:
        count = ctypes.c_uint(0)
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != SUCCESS:
            return None
        found = (look_at(library, index) for index in range(count.value))
        return [gpu for gpu in found if gpu is not None]
    finally:
        library.nvmlShutdown()


def look_at(library: Any, index: int) -> dict[str, Any] | None:
    """One GPU, or None if NVML does not give it to us."""
    device = ctypes.c_void_p()
    info = PciInfo()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != SUCCESS:
        return None
    if library.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(info)) != SUCCESS:
        return None
    gpu: dict[str, Any] = {"bus_id": text(info.bus_id), "index": index, "nvlinks": []}
    name = ctypes.create_string_buffer(96)
    if library.nvmlDeviceGetName(device, name, len(name)) == SUCCESS:
        gpu["name"] = text(name.value)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    numbers = (ctypes.byref(major), ctypes.byref(minor))
    if library.nvmlDeviceGetCudaComputeCapability(device, *numbers) == SUCCESS:
        gpu["sm"] = 10 * major.value + minor.value
    now, pending = ctypes.c_uint(0), ctypes.c_uint(0)
    modes = (ctypes.byref(now), ctypes.byref(pending))
    if library.nvmlDeviceGetMigMode(device, *modes) == SUCCESS:
        gpu["mig"] = now.value == ENABLED
    for link in range(MOST_LINKS):
        state = ctypes.c_uint(0)
        if library.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(state)) != SUCCESS:
            break
        remote = PciInfo()
        answer = library.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, ctypes.byref(remote))
        if state.value == ENABLED and answer == SUCCESS:
            gpu["nvlinks"].append(text(remote.bus_id))
    return gpu


def text(value: bytes) -> str:
    """An NVML string."""
    return value.decode(errors="replace")
