"""Machines behind the published MoE times: network and GPU constants, and a round on them.

Network constants are derived from measurements on single operations; GPU costs are fitted to rows
in the published table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from reproductions.moe_rdma.published import check
from reproductions.report import deviation, read
from weft.sim import simulate
from weft.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.base.progress import Progress

__all__ = [
    "MACHINES",
    "NODE",
    "OFI_HOST_S",
    "OPERATIONS",
    "PHASES",
    "PRIVATE_ROWS",
    "PUBLISHED",
    "Constants",
    "Runs",
    "derive",
    "fit_dispatch",
    "fit_node",
    "known",
]

MACHINES: Final = {"cx7": "ConnectX-7", "efa": "EFA"}
#: NICs per GPU.
NICS: Final = {"cx7": 1, "efa": 2}
PHASES: Final = {
    "decode": ("moe_decode_128_tokens", 128),
    "prefill": ("moe_prefill_4096_tokens", 4096),
}
OPERATIONS: Final = ("dispatch", "combine")
PUBLISHED: Final[dict[str, Any]] = check(
    read("moe_rdma", "published.json"), [table for table, _ in PHASES.values()], OPERATIONS
)
NODE: Final = 8
#: The default in the benchmark program that the table was made with.
PRIVATE_ROWS: Final = 256
GIGABIT: Final = 1e9 / 8
#: Weft's host cost for posting a write over the provider ofi, in seconds: the median, over messages
#: from 8 to 4096 bytes in a stream, of Weft's time less a bare libfabric loop's. Over shm in
#: libfabric 2.5.1, the cheapest one (`benchmarks/results/ofi.jsonl`).
OFI_HOST_S: Final = 35e-9

Constants = dict[str, float]


def derive(machine: str) -> Constants:
    """A machine's network constants, from published measurements on single operations.

    The model for one write is `latency + bytes / bandwidth`. The bandwidth is the slope between the
    two longest writes, the latency the shorter ones' mean rest, and posting the slope of a
    scatter's time over its peer count.
    """
    engine = PUBLISHED["proxy_and_engine"]
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
    """Round with `ep` ranks in nodes of eight, on a network without a bottleneck."""
    nics = NICS[machine]
    found: dict[str, Any] = read("moe_rdma", "scenarios", f"{machine}.json")
    cluster, job = found["cluster"], found["job"]
    cluster["topology"]["fat-tree"] |= {
        "hosts": ep * nics,
        "gbps": constants["bytes_per_s"] / GIGABIT / nics,
    }
    cluster["seed"] = seed
    cluster["constants"]["set"] |= {
        name: constants[name] for name in ("message_latency_s", "post_s")
    }
    job |= {"ranks": ep, "tokens": tokens}
    job["nvlink"] |= {
        "bytes_per_s": constants["nvlink_dispatch_bytes_per_s"],
        "combine_bytes_per_s": constants["nvlink_combine_bytes_per_s"],
    }
    job["costs"] |= {
        "dispatch_start_s": constants["dispatch_s"] / 2,
        "dispatch_end_s": constants["dispatch_s"] / 2,
        "combine_start_s": constants["combine_s"] / 2,
        "combine_end_s": constants["combine_s"] / 2,
        "staging_bytes_per_s": constants.get("staging_bytes_per_s"),
    }
    if "post_row_s" in constants:
        job["costs"]["post_row_s"] = constants["post_row_s"]
    job |= changes
    return found | {"links": 0}


class Runs:
    """Runs scenarios and sums up costs."""

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
        """Median time per operation over ranks, in microseconds."""
        results = self.results(machine, ep, tokens, constants, **changes)
        return {name: results[name]["p50_s"] * 1e6 for name in OPERATIONS}

    def results(
        self, machine: str, ep: int, tokens: int, constants: Constants, **changes: Any
    ) -> dict[str, Any]:
        """A round's results: times per operation in seconds, rows and bytes."""
        spec = scenario(machine, ep, tokens, constants, self.seed, **changes)
        outcome = simulate(spec)
        self.cpu_s += outcome["cpu_s"]
        self.time_s += outcome["time_s"]
        self.max_link_load = max(self.max_link_load, outcome["max_link_load"])
        self.flows += outcome["flows"]
        self.bar.advance(ep)
        results: dict[str, Any] = outcome["results"]
        return results


def known(phase: str, machine: str, ep: int, system: str = "pplx") -> dict[str, float | None]:
    """A row's published times, in microseconds."""
    rows = PUBLISHED[PHASES[phase][0]]["rows"]
    row = next(row for row in rows if row["ep"] == ep)
    return {name: row[name].get(f"{system}_{machine}") for name in OPERATIONS}


def fit_node(runs: Runs, machine: str, network: Constants) -> Constants:
    """A round's costs within a node: a fixed time and an NVLink rate for each operation.

    Both are exact solutions for the two rows with 8 ranks. If one row is not published, the rate is
    the other machine's, which has the same NVLink.
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
                # Bytes in 100 kB units: a microsecond at 100 GB/s.
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
    """Second column: dispatch costs beyond the network, fitted to its rows with 16 and 32 ranks.

    Grid search for the least mean square deviation over two parameters: the copy rate to the send
    buffer, and how many rows are sent before the counts are known.
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
    assert best is not None, "the grid has candidates"
    _, rate, private = best
    fitted = constants | ({} if rate is None else {"staging_bytes_per_s": rate})
    return fitted, {"private_rows": private}
