"""InfiniBand and RoCE NICs: libibverbs, ports, and what each lacks for the provider verbs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weft import _native
from weft.base.environment import text
from weft.base.errors import ConfigurationError
from weft.diagnosis import rdma
from weft.diagnosis.finding import Finding

if TYPE_CHECKING:
    from weft._native import VerbsPort, VerbsReport

__all__ = ["Host", "Nic", "Slot", "findings", "look", "report"]

#: Vendor id for ConnectX and BlueField, and the PCI class for network controllers.
MELLANOX: Final = "0x15b3"
NETWORK: Final = "0x02"
#: Driver whose devices have separate rows.
EFA: Final = "efa"
#: Kernel modules through which a NIC reaches NVIDIA GPU memory without dma-buf.
PEER_MEMORY: Final = ("nvidia_peermem", "nv_peer_mem")
#: Largest RoCE packet, and the interface MTU that carries it.
LARGEST_MTU: Final = 4096
JUMBO: Final = 9000
#: Variable for on-demand paging, and the default.
PAGING: Final = "WEFT_VERBS_ON_DEMAND_PAGING"
AUTO: Final = "auto"
#: Data share in the bits on a PCIe lane, up to each GT/s.
ENCODINGS: Final = ((5.0, 8 / 10), (32.0, 128 / 130), (float("inf"), 242 / 256))


@dataclass(frozen=True)
class Slot:
    """A NIC's PCIe link: lanes and GT/s. `None`: not reported."""

    width: int | None
    max_width: int | None
    speed: float | None
    max_speed: float | None
    #: True for a virtual function, which has no link.
    is_virtual: bool = False

    def gigabits(self) -> float | None:
        """Data rate in Gb/s, each way."""
        if self.width is None or self.speed is None:
            return None
        share = next(share for most, share in ENCODINGS if self.speed <= most)
        return self.width * self.speed * share


@dataclass(frozen=True)
class Nic:
    """An RDMA device."""

    device: rdma.Device
    #: `None` for a device without hardware, such as software RoCE.
    slot: Slot | None
    #: NUMA node; `None` if the kernel names none.
    numa_node: int | None


@dataclass(frozen=True)
class Host:
    """RDMA devices other than EFA's, drivers and limits on a host."""

    #: True if the kernel serves verbs to processes.
    has_uverbs: bool
    nics: tuple[Nic, ...]
    #: PCI addresses for ConnectX NICs without an RDMA device.
    unbound: tuple[str, ...]
    #: Devices with the driver efa, which this provider cannot use.
    efa: tuple[str, ...]
    verbs: VerbsReport
    #: Bytes that may be locked; `None`: any number.
    locked_bytes: int | None
    #: True if NVIDIA's kernel driver is loaded; `open_nvidia` if it is the open one, with dma-buf.
    nvidia: bool
    open_nvidia: bool
    #: Modules in `PEER_MEMORY` that are loaded.
    peer_memory: tuple[str, ...]
    #: `PAGING` value: `never`, `auto`, `always`; the provider row rejects others.
    paging: str = AUTO

    def ports(self) -> list[VerbsPort]:
        """Ports that libibverbs lists, without EFA's."""
        return [port for port in self.verbs["ports"] if port["device"] not in self.efa]

    def usable_ports(self) -> list[VerbsPort]:
        """Those ports that the provider can use."""
        return [port for port in self.ports() if port["unusable"] is None]


def report() -> VerbsReport:
    """Findings on libibverbs. Loads the library; opens each device for a moment."""
    return _native.verbs_report()


def paging() -> str:
    """`PAGING` value; the provider row reports an invalid one."""
    try:
        return text(PAGING) or AUTO
    except ConfigurationError:
        return AUTO


