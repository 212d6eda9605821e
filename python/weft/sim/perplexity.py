"""Published times of MoE dispatch and combine on ConnectX-7 and on EFA, simulated.

What the network does (bandwidth, latency of a message, posting) comes from measurements of single
operations that were published separately; what a round costs on the GPUs is open, and is taken
from the rows of one node, where no network takes part. So the rows of 16 ranks and more are
predictions. `docs/perplexity.md` tells the story.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Final

from weft.cli.progress import Progress
from weft.sim.article import Table, deviation, markdown, percent, published
from weft.sim.sweep import simulate
from weft.sim.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

__all__ = ["document", "notes", "pictures", "reproduce", "tables"]

MACHINES: Final = {"cx7": "ConnectX-7", "efa": "EFA"}
#: NICs of a GPU.
NICS: Final = {"cx7": 1, "efa": 2}
PHASES: Final = {
    "decode": ("moe_decode_128_tokens", 128),
    "prefill": ("moe_prefill_4096_tokens", 4096),
}
OPERATIONS: Final = ("dispatch", "combine")
NODE: Final = 8
EP: Final = (8, 16, 32, 64)
#: The default of the benchmark program that the table was made with.
PRIVATE_ROWS: Final = 256
#: Weft's own.
WEFT_PRIVATE_ROWS: Final = 32
GIGABIT: Final = 1e9 / 8

Constants = dict[str, float]


def derive(machine: str) -> Constants:
    """What a machine's network does, from published measurements of single operations.

    The time of one write is taken for `latency + bytes / bandwidth`. The bandwidth is the slope
    between the two longest writes, the latency what is left of the shorter ones, and posting the
    slope of the time of a scatter over the number of its peers.
    """
    engine = published("proxy_and_engine")
    writes = engine["single_write_gbps"]
    sizes = [parse_size(size) for size in writes["size"]]
    times = [size / (gbps * GIGABIT) for size, gbps in zip(sizes, writes[machine], strict=True)]
    bandwidth = (sizes[-1] - sizes[-2]) / (times[-1] - times[-2])
    short = list(zip(sizes, times, strict=True))[:-1]
    latency = sum(time - size / bandwidth for size, time in short) / len(short)
    posts = engine["scatter_post_us"]
    post = (posts[machine][-1] - posts[machine][0]) / (posts["ep"][-1] - posts["ep"][0])
    return {
        "bytes_per_s": bandwidth,
        "message_latency_s": latency,
        "post_s": post * 1e-6,
    }


def scenario(
    machine: str,
    ep: int,
    tokens: int,
    constants: Constants,
    seed: int,
    **changes: Any,
) -> dict[str, Any]:
    """A round on so many ranks, in nodes of eight, on a network that is never the bottleneck."""
    nics = NICS[machine]
    gbps = constants["bytes_per_s"] / GIGABIT / nics
    job = {
        "ranks": ep,
        "nics_per_rank": nics,
        "tokens": tokens,
        "copies": "expert",
        "private_rows": PRIVATE_ROWS,
        "rounds": 1,
        "barrier": True,
        "nvlink": {
            "ranks": NODE,
            "bytes_per_s": constants["nvlink_dispatch_bytes_per_s"],
            "combine_bytes_per_s": constants["nvlink_combine_bytes_per_s"],
        },
        "costs": {
            "dispatch_start_s": constants["dispatch_s"] / 2,
            "dispatch_end_s": constants["dispatch_s"] / 2,
            "combine_start_s": constants["combine_s"] / 2,
            "combine_end_s": constants["combine_s"] / 2,
            "staging_bytes_per_s": constants.get("staging_bytes_per_s"),
        },
    }
    cluster = {
        "topology": f"fat-tree:leaves=1,spines=1,hosts={ep * nics},gbps={gbps!r},latency_us=0",
        "routing": "static",
        "seed": seed,
        "constants": {"set": {name: constants[name] for name in ("message_latency_s", "post_s")}},
    }
    return {"scenario": "moe", "cluster": cluster, "job": job | changes, "links": 0}


class Runs:
    """Runs scenarios, counts what they cost, and remembers them."""

    def __init__(self, seed: int, bar: Progress) -> None:
        self.seed = seed
        self.bar = bar
        self.cpu_s = 0.0
        self.time_s = 0.0
        self.max_link_load = 0
        self.flows = 0

    def times(
        self, machine: str, ep: int, tokens: int, constants: Constants, **changes: Any
    ) -> dict[str, float]:
        """The median time of each operation over ranks, in microseconds."""
        spec = scenario(machine, ep, tokens, constants, self.seed, **changes)
        outcome = simulate(spec, lambda _, __: True)
        self.cpu_s += outcome["cpu_s"]
        self.time_s += outcome["time_s"]
        self.max_link_load = max(self.max_link_load, outcome["max_link_load"])
        self.flows += outcome["flows"]
        self.bar.advance(ep)
        results = outcome["results"]
        return {name: results[name]["p50_s"] * 1e6 for name in OPERATIONS}


def known(phase: str, machine: str, ep: int) -> dict[str, float | None]:
    """The published times of a row, in microseconds."""
    rows = published(PHASES[phase][0])["rows"]
    row = next(row for row in rows if row["ep"] == ep)
    return {name: row[name].get(f"pplx_{machine}") for name in OPERATIONS}


def fit_node(runs: Runs, machine: str, network: Constants) -> Constants:
    """What a round costs within a node: a fixed time and an NVLink rate for each operation.

    Both are exact solutions of the two rows of 8 ranks. Where one of them was not published, the
    rate is that of the other machine, which has the same NVLink.
    """
    found = dict(network)
    unit = {"dispatch": 100e9, "combine": 100e9}
    bare = network | {
        "dispatch_s": 0.0,
        "combine_s": 0.0,
        "nvlink_dispatch_bytes_per_s": unit["dispatch"],
        "nvlink_combine_bytes_per_s": unit["combine"],
    }
    moved = {
        phase: runs.times(machine, NODE, tokens, bare) for phase, (_, tokens) in PHASES.items()
    }
    for name in OPERATIONS:
        rates = {}
        for source in (machine, *(other for other in MACHINES if other != machine)):
            short, long = (known(phase, source, NODE)[name] for phase in PHASES)
            if short is not None and long is not None:
                # Bytes in units of what takes a microsecond at 100 GB/s.
                rates[source] = (moved["prefill"][name] - moved["decode"][name]) / (long - short)
        rate = rates[machine] if machine in rates else next(iter(rates.values()))
        short = known("decode", machine, NODE)[name]
        assert short is not None, "every row of decode is published"
        found[f"nvlink_{name}_bytes_per_s"] = rate * unit[name]
        found[f"{name}_s"] = (short - moved["decode"][name] / rate) * 1e-6
    return found


def fit_dispatch(
    runs: Runs, machine: str, constants: Constants, eps: Sequence[int]
) -> tuple[Constants, dict[str, Any]]:
    """The second column: what dispatch costs beyond the network, from its rows of 16 and 32 ranks.

    The rate at which a GPU copies rows to its send buffer before they leave, and whether rows
    travel before the counts are known: the choice of both that is least off in the mean square.
    """
    eps = [ep for ep in eps if NODE < ep <= 32]
    best: tuple[float, float | None, int] | None = None
    for private in (PRIVATE_ROWS, 0):
        for rate in (None, 4.8e12, 2.4e12, 1.6e12, 1.2e12, 0.8e12, 0.6e12, 0.4e12, 0.3e12):
            error = 0.0
            for phase, (_, tokens) in PHASES.items():
                for ep in eps:
                    tried = constants | ({} if rate is None else {"staging_bytes_per_s": rate})
                    times = runs.times(machine, ep, tokens, tried, private_rows=private)
                    off = deviation(times["dispatch"], known(phase, machine, ep)["dispatch"])
                    error += (off or 0.0) ** 2
            if best is None or error < best[0]:
                best = (error, rate, private)
    assert best is not None, "there are candidates"
    _, rate, private = best
    fitted = constants | ({} if rate is None else {"staging_bytes_per_s": rate})
    return fitted, {"private_rows": private}


def reproduce(*, seed: int, quick: bool, progress: bool) -> dict[str, Any]:
    """Simulate the published table.

    Args:
        seed: of the routing of tokens.
        quick: only 8 and 16 ranks, and no sensitivity.
        progress: whether to show how far it is.
    """
    eps = [ep for ep in EP if not quick or ep <= 16]
    # Fits and sensitivity take about as long as the table.
    total = len(MACHINES) * (2 * 3 * sum(eps) + 2 * 18 * sum(ep for ep in eps if 8 < ep <= 32))
    with Progress("ranks simulated", total, enabled=progress) as bar:
        runs = Runs(seed, bar)
        machines: dict[str, Any] = {}
        rows: list[dict[str, Any]] = []
        for machine in MACHINES:
            network = derive(machine)
            constants = fit_node(runs, machine, network)
            fitted, changes = fit_dispatch(runs, machine, constants, eps)
            machines[machine] = {
                "constants": constants,
                "fitted": {
                    "staging_bytes_per_s": fitted.get("staging_bytes_per_s"),
                    **changes,
                },
            }
            for phase, (_, tokens) in PHASES.items():
                for ep in eps:
                    rows += compare(runs, machine, phase, ep, tokens, constants, fitted, changes)
        sensitivity = [] if quick else vary(runs, machines)
    return {
        "article": "perplexity",
        "sources": {
            name: published(name)["source"]
            for name in ("moe_decode_128_tokens", "proxy_and_engine")
        },
        "time_s": runs.time_s,
        "max_link_load": runs.max_link_load,
        "cpu_s": runs.cpu_s,
        "constants": machines,
        "rows": rows,
        "sensitivity": sensitivity,
        "summary": summary(rows),
    }


def compare(
    runs: Runs,
    machine: str,
    phase: str,
    ep: int,
    tokens: int,
    constants: Constants,
    fitted: Constants,
    changes: dict[str, Any],
) -> list[dict[str, Any]]:
    """Both operations of one row: published, predicted, fitted, and by Weft's own rules."""
    predicted = runs.times(machine, ep, tokens, constants)
    with_fit = runs.times(machine, ep, tokens, fitted, **changes)
    weft = runs.times(machine, ep, tokens, constants, copies="rank", private_rows=WEFT_PRIVATE_ROWS)
    was = known(phase, machine, ep)
    return [
        {
            "machine": machine,
            "phase": phase,
            "ep": ep,
            "operation": name,
            "published_us": was[name],
            "predicted_us": predicted[name],
            "deviation": deviation(predicted[name], was[name]),
            "fitted_us": with_fit[name],
            "fitted_deviation": deviation(with_fit[name], was[name]),
            "weft_us": weft[name],
            "is_fit": ep == NODE,
        }
        for name in OPERATIONS
    ]


