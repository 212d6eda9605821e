"""The Soft-RoCE laboratory; `make rdma-lab` runs it all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lab.errors import LabError
from lab.rdma import bench, peers, soak
from lab.rdma.check import devices, pingpong
from lab.rdma.guest import Stream
from lab.rdma.guests import Guests, Outcome, address, guests, unavailable
from lab.rdma.kernel import CONFIG, options
from lab.rdma.packages import ensure
from lab.rdma.run import main
from lab.rdma.switch import LIMIT, Switch, Wire
from tests import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMAND = [sys.executable, "-m", "lab.rdma"]
without_guests = pytest.mark.skipif(
    "TEST_RDMA_LAB" not in os.environ,
    reason="TEST_RDMA_LAB is not set; `make rdma-lab` builds the guests' kernel and sets it",
)
BROADCAST = b"\xff" * 6


def needs_guests(test: Callable[..., None]) -> Callable[..., None]:
    """A test with guests, which boot within seconds even on a busy machine."""
    marked: Callable[..., None] = pytest.mark.timeout(120)(without_guests(test))
    return marked


def hardware(port: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, port])


def frame(to: bytes, sender: int, text: bytes = b"") -> bytes:
    return to + hardware(sender) + b"\x08\x00" + text


def test_frames_to_unknown_addresses_go_to_all_other_ports_and_known_ones_to_theirs() -> None:
    switch = Switch(3)
    switch.receive(0, frame(BROADCAST, 0), 0.0)
    assert [port for port, _ in switch.departures(0.0)] == [1, 2]
    switch.receive(2, frame(hardware(0), 2), 0.0)
    assert list(switch.departures(0.0)) == [(0, frame(hardware(0), 2))]
    switch.receive(2, frame(hardware(2), 2), 0.0)
    switch.receive(2, b"short", 0.0)
    assert list(switch.departures(0.0)) == []


def test_frames_leave_after_their_delay_in_order() -> None:
    switch = Switch(2, delay_s=0.5)
    for number in range(3):
        switch.receive(0, frame(BROADCAST, 0, bytes([number])), number / 10)
    assert switch.next_departure() == 0.5
    assert list(switch.departures(0.4)) == []
    assert [each[-1] for _, each in switch.departures(0.6)] == [0, 1]
    assert [each[-1] for _, each in switch.departures(1.0)] == [2]
    assert switch.next_departure() is None


def test_a_seed_selects_the_lost_frames() -> None:
    def lost(seed: int) -> list[int]:
        switch = Switch(2, drop=0.1, seed=seed)
        for number in range(200):
            switch.receive(0, frame(BROADCAST, 0, bytes([number])), 0.0)
        arrived = {each[-1] for _, each in switch.departures(0.0)}
        assert switch.dropped == 200 - len(arrived)
        return sorted(set(range(200)) - arrived)

    assert lost(1) == lost(1)
    assert lost(1) != lost(2)
    assert 5 < len(lost(1)) < 40


def soaked(**changes: float) -> list[dict[str, float]]:
    """Right results on two ranks, with changes on rank 1."""
    right = {"writes": 100, "seconds": 2.0, "wrong_counts": 0, "wrong_writes": 0}
    return [right, right | changes]


def test_a_soak_with_a_wrong_figure_fails() -> None:
    soak.check(soaked(), 100, 0.01, [3, 5])
    soak.check(soaked(), 100, 0.0, [0, 0])
    for results, dropped, message in (
        (soaked(wrong_writes=1), [3, 5], "rank 1: wrong_writes 1: expected 0"),
        (soaked(wrong_counts=2), [3, 5], "rank 1: wrong_counts 2: expected 0"),
        (soaked(writes=99), [3, 5], "rank 1: 99 writes in 2 s: expected 100; allow more --seconds"),
        (soaked(), [3, 0], "network 1: lost no frame: expected some; raise --drop"),
    ):
        with pytest.raises(LabError, match=message):
            soak.check(results, 100, 0.01, dropped)


@pytest.mark.parametrize("argument", ["writes", "seed", "limit_s"])
def test_a_soak_with_an_argument_out_of_range_starts_no_guest(argument: str) -> None:
    values = {"writes": 1, "seed": 0, "limit_s": 1} | {argument: -1}
    with pytest.raises(LabError, match=r"-1: expected at least [01]"):
        soak.soak(Path("weft-bench-fabric"), drop=0.0, **values)


class Printing(Guests):
    """Guests whose commands print these lines in turn."""

    def __init__(self, *lines: str) -> None:
        super().__init__([], [], Path())
        self.lines = list(lines)

    def run(self, *_arguments: object, **_options: object) -> dict[int, Outcome]:
        line = self.lines.pop(0)
        return {guest: Outcome(guest, "ib_write_bw", 0, line, "") for guest in (0, 1)}


def test_perftest_runs_again_until_it_has_a_figure() -> None:
    none, some = " 64 16 0.000000 0.000000 0.0", " 64 16 0.002000 0.001000 0.1"
    lab = Printing(none, " 64 16 inf inf inf", some, some)
    assert bench.result(lab, ["ib_write_bw"], 64, 3) == 0.001
    assert len(lab.lines) == 1
    with pytest.raises(LabError, match="ib_write_bw, 64 bytes: no figure in 10 runs; repeat on"):
        bench.result(Printing(*[none] * 10), ["ib_write_bw"], 64, 3)
    with pytest.raises(LabError, match="expected a line of 64 bytes"):
        bench.result(Printing(" 65 16 1.0 1.0 1.0"), ["ib_write_bw"], 64, 3)


def test_records_have_the_ratios_of_the_libraries_that_were_measured() -> None:
    times = {
        ("ping-pong", 8, "weft"): [2.0, 4.0, 8.0],
        ("ping-pong", 8, "perftest"): [4.0, 4.0, 4.0],
        ("ping-pong", 8, "libfabric"): [8.0, 8.0, 8.0],
        ("stream", 8, "weft"): [1.0],
        ("stream", 8, "perftest"): [0.5],
    }
    measured = {"rounds": 3, "weft_us": 4.0, "perftest_us": 4.0, "ratio": 1.0}
    own = {"benchmark": "rdma_lab", "bytes": 8}
    assert bench.records(times) == [
        own | {"pattern": "ping-pong", "libfabric_us": 8.0, "libfabric_ratio": 2.0} | measured,
        own | {"pattern": "stream", "rounds": 1, "weft_us": 1.0, "perftest_us": 0.5, "ratio": 0.5},
    ]


def test_peers_are_found_in_path_and_missing_ones_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "fi_pingpong"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    lines: list[str] = []
    found = peers.installed(lines.append)
    assert [(peer.name, path) for peer, path in found] == [("libfabric", str(program))]
    assert lines == ["ucx is skipped: no ucx_perftest in PATH (package ucx-utils)"]


def test_a_figure_of_a_peer_is_read_from_the_last_line() -> None:
    text = "bytes #sent usec/xfer\n4k 200 66.5\n"
    assert peers.figure(text, "fi_pingpong", 3, 2) == 66.5
    for wrong, column in ((text, 0), ("", 2), (text + "error\n", 2), ("4k 200 -nan\n", 2)):
        with pytest.raises(LabError, match=r"fi_pingpong: expected a number in column \d of 3"):
            peers.figure(wrong, "fi_pingpong", 3, column)


@contextlib.contextmanager
def wire(switch: Switch) -> Iterator[list[socket.socket]]:
    """Guest ends at a switch."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(switch.ports)]
    running = Wire(switch, [other for _, other in pairs])
    running.start()
    try:
        for mine, _ in pairs:
            mine.settimeout(10)
        yield [mine for mine, _ in pairs]
    finally:
        running.close()
        for mine, _ in pairs:
            mine.close()


