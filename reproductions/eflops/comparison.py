"""EFLOPS article figures in both columns, beside the published ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reproductions.eflops.clusters import BIGRAPH, BY_NODE, IN_TURN, SINGLE_NIC
from reproductions.eflops.columns import ALGORITHMS, LARGE, MODELS, RANKS, SMALL, Column
from reproductions.report import deviation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Trained", "application_rows", "figures", "gbps", "single_nic_rows", "train_all"]


class Trained(NamedTuple):
    """Training iteration times."""

    model: str
    network: str
    order: str
    algorithm: str
    overlap: bool
    iteration_s: float
    communication_s: float


def train_all(column: Column, advance: Callable[[int], None]) -> list[Trained]:
    """All models on the article's cluster, and the classifier with one NIC for each node."""
    runs = [
        (model, BIGRAPH, BY_NODE, algorithm, overlap)
        for model in MODELS
        for algorithm in ("ring", "hdrm")
        for overlap in (False, True)
    ]
    runs += [
        ("million-class", SINGLE_NIC, order, algorithm, False)
        for algorithm in ("ring", "tree", "hd")
        for order in (BY_NODE, IN_TURN)
    ]
    trained = []
    for model, network, order, algorithm, overlap in runs:
        times = column.train(model, network, order, algorithm, overlap=overlap)
        trained.append(Trained(model, network, order, algorithm, overlap, **times))
        advance(2)
    return trained


def find(trained: Sequence[Trained], model: str, algorithm: str, *, overlap: bool) -> Trained:
    """A model's iteration by an algorithm on the article's cluster."""
    key = (model, BIGRAPH, algorithm, overlap)
    return next(
        each for each in trained if (each.model, each.network, each.algorithm, each.overlap) == key
    )


def application_rows(
    column: str, trained: Sequence[Trained], published: dict[str, Any]
) -> list[dict[str, Any]]:
    """HDRM's gain over ring for each model, with and without overlap."""
    rows = []
    for model in MODELS:
        name = model.replace("-", "_")
        for overlap in (False, True):
            ring = find(trained, model, "ring", overlap=overlap)
            hdrm = find(trained, model, "hdrm", overlap=overlap)
            known = {} if overlap else published["published"]
            rows.append(
                {
                    "column": column,
                    "model": model,
                    "from": published["models"][model],
                    "overlap": overlap,
                    "ring_iteration_s": ring.iteration_s,
                    "hdrm_iteration_s": hdrm.iteration_s,
                    "ring_communication_s": ring.communication_s,
                    "hdrm_communication_s": hdrm.communication_s,
                    "communication_gain": ring.communication_s / hdrm.communication_s - 1.0,
                    "end_to_end_gain": ring.iteration_s / hdrm.iteration_s - 1.0,
                    "published_communication_gain": known.get(f"{name}_communication_gain"),
                    "published_end_to_end_gain": known.get(f"{name}_end_to_end_gain"),
                }
            )
    return rows


def single_nic_rows(
    column: str, trained: Sequence[Trained], published: dict[str, float]
) -> list[dict[str, Any]]:
    """The classifier with one NIC for each node, by each baseline that the article may mean."""
    hdrm = find(trained, "million-class", "hdrm", overlap=False)
    return [
        {
            "column": column,
            "algorithm": single.algorithm,
            "order": single.order,
            "communication_s": single.communication_s,
            "iteration_s": single.iteration_s,
            "communication_ratio": single.communication_s / hdrm.communication_s,
            "end_to_end_gain": single.iteration_s / hdrm.iteration_s - 1.0,
            "published_ratio": published["million_class_single_nic_communication"],
            "published_gain": published["million_class_single_nic_end_to_end_gain"],
        }
        for single in trained
        if single.network == SINGLE_NIC
    ]


def gbps(time_s: float) -> float:
    """Algorithm bandwidth for a 256 MiB all-reduce."""
    return LARGE * 8e-9 / time_s


class Times(NamedTuple):
    """All-reduce times on the BiGraph behind the figures, in seconds."""

    #: 1 KiB and 256 MiB on 64 GPUs, by algorithm.
    small: dict[str, float]
    large: dict[str, float]
    #: 1 KiB by HDRM on 4096 GPUs.
    huge: float
    #: HDRM step time beyond the bytes.
    step: float


