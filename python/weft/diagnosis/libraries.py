"""Libraries that Weft loads at run time when they are present, and works without."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.diagnosis.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_USED_YET: Final = "present, but this version does not use it yet"


def libibverbs() -> Finding:
    """RDMA devices."""
    name = "libibverbs"
    library = load("libibverbs.so.1")
    if library is None:
        return Finding(name, False, "not installed", "no RDMA by verbs: tcp goes between hosts")
    count = ctypes.c_int(0)
    library.ibv_get_device_list.restype = ctypes.c_void_p
    devices = library.ibv_get_device_list(ctypes.byref(count))
    if devices:
        library.ibv_free_device_list(ctypes.c_void_p(devices))
    if not count.value:
        return Finding(name, True, "no device", "no RDMA by verbs: tcp goes between hosts")
    return Finding(name, True, plural(count.value, "device"), NOT_USED_YET)


def libfabric() -> Finding:
    """EFA and other fabrics."""
    library = load("libfabric.so.1")
    if library is None:
        return Finding("libfabric", False, "not installed", "no EFA: tcp goes between hosts")
    library.fi_version.restype = ctypes.c_uint32
    version = library.fi_version()
    detail = f"{version >> 16}.{version & 0xFFFF}"
    return Finding("libfabric", True, detail, NOT_USED_YET)


def cuda() -> Finding:
    """The CUDA driver and its devices."""
    library = load("libcuda.so.1")
    if library is None:
        return Finding(
            "CUDA driver", False, "not installed", "regions are in the CPU's memory only"
        )
    if error := library.cuInit(0):
        return Finding(
            "CUDA driver", False, f"cuInit: error {error}", "regions are in the CPU's memory only"
        )
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    detail = f"{cuda_version(version.value)}, {plural(count.value, 'device')}"
    return Finding("CUDA driver", True, detail, NOT_USED_YET)


def nvml() -> Finding:
    """NVIDIA's management library, which tells how GPUs are connected."""
    library = load("libnvidia-ml.so.1")
    if library is None:
        return Finding("NVML", False, "not installed", "NVLink cannot be seen")
    if error := library.nvmlInit_v2():
        return Finding("NVML", False, f"nvmlInit: error {error}", "NVLink cannot be seen")
    version = ctypes.create_string_buffer(96)
    library.nvmlSystemGetDriverVersion(version, len(version))
    library.nvmlShutdown()
    return Finding("NVML", True, f"driver {version.value.decode()}", "`weft topo` shows NVLinks")


def nvrtc() -> Finding:
    """The compiler for CUDA kernels at run time."""
    library = load(*nvrtc_names())
    if library is None:
        return Finding("NVRTC", False, "not installed", "CUDA kernels cannot be compiled here")
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    detail = f"{major.value}.{minor.value}"
    return Finding("NVRTC", True, detail, NOT_USED_YET)


def gdrcopy() -> Finding:
    """Access from the CPU to GPU memory."""
    follows = "the CPU reaches GPU memory by the driver's slower copies"
    if load("libgdrapi.so.2") is None:
        return Finding("gdrcopy", False, "not installed", follows)
    if not Path("/dev/gdrdrv").exists():
        return Finding("gdrcopy", False, "its kernel module is not loaded", follows)
    return Finding("gdrcopy", True, "/dev/gdrdrv", NOT_USED_YET)


LOOKS: Final = (libibverbs, libfabric, cuda, nvml, nvrtc, gdrcopy)


def load(*names: str) -> ctypes.CDLL | None:
    """The first of these libraries that is installed."""
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def nvrtc_names() -> Iterator[str]:
    """Where NVRTC may be: on the library path, or in NVIDIA's Python packages."""
    sonames = ("libnvrtc.so.13", "libnvrtc.so.12")
    yield from sonames
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for soname in sonames:
            yield from map(str, sorted(Path(folder).glob(f"*/lib/{soname}")))


def cuda_version(number: int) -> str:
    """CUDA's way to write 12.4 is 12040."""
    return f"{number // 1000}.{number % 1000 // 10}"


def plural(count: int, noun: str) -> str:
    """A count of things."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
