"""A recommendation model on 128 nodes, fused and not fused, beside the published gain.

The publication gives the gain and no sizes, so every size here is an assumption; the sensitivity
says what hangs on each. `docs/dlrm.md` tells the story.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from weft.cli.progress import Progress
from weft.sim.article import Table, markdown, percent, published
from weft.sim.sweep import simulate
from weft.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

__all__ = ["document", "notes", "pictures", "reproduce", "tables"]

RANKS: Final = 128
QUICK_RANKS: Final = 16
GBPS: Final = 200
LATENCY_US: Final = 0.5
#: What is assumed: a value, and why.
ASSUMED: Final[dict[str, tuple[float, str]]] = {
    "ranks": (RANKS, "published"),
    "gbps": (GBPS, "one NIC of a node; a network without oversubscription"),
    "latency_us": (LATENCY_US, "of a link"),
    "message_latency_s": (2e-6, "of a message beside its links, as one writes over a NIC"),
    "post_s": (0.0, "posting of a write: the kernel does it while it computes"),
    "launch_s": (10e-6, "of the pooling kernel"),
    "batch": (256, "samples of each node"),
    "tables": (8, "of each node: a thousand in all"),
    "dimension": (128, "elements of an embedding, of 4 bytes"),
    "pooling": (64, "embeddings summed for each sample and table"),
    "gather_bytes_per_s": (1.6e12, "memory bandwidth of an accelerator of that time"),
    "bottom_flops": (10e6, "of the bottom MLP for a sample, forward"),
    "top_flops": (40e6, "of interaction and top MLP"),
    "flops_per_s": (20e12, "float32, as reached"),
    "update_passes": (1.0, "the update of tables moves as many bytes as pooling"),
    "fused_overhead": (0.0, "pooling in the fused kernel takes no longer"),
}
JOB: Final = (
    "batch",
    "tables",
    "dimension",
    "pooling",
    "gather_bytes_per_s",
    "bottom_flops",
    "top_flops",
    "flops_per_s",
    "update_passes",
    "fused_overhead",
)
#: What is varied in turn.
VARIED: Final[Sequence[tuple[str, dict[str, float]]]] = (
    ("embeddings summed: 16", {"pooling": 16}),
    ("embeddings summed: 32", {"pooling": 32}),
    ("embeddings summed: 128", {"pooling": 128}),
    ("batch 64", {"batch": 64}),
    ("batch 1024", {"batch": 1024}),
    ("NICs of 100 Gb/s", {"gbps": 100}),
    ("NICs of 400 Gb/s", {"gbps": 400}),
    ("memory twice as fast", {"gather_bytes_per_s": 3.2e12}),
    ("MLPs ten times as large", {"bottom_flops": 100e6, "top_flops": 400e6}),
    ("updates twice as long", {"update_passes": 2.0}),
    ("pooling 10% longer where fused", {"fused_overhead": 0.1}),
    ("messages 20 µs longer under way", {"message_latency_s": 22e-6}),
    ("posting of 0.14 µs, as by a host on ConnectX-7", {"post_s": 0.14e-6}),
    ("the forward pass alone", {"training": 0}),
)


def scenario(values: dict[str, float], ranks: int, seed: int) -> dict[str, Any]:
    """The model with these sizes."""
    hosts = 16 if ranks >= 16 else ranks
    leaves = ranks // hosts
    topology = (
        f"fat-tree:leaves={leaves},spines={hosts},hosts={hosts}"
        f",gbps={values['gbps']!r},latency_us={values['latency_us']!r}"
    )
    constants = {name: values[name] for name in ("message_latency_s", "post_s", "launch_s")}
    job: dict[str, Any] = {name: values[name] for name in JOB}
    for name in ("batch", "tables", "dimension"):
        job[name] = int(job[name])
    return {
        "scenario": "dlrm",
        "cluster": {
            "topology": topology,
            "routing": "static",
            "seed": seed,
            "constants": {"set": constants},
        },
        "job": job | {"ranks": ranks, "training": bool(values.get("training", 1))},
        "links": 0,
    }


def reproduce(*, seed: int, quick: bool, progress: bool) -> dict[str, Any]:
    """Simulate an iteration, fused and not, and with each assumption changed.

    Args:
        seed: of all chance; there is none in it.
        quick: 16 nodes, and no sensitivity.
        progress: whether to show how far it is.
    """
    known = published("fused_operators")
    assumed = {name: value for name, (value, _) in ASSUMED.items()}
    ranks = QUICK_RANKS if quick else RANKS
    varied = () if quick else VARIED
    with Progress("iterations", 2 * (1 + len(varied)), enabled=progress) as bar:
        outcome = simulate(scenario(assumed, ranks, seed), lambda _, __: True)
        bar.advance(2)
        cpu_s = outcome["cpu_s"]
        results = outcome["results"]
        sensitivity = []
        for what, change in varied:
            other = simulate(scenario(assumed | change, ranks, seed), lambda _, __: True)
            bar.advance(2)
            cpu_s += other["cpu_s"]
            sensitivity.append(
                {"varied": what}
                | {name: other["results"][name] for name in ("unfused_s", "fused_s", "gain")}
            )
    gain = known["dlrm_128_nodes_simulated"]
    return {
        "article": "dlrm",
        "source": known["source"],
        "time_s": outcome["time_s"],
        "max_link_load": outcome["max_link_load"],
        "cpu_s": cpu_s,
        "constants": {name: value for name, (value, _) in ASSUMED.items()} | {"ranks": ranks},
        "results": results,
        "published_gain": gain,
        "deviation_points": results["gain"] - gain,
        "sensitivity": sensitivity,
    }


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """The tables, for people."""
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
    assumed = [(name, f"{value:g}", why) for name, (value, why) in ASSUMED.items()]
    yield "Assumptions", ("assumed", "value", "why"), assumed
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
    """What is said below the tables."""
    return [
        f"Simulated gain {found['results']['gain']:.1%}, published {found['published_gain']:.0%}:"
        f" {found['deviation_points'] * 100:+.1f} points. Nothing was fitted; every size is"
        " assumed.",
        f"Simulated in {found['cpu_s']:.2g} s of one core.",
    ]


def document(found: dict[str, Any]) -> str:
    """The same as a page."""
    parts = ["# A recommendation model, fused and not fused\n", f"Published: {found['source']}."]
    for title, headers, rows in tables(found):
        parts.append(f"\n## {title}\n\n{markdown(headers, rows)}")
    return "\n".join([*parts, "", *notes(found)]) + "\n"


def pictures(found: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """The gain as each assumption changes."""
    from weft.sim import plot

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