def times_of(column: Column) -> Times:
    """Measure the all-reduces behind the figures."""

    def time(ranks: int, algorithm: str, size: int) -> float:
        return column.measure(BIGRAPH, ranks, algorithm, size).time_s

    return Times(
        small={name: time(RANKS, name, SMALL) for name in ALGORITHMS},
        large={name: time(RANKS, name, LARGE) for name in ALGORITHMS},
        # Two more levels with the smallest vector are four steps with next to no bytes.
        step=(time(128, "hdrm", SMALL) - time(32, "hdrm", SMALL)) / 4.0,
        huge=time(4096, "hdrm", SMALL),
    )


#: Bandwidth bound for an all-reduce over 64 ranks on 100 Gb/s links: 50.8 Gb/s.
BOUND_GBPS = 100.0 / 2.0 * RANKS / (RANKS - 1)


def all_reduce_figures(times: Times) -> dict[str, tuple[str, float]]:
    """All-reduce figures: the published value's key, and the simulated value."""
    small, large = times.small, times.large
    return {
        "1 KiB: time of ring / HDRM": ("small_hdrm_over_ring", small["ring"] / small["hdrm"]),
        "256 MiB: HDRM, Gb/s": ("large_hdrm_gbps", gbps(large["hdrm"])),
        "256 MiB: ring, Gb/s": ("", gbps(large["ring"])),
        "256 MiB: tree, Gb/s": ("", gbps(large["tree"])),
        "256 MiB: HD, ECMP, Gb/s": ("", gbps(large["hd"])),
        "256 MiB: HDRM minus ring, Gb/s": (
            "large_hdrm_minus_ring_gbps",
            gbps(large["hdrm"]) - gbps(large["ring"]),
        ),
        "256 MiB: HDRM, share of the bandwidth bound": ("", gbps(large["hdrm"]) / BOUND_GBPS),
        "1 KiB: HDRM, 4096 GPUs / 64, beyond the extra steps": (
            "",
            times.huge / (small["hdrm"] + times.step * 12.0),
        ),
    }


def application_figures(trained: Sequence[Trained]) -> dict[str, tuple[str, float]]:
    """Training figures: the published value's key, and the simulated value."""
    figures: dict[str, tuple[str, float]] = {}
    for model, title in (
        ("million-class", "million-class"),
        ("bert", "BERT"),
        ("resnet50", "ResNet-50"),
    ):
        ring = find(trained, model, "ring", overlap=False)
        hdrm = find(trained, model, "hdrm", overlap=False)
        key = model.replace("-", "_")
        figures[f"{title}: communication gain of HDRM"] = (
            f"{key}_communication_gain",
            ring.communication_s / hdrm.communication_s - 1.0,
        )
        figures[f"{title}: end-to-end gain of HDRM"] = (
            f"{key}_end_to_end_gain",
            ring.iteration_s / hdrm.iteration_s - 1.0,
        )
    hdrm = find(trained, "million-class", "hdrm", overlap=False)
    single = next(
        each
        for each in trained
        if (each.network, each.order, each.algorithm) == (SINGLE_NIC, IN_TURN, "hd")
    )
    figures["million-class: communication, single NIC / EFLOPS"] = (
        "million_class_single_nic_communication",
        single.communication_s / hdrm.communication_s,
    )
    figures["million-class: end-to-end gain over single NIC"] = (
        "million_class_single_nic_end_to_end_gain",
        single.iteration_s / hdrm.iteration_s - 1.0,
    )
    return figures


def figures(
    columns: Sequence[Column],
    trained: dict[str, list[Trained]],
    published: dict[str, float],
    advance: Callable[[int], None],
) -> list[dict[str, Any]]:
    """One row for each figure in the article."""
    found = {}
    times = {}
    for column in columns:
        times[column.name] = times_of(column)
        found[column.name] = all_reduce_figures(times[column.name]) | application_figures(
            trained[column.name]
        )
        advance(6)
    rows: list[dict[str, Any]] = []
    for figure, (key, ideal) in found["ideal"].items():
        fitted = found["fitted"][figure][1]
        known = published.get(key)
        rows.append(
            {
                "figure": figure,
                "published": known,
                "ideal": ideal,
                "fitted": fitted,
                "ideal_deviation": deviation(ideal, known),
                "fitted_deviation": deviation(fitted, known),
            }
        )
    for figure, size in (("1 KiB", "small"), ("256 MiB", "large")):
        orders = {name: by_speed(getattr(each, size)) for name, each in times.items()}
        rows.append({"figure": f"{figure}: from fast to slow", "published": None} | orders)
    return rows


def by_speed(times: dict[str, float]) -> str:
    """Algorithms from fast to slow."""
    return " < ".join(sorted(times, key=lambda name: times[name]))
