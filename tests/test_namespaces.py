"""Two hosts of the network: two network namespaces connected by a veth pair.

Each has its own loopback and its own /etc/hosts, in which the first host has the name `alpha`.
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
        #: Function of the ranks, and its arguments.
        self.worker: tuple[str, dict[str, int]] = (
            "transfer.ring",
            {"length": 300_000, "rounds": 6},
        )

    def resolve(self, host: int, address: str) -> None:
        """Give `alpha` an address on one of the hosts."""
        text = f"127.0.0.1 localhost\n{address} alpha\n"
        (self.folder / f"hosts{host}").write_text(text, encoding="utf-8")

    def start(self, host: int, rank: int, extra: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a rank with torchrun's variables, two on each host."""
        # `ip netns exec` has made a mount namespace.
        script = f'mount --bind "{self.folder}/hosts{host}" /etc/hosts && exec "$@"'
        worker = [sys.executable, "-m", "workers", self.worker[0], json.dumps(self.worker[1])]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], "sh", "-c", script, "sh", *worker],
            cwd=Path(__file__).parent,
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
    hosts.worker = ("groups.splits", {})
    for ended in hosts.run():
        assert ended.code == 0, ended.output
    for rank in range(4):
        result = json.loads((hosts.folder / str(rank)).read_text("utf-8"))
        before = (rank - 1) % 4
        assert result["after the whole was closed"] == [rank, 4, before, before]
        # Rank 0 of this group is on the second host, the other on the first.
        assert result["turned"] == {3: [0, 2, 1, 1], 0: [1, 2, 0, 0]}.get(rank)