def look(verbs: VerbsReport, root: Path = Path("/")) -> Host:
    """This host, or the one whose `/sys`, `/proc` and `/dev` lie below `root`."""
    infiniband = sorted((root / "sys/class/infiniband").glob("*"))
    efa = [each for each in infiniband if rdma.driver_of(each) == EFA]
    pci = sorted((root / "sys/bus/pci/devices").glob("*"))
    return Host(
        has_uverbs=bool(rdma.loaded(root, ("ib_uverbs",)))
        or (root / "sys/class/infiniband_verbs").is_dir(),
        nics=tuple(nic(each, root) for each in infiniband if each not in efa),
        unbound=tuple(each.name for each in pci if is_unbound(each)),
        efa=tuple(each.name for each in efa),
        verbs=verbs,
        locked_bytes=rdma.locked_bytes(root),
        nvidia=bool(rdma.loaded(root, ("nvidia",))),
        open_nvidia=rdma.has_open_nvidia(root),
        peer_memory=rdma.loaded(root, PEER_MEMORY),
        paging=paging(),
    )


def findings(host: Host) -> list[Finding]:
    """The library; on hosts with RDMA NICs other than EFA also ports, drivers and limits."""
    if not (host.nics or host.unbound or host.ports()):
        return [library(host)]
    return [
        library(host),
        module(host),
        devices(host),
        *(port(each) for each in host.ports()),
        *(unlisted(each) for each in unlisted_nics(host)),
        *(slot(each.device.name, each.slot, each.numa_node, host) for each in host.nics),
        locked_memory(host),
        relaxed_ordering(),
        on_demand_paging(host),
        gpu_memory(host),
    ]


def library(host: Host) -> Finding:
    """The libibverbs that the provider verbs uses."""
    name, found = "libibverbs", host.verbs
    if found["library"] is None:
        reason, _, remedy = (found["error"] or "unknown").partition("; ")
        return Finding(name, False, reason, remedy or "no RDMA by verbs: tcp goes between hosts")
    if found["error"] is not None:
        follows = "no RDMA by verbs: tcp goes between hosts"
        return Finding(name, False, f"{found['library']}: {found['error']}", follows)
    if not found["ports"]:
        detail = f"{found['library']}, no RDMA device"
        return Finding(name, True, detail, "no RDMA by verbs: tcp goes between hosts")
    return Finding(name, True, found["library"], "the provider verbs uses it")


def module(host: Host) -> Finding:
    """Kernel modules: ib_uverbs, and a driver for each NIC."""
    name = "RDMA modules"
    if host.unbound:
        detail = f"no RDMA device of {', '.join(host.unbound)}"
        return Finding(
            name, False, detail, "`modprobe mlx5_ib`; these NICs carry only tcp till then"
        )
    if not host.has_uverbs:
        follows = "`modprobe ib_uverbs`; processes cannot use RDMA without it"
        return Finding(name, False, "the kernel module ib_uverbs is not loaded", follows)
    return Finding(name, True, "ib_uverbs", "the kernel serves RDMA to processes")


def devices(host: Host) -> Finding:
    """RDMA devices, and the right to open them."""
    name = "RDMA devices"
    found = [nic.device for nic in host.nics]
    if not found:
        follows = "load the NIC's driver; containers: mount the host's /sys"
        return Finding(name, False, "none in /sys/class/infiniband", follows)
    closed = [each for each in found if each.error is not None]
    if closed:
        first = closed[0]
        detail = f"{first.file or first.name}: {first.error}"
        if len(closed) > 1:
            detail += f", and {len(closed) - 1} more"
        follows = "chmod 0666 /dev/infiniband/uverbs*; containers: --device=/dev/infiniband"
        return Finding(name, False, detail, follows)
    detail = ", ".join(each.name for each in found)
    return Finding(name, True, detail, "this process may open them")


def port(found: VerbsPort) -> Finding:
    """A port that libibverbs lists."""
    name = f"RDMA {found['name']}"
    if found["unusable"] is not None:
        reason, _, remedy = found["unusable"].removeprefix(f"{found['device']}: ").partition("; ")
        detail = ", ".join([*filter(None, [found["link_layer"], rate(found)]), reason])
        return Finding(name, False, detail, remedy or "the row RDMA devices has the cause")
    address, index = found["gid"] or ("none", 0)
    parts = [
        found["link_layer"],
        rate(found),
        f"GID {address} (index {index}, {found['gid_entries']} in use)",
        f"MTU {found['mtu']}",
        f"firmware {found['firmware']}" if found["firmware"] else "",
    ]
    follows = f"messages of at most {found['max_message']:,} bytes"
    if found["mtu"] < LARGEST_MTU:
        follows += f"; MTU {LARGEST_MTU} costs less per byte"
        if found["link_layer"] == "Ethernet":
            follows += f": `ip link set NAME mtu {JUMBO}` on all hosts and switches"
    return Finding(name, True, ", ".join(filter(None, parts)), follows)


