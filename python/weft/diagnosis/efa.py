"""EFA, Amazon's network adapter: what this host has, what it lacks, and the remedies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft.diagnosis import ofi
from weft.diagnosis.finding import Finding
from weft.diagnosis.libraries import plural
from weft.diagnosis.rdma import (
    MIB,
    Device,
    device,
    driver_of,
    has_open_nvidia,
    loaded,
    locked_bytes,
    read,
)

if TYPE_CHECKING:
    from weft._native import OfiReport

__all__ = ["Device", "Host", "findings", "look"]

AMAZON: Final = "0x1d0f"
EFA_PRODUCTS: Final = "0xefa"
#: Kernel modules through which a NIC reaches NVIDIA GPU memory without dma-buf.
PEER_MEMORY: Final = ("nvidia_peermem", "efa_nv_peermem", "nv_peer_mem")


@dataclass(frozen=True)
class Host:
    """A host's EFA devices, drivers and limits."""

    #: EFA interfaces on the PCI bus.
    interfaces: int
    #: Kernel module version, empty if it names none; `None` if it is not loaded.
    module: str | None
    devices: tuple[Device, ...]
    libfabric: OfiReport
    #: Bytes that may be locked; `None`: any number.
    locked_bytes: int | None
    #: True if NVIDIA's kernel driver is loaded; `open_nvidia` if it is the open one, with dma-buf.
    nvidia: bool
    open_nvidia: bool
    #: Modules in `PEER_MEMORY` that are loaded.
    peer_memory: tuple[str, ...]
    #: Reserved 2 MiB huge pages.
    huge_pages: int


