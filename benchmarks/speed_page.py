"""Maker of docs/speed.md: tables from the files in results/.

Of each file the last run is shown: the lines of its last commit and machine. Only the standard
library is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NOT_MEASURED = "*Not measured yet.*"

Line = dict[str, Any]


def blocks(page: str = "speed") -> dict[str, str]:
    """Tables by name."""
    return {name: table(RESULTS) for name, table in TABLES.items()}


def read(results: Path, name: str, *, of_one_commit: bool = True) -> list[Line]:
    """The last line of each measurement of the newest commit; empty if there is no file.

    Without `of_one_commit`, measurements of older commits without newer ones are included.
    """
    lines = every_line(results, name)
    if not lines:
        return []
    last: dict[tuple[str, ...], Line] = {}
    for line in lines:
        fields = ("benchmark", "path", "beside", "pattern", "shape", "side", "bytes", "ranks")
        fields += ("plan", "routing", "libfabric")
        last[tuple(str(line.get(field)) for field in fields)] = line
    commits = [line["origin"]["commit"] for line in last.values()]
    newest = commits[-1]
    return [
        line for line in last.values() if not of_one_commit or line["origin"]["commit"] == newest
    ]


def every_line(results: Path, name: str) -> list[Line]:
    """All lines of a file; empty if there is none."""
    path = results / name
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def markdown(headers: list[str], rows: list[list[str]]) -> str:
    """A table with numbers aligned right."""
    if not rows:
        return NOT_MEASURED
    lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def size(count: int) -> str:
    """Bytes with a binary unit."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= factor:
            return f"{count // factor} {unit}"
    return f"{count} B"


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def speed(line: Line) -> str:
    """Time of messages below 4 KiB, throughput of longer ones."""
    times = f"{number(line['p50_us'])} / {number(line['p99_us'])} µs"
    return times if line["bytes"] < 4096 else f"{number(line['gb_per_s'])} GB/s"


def bare(path: str, pattern: str) -> Callable[[Path], str]:
    """Table of Weft and the bare operations of a path."""

    def table(results: Path) -> str:
        every = read(results, "transfer.jsonl")
        lines = [
            line
            for line in every
            if (line["benchmark"], line["path"], line.get("pattern")) == ("transfer", path, pattern)
        ]
        others = sorted({line["side"] for line in lines} - {"weft"}, reverse=True)
        return by_size(lines, others)

    return table


def peers(path: str) -> Callable[[Path], str]:
    """Table of Weft and other libraries on a path, with notes on missing ones."""

    def table(results: Path) -> str:
        every = read(results, "transfer.jsonl")
        lines = [line for line in every if (line["benchmark"], line["path"]) == ("peers", path)]
        others = sorted({line["side"] for line in lines if "bytes" in line} - {"weft"})
        notes = [
            f"{line['side']} {'was not installed' if 'not_installed' in line else 'failed'}:"
            f" {line.get('not_installed') or line.get('failed')}"
            for line in lines
            if "bytes" not in line
        ]
        measured = by_size([line for line in lines if "bytes" in line], others)
        return "\n\n".join([measured, *notes])

    return table


def by_size(lines: list[Line], others: list[str]) -> str:
    """Table by size: Weft, then each other side with its time as a multiple of Weft's."""
    cells = {(line["bytes"], line["side"]): line for line in lines}
    rows = []
    for count in sorted({line["bytes"] for line in lines}):
        row = [size(count)]
        for side in ["weft", *others]:
            line = cells.get((count, side))
            ratio = f" ({line['ratio']:.2f})" if line and side != "weft" else ""
            row.append(speed(line) + ratio if line else "")
        rows.append(row)
    return markdown(["", "Weft", *others], rows)


def ofi(path: str, pattern: str) -> Callable[[Path], str]:
    """Table of Weft over libfabric and the bare loop, for each version of the library."""

    def table(results: Path) -> str:
        lines = [
            line
            for line in read(results, "ofi.jsonl", of_one_commit=False)
            if (line["path"], line["pattern"]) == (path, pattern)
        ]
        versions = list(dict.fromkeys(line["libfabric"] for line in lines))
        cells = {(line["bytes"], line["libfabric"], line["side"]): line for line in lines}
        rows = []
        for count in sorted({line["bytes"] for line in lines}):
            row = [size(count)]
            for version in versions:
                loop = cells[count, version, "libfabric"]
                row.append(time_or_speed(loop))
                for side in ("weft", "weft, shared"):
                    line = cells[count, version, side]
                    row.append(f"{time_or_speed(line)} ({beyond(line, loop)})")
            rows.append(row)
        headers = [f"{version} {side}" for version in versions for side in ("loop", *OFI_SIDES)]
        return markdown(["", *headers], rows)

    return table


#: Weft with its engine held by the caller, and with an engine shared with a progress thread.
OFI_SIDES = ("Weft", "Weft, shared")


def time_or_speed(line: Line) -> str:
    """Median time of a message below 64 KiB, throughput of a longer one."""
    if line["bytes"] >= 65536:
        return f"{number(line['gb_per_s'])} GB/s"
    return f"{number(line['median_us'])} µs"


