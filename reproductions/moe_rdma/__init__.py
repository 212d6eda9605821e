"""MoE dispatch and combine reproduced on ConnectX-7 and EFA; docs/moe-rdma.md is its page.

The network constants (bandwidth, message latency, posting) come from separately published
measurements on single operations. A round's costs on the GPUs are not published and are fitted to
the one-node rows, where no network takes part. So the rows with 16 ranks and more are predictions.

- `published`: check on the published tables
- `machines`: constants, derived and fitted; one round as a scenario
- `verbs`: Weft over the provider verbs, with the host costs measured here
- `sensitivity`: how the prediction changes with each constant and assumption
- `scenarios`: a decode round with 16 ranks on each machine
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Final

from reproductions.moe_rdma import verbs
from reproductions.moe_rdma.machines import (
    MACHINES,
    NODE,
    OFI_HOST_S,
    OPERATIONS,
    PHASES,
    PRIVATE_ROWS,
    PUBLISHED,
    Constants,
    Runs,
    derive,
    fit_dispatch,
    fit_node,
    known,
)
from reproductions.moe_rdma.sensitivity import VARIED, vary
from reproductions.report import Table, deviation, percent
from weft.base.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

__all__ = ["NAME", "TITLE", "notes", "pictures", "reproduce", "tables"]

NAME: Final = "moe-rdma"
TITLE: Final = "MoE dispatch and combine over RDMA, simulated"

#: Rank counts in the table's rows.
EP: Final = (8, 16, 32, 64)


def reproduce(*, seed: int, quick: bool, progress: bool) -> dict[str, Any]:
    """Simulate the published table.

    Args:
        seed: random seed for the expert choice.
        quick: only 8 and 16 ranks, without sensitivity.
        progress: whether to show a progress bar.
    """
    eps = [ep for ep in EP if not quick or ep <= 16]
    # Fits and sensitivity take about as long as the table.
    total = len(MACHINES) * (2 * 3 * sum(eps) + 2 * 18 * sum(ep for ep in eps if 8 < ep <= 32))
    total += 4 * sum(eps)
    costs = verbs.host()
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
        over_verbs = verbs.compare(runs, machines[verbs.MACHINE]["constants"], costs, eps)
        sensitivity = [] if quick else vary(runs, machines)
    return {
        "article": NAME,
        "sources": {
            name: PUBLISHED[name]["source"]
            for name in ("moe_decode_128_tokens", "moe_prefill_4096_tokens", "proxy_and_engine")
        },
        "time_s": runs.time_s,
        "max_link_load": runs.max_link_load,
        "cpu_s": runs.cpu_s,
        "constants": machines,
        "rows": rows,
        "verbs": {"host": costs, "rows": over_verbs},
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
    """Both operations in one row: published, predicted, fitted, and by Weft's own rules.

    On EFA also by Weft's rules over the provider ofi, with each write's host cost.
    """
    own = constants
    if machine == "efa":
        own = constants | {"post_s": constants["post_s"] + OFI_HOST_S}
    predicted = runs.times(machine, ep, tokens, constants)
    with_fit = runs.times(machine, ep, tokens, fitted, **changes)
    weft = runs.times(machine, ep, tokens, constants, **verbs.RULES)
    over_ofi = runs.times(machine, ep, tokens, own, **verbs.RULES) if own is not constants else None
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
            "ofi_us": over_ofi[name] if over_ofi else None,
            "ofi_deviation": deviation(over_ofi[name], was[name]) if over_ofi else None,
            "is_fit": ep == NODE,
        }
        for name in OPERATIONS
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Deviation in the rows without fitted constants."""
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
    """Result tables."""
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
        is_efa = machine == "efa"
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
                    *([row["ofi_us"], percent(row["ofi_deviation"])] if is_efa else []),
                )
                for row in found["rows"]
                if (row["machine"], row["phase"]) == (machine, phase)
            ]
            columns = (*headers, "over ofi", "off") if is_efa else headers
            yield f"{title}, {phase}: {tokens} tokens of each rank, µs", columns, rows
    yield from verbs.tables(found["verbs"]["rows"])
    yield "Constants", ("constant", *MACHINES.values(), "from"), constant_rows(found)
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


def constant_rows(found: dict[str, Any]) -> list[tuple[object, ...]]:
    """Each machine's constants, with sources."""
    machines, host = found["constants"], found["verbs"]["host"]
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
    source = "last column of EFA only: what Weft's host adds to a posting over ofi, µs; measured"
    rows.append(("ofi_host_s", "", f"{OFI_HOST_S * 1e6:.4g}", source))
    source = "over verbs only: what Weft's host adds to a write, µs; measured on a null device"
    rows.append(("verbs_write_s", f"{host['write_s'] * 1e6:.4g}", "", source))
    source = "over verbs only: what Weft's host adds to each row of dispatch, µs; likewise"
    rows.append(("verbs_row_s", f"{host['row_s'] * 1e6:.4g}", "", source))
    return rows


def notes(found: dict[str, Any]) -> list[str]:
    """Sentences below the tables."""
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
    bare = {
        (row["phase"], row["ep"], row["operation"]): row["weft_us"]
        for row in found["rows"]
        if row["machine"] == verbs.MACHINE
    }
    added = [
        row["verbs_us"] / bare[row["phase"], row["ep"], row["operation"]] - 1
        for row in found["verbs"]["rows"]
    ]
    lines.append(
        f"Host costs over verbs lengthen the operations of Weft's rules by {median(added):.1%} in"
        f" the median, {max(added):.1%} at most."
    )
    host = found["verbs"]["host"]
    lines.append(
        f"Posts to a null device recorded at {host['at'][:16].replace('T', ' ')} UTC, commit"
        f" {host['commit']}, {host['processor']}."
    )
    lines.append(f"Simulated in {found['cpu_s']:.1f} s of one core.")
    return lines


def pictures(found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Time by ranks, for each machine and over verbs."""
    from weft.report import figure as plot

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
        yield f"{NAME}-{machine}.svg", figure
    yield f"{NAME}-verbs.svg", verbs.picture(found["verbs"]["rows"])