#: What is varied, and by how much; a factor on a constant, or a change of the job.
VARIED: Final[Sequence[tuple[str, Callable[[Constants], Constants], dict[str, Any]]]] = (
    ("as predicted", lambda constants: constants, {}),
    (
        "bandwidth of NICs +10%",
        lambda constants: constants | {"bytes_per_s": constants["bytes_per_s"] * 1.1},
        {},
    ),
    (
        "latency of a message +20%",
        lambda constants: constants | {"message_latency_s": constants["message_latency_s"] * 1.2},
        {},
    ),
    (
        "posting twice as long",
        lambda constants: constants | {"post_s": constants["post_s"] * 2},
        {},
    ),
    (
        "fixed costs on GPUs +20%",
        lambda constants: (
            constants | {name: constants[name] * 1.2 for name in ("dispatch_s", "combine_s")}
        ),
        {},
    ),
    (
        "NVLink -20%",
        lambda constants: (
            constants
            | {
                name: constants[name] * 0.8
                for name in ("nvlink_dispatch_bytes_per_s", "nvlink_combine_bytes_per_s")
            }
        ),
        {},
    ),
    ("no row before the counts are known", lambda constants: constants, {"private_rows": 0}),
    (
        "four rounds back to back",
        lambda constants: constants,
        {"barrier": False, "rounds": 4},
    ),
    (
        "zipf routing, exponent 1",
        lambda constants: constants,
        {"token_routing": {"kind": "zipf", "exponent": 1.0}},
    ),
)


