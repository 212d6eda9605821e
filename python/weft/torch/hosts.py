"""Process group operations on GPUs on several hosts, on addresses from the C++ library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import torch

from weft.base.errors import ConfigurationError
from weft.gpu.memory import memory_at

if TYPE_CHECKING:
    from weft.cuda import HierarchicalCollectives

__all__ = ["AddressCalls"]

OPERATIONS: Final = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
#: Dtypes that move words, by unsigned names.
WORDS: Final = {
    "uint8": torch.uint8,
    "uint16": torch.int16,
    "uint32": torch.int32,
    "uint64": torch.int64,
}


class AddressCalls:
    """Calls to collectives between several hosts, with the native module's arguments."""

    def __init__(self, collectives: HierarchicalCollectives) -> None:
        self._collectives = collectives

    def stream(self) -> int:
        """The stream for a call: it takes the current one."""
        self._collectives._enter()
        return 0

    def run(
        self,
        stream: int,
        operation: str,
        *,
        input: int,
        output: int,
        element: str,
        count: int,
        root: int = 0,
        reduction: str | None = None,
        average: bool = False,
        sent: list[int] | None = None,
        received: list[int] | None = None,
    ) -> None:
        """Make a call; arguments are the same as in `weft._native.DeviceCollectives.run`.

        Raises:
            ConfigurationError: if several hosts lack the operation.
        """
        collectives, ranks = self._collectives, self._collectives.world_size
        if operation not in OPERATIONS:
            refuse(operation)
        if operation == "barrier":
            collectives.barrier()
            return
        dtype = WORDS[element] if reduction is None else getattr(torch, element)
        op = "avg" if average else reduction or ""
        if operation == "all_reduce":
            given, made = self._at(input, count, dtype), self._at(output, count, dtype)
            collectives.all_reduce(given, op, out=made)
        elif operation == "reduce_scatter":
            given, made = self._at(input, ranks * count, dtype), self._at(output, count, dtype)
            collectives.reduce_scatter(given, op, out=made)
        elif operation == "all_gather":
            given, made = self._at(input, count, dtype), self._at(output, ranks * count, dtype)
            collectives.all_gather(given, out=made)
        else:
            made = self._at(output, count, dtype)
            if collectives.rank == root and input != output:
                made.copy_(self._at(input, count, dtype))
            collectives.broadcast(made, root)

    def transfer(self, stream: int, batch: list[tuple[int, bool, int, int]]) -> None:
        """Raise: several hosts lack messages; arguments are the same as in the native module.

        Raises:
            ConfigurationError: always.
        """
        refuse("send or recv")

    def _at(self, address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements at an address."""
        shape = (1, count * dtype.itemsize)
        return memory_at(address, shape, self._collectives.device, None)[0].view(dtype)


def refuse(operation: str) -> NoReturn:
    """Raise since several hosts lack an operation."""
    raise ConfigurationError(
        f"{operation} of tensors on GPUs of several hosts: expected one of "
        f"{', '.join(OPERATIONS)}; make a group of the ranks of one host, or pass tensors on "
        "the CPU"
    )
