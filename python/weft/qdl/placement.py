"""NUMA nodes for front ends and accelerator nodes: near the GPU, or near the NIC.

Threads run on the node's cores, and slots are in its memory. Other memory, such as samples, is on
the node whose thread uses it first.
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
from weft.base.arguments import shown
from weft.base.errors import ConfigurationError
from weft.qdl import description

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import torch

logger = logging.getLogger("weft.qdl")

__all__ = ["NumaPlacement", "Placement", "bus_id", "cores_of", "here", "place", "try_cores"]

#: A NUMA node, the node near the GPU or NIC, or none.
Placement: TypeAlias = int | Literal["auto"] | None

#: Directory where the kernel describes this machine.
SYSFS: Final = Path("/sys")


@dataclass(frozen=True)
class NumaPlacement:
    """A NUMA node, and its cores on which this process may run."""

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
    """Let the calling thread run only on these cores; false, and a log record, if refused."""
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
    """Placement for a node or a front end.

    With "auto" it is the GPU's NUMA node, or else the node near the interfaces by which this
    machine has or reaches the addresses; none on a machine with one NUMA node, on loopback, and
    where the node is unknown or interfaces are on several.

    Args:
        placement: NUMA node number, "auto", or `None`.
        addresses: `host:port` for the listener, or for a front end's nodes. A wildcard address
        means all NICs.
        gpu: GPU address on the bus, as `bus_id` returns it.
        root: directory where the kernel describes the machine, by default `/sys`.

    Raises:
        ConfigurationError: a number that is not a NUMA node on this machine, or a node without
            a core for this process.
    """
    root = SYSFS if root is None else root
    if placement is None:
        return None
    if isinstance(placement, str) and placement == "auto":
        if len(list((root / "devices/system/node").glob("node[0-9]*"))) < 2:
            return None
    elif isinstance(placement, bool) or not isinstance(placement, int):
        raise ConfigurationError(
            f"placement={shown(placement)}: expected a NUMA node, 'auto' or None (option: none)"
        )
    host = json.loads(_native.topology_host(str(root)))
    nodes = {number: cores_of(text) for number, text in host["numa_nodes"]}
    allowed = frozenset(os.sched_getaffinity(0))
    if placement != "auto":
        if placement not in nodes:
            known = ", ".join(map(str, sorted(nodes))) or "none"
            raise ConfigurationError(
                f"placement={shown(placement)}: expected a NUMA node of this machine "
                f"(here: {known})"
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
    """NUMA node near the GPU or the addresses' interfaces, and the reason."""
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
    """The only member in a set."""
    return next(iter(found)) if len(found) == 1 else None


def is_wildcard(address: str) -> bool:
    """True for a wildcard address, such as `0.0.0.0`."""
    return address.rpartition(":")[0].strip("[]") in {"", "0.0.0.0", "::"}


def cores_of(text: str) -> frozenset[int]:
    """Cores in a kernel list, such as `0-3,8`."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def bus_id(device: torch.device) -> str | None:
    """CUDA device address on the bus, as in /sys; `None` for the CPU."""
    if device.type != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
