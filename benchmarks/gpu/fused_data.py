"""Inputs, weights, computations and references for the fused operator benchmark.

Every rank makes the same values for a rank, so references need no communication. Reference sums are
in float32.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import torch
from fused_norm import add_and_norm
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from fused_cases import Case
    from fused_context import Context

__all__ = ["DATA", "Data", "Reference"]

#: bfloat16 unit roundoff, to which addends and results may be rounded.
ROUNDOFF: Final = 2.0**-8
#: Elements in a reference's intermediate.
PIECE: Final = 1 << 25
#: Bytes in table rows that replays read in turn, more than the L2 holds.
TOUCHED: Final = 150 << 20
#: Most elements in torch's tables together that int32 indices reach.
WIDE: Final = 2**31 - 1
EPSILON: Final = 1e-6
FLOAT8: Final = torch.float8_e4m3fn

Tensors = tuple[torch.Tensor, ...]


class Reference:
    """A slot's results in float32, with error bounds.

    Args:
        totals: results.
        magnitudes: for each, the sum over its addends' magnitudes; a number stands for itself and
        the result's magnitude.
        roundings: how many there are.
    """

    def __init__(
        self, totals: Tensors, magnitudes: tuple[torch.Tensor | float, ...], roundings: int
    ) -> None:
        self.totals, self.magnitudes, self.roundings = totals, magnitudes, roundings

    def judge(self, results: Tensors) -> float:
        """Largest error over the bound; infinity for NaN and for another shape."""
        share = 0.0
        for result, total, magnitude in zip(results, self.totals, self.magnitudes, strict=True):
            if result.shape != total.shape:
                return float("inf")
            step = max(1, PIECE // max(1, total[:1].numel()))
            for at in range(0, total.shape[0], step):
                piece = slice(at, at + step)
                if isinstance(magnitude, float):
                    bound = total[piece].abs().add_(magnitude)
                else:
                    bound = magnitude[piece].clone()
                bound.mul_(self.roundings * ROUNDOFF).add_(2.0**-20)
                error = (result[piece].float() - total[piece]).abs_().div_(bound).max().item()
                if not error < float("inf"):
                    return float("inf")
                share = max(share, error)
        return share


class Data:
    """A case's tensors on this rank, which all sides share.

    Args:
        context: the rank's state.
        case: the case that the data belongs to.
        dry: True for values that are not initialised, without references.

    Attributes:
        word: noun for the computation, in side names, such as `gemm`.
        computations: Weft's and other libraries', by name: functions that take a slot, what the
        collective returned or None, and a tensor for the result or None; they return the result.
        references: by slot: the first and the last one.
    """

    word = ""

    def __init__(self, context: Context, case: Case, *, dry: bool = False) -> None:
        self.context, self.case, self.dry = context, case, dry
        self.device, self.dtype = context.device.name, context.dtype
        self.rank, self.ranks, self.slots = context.rank, context.ranks, case.buffers
        self.computations: dict[str, Callable[..., Any]] = {}
        self.make()
        checked = () if dry else dict.fromkeys((0, self.slots - 1))
        self.references = {slot: self.reference(slot) for slot in checked}

    def make(self) -> None:
        """Allocate and fill the tensors."""
        raise NotImplementedError

    def reference(self, slot: int) -> Reference:
        """Results that every side must have."""
        raise NotImplementedError

    def fused(self, slot: int, out: Any = None, **options: Any) -> Any:
        """Call the fused operator; returns the result, which is `out` if GEMMs get it."""
        raise NotImplementedError

    def tiling(self) -> Any:
        """The fused operator's default tiling."""
        raise NotImplementedError

    def finish(self, slot: int, received: torch.Tensor) -> Any:
        """Results from a collective's output after the computation."""
        return received

    def load(self, slot: int) -> torch.Tensor:
        """Input for a collective that comes before the computation."""
        raise NotImplementedError

    def refill(self, name: str, turn: int) -> None:
        """Make inputs for the computations `name` in a replay, the same for an equal turn."""

    def arrange(self, result: torch.Tensor) -> torch.Tensor:
        """A result, which may be the collective's output, as the reference has it."""
        return result

    def values(self, key: int, rank: int, slot: int, *shape: int) -> torch.Tensor:
        """Uniform values in [-1, 1), the same on all ranks for an equal key, rank and slot."""
        seed = ((key * 64 + rank) << 20) + slot
        source = torch.Generator(self.device).manual_seed(seed)
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        return made if self.dry else made.uniform_(-1, 1, generator=source)


