"""Dispatch and combine model for up to eight GPUs on one NVLink switch, fitted to two GPUs.

All results are predictions. A phase takes, in microseconds,

    latency + peers + max(link, local)

- latency: the chain from launches, flags and first bytes, independent of sizes; fitted.
- peers: a wait for all N ranks over a flag between two: a barrier on eight GPUs takes 1.6 us, a
  flag one way half the 2.54 us round trip. 0 on two GPUs, since the latency has it.
- link: bytes to other ranks, divided by a GPU's store rate to all peers, by row length and block
  count (`limits` in `reference/gpu_moe.json`, measured on eight GPUs).
- local: bytes that the kernels load and store in their own GPU's memory and send, divided by a
  rate; fitted, for prefill per SM.

Link and local overlap, as rows are sent while others are loaded; `apart`, their sum in place of the
larger, is the prediction without overlap. A phase's latency and rate are fitted to two cases on two
GPUs (`FITTED`); `deviations` compares all other cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

Record = dict[str, Any]

#: Cases to which a phase is fitted: at decode two row lengths, at prefill one case bound by SMs and
#: one bound by the link.
FITTED: Final = {
    ("decode", "dispatch"): ("sweep hidden 2048", "sweep hidden 8192"),
    ("decode", "combine"): ("sweep hidden 2048", "sweep hidden 8192"),
    ("prefill", "dispatch"): ("prefill 24", "prefill 64"),
    ("prefill", "combine"): ("prefill 24", "prefill 64"),
}
PHASES: Final = ("dispatch", "combine")
#: Goals on eight GPUs in microseconds: decode, one token, and prefill in fp8.
GOALS: Final = {"pair": 57, "one token": 12, "dispatch": 440, "combine": 850}
#: Weft's default SM count per launch, at prefill (`grid.rs`).
CHOSEN: Final = {"dispatch": 32, "combine": 64}
#: SMs on an H200.
ALL_SMS: Final = 132


@dataclass(frozen=True)
class Bytes:
    """A rank's bytes in a phase: to other ranks, and in total by the GPU's kernels."""

    link: float
    local: float
    #: Bytes per row on the wire.
    row: int


@dataclass(frozen=True)
class Phase:
    """Fit for a phase: microseconds, and GB/s per launch or (prefill) per SM."""

    latency_us: float
    local_gb_per_s: float


@dataclass(frozen=True)
class Terms:
    """A prediction, in microseconds."""

    latency: float
    peers: float
    link: float
    local: float

    @property
    def total(self) -> float:
        """Prediction with link and local overlapped."""
        return self.latency + self.peers + max(self.link, self.local)

    @property
    def apart(self) -> float:
        """Prediction without overlap."""
        return self.latency + self.peers + self.link + self.local


def reached(ranks: int, experts: int, top_k: int) -> float:
    """Share of tokens with an expert on a given rank, under uniform routing."""
    return 1 - math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k)


def moved(workload: Record, phase: str, ranks: int) -> Bytes:
    """A rank's bytes in a phase."""
    tokens, hidden, top_k = workload["tokens"], workload["hidden"], workload["top_k"]
    rows = tokens * reached(ranks, workload["experts"], top_k)
    wide = 2 * hidden
    dense = workload["layout"] == "dense"
    # Expert input rows: one for each token on a rank, or for each expert.
    given, positions = tokens * wide, rows * ranks if dense else tokens * top_k
    if phase == "combine":
        # Outputs are loaded, replies stored, then loaded for the sum, and sums stored.
        local = positions * wide + 2 * rows * ranks * wide + given
        return Bytes(rows * (ranks - 1) * wide, local, wide)
    wire = wide if workload["wire"] == "bfloat16" else hidden + 4 * -(-hidden // 128)
    # Tokens are loaded, rows stored; except in the indexed layout, loaded again and laid out.
    local = given + rows * ranks * wire
    if workload["layout"] != "indexed":
        local += rows * ranks * wire + positions * wire
    return Bytes(rows * (ranks - 1) * wire, local, wire)


def blocks_of(workload: Record, phase: str) -> int:
    """SMs per launch."""
    chosen = CHOSEN[phase] if regime(workload) == "prefill" else ALL_SMS
    return int(workload["num_sms"] or chosen)


def regime(workload: Record) -> str:
    """Fit that applies to a workload."""
    return "prefill" if workload["tokens"] > 1024 else "decode"


def link_rate(limits: Record, row: int, blocks: int) -> float:
    """A GPU's store rate to all peers in GB/s, for a row length and a block count."""
    table = limits["all_to_all_bulk_copy_stores_gb_per_s_per_gpu"]
    nearest = min(table, key=lambda length: abs(math.log(int(length) / row)))
    points = sorted((int(count), rate) for count, rate in table[nearest].items())
    below = max((point for point in points if point[0] <= blocks), default=points[0])
    above = min((point for point in points if point[0] >= blocks), default=points[-1])
    if below[0] == above[0]:
        return float(below[1])
    share = (blocks - below[0]) / (above[0] - below[0])
    return float(below[1] + share * (above[1] - below[1]))


def taken(record: Record, phase: str) -> float:
    """Phase time, without the timestamps around it."""
    times = record["result"]["times"]
    return float(times[phase]["slowest_p50_us"] - times["nothing"]["slowest_p50_us"])


class Model:
    """Decode and prefill fits to records from two GPUs."""

    def __init__(self, records: list[Record], limits: Record) -> None:
        self.limits = limits
        self.records = {record["case"]: record for record in records}
        self.phases = {key: self._fit(*key) for key in FITTED}

    def _fit(self, kind: str, phase: str) -> Phase:
        first, second = (self.records[case] for case in FITTED[kind, phase])
        local = [self._work(record["workload"], phase) for record in (first, second)]
        times = [taken(record, phase) for record in (first, second)]
        if kind == "decode":
            rate = (local[1] - local[0]) / (times[1] - times[0])
            return Phase(times[0] - local[0] / rate, rate / 1e3)
        # The second is bound by the link: the rest is latency.
        latency = times[1] - self._link(second["workload"], phase, 2)
        return Phase(latency, local[0] / (times[0] - latency) / 1e3)

    @classmethod
    def of(cls, records: list[Record], limits: Record) -> Model | None:
        """The model, or None unless all fitted cases were measured and times grow with bytes."""
        needed = {case for pair in FITTED.values() for case in pair} | {"decode", "one token"}
        if not needed <= {record["case"] for record in records}:
            return None
        try:
            made = cls(records, limits)
        except ZeroDivisionError:
            return None
        sound = all(
            min(phase.latency_us, phase.local_gb_per_s) > 0 for phase in made.phases.values()
        )
        return made if sound else None

    def _work(self, workload: Record, phase: str, ranks: int = 2) -> float:
        """Local bytes, at prefill per SM."""
        share = blocks_of(workload, phase) if regime(workload) == "prefill" else 1
        return moved(workload, phase, ranks).local / share

    def _link(self, workload: Record, phase: str, ranks: int) -> float:
        sizes = moved(workload, phase, ranks)
        rate = link_rate(self.limits, sizes.row, blocks_of(workload, phase))
        return sizes.link / rate / 1e3

    def predict(self, workload: Record, phase: str, ranks: int) -> Terms:
        """Prediction for a workload's phase on `ranks` GPUs."""
        fitted = self.phases[regime(workload), phase]
        limits = self.limits
        one_way = limits["gpu_gpu_flag_round_trip_us"] / 2
        more = limits["eight_gpu_barrier_in_kernel_us"] - one_way
        return Terms(
            latency=fitted.latency_us,
            peers=more * max(ranks - 2, 0) / 6,
            link=self._link(workload, phase, ranks),
            local=self._work(workload, phase, ranks) / fitted.local_gb_per_s / 1e3,
        )

    def one_token(self, ranks: int) -> float:
        """Microseconds per one-token round: the two-GPU time, plus the terms for more ranks."""
        record = self.records["one token"]
        workload = record["workload"]
        more = 0.0
        for phase in PHASES:
            now, then = (self.predict(workload, phase, count) for count in (2, ranks))
            # Half a packet is data, the other half the epoch.
            more += then.peers - now.peers + 2 * (then.link - now.link)
        return float(record["result"]["times"]["round"]["slowest_p50_us"] + more)

    def deviations(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Measured and predicted times on two GPUs, by case and phase (`both`: their sum).

        Cases to which a phase was fitted omit that phase.
        """
        found: dict[str, dict[str, tuple[float, float]]] = {}
        for case, record in self.records.items():
            workload = record["workload"]
            if workload["routing"] != "uniform" or case == "one token":
                continue
            predicted = {phase: self.predict(workload, phase, 2).total for phase in PHASES}
            found[case] = {
                phase: (taken(record, phase), predicted[phase])
                for phase in PHASES
                if case not in FITTED[regime(workload), phase]
            }
            measured = float(record["result"]["times"]["round"]["slowest_p50_us"])
            found[case]["both"] = measured, sum(predicted.values())
        return found
