"""Sides in the training benchmark: torch.distributed groups, and torch's one-shot operator.

Groups are over Weft and NCCL, or over Weft and gloo on the twin. NVLink multicast is off for all
sides.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.side import Arena, Side

if TYPE_CHECKING:
    from harness.context import Context

__all__ = ["Group", "OneShot", "sides_of"]


class Group(Side):
    """A torch.distributed group.

    Args:
        context: the rank's state.
        name: side name.
        backend: the group's backend.
        is_symmetric: True if FSDP2's buffers are in the group's symmetric memory.
    """

    def __init__(
        self, context: Context, name: str, backend: str, *, is_symmetric: bool = False
    ) -> None:
        super().__init__(context)
        self.name, self.backend, self.is_symmetric = name, backend, is_symmetric
        self.distributed: Any = import_module("torch.distributed")

    def start(self) -> None:
        """Make the group and run one operation."""
        context: Any = self.context
        # FSDP2's symmetric memory is in a separate group: if it fails, the other does not.
        self.group = context.group(self.backend, apart=self.is_symmetric)
        self.token = self.torch.ones(1, device=context.device.name)
        self.distributed.all_reduce(self.token, group=self.group)
        if (total := self.token.item()) != context.ranks:
            raise RuntimeError(f"all_reduce of ones: got {total}, expected {context.ranks}")

    def check(self) -> None:
        """Raise the error from a wait that timed out; a collective call."""
        # A Weft operation raises an earlier one's error, which may be in a graph.
        if self.backend == "weft":
            self.token.fill_(1)
            self.distributed.all_reduce(self.token, group=self.group)

    def buffers(self, count: int, size: tuple[int, int]) -> list[Any]:
        """Tensors for `all_reduce`, uninitialised; a collective call."""
        return [self.memory(size[0] * size[1]).view(size) for _ in range(count)]

    def all_reduce(self, tensor: Any) -> Any:
        """Tensor sum over the ranks, on the current stream."""
        self.distributed.all_reduce(tensor, group=self.group)
        return tensor


class OneShot(Group):
    """The one-shot operator on torch's symmetric memory, over a backend's group."""

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
        """Parts in the symmetric memory."""
        self.arena.used = 0
        return [self.arena.take(size[0] * size[1]).view(size) for _ in range(count)]

    def all_reduce(self, tensor: Any) -> Any:
        """Sum over the ranks in a separate tensor."""
        operator = self.torch.ops.symm_mem.one_shot_all_reduce
        return operator(tensor, "sum", self.group.group_name)


def sides_of(context: Context) -> dict[str, list[Group]]:
    """Sides by case kind, Weft first."""
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
