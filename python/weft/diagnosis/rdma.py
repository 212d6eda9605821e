"""A host's RDMA devices, and what the kernel lets this process do with them."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    *("MIB", "Device", "device", "driver_of", "has_open_nvidia", "loaded", "locked_bytes", "read"),
]

#: The capability to lock more memory than the limit.
CAP_IPC_LOCK: Final = 14
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Device:
    """An RDMA device."""

    name: str
    #: Device file below /dev/infiniband; empty if the kernel names none.
    file: str
    #: Error when the file was opened; `None` if it can be opened.
    error: str | None = None


def device(infiniband: Path, root: Path) -> Device:
    """An RDMA device, and whether this process can open the device file."""
    name = uverbs(infiniband, root)
    if name is None:
        return Device(infiniband.name, "", "no uverbs file: the kernel module ib_uverbs is missing")
    try:
        os.close(os.open(root / "dev/infiniband" / name, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Device(infiniband.name, f"/dev/infiniband/{name}", error.strerror)
    return Device(infiniband.name, f"/dev/infiniband/{name}")


def uverbs(infiniband: Path, root: Path) -> str | None:
    """File name for an RDMA device, if the kernel has one.

    Software RDMA has no parent device, or shares the parent of its network interface.
    """
    for each in sorted((root / "sys/class/infiniband_verbs").glob("uverbs*")):
        if read(each / "ibdev") == infiniband.name:
            return each.name
    of_parent = (infiniband / "device/infiniband_verbs").glob("uverbs*")
    return min((each.name for each in of_parent), default=None)


def driver_of(infiniband: Path) -> str:
    """Driver name for an RDMA device."""
    return (infiniband / "device/driver").resolve().name


def loaded(root: Path, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Kernel modules in this list that are loaded."""
    return tuple(name for name in modules if (root / "sys/module" / name).is_dir())


def has_open_nvidia(root: Path) -> bool:
    """True if NVIDIA's kernel driver is the open one, which has dma-buf."""
    return "Open Kernel Module" in (read(root / "proc/driver/nvidia/version") or "")


def locked_bytes(root: Path) -> int | None:
    """Bytes that this process may lock; `None` if any number."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = (read(root / "proc/self/status") or "").splitlines()
    effective = next((line.split()[1] for line in status if line.startswith("CapEff:")), "0")
    may_lock_any = bool(int(effective, 16) >> CAP_IPC_LOCK & 1)
    return None if limit == resource.RLIM_INFINITY or may_lock_any else limit


def read(file: Path) -> str | None:
    """A small file's text without the space around it; `None` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
