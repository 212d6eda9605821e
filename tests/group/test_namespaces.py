"""Two network hosts: two network namespaces connected by a veth pair.

Each has its own loopback and its own /etc/hosts, in which the first host has the name `alpha`.
A further namespace is a host with IPv6 only.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import ROOT

ADDRESSES = ("10.231.7.1", "10.231.7.2")
#: Address that Debian's installer writes for the machine's own name.
DEBIAN = "127.0.1.1"
PORT = 29400
TIMEOUT_SECONDS = 40.0


@dataclass(frozen=True)
class Ended:
    """A rank that has ended."""

    code: int
    output: str


class Hosts:
    """Two namespaces, and ranks in them."""

    def __init__(self, names: tuple[str, str], folder: Path) -> None:
        self.names = names
        self.folder = folder
        #: Rank function and arguments.
        self.worker: tuple[str, dict[str, int]] = (
            "group.transfer.ring",
            {"length": 300_000, "rounds": 6},
        )

    def resolve(self, host: int, address: str) -> None:
        """Give `alpha` an address on one host."""
        text = f"127.0.0.1 localhost\n{address} alpha\n"
        (self.folder / f"hosts{host}").write_text(text, encoding="utf-8")

    def start(self, host: int, rank: int, extra: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a rank with torchrun's variables, two on each host."""
        # `ip netns exec` has made a mount namespace.
        binds = {f"hosts{host}": "/etc/hosts", "resolv.conf": "/etc/resolv.conf"}
        mounts = [
            f'mount --bind "{self.folder}/{name}" {file} && '
            for name, file in binds.items()
            if (self.folder / name).exists()
        ]
        script = f'{"".join(mounts)}exec "$@"'
        worker = [sys.executable, "-m", "tests.workers", self.worker[0], json.dumps(self.worker[1])]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], "sh", "-c", script, "sh", *worker],
            cwd=ROOT,
            env={key: value for key, value in os.environ.items() if not key.startswith("WEFT_")}
            | {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2)}
            | {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "alpha", "MASTER_PORT": str(PORT)}
            | {"WEFT_SECRET": "apple", "TEST_RESULTS": str(self.folder)}
            | dict(extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, extra: Mapping[int, Mapping[str, str]] | None = None) -> list[Ended]:
        """Four ranks, 0 and 1 on the first host; `extra` has variables by rank."""
        ranks = [self.start(rank // 2, rank, (extra or {}).get(rank, {})) for rank in range(4)]
        try:
            outputs = [rank.communicate(timeout=TIMEOUT_SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [Ended(rank.returncode, text) for rank, text in zip(ranks, outputs, strict=True)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root: run the tests as root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need `ip`: apt-get install iproute2")
    names = (f"weft-{os.getpid()}-a", f"weft-{os.getpid()}-b")
    links = (f"wa{os.getpid()}", f"wb{os.getpid()}")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
            for name, link, address in zip(names, links, ADDRESSES, strict=True):
                ip("link", "set", link, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                for each in (link, "lo"):
                    ip("-n", name, "link", "set", each, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
        yield Hosts(names, tmp_path)
    finally:
        subprocess.run(["ip", "link", "del", links[0]], check=False, capture_output=True)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_name_that_is_loopback_on_its_own_host_keeps_no_rank_away(hosts: Hosts) -> None:
    hosts.resolve(0, DEBIAN)
    hosts.resolve(1, ADDRESSES[0])
    for ended in hosts.run():
        assert ended.code == 0, ended.output
    results = [json.loads((hosts.folder / str(rank)).read_text("utf-8")) for rank in range(4)]
    for rank, result in enumerate(results):
        assert result["right"] == 6, f"rank {rank}: {result}"
        near = [
            None if peer == rank else "shm" if peer // 2 == rank // 2 else "tcp"
            for peer in range(4)
        ]
        assert result["routes"] == near, f"rank {rank}"


def test_an_address_in_place_of_the_name_works_too(hosts: Hosts) -> None:
    hosts.resolve(0, DEBIAN)
    hosts.resolve(1, DEBIAN)
    address = {"MASTER_ADDR": ADDRESSES[0], "WEFT_PROVIDERS": "tcp"}
    for ended in hosts.run(dict.fromkeys(range(4), address)):
        assert ended.code == 0, ended.output


def test_a_name_that_is_loopback_on_another_host_is_pointed_out(hosts: Hosts) -> None:
    hosts.resolve(0, DEBIAN)
    hosts.resolve(1, DEBIAN)
    soon = {"WEFT_CONNECT_TIMEOUT": "2"}
    for rank, ended in enumerate(hosts.run(dict.fromkeys(range(4), soon))):
        assert ended.code != 0, rank
        assert "RendezvousError" in ended.output, ended.output
        if rank >= 2:
            assert "on this host the name is 127.0.1.1" in ended.output, ended.output
            assert "WEFT_ADDR" in ended.output


def test_a_name_server_that_does_not_respond_is_an_error_of_the_name(hosts: Hosts) -> None:
    # No host has this address: requests wait for its hardware address, longer than this timeout.
    silent = "nameserver 10.231.7.9\noptions attempts:1\n"
    (hosts.folder / "resolv.conf").write_text(silent, encoding="utf-8")
    hosts.resolve(0, ADDRESSES[0])
    hosts.resolve(1, ADDRESSES[0])
    needs_it = {"WEFT_CONNECT_TIMEOUT": "2", "MASTER_ADDR": "alpha.example"}
    found = {"WEFT_CONNECT_TIMEOUT": "2"}
    ends = hosts.run({0: found, 1: found, 2: needs_it, 3: needs_it})
    for ended in ends[2:]:
        assert ended.code != 0
        assert "AddressError: host alpha.example" in ended.output, ended.output
        assert "no name server responded in time" in ended.output, ended.output


def test_a_rank_that_listens_on_loopback_is_named_to_the_other_host(hosts: Hosts) -> None:
    hosts.resolve(0, DEBIAN)
    hosts.resolve(1, ADDRESSES[0])
    ends = hosts.run({1: {"WEFT_BIND": "127.0.0.1", "WEFT_CONNECT_TIMEOUT": "5"}})
    for ended in ends[2:]:
        assert "AddressError: rank 1 is on another host" in ended.output, ended.output
        assert "WEFT_ADVERTISE" in ended.output


def test_groups_split_over_hosts_without_a_default_route_or_a_name(hosts: Hosts) -> None:
    hosts.resolve(0, ADDRESSES[0])
    hosts.resolve(1, ADDRESSES[0])
    hosts.worker = ("group.groups.splits", {})
    for ended in hosts.run():
        assert ended.code == 0, ended.output
    for rank in range(4):
        result = json.loads((hosts.folder / str(rank)).read_text("utf-8"))
        before = (rank - 1) % 4
        assert result["after the whole was closed"] == [rank, 4, before, before]
        # Rank 0 in this group is on the second host, the other on the first.
        assert result["turned"] == {3: [0, 2, 1, 1], 0: [1, 2, 0, 0]}.get(rank)


#: A rank that splits its group.
SPLIT = """
import weft
with weft.init() as group:
    assert group.all_gather(bytes([group.rank])) == [bytes([0]), bytes([1])]
    part = group.split([1, 0])
    assert part.rank == 1 - group.rank
    part.barrier()
    group.barrier()
"""
#: Both pair ends and a query node, at default addresses.
PAIRS = """
import threading, weft
from weft.diagnosis import machine
from weft.qdl import Accelerator, Tensor, ask
assert machine.loopback().detail == "TCP over ::1", machine.loopback()
with weft.listen() as listener:
    assert listener.address.startswith("[::1]:"), listener.address
    dialler = threading.Thread(target=lambda: weft.connect(listener.address).close())
    dialler.start()
    with listener.accept(timeout=30) as pair:
        assert pair.rank == 0
    dialler.join()
tensor = Tensor("x", "uint8", (8,))
with Accelerator(lambda x: x + 1, inputs=[tensor], outputs=[tensor]) as node:
    for provider in ("shm", "tcp"):
        got = ask([node.address], [(bytes(8),)], provider=provider)
        assert got.answers == [(bytes([1] * 8),)], got
print("done")
"""
#: A rank in torch.distributed, with two groups over the store at MASTER_ADDR.
TORCH = """
import torch, weft.torch
from torch import distributed
distributed.init_process_group("weft")
distributed.new_group([0, 1])
sum = torch.ones(1000)
distributed.all_reduce(sum)
assert torch.equal(sum, torch.full((1000,), 2.0))
distributed.barrier()
distributed.destroy_process_group()
print("done")
"""


class Six:
    """A host with only IPv6 addresses: ::1, and fd07::1, which other hosts might reach."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.hosts = folder / "hosts6"
        self.hosts.write_text("::1 localhost\n", encoding="utf-8")

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command on it."""
        script = f'mount --bind "{self.hosts}" /etc/hosts && exec "$@"'
        unset = ("WEFT_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(unset)}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, "sh", "-c", script, "sh", *command],
            cwd=ROOT,
            env=inherited | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def six(tmp_path: Path) -> Iterator[Six]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    name = f"weft-{os.getpid()}-six"
    try:
        try:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "del", "127.0.0.1/8", "dev", "lo")
            ip("-n", name, "address", "add", "fd07::1/128", "dev", "lo")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no host with IPv6 only can be made here: {error.stderr.strip()}")
        yield Six(name, tmp_path)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ended(processes: list[subprocess.Popen[str]]) -> list[Ended]:
    """Wait for processes, and none stays."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [Ended(each.returncode, text) for each, text in zip(processes, outputs, strict=True)]


@pytest.mark.timeout(100)
def test_groups_pairs_and_nodes_work_on_a_host_with_ipv6_only(six: Six) -> None:
    launch = [sys.executable, "-m", "weft", "run", "-n", "2", "--no-prefix", "--"]
    group, pairs = ended(
        [
            six.start(*launch, sys.executable, "-c", SPLIT),
            six.start(sys.executable, "-c", PAIRS),
        ]
    )
    assert (group.code, group.output) == (0, ""), group.output
    assert (pairs.code, pairs.output) == (0, "done\n"), pairs.output


@pytest.mark.torch
@pytest.mark.timeout(100)
@pytest.mark.parametrize("master", ["::1", "fd07::1"])
def test_torch_meets_at_an_address_of_ipv6(six: Six, master: str) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
    # Ranks on one host meet on loopback; ranks on pretended hosts meet at an address on the host.
    for extra in ({}, {"WEFT_HOST_ID": "host"}):
        ranks = [
            six.start(
                *(sys.executable, "-c", TORCH),
                **common,
                RANK=str(rank),
                **{name: f"{value}{rank}" for name, value in extra.items()},
            )
            for rank in range(2)
        ]
        for each in ended(ranks):
            assert (each.code, each.output[-5:]) == (0, "done\n"), each.output
