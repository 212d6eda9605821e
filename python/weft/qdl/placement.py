"""NUMA nodes of a front end and of an accelerator node: that of the GPU, or of the NIC.

Threads run on the cores of the node, and slots are memory of the node. Other memory, such as
samples, is on the node of the thread that uses it first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from weft import _native
from weft.errors import ConfigurationError
from weft.qdl import description

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import torch

logger = logging.getLogger("weft.qdl")

__all__ = ["NumaPlacement", "Placement", "bus_id", "cores_of", "here", "place", "try_cores"]

#: A NUMA node, that of the GPU or NIC, or none.
Placement: TypeAlias = int | Literal["auto"] | None

#: Directory of the kernel's description of this machine.
SYSFS: Final = Path("/sys")


@dataclass(frozen=True)
class NumaPlacement:
    """A NUMA node, and the cores of it on which this process may run."""

    numa_node: int
    cores: frozenset[int]
    #: Device nearby, or the demand: `GPU 0000:06:00.0`, `eth0`, or `placement=1`.
    reason: str
    #: True for a number that was passed.
    is_demand: bool = False

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """The calling thread, and the threads that it starts meanwhile, run on these cores.

        Raises:
            ConfigurationError: a demand that the system refuses.
        """
        before = os.sched_getaffinity(0)
        if not try_cores(self.cores) and self.is_demand:
            raise ConfigurationError(
                f"{self.reason}: the system refuses to run threads on the cores of that NUMA node;"
                " pass 'auto' or None (option: none)"
            )
        try:
            yield
        finally:
            try_cores(before)


def try_cores(cores: Collection[int]) -> bool:
    """Let the calling thread run on these cores alone; false, and a log record, if refused."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning("threads cannot run on cores %s: %s", sorted(cores), error)
        return False
    return True


def here(placement: NumaPlacement | None) -> contextlib.AbstractContextManager[None]:
    """`NumaPlacement.here`; without a placement, threads stay where they are."""
    return contextlib.nullcontext() if placement is None else placement.here()


def place(
    placement: Placement,
    *,
    addresses: Sequence[str] = (),
    gpu: str | None = None,
    root: Path | None = None,
) -> NumaPlacement | None:
    """The placement of a node or of a front end.

    With "auto" it is the NUMA node of the GPU, or else that of the interfaces by which this machine
    has or reaches the addresses; none on a machine of one NUMA node, on loopback, and where the
    node is unknown or interfaces are on several.

    Args:
        placement: number of a NUMA node, "auto", or `None`.
        addresses: `host:port` of the listener, or of a front end's nodes. An address of all
            interfaces is one of all NICs.
        gpu: address of the GPU on the bus, as `bus_id` returns it.
        root: the kernel's description of the machine, by default `/sys`.

    Raises:
        ConfigurationError: a number that is not a NUMA node of this machine, or a node without
            a core for this process.
    """
    root = SYSFS if root is None else root
    if placement is None:
        return None
    if placement == "auto":
        if len(list((root / "devices/system/node").glob("node[0-9]*"))) < 2:
            return None
    elif isinstance(placement, bool) or not isinstance(placement, int):
        raise ConfigurationError(
            f"placement={placement!r}: expected a NUMA node, 'auto' or None (option: none)"
        )
    host = json.loads(_native.topology_host(str(root)))
    nodes = {number: cores_of(text) for number, text in host["numa_nodes"]}
    allowed = frozenset(os.sched_getaffinity(0))
    if placement != "auto":
        if placement not in nodes:
            known = ", ".join(map(str, sorted(nodes))) or "none"
            raise ConfigurationError(
                f"placement={placement}: expected a NUMA node of this machine (here: {known})"
            )
        cores = nodes[placement] & allowed
        if not cores:
            raise ConfigurationError(
                f"placement={placement}: this process may run on no core of that NUMA node;"
                " change its affinity (taskset), or pass another node"
            )
        return NumaPlacement(placement, cores, f"placement={placement}", is_demand=True)
    numa_node, reason = nearest(host["devices"], addresses, gpu)
    if numa_node is None or not (cores := nodes.get(numa_node, frozenset()) & allowed):
        return None
    return NumaPlacement(numa_node, cores, reason)


def nearest(
    devices: Sequence[dict[str, Any]], addresses: Sequence[str], gpu: str | None
) -> tuple[int | None, str]:
    """The NUMA node of the GPU or of the interfaces of addresses, and its reason."""
    if gpu is not None:
        found = {device["numa"] for device in devices if device["bus_id"] == gpu}
        return only(found), f"GPU {gpu}"
    by_name = {
        interface["name"]: device["numa"]
        for device in devices
        for interface in device["interfaces"]
    }
    names: set[str | None] = set()
    for address in addresses:
        names |= set(by_name) if is_wildcard(address) else {description.interface(address)}
    # An interface that is no device, such as loopback or a bridge, is near no node.
    return only({by_name.get(name or "") for name in names}), ", ".join(sorted(filter(None, names)))


def only(found: set[int | None]) -> int | None:
    """The only member of a set."""
    return next(iter(found)) if len(found) == 1 else None


def is_wildcard(address: str) -> bool:
    """True for an address of all interfaces."""
    return address.rpartition(":")[0].strip("[]") in {"", "0.0.0.0", "::"}


def cores_of(text: str) -> frozenset[int]:
    """Cores of a list of the kernel, such as `0-3,8`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def bus_id(device: torch.device) -> str | None:
    """Address of a CUDA device on the bus, as in /sys; `None` for the CPU."""
    if device.type != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
