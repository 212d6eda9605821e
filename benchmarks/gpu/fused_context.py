"""State of one rank of the benchmark of fused operators."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import collectives_context
from collectives_sides import Nccl, Symmetric, Torch

if TYPE_CHECKING:
    from collectives_sides import Side
    from fused_cases import Case

__all__ = ["Context"]

#: Limit of waits of fused kernels, in seconds.
DEVICE_SECONDS: Final = 10.0


class Context(collectives_context.Context):
    """A rank; `cases` are the collectives of the cases."""

    def __init__(
        self, communicator: Any, device: Any, directory: Any, cases: list[Case], *rest: Any
    ) -> None:
        super().__init__(communicator, device, directory, [], *rest)
        # Symmetric memory is made once, for the largest of them.
        free = self.free()
        fitting = [case for case in cases if case.unable(self.ranks, free) is None]
        self.cases = [case.exchange(self.ranks) for case in fitting]
        if device.kind == "twin":
            # The interpreter of Triton rounds bfloat16 otherwise.
            self.dtype = device.torch.float16
            os.environ.setdefault("TRITON_INTERPRET", "1")
        symmetric = Symmetric(self, "weft")
        self._exchanges: list[Side] = [symmetric, Nccl(self)]
        self._operators: list[Side] = []
        if device.kind == "cuda":
            self._operators = [Torch(self, name) for name in ("one_shot", "two_shot")]

    @property
    def fused(self) -> Any:
        """`weft.fused`, with the limit of waits of this benchmark."""
        return self.once("fused", self._import)

    def _import(self) -> Any:
        fused: Any = import_module("weft.fused")
        fused.set_timeout(DEVICE_SECONDS)
        return fused

    def meet(self) -> None:
        """Enqueue a rendezvous of all ranks."""
        self.collectives(None).barrier()

    def exchanges(self, collective: str) -> list[Side]:
        """Libraries with a collective, as sides of the benchmark of collectives."""
        return self._exchanges + (self._operators if collective == "all_reduce" else [])

    def free(self) -> int | None:
        """Free bytes of the GPU with the fewest; None on the CPU. A collective call."""
        if self.device.kind == "twin":
            return None
        return min(self.agree(int(self.device.torch.cuda.mem_get_info()[0])))
