"""The lab: networks as values, their kernel commands, and a small run where that is possible."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lab import namespaces, ranks
from lab.counters import sent_bytes
from lab.errors import LabError
from lab.experiment import Settings, experiment
from lab.network import Plan, bigraph, fat_tree
from lab.prediction import predicted_seconds, wire_efficiency
from lab.report import connections, most_connections, tables
from lab.schedules import (
    host_programs,
    one_connection,
    placement,
    program,
    rank_hosts,
    step_bytes,
)
from tests import ROOT
from weft import _native

SHAPES = [(2, 1), (4, 2), (8, 2), (16, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [bigraph, fat_tree])
def test_nodes_and_links_are_those_of_the_simulator(make: type, shape: tuple[int, int]) -> None:
    plan: Plan = make(*shape)
    network = json.loads(json.loads(_native.topology_network(plan.spec(10)))["json"])
    ends = {frozenset(cable.ends) for cable in plan.cables}
    assert network["endpoints"] == list(plan.hosts)
    assert set(network["switches"]) == set(plan.switches)
    assert {frozenset((link["from"], link["to"])) for link in network["links"]} == ends


def test_fat_tree_has_the_hardware_of_the_bigraph() -> None:
    for shape in SHAPES:
        one, other = bigraph(*shape), fat_tree(*shape)
        for name in ("switches", "hosts", "cables", "trunks"):
            assert len(getattr(one, name)) == len(getattr(other, name))


def test_addresses_are_unique() -> None:
    plan = bigraph(16, 4)
    for kind in ("address", "hardware_address"):
        found = [getattr(cable, kind)(end) for cable in plan.cables for end in cable.ends]
        assert len(set(found)) == 2 * len(plan.cables)


def test_pairs_of_different_halves_have_one_path() -> None:
    plan = bigraph(8, 2)
    for source, target in itertools.permutations(plan.hosts, 2):
        path = plan.path(source, target)
        one, other = source.partition(".")[0], target.partition(".")[0]
        if one[0] != other[0]:
            assert path == ((source, one), (one, other), (other, target))
        elif one != other:
            assert path is None


@pytest.mark.parametrize(
    ("shape", "problem"), [((3, 2), "even"), ((18, 1), "16"), ((16, 5), "64"), ((4, 0), "64")]
)
def test_networks_beyond_the_limits_are_refused(shape: tuple[int, int], problem: str) -> None:
    with pytest.raises(LabError, match=problem):
        bigraph(*shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("algorithm", ["ring", "hdrm"])
def test_ring_and_hdrm_have_one_connection_on_a_link(
    algorithm: str, shape: tuple[int, int]
) -> None:
    plan = bigraph(*shape)
    made, places = program(algorithm, len(plan.hosts)), placement(plan, algorithm)
    assert sorted(places) == list(range(len(plan.hosts)))
    size = 4 * made["blocks"]
    steps = step_bytes(plan, made, places, size, 10, seed=1)
    for step, one in zip(steps, one_connection(made, size), strict=True):
        assert set(step.values()) <= {one}


def test_hd_in_order_shares_links() -> None:
    for plan in (bigraph(8, 2), fat_tree(8, 2)):
        made = program("hd", 16)
        steps = step_bytes(plan, made, placement(plan, "hd"), 1024, 10, seed=1)
        loads = [
            max(step.values()) / one
            for step, one in zip(steps, one_connection(made, 1024), strict=True)
        ]
        assert max(loads) >= 2


def test_hdrm_needs_a_bigraph() -> None:
    with pytest.raises(LabError, match="use hd"):
        placement(fat_tree(4, 1), "hdrm")


def test_hosts_take_the_place_of_ranks() -> None:
    places = [3, 1, 0, 2]
    programs = host_programs(program("hd", 4), places)
    first = programs[3]["operations"]
    assert first[0]["write"]["to"] == 1
    assert first[1]["wait"] == {"from": 1, "lane": 0, "count": 1, "blocks": 2}


def test_the_map_is_that_of_the_hosts_in_any_order_of_ranks() -> None:
    plan = bigraph(8, 2)
    hosts = rank_hosts(plan, shuffle=5)
    assert hosts != rank_hosts(plan)
    places = placement(plan, "hdrm", hosts)
    assert places == placement(plan, "hdrm")
    programs = host_programs(program("hdrm", 16), places, hosts)
    # Rank 0 in HDRM's map exchanges with rank 1, whose host has another rank in the group.
    first = programs[places[0]]["operations"][0]
    assert hosts[first["write"]["to"]] == places[1]


def test_prediction_is_the_formula_where_no_link_is_shared() -> None:
    plan = bigraph(8, 2)
    made = program("hdrm", 16)
    constants = {"wire_efficiency": wire_efficiency(9000), "message_latency_s": 0.001}
    (found,) = predicted_seconds(plan, made, placement(plan, "hdrm"), 1 << 20, 10, constants)
    rate = 10e6 / 8 * (9000 - 52) / (9000 + 14)
    assert found == pytest.approx(8 * 0.001 + 2 * 15 / 16 * (1 << 20) / rate, rel=1e-6)


def test_kernel_commands_name_the_next_hops() -> None:
    plan = bigraph(4, 1)
    lines = list(namespaces.node_lines(plan, "U0", 1500))
    # U1.0 is in the same half: two paths. L0.0 has one, over the cable between U0 and L0.
    (hashed,) = [line for line in lines if f"route add {plan.address('U1.0')}/32" in line]
    assert hashed.count("nexthop via") == 2
    (only,) = [line for line in lines if f"route add {plan.address('L0.0')}/32" in line]
    assert only.endswith(f" via {plan.cables[4].address('L0')}")
    assert plan.cables[4].ends == ("U0", "L0")
    # The host on the switch itself is on a connected network.
    assert not [line for line in lines if f"route add {plan.address('U0.0')}/32" in line]
    rates = list(namespaces.rate_lines(plan, "U0", 12.5, 1500))
    assert len(rates) == 3
    assert all("rate 12500000bit burst 3028b" in line for line in rates)


def test_sent_bytes_are_the_ninth_number() -> None:
    rows = [
        "Inter-| Receive",
        " face |bytes",
        "    lo: 1 2 3 4 5 6 7 8 9 10",
        "c3: 0 0 0 0 0 0 0 0 77 1",
    ]
    text = "\n".join(rows)
    assert sent_bytes(text) == {"lo": 9, "c3": 77}


def test_reports_count_connections() -> None:
    record = {
        "kind": "steps",
        "network": "bigraph",
        "algorithm": "hd",
        "bytes": 2048,
        "connection_bytes": [100, 50],
        "measured": [[100, 0], [10, 101]],
        "predicted": [[100, 0], [0, 100]],
    }
    assert connections(record, "measured") == [[1.0, 0.0], [0.2, 2.02]]
    assert most_connections(record, "predicted") == 2
    _, (_, _, rows) = tables([record])
    assert rows == [["bigraph", "hd", "2 KiB", 2, "2.02", "2"]]


@pytest.fixture(scope="module")
def privileged() -> Iterator[None]:
    if reason := namespaces.missing():
        pytest.skip(reason)
    try:
        with namespaces.locked():
            pass
    except LabError as error:
        pytest.skip(str(error))
    yield
    assert leftovers() == []


def leftovers() -> list[str]:
    """The lab's namespaces."""
    names = os.listdir(namespaces.NAMESPACES) if namespaces.NAMESPACES.is_dir() else []
    return [name for name in names if name.startswith(namespaces.PREFIX)]


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("privileged")
def test_eight_hosts_reduce_over_one_connection_per_link_and_step() -> None:
    settings = Settings(
        switches=4, ports=2, megabits=25, sizes=(1 << 16,), rounds=1, step_size=1 << 19
    )
    records = list(experiment("bigraph", settings, lambda _: None))
    assert [(each["kind"], each["algorithm"]) for each in records] == [
        (kind, algorithm) for algorithm in ("ring", "hd", "hdrm") for kind in ("time", "steps")
    ]
    assert not any(each["wrong"] for each in records)
    for each in records:
        if each["kind"] == "steps" and each["algorithm"] != "hd":
            measured, predicted = (connections(each, name) for name in ("measured", "predicted"))
            for seen, expected in zip(measured, predicted, strict=True):
                # Headers and acknowledgements; no second connection.
                assert all(
                    one <= found < one + 0.5 for found, one in zip(seen, expected, strict=True)
                ), each["algorithm"]
    assert leftovers() == []


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("privileged")
def test_shuffled_ranks_load_links_as_ranks_in_order() -> None:
    def steps(shuffle: int | None) -> list[list[float]]:
        settings = Settings(
            switches=4,
            ports=2,
            megabits=25,
            sizes=(1 << 16,),
            algorithms=("hdrm",),
            rounds=1,
            step_size=1 << 19,
            shuffle=shuffle,
        )
        records = list(experiment("bigraph", settings, lambda _: None))
        assert not any(each["wrong"] for each in records)
        return connections(records[-1], "measured")

    for one, other in zip(steps(None), steps(5), strict=True):
        # Headers and acknowledgements differ; connections do not.
        assert [round(share) for share in one] == [round(share) for share in other]
        assert max(one + other) < 1.5


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("privileged")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_network_is_removed_whatever_ends_the_lab(number: signal.Signals) -> None:
    options = ["--switches", "4", "--ports", "1", "--sizes", "16MiB", "--rate", "1"]
    # Shells start commands in the background with SIGINT ignored, which processes inherit.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "lab", *options],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, handler)
    assert process.stderr is not None
    # The first line comes once the ranks have joined.
    assert "round 1" in process.stderr.readline()
    assert len(leftovers()) == 8
    process.send_signal(number)
    # Before the end: the pipe might fill up.
    said = process.stderr.read()
    process.stderr.close()
    status = process.wait(60)
    if number == signal.SIGKILL:
        # Ranks end with their parent; the next lab removes the network.
        deadline = time.monotonic() + 30
        while processes_inside() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_inside() == []
        with namespaces.built(bigraph(2, 1), 10, 1500):
            assert len(leftovers()) == 4
    else:
        assert status == 128 + number, said
    assert leftovers() == []


def test_an_interrupted_command_to_an_ended_rank_raises_nothing_when_closed() -> None:
    ours, theirs = socket.socketpair()
    stream = ours.makefile("rw", encoding="utf-8")
    stream.write("interrupted before it was flushed")
    theirs.close()
    ranks.close(stream)
    ours.close()


def processes_inside() -> list[str]:
    """Processes in the lab's namespaces."""
    found: list[str] = []
    for name in leftovers():
        done = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        found += done.stdout.split()
    return found
