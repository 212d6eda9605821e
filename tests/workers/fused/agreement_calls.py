"""Fused operator calls whose arguments differ between two ranks, and their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import weft
import weft.fused
from tests.workers.triton.kernel_checks import awaited_error
from weft.fused.gemm.gemm import Tiling
from weft.fused.rms_norm import RmsNormTiling

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft import Communicator

SMALL = Tiling(16, 16, 16, group=2, warps=4, stages=2)
FLAGS = RmsNormTiling("flags", 128, 4, 2)


class Place:
    """A two-rank group for one case, since a failed one is of no further use."""

    def __init__(self, group: Communicator, device: str) -> None:
        self.group, self.device, self.rank = group, device, group.rank
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float16

    def ones(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype or self.dtype, device=self.device)

    def bags(self, *batches: int) -> torch.Tensor:
        """Rows in the last call after several with these batches."""
        operator = weft.fused.EmbeddingAllToAll(
            [self.ones(5, 8, dtype=torch.float32)], communicator=self.group
        )
        for batch in batches:
            ids = torch.arange(2 * batch, device=self.device) % 5
            offsets = 2 * torch.arange(batch + 1, device=self.device)
            output = operator(ids, offsets)
        return output

    def gemm(self, operator: str, rows: int, inner: int = 32, **options: Any) -> torch.Tensor:
        x, weight = self.ones(rows, inner), self.ones(32, inner)
        call = getattr(weft.fused, operator)
        if rows < 64:
            # GEMMs with sends share memory.
            first = "gemm_all_reduce" if operator.startswith("gemm") else operator
            self.gemm(first, 64, inner, **options)
        found: torch.Tensor = call(x, weight, communicator=self.group, **options)
        return found

    def gemv(self, tokens: int, **options: Any) -> Any:
        dtype = options.pop("dtype", self.dtype)
        x, weight = self.ones(tokens, 64, dtype=dtype), self.ones(64, 64, dtype=dtype)
        if tokens < 8:
            self.gemv(8, dtype=dtype, algorithm=options["algorithm"])
        return weft.fused.gemv_all_reduce(x, weight, communicator=self.group, **options)

    def norm(self, rows: int, **options: Any) -> Any:
        x = self.ones(rows, 64)
        options.setdefault("algorithm", "one_shot")
        if rows < 16:
            self.norm(16, tiling=options.get("tiling"))
        return weft.fused.all_reduce_rms_norm(x, x, x[0], communicator=self.group, **options)


#: By name: each rank's call, by its place. Equal calls make memory before where shapes differ.
CASES: dict[str, Callable[[Place], Any]] = {
    "batch": lambda at: at.bags(4, 4, 3 + at.rank),
    "rows": lambda at: at.gemm("gemm_all_reduce", 32 + 16 * at.rank, tiling=SMALL),
    "operator": lambda at: at.gemm(
        ("gemm_all_to_all", "gemm_reduce_scatter")[at.rank], 32, tiling=SMALL
    ),
    "gathered": lambda at: at.gemm("all_gather_gemm", 32 + 16 * at.rank, tiling=SMALL),
    "stream_k": lambda at: at.gemm(
        "all_to_all_gemm", 16 + 16 * at.rank, tiling=SMALL._replace(stream_k=True)
    ),
    "tokens": lambda at: at.gemv(4 - at.rank, algorithm="one_shot"),
    "residual": lambda at: at.gemv(
        2, residual=at.ones(2, 64) if at.rank else None, algorithm="two_shot"
    ),
    "norm": lambda at: at.norm(3, eps=(1e-6, 1e-5)[at.rank]),
    "flags": lambda at: at.norm(4 + at.rank, tiling=FLAGS),
}


def differ(device: str = "cpu") -> dict[str, tuple[str, int | None, str]]:
    """All cases' errors by name."""
    weft.fused.set_timeout(20)
    found = {}
    with weft.init() as communicator:
        if device == "cuda":
            torch.cuda.set_device(communicator.rank % torch.cuda.device_count())
        for name, call in CASES.items():
            group = communicator.split(list(range(communicator.world_size)))
            assert group is not None
            with group:
                try:
                    call(Place(group, device))
                    found[name] = awaited_error()
                except weft.WeftError as error:
                    found[name] = (type(error).__name__, error.rank, str(error))
                communicator.all_gather(b"")
    return found
