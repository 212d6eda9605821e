"""Simulator benchmark: processor time, and virtual times compared with SimGrid's.

Every case is an all-reduce whose time depends only on links. In each round every side simulates it
once, in a separate process, and prints the processor time after the network was built. SimGrid's
C++ engine (see https://simgrid.org) reads links, routes and messages from a file; Weft computes
routes and connections during the run. A missing SimGrid is recorded, and the other sides are
measured. Appends to results/simulator.jsonl.

Exit status 1 if virtual times differ by more than 1 %, or, with --strict, if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, append_records, first_line, origin

TARGET = RESULTS / "simulator.jsonl"
#: Largest relative difference in virtual times.
AGREEMENT = 0.01
#: Timeout for one run on one side.
PATIENCE_SECONDS = 300

LINKS = "gbps=100,latency_us=0.5"
TREE_16 = f"fat-tree:leaves=4,spines=2,hosts=4,{LINKS}"
TREE_128 = f"fat-tree:leaves=16,spines=8,hosts=8,{LINKS}"
TREE_512 = f"fat-tree:leaves=32,spines=16,hosts=16,{LINKS}"
TREE_4096 = f"fat-tree:leaves=128,spines=32,hosts=32,{LINKS}"
BIGRAPH_65536 = f"bigraph:switches=1024,endpoints=64,{LINKS}"


@dataclass(frozen=True)
class Case:
    """A 256 MiB all-reduce, the sides that simulate it, and the executor's budgets."""

    name: str
    algorithm: str
    ranks: int
    topology: str
    routing: str = "static"
    #: Random rank placement.
    shuffled: bool = False
    #: Sides beside the executor: the bare engine, and SimGrid with different update modes.
    sides: tuple[str, ...] = ("engine",)
    #: The side compared with SimGrid.
    compared: str = "executor"
    cpu_s: float | None = None
    peak_gib: float | None = None

    def options(self) -> list[str]:
        """Command-line options for `weft-bench-sim`."""
        options = ["--algorithm", self.algorithm, "--ranks", str(self.ranks)]
        options += ["--topology", self.topology, "--routing", self.routing]
        return options + (["--shuffle", "1"] if self.shuffled else [])


ALL = ("engine", "SimGrid Lazy", "SimGrid Full")
# SimGrid shares links by inverse latency, Weft equally: where links are shared, all routes have the
# same latency. Unlike SimGrid, the executor sends a connection's writes one by one.
CASES = [
    Case("ring, static routes", "ring", 512, TREE_512, sides=ALL, cpu_s=0.12),
    Case("halving-doubling", "hd", 512, TREE_512, sides=ALL, cpu_s=0.002),
    Case("ring, hashed routes", "ring", 512, TREE_512, "ecmp", cpu_s=3),
    Case("ring, hashed routes, neighbours far apart", "ring", 512, TREE_512, "ecmp", True, cpu_s=3),
    Case("ring, 4096 ranks", "ring", 4096, TREE_4096, cpu_s=10),
    Case("HDRM", "hdrm", 65536, BIGRAPH_65536, "unique", sides=(), cpu_s=10, peak_gib=8),
    Case("ring, 16 ranks", "ring", 16, TREE_16, sides=ALL),
    Case("halving-doubling, 16 ranks", "hd", 16, TREE_16, sides=ALL),
    Case(
        "ring, links shared",
        "ring",
        128,
        f"{TREE_128},trunk_latency_us=0",
        shuffled=True,
        sides=("engine", "SimGrid Full"),
        compared="engine",
    ),
    Case(
        "halving-doubling, links shared",
        "hd",
        512,
        f"{TREE_512},trunk_latency_us=0",
        shuffled=True,
        sides=("engine", "SimGrid Full"),
        compared="engine",
    ),
]


