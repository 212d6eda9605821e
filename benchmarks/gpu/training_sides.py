"""Sides of the benchmark of training: groups of torch.distributed, and torch's one-shot operator.

Groups are over Weft and NCCL, or over Weft and gloo on the twin. NVLink multicast is off for all of
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collectives_sides import Arena, Side

if TYPE_CHECKING:
    from training_context import Context

__all__ = ["Group", "OneShot", "sides_of"]


class Group(Side):
    """A group of torch.distributed.

    Args:
        context: of the rank.
        name: of the side.
        backend: of the group.
        is_symmetric: True if FSDP2's buffers are in the group's symmetric memory.
    """

    def __init__(
        self, context: Context, name: str, backend: str, *, is_symmetric: bool = False
    ) -> None:
        super().__init__(context)
        self.name, self.backend, self.is_symmetric = name, backend, is_symmetric
        self.distributed: Any = import_module("torch.distributed")

    def start(self) -> None:
        """Make the group and run its first operation."""
        context: Any = self.context
        # The symmetric memory of FSDP2 is in a group of its own, whose failure is not the other's.
        self.group = context.group(self.backend, apart=self.is_symmetric)
        self.token = self.torch.ones(1, device=context.device.name)
        self.distributed.all_reduce(self.token, group=self.group)
        if (total := self.token.item()) != context.ranks:
            raise RuntimeError(f"all_reduce of ones: got {total}, expected {context.ranks}")

    def check(self) -> None:
        """Raise the error of a wait that timed out; a collective call."""
        # An operation of Weft raises the error of an earlier one, which may be in a graph.
        if self.backend == "weft":
            self.token.fill_(1)
            self.distributed.all_reduce(self.token, group=self.group)

    def buffers(self, count: int, size: tuple[int, int]) -> list[Any]:
        """Tensors for `all_reduce`, uninitialised; a collective call."""
        return [self.memory(size[0] * size[1]).view(size) for _ in range(count)]

    def all_reduce(self, tensor: Any) -> Any:
        """Sum of a tensor over the ranks, on the current stream."""
        self.distributed.all_reduce(tensor, group=self.group)
        return tensor


class OneShot(Group):
    """The one-shot operator on torch's symmetric memory, by the group of a backend."""

    def start(self) -> None:
        """Allocate symmetric memory for the largest case."""
        super().start()
        symmetric: Any = import_module("torch.distributed._symmetric_memory")
        shapes = [case.shape for case in self.context.cases if case.kind == "decode"]
        most = max(shape["tokens"] * shape["hidden"] for shape in shapes)
        # Parts begin at multiples of 4096 bytes.
        elements = 2 * (most + 2048)
        device = self.context.device.name
        memory = symmetric.empty(elements, dtype=self.torch.bfloat16, device=device)
        self.arena = Arena(memory)
        self.handle = symmetric.rendezvous(memory, self.group)

    def buffers(self, count: int, size: tuple[int, int]) -> list[Any]:
        """Parts of the symmetric memory."""
        self.arena.used = 0
        return [self.arena.take(size[0] * size[1]).view(size) for _ in range(count)]

    def all_reduce(self, tensor: Any) -> Any:
        """Sum over the ranks in a tensor of its own."""
        operator = self.torch.ops.symm_mem.one_shot_all_reduce
        return operator(tensor, "sum", self.group.group_name)


def sides_of(context: Context) -> dict[str, list[Group]]:
    """Sides by kind of case, Weft first."""
    weft = Group(context, "weft", "weft")
    symmetric = Group(context, "weft symmetric", "weft", is_symmetric=True)
    backend = context.device.backend
    peer = Group(context, backend, backend)
    operators = []
    if context.device.kind == "cuda":
        operators = [OneShot(context, "torch one_shot", backend)]
    return {
        "ddp": [weft, peer],
        "fsdp2": [weft, symmetric, peer],
        "decode": [weft, peer, *operators],
    }
