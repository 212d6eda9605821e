"""Makes docs/speed.md and docs/results/speed.md: tables from the files in results/.

Each file's last run is shown: the lines with the last commit and machine. Only the standard library
is needed.
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
    """Last line for each measurement at the newest commit; empty if there is no file.

    Without `of_one_commit`, measurements at older commits without newer ones are included.
    """
    lines = every_line(results, name)
    if not lines:
        return []
    last: dict[tuple[str, ...], Line] = {}
    for line in lines:
        fields = ("benchmark", "path", "beside", "pattern", "shape", "side", "bytes", "ranks")
        fields += ("plan", "routing", "libfabric")
        last[tuple(str(line.get(field)) for field in fields)] = line
    newest = commit(list(last.values())[-1])
    return [line for line in last.values() if not of_one_commit or commit(line) == newest]


def commit(line: Line) -> str:
    """A measurement's commit, without the `+` for local changes."""
    recorded: str = line["origin"]["commit"]
    return recorded.removesuffix("+")


def with_origins(text: str, lines: list[Line]) -> str:
    """Table, then commit, day and machine from the records, for example "42fb8111efe8+, ..."."""
    if not lines:
        return text
    found: dict[str, None] = {}
    for line in lines:
        origin = line["origin"]
        machine = origin["machine"]
        at = f"{origin['commit']}, {origin['at'][:10]}"
        found[f"{at}, {machine['processor']}, {machine['cores']} cores"] = None
    return f"{text}\n\nRecorded at {'; '.join(found)}."


def every_line(results: Path, name: str) -> list[Line]:
    """All lines in a file; empty if there is none."""
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
    """Time for messages below 4 KiB, throughput for longer ones."""
    times = f"{number(line['p50_us'])} / {number(line['p99_us'])} µs"
    return times if line["bytes"] < 4096 else f"{number(line['gb_per_s'])} GB/s"


def bare(path: str, pattern: str) -> Callable[[Path], str]:
    """Table with Weft and the bare operations on a path."""

    def table(results: Path) -> str:
        every = read(results, "transfer.jsonl")
        lines = [
            line
            for line in every
            if (line["benchmark"], line["path"], line.get("pattern")) == ("transfer", path, pattern)
        ]
        others = sorted({line["side"] for line in lines} - {"weft"}, reverse=True)
        return with_origins(by_size(lines, others), lines)

    return table


def peers(path: str) -> Callable[[Path], str]:
    """Table with Weft and other libraries on a path, with notes on missing ones."""

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
        return with_origins("\n\n".join([measured, *notes]), lines)

    return table


def headline(results: Path) -> str:
    """Time as a multiple of Weft's for each side in ping-pong, by path and message length."""
    lines = [
        line
        for line in read(results, "transfer.jsonl")
        if line.get("pattern") == "ping-pong" and line["side"] not in ("weft", "flag alone")
    ]
    ratios = {(line["path"], line["bytes"], side(line)): line["ratio"] for line in lines}
    sides = list(dict.fromkeys(name for _, _, name in ratios))
    rows = []
    for path in dict.fromkeys(line["path"] for line in lines):
        for count in HEADLINE_BYTES:
            found = [ratios.get((path, count, name)) for name in sides]
            cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in found]
            rows.append([f"{size(count)} over {path}", *cells])
    return with_origins(markdown(["", *sides], rows), lines)


#: Message lengths in the headline.
HEADLINE_BYTES = (8, 4 << 10, 2 << 20)


def side(line: Line) -> str:
    """Library name, or `bare` for a loop without one."""
    name: str = line["side"]
    return "bare" if line["benchmark"] == "transfer" else name


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
    """Table with Weft over libfabric and the bare loop, for each libfabric version."""

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
        return with_origins(markdown(["", *headers], rows), lines)

    return table


#: Weft with its engine held by the caller, and with an engine shared with a progress thread.
OFI_SIDES = ("Weft", "Weft, shared")


def time_or_speed(line: Line) -> str:
    """Median time for a message below 64 KiB, throughput for a longer one."""
    if line["bytes"] >= 65536:
        return f"{number(line['gb_per_s'])} GB/s"
    return f"{number(line['median_us'])} µs"


def beyond(line: Line, loop: Line) -> str:
    """Below 64 KiB the nanoseconds beyond the loop's, above the fraction of its throughput."""
    if line["bytes"] >= 65536:
        return f"{loop['median_us'] / line['median_us']:.2f}"
    return f"{(line['median_us'] - loop['median_us']) * 1000:+.0f} ns"


def moe(results: Path) -> str:
    """Dispatch and combine as a table, by stage."""
    rows = []
    lines = read(results, "moe.jsonl")
    for line in lines:
        phases = {phase["phase"]: phase["slowest_p50_us"] for phase in line["phases"]}
        weft = line["side"] == "weft"
        name = f"{line['shape']}, " + (f"Weft over {line['path']}" if weft else "gloo beside it")
        cells = [number(time) for phase, time in phases.items() if phase != "experts"]
        both = [number(line[f"communication_{p}_us"]) for p in ("p50", "p99")]
        ratio = "" if weft else f"{line['ratio']:.2f}"
        rows.append([name, *cells, *both, ratio])
    headers = ["", "dispatch send", "dispatch recv", "combine send", "combine recv"]
    return with_origins(markdown([*headers, "all p50", "all p99", "ratio"], rows), lines)


