"""CUDA: driver, devices and how they reach each other, compiler, GDRCopy."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING, Final

from weft import _native
from weft.base.nvrtc import nvrtc_folders
from weft.diagnosis.finding import Finding
from weft.diagnosis.libraries import plural

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from weft._native import CudaDevice, CudaReport

    Pair: TypeAlias = tuple[CudaDevice, CudaDevice]

__all__ = ["findings", "report"]

#: Compute capability that the kernels are compiled for.
KERNELS_NEED: Final = (9, 0)


def report() -> CudaReport:
    """Findings on CUDA. Initialises CUDA without a context."""
    return _native.cuda_report(nvrtc_folders())


def findings(found: CudaReport) -> list[Finding]:
    """Findings in a report; device findings only if there are devices."""
    devices = found["devices"]
    looks = (whole, together, shareable) if devices else ()
    each = [driver(found), *(look(devices) for look in looks), nvml(found), nvrtc(found)]
    return [*each, gdrcopy(found)]


def driver(found: CudaReport) -> Finding:
    """The driver and its devices."""
    name, devices = "CUDA driver", found["devices"]
    error = found["errors"].get("driver") or found["errors"].get("devices")
    if found["driver"] is None or error:
        return Finding(name, False, error or "unknown", "regions are in the CPU's memory only")
    detail = f"{version(found['driver'])}, {models(devices)}"
    if unfit := [gpu for gpu in devices if gpu["compute_capability"] != KERNELS_NEED]:
        follows = f"no kernels for {numbers(unfit)}: they are for compute capability "
        return Finding(name, True, detail, follows + version(KERNELS_NEED))
    if not devices:
        return Finding(name, True, detail, "regions are in the CPU's memory only")
    return Finding(name, True, detail, "kernels can exchange tokens in the GPUs' memory")


def whole(devices: list[CudaDevice]) -> Finding:
    """Finding on MIG: devices that are whole GPUs, or slices."""
    name = "whole GPUs"
    if cut := [gpu for gpu in devices if gpu["mig_slice"] or gpu["mig_mode"]]:
        follows = (
            "slices reach no other device, so there is no symmetric heap over NVLink, and Weft"
            " refuses them: `nvidia-smi -mig 0` makes them whole"
        )
        return Finding(name, False, f"MIG is on: {numbers(cut)}", follows)
    if any(gpu["mig_mode"] is None for gpu in devices):
        return Finding(name, True, "no slices (MIG)", "they can reach each other's memory")
    return Finding(name, True, "MIG is off", "they can reach each other's memory")


def together(devices: list[CudaDevice]) -> Finding:
    """Finding on peer access between devices, and on NVLink."""
    name = "NVLink"
    pairs = list(combinations(devices, 2))
    if not pairs:
        return Finding(name, False, "one device", "no exchange between GPUs on this machine")
    reached = [pair for pair in pairs if mutual(pair, lambda gpu: gpu["reaches"])]
    joined = [pair for pair in pairs if mutual(pair, lambda gpu: gpu["nvlink"] or [])]
    if any(gpu["nvlink"] is None for gpu in devices):
        detail = f"unknown without NVML; {share(reached, pairs)} by some way"
        return Finding(name, False, detail, "bandwidth between GPUs unknown")
    if not joined:
        detail = f"none; {share(reached, pairs)} by PCI Express" if reached else "none"
        follows = "GPUs exchange tokens slowly" if reached else "no heap spans these GPUs"
        return Finding(name, False, detail, follows)
    follows = "kernels store straight into the memory of peers"
    if len(reached) < len(pairs):
        follows += "; a group must keep to GPUs that reach each other"
    elif len(joined) < len(pairs):
        follows += ", slowly where PCI Express joins them"
    return Finding(name, True, share(joined, pairs), follows)


def shareable(devices: list[CudaDevice]) -> Finding:
    """Finding on device memory sharing by file descriptor."""
    name = "shared GPU memory"
    if unable := [gpu for gpu in devices if not gpu["file_descriptors"]]:
        follows = 'IPC handles share it: memory="ipc"'
        return Finding(name, False, f"no file descriptors: {numbers(unable)}", follows)
    return Finding(name, True, "by file descriptor", "ranks of a host map each other's GPU memory")


def nvml(found: CudaReport) -> Finding:
    """Finding on NVML, NVIDIA's management library, which reports the links between GPUs."""
    if found["nvml"] is None:
        return Finding("NVML", False, found["errors"]["nvml"], "NVLink cannot be seen")
    return Finding("NVML", True, f"driver {found['nvml']}", "`weft topo` shows NVLinks")


def nvrtc(found: CudaReport) -> Finding:
    """The compiler for CUDA kernels at run time."""
    if found["nvrtc"] is None:
        follows = "CUDA kernels cannot be compiled here"
        return Finding("NVRTC", False, found["errors"]["nvrtc"], follows)
    (major, minor), _ = found["nvrtc"]
    offered = found["driver"]
    if offered is not None and offered[0] < major:
        follows = f"the driver is for CUDA {version(offered)}: it may not load what this compiles"
    else:
        follows = "CUDA kernels are compiled here"
    return Finding("NVRTC", True, f"{major}.{minor}", follows)


def gdrcopy(found: CudaReport) -> Finding:
    """GDRCopy, which maps GPU memory for the CPU: the home of a proxy's words by default."""
    name, option = "gdrcopy", 'weft.triton.Proxy(words_home="auto")'
    if not found["gdrcopy"]:
        follows = f"{option} has its words in pinned host memory, which waits poll over PCIe"
        return Finding(name, False, found["errors"]["gdrcopy"], follows)
    follows = f"{option} has its words in GPU memory that can be mapped, else in pinned memory"
    return Finding(name, True, "/dev/gdrdrv", follows)


def mutual(pair: Pair, reached: Callable[[CudaDevice], list[int]]) -> bool:
    """True if two devices reach each other."""
    one, other = pair
    return other["ordinal"] in reached(one) and one["ordinal"] in reached(other)


def share(some: list[Pair], pairs: list[Pair]) -> str:
    """Number of pairs among all, in words."""
    every = len(some) == len(pairs)
    return "every pair" if every else f"{len(some)} of {plural(len(pairs), 'pair')}"


def models(devices: list[CudaDevice]) -> str:
    """Number of devices by product, in words."""
    counts = Counter(gpu["name"] for gpu in devices)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no device"


def numbers(devices: list[CudaDevice]) -> str:
    """Devices by number."""
    return ", ".join(f"cuda:{gpu['ordinal']}" for gpu in devices)


def version(parts: tuple[int, int]) -> str:
    """A CUDA version."""
    return f"{parts[0]}.{parts[1]}"