def beyond(line: Line, loop: Line) -> str:
    """Below 64 KiB the nanoseconds beyond the loop's, above the fraction of its throughput."""
    if line["bytes"] >= 65536:
        return f"{loop['median_us'] / line['median_us']:.2f}"
    return f"{(line['median_us'] - loop['median_us']) * 1000:+.0f} ns"


def moe(results: Path) -> str:
    """Table of dispatch and combine, by stage."""
    rows = []
    for line in read(results, "moe.jsonl"):
        phases = {phase["phase"]: phase["slowest_p50_us"] for phase in line["phases"]}
        weft = line["side"] == "weft"
        name = f"{line['shape']}, " + (f"Weft over {line['path']}" if weft else "gloo beside it")
        cells = [number(time) for phase, time in phases.items() if phase != "experts"]
        both = [number(line[f"communication_{p}_us"]) for p in ("p50", "p99")]
        ratio = "" if weft else f"{line['ratio']:.2f}"
        rows.append([name, *cells, *both, ratio])
    headers = ["", "dispatch send", "dispatch recv", "combine send", "combine recv"]
    return markdown([*headers, "all p50", "all p99", "ratio"], rows)


def collectives(path: str) -> Callable[[Path], str]:
    """Table of torch.distributed over Weft, with gloo's time as a multiple of Weft's."""

    def table(results: Path) -> str:
        lines = [line for line in read(results, "collectives.jsonl") if line["beside"] == path]
        return by_shape(lines, "gloo", ("p50_us", "p99_us"))

    return table


def by_shape(lines: list[Line], other: str, quantiles: Sequence[str]) -> str:
    """Weft's times by ranks, bytes and collective, with another side's as a multiple of them."""
    cases = {(line["ranks"], line["bytes"], line["shape"], line["side"]): line for line in lines}
    shapes = list(dict.fromkeys(line["shape"] for line in lines))
    rows = []
    for ranks, count in sorted({(line["ranks"], line["bytes"]) for line in lines}):
        row = [f"{ranks} ranks, {size(count)}"]
        for shape in shapes:
            weft, theirs = (cases.get((ranks, count, shape, side)) for side in ("weft", other))
            if weft is None or theirs is None:
                row.append("")
                continue
            times = " / ".join(number(weft[quantile]) for quantile in quantiles)
            row.append(f"{times}, {number(theirs['ratio'])}x")
        rows.append(row)
    return markdown(["", *shapes], rows)


def deepspeed(results: Path) -> str:
    """Table of all-reduces beside gloo's, and of Weft's operator beside DeepSpeed's."""
    lines = read(results, "deepspeed.jsonl")
    cases = {(line["ranks"], line["bytes"], line["side"]): line for line in lines}
    rows = []
    for ranks, count in sorted({(line["ranks"], line["bytes"]) for line in lines}):
        row = [f"{ranks} ranks, {size(count)}"]
        for side in ("weft", "gloo", "operator", "deepspeed"):
            line = cases[ranks, count, side]
            times = f"{number(line['p50_us'])} / {number(line['p99_us'])}"
            is_own = side in ("weft", "operator")
            row.append(times if is_own else f"{times}, {number(line['ratio'])}x")
        rows.append(row)
    return markdown(["", "Weft", "gloo", "Weft, operator", "DeepSpeed, operator"], rows)


