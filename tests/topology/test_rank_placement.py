"""HDRM ranks for processes on named hosts, and `weft run --network`."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from weft.errors import ConfigurationError
from weft.sim import simulate
from weft.topology import hdrm_hosts, hdrm_ranks

BIGRAPH = "bigraph:switches=8,endpoints=2"


def endpoint(host: str) -> int:
    """Endpoint number in `BIGRAPH`, from its name."""
    switch, port = host.split(".")
    return ((switch[0] == "L") * 4 + int(switch[1:])) * 2 + int(port)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_of_shuffled_hosts_load_every_link_once(seed: int) -> None:
    hosts = hdrm_hosts(BIGRAPH)
    random.Random(seed).shuffle(hosts)
    ranks = hdrm_ranks(BIGRAPH, hosts)
    assert sorted(ranks) == list(range(16))

    def load(places: list[int]) -> int:
        job = {
            "algorithm": "hdrm",
            "bytes": 1 << 20,
            "placement": {"endpoints": places},
        }
        cluster = {"topology": BIGRAPH, "routing": "static"}
        outcome = simulate({"scenario": "collective", "cluster": cluster, "job": job})
        return int(outcome["max_link_load"])

    host_of = dict(zip(ranks, hosts, strict=True))
    assert load([endpoint(host_of[rank]) for rank in range(16)]) == 1
    assert load([endpoint(host) for host in hosts]) > 1


def test_processes_of_a_host_take_its_ranks_in_order() -> None:
    network = "bigraph:switches=8,endpoints=4,nics=4"
    hosts = hdrm_hosts(network)
    assert hosts[:5] == ["host0"] * 4 + ["host1"]
    mixed = [*hosts[4:], *hosts[:4]]
    assert hdrm_ranks(network, mixed) == [*range(4, 32), *range(4)]
    names = [f"node{number}" for number in range(8)]
    assert hdrm_hosts(network, 5, names) == ["node0"] * 4 + ["node1"]


def test_a_network_that_hdrm_cannot_serve_is_refused() -> None:
    hosts = hdrm_hosts(BIGRAPH)

    def refusal(network: str, hosts: list[str]) -> str:
        with pytest.raises(ConfigurationError) as error:
            hdrm_ranks(network, hosts)
        return str(error.value)

    fat_tree = "fat-tree:leaves=4,spines=2,hosts=4"
    assert "HDRM needs a BiGraph, expected bigraph:..., a JSON file" in refusal(fat_tree, hosts)
    assert refusal(BIGRAPH, ["node7", *hosts[1:]]) == (
        "no HDRM rank map for 16 ranks: host node7 has no endpoint in HDRM's map, whose hosts are"
        " U0.0, L0.0, L1.0, U1.0 and 12 more; name hosts as the network does"
    )
    assert refusal(BIGRAPH, [hosts[1], *hosts[1:]]) == (
        "no HDRM rank map for 16 ranks: host L0.0 has 2 ranks and 1 of the endpoints of HDRM's map;"
        " start at most one rank for each endpoint"
    )
    assert "rank 1 of the order would be at host L0.0, which has none" in refusal(
        BIGRAPH, [hosts[0], hosts[3]]
    )
    uneven = "bigraph:switches=6,endpoints=2"
    with pytest.raises(ConfigurationError, match=r"12 ranks: expected 1 to 8: 3 switches of each"):
        hdrm_hosts(uneven, 12)


def test_a_part_of_the_hosts_and_a_file_with_a_rank_map_are_taken(tmp_path: Path) -> None:
    hosts = hdrm_hosts(BIGRAPH)
    assert hdrm_ranks(BIGRAPH, [hosts[6], hosts[4], hosts[7], hosts[5]]) == [2, 0, 3, 1]
    names = [f"node{number}" for number in range(16)]
    (tmp_path / "names").write_text("\n".join(names), encoding="utf-8")
    shape = ("--switches", "8", "--endpoints", "2", "--hosts", str(tmp_path / "names"))
    command = [sys.executable, "-m", "weft", "topo", "bigraph", *shape, "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=50)
    file = str(tmp_path / "network.json")
    assert hdrm_hosts(file) == hdrm_hosts(BIGRAPH, names=names)
    assert hdrm_ranks(file, ["node0", hdrm_hosts(file)[1]]) == [0, 1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_weft_run_places_ranks_on_the_hosts_of_a_network(tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    file.write_text(json.dumps({"bigraph": {"switches": 4, "endpoints": 2}}))
    hosts = hdrm_hosts("bigraph:switches=4,endpoints=2", 4)
    variables = "$WEFT_RANK $WEFT_HOST_ID $WEFT_LOCAL_RANK/$WEFT_LOCAL_WORLD_SIZE $WEFT_NETWORK"
    script = f'echo "{variables}"'
    for network in ("bigraph:switches=4,endpoints=2", str(file)):
        result = run("-n", "4", "--no-prefix", "--network", network, "--", "sh", "-c", script)
        assert result.returncode == 0, result.stderr
        expected = [f"{rank} {host} 0/1 {network}" for rank, host in enumerate(hosts)]
        assert sorted(result.stdout.splitlines()) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--network", "fat-tree:leaves=2,spines=1,hosts=2"], "HDRM needs a BiGraph"),
        (["--network", "bigraph:switches=2,endpoints=1"], "4 ranks: expected 1 to 2"),
        (["--network", BIGRAPH, "--pretend-hosts", "2"], "give only one"),
    ],
)
def test_weft_run_rejects_a_network_without_a_placement(arguments: list[str], message: str) -> None:
    result = run("-n", "4", *arguments, "--", "true")
    assert result.returncode == 2
    assert message in result.stderr
