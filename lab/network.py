"""Lab networks as values: nodes, cables, addresses, routes and paths.

Every cable has two separate addresses (a /31 network, for example 10.77.0.0/31). A host is reached
at the address on its end of its only cable. A switch forwards to the neighbours that are one link
nearer to the destination. Between BiGraph halves that is one neighbour, so the path is unique;
among several neighbours the kernel selects one by a hash over addresses and ports (ECMP).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Final

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cable", "Link", "Plan", "Route", "bigraph", "fat_tree"]

#: First address in the cable networks.
FIRST_ADDRESS: Final = IPv4Address("10.77.0.0")
#: Limits that two cores can forward.
MOST_HOSTS: Final = 64
MOST_SWITCHES: Final = 16

#: Directed link: source and destination nodes.
Link = tuple[str, str]


@dataclass(frozen=True)
class Cable:
    """Two directed links between two nodes. A host's cable has the host first."""

    number: int
    ends: tuple[str, str]

    @property
    def interface(self) -> str:
        """Interface name at both ends."""
        return f"c{self.number}"

    def address(self, node: str) -> str:
        """Address at the node's end."""
        return str(FIRST_ADDRESS + 2 * self.number + self.ends.index(node))

    def hardware_address(self, node: str) -> str:
        """MAC address at the node's end, locally administered."""
        low = 2 * self.number + self.ends.index(node)
        return f"02:77:00:00:{low >> 8:02x}:{low & 255:02x}"

    def other(self, node: str) -> str:
        """Node at the other end."""
        return self.ends[1 - self.ends.index(node)]


@dataclass(frozen=True)
class Route:
    """Next hops toward a host: the cable taken, or several among which a hash selects."""

    to: str
    cables: tuple[Cable, ...]


@dataclass(frozen=True)
class Plan:
    """Network: hosts in endpoint order, switches, and the cables between them."""

    name: str
    #: Short form, without rates.
    shape: str
    switches: tuple[str, ...]
    hosts: tuple[str, ...]
    cables: tuple[Cable, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, switches first."""
        return self.switches + self.hosts

    @property
    def trunks(self) -> tuple[Link, ...]:
        """Directed links between switches."""
        ends = [cable.ends for cable in self.cables if cable.ends[0] not in self.hosts]
        return tuple(link for one, two in ends for link in ((one, two), (two, one)))

    @cached_property
    def cables_of(self) -> dict[str, tuple[Cable, ...]]:
        """Cables by node."""
        found: dict[str, list[Cable]] = {node: [] for node in self.nodes}
        for cable in self.cables:
            for end in cable.ends:
                found[end].append(cable)
        return {node: tuple(cables) for node, cables in found.items()}

    def address(self, host: str) -> str:
        """Address at which a host is reached."""
        return self.cables_of[host][0].address(host)

    @cached_property
    def routes(self) -> dict[str, tuple[Route, ...]]:
        """Routes from each switch to every host. Hosts have a default route instead."""
        found: dict[str, list[Route]] = {switch: [] for switch in self.switches}
        for host in self.hosts:
            distance = self._distances(host)
            for switch in self.switches:
                nearer = [
                    cable
                    for cable in self.cables_of[switch]
                    if distance[cable.other(switch)] < distance[switch]
                ]
                found[switch].append(Route(host, tuple(nearer)))
        return {switch: tuple(routes) for switch, routes in found.items()}

    @cached_property
    def _next_hops(self) -> dict[tuple[str, str], tuple[str, ...]]:
        return {
            (switch, route.to): tuple(cable.other(switch) for cable in route.cables)
            for switch, routes in self.routes.items()
            for route in routes
        }

    def path(self, source: str, target: str) -> tuple[Link, ...] | None:
        """Links from a host to another; `None` if a hash selects among several paths."""
        node, links = source, []
        while node != target:
            switch = self.cables_of[node][0].other(node)
            hops = (switch,) if node in self.hosts else self._next_hops[node, target]
            if len(hops) > 1:
                return None
            links.append((node, hops[0]))
            node = hops[0]
        return tuple(links)

    def spec(self, megabits: float) -> str:
        """Network for the simulator in short form, e.g. `bigraph:switches=8,endpoints=2,...`."""
        return f"{self.shape},gbps={megabits / 1000},latency_us=0"

    def _distances(self, host: str) -> dict[str, int]:
        """Links from every node to a host."""
        found, queue = {host: 0}, deque([host])
        while queue:
            node = queue.popleft()
            for cable in self.cables_of[node]:
                other = cable.other(node)
                if other not in found:
                    found[other] = found[node] + 1
                    # Hosts do not forward.
                    if other not in self.hosts:
                        queue.append(other)
        return found


def bigraph(switches: int, ports: int) -> Plan:
    """BiGraph: two switch halves, each switch joined to the whole other half and `ports` hosts.

    Names and order are the same as in `weft topo bigraph`.

    Raises:
        LabError: for an odd number of switches, or a network beyond the limits.
    """
    check(switches, ports)
    half = range(switches // 2)
    upper, lower = [f"U{each}" for each in half], [f"L{each}" for each in half]
    hosts = hosts_on(upper + lower, ports)
    trunks = [(one, other) for one in upper for other in lower]
    shape = f"bigraph:switches={switches},endpoints={ports}"
    return Plan("bigraph", shape, (*upper, *lower), tuple(hosts), cables(hosts, trunks))


def fat_tree(switches: int, ports: int) -> Plan:
    """Two-tier fat tree with as many switches, hosts and cables as the `bigraph`.

    Half the switches are leaves with twice `ports` hosts each, the others are spines.

    Raises:
        LabError: same as `bigraph`.
    """
    check(switches, ports)
    half = range(switches // 2)
    leaves, spines = [f"leaf{each}" for each in half], [f"spine{each}" for each in half]
    hosts = hosts_on(leaves, 2 * ports)
    trunks = [(leaf, spine) for leaf in leaves for spine in spines]
    shape = f"fat-tree:leaves={len(half)},spines={len(half)},hosts={2 * ports}"
    return Plan("fat-tree", shape, (*leaves, *spines), tuple(hosts), cables(hosts, trunks))


def hosts_on(leaves: Sequence[str], ports: int) -> dict[str, str]:
    """Switch by host name; the names are the same as in `weft topo`."""
    return {f"{leaf}.{port}": leaf for leaf in leaves for port in range(ports)}


def cables(hosts: dict[str, str], trunks: Sequence[Link]) -> tuple[Cable, ...]:
    """Cables to hosts and between switches."""
    return tuple(Cable(number, ends) for number, ends in enumerate([*hosts.items(), *trunks]))


def check(switches: int, ports: int) -> None:
    """Raise unless the network is within the limits.

    Raises:
        LabError: names the number and its limit.
    """
    if switches < 2 or switches % 2 or switches > MOST_SWITCHES:
        raise LabError(f"{switches} switches: expected an even number from 2 to {MOST_SWITCHES}")
    if ports < 1 or switches * ports > MOST_HOSTS:
        raise LabError(
            f"{ports} hosts on each of {switches} switches: expected 2 to {MOST_HOSTS} hosts in all"
        )