def main() -> int:
    """All cases; 1 if virtual times disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", type=Path, required=True, help="the program weft-bench-sim")
    parser.add_argument("--simgrid", type=Path, required=True, help="folder for SimGrid's program")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default %(default)s)")
    parser.add_argument(
        "--cases",
        default="",
        help="run only cases whose name has this substring, for example fat-tree",
    )
    parser.add_argument("--strict", action="store_true", help="exit status 1 after a missed budget")
    parser.add_argument("--results", type=Path, default=TARGET, help="default %(default)s")
    arguments = parser.parse_args()
    simgrid = build_simgrid(arguments.simgrid)
    where = origin(rustc=first_line("rustc", "--version"), simgrid=simgrid)
    lines: list[dict[str, Any]] = []
    if simgrid is None:
        lines.append(
            {"benchmark": "simulator", "side": "SimGrid", "not_installed": INSTALL, "origin": where}
        )
        append_records(arguments.results, lines)
    for case in CASES:
        if arguments.cases in case.name:
            found = measure(case, arguments, with_simgrid=simgrid is not None, where=where)
            append_records(arguments.results, found)
            lines += found
    wrong = any(line.get("agrees") is False for line in lines)
    slow = any(line.get("kept") is False for line in lines)
    return int(wrong or (arguments.strict and slow))


INSTALL = "apt-get install libsimgrid-dev"


def build_simgrid(folder: Path) -> str | None:
    """Compile SimGrid's program; SimGrid's version, or None if it is not installed."""
    build = ROOT / "benchmarks" / "sim" / "simgrid" / "build.sh"
    done = subprocess.run([build, folder], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        print(f"{done.stderr.strip()}; measuring the rest", file=sys.stderr)
        return None
    done.check_returncode()
    version = first_line("dpkg-query", "-W", "-f", "${Version}", "libsimgrid-dev")
    return version or "of unknown version"


def measure(
    case: Case, arguments: argparse.Namespace, *, with_simgrid: bool, where: dict[str, Any]
) -> list[dict[str, Any]]:
    """Records from all sides for a case, which alternate in every round."""
    sides = ["executor"]
    sides += [side for side in case.sides if with_simgrid or not side.startswith("SimGrid")]
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case"
        if any(side.startswith("SimGrid") for side in sides):
            subprocess.run([arguments.program, "export", *case.options(), file], check=True)
        for number in range(arguments.rounds):
            for turn in range(len(sides)):
                side = sides[(number + turn) % len(sides)]
                rounds[side].append(run_side(side, case, arguments, file))
    lines = []
    for side, found in rounds.items():
        if len({one["time_s"] for one in found}) != 1:
            raise SystemExit(f"{case.name}: {side}: virtual times differ between rounds")
        line = {"benchmark": "simulator", "case": case.name, "side": side}
        line |= {"algorithm": case.algorithm, "ranks": case.ranks, "topology": case.topology}
        line |= {"routing": case.routing, "shuffled": case.shuffled, "bytes": 256 << 20}
        line |= {"time_s": found[0]["time_s"], "flows": found[0].get("flows")}
        line |= {"cpu_s": statistics.median(one["cpu_s"] for one in found)}
        if "setup_cpu_s" in found[0]:
            line["setup_cpu_s"] = statistics.median(one["setup_cpu_s"] for one in found)
        line |= {"round_cpu_s": [one["cpu_s"] for one in found]}
        if "peak_mib" in found[0]:
            line["peak_mib"] = max(one["peak_mib"] for one in found)
        if side == "executor" and case.cpu_s is not None:
            line["promised_cpu_s"] = case.cpu_s
            line["kept"] = line["cpu_s"] < case.cpu_s
        if side == "executor" and case.peak_gib is not None:
            line["promised_peak_gib"] = case.peak_gib
            line["kept"] = line["kept"] and line["peak_mib"] < case.peak_gib * 1024
        if side.startswith("SimGrid"):
            off = line["time_s"] / rounds[case.compared][0]["time_s"] - 1
            line |= {"compared_with": case.compared, "off": off, "agrees": abs(off) < AGREEMENT}
        show(line)
        lines.append(line | {"origin": where})
    return lines


def run_side(side: str, case: Case, arguments: argparse.Namespace, file: Path) -> dict[str, Any]:
    """One simulation in a separate process."""
    if side.startswith("SimGrid"):
        command = [arguments.simgrid / "all_reduce", file, side.removeprefix("SimGrid ")]
    else:
        command = [arguments.program, "run", "--through", side, *case.options()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{case.name}: {side} failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(line: dict[str, Any]) -> None:
    """Print one progress line."""
    text = f"{line['case']:42} {line['side']:13} {line['time_s'] * 1e3:11.6f} ms simulated"
    text += f" in {line['cpu_s'] * 1e3:9.2f} ms CPU"
    if "kept" in line:
        text += f" (budget {line['promised_cpu_s'] * 1e3:g} ms)"
        text += "" if line["kept"] else " MISSED"
    if "off" in line:
        text += f", {line['off'] * 100:+.5f} % off {line['compared_with']}"
    if line["side"] == "executor":
        text += f", {line['peak_mib']} MiB"
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
