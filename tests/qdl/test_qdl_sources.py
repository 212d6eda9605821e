"""Connection sources for nodes: addresses that reach a node by their own interface."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.topology.test_topo import write
from weft.qdl import Accelerator, Tensor, Test, ask, description, placement, sources
from weft.qdl.sources import Source, expanded, near, reaching

if TYPE_CHECKING:
    from pathlib import Path

#: Namespace interfaces: two networks with an address on this host in each, and one in none.
INTERFACES = """
ip link set lo up
for number in 0 1 2; do
    ip link add nic$number type veth peer name far$number
    ip address add 10.77.$number.1/24 dev nic$number
    ip link set far$number up
    ip link set nic$number up
done
ip address add 10.77.0.3/24 dev nic0
ip route add 10.99.0.0/16 via 10.77.0.254
"""
PROGRAM = """
import json, sys
from weft.qdl.sources import reaching
print(json.dumps([[list(it) for it in reaching(each, {"nic1": 1})] for each in sys.argv[1:]]))
"""

NICS = [Source("10.0.0.1", "eth0", 0), Source("10.1.0.1", "eth1", 1), Source("10.2.0.1", "eth2", 1)]


def test_the_nics_of_the_node_are_near_and_without_one_all_are() -> None:
    assert near(NICS, 0) == NICS[:1]
    assert near(NICS, 1) == NICS[1:]
    assert near(NICS, 2) == near(NICS, None) == NICS
    unknown = [source._replace(numa_node=None) for source in NICS]
    assert near(unknown, 0) == near(unknown, None) == unknown
    assert near([], 0) == []


def offline(folder: Path, node: str, **options: Any) -> Test:
    """A small-sample test with one node."""
    return Test(scenario="Offline", sample_bytes=8, log_directory=folder, nodes=(node,), **options)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two NUMA nodes and a NIC on each; both reach other hosts."""
    for number in (0, 1):
        write(tmp_path / f"devices/system/node/node{number}/cpulist", "0")
        device = tmp_path / f"devices/pci0000:0{number}/0000:0{number}:00.0"
        write(device / "numa_node", str(number))
        write(device / "class", "0x020000")
        write(device / "vendor", "0x15b3")
        write(device / f"net/eth{number}/speed", "100000")
    names = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.0.1.1": "eth1", "fe80::1": "eth1"}
    monkeypatch.setattr(placement, "SYSFS", tmp_path)
    monkeypatch.setattr(description, "interfaces", lambda: names)
    monkeypatch.setattr(sources, "route", lambda _, own: names[str(own)])
    return tmp_path


@pytest.mark.usefixtures("machine")
def test_an_address_with_auto_becomes_one_of_each_near_source() -> None:
    node = "10.9.0.1:500@auto"
    first, second = "10.9.0.1:500@10.0.0.1", "10.9.0.1:500@10.0.1.1"
    assert expanded([node]) == (f"{first},{second}",)
    assert expanded([node], 0) == (first,)
    assert expanded([f"{node}, 10.9.0.1:501", "10.9.0.2:500"], 1) == (
        f"{second},10.9.0.1:501",
        "10.9.0.2:500",
    )
    assert expanded([f"{node},{first}"]) == (f"{first},{second}",), "a source that is named, too"
    # Another family, a name that does not resolve, no port: left to the connection, which names it.
    for left in ("[2001:db8::1]:500", "no-such-host.invalid:500", "10.9.0.1"):
        assert expanded([f"{left}@auto"]) == (left,)
    assert expanded(["10.9.0.1:500@10.0.0.9"]) == ("10.9.0.1:500@10.0.0.9",)


