"""Transfers by Weft, bare operations and other libraries, for results/transfer.jsonl.

`weft-bench-fabric transfer` measures the bare operations in Weft's own processes. Other libraries
("peers") have separate processes: in each round every side is started once, measures every size and
ends. A missing library is recorded as such.

On the paths `ofi-tcp` and `ofi-shm` Weft uses libfabric, whose bare loop (`peers/ofi.c`) is the
only peer. These paths also stream every size, and measure Weft a second time with an engine that a
progress thread shares. These lines go to results/ofi.jsonl; `--libfabric` selects the library.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, append_records, origin

TARGET = RESULTS / "transfer.jsonl"
PEERS = ROOT / "benchmarks" / "peers"
OFI_TARGET = RESULTS / "ofi.jsonl"
SIZES = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 64 << 20]
PIP = "make bench-peers installs it"
APT = "apt-get install libfabric-dev libucx-dev pkg-config"


@dataclass(frozen=True)
class Side:
    """One measured library over one path, in separate processes."""

    name: str
    path: str
    command: list[str]
    version_command: list[str]
    install: str


def main() -> int:
    """All selected and installed sides; 1 if a message was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fabric", required=True, help="the program weft-bench-fabric")
    parser.add_argument(
        "--programs", type=Path, required=True, help="folder with the peers' programs"
    )
    parser.add_argument("--peers-python", required=True, help="Python with the peers' packages")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default %(default)s)")
    parser.add_argument("--paths", default="shm,tcp", help="paths (default %(default)s)")
    parser.add_argument("--no-peers", action="store_true", help="bare operations only")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="default %(default)s")
    parser.add_argument("--results", type=Path, help="default: by path, in benchmarks/results")
    parser.add_argument("--libfabric", type=Path, help="library file (default: the system's)")
    arguments = parser.parse_args()
    if arguments.libfabric:
        use_libfabric(arguments.libfabric)
    wrong = False
    for path in arguments.paths.split(","):
        lines = [] if is_ofi(path) else measure_bare(arguments, path)
        if not arguments.no_peers:
            lines += measure_peers(arguments, path)
        append_records(arguments.results or (OFI_TARGET if is_ofi(path) else TARGET), lines)
        wrong |= any(line.get("wrong") for line in lines)
    return int(wrong)


def is_ofi(path: str) -> bool:
    """True if Weft itself uses libfabric on this path."""
    return path.startswith("ofi-")


def use_libfabric(library: Path) -> None:
    """Select this library, with the providers beside it, for all child processes."""
    folder = library.parent
    os.environ["WEFT_LIBFABRIC"] = str(library)
    os.environ["LD_LIBRARY_PATH"] = str(folder)
    os.environ["FI_PROVIDER_PATH"] = str(folder / "libfabric")


def measure_bare(arguments: argparse.Namespace, path: str) -> list[dict[str, Any]]:
    """Records for Weft and the bare operations, in the same processes."""
    report(f"{path}: Weft beside the bare operations, {arguments.rounds} rounds")
    command = [arguments.fabric, "transfer", "--path", path, "--json"]
    command += ["--rounds", str(arguments.rounds), "--sizes", arguments.sizes]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    where = origin()
    return [json.loads(line) | {"origin": where} for line in output.splitlines()]


def measure_peers(arguments: argparse.Namespace, path: str) -> list[dict[str, Any]]:
    """Records for Weft and peers, which alternate, each in separate processes."""
    installed, lines, versions = [], [], {}
    for side in sides(arguments, path):
        version = version_of(side)
        if version is None:
            report(f"{path}: {side.name} is missing; {side.install}")
            missing = {"benchmark": "peers", "path": path, "side": side.name}
            lines.append(missing | {"not_installed": side.install, "origin": origin()})
        else:
            installed.append(side)
            versions[side.name] = version
    # Key: side, pattern, size. Value: a list of rounds, each a list of both ranks' times.
    rounds: dict[tuple[str, str, int], list[list[list[float]]]] = defaultdict(list)
    wrong: dict[tuple[str, str, int], int] = defaultdict(int)
    failed: dict[str, str] = {}
    for number in range(arguments.rounds):
        for turn in range(len(installed)):
            side = installed[(number + turn) % len(installed)]
            if side.name in failed:
                continue
            report(f"{path}: round {number + 1} of {arguments.rounds}, {side.name}")
            try:
                found = run_side(side)
            except (subprocess.SubprocessError, ValueError) as error:
                failed[side.name] = str(error)
                continue
            for line in found:
                if line["pattern"] == "stream" and not is_ofi(path):
                    continue
                measured = side.name, line["pattern"], line["bytes"]
                rounds[measured].append(line["one_way_ns"])
                wrong[measured] += line["wrong"]
    report("")
    where = origin(**versions)
    for name, why in failed.items():
        report(f"{path}: {name} failed: {why}\n")
        lines.append(
            {"benchmark": "peers", "path": path, "side": name, "failed": why, "origin": where}
        )
    for (name, pattern, size), times in rounds.items():
        if name not in failed:
            found = summarise(times, rounds["weft", pattern, size])
            key: dict[str, Any] = {"benchmark": "peers", "path": path, "pattern": pattern}
            if is_ofi(path):
                key["libfabric"] = versions["libfabric"]
            key |= {"side": name, "bytes": size, "wrong": wrong[name, pattern, size]}
            gigabytes = {"gb_per_s": size / found["median_us"] / 1000}
            lines.append(key | found | gigabytes | {"origin": where})
    return lines