class Embedding(Data):
    """This rank's tables, and indices for all ranks' batch."""

    word = "pool"

    def make(self) -> None:
        shape = self.case.shape
        self.tables, self.dim, self.rows = shape["tables"], shape["dim"], shape["rows"]
        self.batch, self.pooling = shape["batch"], shape["pooling"]
        self.local = self.batch // self.ranks
        size = (self.tables, self.rows, self.dim)
        stacked = torch.empty(size, dtype=self.dtype, device=self.device)
        for table in range(self.tables):
            stacked[table] = self.table(self.rank, table)
        self.weights, self.stacked = list(stacked.unbind(0)), stacked.view(-1, self.dim)
        count = self.tables * self.batch * self.pooling
        self.indices = [self.integers(count) for _ in range(self.slots)]
        #: For torch: a sample's bags are neighbours, and tables lie behind each other.
        wide = torch.int64 if self.stacked.numel() > WIDE else torch.int32
        self.stacked_indices = [self.integers(count).to(wide) for _ in range(self.slots)]
        self.offsets = torch.arange(
            0, count + 1, self.pooling, dtype=torch.int32, device=self.device
        )
        self.begins = self.offsets[:-1].to(wide)
        touched = 2 * count * self.dim * self.slots
        self.turns = -(-TOUCHED // touched)
        #: By computation name: the last turn that indices were made for.
        self.drawn: dict[str, int] = {}
        self.operator: Any = None
        self.computations = {"weft": self.pool, "torch": self.bag}
        for name in self.computations:
            self.refill(name, 0)

    def table(self, rank: int, table: int) -> torch.Tensor:
        return self.values(1 + table, rank, 0, self.rows, self.dim)

    def integers(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, device=self.device)

    def refill(self, name: str, turn: int) -> None:
        if self.drawn.get(name) == (turn := turn % self.turns):
            return
        self.drawn[name] = turn
        chosen = self.indices if name == "weft" else self.stacked_indices
        for slot, indices in enumerate(chosen):
            if name == "weft":
                self.draw(indices, self.rank, slot, turn)
                continue
            drawn = self.integers(indices.numel())
            self.draw(drawn, self.rank, slot, turn)
            by_table = drawn.view(self.tables, self.batch, self.pooling)
            first = torch.arange(self.tables, dtype=torch.int32, device=self.device)
            by_table += first.mul_(self.rows)[:, None, None]
            indices.view(self.batch, self.tables, self.pooling).copy_(by_table.transpose(0, 1))

    def draw(self, out: torch.Tensor, rank: int, slot: int, turn: int) -> None:
        """Indices into a rank's tables, [tables, batch, pooling]."""
        source = torch.Generator(self.device).manual_seed((rank << 40) + (turn << 20) + slot)
        out.random_(0, self.rows, generator=source)

    def reference(self, slot: int) -> Reference:
        columns = self.ranks * self.tables * self.dim
        total = torch.empty((self.local, columns), dtype=torch.float32, device=self.device)
        drawn = self.integers(self.tables * self.batch * self.pooling)
        step = max(1, PIECE // (self.pooling * self.dim))
        begin = self.rank * self.local
        for rank in range(self.ranks):
            self.draw(drawn, rank, slot, 0)
            bags = drawn.view(self.tables, self.batch, self.pooling)[:, begin : begin + self.local]
            for number in range(self.tables):
                own = rank == self.rank
                table = self.weights[number] if own else self.table(rank, number)
                at = (rank * self.tables + number) * self.dim
                for row in range(0, self.local, step):
                    chosen = bags[number, row : row + step]
                    made = table[chosen.long()].float().sum(1)
                    total[row : row + step, at : at + self.dim] = made
        # A sum over values up to 1, in float32 and rounded once.
        return Reference((total,), (self.pooling * 1e-3,), 1)

    def open(self) -> Any:
        """The operator, which ranks make together."""
        if self.operator is None:
            self.operator = self.context.fused.EmbeddingAllToAll(
                self.weights, communicator=self.context.communicator
            )
        return self.operator

    def tiling(self) -> Any:
        tables: Any = import_module("weft.fused.embedding.tables")
        return tables.default_tiling(self.dim, self.dtype.itemsize, self.pooling)

    def tiled(self, tiling: Any) -> Any:
        """The operator, whose next calls have a tiling; None: the default."""
        operator = self.open()
        if tiling is not None:
            tiling.check()
        operator.tiling = tiling
        return operator

    def fused(self, slot: int, out: Any = None, **options: Any) -> Any:
        return self.tiled(options.get("tiling"))(self.indices[slot], self.offsets)

    def pool(self, slot: int, received: Any, out: Any) -> Any:
        return self.tiled(None).pool(self.indices[slot], self.offsets)

    def bag(self, slot: int, received: Any, out: Any) -> Any:
        indices = self.stacked_indices[slot]
        return functional.embedding_bag(indices, self.stacked, self.begins, mode="sum")

    def arrange(self, result: torch.Tensor) -> torch.Tensor:
        if result.dim() != 1:
            return result.view(self.local, -1)
        # The collective leaves one source's parts together.
        by_source = result.view(self.ranks, self.local, self.tables * self.dim)
        return by_source.transpose(0, 1).reshape(self.local, -1)


class Matmul(Data):
    """Inputs and weights for a GEMM or GEMV: few tokens, or many rows."""

    word = "gemm"

    def make(self) -> None:
        shape, case = self.case.shape, self.case
        self.rows = shape["rows"] if "rows" in shape else shape["tokens"]
        self.columns, self.inner = case.local(self.ranks)
        slots = range(self.slots)
        self.inputs = [self.input(self.rank, slot) for slot in slots]
        self.weights = [self.weight(self.rank, slot) for slot in slots]
        self.computations = {"weft": self.multiply, "torch": self.multiply_by_torch}

    def input(self, rank: int, slot: int) -> torch.Tensor:
        rows = self.rows
        if self.case.operator == "all_gather_gemm":
            rows //= self.ranks
        return self.values(1, rank, slot, rows, self.inner)

    def weight(self, rank: int, slot: int) -> torch.Tensor:
        made = self.values(2, rank, slot, self.columns, self.inner)
        return made.mul_((9 / self.inner) ** 0.5)

    def reference(self, slot: int) -> Reference:
        case, ranks = self.case, range(self.ranks)
        if case.is_gathered:
            inputs = [self.input(rank, slot) for rank in ranks]
            if case.collective == "all_to_all":
                inputs = [each.chunk(self.ranks)[self.rank] for each in inputs]
            parts = [torch.cat(inputs).float() @ self.weight(self.rank, slot).float().t()]
        else:
            parts = []
            for rank in ranks:
                given = self.input(rank, slot)
                if case.collective != "all_reduce":
                    given = given.chunk(self.ranks)[self.rank]
                parts.append(given.float() @ self.weight(rank, slot).float().t())
            if case.collective == "all_to_all":
                parts = [torch.cat(parts)]
        total = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        magnitude = sum((part.abs() for part in parts), torch.zeros_like(total))
        # Addends, results and GEMM parts, whose standard deviation is 1, may be rounded.
        return Reference((total,), (magnitude.add_(1.0),), 1 + len(parts))

    def tiling(self) -> Any:
        gemm: Any = import_module("weft.fused.gemm.gemm")
        rows = self.rows // self.ranks
        return gemm.default_tiling(rows, self.columns, self.inner, self.dtype)

    def fused(self, slot: int, out: Any = None, **options: Any) -> Any:
        operator = getattr(self.context.fused, self.case.operator)
        # By the kernel, unless a side leaves the choice to the call.
        options.setdefault("fused", True)
        return operator(
            self.inputs[slot],
            self.weights[slot],
            out=None if out is None else out.view(-1, self.columns),
            communicator=self.context.communicator,
            **options,
        )

    def multiply(self, slot: int, received: Any, out: Any) -> Any:
        given = self.inputs[slot] if received is None else received.view(-1, self.inner)
        out = None if out is None else out.view(given.shape[0], self.columns)
        return self.context.fused.gemm(given, self.weights[slot], out=out)

    def multiply_by_torch(self, slot: int, received: Any, out: Any) -> Any:
        given = self.inputs[slot] if received is None else received.view(-1, self.inner)
        weight = self.weights[slot]
        if out is None:
            return functional.linear(given, weight)
        return torch.mm(given, weight.t(), out=out.view(given.shape[0], self.columns))

    def load(self, slot: int) -> torch.Tensor:
        return self.inputs[slot]

    def arrange(self, result: torch.Tensor) -> torch.Tensor:
        return result.view(-1, self.columns)


class Scaled(Matmul):
    """float8 inputs and weights, with power-of-two scales by row and column.

    Sums are left to the tensor cores (`use_fast_accum`).
    """

    def make(self) -> None:
        super().make()
        self.of_columns = self.scale_of_columns()
        gathered = self.ranks if self.case.collective == "all_gather" else 1
        self.of_rows = self.powers(self.inputs[0].shape[0] * gathered)[:, None]
        for slot in range(self.slots):
            rows = self.of_rows[: self.inputs[slot].shape[0]]
            self.inputs[slot] = (self.inputs[slot].float() / rows).to(FLOAT8)
            self.weights[slot] = (self.weights[slot].float() / self.of_columns.t()).to(FLOAT8)

    def powers(self, length: int) -> torch.Tensor:
        """Row scales, the same in each part whose length is a multiple of four."""
        return torch.exp2(-(torch.arange(length, device=self.device) % 4).float())

    def input(self, rank: int, slot: int) -> torch.Tensor:
        made = super().input(rank, slot)
        return (made.to(FLOAT8).float() * self.powers(made.shape[0])[:, None]).to(self.dtype)

    def weight(self, rank: int, slot: int) -> torch.Tensor:
        made = self.values(2, rank, slot, self.columns, self.inner).to(FLOAT8).float()
        return (made * self.scale_of_columns().t()).to(self.dtype)

    def reference(self, slot: int) -> Reference:
        made = super().reference(slot)
        # For sums in the tensor cores, up to 2 %: DeepSeek-V3 technical report, section 3.3.2.
        made.roundings += 4
        return made

    def scale_of_columns(self) -> torch.Tensor:
        size = float(2 ** round(math.log2((9 / self.inner) ** 0.5)))
        return size * self.powers(self.columns)[None, :]

    def scales(self) -> dict[str, Any]:
        return {
            "scale_x": self.of_rows,
            "scale_weight": self.of_columns,
            "out_dtype": self.dtype,
            "use_fast_accum": True,
        }

    def fused(self, slot: int, out: Any = None, **options: Any) -> Any:
        return super().fused(slot, out, **self.scales(), **options)

    def rows_of(self, slot: int, received: Any) -> torch.Tensor:
        """A slot's inputs, or what a collective on two-byte elements returned."""
        if received is None:
            return self.inputs[slot]
        return received.view(FLOAT8).view(-1, self.inner)  # type: ignore[no-any-return]

    def multiply(self, slot: int, received: Any, out: Any) -> Any:
        given = self.rows_of(slot, received)
        out = None if out is None else out.view(given.shape[0], self.columns)
        return self.context.fused.gemm(given, self.weights[slot], out=out, **self.scales())

    def multiply_by_torch(self, slot: int, received: Any, out: Any) -> Any:
        given, weight = self.rows_of(slot, received), self.weights[slot]
        out = None if out is None else out.view(given.shape[0], self.columns)
        scales: Any = import_module("weft.fused.gemm.scales")
        arguments = given, weight, self.of_rows, self.of_columns, self.dtype, True
        return scales.scaled_matmul(*arguments, out=out)

    def load(self, slot: int) -> torch.Tensor:
        return self.inputs[slot].view(self.dtype)


class Gemv(Matmul):
    """GEMV inputs and weights for a few tokens."""

    word = "gemv"

    def multiply(self, slot: int, received: Any, out: Any) -> Any:
        out = None if out is None else out.view(self.rows, self.columns)
        return self.context.fused.gemv(self.inputs[slot], self.weights[slot], out=out)


class GemvNorm(Gemv):
    """A GEMV for a few tokens whose sum goes through a residual and an RMS norm."""

    def make(self) -> None:
        super().make()
        slots, size = range(self.slots), (self.rows, self.columns)
        self.residuals = [self.values(3, 0, slot, *size) for slot in slots]
        self.norm_weight = self.values(4, 0, 0, self.columns)

    def reference(self, slot: int) -> Reference:
        summed = super().reference(slot)
        (total,), (magnitude,) = summed.totals, summed.magnitudes
        residual = self.residuals[slot].float()
        return normed(total + residual, magnitude + residual.abs(), self.norm_weight, self.ranks)

    def fused(self, slot: int, out: Any = None, **options: Any) -> Any:
        normed = {"residual": self.residuals[slot], "norm_weight": self.norm_weight}
        return super().fused(slot, out, eps=EPSILON, **normed, **options)

    def finish(self, slot: int, received: torch.Tensor) -> Any:
        given = received.view(self.rows, self.columns)
        return add_and_norm(given, self.residuals[slot], self.norm_weight, EPSILON)


class Norm(Data):
    """Partial sums, residual and weights for an RMS norm."""

    word = "norm"

    def make(self) -> None:
        shape = self.case.shape
        self.tokens, self.hidden = shape["tokens"], shape["hidden"]
        slots = range(self.slots)
        self.partials = [self.partial(self.rank, slot) for slot in slots]
        self.residuals = [self.values(2, 0, slot, self.tokens, self.hidden) for slot in slots]
        self.weight = self.values(3, 0, 0, self.hidden)
        self.computations = {"triton": self.norm}

    def partial(self, rank: int, slot: int) -> torch.Tensor:
        return self.values(1, rank, slot, self.tokens, self.hidden)

    def reference(self, slot: int) -> Reference:
        parts = [self.partial(rank, slot).float() for rank in range(self.ranks)]
        every = torch.stack([*parts, self.residuals[slot].float()])
        return normed(every.sum(0), every.abs().sum(0), self.weight, self.ranks)

    def fused(self, slot: int, out: Any = None, **options: Any) -> Any:
        return self.context.fused.all_reduce_rms_norm(
            self.partials[slot],
            self.residuals[slot],
            self.weight,
            eps=EPSILON,
            communicator=self.context.communicator,
            **options,
        )

    def norm(self, slot: int, received: Any, out: Any) -> Any:
        given = self.partials[slot] if received is None else received.view_as(self.partials[slot])
        return add_and_norm(given, self.residuals[slot], self.weight, EPSILON)

    def load(self, slot: int) -> torch.Tensor:
        return self.partials[slot]


def normed(total: Any, magnitude: Any, weight: Any, ranks: int) -> Reference:
    """Reference for an RMS norm times a weight, and for the input."""
    scale = (total.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.float()
    bounds = magnitude * scale.abs() + 1e-3, magnitude
    return Reference((total * scale, total), bounds, ranks + 3)


#: By case kind.
DATA: Final[dict[str, type[Data]]] = {
    "embedding": Embedding,
    "gemv": Gemv,
    "gemv_norm": GemvNorm,
    "norm": Norm,
    "gemm": Matmul,
    "scaled": Scaled,
}
