"""Tables of embedding bags on all ranks, the format of their bags, and sizes of tasks."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton.language as tl

from weft.errors import ConfigurationError, ConfigurationMismatchError, ShapeError
from weft.fused.kernels import embedding as kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.communicator import Communicator

__all__ = ["Layout", "Tables", "Tiling", "concatenate_bags", "default_tiling", "local_batch"]

#: Dtypes of tables by name.
DTYPES: Final = {str(each)[6:]: each for each in (torch.float32, torch.float16, torch.bfloat16)}
#: Dtypes of tables in kernels.
ELEMENTS: Final = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
#: Modes of pooling by name.
MODES: Final = {
    "sum": kernels.SUM,
    "mean": kernels.MEAN,
    "weighted_sum": kernels.WEIGHTED_SUM,
}
#: Greatest number of columns of a table, and the number of which it is a multiple.
MOST_COLUMNS: Final = 1024
COLUMNS_OF: Final = 4
#: Threads of a warp, and registers of a multiprocessor.
_WARP: Final = 32
_REGISTERS: Final = 65536
#: Bytes of the widest load of a thread.
_VECTOR: Final = 16
#: Most lists of addresses that are kept.
_MOST_PIECES: Final = 64
#: Most columns of a task by default.
_TASK_COLUMNS: Final = 256
#: Most bags of a task for each warp: Triton 3.6 does not compile greater blocks of int32.
_BAGS: Final = 16
#: Length of bags from which pooling takes longer than the exchange: the ratio of the rates of
#: memory and NVLink of an H200 with random rows.
_SHORT: Final = 11
#: Loads of rows that a thread has on their way by default.
_LOADS: Final = 8


class Tiling(NamedTuple):
    """Sizes of the tasks of pooling.

    Attributes:
        bags: bags of a task, a power of 2, at most 16 for each warp.
        columns: columns of a task, a power of 2; a wider table is pooled in several tasks.
        unroll: positions of a bag whose rows are loaded at a time.
        num_warps: warps of a program.
        programs: programs for each multiprocessor; bounds the registers of a thread.
        own_last: eighths of the tasks of this rank's own samples that come after all tasks for
            peers; the others are between these. 8 is best where pooling takes longer than the
            exchange, 1 where the exchange does. -1 puts them before all others, to compare with.
        gradient_rows, gradient_columns: of a task that returns gradients, powers of 2.
        chunk: sorted indices of a task that sums gradients, a multiple of 4.
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
        """Most registers of a thread, so that all programs of a multiprocessor are resident."""
        return min(255, _REGISTERS // (self.programs * self.num_warps * _WARP) // 8 * 8)


def default_tiling(columns: int, itemsize: int, average: float) -> Tiling:
    """The tiling that keeps 8 loads of 16 bytes of a thread on their way, fewer for narrow tables.

    Args:
        columns: of the tables of the rank, their geometric mean.
        itemsize: bytes of an element.
        average: number of indices of a bag; short bags are pooled many at a time.
    """
    wide = min(_TASK_COLUMNS, 1 << max(columns - 1, 15).bit_length())
    lanes = max(1, 4 * _WARP * _VECTOR // itemsize // wide)
    unroll = min(_LOADS, 1 << max(0, math.ceil(average) - 1).bit_length())
    bags = min(4 * _BAGS, lanes * _LOADS // unroll)
    loads = bags // lanes * unroll
    # Blocks of many bags need more registers for their sums; with few loads, more programs help.
    programs = 6 if loads <= 2 else 4 if loads < _LOADS or unroll > 2 else 3
    own_last = 1 if average < _SHORT else 8
    return Tiling(bags, wide, unroll, programs=programs, own_last=own_last)


class Layout(NamedTuple):
    """Tables of all ranks, the same on all.

    Attributes:
        columns: of each table, by rank.
        dtype: of the outputs.
        is_trained: tables of any rank have gradients.
    """

    columns: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_trained: bool

    @property
    def all_columns(self) -> list[int]:
        """Columns of each table, in the order of the outputs."""
        return [each for rank in self.columns for each in rank]

    @property
    def firsts(self) -> list[int]:
        """First column of each rank in the outputs, and the number of columns."""
        sums = [0]
        for rank in self.columns:
            sums.append(sums[-1] + sum(rank))
        return sums

    @property
    def width(self) -> int:
        """Columns of the outputs."""
        return self.firsts[-1]

    @property
    def align(self) -> int:
        """Greatest power of 2 up to 16 of which all columns are multiples."""
        return math.gcd(16, *self.all_columns)


class Tables:
    """This rank's tables, checked, and the layout of all ranks.

    Args:
        weights: `[rows, columns]` each.
        modes: one for all, or one of each.
        communicator: that of the ranks; all of them make an object together.
        dtype: of the outputs; by default that of the tables.
        device: of a rank without tables; by default the current GPU.
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
        #: Geometric mean of the columns of tables.
        self.mean_columns = round(2 ** (sum(logarithms) / len(logarithms)))
        self.is_weighted = kernels.WEIGHTED_SUM in self.modes
        self._first = self.layout.firsts[communicator.rank]
        self._pieces: dict[tuple[object, ...], torch.Tensor] = {}
        #: Those that captured kernels read.
        self._captured: dict[tuple[object, ...], torch.Tensor] = {}
        self._gradients: torch.Tensor | None = None
        self._limits: torch.Tensor | None = None

    def check(self, weights: Sequence[torch.Tensor]) -> None:
        """Raise unless tensors are of these tables' shapes, dtype and device."""
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
        """Pieces of at most `columns` columns, as the kernel reads them; kept by address.

        Raises:
            ConfigurationError: if they have to be made while a CUDA graph is captured.
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
        """Tables as the kernels of gradients read them."""
        if self._gradients is None:
            rows, own = [], 0
            for number, (_, columns) in enumerate(self.shapes):
                rows.append((firsts[number], columns, own, self.modes[number], bases[number]))
                own += columns
            self._gradients = torch.tensor(rows, dtype=torch.int64).to(self.device)
        return self._gradients

    def limits(self, bases: list[int]) -> torch.Tensor:
        """First row of each table, numbered through all tables, and the number of rows; int64."""
        if self._limits is None:
            self._limits = torch.tensor(bases, dtype=torch.int64).to(self.device)
        return self._limits


def local_batch(batch: int, rank: int, ranks: int) -> tuple[int, int]:
    """First sample and number of samples of a rank, as `torch.tensor_split`."""
    extra = batch % ranks
    return rank * (batch // ranks) + min(rank, extra), batch // ranks + (rank < extra)


def concatenate_bags(
    indices: Sequence[torch.Tensor],
    offsets: Sequence[torch.Tensor | None],
    per_sample_weights: Sequence[torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Bags of several tables in one tensor each, from lists as `embedding_bag` takes them.

    Args:
        indices: of each table, `[count]`; or `[batch, length]` with `None` for its offsets.
        offsets: of each table, `[batch]`: the first index of each bag.
        per_sample_weights: of each table, as its indices; `None` for tables without weights.

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
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ShapeError(f"{name} has shape {tuple(weight.shape)}: expected [rows, columns]")
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
    """The layout of all ranks, exchanged.

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
