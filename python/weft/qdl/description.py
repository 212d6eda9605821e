"""Keys in the system description that MLPerf's checker demands for the Network division."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import json
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import weft
from weft.base.addresses import inet6_addresses

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FILE", "KEYS", "addresses_of", "link_rate", "network_keys", "write"]

FILE: Final = "system_desc_network.json"
#: `SYSTEM_DESC_REQUIRED_FIELDS_NETWORK_MODE` in the checker.
KEYS: Final = (
    "is_network",
    "network_type",
    "network_media",
    "network_rate",
    "nic_loadgen",
    "number_nic_loadgen",
    "net_software_stack_loadgen",
    "network_protocol",
    "number_connections",
    "nic_sut",
    "number_nic_sut",
    "net_software_stack_sut",
    "network_topology",
)
#: Linux request for all interfaces' addresses, and the bytes per answer.
SIOCGIFCONF: Final = 0x8912
IFREQ: Final = 40


class Tested(Protocol):
    """The `weft.qdl.Test` members that the description needs."""

    @property
    def nodes(self) -> Sequence[str]: ...

    @property
    def provider(self) -> str | None: ...

    @property
    def log_directory(self) -> Path: ...


class Measured(Protocol):
    """The `weft.qdl.Outcome` members that the description needs."""

    @property
    def link_bytes_per_second(self) -> float | None: ...


def write(test: Tested, outcome: Measured) -> None:
    """Write the keys for a test into the logs."""
    text = json.dumps(network_keys(test, outcome), indent=2) + "\n"
    (test.log_directory / FILE).write_text(text, encoding="utf-8")


def network_keys(test: Tested, outcome: Measured) -> dict[str, Any]:
    """All keys; those that a person has to fill in are empty."""
    addresses = [address for node in test.nodes for address in addresses_of(node)]
    names = {interface(address) for address in addresses} - {None}
    rate = outcome.link_bytes_per_second
    # Between hosts pairs are over tcp unless another provider is named.
    provider = test.provider or ("tcp" if names != {"lo"} else None)
    stack = f"Weft {weft.__version__}"
    known = {
        "is_network": True,
        "network_rate": "" if rate is None else f"{rate * 8 / 1e9:g} Gb/s",
        "nic_loadgen": ", ".join(sorted(filter(None, names))),
        "number_nic_loadgen": len(names),
        "net_software_stack_loadgen": stack,
        "net_software_stack_sut": stack,
        # Libfabric's protocol depends on the libfabric provider.
        "network_protocol": {"tcp": "TCP", "verbs": "RDMA"}.get(provider or "", ""),
        # A tcp pair has one connection for control and one for payloads.
        "number_connections": len(addresses) * (2 if provider == "tcp" else 1),
    }
    return {key: known.get(key, "") for key in KEYS}


def addresses_of(node: str) -> list[str]:
    """A node's addresses; a node with several has commas between them."""
    return [address.strip() for address in node.split(",")]


def link_rate(node: str) -> float | None:
    """Bytes per second for the interfaces that reach a node; None on loopback, or if unknown."""
    rates = [interface_rate(name) for name in {interface(each) for each in addresses_of(node)}]
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None


def interface_rate(name: str | None) -> float | None:
    """Bytes per second for an interface; None for loopback, or if unknown."""
    if name is None or name == "lo":
        return None
    with contextlib.suppress(OSError, ValueError):
        megabits = int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="ascii"))
        if megabits > 0:
            return megabits * 1e6 / 8
    return None


def interface(address: str) -> str | None:
    """Name of the interface that reaches an address, by source address or system choice."""
    listener, at, source = address.rpartition("@")
    host, _, port = (listener if at else address).rpartition(":")
    own: ipaddress.IPv4Address | ipaddress.IPv6Address
    try:
        if at:
            own = ipaddress.ip_address(source.strip("[]"))
        else:
            to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(to[0], socket.SOCK_DGRAM) as probe:
                # A datagram socket connects without a packet.
                probe.connect(to[4])
                own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except (OSError, ValueError):
        return None
    return "lo" if own.is_loopback else interfaces().get(str(own))


def interfaces() -> dict[str, str]:
    """Interface name by address on this host."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        requests = array.array("B", bytes(IFREQ * 1024))
        place, length = requests.buffer_info()
        # struct ifconf: array bytes, array address.
        answer = fcntl.ioctl(probe, SIOCGIFCONF, struct.pack("iL", length, place))
        for begin in range(0, struct.unpack("iL", answer)[0], IFREQ):
            request = requests[begin : begin + IFREQ].tobytes()
            name = request[:16].partition(b"\0")[0].decode()
            # An alias, such as eth0:1, belongs to the interface.
            found[socket.inet_ntoa(request[20:24])] = name.partition(":")[0]
    return found | {address: name for address, _, name in inet6_addresses()}
