"""Recommendation model reproduction on 128 nodes, fused and unfused; docs/dlrm.md is its page.

The publication gives the gain and no sizes, so every size is an assumption: `scenarios` has the
values, `assumptions.json` the reasons and the sensitivity variations.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

from reproductions.report import Table, percent, read
from weft.base.progress import Progress
from weft.sim import simulate
from weft.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

__all__ = ["NAME", "TITLE", "notes", "pictures", "reproduce", "tables"]

NAME: Final = "dlrm"
TITLE: Final = "A recommendation model, fused and unfused"
SCENARIO: Final[dict[str, Any]] = read("dlrm", "scenarios", "iteration.json")
ASSUMPTIONS: Final[dict[str, Any]] = read("dlrm", "assumptions.json")
PUBLISHED: Final[dict[str, Any]] = read("dlrm", "published.json")
#: Network for a `--quick` run.
QUICK: Final = {"leaves": 1, "spines": 16, "hosts": 16, "ranks": 16}


def groups(scenario: dict[str, Any]) -> list[dict[str, Any]]:
    """Parts of a scenario with assumed values: network, constants, job."""
    cluster = scenario["cluster"]
    return [cluster["topology"]["fat-tree"], cluster["constants"]["set"], scenario["job"]]


def changed(change: dict[str, Any], seed: int) -> dict[str, Any]:
    """The scenario with other values."""
    scenario = deepcopy(SCENARIO)
    scenario["cluster"]["seed"] = seed
    scenario["links"] = 0
    for name, value in change.items():
        next(group for group in groups(scenario) if name in group)[name] = value
    return scenario


def assumed() -> dict[str, float]:
    """Assumed values by name."""
    values = {name: value for group in groups(SCENARIO) for name, value in group.items()}
    return {name: values[name] for name in ASSUMPTIONS["reasons"]}


def reproduce(*, seed: int, quick: bool, progress: bool) -> dict[str, Any]:
    """Simulate an iteration, fused and unfused, and with each assumption changed.

    Args:
        seed: scenario seed; no draw depends on it.
        quick: 16 nodes, and no sensitivity.
        progress: whether to show a progress bar.
    """
    base = QUICK if quick else {}
    varied = [] if quick else ASSUMPTIONS["varied"]
    with Progress("iterations", 2 * (1 + len(varied)), enabled=progress) as bar:
        outcome = simulate(changed(base, seed))
        bar.advance(2)
        cpu_s = outcome["cpu_s"]
        sensitivity = []
        for variation in varied:
            other = simulate(changed(base | variation["change"], seed))
            bar.advance(2)
            cpu_s += other["cpu_s"]
            sensitivity.append(
                {"varied": variation["varied"]}
                | {name: other["results"][name] for name in ("unfused_s", "fused_s", "gain")}
            )
    gain = PUBLISHED["dlrm_128_nodes_simulated"]
    return {
        "article": NAME,
        "source": PUBLISHED["source"],
        "time_s": outcome["time_s"],
        "max_link_load": outcome["max_link_load"],
        "cpu_s": cpu_s,
        "constants": assumed() | {"ranks": base.get("ranks", SCENARIO["job"]["ranks"])},
        "results": outcome["results"],
        "published_gain": gain,
        "deviation_points": outcome["results"]["gain"] - gain,
        "sensitivity": sensitivity,
    }


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """Result tables."""
    results = found["results"]
    rows = [
        ("gain of fusing", percent(found["published_gain"]), percent(results["gain"])),
        ("an iteration, not fused", None, format_seconds(results["unfused_s"])),
        ("an iteration, fused", None, format_seconds(results["fused_s"])),
        ("pooling", None, format_seconds(results["pooling_s"])),
        (
            "from the end of pooling until all vectors are there, not fused",
            None,
            format_seconds(results["forward_exchange_s"]["unfused"]),
        ),
        ("the same, fused", None, format_seconds(results["forward_exchange_s"]["fused"])),
        ("bytes for each peer", None, format_bytes(results["bytes_for_peer"])),
    ]
    yield f"{found['constants']['ranks']} nodes", ("", "published", "simulated"), rows
    values = assumed()
    reasons = [(name, f"{values[name]:g}", why) for name, why in ASSUMPTIONS["reasons"].items()]
    yield "Assumptions", ("assumed", "value", "why"), reasons
    if found["sensitivity"]:
        varied = [
            (
                row["varied"],
                format_seconds(row["unfused_s"]),
                format_seconds(row["fused_s"]),
                percent(row["gain"]),
            )
            for row in found["sensitivity"]
        ]
        yield "Sensitivity", ("what is varied", "not fused", "fused", "gain"), varied


def notes(found: dict[str, Any]) -> list[str]:
    """Sentences below the tables."""
    return [
        f"Simulated gain {found['results']['gain']:.1%}, published {found['published_gain']:.0%}:"
        f" {found['deviation_points'] * 100:+.1f} points. No size was fitted; all are"
        " assumed.",
        f"Simulated in {found['cpu_s']:.2g} s of one core.",
    ]


def pictures(found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Gain with each assumption changed."""
    from weft.report import figure as plot

    rows = [("as assumed", found["results"]["gain"])]
    rows += [(row["varied"], row["gain"]) for row in found["sensitivity"]]
    figure, (axes,) = plot.new_figure(1, 7.0, 0.9 + 0.3 * len(rows))
    places = range(len(rows))
    axes.barh(places, [100 * gain for _, gain in rows], color=plot.COLOURS[0], height=0.6)
    axes.axvline(100 * found["published_gain"], color=plot.COLOURS[5], linestyle="--")
    axes.set_yticks(places, [name for name, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("gain of fusing in % (dashed: published)")
    yield "dlrm.svg", figure