def rate(found: VerbsPort) -> str:
    """Data rate on a port's link; empty if it is not known."""
    return "" if found["gigabits"] is None else f"{found['gigabits']:g} Gb/s"


def unlisted_nics(host: Host) -> list[Nic]:
    """Kernel NICs that libibverbs does not list; none without the library."""
    if host.verbs["library"] is None:
        return []
    listed = {port["device"] for port in host.verbs["ports"]}
    return [nic for nic in host.nics if nic.device.name not in listed]


def unlisted(nic: Nic) -> Finding:
    """A kernel NIC that libibverbs does not list."""
    if nic.device.error is None:
        follows = "install its driver for libibverbs (Debian: ibverbs-providers)"
    else:
        follows = "the row RDMA devices has the cause"
    return Finding(f"RDMA {nic.device.name}", False, "libibverbs does not list it", follows)


def slot(device: str, found: Slot | None, numa_node: int | None, host: Host) -> Finding:
    """A NIC's PCIe link, compared with the slot and port maximum, and the NUMA node."""
    name = f"RDMA {device} PCIe"
    if found is None:
        return Finding(name, False, "not a PCI device", "RDMA in software, for tests")
    node = f"NUMA node {numa_node}" if numa_node is not None else "NUMA node unknown"
    near = f"; ranks on NUMA node {numa_node} are nearest" if numa_node is not None else ""
    gigabits = found.gigabits()
    if found.width is None or found.speed is None or gigabits is None:
        kind = "virtual function: " if found.is_virtual else ""
        detail = f"{kind}width and speed unknown, {node}"
        return Finding(name, False, detail, f"its bandwidth is that of the physical slot{near}")
    width, speed = f"x{found.width}", f"{found.speed:g}"
    is_narrow = found.max_width is not None and found.width < found.max_width
    is_slow = found.max_speed is not None and found.speed < found.max_speed
    width += f" of x{found.max_width}" if is_narrow else ""
    speed += f" of {found.max_speed:g}" if is_slow else ""
    detail = f"{width}, {speed} GT/s, {node}"
    follows = f"at most {gigabits:.0f} Gb/s each way"
    rates = [each["gigabits"] or 0 for each in host.ports() if each["device"] == device]
    fastest = max(rates, default=0)
    if gigabits < fastest:
        follows += f", less than the {fastest:g} Gb/s of a port"
    if is_narrow or is_slow or gigabits < fastest:
        return Finding(name, False, detail, f"{follows}: use a slot with more lanes or speed{near}")
    return Finding(name, True, detail, follows + near)


def locked_memory(host: Host) -> Finding:
    """Memory that may be locked: all regions on a rank."""
    name = "RDMA locked memory"
    if host.locked_bytes is None:
        return Finding(name, True, "unlimited", "any memory can be registered")
    detail = f"at most {host.locked_bytes / rdma.MIB:.1f} MiB"
    if not host.usable_ports():
        beyond = "fail, unless the NIC pages them on demand"
    elif host.paging == "never" or unpaged(host):
        beyond = "fail"
    elif host.paging == "always":
        return Finding(name, True, detail, f"regions are paged on demand ({PAGING}=always)")
    else:
        beyond = "are paged on demand"
    follows = (
        f"larger regions {beyond}: `ulimit -l unlimited` (limits.conf: memlock); containers:"
        " --ulimit memlock=-1"
    )
    return Finding(name, False, detail, follows)


