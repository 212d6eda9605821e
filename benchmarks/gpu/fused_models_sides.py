"""Sides in the benchmark that runs models with fused operators.

NVLink multicast is off for all sides.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from fused_norm import add_and_norm
from harness.side import Side
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from training_decode import EPSILON
from training_sides import Group, OneShot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fused_models_decode import Normed
    from fused_models_ranking import Ranking
    from harness.context import Context

    #: GEMM summed over the ranks, with residual and norm: see `Normed.run_normed`.
    Add = Callable[[int, Any, Any, Any], tuple[Any, Any]]

__all__ = ["Compiled", "Fused", "sides_of"]


class Unfused(Group):
    """A torch.distributed group, whose collectives are separate from computation."""

    def add(self, data: Normed) -> Add:
        """GEMV, all-reduce, and one kernel that adds and norms."""
        return added(self, data)

    def pool(self, data: Ranking) -> Callable[[], list[Any]]:
        """Bags from all tables on this rank in one operator, and an all-to-all."""
        return lambda: list(Exchange.apply(data.pooled(), self.group).unbind(0))


class UnfusedOneShot(OneShot):
    """Torch's one-shot all-reduce."""

    def add(self, data: Normed) -> Add:
        """GEMV, all-reduce, and one kernel that adds and norms."""
        return added(self, data)


def added(side: Group, data: Normed) -> Add:
    """Sum by a side's all-reduce."""
    # A sum may be read while the next one is made.
    buffers = side.buffers(2, tuple(data.input.shape))

    def add(number: int, given: Any, weights: Any, residual: Any) -> tuple[Any, Any]:
        buffer = buffers[number % 2]
        torch.mm(given, weights.t(), out=buffer)
        return add_and_norm(side.all_reduce(buffer), residual, data.ones, EPSILON)

    return add


class Exchange(torch.autograd.Function):
    """All-to-all with equal row blocks; the gradient is an all-to-all back."""

    @staticmethod
    def forward(ctx: Any, rows: Any, group: Any) -> Any:
        """All ranks' blocks, [ranks, ...], from rows [batch, ...]."""
        ctx.group = group
        ranks = group.size()
        received = torch.empty_like(rows)
        distributed.all_to_all_single(received, rows, group=group)
        return received.view(ranks, rows.shape[0] // ranks, *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Row gradient."""
        sent = grads[0].flatten(0, 1).contiguous()
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=ctx.group)
        return received, None


class Fused(Side):
    """weft.fused functions."""

    ours = True

    def __init__(self, context: Context, name: str, *, is_normed: bool = True) -> None:
        super().__init__(context)
        self.name, self.is_normed = name, is_normed
        self.communicator = context.communicator

    def start(self) -> None:
        """Import the operators."""
        context: Any = self.context
        self.fused = context.fused

    def check(self) -> None:
        """Raise the error that a kernel recorded."""
        import_module("weft").check()

    def add(self, data: Normed) -> Add:
        """One operator for GEMV, all-reduce, residual and norm, or for the first two."""
        gemv = self.fused.gemv_all_reduce
        options: Any = {"communicator": self.communicator, "fused": True}

        def whole(_number: int, given: Any, weights: Any, residual: Any) -> tuple[Any, Any]:
            made: tuple[Any, Any] = gemv(
                given, weights, residual=residual, norm_weight=data.ones, eps=EPSILON, **options
            )
            return made

        def unnormed(_number: int, given: Any, weights: Any, residual: Any) -> tuple[Any, Any]:
            return add_and_norm(gemv(given, weights, **options), residual, data.ones, EPSILON)

        return whole if self.is_normed else unnormed

    def pool(self, data: Ranking) -> Callable[[], list[Any]]:
        """Bags from all tables on this rank, fused with the all-to-all."""
        bags = self.fused.EmbeddingAllToAll(
            data.tables, communicator=self.communicator, sparse=True, out_dtype=data.whole.dtype
        )
        shape = (data.local, -1, data.dim)
        # The rows are copied beside the dense features' rows, before a call overwrites them.
        return lambda: [bags(data.indices, data.offsets, copy=False).view(shape)]


class Compiled(Group):
    """Layers compiled by torch, over a group with a backend other than Weft.

    Args:
        context: the rank's state.
        name: side name.
        is_fused: True with the weft.fused pass.
        is_pipelined: True with torch's own pass, "async tensor parallelism".
        is_sequence: True with rows divided among the ranks between layers.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        *,
        is_fused: bool = False,
        is_pipelined: bool = False,
        is_sequence: bool = False,
    ) -> None:
        super().__init__(context, name, context.device.backend)
        self.is_fused, self.is_pipelined, self.is_sequence = is_fused, is_pipelined, is_sequence

    def start(self) -> None:
        """Make the group and a mesh."""
        super().start()
        context: Any = self.context
        kind = torch.device(context.device.name).type
        self.mesh = context.once(
            f"mesh {self.backend}", lambda: DeviceMesh.from_group(self.group, kind)
        )
        if self.is_pipelined:
            symmetric: Any = import_module("torch.distributed._symmetric_memory")
            symmetric.enable_symm_mem_for_group(self.group.group_name)
        # Compilation counts are recorded on all sides.
        self.fused = context.fused

    def check(self) -> None:
        """Raise the error that a kernel recorded."""
        if self.is_fused:
            import_module("weft").check()

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Compiler settings for the first call."""
        inductor: Any = import_module("torch._inductor.config")
        functorch: Any = import_module("torch._functorch.config")
        changed = {"fx_graph_cache": False, "_micro_pipeline_tp": self.is_pipelined}
        with ExitStack() as stack:
            # Graphs from a cache have no counts.
            stack.enter_context(inductor.patch(changed))
            stack.enter_context(functorch.patch(enable_autograd_cache=False))
            self.fused.reset_report()
            if self.is_fused:
                # Gain rules are for GPU sizes.
                self.fused.enable(force=self.context.device.kind == "twin")
                stack.callback(self.fused.disable)
            yield


def sides_of(context: Context) -> dict[str, list[Any]]:
    """Sides by case kind, fused ones first."""
    backend = context.device.backend
    weft = Unfused(context, "weft", "weft")
    peer = Unfused(context, backend, backend)
    whole = Fused(context, "weft fused")
    unnormed = Fused(context, "weft fused product", is_normed=False)
    on_gpus = context.device.kind == "cuda"
    operators = [UnfusedOneShot(context, "torch one_shot", backend)] if on_gpus else []
    on = Compiled(context, "pass on", is_fused=True)
    off = Compiled(context, "pass off")
    sequence = [
        Compiled(context, "sequence, pass on", is_fused=True, is_sequence=True),
        Compiled(context, "sequence, pass off", is_sequence=True),
    ]
    if on_gpus:
        sequence.append(
            Compiled(context, "sequence, torch async", is_pipelined=True, is_sequence=True)
        )
    return {
        "decode": [whole, unnormed, weft, peer, *operators],
        "compile decode": [on, off],
        "compile prefill": [on, off, *sequence],
        "forward": [whole, weft, peer],
        "train": [whole, weft, peer],
    }
