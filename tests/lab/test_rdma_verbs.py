"""Provider verbs in guests with rxe devices, over two NICs; `make rdma-lab` runs it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import pytest

from lab.rdma.check import add_siw
from lab.rdma.guests import address, guests
from tests import ROOT
from tests.lab import rdma
from tests.moe.test_moe import CASES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lab.rdma.guests import Guests

pytestmark = rdma.needs_guests

#: Rendezvous port for Python ranks.
PORT = 7200
#: Repeats a packet after 67 ms, for links that lose some.
LOSSY = {"WEFT_VERBS_ACK_TIMEOUT": "14"}
#: Variables for proxies over verbs.
PROXIES = LOSSY | {"WEFT_TEST_PROVIDER": "verbs"}
#: Variables for ranks that notice a silent host within two seconds.
IMPATIENT = {"WEFT_SILENCE_TIMEOUT": "2", "WEFT_VERBS_ACK_TIMEOUT": "14"}


@pytest.fixture(scope="module")
def lab() -> Iterator[Guests]:
    with guests(count=3) as booted:
        yield booted


def python_ranks(
    lab: Guests, worker: str, arguments: dict[str, object], environment: dict[str, str]
) -> list[int]:
    """Start a `workers` function with one rank in each guest; the guests."""
    command = [sys.executable, "-m", "tests.workers", worker, json.dumps(arguments)]
    members = range(len(lab.members))
    common = {
        "WEFT_WORLD_SIZE": str(len(members)),
        "WEFT_ADDR": address(0),
        "WEFT_PORT": str(PORT),
        "WEFT_PROVIDERS": "verbs",
        "WEFT_SECRET": "of these guests",
        "TEST_RESULTS": str(lab.folder),
    }
    for rank in members:
        own = {"WEFT_RANK": str(rank), "WEFT_BIND": address(rank)}
        directory = ROOT
        lab.start({rank: command}, common | own | environment, directory=directory)
    return list(members)


def test_the_conformance_suite_passes(lab: Guests) -> None:
    # Guest 0 has the provider, guest 1 the same behind the hostile wrapper.
    common = [rdma.binary("conformance"), "--test-threads=1"]
    commands = {0: [*common, "verbs::", "--skip", "hostile"], 1: [*common, "hostile_verbs::"]}
    outcomes = lab.run(commands, 220)
    for guest, outcome in outcomes.items():
        assert rdma.passed_all(outcome, commands[guest]), outcome
        assert "no active RDMA NIC" not in outcome.stdout, outcome


def test_devices_are_found_and_named(lab: Guests) -> None:
    outcome = lab.run({0: [rdma.binary("verbs"), "--nocapture"]}, 60)[0]
    assert "NICs: rxe0:1,rxe1:1" in outcome.stdout, outcome


def test_an_iwarp_device_is_refused_by_name(lab: Guests) -> None:
    program = "import weft; weft.init(rank=0, world_size=2, providers=['verbs'])"
    start = f'{add_siw()}; WEFT_VERBS_DEVICES=siw0 {sys.executable} -c "{program}"'
    outcome = lab.run({2: ["sh", "-c", start]}, 60, check=False, directory=ROOT)[2]
    assert "ProviderError" in outcome.stderr, outcome
    assert "siw0: an iWARP device, which has no immediates; use the provider tcp" in outcome.stderr


def test_a_device_without_on_demand_paging_is_refused_by_name_and_doctor_names_it(
    lab: Guests,
) -> None:
    program = "import weft; weft.init(rank=0, world_size=2, providers=['verbs'])"
    always = {"WEFT_VERBS_ON_DEMAND_PAGING": "always"}
    refused, doctor = (
        lab.run({1: [sys.executable, *each]}, 60, always, check=False, directory=ROOT)[1]
        for each in (["-c", program], ["-m", "weft", "doctor"])
    )
    assert "ProviderError" in refused.stderr, refused
    expected = "rxe0:1: WEFT_VERBS_ON_DEMAND_PAGING=always: the device or its driver has no "
    assert expected in refused.stderr
    rows = [line for line in doctor.stdout.splitlines() if "on-demand paging" in line]
    assert any("none: rxe0, rxe1" in row for row in rows), doctor


def test_ranks_of_three_guests_write_to_each_other(lab: Guests) -> None:
    name = "verbs::processes_write_random_pages_to_each_other"
    command = rdma.ranks("conformance", name, 3)
    outcomes = lab.run(dict.fromkeys(range(3), command), 100, directory=ROOT)
    assert all("1 passed" in each.stdout for each in outcomes.values()), outcomes


def test_nothing_is_lost_on_links_that_lose_and_delay_packets() -> None:
    with guests(count=3, drop=0.01, delay_s=0.001, seed=7) as lab:
        name = "verbs::processes_write_random_pages_to_each_other"
        command = rdma.ranks("conformance", name, 3)
        outcomes = lab.run(dict.fromkeys(range(3), command), 150, LOSSY, directory=ROOT)
        assert all("1 passed" in each.stdout for each in outcomes.values()), outcomes
        assert all(switch.dropped > 10 for switch in lab.switches)
        dropped = [switch.dropped for switch in lab.switches]
        # Puts of kernels on the CPU, by proxies.
        command = proxy_ranks("puts_between_processes_arrive_whole_and_in_their_rounds", 3)
        outcomes = lab.run(dict.fromkeys(range(3), command), 150, PROXIES, directory=ROOT)
        assert all("1 passed" in each.stdout for each in outcomes.values()), outcomes
        assert sum(switch.dropped for switch in lab.switches) > sum(dropped) + 10


def test_tokens_of_three_guests_are_dispatched_and_combined(lab: Guests) -> None:
    members = python_ranks(lab, "moe.rounds.cases", {"cases": CASES[::3], "seed": 5}, {})
    lab.finish(members, 120)
    for rank in members:
        assert json.loads((lab.folder / str(rank)).read_text(encoding="utf-8")) == []


def test_pairs_are_formed_and_end_within_a_guest(lab: Guests) -> None:
    command = [rdma.binary("pairs"), "--test-threads=1", "--nocapture", "ends::"]
    # Pairs over libfabric take ten times as long to form, and are tested elsewhere.
    outcome = lab.run({1: command}, 120, {"WEFT_LIBFABRIC": "/absent"})[1]
    assert rdma.passed_all(outcome, command), outcome
    assert "skipped over verbs" not in outcome.stdout, outcome


def test_a_pair_of_two_guests_exchanges_messages(lab: Guests) -> None:
    members = python_ranks(lab, "group.verbs.pair", {"port": PORT + 1, "messages": 200}, {})
    lab.finish(members, 120)
    answers = json.loads((lab.folder / "1").read_text(encoding="utf-8"))
    assert answers == [2 * number for number in range(200)]


def test_queries_take_the_nics_of_the_addresses_of_their_connections(lab: Guests) -> None:
    port, absent = PORT + 2, "10.9.0.2"
    first, second = (f"{address(0, network)}:{port}" for network in (0, 1))
    cases = {
        "first by source": f"{first}@{address(1, 0)}",
        "second by source": f"{second}@{address(1, 1)}",
        "second by its route": f"{second}@auto",
        "both": f"{first}@{address(1, 0)},{second}@{address(1, 1)}",
    }
    arguments: dict[str, object] = {"port": port, "cases": cases, "absent": absent}
    members = python_ranks(lab, "group.verbs.dispatch", arguments, {})
    lab.finish(members, 120)
    found = json.loads((lab.folder / "1").read_text(encoding="utf-8"))
    sends = {case: [count > 0 for count in packets] for case, packets in found["packets"].items()}
    only_second = [False, True]
    assert sends == {
        "first by source": [True, False],
        "second by source": only_second,
        "second by its route": only_second,
        "both": [True, True],
    }
    assert f"source {absent}: expected an address of an RDMA NIC: rxe0:1 has " in found["error"]
    assert f"{address(1, 0)}" in found["error"]
    assert f"{address(1, 1)}" in found["error"]


@pytest.mark.parametrize(
    "environment", [{}, {"RDMAV_FORK_SAFE": "1"}], ids=["default", "fork-safe"]
)
def test_workers_forked_by_ranks_do_no_harm(lab: Guests, environment: dict[str, str]) -> None:
    members = python_ranks(lab, "group.verbs.fork_loaders", {}, environment)
    lab.finish(members, 120)
    for rank in members:
        found = json.loads((lab.folder / str(rank)).read_text(encoding="utf-8"))
        assert found == {
            "provider": "verbs",
            "wrong": [],
            "errors": ["ForkError"] * 80,
            "exits": ["exit 7", "exit 8", "exit -9", "exit 0"],
        }


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_guest_that_is_killed_or_stopped_is_named(how: str) -> None:
    # Behind a switch: without a peer, a cable keeps the frames, and these the queue pairs.
    with guests(count=2, switched=True) as lab:
        started = lab.folder / "started"
        python_ranks(lab, "group.verbs.until_lost", {"started": str(started)}, IMPATIENT)
        wait_for(started, lab)
        (lab.kill if how == "kill" else lab.stop)(1)
        outcome = lab.finish([0], 60)[0]
        found = json.loads((lab.folder / "0").read_text(encoding="utf-8"))
        assert found["rank"] == 1, outcome
        assert found["seconds"] < 10, found
        lab.kill(1)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_waits_of_a_proxys_kernels_end_when_a_guest_is_killed_or_stopped(how: str) -> None:
    with guests(count=2, switched=True) as lab:
        started = lab.folder / "started"
        command = proxy_ranks("a_lost_rank_is_named_and_ends_waits", 2)
        settings = PROXIES | {"WEFT_TEST_STARTED": str(started), "WEFT_TEST_RANKS": "2"}
        for member in (0, 1):
            lab.start({member: command}, settings, directory=ROOT)
        wait_for(started, lab)
        (lab.kill if how == "kill" else lab.stop)(1)
        outcome = lab.finish([0], 60)[0]
        assert "1 passed" in outcome.stdout, outcome
        lab.kill(1)


def proxy_ranks(name: str, size: int) -> list[str]:
    """Command for each of `size` guests: one rank in a test of proxies."""
    return rdma.ranks("proxy_ranks", name, size, package="weft-gpu")


def wait_for(started: Path, lab: Guests) -> None:
    """Wait until rank 0 has made its file."""
    end = time.monotonic() + 60
    while not started.exists():
        assert lab.alive(0), lab.member(0).outcome()
        assert time.monotonic() < end, lab.member(0).outcome()
        time.sleep(0.05)