def torch_calls(results: Path) -> str:
    """Table of the shortest calls of torch.distributed, beside a call that moves no data.

    Of each case the run of the newest commit whose difference is the median.
    """
    lines = every_line(results, "torch_calls.jsonl")
    lines = [line for line in lines if line["origin"]["commit"] == lines[-1]["origin"]["commit"]]
    rows = []
    for path, ranks in dict.fromkeys((line["path"], line["ranks"]) for line in lines):
        runs = [line for line in lines if (line["path"], line["ranks"]) == (path, ranks)]
        runs.sort(key=above_floor)
        line = runs[len(runs) // 2]
        times = (line["p50_us"], line["p99_us"], line["floor_us"], above_floor(line))
        rows.append([f"{ranks} ranks over {path}", *map(number, times)])
    return markdown(["", "p50", "p99", "backend fake, p50", "above it"], rows)


def above_floor(line: Line) -> float:
    """Microseconds of a call beyond those of torch itself."""
    return float(line["p50_us"] - line["floor_us"])


def collective_peers(results: Path) -> str:
    """Table of collectives without PyTorch, with Open MPI's time as a multiple of Weft's."""
    return by_shape(read(results, "collective_peers.jsonl"), "openmpi", ("p50_us",))


def training(results: Path) -> str:
    """Table of training: time of a step, and the largest relative difference of losses."""
    lines = read(results, "training.jsonl")
    cases = {(line["shape"], line["ranks"], line["side"]): line for line in lines}
    rows = []
    for shape, ranks in dict.fromkeys((line["shape"], line["ranks"]) for line in lines):
        weft, gloo = (cases[shape, ranks, side] for side in ("weft", "gloo"))
        times = [f"{number(line['p50_ms'])} / {number(line['p99_ms'])}" for line in (weft, gloo)]
        ratio, difference = f"{gloo['ratio']:.2f}", f"{weft['loss_difference']:.0e}"
        rows.append([f"{shape}, {ranks} ranks", *times, ratio, difference])
    return markdown(["", "Weft", "gloo", "ratio", "loss difference"], rows)


def crowd(results: Path) -> str:
    """Table of more ranks than cores, and of idle ranks."""
    rows = []
    for line in read(results, "host.jsonl"):
        if line["benchmark"] == "crowd":
            name = (
                f"{line['ranks']} ranks on {line['cores_used']} cores, {line['path']}, µs a round"
            )
            value = f"p50 {number(line['p50_us'])}, p99 {number(line['p99_us'])}"
            slowest = f"slowest rank p50 {number(line['slowest_p50_us'])}"
            rows.append([name, f"{value}, {slowest}"])
        elif line["benchmark"] == "idle":
            share = max(line["percent_of_a_core"])
            rows.append([f"an idle rank, {line['path']}, share of a core", f"{share:.2f} %"])
    return markdown(["", "measured"], rows)


def planner(results: Path) -> str:
    """Table of the times of plans."""
    rows = [
        [f"{line['plan']}, {line['routing']}", f"{number(line['median_us'])} µs"]
        for line in read(results, "planner.jsonl")
    ]
    return markdown(["", "median"], rows)


def last_outcomes(path: Path) -> list[dict[str, Any]]:
    """Outcomes of the last recorded run of a file; none without the file."""
    if not path.exists():
        return []
    record = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    outcomes: list[dict[str, Any]] = record["outcomes"]
    return outcomes


def rdma(results: Path) -> str:
    """Table of the last run of transfers between guests, with the libraries that it measured."""
    cases = last_outcomes(results / "rdma.jsonl")
    if not cases:
        return NOT_MEASURED
    others = [
        (title, name, ratio)
        for title, name, ratio in (
            ("perftest", "perftest_us", "ratio"),
            ("UCX", "ucx_us", "ucx_ratio"),
            ("libfabric", "libfabric_us", "libfabric_ratio"),
        )
        if any(name in case for case in cases)
    ]
    rows = []
    for case in cases:
        row = [f"{case['pattern']}, {size(case['bytes'])}", f"{number(case['weft_us'])} µs"]
        for _, name, ratio in others:
            measured = name in case
            row += [f"{number(case[name])} µs", f"{case[ratio]:.2f}"] if measured else ["", ""]
        rows.append(row)
    headers = [header for title, _, _ in others for header in (title, "ratio")]
    return markdown(["", "Weft", *headers], rows)


def posting(results: Path) -> str:
    """Table of the last run of posts of verbs to a null device."""
    rows = [
        [
            case["operation"],
            str(case["requests"]),
            f"{number(case['post_ns_p50'])} / {number(case['post_ns_p99'])} ns",
            f"{number(case['complete_ns_p50'])} / {number(case['complete_ns_p99'])} ns",
        ]
        for case in last_outcomes(results / "posting.jsonl")
    ]
    if not rows:
        return NOT_MEASURED
    return markdown(["", "work requests", "post", "with its completion"], rows)


def instructions(results: Path) -> str:
    """Table of instruction counts, from instructions.json."""
    path = results.parent / "instructions.json"
    if not path.exists():
        return NOT_MEASURED
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = [[name, f"{count:.0f}"] for name, count in record["instructions"].items()]
    return markdown(["", "instructions"], rows)


def where(results: Path) -> str:
    """Sentence on the machine and the versions of the last run."""
    lines = read(results, "transfer.jsonl")
    if not lines:
        return NOT_MEASURED
    origin = lines[-1]["origin"]
    machine = origin["machine"]
    versions: dict[str, str] = {}
    for line in lines:
        versions |= line["origin"]["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "weft")
    return (
        f"Measured on {machine['processor']}, {machine['cores']} cores,"
        f" {machine['last_level_cache_mib']} MiB of last-level cache, Linux {machine['kernel']};"
        f" commit {origin['commit']}, {origin['at'][:10]}; {named}."
    )


TABLES: dict[str, Callable[[Path], str]] = {
    "where": where,
    "shm": bare("shm", "ping-pong"),
    "shm-stream": bare("shm", "stream"),
    "tcp": bare("tcp", "ping-pong"),
    "tcp-stream": bare("tcp", "stream"),
    "peers-shm": peers("shm"),
    "peers-tcp": peers("tcp"),
    "ofi-tcp": ofi("ofi-tcp", "ping-pong"),
    "ofi-tcp-stream": ofi("ofi-tcp", "stream"),
    "ofi-shm": ofi("ofi-shm", "ping-pong"),
    "ofi-shm-stream": ofi("ofi-shm", "stream"),
    "collectives-shm": collectives("shm"),
    "collectives-tcp": collectives("tcp"),
    "torch-calls": torch_calls,
    "collective-peers": collective_peers,
    "deepspeed": deepspeed,
    "training": training,
    "moe": moe,
    "crowd": crowd,
    "planner": planner,
    "posting": posting,
    "rdma": rdma,
    "instructions": instructions,
}