def sides(arguments: argparse.Namespace, path: str) -> list[Side]:
    """Sides on a path."""
    sizes = arguments.sizes.split(",")
    weft = [arguments.fabric, "transfer", "--samples", "--rounds", "1", "--path", path]
    weft += ["--sizes", arguments.sizes]
    describe = ["git", "-C", str(ROOT), "describe", "--always"]
    found = [Side("weft", path, weft, describe, "")]
    if is_ofi(path):
        program = str(arguments.programs / "ofi")
        found.append(Side("libfabric", path, [program, path, *sizes], [program, "--version"], APT))
        found.append(Side("weft, shared", path, [*weft, "--shared"], describe, ""))
        return found
    for name, program, package in (("libfabric", "ofi", "libfabric"), ("UCX", "ucx", "ucx")):
        command = [str(arguments.programs / program), path, *sizes]
        found.append(Side(name, path, command, ["pkg-config", "--modversion", package], APT))
    for name, module, package in (
        ("NIXL", "nixl", "nixl-cu12"),
        ("Mooncake", "mooncake", "mooncake-transfer-engine-non-cuda"),
    ):
        if (name, path) == ("Mooncake", "shm"):
            continue
        command = [arguments.peers_python, str(PEERS / f"{module}.py"), path, *sizes]
        query = f"import importlib.metadata as m; print(m.version({package!r}))"
        found.append(Side(name, path, command, [arguments.peers_python, "-c", query], PIP))
    return found


def version_of(side: Side) -> str | None:
    """A side's version, such as "2.5.1", or None if it is not installed."""
    if not os.access(side.command[0], os.X_OK):
        return None
    try:
        result = subprocess.run(side.version_command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def run_side(side: Side) -> list[dict[str, Any]]:
    """One round on one side."""
    result = subprocess.run(
        side.command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS
    )
    # Some libraries print to standard output.
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


#: Timeout for a round on one side; a slower peer is recorded as failed.
PATIENCE_SECONDS = 120


def summarise(rounds: list[list[list[float]]], weft: list[list[list[float]]]) -> dict[str, Any]:
    """The slowest rank's microseconds, and the ratio to Weft's in the same rounds."""

    def medians(times: list[list[list[float]]], rank: int) -> list[float]:
        return [statistics.median(ranks[rank]) for ranks in times if ranks[rank]]

    def pooled(rank: int) -> list[float]:
        return sorted(time for ranks in rounds for time in ranks[rank])

    filled = [rank for rank in (0, 1) if pooled(rank)]
    slowest = max(filled, key=lambda rank: statistics.median(pooled(rank)))
    every, by_round = pooled(slowest), medians(rounds, slowest)
    pairs = zip(by_round, medians(weft, slowest), strict=False)
    return {
        "rounds": len(by_round),
        "messages": len(every),
        "p50_us": statistics.median(every) / 1000,
        "p99_us": every[min(len(every) - 1, round(0.99 * (len(every) - 1)))] / 1000,
        "slowest_rank": slowest,
        "median_us": statistics.median(by_round) / 1000,
        "round_medians_us": [time / 1000 for time in by_round],
        "ratio": statistics.median(peer / ours for peer, ours in pairs),
    }


def report(text: str) -> None:
    """Print progress: on a terminal in one line, elsewhere line by line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
    elif text:
        sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
