"""Embedding tables on all ranks, the bag format, and task sizes.

For example, rank 0 has tables 0 to 3 and rank 1 has tables 4 to 7, as in DLRM's table-wise sharding
(see https://arxiv.org/abs/1906.00091).
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton.language as tl

from weft.base.errors import ConfigurationError, ConfigurationMismatchError, ShapeError
from weft.fused.kernels import embedding as kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.group.communicator import Communicator

__all__ = ["Layout", "Tables", "Tiling", "concatenate_bags", "default_tiling", "local_batch"]

#: Table dtypes by name.
DTYPES: Final = {str(each)[6:]: each for each in (torch.float32, torch.float16, torch.bfloat16)}
#: Table dtypes in kernels.
ELEMENTS: Final = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
#: Pooling modes by name.
MODES: Final = {
    "sum": kernels.SUM,
    "mean": kernels.MEAN,
    "weighted_sum": kernels.WEIGHTED_SUM,
}
#: Maximum table width in columns, and the number that must divide a width.
MOST_COLUMNS: Final = 1024
COLUMNS_OF: Final = 4
#: Threads in a warp, and registers in an SM.
_WARP: Final = 32
_REGISTERS: Final = 65536
#: Widest load by a thread, in bytes.
_VECTOR: Final = 16
#: Maximum number of address lists that are kept.
_MOST_PIECES: Final = 64
#: Maximum default task width in columns.
_TASK_COLUMNS: Final = 256
#: Maximum bags in a task for each warp: Triton 3.6 does not compile larger int32 blocks.
_BAGS: Final = 16
#: Bag length above which pooling takes longer than the exchange: the ratio between H200 memory and
#: NVLink rates for random rows.
_SHORT: Final = 11
#: Default number of row loads that a thread keeps in flight.
_LOADS: Final = 8


class Tiling(NamedTuple):
    """Pooling task sizes.

    Attributes:
        bags: bags in a task, a power of 2, at most 16 for each warp.
        columns: columns in a task, a power of 2; a wider table is pooled in several tasks.
        unroll: positions in a bag whose rows are loaded at a time.
        num_warps: warps in a program.
        programs: programs for each SM; limits the registers for a thread.
        own_last: eighths of the tasks for local samples that run after all tasks for peers; the
            others run between these. 8 is best if pooling takes longer than the exchange, 1 if the
            exchange does. -1 runs them before all others, for comparisons.
        gradient_rows, gradient_columns: size of a task that returns gradients, powers of 2.
        chunk: sorted indices in a task that sums gradients, a multiple of 4.
    """

    bags: int
    columns: int
    unroll: int
    num_warps: int = 4
    programs: int = 4
    own_last: int = 8
    gradient_rows: int = 8
    gradient_columns: int = 256
    chunk: int = 32

    def check(self) -> None:
        """Raise unless kernels compile for these sizes.

        Raises:
            ConfigurationError: names the field.
        """
        for name in ("bags", "columns", "unroll", "num_warps", "gradient_rows", "gradient_columns"):
            size = getattr(self, name)
            if size < 1 or size & (size - 1):
                raise ConfigurationError(f"tiling.{name} is {size}: expected a power of 2")
        if self.bags > _BAGS * self.num_warps:
            raise ConfigurationError(
                f"tiling.bags is {self.bags}: expected at most {_BAGS} for each of "
                f"{self.num_warps} warps"
            )
        if self.programs < 1 or self.chunk < 4 or self.chunk % 4 or not -1 <= self.own_last <= 8:
            raise ConfigurationError(
                f"tiling has {self.programs} programs, chunk {self.chunk}, own_last "
                f"{self.own_last}: expected at least 1, a multiple of 4, and -1 to 8"
            )

    @property
    def registers(self) -> int:
        """Register limit for a thread, so that all programs on an SM are resident."""
        return min(255, _REGISTERS // (self.programs * self.num_warps * _WARP) // 8 * 8)


def default_tiling(columns: int, itemsize: int, average: float) -> Tiling:
    """Default tiling: a thread keeps 8 16-byte loads in flight, fewer for narrow tables.

    Args:
        columns: geometric mean of this rank's table widths.
        itemsize: bytes in an element.
        average: indices in an average bag; short bags are pooled many at a time.
    """
    wide = min(_TASK_COLUMNS, 1 << max(columns - 1, 15).bit_length())
    lanes = max(1, 4 * _WARP * _VECTOR // itemsize // wide)
    unroll = min(_LOADS, 1 << max(0, math.ceil(average) - 1).bit_length())
    bags = min(4 * _BAGS, lanes * _LOADS // unroll)
    loads = bags // lanes * unroll
    # Blocks with many bags need more registers for the sums; with few loads, more programs help.
    programs = 6 if loads <= 2 else 4 if loads < _LOADS or unroll > 2 else 3
    own_last = 1 if average < _SHORT else 8
    return Tiling(bags, wide, unroll, programs=programs, own_last=own_last)


class Layout(NamedTuple):
    """Tables on all ranks, the same value everywhere.

    Attributes:
        columns: for each table, by rank.
        dtype: output dtype.
        is_trained: tables on any rank have gradients.
    """

    columns: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_trained: bool

    @property
    def all_columns(self) -> list[int]:
        """Columns for each table, in output order."""
        return [each for rank in self.columns for each in rank]

    @property
    def firsts(self) -> list[int]:
        """First output column for each rank, and the number of columns."""
        sums = [0]
        for rank in self.columns:
            sums.append(sums[-1] + sum(rank))
        return sums

    @property
    def width(self) -> int:
        """Output columns."""
        return self.firsts[-1]

    @property
    def align(self) -> int:
        """Largest power of 2 up to 16 that divides all column counts."""
        return math.gcd(16, *self.all_columns)


class Tables:
    """This rank's tables, checked, and the layout on all ranks.

    Args:
        weights: `[rows, columns]` each.
        modes: one for all tables, or one for each.
        communicator: group with all these ranks; they make an object together.
        dtype: output dtype; by default the tables' dtype.
        device: for a rank without tables; by default the current GPU.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        modes: str | Sequence[str],
        communicator: Communicator,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self.modes = _modes(modes, len(weights))
        for number, weight in enumerate(weights):
            _check_table(number, weight, weights[0])
        self.shapes = [(int(each.shape[0]), int(each.shape[1])) for each in weights]
        self.dtype = weights[0].dtype if weights else dtype
        self.device = weights[0].device if weights else _device(device)
        output = self.dtype if dtype is None else dtype
        if output is not None and str(output)[6:] not in DTYPES:
            raise ConfigurationError(f"out_dtype is {output}: expected one of {', '.join(DTYPES)}")
        self.layout = _agree(
            communicator,
            [columns for _, columns in self.shapes],
            output,
            any(each.requires_grad for each in weights),
        )
        if self.dtype is None:
            self.dtype = self.layout.dtype
        self.columns = sum(columns for _, columns in self.shapes)
        logarithms = [math.log2(columns) for _, columns in self.shapes] or [4.0]
        #: Geometric mean over table widths.
        self.mean_columns = round(2 ** (sum(logarithms) / len(logarithms)))
        self.is_weighted = kernels.WEIGHTED_SUM in self.modes
        self._first = self.layout.firsts[communicator.rank]
        self._pieces: dict[tuple[object, ...], torch.Tensor] = {}
        #: Address tables that captured kernels read.
        self._captured: dict[tuple[object, ...], torch.Tensor] = {}
        self._gradients: torch.Tensor | None = None
        self._limits: torch.Tensor | None = None

    def check(self, weights: Sequence[torch.Tensor]) -> None:
        """Raise unless tensors have these tables' shapes, dtype and device."""
        if [tuple(each.shape) for each in weights] != self.shapes:
            raise ShapeError(
                f"weights of shapes {[tuple(each.shape) for each in weights]}: expected "
                f"{self.shapes}, as when the operator was made"
            )
        for number, weight in enumerate(weights):
            if weight.dtype != self.dtype or weight.device != self.device:
                raise ShapeError(
                    f"weights[{number}] is {weight.dtype} on {weight.device}: expected "
                    f"{self.dtype} on {self.device}, as when the operator was made"
                )
            _check_table(number, weight, weights[0])

    def pieces(self, weights: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """Table segments up to `columns` wide, as the kernel reads them; cached by address.

        Raises:
            ConfigurationError: if they must be made while a CUDA graph is captured.
        """
        addresses = [each.data_ptr() for each in weights]
        key = (columns, *((each.data_ptr(), *each.shape) for each in weights))
        found = self._pieces.get(key)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if found is not None:
            if capturing:
                self._captured[key] = found
            return found
        self.check(weights)
        if capturing:
            raise ConfigurationError(
                "weft.fused.embedding_all_to_all: a table of addresses has to be made, which a "
                "capture does not allow; make the same call once before the capture"
            )
        rows: list[tuple[int, ...]] = []
        own = 0
        for number, (count, width) in enumerate(self.shapes):
            itemsize = weights[number].itemsize
            rows += [
                (
                    addresses[number] + first * itemsize,
                    count,
                    width,
                    min(columns, width - first),
                    self._first + own + first,
                    own + first,
                    number,
                    self.modes[number],
                )
                for first in range(0, width, columns)
            ]
            own += width
        made = torch.tensor(rows, dtype=torch.int64).reshape(-1, kernels.FIELDS).to(self.device)
        while len(self._pieces) >= _MOST_PIECES:
            del self._pieces[next(iter(self._pieces))]
        self._pieces[key] = made
        return made

    def gradient_table(self, firsts: list[int], bases: list[int]) -> torch.Tensor:
        """Tables as the gradient kernels read them."""
        if self._gradients is None:
            rows, own = [], 0
            for number, (_, columns) in enumerate(self.shapes):
                rows.append((firsts[number], columns, own, self.modes[number], bases[number]))
                own += columns
            self._gradients = torch.tensor(rows, dtype=torch.int64).to(self.device)
        return self._gradients

    def limits(self, bases: list[int]) -> torch.Tensor:
        """First row in each table, numbered through all tables, and the row count; int64."""
        if self._limits is None:
            self._limits = torch.tensor(bases, dtype=torch.int64).to(self.device)
        return self._limits


def local_batch(batch: int, rank: int, ranks: int) -> tuple[int, int]:
    """First sample and sample count for a rank, as in `torch.tensor_split`."""
    extra = batch % ranks
    return rank * (batch // ranks) + min(rank, extra), batch // ranks + (rank < extra)


def concatenate_bags(
    indices: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor | None],
    per_sample_weights: Sequence[torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Bags for several tables in one tensor each, from lists in `embedding_bag` format.

    Args:
        indices: for each table, `[count]`; or `[batch, length]` with `None` as offsets.
        offsets: for each table, `[batch]`: the first index in each bag.
        per_sample_weights: for each table, shaped like the indices; `None` for tables without
            weights.

    Returns:
        Indices `[total]`, offsets `[tables * batch + 1]`, by table, and weights `[total]`, ones for
        tables without; `None` if there are no weights.

    Raises:
        ShapeError: if lists have different lengths, or tables different batches.
    """
    if len(indices) != len(offsets) or not indices:
        raise ShapeError(
            f"indices of {len(indices)} tables, offsets of {len(offsets)}: expected the same "
            "number, at least 1"
        )
    starts: list[torch.Tensor] = []
    total = 0
    for number, (ids, first) in enumerate(zip(indices, offsets, strict=True)):
        if first is None:
            if ids.dim() != 2:
                raise ShapeError(
                    f"indices[{number}] has {ids.dim()} dimensions: expected [batch, length], "
                    "since it has no offsets"
                )
            first = torch.arange(len(ids), device=ids.device) * ids.shape[1]
        if first.dim() != 1 or len(first) != len(starts[0] if starts else first):
            raise ShapeError(
                f"offsets[{number}] has shape {tuple(first.shape)}: expected one dimension, and "
                "the batch of the other tables"
            )
        starts.append(first + total)
        total += ids.numel()
    starts.append(torch.full((1,), total, dtype=starts[0].dtype, device=starts[0].device))
    weights = None
    if per_sample_weights is not None:
        if len(per_sample_weights) != len(indices):
            raise ShapeError(
                f"per_sample_weights of {len(per_sample_weights)} tables: expected {len(indices)}"
            )
        dtype = next((each.dtype for each in per_sample_weights if each is not None), None)
        weights = torch.cat(
            [
                torch.ones(ids.numel(), dtype=dtype, device=ids.device)
                if each is None
                else each.reshape(-1)
                for ids, each in zip(indices, per_sample_weights, strict=True)
            ]
        )
    return torch.cat([each.reshape(-1) for each in indices]), torch.cat(starts), weights


def _modes(modes: str | Sequence[str], count: int) -> list[int]:
    names = [modes] * count if isinstance(modes, str) else list(modes)
    if len(names) != count:
        raise ShapeError(f"modes of {len(names)} tables: expected {count}, or one for all")
    for name in names:
        if name not in MODES:
            raise ConfigurationError(f"mode is {name!r}: expected one of {', '.join(MODES)}")
    return [MODES[name] for name in names]


def _check_table(number: int, weight: torch.Tensor, first: torch.Tensor) -> None:
    name = f"weights[{number}]"
    if weight.dim() != 2:
        raise ShapeError(f"{name} has shape {tuple(weight.shape)}: expected [rows, columns]")
    if weight.shape[0] == 0:
        raise ShapeError(
            f"{name} has no rows: expected at least one; leave the table out, or pad it"
        )
    columns = int(weight.shape[1])
    if columns % COLUMNS_OF or not 0 < columns <= MOST_COLUMNS:
        raise ShapeError(
            f"{name} has {columns} columns: expected a multiple of {COLUMNS_OF} up to "
            f"{MOST_COLUMNS}; pad the table"
        )
    if str(weight.dtype)[6:] not in DTYPES:
        raise ShapeError(f"{name} is {weight.dtype}: expected one of {', '.join(DTYPES)}")
    if weight.dtype != first.dtype or weight.device != first.device:
        raise ShapeError(
            f"{name} is {weight.dtype} on {weight.device}: expected {first.dtype} on "
            f"{first.device}, as the first table"
        )
    if not weight.is_contiguous() or weight.data_ptr() % kernels.PIECE_ALIGNMENT:
        raise ShapeError(
            f"{name}: expected a contiguous tensor at a multiple of {kernels.PIECE_ALIGNMENT} "
            "bytes; copy it"
        )


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        found = torch.device(device)
        return (
            torch.device("cuda", torch.cuda.current_device())
            if found.type == "cuda" and found.index is None
            else found
        )
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _agree(
    communicator: Communicator, columns: list[int], dtype: torch.dtype | None, is_trained: bool
) -> Layout:
    """Layout on all ranks, by an exchange.

    Raises:
        ConfigurationMismatchError: if ranks have outputs of different dtypes.
        ConfigurationError: if no rank has tables.
    """
    name = None if dtype is None else str(dtype)[6:]
    own = json.dumps([columns, name, is_trained]).encode()
    every = [json.loads(bytes(each)) for each in communicator.all_gather(own)]
    names = {name for _, name, _ in every if name is not None}
    if not any(its for its, _, _ in every):
        raise ConfigurationError("weights are empty on all ranks: expected a table on one at least")
    if len(names) != 1:
        raise ConfigurationMismatchError(
            f"outputs are {', '.join(sorted(names))} on different ranks: expected one dtype; pass "
            "out_dtype="
        )
    trained = any(its for _, _, its in every)
    return Layout(tuple(tuple(its) for its, _, _ in every), DTYPES[names.pop()], trained)