def test_a_wire_keeps_frames_for_a_guest_that_is_slow_and_their_order() -> None:
    with wire(Switch(2)) as (one, two):
        for number in range(1000):
            one.send(frame(hardware(1), 0, number.to_bytes(2)))
        for number in range(1000):
            assert two.recv(2000) == frame(hardware(1), 0, number.to_bytes(2))


def test_a_guest_that_does_not_receive_loses_frames_beyond_the_queue_alone() -> None:
    switch = Switch(3)
    with wire(switch) as (one, two, three):
        three.send(frame(BROADCAST, 2))
        assert one.recv(2000)
        assert two.recv(2000)
        for _ in range(LIMIT + 2000):
            one.send(frame(hardware(2), 0))
        one.send(frame(BROADCAST, 0))
        assert two.recv(2000) == frame(BROADCAST, 0)
        # The socket's own queue takes some frames.
        assert 0 < switch.overflows <= 2000


def test_a_guest_that_ends_leaves_the_others_connected() -> None:
    with wire(Switch(3)) as (one, two, three):
        three.close()
        for _ in range(3):
            one.send(frame(BROADCAST, 0))
            assert two.recv(2000) == frame(BROADCAST, 0)


def test_output_ends_at_its_mark_wherever_reads_divide_it() -> None:
    whole = b"one\ntwo\x1e 17\n"
    for cut in range(len(whole)):
        shown: list[str] = []
        stream = Stream(shown.append)
        stream.feed(whole[:cut])
        stream.feed(whole[cut:])
        assert (stream.status, stream.text(), shown) == (17, "one\ntwo", ["one", "two"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"count": 0}, "count 0: expected 1 to 16 guests"),
        ({"count": 17}, "count 17: expected 1 to 16 guests"),
        ({"drop": 1.5}, "drop 1.5: expected a probability from 0 to 1"),
        ({"drop": -0.1}, "drop -0.1: expected a probability from 0 to 1"),
        ({"delay_s": 11}, "delay_s 11: expected 0 to 10 seconds"),
    ],
)
def test_values_outside_of_their_ranges_are_rejected(
    arguments: dict[str, float], text: str
) -> None:
    with pytest.raises(LabError, match=re.escape(text)), guests(**arguments):  # type: ignore[arg-type]
        pass


