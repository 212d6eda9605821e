"""Columns in the EFLOPS tables: all-reduces and training with one constant set each."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final, NamedTuple

from reproductions.eflops.clusters import BIGRAPH, BY_NODE, placement, topology
from reproductions.report import read
from weft.sim import simulate

__all__ = ["ALGORITHMS", "COLUMNS", "LARGE", "MODELS", "RANKS", "SMALL", "Column", "Measured"]

ALGORITHMS: Final = ("ring", "tree", "hd", "hdrm")
#: Columns: only bandwidth and latency, and the constants that the article leaves open fitted.
COLUMNS: Final = ("ideal", "fitted")
MODELS: Final = ("resnet50", "million-class", "bert")
#: GPUs in the article's cluster.
RANKS: Final = 64
#: Sizes in bytes at which the article quotes figures.
SMALL: Final = 1 << 10
LARGE: Final = 1 << 28
#: Chunks in which the tree pipelines, in bytes, and the most chunks.
CHUNK_BYTES: Final = 128 << 10
MOST_CHUNKS: Final = 256
#: Vector that sets the chunks in a training run without segments, in bytes.
UNCUT_BYTES: Final = 32 << 20


class Measured(NamedTuple):
    """Outcome for one all-reduce."""

    time_s: float
    max_link_load: int


class Column:
    """All-reduces and training iterations with one constant set; results are kept."""

    def __init__(self, name: str, *, seed: int, seeds: int) -> None:
        self.name = name
        self.seed = seed
        self.seeds = seeds
        self.scenario: dict[str, Any] = read("eflops", "scenarios", f"all-reduce-{name}.json")
        self.changes: dict[str, Any] = {}
        #: All constants, as the simulator used them.
        self.constants: dict[str, Any] = {}
        self.cpu_s = 0.0
        self.flows = 0
        self.kept: dict[tuple[object, ...], Measured] = {}

    def varied(self, constant: str, value: float) -> Column:
        """The same column with another value for a constant, and one seed."""
        other = Column(self.name, seed=self.seed, seeds=1)
        other.changes = {constant: value}
        return other

    def measure(
        self, network: str, ranks: int, algorithm: str, size: int, order: str = BY_NODE
    ) -> Measured:
        """Median over seeds for an all-reduce with `size` bytes."""
        key = (network, ranks, algorithm, size, order)
        if key not in self.kept:
            # These routes share no link, whatever the hash.
            disjoint = order == BY_NODE and (
                algorithm == "ring" or (network, algorithm) == (BIGRAPH, "hdrm")
            )
            runs = []
            for seed in range(self.seed, self.seed + (1 if disjoint else self.seeds)):
                job = self.reduction(network, ranks, algorithm, size, order)
                outcome = self.run(self.scenario | {"job": job}, network, ranks, seed)
                self.flows += outcome["flows"]
                runs.append(Measured(outcome["time_s"], outcome["max_link_load"]))
            self.kept[key] = sorted(runs, key=lambda run: run.time_s)[len(runs) // 2]
        return self.kept[key]

    def train(
        self, model: str, network: str, order: str, algorithm: str, *, overlap: bool
    ) -> dict[str, float]:
        """Seconds per iteration and for communication, for a model on 64 GPUs."""
        scenario = read("eflops", "scenarios", f"train-{model}.json")
        segment = self.constant("segment_bytes") or UNCUT_BYTES
        scenario["job"] |= {
            "model": with_algorithm(scenario["job"]["model"], algorithm),
            "reduction": self.reduction(network, RANKS, algorithm, segment, order),
            "bucket_bytes": scenario["job"]["bucket_bytes"] if overlap else 2**64 - 1,
            "overlap": overlap,
        }
        results = self.run(scenario, network, RANKS, self.seed)["results"]
        return {name: results[name] for name in ("iteration_s", "communication_s")}

    def reduction(
        self, network: str, ranks: int, algorithm: str, size: int, order: str
    ) -> dict[str, Any]:
        """All-reduce job."""
        segment = min(size, self.constant("segment_bytes") or size)
        job: dict[str, Any] = self.scenario["job"]
        return job | {
            "algorithm": algorithm,
            "bytes": size,
            "ranks": ranks,
            "placement": placement(network, ranks, algorithm, order),
            "chunks": min(max(segment // 2 // CHUNK_BYTES, 1), MOST_CHUNKS),
        }

    def constant(self, name: str) -> Any:
        """A constant's value; None if it is the simulator's default."""
        given: dict[str, Any] = self.scenario["cluster"]["constants"]["set"] | self.changes
        return given.get(name)

    def run(self, scenario: dict[str, Any], network: str, ranks: int, seed: int) -> dict[str, Any]:
        """Scenario outcome on a network, with this column's constants."""
        (shape,) = self.scenario["cluster"]["topology"].values()
        cluster = deepcopy(self.scenario["cluster"]) | {
            "topology": topology(network, ranks, shape["latency_us"]),
            "seed": seed,
        }
        cluster["constants"]["set"] |= self.changes
        outcome = simulate(scenario | {"cluster": cluster, "links": 0})
        self.constants = outcome["constants"]
        self.cpu_s += outcome["cpu_s"]
        return outcome


def with_algorithm(model: dict[str, Any], algorithm: str) -> dict[str, Any]:
    """A model whose layers exchange by `algorithm`.

    HDRM's all-gather and reduce-scatter are halving-doubling's; the tree has neither and leaves
    them to the ring.
    """
    shared = {"hdrm": "hd", "tree": "ring"}.get(algorithm, algorithm)
    model = deepcopy(model)
    for layer in model["layers"]:
        for exchange in [*layer.get("before", []), *layer.get("after", [])]:
            whole = exchange["collective"] == "all-reduce"
            exchange["algorithm"] = algorithm if whole else shared
    return model
