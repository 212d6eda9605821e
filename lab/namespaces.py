"""Network of namespaces: every node in a plan is a network namespace, every cable a veth pair.

A token bucket (tbf, see https://man7.org/linux/man-pages/man8/tc-tbf.8.html) at both ends of each
cable limits the rate. `built` removes everything however the block ends, and first removes what a
killed run left. The machine's own network is unaffected: no interface is made outside the
namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lab.network import Plan

__all__ = ["PREFIX", "built", "enter", "inside", "missing", "namespace"]

#: Prefix for all lab namespace names.
PREFIX: Final = "weft-lab-"
#: Held while a network exists: two labs would remove each other's namespaces.
LOCK: Final = Path("/run/weft-lab.lock")
NAMESPACES: Final = Path("/run/netns")
CLONE_NEWNET: Final = 0x40000000
#: Ethernet header bytes, which tbf counts and an interface's MTU does not.
ETHERNET: Final = 14
#: Longest time that a packet spends in a full queue.
QUEUE: Final = "500ms"

#: Bytes per connection that may be in flight; the kernel's buffers are twice as large.
WINDOW: Final = 1 << 16
#: Least time until TCP sends a segment again. Acknowledgements wait in queues behind data in the
#: other direction, and no segment is lost.
QUIET: Final = "2s"

#: Settings in every namespace, below /proc/sys/net.
SETTINGS: Final = {
    # IPv6 neighbour discovery would add packets.
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "0",
    "ipv4/conf/default/rp_filter": "0",
    # Hash over addresses and ports.
    "ipv4/fib_multipath_hash_policy": "1",
    # TCP behaves the same in each step and each run. Namespaces may always select reno.
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    # No loss probes: they take a delay in a queue for a loss.
    "ipv4/tcp_early_retrans": "0",
    # Flows that share a link fit into the queue, so no packet is lost.
    "ipv4/tcp_rmem": f"4096 {2 * WINDOW} {2 * WINDOW}",
    "ipv4/tcp_wmem": f"4096 {2 * WINDOW} {2 * WINDOW}",
}

libc = ctypes.CDLL(None, use_errno=True)


def namespace(node: str) -> str:
    """Name for a node's namespace, for example `weft-lab-U0`."""
    return PREFIX + node


def missing() -> str | None:
    """Reason for which the lab cannot run on this machine, with a remedy; `None` if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run as root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the lab needs `{program}`: apt-get install iproute2"
    name = f"{PREFIX}probe-{os.getpid()}"
    rate = ("tbf", "rate", "10mbit", "burst", "3kb", "latency", QUEUE)
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "c0", "type", "veth", "peer", "name", "c1")
        run("tc", "-n", name, "qdisc", "add", "dev", "c0", "root", *rate)
    except LabError as error:
        return f"the kernel refuses namespaces, veth pairs or tbf: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return None


@contextlib.contextmanager
def built(plan: Plan, megabits: float, mtu: int) -> Iterator[None]:
    """A plan's network, for the block.

    Args:
        plan: nodes, cables and routes.
        megabits: rate per directed link, in Mbit/s, Ethernet headers included.
        mtu: longest IP packet, in bytes.

    Raises:
        LabError: if another lab runs, or the kernel refuses a part of the network.
    """
    with locked():
        remove()
        try:
            build(plan, megabits, mtu)
            yield
        finally:
            remove()


@contextlib.contextmanager
def inside(node: str) -> Iterator[None]:
    """Run the block with this thread in a node's network namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(node)
        try:
            yield
        finally:
            switch(before)
    finally:
        os.close(before)


def enter(node: str) -> None:
    """Move this thread to a node's network namespace.

    Raises:
        OSError: if there is no such namespace.
    """
    descriptor = os.open(NAMESPACES / namespace(node), os.O_RDONLY | os.O_CLOEXEC)
    try:
        switch(descriptor)
    finally:
        os.close(descriptor)