def test_without_a_kernel_the_reason_and_the_remedy_are_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    reason = "the guests' kernel is not in the cache: run `make rdma-kernel`"
    assert unavailable() == reason
    with pytest.raises(LabError, match=re.escape(reason)), guests():
        pass
    assert main(["check"]) == 69
    assert capsys.readouterr().err == f"rdma-lab cannot run here: {reason}\n"


def test_a_package_that_cannot_be_installed_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("lab.rdma.packages.version", lambda _: None)
    remedy = "packages no-such: missing; run as root: apt-get install no-such"
    with pytest.raises(LabError, match=remedy):
        ensure(["no-such"], print)


def test_options_of_the_kernel_are_listed_once() -> None:
    listed = list(options(CONFIG))
    assert len(set(listed)) == len(listed)
    assert {"CONFIG_RDMA_RXE=y", "CONFIG_RDMA_SIW=y", "CONFIG_HIGH_RES_TIMERS=y"} <= set(listed)


def on_both(*command: str) -> dict[int, tuple[str, ...]]:
    return dict.fromkeys((0, 1), command)


@pytest.fixture(scope="module")
def lab() -> Iterator[Guests]:
    """Two guests joined directly, for the tests that leave them as they are."""
    with guests(count=2) as booted:
        yield booted


@needs_guests
def test_guests_have_two_rxe_devices_and_run_the_programs_of_the_host(lab: Guests) -> None:
    for guest in (0, 1):
        found = devices(lab, guest)
        assert {name: each["state"] for name, each in found.items()} == {
            "rxe0": "PORT_ACTIVE (4)",
            "rxe1": "PORT_ACTIVE (4)",
        }
        assert {each["active_mtu"] for each in found.values()} == {"4096 (5)"}
    script = "import os, ssl; print(os.environ['LAB_GUEST'], os.environ['EXTRA'], os.getcwd())"
    environment = {"EXTRA": "a 'b' $c"}
    outcomes = lab.run(on_both(sys.executable, "-c", script), 30, environment, directory=ROOT)
    assert [each.stdout for each in outcomes.values()] == [
        f"{guest} a 'b' $c {ROOT}\n" for guest in (0, 1)
    ]


@needs_guests
def test_guests_write_their_folder_and_no_other_file_of_the_host(lab: Guests) -> None:
    script = f"echo $LAB_GUEST > {lab.folder}/by-$LAB_GUEST; touch /tmp/by-guest; ! touch /by-guest"
    outcomes = lab.run(on_both("sh", "-c", script), 30)
    assert [lab.folder.joinpath(f"by-{guest}").read_text() for guest in (0, 1)] == ["0\n", "1\n"]
    assert "Read-only file system" in outcomes[0].stderr
    assert not Path("/tmp/by-guest").exists()


@needs_guests
def test_statuses_and_both_outputs_come_back(lab: Guests) -> None:
    outcomes = lab.run(
        {0: ["sh", "-c", "echo out; echo err >&2; exit 3"], 1: ["true"]}, 30, check=False
    )
    assert (outcomes[0].status, outcomes[0].stdout, outcomes[0].stderr) == (3, "out\n", "err\n")
    assert outcomes[1].status == 0
    with pytest.raises(LabError, match="guest 1: false: exit status 1"):
        lab.run({1: ["false"]}, 30)
    with pytest.raises(LabError, match="guest 2: expected 0 to 1"):
        lab.run({2: ["true"]}, 30)
    large = lab.run({0: ["seq", "20000"]}, 30)[0].stdout
    assert large == "".join(f"{number}\n" for number in range(1, 20001))


@needs_guests
@pytest.mark.parametrize("network", [0, 1])
def test_pingpong_runs_over_each_network(lab: Guests, network: int) -> None:
    assert pingpong(lab, network, "--iters", "200") > 0


