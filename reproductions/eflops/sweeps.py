"""EFLOPS reproduction sweeps: sizes, GPU counts, constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from reproductions.eflops.clusters import BIGRAPH, FAT_TREE
from reproductions.eflops.columns import ALGORITHMS, LARGE, RANKS, SMALL, Column
from reproductions.eflops.comparison import gbps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["VARIED", "ranks_weight", "sweep_constants", "sweep_ranks", "sweep_sizes"]

#: Constants in the fitted column; the fitted ones come first.
VARIED: Final = (
    "launch_s",
    "wire_efficiency",
    "segment_bytes",
    "message_latency_s",
    "post_s",
    "wait_s",
    "reduce_launch_s",
    "reduce_bytes_per_s",
)


def row(column: Column, network: str, ranks: int, algorithm: str, size: int) -> dict[str, Any]:
    """Row for one all-reduce."""
    measured = column.measure(network, ranks, algorithm, size)
    return {
        "column": column.name,
        "network": network,
        "ranks": ranks,
        "algorithm": algorithm,
        "bytes": size,
        "time_s": measured.time_s,
        "algorithm_bandwidth_gbps": size * 8e-9 / measured.time_s,
        "max_link_load": measured.max_link_load,
    }


def sweep_sizes(
    column: Column, sizes: Sequence[int], advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """All algorithms on both networks; HDRM has no rank map on a fat tree, and would be HD."""
    rows = []
    for network in (BIGRAPH, FAT_TREE):
        for size in sizes:
            for algorithm in ALGORITHMS:
                if (network, algorithm) != (FAT_TREE, "hdrm"):
                    rows.append(row(column, network, RANKS, algorithm, size))
                advance(1)
    return rows


def sweep_ranks(
    column: Column, counts: Sequence[int], advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """HDRM on the BiGraph and all others on the fat tree, for each GPU count."""
    rows = []
    for ranks in counts:
        for algorithm in ALGORITHMS:
            network = BIGRAPH if algorithm == "hdrm" else FAT_TREE
            rows += [row(column, network, ranks, algorithm, size) for size in (SMALL, LARGE)]
            advance(ranks_weight(ranks))
    return rows


def ranks_weight(ranks: int) -> int:
    """One algorithm's work on `ranks` GPUs, in progress bar units."""
    return (ranks // 32) ** 2 // 4 + 2


def sweep_constants(column: Column, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    """Main figures with each constant halved and doubled; an efficiency ends at 1."""
    rows: list[dict[str, Any]] = []
    for constant in VARIED:
        for factor in (0.5, 2.0):
            value = column.constant(constant) * factor
            if constant == "wire_efficiency":
                value = min(value, 1.0)
            if constant == "segment_bytes":
                value = int(value)
            rows.append(
                {"constant": constant, "factor": factor, "value": value}
                | main_figures(column.varied(constant, value))
            )
            advance(4)
    return rows


def main_figures(column: Column) -> dict[str, float]:
    """Figures for 64 GPUs on the BiGraph."""

    def time(algorithm: str, size: int) -> float:
        return column.measure(BIGRAPH, RANKS, algorithm, size).time_s

    hdrm, ring = gbps(time("hdrm", LARGE)), gbps(time("ring", LARGE))
    return {
        "small_ring_over_hdrm": time("ring", SMALL) / time("hdrm", SMALL),
        "large_hdrm_gbps": hdrm,
        "large_ring_gbps": ring,
        "large_hdrm_minus_ring_gbps": hdrm - ring,
        "large_hd_gbps": gbps(time("hd", LARGE)),
    }
