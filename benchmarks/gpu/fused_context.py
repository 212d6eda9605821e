"""One rank's state in the fused operator benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import harness.context
from collectives_sides import Nccl, Symmetric, Torch

if TYPE_CHECKING:
    from fused_cases import Case
    from harness.side import Side

__all__ = ["Context"]


class Context(harness.context.Context):
    """A rank; `cases` are the cases' collectives."""

    def __init__(
        self, communicator: Any, device: Any, directory: Any, cases: list[Case], *rest: Any
    ) -> None:
        super().__init__(communicator, device, directory, [], *rest)
        # Symmetric memory is made once, for the largest case.
        free = self.free()
        fitting = [case for case in cases if case.unable(self.ranks, free) is None]
        self.cases = [case.exchange(self.ranks) for case in fitting]
        self.use_triton()
        symmetric = Symmetric(self, "weft")
        self._exchanges: list[Side] = [symmetric, Nccl(self)]
        self._operators: list[Side] = []
        if device.kind == "cuda":
            self._operators = [Torch(self, name) for name in ("one_shot", "two_shot")]

    def meet(self) -> None:
        """Enqueue a rendezvous between all ranks."""
        self.collectives(None).barrier()

    def exchanges(self, collective: str) -> list[Side]:
        """Libraries with a collective, as sides in the collectives benchmark."""
        return self._exchanges + (self._operators if collective == "all_reduce" else [])

    def free(self) -> int | None:
        """Free bytes on the GPU with the fewest; None on the CPU. A collective call."""
        if self.device.kind == "twin":
            return None
        return min(self.agree(int(self.device.torch.cuda.mem_get_info()[0])))
