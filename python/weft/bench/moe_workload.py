"""What `weft bench moe` sends: tokens, and which experts they name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from weft._array import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ROUTINGS", "Batch", "Router", "Workload"]

ROUTINGS: Final = ("uniform", "zipf", "incast")


class Batch(NamedTuple):
    """One rank's tokens of one round."""

    tokens: NDArray[Any]  # [tokens, hidden] of the workload's dtype
    ids: NDArray[np.int64]  # [tokens, top_k]
    weights: NDArray[np.float32]  # [tokens, top_k]


@dataclass(frozen=True)
class Workload:
    """What to measure. Raises `ValueError`, which says why, for what has no meaning."""

    ranks: int
    #: Of each rank, in each round.
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str
    #: One of `ROUTINGS`, or the path of an .npz file with `ids` and, if wanted, `weights`.
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

    def to_json(self) -> dict[str, Any]:
        """A value that `json` can write, and `Workload(**value)` takes."""
        return asdict(self)


class Router:
    """Which experts tokens name, by the workload's routing."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.file: tuple[NDArray[np.int64], NDArray[np.float32] | None] | None = None
        if workload.routing not in ROUTINGS:
            self.file = read_routing(workload)

    def batch(self, rank: int, number: int) -> Batch:
        """Fresh random tokens, which the same arguments give again."""
        workload = self.workload
        count, top_k = workload.tokens, workload.top_k
        random = np.random.default_rng((workload.seed, rank, number))
        tokens = random.standard_normal((count, workload.hidden), dtype=np.float32)
        weights = random.random((count, top_k), dtype=np.float32)
        if self.file is not None:
            ids, given = self.file
            # Ranks and rounds take the file's rows in turn, and begin again at its end.
            first = (number * workload.ranks + rank) * count
            rows = np.arange(first, first + count) % len(ids)
            ids, weights = ids[rows], weights if given is None else given[rows]
        elif workload.routing == "incast":
            ids = np.tile(np.arange(top_k), (count, 1))
        else:
            # The largest of popularity's logarithm plus Gumbel noise: draws without replacement.
            scores = random.gumbel(size=(count, workload.experts))
            if workload.routing == "zipf":
                scores -= np.log(np.arange(1, workload.experts + 1))
            ids = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        return Batch(tokens.astype(DTYPES[workload.dtype]), ids.astype(np.int64), weights)


def read_routing(workload: Workload) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """The `ids` and `weights` of a file; raises `ValueError` if they do not fit the workload."""
    path = Path(workload.routing)
    if path.suffix != ".npz" or not path.is_file():
        raise ValueError(
            f"routing {workload.routing!r} is neither {', '.join(ROUTINGS)} nor an .npz file"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name in ("ids", "weights")}
    except Exception as error:  # numpy and zipfile raise whatever a broken file leads them to
        raise ValueError(f"{path} cannot be read: {error}") from error
    if "ids" not in arrays:
        raise ValueError(f"{path} has no array `ids`")
    ids, weights = arrays["ids"], arrays.get("weights")
    if ids.ndim != 2 or ids.shape[1] != workload.top_k or not len(ids):
        raise ValueError(f"{path}: ids has shape {ids.shape}; (tokens, {workload.top_k}) is needed")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{path}: ids is of dtype {ids.dtype}, not of whole numbers")
    if ids.max() >= workload.experts:
        row = int(np.argmax(ids.max(axis=1)))
        raise ValueError(
            f"{path}: row {row} of ids names expert {ids.max()}; there are {workload.experts}"
        )
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        raise ValueError(f"{path}: row {int(np.argmax(twice))} of ids names an expert twice")
    if weights is None:
        return ids.astype(np.int64), None
    if weights.shape != ids.shape:
        raise ValueError(f"{path}: weights has shape {weights.shape}; {ids.shape} is needed")
    if not np.issubdtype(weights.dtype, np.floating) or not np.isfinite(weights).all():
        raise ValueError(f"{path}: weights are not all finite floating-point numbers")
    return ids.astype(np.int64), weights.astype(np.float32)