def collectives(path: str) -> Callable[[Path], str]:
    """Table with torch.distributed over Weft, with gloo's time as a multiple of Weft's."""

    def table(results: Path) -> str:
        lines = [line for line in read(results, "collectives.jsonl") if line["beside"] == path]
        return by_shape(lines, "gloo", ("p50_us", "p99_us"))

    return table


def by_shape(lines: list[Line], other: str, quantiles: Sequence[str]) -> str:
    """Weft's times by ranks, bytes and collective, and another side's as multiples."""
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
    return with_origins(markdown(["", *shapes], rows), lines)


def deepspeed(results: Path) -> str:
    """Table with all-reduces beside gloo's, and Weft's operator beside DeepSpeed's."""
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
    headers = ["", "Weft", "gloo", "Weft, operator", "DeepSpeed, operator"]
    return with_origins(markdown(headers, rows), lines)


def torch_calls(results: Path) -> str:
    """Table with the shortest torch.distributed calls, beside a call that moves no data.

    Each case shows the newest commit's run whose difference is the median.
    """
    lines = every_line(results, "torch_calls.jsonl")
    lines = [line for line in lines if commit(line) == commit(lines[-1])]
    rows = []
    for path, ranks in dict.fromkeys((line["path"], line["ranks"]) for line in lines):
        runs = [line for line in lines if (line["path"], line["ranks"]) == (path, ranks)]
        runs.sort(key=above_floor)
        line = runs[len(runs) // 2]
        times = (line["p50_us"], line["p99_us"], line["floor_us"], above_floor(line))
        rows.append([f"{ranks} ranks over {path}", *map(number, times)])
    headers = ["", "p50", "p99", "backend fake, p50", "above it"]
    return with_origins(markdown(headers, rows), lines)


def above_floor(line: Line) -> float:
    """Microseconds per call beyond torch itself."""
    return float(line["p50_us"] - line["floor_us"])


def collective_peers(results: Path) -> str:
    """Table with collectives without PyTorch, with Open MPI's time as a multiple of Weft's."""
    return by_shape(read(results, "collective_peers.jsonl"), "openmpi", ("p50_us",))


def training(results: Path) -> str:
    """Training table: step time, and the largest relative difference in losses."""
    lines = read(results, "training.jsonl")
    cases = {(line["shape"], line["ranks"], line["side"]): line for line in lines}
    rows = []
    for shape, ranks in dict.fromkeys((line["shape"], line["ranks"]) for line in lines):
        weft, gloo = (cases[shape, ranks, side] for side in ("weft", "gloo"))
        times = [f"{number(line['p50_ms'])} / {number(line['p99_ms'])}" for line in (weft, gloo)]
        ratio, difference = f"{gloo['ratio']:.2f}", f"{weft['loss_difference']:.0e}"
        rows.append([f"{shape}, {ranks} ranks", *times, ratio, difference])
    return with_origins(markdown(["", "Weft", "gloo", "ratio", "loss difference"], rows), lines)


def crowd(results: Path) -> str:
    """Table with more ranks than cores, and with idle ranks."""
    rows = []
    lines = read(results, "host.jsonl")
    for line in lines:
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
    return with_origins(markdown(["", "measured"], rows), lines)


def planner(results: Path) -> str:
    """Plan times as a table."""
    lines = read(results, "planner.jsonl")
    rows = [
        [f"{line['plan']}, {line['routing']}", f"{number(line['median_us'])} µs"] for line in lines
    ]
    return with_origins(markdown(["", "median"], rows), lines)


def rdma(results: Path) -> str:
    """Table with the last run of transfers between guests, and the libraries that it measured."""
    run = every_line(results, "rdma.jsonl")[-1:]
    cases = [case for record in run for case in record["outcomes"]]
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
    return with_origins(markdown(["", "Weft", *headers], rows), run)


def posting(results: Path) -> str:
    """Table with the last run of verbs posts to a null device."""
    run = every_line(results, "posting.jsonl")[-1:]
    rows = [
        [
            case["operation"],
            str(case["requests"]),
            f"{number(case['post_ns_p50'])} / {number(case['post_ns_p99'])} ns",
            f"{number(case['complete_ns_p50'])} / {number(case['complete_ns_p99'])} ns",
        ]
        for record in run
        for case in record["outcomes"]
    ]
    return with_origins(markdown(["", "work requests", "post", "with its completion"], rows), run)


def instructions(results: Path) -> str:
    """Instruction counts as a table, from instructions.json."""
    path = results.parent / "instructions.json"
    if not path.exists():
        return NOT_MEASURED
    record = json.loads(path.read_text(encoding="utf-8"))
    rows = [[name, f"{count:.0f}"] for name, count in record["instructions"].items()]
    return with_origins(markdown(["", "instructions"], rows), [record])


def where(results: Path) -> str:
    """Sentence on the last transfers' machine and versions."""
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
        f"Transfers were measured on {machine['processor']}, {machine['cores']} cores,"
        f" {machine['last_level_cache_mib']} MiB of last-level cache, Linux {machine['kernel']},"
        f" {origin['at'][:10]}; {named}. Below each table are its commits, where `+` stands for"
        " local changes, and its machines."
    )


TABLES: dict[str, Callable[[Path], str]] = {
    "headline": headline,
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
