"""Recommendation model constants from `benchmarks/gpu/run.sh fused` measurements.

Pooling times and exchange times are fitted separately by a latency and a rate each, with least
squares on relative errors. The fused and unfused times, to which no constant is fitted, are then
simulated for each case and compared with the measurements.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.base.files import read_text
from weft.sim import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Comparison", "Constants", "Measured", "calibrate", "compare", "read"]

#: Bytes per element in the benchmark: bfloat16.
_ELEMENT_BYTES = 2


class Measured(NamedTuple):
    """A benchmark case; times in seconds.

    Attributes:
        batch: samples per rank.
        tables: embedding tables per rank.
        fused_s: fused operator time; None if it was not timed.
    """

    name: str
    ranks: int
    batch: int
    tables: int
    dimension: int
    pooling: int
    pooling_s: float
    exchange_s: float
    fused_s: float | None

    @property
    def sent(self) -> int:
        """Bytes from a rank to each peer."""
        return self.batch * self.tables * self.dimension * _ELEMENT_BYTES

    @property
    def gathered(self) -> int:
        """Bytes in the rows that a rank reads."""
        return self.sent * self.ranks * self.pooling


class Constants(NamedTuple):
    """Fitted constants.

    Attributes:
        launch_s, message_latency_s: pooling and exchange latencies.
        gather_bytes_per_s: embedding gather rate.
        link_bytes_per_s: a GPU's link rate to all peers, in one direction.
    """

    launch_s: float
    gather_bytes_per_s: float
    message_latency_s: float
    link_bytes_per_s: float


class Comparison(NamedTuple):
    """Simulated and measured time for a case, in seconds."""

    name: str
    what: str
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Simulated time's error, relative to the measured time."""
        return self.simulated_s / self.measured_s - 1


def read(path: Path) -> list[Measured]:
    """Embedding cases that were measured on GPUs; a later record replaces an earlier one.

    Raises:
        ValueError: if a line is not such a record.
    """
    found: dict[tuple[str, int], Measured] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        try:
            record = json.loads(line)
            case = _measured(record)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: line {number} is not a record of gpu-fused: {error!r}"
            ) from error
        if case is not None:
            found[case.name, case.ranks] = case
    return list(found.values())


def _measured(record: dict[str, Any]) -> Measured | None:
    """Case from a record, if it has embeddings and times for both parts."""
    if record["kind"] != "embedding" or record["status"] != "ok":
        return None
    if record["origin"]["device"] != "cuda":
        return None
    shape, result, ranks = record["workload"]["shape"], record["result"], record["origin"]["ranks"]
    pooling_us, exchange_us = result["computation_us"], result["exchange_us"]
    if not pooling_us or not exchange_us or ranks < 2:
        return None
    side = result["sides"].get(result["fused"]) or {}
    fused_us = side.get("time", {}).get("slowest_p50_us")
    return Measured(
        record["case"],
        ranks,
        # The record has the total over all ranks.
        shape["batch"] // ranks,
        shape["tables"],
        shape["dim"],
        shape["pooling"],
        pooling_us * 1e-6,
        exchange_us * 1e-6,
        fused_us * 1e-6 if fused_us else None,
    )


def calibrate(cases: Sequence[Measured]) -> Constants:
    """Constants that fit the part times best.

    Args:
        cases: at least one.
    """
    launch, gather = _fit([(case.gathered, case.pooling_s) for case in cases])
    latency, link = _fit([(case.sent * (case.ranks - 1), case.exchange_s) for case in cases])
    return Constants(launch, gather, latency, link)


def _fit(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Latency from 0 on and rate, by least squares on relative errors in bytes and times."""
    import numpy as np

    pairs = np.array(list(points), float)
    sizes, times = pairs[:, 0], pairs[:, 1]
    weighted = np.stack([1 / times, sizes / times], axis=1)
    (latency, each), *_ = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)
    if len(np.unique(sizes)) < 2 or latency < 0 or each <= 0:
        share = sizes / times
        latency, each = 0.0, share.sum() / (share**2).sum()
    return float(latency), float(1 / each)


def scenario(case: Measured, constants: Constants) -> dict[str, Any]:
    """Pooling and exchange for a case, fused and not, on GPUs at one switch."""
    network = {
        "leaves": 1,
        "spines": 1,
        "hosts": case.ranks,
        "gbps": constants.link_bytes_per_s * 8e-9,
        "latency_us": 0.0,
    }
    latencies = {
        "message_latency_s": constants.message_latency_s,
        "post_s": 0.0,
        "launch_s": constants.launch_s,
    }
    return {
        "scenario": "dlrm",
        "cluster": {
            "topology": {"fat-tree": network},
            "routing": "static",
            "seed": 1,
            "constants": {"set": latencies},
        },
        "variant": "both",
        "links": 0,
        "job": {
            "ranks": case.ranks,
            "training": False,
            "batch": case.batch,
            "tables": case.tables,
            "dimension": case.dimension,
            "element_bytes": _ELEMENT_BYTES,
            "pooling": case.pooling,
            "gather_bytes_per_s": constants.gather_bytes_per_s,
            "bottom_flops": 0.0,
            "top_flops": 0.0,
        },
    }


def compare(cases: Sequence[Measured], constants: Constants) -> list[Comparison]:
    """Simulated and measured times for each case: unfused, as the sum over the parts, and fused."""
    found = []
    for case in cases:
        results = simulate(scenario(case, constants))["results"]
        apart = case.pooling_s + case.exchange_s
        name = f"{case.name}, {case.ranks} GPUs"
        found.append(Comparison(name, "not fused", apart, results["unfused_s"]))
        if case.fused_s is not None:
            found.append(Comparison(name, "fused", case.fused_s, results["fused_s"]))
    return found
