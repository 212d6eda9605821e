"""Makes docs/gpu.md and docs/results/gpu.md: tables and a picture.

`weft bench moe --device cuda --cases all --record` appends to `results/gpu_moe.jsonl`; the last
record for each machine and case is shown. Other systems' rows are from `reference/gpu_moe.json`,
with the machine that was measured. A table without results is `NOT_MEASURED`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_model import GOALS, PHASES, Model
from speed_page import NOT_MEASURED, markdown, number

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "gpu-moe.svg"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_moe.jsonl"
REFERENCE = ROOT / "benchmarks" / "reference" / "gpu_moe.json"
#: Labels for decode and prefill cases.
DECODE = {
    "decode": "cast to fp8 by the kernel, contiguous",
    "decode given fp8": "fp8 given, contiguous",
    "decode indexed": "cast to fp8, indexed",
    "decode bf16": "bf16 on the wire, contiguous",
    "one token": "1 token, cast to fp8",
}
PREFILL = {
    "prefill 24": "fp8, 24 SMs",
    "prefill 32": "fp8, 32 SMs",
    "prefill 64": "fp8, 64 SMs",
    "prefill": "fp8, Weft's choice of SMs",
    "prefill bf16": "bf16, 24 SMs",
    "prefill dense": "bf16, dense rows, 24 SMs",
}

Record = dict[str, Any]


def blocks(page: str = "gpu") -> dict[str, str]:
    """Tables by name."""
    records = read(RESULTS)
    return {name: table(records) for name, table in TABLES.items()}


def draw(page: str = "gpu") -> list[Path]:
    """Draw the picture if there are results; returns the drawn paths."""
    return [PICTURE] if draw_decode(read(RESULTS), PICTURE) else []


def read(path: Path) -> list[Record]:
    """Last record for each machine and case, the largest machine's first."""
    if not path.exists():
        return []
    last: dict[tuple[str, str], Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        # Skipped cases have no result, and twin times are not comparable.
        if record["status"] != "skipped" and record["origin"].get("device") == "cuda":
            last[machine(record), record["case"]] = record
    return sorted(
        last.values(), key=lambda record: (-len(record["origin"]["gpus"]), machine(record))
    )


def reference() -> dict[str, Any]:
    """Measured and published figures for other systems."""
    found: dict[str, Any] = json.loads(REFERENCE.read_text(encoding="utf-8"))
    return found


def machine(record: Record) -> str:
    """Short name for a record's machine."""
    origin = record["origin"]
    gpus = origin["gpus"]
    named = f"{len(gpus)} {gpus[0]}" if gpus else "no GPU"
    return named if origin["ranks"] == len(gpus) else f"{origin['ranks']} ranks on {named}"


def good(records: list[Record], kind: str | None = None) -> list[Record]:
    """Records with a result, by kind."""
    return [
        record
        for record in records
        if record["status"] == "ok" and (kind is None or record["kind"] == kind)
    ]


def times(result: dict[str, Any], name: str, *, p99: bool = True) -> str:
    """The slowest rank's p50 and p99 in microseconds."""
    time = result.get("times", {}).get(name)
    if time is None:
        return ""
    middle = number(time["slowest_p50_us"])
    return f"{middle} / {number(time['slowest_p99_us'])}" if p99 else middle


def cell(value: float | None) -> str:
    """A number, or an empty cell."""
    return "" if value is None else number(value)


def where(records: list[Record]) -> str:
    """Machines, versions and commits as a table."""
    rows: dict[str, list[str]] = {}
    for record in records:
        origin, versions = record["origin"], record["origin"]["versions"]
        rows[machine(record)] = [
            machine(record),
            origin["links"],
            f"driver {versions['driver']}, CUDA {versions['cuda']}, torch {versions['torch']},"
            f" NCCL {versions['nccl']}",
            ", ".join(
                sorted(
                    {
                        str(other["origin"]["commit"])[:12]
                        for other in records
                        if machine(other) == machine(record)
                    }
                )
            ),
            origin["at"][:10],
        ]
    return left(["ranks and GPUs", "links", "versions", "commits", "date"], list(rows.values()))


def left(headers: list[str], rows: list[list[str]]) -> str:
    """Text table."""
    if not rows:
        return NOT_MEASURED
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def exchanges(cases: dict[str, str], key: str) -> Callable[[list[Record]], str]:
    """Dispatch and combine table for these cases, NCCL, and other systems."""

    def table(records: list[Record]) -> str:
        rows = []
        for record in good(records):
            if record["case"] not in cases:
                continue
            result = record["result"]
            moved, beside = result["bytes"], result.get("beside", {})
            rows.append(
                [
                    f"Weft, {machine(record)}: {cases[record['case']]}",
                    times(result, "dispatch"),
                    times(result, "combine"),
                    times(result, "round"),
                    cell(moved["dispatch_gb_per_s"]),
                    cell(moved["combine_gb_per_s"]),
                    times(beside, "dispatch", p99=False),
                    times(beside, "combine", p99=False),
                ]
            )
        headers = ["µs, p50 / p99", "dispatch", "combine", "both", "dispatch, GB/s"]
        headers += ["combine, GB/s", "NCCL, dispatch's bytes", "NCCL, combine's bytes"]
        return markdown(headers, [*rows, *others(key)])

    return table


def others(key: str) -> list[list[str]]:
    """Other systems' rows, measured and published."""
    known = reference()
    measured, published = known["measured"], known["published"]
    system = measured["deepep_v1"]
    name = f"{system['name']}, {measured['label']} (measured)"
    empty = [""] * 4
    rows = []
    if key == "decode":
        ours = system["decode"]
        both = f"{number(ours['pair_mean_us'])} (mean)"
        rows.append([name, cell(ours["dispatch_us"]), cell(ours["combine_us"]), both, *empty])
        rows += others_on_two(known["measured_two"], key, empty)
    else:
        ours = system["prefill"]
        for wire in ("fp8", "bf16"):
            dispatch = cell(ours[f"dispatch_{wire}_us"])
            label = f"{name}: {wire}, 24 SMs"
            rows.append([label, dispatch, cell(ours["combine_bf16_us"]), "", *empty])
        rows += others_on_two(known["measured_two"], key, empty)
    for row in published[key]["rows"]:
        label = f"{row['name']} (published)"
        rows.append([label, cell(row["dispatch_us"]), cell(row["combine_us"]), "", *empty])
    return rows


def others_on_two(measured: dict[str, Any], key: str, empty: list[str]) -> list[list[str]]:
    """Other systems' rows on two GPUs, the same kind as Weft's."""
    system = measured["deepep_v1"]
    name, ours = f"{system['name']}, {measured['label']} (measured)", system[key]
    if key == "decode":
        span = [f"{low:g} to {high:g}" for low, high in (ours["dispatch_us"], ours["combine_us"])]
        one = f"{number(ours['one_token_pair_in_graph_us'])} (graph)"
        return [
            [name, *span, f"{number(ours['pair_in_graph_us'])} (graph)", *empty],
            [f"{name}: 1 token", "", "", one, *empty],
        ]
    combine = f"{cell(ours['combine_bf16_us'])} (sums no experts)"
    return [
        [f"{name}: {wire}, 24 SMs", cell(ours[f"dispatch_{wire}_us"]), combine, "", *empty]
        for wire in ("fp8", "bf16")
    ]


def halves(records: list[Record]) -> str:
    """Send and receive halves as a table."""
    names = ("dispatch send", "dispatch recv", "combine send", "combine recv")
    rows = [
        [f"Weft, {machine(record)}: {DECODE.get(record['case'], record['case'])}"]
        + [times(record["result"], name) for name in names]
        for record in good(records, "rounds")
        if names[0] in record["result"]["times"]
    ]
    measured = reference()["measured"]
    system = measured["deepep_v1"]
    sides = [*system["decode"]["dispatch_halves_us"], *system["decode"]["combine_halves_us"]]
    label = f"{system['name']}, {measured['label']} (measured)"
    rows.append([label, *map(number, sides)])
    return markdown(["µs, p50 / p99", *names], rows)


def cold(records: list[Record]) -> str:
    """Warm and cold caches as a table."""
    rows = [
        [
            f"Weft, {machine(record)}: {DECODE.get(record['case'], record['case'])}",
            *(times(record["result"], f"{cache}{phase}") for cache, phase in PAIRS),
        ]
        for record in good(records, "rounds")
        if "cold dispatch" in record["result"]["times"]
    ]
    headers = [f"{phase}, {'cold' if cache else 'as replayed'}" for cache, phase in PAIRS]
    return markdown(["µs, p50 / p99", *headers], rows)


PAIRS = [(cache, phase) for phase in ("dispatch", "combine") for cache in ("", "cold ")]


def harness(records: list[Record]) -> str:
    """Mean dispatch and combine times in a loop, as a table."""
    rows = []
    for record in good(records, "harness"):
        found = record["result"]["times"]
        for name, time in found.items():
            how, flush = name.split(" ")[:2]
            label = "a graph of one pair" if how == "graph" else "calls"
            rows.append(
                [
                    f"Weft, {machine(record)}: {label}, caches flushed"
                    f" {'before each pair' if flush == 'between' else 'before the loop'}",
                    number(time["slowest_mean_us"]),
                    number(time["mean_us"]),
                    number(time["min_us"]),
                ]
            )
    measured = reference()["measured"]
    system = measured["deepep_v1"]
    ours = system["decode"]
    label = f"{system['name']}, {measured['label']} (measured): calls"
    rows.append([label, "", number(ours["pair_mean_us"]), number(ours["pair_min_us"])])
    return markdown(["dispatch and combine, µs", "mean, slowest rank", "mean", "least"], rows)


def modes(records: list[Record]) -> str:
    """Eager, compiled and captured calls as a table, with host times."""
    rows = []
    for record in good(records, "modes"):
        result = record["result"]
        calls = result["host_us"]
        rows.append(
            [
                f"Weft, {machine(record)}",
                *(times(result, f"{how} round", p99=False) for how in ("graph", "eager")),
                times(result, "compiled round", p99=False),
                *(both(calls, name) for name in ("dispatch", "combine")),
                cell(calls.get("empty kernel")),
                number(max(result["compile_seconds"])),
            ]
        )
    headers = ["a round of decode, µs", "graph", "calls", "`torch.compile`"]
    headers += ["host, dispatch / `out=`", "host, combine / `out=`", "host, empty kernel"]
    headers += ["compiling, s"]
    return markdown(headers, rows)


def both(calls: dict[str, float], name: str) -> str:
    """Host time per call, and with `out=` if measured."""
    given = calls.get(f"{name} out=")
    return number(calls[name]) + ("" if given is None else f" / {number(given)}")


def late(records: list[Record]) -> str:
    """A late rank's times as a table, from the rank's arrival on."""
    rows = []
    for record in good(records, "late"):
        result = record["result"]
        last = result["of_late_rank"]
        rows.append(
            [
                f"Weft, {machine(record)}, {result['late_us']:.0f} µs late",
                times(result, "on time dispatch"),
                times({"times": last}, "late dispatch"),
                times(result, "on time combine"),
                times({"times": last}, "late combine"),
            ]
        )
    headers = ["µs, p50 / p99", "dispatch, all on time", "dispatch, of the late rank"]
    headers += ["combine, all on time", "combine, of the late rank"]
    return markdown(headers, rows)


def gemm(records: list[Record]) -> str:
    """Rounds beside a GEMM as a table, on all SMs or on the remaining ones."""
    rows = []
    for record in good(records, "gemm"):
        found = {name: time["slowest_p50_us"] for name, time in record["result"]["times"].items()}
        sms = record["workload"]["num_sms"]
        for prefix, how in (("", "on all SMs"), ("carveout ", f"leaves {sms} SMs")):
            if f"{prefix}alone" not in found:
                continue
            alone, beside, gemm_us, slowed = (
                found[prefix + name]
                for name in ("alone", "with gemm", "gemm alone", "gemm with rounds")
            )
            whole = found["gemm alone"]
            rows.append(
                [
                    f"Weft, {machine(record)}, {sms} SMs; GEMM {how}",
                    number(alone),
                    f"{number(beside)} ({beside / alone:.2f})",
                    f"{number(gemm_us)} ({gemm_us / whole:.2f})",
                    f"{number(slowed)} ({slowed / whole:.2f})",
                ]
            )
    headers = ["prefill, µs (ratio)", "round alone", "round beside a GEMM"]
    headers += ["GEMM alone", "GEMM beside rounds"]
    return markdown(headers, rows)


def start(records: list[Record]) -> str:
    """Seconds until the first round ends, as a table."""
    rows = []
    for record in good(records, "start"):
        result = record["result"]
        builds = [build["seconds"] for build in result["builds"] if build]
        rows.append(
            [
                f"Weft, {machine(record)}, cache {record['workload']['cache']}",
                number(max(result["constructor_seconds"])),
                cell(max(builds) if builds else None),
                number(max(result["first_round_seconds"])),
                f"{result['heap_bytes'] / 2**20:.0f} MiB",
            ]
        )
    headers = ["decode, seconds of the slowest rank", "constructor", "of it, kernels"]
    return markdown([*headers, "first round", "symmetric memory"], rows)


def sweep(records: list[Record]) -> str:
    """Decode with one parameter changed at a time, as a table."""
    rows = []
    for record in good(records, "rounds"):
        if record["case"] != "decode" and not record["case"].startswith("sweep "):
            continue
        result, moved = record["result"], record["result"]["bytes"]
        rows.append(
            [
                f"{machine(record)}: {record['case'].removeprefix('sweep ').replace('_', '-')}",
                times(result, "dispatch"),
                times(result, "combine"),
                times(result, "round"),
                cell(moved["dispatch_gb_per_s"]),
                cell(moved["combine_gb_per_s"]),
            ]
        )
    headers = ["µs, p50 / p99", "dispatch", "combine", "both", "dispatch, GB/s", "combine, GB/s"]
    return markdown(headers, rows)


def modelled(records: list[Record]) -> Model | None:
    """The model, fitted to two-GPU records."""
    two = [record for record in good(records, "rounds") if record["origin"]["ranks"] == 2]
    two = [record for record in two if len(record["origin"]["gpus"]) == 2]
    return Model.of(two, reference()["measured"]["limits"])


def model(records: list[Record]) -> str:
    """Predictions for eight GPUs as a table, term by term, and the goals."""
    made = modelled(records)
    if made is None:
        return NOT_MEASURED
    rows = []
    for case, label in MODELLED.items():
        both = [0.0, 0.0]
        for phase in PHASES:
            if case not in made.records:
                continue
            terms = made.predict(made.records[case]["workload"], phase, 8)
            goal = GOALS[phase] if label.startswith("fp8") else None
            rows.append(
                [
                    f"{label}: {phase}",
                    *(number(term) for term in (terms.latency, terms.peers, terms.link)),
                    *(number(term) for term in (terms.local, terms.total, terms.apart)),
                    cell(goal),
                ]
            )
            both = [sum(pair) for pair in zip(both, (terms.total, terms.apart), strict=True)]
        if case == "decode":
            token = number(made.one_token(8))
            rows.append(["decode: both", *[""] * 4, *map(number, both), number(GOALS["pair"])])
            rows.append(["1 token: both", *[""] * 4, token, "", number(GOALS["one token"])])
    headers = ["8 GPUs, µs, predicted", "latency", "peers", "link", "local"]
    return markdown([*headers, "predicted", "without overlap", "goal"], rows)


#: Cases in the prediction table.
MODELLED = {
    "decode": "decode",
    "prefill 24": "fp8, 24 SMs",
    "prefill 64": "fp8, 64 SMs",
    "prefill bf16": "bf16, 24 SMs",
}


def model_checks(records: list[Record]) -> str:
    """Measured and predicted times on two GPUs, as a table."""
    made = modelled(records)
    if made is None:
        return NOT_MEASURED

    def shown(found: dict[str, tuple[float, float]], phase: str) -> list[str]:
        if phase not in found:
            return ["fitted", "", ""]
        measured, predicted = found[phase]
        # Not "-0%".
        deviation = round(predicted / measured - 1, 2) + 0.0
        return [number(measured), number(predicted), f"{deviation:+.0%}"]

    names = (*PHASES, "both")
    rows = [
        [case, *(text for phase in names for text in shown(found, phase))]
        for case, found in made.deviations().items()
    ]
    headers = [text for phase in names for text in (phase, "predicted", "deviation")]
    return markdown(["2 GPUs, µs", *headers], rows)


def not_measured(records: list[Record]) -> str:
    """Cases whose last run failed or gave wrong results, as a table."""
    rows = [
        [
            f"{record['case']}, {machine(record)}",
            record["status"],
            # A traceback's last line has the error.
            (record["reason"] or "").strip().splitlines()[-1].strip().replace("|", "\\|")[:200],
        ]
        for record in records
        if record["status"] != "ok"
    ]
    if records and not rows:
        return "None: all started cases ended with correct results."
    return left(["case", "outcome", "why"], rows)


def picture(records: list[Record]) -> str:
    """Link to the plot, if there are results."""
    if not bars(records):
        return NOT_MEASURED
    return f"![Dispatch, combine and both of decode, beside others](../images/{PICTURE.name})"


def bars(records: list[Record]) -> dict[str, list[float | None]]:
    """Decode times by system: dispatch, combine, both."""
    found: dict[str, list[float | None]] = {}
    for record in good(records):
        if record["case"] == "decode":
            taken = record["result"]["times"]
            found[f"Weft, {machine(record)}"] = [
                taken[name]["slowest_p50_us"] for name in ("dispatch", "combine", "round")
            ]
            beside = record["result"].get("beside", {}).get("times")
            if beside:
                found[f"NCCL, as many bytes, {machine(record)}"] = [
                    beside[name]["slowest_p50_us"] for name in ("dispatch", "combine", "round")
                ]
    if not found:
        return {}
    known = reference()
    measured = known["measured"]
    ours = measured["deepep_v1"]["decode"]
    label = f"{measured['deepep_v1']['name']}, {measured['label']}, measured"
    found[label] = [ours["dispatch_us"], ours["combine_us"], ours["pair_mean_us"]]
    for row in known["published"]["decode"]["rows"]:
        found[f"{row['name']}, published"] = [row["dispatch_us"], row["combine_us"], None]
    return found


def draw_decode(records: list[Record], path: Path) -> bool:
    """Draw the plot if there are results; True if drawn."""
    systems = bars(records)
    if not systems:
        return False
    from weft.report.figure import draw_bars, save

    title = "128 tokens a rank, hidden 7168, 256 experts, top-8, fp8 out, bf16 back"
    # The palette has eight colours: Weft and NCCL on the largest machines are first.
    shown = dict(list(systems.items())[:8])
    save(draw_bars(["dispatch", "combine", "both"], shown, title=title, y="µs, slowest rank"), path)
    return True


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "headline": exchanges({"decode": DECODE["decode"]}, "decode"),
    "where": where,
    "picture": picture,
    "decode": exchanges(DECODE, "decode"),
    "halves": halves,
    "cold": cold,
    "harness": harness,
    "prefill": exchanges(PREFILL, "prefill"),
    "modes": modes,
    "late": late,
    "gemm": gemm,
    "start": start,
    "sweep": sweep,
    "model": model,
    "model-checks": model_checks,
    "not-measured": not_measured,
}