def relaxed_ordering() -> Finding:
    """Finding on writes into host memory that may be reordered on PCIe."""
    follows = (
        "requested for destinations; some hosts write slower without: `lspci -vv` shows RlxdOrd+"
    )
    return Finding("RDMA relaxed ordering", False, "unknown: set by firmware and BIOS", follows)


def unpaged(host: Host) -> list[str]:
    """Devices in use whose NIC or driver does not page regions on demand, each once."""
    lacking = [each["device"] for each in host.usable_ports() if not each["on_demand_paging"]]
    return list(dict.fromkeys(lacking))


def on_demand_paging(host: Host) -> Finding:
    """Finding on registration without locked memory."""
    name = "RDMA on-demand paging"
    if not host.usable_ports():
        follows = "the rows of libibverbs, devices and ports have the remedy"
        return Finding(name, False, "unknown: no port can be used", follows)
    locked = "memory of regions is locked, as the limit above allows"
    if lacking := unpaged(host):
        follows = f"{PAGING}=always refuses them: set auto" if host.paging == "always" else locked
        return Finding(name, False, f"none: {', '.join(lacking)}", follows)
    if host.paging == "never":
        return Finding(name, False, f"off: {PAGING}=never", locked)
    which = "all regions" if host.paging == "always" else "regions that cannot be locked"
    follows = (
        f"used for {which} in host memory ({PAGING}={host.paging}); a page that is not in memory"
        " delays its write; tested with simulated NICs only: check results"
    )
    return Finding(name, True, "RDMA writes", follows)


def gpu_memory(host: Host) -> Finding:
    """Finding on NIC access to GPU memory."""
    name = "RDMA GPU memory"
    if not host.nvidia:
        return Finding(name, False, "no NVIDIA driver", "regions are in the CPU's memory only")
    by_dma_buf = host.open_nvidia and host.verbs["dma_buf"]
    if by_dma_buf or host.peer_memory:
        how = "dma-buf" if by_dma_buf else host.peer_memory[0]
        follows = "NICs register memory of GPUs; tested with simulated NICs only: check results"
        return Finding(name, True, how, follows)
    if host.verbs["library"] is None:
        return Finding(name, False, "no libibverbs", "the row libibverbs has the remedy")
    follows = "`modprobe nvidia_peermem`; data of GPUs goes through host memory till then"
    if host.open_nvidia:
        detail = "the kernel has dma-buf, libibverbs has no ibv_reg_dmabuf_mr"
        return Finding(name, False, detail, f"install rdma-core 34 or newer, or {follows}")
    detail = "the kernel has neither dma-buf nor nvidia_peermem"
    return Finding(name, False, detail, f"load NVIDIA's open kernel driver, or {follows}")


def nic(infiniband: Path, root: Path) -> Nic:
    """An RDMA device with slot and NUMA node."""
    pci = infiniband / "device"
    node = number(pci / "numa_node")
    return Nic(
        device=rdma.device(infiniband, root),
        slot=slot_of(pci) if (pci / "vendor").exists() else None,
        numa_node=int(node) if node is not None and node >= 0 else None,
    )


def slot_of(pci: Path) -> Slot:
    """A PCI device's PCIe link."""

    def lanes(name: str) -> int | None:
        count = number(pci / name)
        # 0 and 255 stand for unknown.
        return int(count) if count is not None and 0 < count <= 32 else None

    return Slot(
        width=lanes("current_link_width"),
        max_width=lanes("max_link_width"),
        speed=number(pci / "current_link_speed"),
        max_speed=number(pci / "max_link_speed"),
        is_virtual=(pci / "physfn").exists(),
    )


def is_unbound(pci: Path) -> bool:
    """True for a ConnectX NIC without an RDMA device."""
    is_nic = (rdma.read(pci / "class") or "").startswith(NETWORK)
    return rdma.read(pci / "vendor") == MELLANOX and is_nic and not (pci / "infiniband").is_dir()


def number(file: Path) -> float | None:
    """Number at the start in a small file; `None` without one ("Unknown")."""
    first, *_ = (rdma.read(file) or "").split() or [""]
    try:
        return float(first)
    except ValueError:
        return None
