"""Lab command line: `python -m lab.rdma`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.program import UNAVAILABLE, guarded
from lab.rdma import kernel
from lab.rdma.bench import RATIOS, bench
from lab.rdma.check import check
from lab.rdma.guests import guests, unavailable
from lab.rdma.packages import GUEST, ensure
from lab.rdma.soak import soak

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; returns the exit status."""
    parsed = parser().parse_args(arguments)
    return guarded("rdma-lab", lambda: perform(parsed))


def perform(parsed: argparse.Namespace) -> int:
    """Run a command; returns the exit status."""
    if parsed.do == "kernel":
        return build(parsed)
    if reason := unavailable():
        print(f"rdma-lab cannot run here: {reason}", file=sys.stderr)
        return UNAVAILABLE
    commands = {"check": check_guests, "bench": measure, "soak": soak_guests, "run": run}
    return commands[parsed.do](parsed)


def parser() -> argparse.ArgumentParser:
    """Commands and options."""
    made = argparse.ArgumentParser(
        prog="python -m lab.rdma", description="Guests with rxe devices (RoCEv2 in software)"
    )
    json_option = argparse.ArgumentParser(add_help=False)
    json_option.add_argument("--json", action="store_true", help="result as one JSON line")
    commands = made.add_subparsers(dest="do", required=True, metavar="COMMAND")
    add = commands.add_parser
    add("kernel", parents=[json_option], help="build the guests' kernel into the cache")
    add("check", parents=[json_option], help="devices on two guests and a ping-pong between them")
    measuring = add(
        "bench",
        parents=[json_option],
        help="transfers between two guests: Weft beside perftest, and beside ucx_perftest and"
        " fi_pingpong if they are in PATH",
    )
    option = measuring.add_argument
    option("--program", type=Path, required=True, metavar="FILE", help="weft-bench-fabric")
    option(
        "--perftest",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="ib_write_lat and ib_write_bw with --write_with_imm",
    )
    option("--rounds", type=int, default=30, metavar="N", help="rounds (default %(default)s)")
    soaking = add(
        "soak",
        parents=[json_option],
        help="counted writes between two guests over links that lose frames, checked byte for byte",
    )
    option = soaking.add_argument
    option("--program", type=Path, required=True, metavar="FILE", help="weft-bench-fabric")
    option(
        "--writes",
        type=int,
        default=100_000,
        metavar="N",
        help="least writes per rank (default %(default)s)",
    )
    option(
        "--drop",
        type=float,
        default=0.001,
        metavar="P",
        help="probability that a frame is lost (default %(default)s)",
    )
    option(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed for sizes and lost frames (default %(default)s)",
    )
    option(
        "--seconds",
        type=int,
        default=1200,
        metavar="SECONDS",
        help="time limit for the writes (default %(default)s)",
    )
    running = add("run", parents=[json_option], help="a command in each guest at once")
    option = running.add_argument
    option("--count", type=int, default=2, metavar="N", help="guests (default %(default)s)")
    option(
        "--drop",
        type=float,
        default=0.0,
        metavar="P",
        help="probability that a frame between two guests is lost (default 0)",
    )
    option(
        "--delay",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time that a frame takes between two guests (default 0)",
    )
    option("--seed", type=int, default=0, metavar="N", help="seed for lost frames (default 0)")
    option(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time limit for the command (default %(default)s)",
    )
    option(
        "command",
        nargs="+",
        metavar="ARGUMENT",
        help="program and its arguments; $LAB_GUEST in its environment is the guest's index",
    )
    return made


def build(parsed: argparse.Namespace) -> int:
    """Install the packages and build the kernel; print the path."""

    def report(line: str) -> None:
        print(f"rdma-lab: {line}", file=sys.stderr, flush=True)

    ensure(GUEST, report)
    path = str(kernel.build(report))
    print(json.dumps({"kernel": path}) if parsed.json else path)
    return 0


def check_guests(parsed: argparse.Namespace) -> int:
    """Check two guests and print the figures."""
    found = check()
    if parsed.json:
        print(json.dumps(found))
        return 0
    print(f"2 guests booted in {found['boot_s']:.1f} s, halted in {found['halt_s']:.1f} s")
    for guest, devices in found["devices"].items():
        print(f"{guest}: {', '.join(devices)}; with siw: {', '.join(found['siw'])}")
    for device, time in found["pingpong_us"].items():
        print(f"{device}: {time:.1f} us for a round trip of ibv_rc_pingpong")
    return 0


def measure(parsed: argparse.Namespace) -> int:
    """Measure transfers; JSON lines, or a line for each pattern and size."""

    def report(line: str) -> None:
        print(f"rdma-lab: {line}", file=sys.stderr, flush=True)

    for line in bench(parsed.program.resolve(), parsed.perftest.resolve(), parsed.rounds, report):
        if parsed.json:
            print(json.dumps(line))
            continue
        others = [
            f"{name} {line[f'{name}_us']:.2f} us, ratio {line[key]:.2f}"
            for name, key in RATIOS.items()
            if key in line
        ]
        print(
            f"{line['pattern']} of {line['bytes']} B: Weft {line['weft_us']:.2f} us;"
            f" {'; '.join(others)}"
        )
    return 0


def soak_guests(parsed: argparse.Namespace) -> int:
    """Check counted writes; a JSON line, or a line for each rank and network."""
    found = soak(parsed.program.resolve(), parsed.writes, parsed.drop, parsed.seed, parsed.seconds)
    if parsed.json:
        print(json.dumps(found))
        return 0
    for rank, result in enumerate(found["ranks"]):
        print(
            f"rank {rank}: {result['writes']} writes, {result['bytes'] / 1e6:.1f} MB and"
            f" {result['raises']} raises checked in {result['seconds']:.0f} s"
        )
    for network, frames in enumerate(found["networks"]):
        print(
            f"network {network}: {frames['dropped']} frames lost, {frames['forwarded']} forwarded"
        )
    return 0


def run(parsed: argparse.Namespace) -> int:
    """Run a command in each guest; the greatest exit status."""

    def show(guest: int, line: str) -> None:
        print(f"guest {guest}: {line}", flush=True)

    with guests(
        parsed.count,
        parsed.drop,
        parsed.delay,
        parsed.seed,
        show=None if parsed.json else show,
    ) as lab:
        commands = dict.fromkeys(range(parsed.count), parsed.command)
        outcomes = lab.run(commands, parsed.timeout, check=False)
    if parsed.json:
        results: list[dict[str, Any]] = [asdict(each) for each in outcomes.values()]
        print(json.dumps(results))
    return max(1 if each.status is None else each.status for each in outcomes.values())