def test_an_interface_without_a_cable_is_no_source(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    carrier = machine / "class/net/eth1/carrier"
    write(carrier, "1")
    assert len(reaching("10.9.0.1:500", {})) == 2
    write(carrier, "0")
    assert [source.interface for source in reaching("10.9.0.1:500", {})] == ["eth0"]
    assert not caplog.records
    write(machine / "class/net/eth0/carrier", "0")
    assert expanded(["10.9.0.1:500@auto"]) == ("10.9.0.1:500",)
    (record,) = caplog.records
    assert "10.9.0.1:500@auto: no interface of this host that reaches it" in record.getMessage()


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("flags", [0x01, 0x08, 0x20, 0x40])
def test_an_address_that_may_end_is_no_source(flags: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [("2001:db8::2", flags, "eth0"), ("2001:db8::3", 0x80, "eth0")]
    names = {address: interface for address, _, interface in found}
    monkeypatch.setattr(description, "interfaces", lambda: names)
    monkeypatch.setattr(sources, "inet6_addresses", lambda: found)
    monkeypatch.setattr(sources, "route", lambda _, own: names[str(own)])
    assert reaching("[2001:db8::9]:500", {}) == [Source("2001:db8::3", "eth0", None)]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("placed", "expected"),
    [
        (1, "10.9.0.1:500@10.0.1.1"),
        # NICs on two nodes leave the placement choice open.
        ("auto", "10.9.0.1:500@10.0.0.1,10.9.0.1:500@10.0.1.1"),
        (None, "10.9.0.1:500@10.0.0.1,10.9.0.1:500@10.0.1.1"),
    ],
)
def test_a_test_takes_the_sources_of_its_placement(
    tmp_path: Path, placed: placement.Placement, expected: str
) -> None:
    test = offline(tmp_path, "10.9.0.1:500@auto", placement=placed)
    resolved, chosen = test._placed()
    assert resolved == dataclasses.replace(test, nodes=(expected,))
    assert (None if chosen is None else chosen.numa_node) == (1 if placed == 1 else None)


def test_an_address_of_this_host_is_left_to_the_system() -> None:
    local = ipaddress.ip_address("127.0.0.1")
    assert sources.route(local, local) is None
    assert reaching("127.0.0.1:1", {}) == []
    vector = Tensor("vector", "float32", (3,))
    with Accelerator(lambda batch: batch, inputs=[vector], outputs=[vector]) as node:
        assert ask([f"{node.address}@auto"], [[bytes(12)]]).answered == 1


def test_sources_leave_by_their_own_interface_in_a_network_namespace() -> None:
    listeners = ["10.77.0.9:1", "10.77.1.9:1", "10.99.0.1:1", "10.88.0.1:1", "10.77.0.1:1"]
    rule = "ip rule add from 10.77.1.1 table 77; ip route add default via 10.77.1.254 table 77"
    start = 'echo made >&2; exec "$0" -c "$1" $2'
    script = f"set -e\n{INTERFACES}\n{rule}\n{start}"
    command = ["unshare", "--net", "sh", "-c", script, sys.executable, PROGRAM, " ".join(listeners)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if "made" not in done.stderr.splitlines():
        pytest.skip(f"no namespace with virtual interfaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    first, second = ["10.77.0.1", "nic0", None], ["10.77.1.1", "nic1", 1]
    # By the rule, packets from the second source leave by its own interface for all networks.
    assert json.loads(done.stdout) == [[first, second], [second], [first, second], [second], []]


def test_a_route_to_another_host_names_its_interface() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no route to other hosts")
        own = probe.getsockname()[0]
    interface = sources.route(ipaddress.ip_address("192.0.2.1"), ipaddress.ip_address(own))
    assert interface == description.interfaces()[own]


@pytest.mark.parametrize(
    ("provider", "protocol", "connections"),
    [(None, "TCP", 4), ("tcp", "TCP", 4), ("verbs", "RDMA", 2), ("ofi", "", 2)],
)
def test_the_description_names_the_protocol_of_the_provider(
    tmp_path: Path, provider: Any, protocol: str, connections: int
) -> None:
    test = offline(tmp_path, "192.0.2.1:500,192.0.2.2:500", provider=provider)
    outcome: Any = SimpleNamespace(link_bytes_per_second=None)
    keys = description.network_keys(test, outcome)
    assert (keys["network_protocol"], keys["number_connections"]) == (protocol, connections)