def look(libfabric: OfiReport, root: Path = Path("/")) -> Host:
    """This host, or the one whose `/sys`, `/proc` and `/dev` lie below `root`."""
    modules = root / "sys/module"
    has_module = (modules / "efa").is_dir()
    infiniband = sorted((root / "sys/class/infiniband").glob("*"))
    pages = read(root / "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
    return Host(
        interfaces=sum(is_efa(each) for each in (root / "sys/bus/pci/devices").glob("*")),
        module=(read(modules / "efa/version") or "") if has_module else None,
        devices=tuple(device(each, root) for each in infiniband if driver_of(each) == "efa"),
        libfabric=libfabric,
        locked_bytes=locked_bytes(root),
        nvidia=(modules / "nvidia").is_dir(),
        open_nvidia=has_open_nvidia(root),
        peer_memory=loaded(root, PEER_MEMORY),
        huge_pages=int(pages or 0),
    )


def findings(host: Host) -> list[Finding]:
    """Findings on EFA; one finding on hosts without EFA."""
    if not host.interfaces and not host.devices:
        follows = "on EC2: attach a network interface of type efa to an instance type that has it"
        return [Finding("EFA", False, "no EFA interface on the PCI bus", follows)]
    needed = [module(host), devices(host), library(host), locked_memory(host)]
    lacking = [each.name.removeprefix("EFA ") for each in needed if not each.found]
    count = plural(max(host.interfaces, len(host.devices)), "interface")
    if lacking:
        detail = f"{count}, but lacking: {', '.join(lacking)}"
        whole = Finding("EFA", False, detail, "see the rows below, and docs/efa.md")
    else:
        whole = Finding("EFA", True, count, "used by the provider ofi: WEFT_PROVIDERS=shm,ofi")
    return [whole, *needed, gpu_memory(host), huge_pages(host)]


def module(host: Host) -> Finding:
    """The kernel module."""
    name = "EFA module"
    if host.module is None:
        follows = "`modprobe efa`; if there is none, run EFA's installer"
        return Finding(name, False, "the kernel module efa is not loaded", follows)
    return Finding(name, True, f"efa {host.module}".rstrip(), "the kernel drives the interfaces")


def devices(host: Host) -> Finding:
    """RDMA devices, and the right to open them."""
    name = "EFA devices"
    if not host.devices:
        follows = "`dmesg | grep efa` has the reason; load the kernel module first"
        return Finding(name, False, "no RDMA device with the driver efa", follows)
    closed = [each for each in host.devices if each.error is not None]
    if closed:
        first = closed[0]
        detail = f"{first.file or first.name}: {first.error}"
        if len(closed) > 1:
            detail += f", and {len(closed) - 1} more"
        follows = "chmod 0666 /dev/infiniband/uverbs*; containers: --device=/dev/infiniband"
        return Finding(name, False, detail, follows)
    detail = ", ".join(each.name for each in host.devices)
    return Finding(name, True, detail, "this process may open them")


def library(host: Host) -> Finding:
    """A libfabric with the provider efa, new enough."""
    name, found = "EFA library", host.libfabric
    remedy = "install EFA's software, or name its library: WEFT_LIBFABRIC"
    if found["version"] is None:
        return Finding(name, False, "no libfabric", remedy)
    have = f"libfabric {ofi.version(found['version'])} ({found['library']})"
    if found["version"] < ofi.EFA_NEEDS:
        detail = f"{have} is older than {ofi.version(ofi.EFA_NEEDS)}"
        return Finding(name, False, detail, remedy)
    if "efa" not in found["built_in"]:
        return Finding(name, False, f"{have} has no provider efa", remedy)
    offers = found["providers"]["efa"]["offers"]
    if not offers:
        detail = f"{have} offers no NIC by efa"
        return Finding(name, False, detail, "FI_LOG_LEVEL=warn weft doctor shows the reason")
    return Finding(name, True, f"{have}: {ofi.domains(offers)}", f"demands {ofi.demands(offers)}")


def locked_memory(host: Host) -> Finding:
    """Memory that may be locked: all regions on a rank, and libfabric's own buffers."""
    name = "EFA locked memory"
    if host.locked_bytes is None:
        return Finding(name, True, "unlimited", "any memory can be registered")
    follows = "`ulimit -l unlimited` (limits.conf: memlock); containers: --ulimit memlock=-1"
    return Finding(name, False, f"at most {host.locked_bytes / MIB:.1f} MiB", follows)


def gpu_memory(host: Host) -> Finding:
    """Finding on NIC access to GPU memory."""
    name = "EFA GPU memory"
    if not host.nvidia:
        return Finding(name, False, "no NVIDIA driver", "regions are in the CPU's memory only")
    efa = host.libfabric["providers"].get("efa")
    if efa and efa["offers"] and all(offer["reaches_devices"] for offer in efa["offers"]):
        return Finding(name, True, "FI_HMEM is offered", "NICs read and write memory of GPUs")
    if not host.open_nvidia and not host.peer_memory:
        follows = "`modprobe efa_nv_peermem`, or NVIDIA's open kernel driver, which has dma-buf"
        return Finding(name, False, "neither dma-buf nor a module for peer memory", follows)
    how = "dma-buf" if host.open_nvidia else host.peer_memory[0]
    detail = f"the kernel has {how}, but libfabric does not offer FI_HMEM"
    return Finding(name, False, detail, "use EFA's own libfabric, which is built with CUDA")


def huge_pages(host: Host) -> Finding:
    """Huge pages, in which libfabric's provider efa puts the buffers."""
    name, count = "EFA huge pages", host.huge_pages
    if not count:
        follows = "libfabric takes small pages: `sysctl -w vm.nr_hugepages=1024` reserves 2 GiB"
        return Finding(name, False, "none of 2 MiB reserved", follows)
    return Finding(name, True, f"{count:,} of 2 MiB", "libfabric's buffers lie in them")


def is_efa(device: Path) -> bool:
    """True for a PCI device that is an EFA interface."""
    product = read(device / "device") or ""
    return read(device / "vendor") == AMAZON and product.startswith(EFA_PRODUCTS)
