"""A LoadGen test: description, run, outcome."""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from weft import _native, loadgen
from weft.base import threads
from weft.base.environment import check_variables
from weft.base.errors import ConfigurationError
from weft.qdl import description
from weft.qdl.placement import NumaPlacement, Placement, here, place
from weft.qdl.sources import expanded

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SCENARIOS", "Counts", "Departure", "Outcome", "Test"]

Scenario = Literal["SingleStream", "MultiStream", "Server", "Offline"]
SCENARIOS: Final = ("SingleStream", "MultiStream", "Server", "Offline")
MODES: Final = ("performance", "accuracy", "submission")
#: Seconds between two `progress` calls.
PROGRESS_SECONDS: Final = 0.1


class Counts(NamedTuple):
    """Present counts in a test or a node."""

    #: Queries issued by LoadGen; on a node, those that have arrived.
    issued: int
    answered: int
    #: Queries that ended without an answer.
    failed: int
    #: Nodes on a front end; front ends on a node.
    peers: int


class Departure(NamedTuple):
    """End of a connection to a node during a test."""

    name: str
    cause: str
    #: False for a node that left in order.
    lost: bool


@dataclass(frozen=True, kw_only=True)
class Test:
    """A LoadGen test. A process runs one at a time: LoadGen's state is global.

    Args:
        scenario: SingleStream, MultiStream, Server or Offline.
        nodes: accelerator node addresses; a node with several NICs may have several, with commas
        between them: a connection to each, with separate slots; `host:port@source` connects from
        that address on this host, `host:port@auto` from each that reaches it by its own interface,
        on the `placement` NUMA node if there is one. Without any node,
            the model runs in this process, after one copy of each sample.
        sample_bytes: bytes per sample: its tensors one after another.
        log_directory: directory for LoadGen's logs; made unless it exists.
        mode: performance, accuracy or submission (both).
        model: model name, by which configuration files select lines, such as `resnet50`.
        user_conf: LoadGen's `user.conf`. With one, LoadGen's own mlperf.conf applies too, as in
            official runs, and both come before the settings here.
        audit_config: LoadGen's `audit.config`, which need not exist; it comes before all others.
        samples: samples in the data set.
        performance_samples: samples in memory at a time; by default all.
        sample_file: file with all samples, one after another; by default they are synthetic.
        target_qps: queries per second: the rate in Server; the estimate from which other scenarios
            compute the query count.
        target_latency: latency limit in Server, seconds.
        samples_per_query: samples per query in MultiStream.
        min_duration, max_duration: seconds.
        min_queries, max_queries: query counts.
        coalesce: issue Server queries together that are due together.
        provider: shm, verbs, ofi or tcp; by default shm or tcp, the better one that reaches a node.
        slots: most queries in flight to a node.
        queries: most queries in flight together.
        policy: node selection: round-robin, least-in-flight or latency-aware.
        checksum: verify every payload by checksum.
        deadline: seconds from a query's submission to its failure.
        spin: seconds without work in which the service polls without a pause.
        max_slot_bytes: most bytes that the front end reserves for a connection's slots; a node has
        one connection for each address; the node's schema determines them.
        placement: NUMA node for threads, slots and samples; "auto": near the NICs by which the
        nodes are reached, on machines with several; `None`: anywhere.
        kept_answers: answers kept by sample, against the rules: for a proof that TEST04 fails.
        local_model: model in this process: noop or checksum.
        work: CPU seconds for each query in this process.
        answer_bytes: bytes per answer in this process.
    """

    __test__ = False  # pytest collects classes of this name.

    scenario: Scenario
    sample_bytes: int
    log_directory: Path
    nodes: tuple[str, ...] = ()
    mode: str = "performance"
    model: str = "weft"
    user_conf: Path | None = None
    audit_config: Path = Path("audit.config")
    samples: int = 1024
    performance_samples: int | None = None
    sample_file: Path | None = None
    target_qps: float | None = None
    target_latency: float | None = None
    samples_per_query: int | None = None
    min_duration: float | None = None
    max_duration: float | None = None
    min_queries: int | None = None
    max_queries: int | None = None
    coalesce: bool = False
    provider: Literal["shm", "verbs", "ofi", "tcp"] | None = None
    slots: int = 1024
    queries: int = 8192
    policy: str = "least-in-flight"
    checksum: bool = False
    deadline: float = 60.0
    spin: float = 0.0
    max_slot_bytes: int = 1 << 30
    placement: Placement = "auto"
    kept_answers: int = 0
    local_model: str = "noop"
    work: float = 0.0
    answer_bytes: int = 8

    def run(self, progress: Callable[[Counts], None] | None = None) -> Outcome:
        """Run the test. `progress` is called ten times a second, in this thread.

        An exception from `progress`, or Ctrl-C, leaves the test running in a thread: LoadGen cannot
        end it early, so the process has no further use.

        Raises:
            ConfigurationError: a value cannot be used, or LoadGen's library cannot be built.
            RendezvousError, SecretError, NoRouteError: a node cannot be reached, or refuses.
            StageError: another test runs in this process.
        """
        check_variables()
        self.log_directory.mkdir(parents=True, exist_ok=True)
        resolved, placement = self._placed()
        described = resolved.to_json() | {"library": str(loadgen.built())}
        if placement is not None:
            described["network"]["numa_node"] = placement.numa_node
        spec = json.dumps(described)
        counts = _native.QdlCounts()
        ended: list[str | BaseException] = []

        def test() -> None:
            try:
                with here(placement):
                    ended.append(_native.qdl_test(spec, counts))
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=test, name="weft-loadgen", daemon=True)
        threads.start(thread)
        while thread.is_alive():
            thread.join(PROGRESS_SECONDS)
            if progress is not None:
                progress(Counts(*counts.snapshot()))
        (outcome,) = ended
        if isinstance(outcome, BaseException):
            raise outcome
        found = Outcome.from_json(resolved, json.loads(outcome))
        if self.nodes:
            description.write(resolved, found)
        return found

    def _placed(self) -> tuple[Test, NumaPlacement | None]:
        """This test with sources for `@auto`, and the placement."""
        if not self.nodes:
            return self, None
        nodes = expanded(self.nodes)
        addresses = [each for node in nodes for each in description.addresses_of(node)]
        placement = place(self.placement, addresses=addresses)
        if placement is not None:
            nodes = expanded(self.nodes, placement.numa_node)
        return dataclasses.replace(self, nodes=nodes), placement

    def to_json(self) -> dict[str, Any]:
        """As the native module takes it, without LoadGen's library."""
        for name, value in (("min_duration", self.min_duration), ("work", self.work)):
            if value is not None and value < 0:
                raise ConfigurationError(f"{name} {value}: expected at least 0")
        settings = {
            "target_qps": self.target_qps,
            "target_latency_ms": scaled(self.target_latency, 1e3),
            "samples_per_query": self.samples_per_query,
            "min_duration_ms": whole(scaled(self.min_duration, 1e3)),
            "max_duration_ms": whole(scaled(self.max_duration, 1e3)),
            "min_query_count": self.min_queries,
            "max_query_count": self.max_queries,
            "coalesce": self.coalesce,
        }
        return {
            "scenario": self.scenario,
            "mode": self.mode,
            "model": self.model,
            "user_conf": None if self.user_conf is None else str(self.user_conf),
            "audit_config": str(self.audit_config),
            "log_directory": str(self.log_directory),
            "settings": settings,
            "samples": {
                "total": self.samples,
                "performance": self.performance_samples or self.samples,
                "bytes": self.sample_bytes,
                "file": None if self.sample_file is None else str(self.sample_file),
            },
            "nodes": list(self.nodes),
            "network": {
                "provider": self.provider,
                "slots": self.slots,
                "queries": self.queries,
                "policy": self.policy,
                "checksum": self.checksum,
                "deadline_s": self.deadline,
                "spin_us": round(self.spin * 1e6),
                "max_slot_bytes": self.max_slot_bytes,
                "keep_answers": self.kept_answers,
            },
            "in_process": {
                "model": {"kind": self.local_model, "work_us": round(self.work * 1e6)},
                "answer_bytes": self.answer_bytes,
            },
        }