@needs_guests
def test_timers_of_guests_are_exact_to_a_few_milliseconds(lab: Guests) -> None:
    script = (
        "import time; begin = time.monotonic(); [time.sleep(0.001) for _ in range(100)];"
        "print(time.monotonic() - begin)"
    )
    outcome = lab.run({0: [sys.executable, "-c", script]}, 30)[0]
    # With the kernel's 100 Hz default without high-resolution timers: 2 s.
    assert 0.1 <= float(outcome.stdout) < 1.5


def ping(lab: Guests, to: int, *options: str) -> str:
    """`ping` output from guest 0."""
    command = ["ping", "-n", "-q", *options, address(to)]
    return lab.run({0: command}, 60, check=False)[0].stdout


def loss(output: str) -> float:
    """Lost packets in percent."""
    return float(re.findall(r"([\d.]+)% packet loss", output)[0])


@needs_guests
def test_switches_of_three_guests_delay_and_lose_frames_as_configured() -> None:
    with guests(count=3, switched=True) as lab:
        for guest in (1, 2):
            assert loss(ping(lab, guest, "-c", "3", "-i", "0.01")) == 0
        lab.switches[0].delay_s = 0.05
        round_trip = re.findall(r"min/avg/max/mdev = ([\d.]+)", ping(lab, 1, "-c", "3"))
        assert 100 <= float(round_trip[0]) < 250
        lab.switches[0].delay_s = 0.0
        lab.switches[0].drop = 0.2
        lost = loss(ping(lab, 2, "-c", "200", "-i", "0.005", "-W", "1"))
        # Both ways: 36 %.
        assert 15 < lost < 60
        lab.switches[0].drop = 0.0
        assert pingpong(lab, 1, "--iters", "100") > 0
        lab.stop(1)
        assert lab.alive(1)
        assert loss(ping(lab, 1, "-c", "3", "-i", "0.01", "-W", "1")) == 100
        lab.resume(1)
        assert loss(ping(lab, 1, "-c", "3", "-i", "0.2")) == 0
        lab.start({2: ["sleep", "100"]})
        lab.kill(2)
        assert not lab.alive(2)
        assert loss(ping(lab, 2, "-c", "3", "-i", "0.01", "-W", "1")) == 100
        with pytest.raises(LabError, match="guest 2: sleep 100: the guest has ended"):
            lab.finish([2], 30)
        with pytest.raises(LabError, match="guest 2: has ended"):
            lab.run({2: ["true"]}, 30)


@needs_guests
def test_a_command_beyond_its_limit_ends_its_guest_with_the_output_so_far() -> None:
    with guests(count=1) as lab:
        message = r"not finished within 1 s; guests killed:\nguest 0: .*\n  begun"
        with pytest.raises(LabError, match=message):
            lab.run({0: ["sh", "-c", "echo begun; sleep 100"]}, 1)
        assert not lab.alive(0)


def group_sizes(groups: list[int]) -> list[int]:
    """Process count in each process group, without those that only wait to be reaped."""
    command = ["ps", "-e", "-o", "pgid=", "-o", "state="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [int(line.split()[0]) for line in listed.splitlines() if line.split()[1] != "Z"]
    return [found.count(group) for group in groups]


@needs_guests
def test_all_processes_of_guests_end_with_the_block() -> None:
    with guests(count=2) as lab:
        groups = [member.process.pid for member in lab.members]
        lab.start({0: ["sleep", "100"]})
        assert all(group_sizes(groups))
    assert group_sizes(groups) == [0, 0]
    assert not lab.folder.exists()


@needs_guests
def test_all_processes_of_guests_end_with_a_killed_lab() -> None:
    command = [*COMMAND, "run", "--count", "2", "--", "sh", "-c", "echo $LAB_FOLDER; sleep 100"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = process.stdout.readline().split()[-1]
    assert processes_of(folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 20
    while processes_of(folder) or Path(folder).exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def processes_of(folder: str) -> list[bytes]:
    """Command lines with this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return [line for line in found if folder.encode() in line]


@needs_guests
def test_the_command_line_prints_results_as_json() -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.stdout, done.stderr
        return done.returncode, done.stdout

    status, text = run("run", "--json", "--count", "1", "--", "sh", "-c", "echo hi; exit 4")
    (outcome,) = json.loads(text)
    assert (status, outcome["status"], outcome["stdout"]) == (4, 4, "hi\n")
    status, text = run("check", "--json")
    found = json.loads(text)
    assert status == 0
    assert found["siw"] == ["siw0", "siw1"]
    assert set(found["pingpong_us"]) == {"rxe0", "rxe1"}
