"""Workload for `weft bench moe`: tokens and their routing."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from weft.base.array import DTYPES
from weft.bench.routing_file import SUFFIXES, Layer, read_routing

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ROUTINGS", "Batch", "Router", "Workload"]

ROUTINGS: Final = ("uniform", "zipf", "incast")


class Batch(NamedTuple):
    """One rank's tokens in one round."""

    tokens: NDArray[Any]  # [tokens, hidden] in the workload's dtype
    ids: NDArray[np.int64]  # [tokens, top_k]
    weights: NDArray[np.float32]  # [tokens, top_k]


@dataclass(frozen=True)
class Workload:
    """Workload to measure. Raises `ValueError` with the reason for an invalid one."""

    ranks: int
    #: Per rank and round.
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str
    #: One of `ROUTINGS`, or a file path for `routing_file`.
    routing: str
    rounds: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "hidden", "experts", "top_k", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} is not supported: {', '.join(DTYPES)} are")
        if self.top_k > self.experts:
            raise ValueError(
                f"a token cannot name {self.top_k} different experts of {self.experts}:"
                " lower top_k or raise experts"
            )
        Router(self)

    def check_memory(self) -> None:
        """Check that this machine has the memory that the ranks need.

        Raises:
            ValueError: if it has not, with the sizes.
        """
        # Tokens and results as drawn, as sent and as checked; scores of all experts for each token.
        tokens = 4 * self.tokens * self.hidden * 4
        scores = 0 if self.routing == "incast" else 2 * self.tokens * self.experts * 8
        needed = self.ranks * (tokens + scores)
        present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > present:
            raise ValueError(
                f"{self.ranks} ranks of {self.tokens} tokens, hidden {self.hidden},"
                f" {self.experts} experts: they need {needed >> 20:,} MiB, and this machine has"
                f" {present >> 20:,}; lower --ranks, --tokens, --hidden or --experts"
            )

    def to_json(self) -> dict[str, Any]:
        """A value that `json` can write, and `Workload(**value)` takes."""
        return asdict(self)


class Router:
    """Which experts tokens name, by the workload's routing."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        #: From the file; none if the routing is random.
        self.layers: list[Layer] = []
        if workload.routing not in ROUTINGS:
            path = Path(workload.routing)
            if path.suffix not in SUFFIXES:
                raise ValueError(
                    f"routing {workload.routing!r} is neither {', '.join(ROUTINGS)} nor a file"
                    f" that ends in {' or '.join(SUFFIXES)}"
                )
            self.layers = read_routing(path, top_k=workload.top_k, experts=workload.experts)

    def layer(self, number: int) -> int:
        """The layer whose tokens a round sends: rounds take layers in turn."""
        return number % max(len(self.layers), 1)

    def batch(self, rank: int, number: int) -> Batch:
        """Fresh random tokens, which the same arguments give again."""
        workload = self.workload
        count, top_k = workload.tokens, workload.top_k
        random = np.random.default_rng((workload.seed, rank, number))
        tokens = random.standard_normal((count, workload.hidden), dtype=np.float32)
        weights = random.random((count, top_k), dtype=np.float32)
        if self.layers:
            _, ids, given = self.layers[self.layer(number)]
            # Ranks, and rounds for one layer, take the rows in turn, and begin again at the end.
            turn = number // len(self.layers)
            first = (turn * workload.ranks + rank) * count
            rows = np.arange(first, first + count) % len(ids)
            ids, weights = ids[rows], weights if given is None else given[rows]
        elif workload.routing == "incast":
            ids = np.tile(np.arange(top_k), (count, 1))
        else:
            # The largest sums of log popularity and Gumbel noise: draws without replacement.
            scores = random.gumbel(size=(count, workload.experts))
            if workload.routing == "zipf":
                scores -= np.log(np.arange(1, workload.experts + 1))
            ids = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        return Batch(tokens.astype(DTYPES[workload.dtype]), ids.astype(np.int64), weights)
