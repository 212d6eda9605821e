"""Host addresses from which a front end connects to a node address `host:port@auto`.

A source is an address whose packets to the node leave by the interface that has it, one per
interface. A front end whose threads are on a NUMA node uses only the sources on near NICs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from weft import _native
from weft.base.addresses import inet6_addresses
from weft.qdl import description, placement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["AUTO", "Source", "expanded", "near", "reaching", "route"]

logger = logging.getLogger("weft.qdl")

#: Address suffix: from all addresses on this host that reach it, only near ones if there are any.
AUTO: Final = "@auto"

# Linux route messages (linux/rtnetlink.h): the request, the answer, the attributes in both, and the
# type for a route to an address on this host.
RTM_NEWROUTE: Final = 24
RTM_GETROUTE: Final = 26
NLM_F_REQUEST: Final = 1
RTA_DST: Final = 1
RTA_SRC: Final = 2
RTA_OIF: Final = 4
RTN_LOCAL: Final = 2
HEADER: Final = struct.Struct("=IHHII")
#: Family, destination and source prefixes, service, table, protocol, scope, type, flags.
ROUTE: Final = struct.Struct("=8BI")
ATTRIBUTE: Final = struct.Struct("=HH")
#: IPv6 address states (linux/if_addr.h) that end or do not begin: temporary, duplicate, deprecated,
#: tentative.
UNSTABLE: Final = 0x01 | 0x08 | 0x20 | 0x40


class Source(NamedTuple):
    """Address on this host, interface, and the NIC's NUMA node; `None` if unknown."""

    address: str
    interface: str
    numa_node: int | None


def expanded(
    nodes: Sequence[str], numa_node: int | None = None, *, root: Path | None = None
) -> tuple[str, ...]:
    """Nodes with `host:port@source` for each near source to an address that ends with `@auto`.

    An address on this host, or one that no source reaches, is left to the system's choice.

    Args:
        nodes: node addresses; a node with several has commas between them.
        numa_node: NUMA node for the front end's threads; `None`: anywhere.
        root: directory where the kernel describes the machine, by default `/sys`.
    """
    if not any(AUTO in node for node in nodes):
        return tuple(nodes)
    host = json.loads(_native.topology_host(str(placement.SYSFS if root is None else root)))
    numa_nodes = {
        interface["name"]: device["numa"]
        for device in host["devices"]
        for interface in device["interfaces"]
    }

    def each(address: str) -> list[str]:
        if not address.endswith(AUTO):
            return [address]
        listener = address.removesuffix(AUTO)
        found = near(reaching(listener, numa_nodes), numa_node)
        if not found:
            logger.warning(
                "%s: no interface of this host that reaches it by itself; one connection, from the "
                "address that the system chooses",
                address,
            )
        return [f"{listener}@{source.address}" for source in found] or [listener]

    def all_of(node: str) -> str:
        texts = (text for address in description.addresses_of(node) for text in each(address))
        # A source may also be named.
        return ",".join(dict.fromkeys(texts))

    return tuple(map(all_of, nodes))


def near(sources: Sequence[Source], numa_node: int | None) -> list[Source]:
    """Sources whose NIC is on a NUMA node; all sources without a node, or if none is there."""
    on_node = [source for source in sources if source.numa_node == numa_node]
    return on_node if numa_node is not None and on_node else list(sources)


def reaching(listener: str, numa_nodes: Mapping[str, int | None]) -> list[Source]:
    """Addresses on this host whose packets to a listener leave by their own interface.

    Args:
        listener: `host:port`. A name's first address counts.
        numa_nodes: NUMA node by interface, for interfaces that are devices.
    """
    host, _, port = listener.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        to = ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError):
        return []
    sources: dict[str, Source] = {}
    unstable = {address for address, flags, _ in inet6_addresses() if flags & UNSTABLE}
    for text, interface in description.interfaces().items():
        own = ipaddress.ip_address(text)
        if own.version != to.version or own.is_loopback or own.is_link_local or text in unstable:
            continue
        if interface in sources or _lacks_carrier(interface):
            continue
        if route(to, own) == interface:
            sources[interface] = Source(text, interface, numa_nodes.get(interface))
    return list(sources.values())


def _lacks_carrier(interface: str) -> bool:
    """True for an interface without a cable, whose routes the system keeps."""
    with contextlib.suppress(OSError):
        carrier = placement.SYSFS / "class/net" / interface / "carrier"
        return carrier.read_text(encoding="ascii").strip() == "0"
    return False


def route(
    to: ipaddress.IPv4Address | ipaddress.IPv6Address,
    source: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> str | None:
    """Interface by which packets leave; None without a route, or to an address on this host."""
    family = socket.AF_INET if to.version == 4 else socket.AF_INET6
    bits = to.max_prefixlen
    attributes = b"".join(
        ATTRIBUTE.pack(ATTRIBUTE.size + len(each.packed), kind) + each.packed
        for kind, each in ((RTA_DST, to), (RTA_SRC, source))
    )
    body = ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, 0) + attributes
    length = HEADER.size + len(body)
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as link:
        link.settimeout(1.0)
        link.send(HEADER.pack(length, RTM_GETROUTE, NLM_F_REQUEST, 1, 0) + body)
        answer = link.recv(1 << 16)
        _, kind, *_ = HEADER.unpack_from(answer)
        if kind != RTM_NEWROUTE:
            return None
        if ROUTE.unpack_from(answer, HEADER.size)[7] == RTN_LOCAL:
            return None
        at = HEADER.size + ROUTE.size
        while at + ATTRIBUTE.size <= len(answer):
            size, kind = ATTRIBUTE.unpack_from(answer, at)
            if kind == RTA_OIF:
                (index,) = struct.unpack_from("=I", answer, at + ATTRIBUTE.size)
                return socket.if_indextoname(index)
            at += max(ATTRIBUTE.size, (size + 3) & ~3)
    return None