def scaled(value: float | None, factor: float) -> float | None:
    """A value in a smaller unit."""
    return None if value is None else value * factor


def whole(value: float | None) -> int | None:
    """The nearest whole number."""
    return None if value is None else round(value)


@dataclass(frozen=True)
class Outcome:
    """Test outcome."""

    scenario: Scenario
    mode: str
    #: True if the result in LoadGen's summary is VALID; None after an accuracy-only test.
    valid: bool | None
    #: System name in LoadGen's logs.
    sut_name: str
    #: Samples per second; None after an accuracy-only test.
    samples_per_second: float | None
    #: 99th percentile latency, seconds.
    latency_p99: float | None
    #: By the rules: throughput times the bytes per sample, and per answer.
    ingress_bytes_per_second: float | None
    egress_bytes_per_second: float | None
    #: Rate of the slowest interface toward a node; None on loopback and in this process.
    link_bytes_per_second: float | None
    counts: Counts
    #: Nodes that left or were lost during the test.
    departures: tuple[Departure, ...]
    log_directory: str
    loadgen: str
    #: Lines in LoadGen's summary.
    summary: dict[str, str] = field(repr=False)

    @classmethod
    def from_json(cls, test: Test, found: dict[str, Any]) -> Outcome:
        """Outcome from the native module."""
        summary = found["summary"]
        rate = rate_of(test, summary)
        p99 = summary.get("99.00 percentile latency (ns)")
        rates = [description.link_rate(node) for node in test.nodes]
        known = [each for each in rates if each is not None]
        return cls(
            scenario=test.scenario,
            mode=test.mode,
            valid=found["is_valid"],
            sut_name=summary.get("SUT name", ""),
            samples_per_second=rate,
            latency_p99=None if p99 is None else float(p99) / 1e9,
            ingress_bytes_per_second=scaled(rate, test.sample_bytes),
            egress_bytes_per_second=scaled(rate, found["answer_bytes"]),
            link_bytes_per_second=min(known) if known and len(known) == len(rates) else None,
            counts=Counts(**found["counts"]),
            departures=tuple(Departure(**each) for each in found["departures"]),
            log_directory=str(test.log_directory),
            loadgen=found["loadgen"],
            summary=summary,
        )

    def to_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        departures = [each._asdict() for each in self.departures]
        named = {"counts": self.counts._asdict(), "departures": departures}
        return dataclasses.asdict(self) | named


def rate_of(test: Test, summary: dict[str, str]) -> float | None:
    """Samples per second, from LoadGen's summary."""
    for key in ("Samples per second", "Completed samples per second", "QPS w/ loadgen overhead"):
        if key in summary:
            return float(summary[key])
    # MultiStream has latencies only for queries.
    if "Mean latency (ns)" in summary:
        return int(summary["samples_per_query"]) * 1e9 / float(summary["Mean latency (ns)"])
    return None