def switch(descriptor: int) -> None:
    """Move this thread to the network namespace behind a descriptor."""
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Exclude other labs on this machine for the block."""
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError(f"{LOCK}: held by another lab on this machine; wait for it") from None
        yield


def build(plan: Plan, megabits: float, mtu: int) -> None:
    """Create a plan's namespaces, cables, addresses, routes and rates."""
    batch("ip", (f"netns add {namespace(node)}" for node in plan.nodes))
    for node in plan.nodes:
        with inside(node):
            for name, value in SETTINGS.items():
                Path("/proc/sys/net", name).write_text(value, encoding="ascii")
    batch("ip", (cable_line(plan, number) for number in range(len(plan.cables))))
    for node in plan.nodes:
        batch("ip", node_lines(plan, node, mtu), node)
        batch("tc", rate_lines(plan, node, megabits, mtu), node)


def cable_line(plan: Plan, number: int) -> str:
    """The `ip` line that makes a cable."""
    cable = plan.cables[number]
    one, two = (
        f"name {cable.interface} address {cable.hardware_address(end)} netns {namespace(end)}"
        for end in cable.ends
    )
    return f"link add {one} type veth peer {two}"


def node_lines(plan: Plan, node: str, mtu: int) -> Iterator[str]:
    """The `ip` lines for a node's addresses, neighbours and routes."""
    yield "link set lo up"
    for cable in plan.cables_of[node]:
        name, other = cable.interface, cable.other(node)
        yield f"address add {cable.address(node)}/31 dev {name}"
        yield f"link set {name} mtu {mtu} up"
        # Known neighbours: no ARP among the counted bytes.
        hardware = cable.hardware_address(other)
        yield f"neigh add {cable.address(other)} lladdr {hardware} dev {name} nud permanent"
    if node in plan.hosts:
        (cable,) = plan.cables_of[node]
        via = cable.address(cable.other(node))
        yield f"route add default via {via} {transport(mtu)}"
        return
    for route in plan.routes[node]:
        hops = [cable.address(cable.other(node)) for cable in route.cables]
        if len(hops) > 1:
            via = " ".join(f"nexthop via {hop}" for hop in hops)
            yield f"route add {plan.address(route.to)}/32 {via}"
        elif plan.cables_of[route.to][0] not in route.cables:
            yield f"route add {plan.address(route.to)}/32 via {hops[0]}"


def transport(mtu: int) -> str:
    """Attributes for a host's route: the same window from a connection's first segment on.

    By default the first window with large packets is three packets, and acknowledgements wait for
    every second one.
    """
    packets = max(WINDOW // mtu, 2)
    return f"initcwnd {packets} initrwnd {packets} quickack 1 rto_min {QUIET}"


def rate_lines(plan: Plan, node: str, megabits: float, mtu: int) -> Iterator[str]:
    """The `tc` lines for the rates on a node's links.

    The bucket holds two packets: an idle link saves no more than that for its next message.
    """
    burst = 2 * (mtu + ETHERNET)
    rate = round(megabits * 1e6)
    for cable in plan.cables_of[node]:
        bucket = f"tbf rate {rate}bit burst {burst}b latency {QUEUE}"
        yield f"qdisc add dev {cable.interface} root {bucket}"


def remove() -> None:
    """Remove every lab namespace; the cables go with it."""
    names = os.listdir(NAMESPACES) if NAMESPACES.is_dir() else []
    leftovers = [f"netns del {name}" for name in names if name.startswith(PREFIX)]
    if leftovers:
        batch("ip", leftovers, force=True)


def batch(
    program: str, lines: Iterable[str], node: str | None = None, *, force: bool = False
) -> None:
    """Run `ip` or `tc` lines at once, in a node's namespace if one is named.

    Args:
        program: `ip` or `tc`.
        lines: commands without the program's name.
        node: the namespace's node.
        force: continue behind a line that fails, and ignore failures.
    """
    inner = ("-n", namespace(node)) if node else ()
    options = ("-force",) if force else ()
    run(program, *inner, *options, "-batch", "-", text="\n".join(lines) + "\n", check=not force)


def run(*command: str, text: str | None = None, check: bool = True) -> None:
    """Run a program; its error output becomes an error.

    Raises:
        LabError: if it fails and `check` is set.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        detail = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise LabError(f"{' '.join(command)}: {detail}")