def vary(runs: Runs, machines: dict[str, Any]) -> list[dict[str, Any]]:
    """How the times of 32 ranks change with each constant and assumption."""
    found = []
    for machine, about in machines.items():
        base: dict[tuple[str, str], float] = {}
        for what, change, job in VARIED:
            row: dict[str, Any] = {"machine": machine, "varied": what}
            for phase, (_, tokens) in PHASES.items():
                times = runs.times(machine, 32, tokens, change(about["constants"]), **job)
                for name, value in times.items():
                    before = base.setdefault((phase, name), value)
                    row[f"{phase}_{name}_us"] = value
                    row[f"{phase}_{name}_change"] = value / before - 1.0
            found.append(row)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far off the rows are that no constant was fitted to."""
    found = {}
    for machine in MACHINES:
        for column in ("deviation", "fitted_deviation"):
            off = [
                abs(row[column])
                for row in rows
                if row["machine"] == machine and row["ep"] > NODE and row[column] is not None
            ]
            if off:
                found[f"{machine}_{column}"] = {
                    "cells": len(off),
                    "median": median(off),
                    "worst": max(off),
                }
    return found


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The tables, for people."""
    headers = (
        "ranks",
        "operation",
        "published",
        "predicted",
        "off",
        "fitted",
        "off",
        "Weft's rules",
    )
    for machine, title in MACHINES.items():
        for phase, (_, tokens) in PHASES.items():
            rows = [
                (
                    row["ep"],
                    row["operation"] + (" (fit)" if row["is_fit"] else ""),
                    row["published_us"],
                    row["predicted_us"],
                    percent(row["deviation"]),
                    row["fitted_us"],
                    percent(row["fitted_deviation"]),
                    row["weft_us"],
                )
                for row in found["rows"]
                if (row["machine"], row["phase"]) == (machine, phase)
            ]
            yield f"{title}, {phase}: {tokens} tokens of each rank, µs", headers, rows
    yield "Constants", ("constant", *MACHINES.values(), "from"), constant_rows(found["constants"])
    if found["sensitivity"]:
        varied = ("machine", "what is varied, 32 ranks", *CHANGES.values())
        changes = [
            (MACHINES[row["machine"]], row["varied"], *(percent(row[name]) for name in CHANGES))
            for row in found["sensitivity"]
            if row["varied"] != VARIED[0][0]
        ]
        yield "Sensitivity of the prediction", varied, changes


CHANGES: Final = {
    f"{phase}_{name}_change": f"{phase} {name}" for phase in PHASES for name in OPERATIONS
}
FROM: Final = {
    "bytes_per_s": "bandwidth of a GPU's NICs, GB/s; single writes of 1 and 32 MiB",
    "message_latency_s": "latency of a message, µs; single writes of 64 KiB to 1 MiB",
    "post_s": "posting of a write, µs; scatters to 8 and to 64 peers",
    "nvlink_dispatch_bytes_per_s": "NVLink in dispatch, GB/s; fitted to 8 ranks",
    "nvlink_combine_bytes_per_s": "NVLink in combine, GB/s; fitted to 8 ranks",
    "dispatch_s": "dispatch beside its messages, µs; fitted to 8 ranks",
    "combine_s": "combine beside its messages, µs; fitted to 8 ranks",
}


def constant_rows(machines: dict[str, Any]) -> list[tuple[object, ...]]:
    """Each constant of each machine, and where it came from."""
    rows: list[tuple[object, ...]] = []
    for name, source in FROM.items():
        scale = 1e-9 if name.endswith("bytes_per_s") else 1e6
        values = [about["constants"][name] * scale for about in machines.values()]
        rows.append((name, *(f"{value:.4g}" for value in values), source))
    fitted = [about["fitted"] for about in machines.values()]
    staging = [each["staging_bytes_per_s"] for each in fitted]
    shown = ["none" if rate is None else f"{rate * 1e-9:.4g}" for rate in staging]
    source = (
        "second column only: copying rows to the send buffer, GB/s; dispatch of 16 and 32 ranks"
    )
    rows.append(("staging_bytes_per_s", *shown, source))
    private = [str(each["private_rows"]) for each in fitted]
    source = f"second column only: rows before the counts ({PRIVATE_ROWS} in the first); as staging"
    rows.append(("private_rows", *private, source))
    return rows


def notes(found: dict[str, Any]) -> list[str]:
    """What is said below the tables."""
    lines = []
    for machine, title in MACHINES.items():
        predicted = found["summary"].get(f"{machine}_deviation")
        fitted = found["summary"].get(f"{machine}_fitted_deviation")
        if predicted and fitted:
            lines.append(
                f"{title}, {predicted['cells']} cells of 16 ranks and more: predicted"
                f" {predicted['median']:.1%} off in the median, {predicted['worst']:.1%} at worst;"
                f" fitted {fitted['median']:.1%} and {fitted['worst']:.1%}."
            )
    lines.append(f"Simulated in {found['cpu_s']:.1f} s of one core.")
    return lines


def document(found: dict[str, Any]) -> str:
    """The same as a page."""
    parts = ["# MoE dispatch and combine, simulated beside what was published\n"]
    parts += [f"- {name}: {source}" for name, source in found["sources"].items()]
    for title, headers, rows in tables(found):
        parts.append(f"\n## {title}\n\n{markdown(headers, rows)}")
    return "\n".join([*parts, "", *notes(found)]) + "\n"


def pictures(found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Time against ranks, for each machine."""
    from weft.sim import plot

    for machine, title in MACHINES.items():
        figure, axes = plot.new_figure(2, 5.2, 3.8)
        for each, phase in zip(axes, PHASES, strict=True):
            series: plot.Series = {}
            marks: dict[str, list[tuple[float, float]]] = {}
            for row in found["rows"]:
                if (row["machine"], row["phase"]) != (machine, phase):
                    continue
                name = row["operation"]
                series.setdefault(name, []).append((row["ep"], row["predicted_us"]))
                if row["published_us"] is not None:
                    marks.setdefault(name, []).append((row["ep"], row["published_us"]))
            plot.lines(each, series, title=f"{title}, {phase}", x="ranks", y="µs", published=marks)
        yield f"perplexity-{machine}.svg", figure
