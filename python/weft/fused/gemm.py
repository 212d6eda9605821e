"""Product of matrices by the main loop that the fused operators share; tilings, operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.cuda import symmetric
from weft.errors import ConfigurationError, RegionError, ShapeError
from weft.fused.kernels import gemm_stream
from weft.fused.kernels.gemm import ARRIVALS, MAX_SLICES, multiply
from weft.fused.scales import FLOAT8, checked_scales
from weft.fused.spaces import Space, launch, programs_of, space
from weft.triton.contexts import context

if TYPE_CHECKING:
    from weft.communicator import Communicator
    from weft.fused.scales import Scales

__all__ = [
    "MULTIPROCESSORS",
    "Operands",
    "Tiling",
    "default_tiling",
    "descriptor",
    "gemm",
    "gemm_space",
    "output",
    "symmetric_context",
]

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


class Tiling(NamedTuple):
    """Sizes of a product's work. All ranks of a call use the same.

    Attributes:
        rows, columns, inner: elements of a tile and of a step of its main loop, powers of two from
            16 on.
        group: rows of tiles in a group, whose tiles are computed column by column.
        warps: of a program.
        stages: steps of the main loop in flight.
        programs: on each multiprocessor, all resident at the same time.
        slice_bytes: minimum size of a slice, that is, between signals to a peer.
        senders: multiprocessors that send rows before they compute, for an all-gather or all-to-all
            before the product.
        stream_k: for few rows: the steps of all tiles are divided evenly among programs, tiles span
            the rows of all ranks, and slices are not sent apart. group, slice_bytes, senders and
            bulk_stores and paced_stores have no effect.
        bulk_stores: of an all-to-all after the product, between two ranks: tiles are sent from
            shared memory by the bulk tensor copy engine, while the main loop of the next tile runs;
            a buffer of a tile's size beside those of the stages, of which 3 fit then with tiles of
            128x256 of 16 bits. Rows and addresses of operands and outputs are multiples of 16
            bytes; other calls store as without it, and those with paced stores.
        paced_stores: of products that send: each tile is kept in memory of the own GPU, and its 16
            parts are sent evenly over the main loop of the next tile. Of main loops with fewer than
            19 steps without effect; sums of an all-reduce are sent so between two ranks.
    """

    rows: int = 128
    columns: int = 256
    inner: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 4
    programs: int = 1
    slice_bytes: int = 256 << 10
    senders: int = 24
    stream_k: bool = False
    bulk_stores: bool = False
    paced_stores: bool = False


#: Rows of a product whose time is that of reading the weight.
_FEW_ROWS: Final = 256
#: The same if tiles are few.
_FEW_ROWS_OF_FEW_TILES: Final = 512
#: Time of an element of a tile of 128x128 by that of one of 128x256, in percent.
_SMALL_TILES: Final = 120
#: Shared memory of a program of the H100 and H200, without what Triton keeps for itself.
_SHARED_BYTES: Final = 226 << 10
#: For choices: multiprocessors of the H100 and H200.
MULTIPROCESSORS: Final = 132


def default_tiling(
    rows: int,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    partial_dtype: torch.dtype | None = None,
    *,
    blocks: int = 1,
    apart: bool = False,
    fast: bool = False,
) -> Tiling:
    """The tiling of a product of [rows, inner] and [columns, inner].

    Args:
        rows: those of one destination or source, if they are divided.
        columns: of the weight.
        inner: of the weight.
        dtype: of both operands.
        partial_dtype: of partial sums that are sent; by default that of the result.
        blocks: destinations or sources, each with as many rows.
        apart: tiles of one block are computed before those of the next, as of rows that arrive.
        fast: of float8: `use_fast_accum`.
    """
    if dtype == torch.float32:
        return Tiling(rows=64, columns=64, inner=16, warps=4, stages=2, programs=2)
    if inner % 8 or columns % 8:
        # Loads of single elements take many registers.
        return Tiling(rows=64, columns=64, inner=32, warps=4, stages=2, programs=2)
    if dtype in FLOAT8:
        # As many bytes in a step as of bfloat16, with the same tiles.
        its = default_tiling(
            rows, columns, inner, torch.bfloat16, partial_dtype, blocks=blocks, apart=apart
        )
        if not fast and its.rows * its.columns // its.warps > 64 * 32:
            # Sums of a step take as many registers as those of all steps.
            its = its._replace(columns=128, warps=8, stages=4, programs=1)
        return its._replace(inner=128)
    few_tiles = not apart and -(-rows * blocks // 128) * -(-columns // 256) <= 80
    if rows * blocks <= (_FEW_ROWS_OF_FEW_TILES if few_tiles else _FEW_ROWS):
        if rows * blocks <= 64:
            return Tiling(rows=64, columns=128, warps=4, stages=6, stream_k=True)
        return Tiling(columns=128, stages=5, stream_k=True)
    # A tile of float32 takes twice the shared memory on its way to the peer.
    wide = partial_dtype == torch.float32
    if rows <= 64:
        return Tiling(rows=64, columns=128, warps=4, stages=4, programs=1 if wide else 2)
    if wide:
        return Tiling(columns=128, stages=3)
    # Two programs on a multiprocessor: one computes while the other stores its tile.
    small = Tiling(columns=128, warps=4, stages=3, programs=2)
    if inner < 2048 or rows * columns < 33 * 128 * 256:
        return small
    large = Tiling()
    if apart and _time(small, rows, columns) < _time(large, rows, columns):
        return small
    return large


def _time(tiling: Tiling, rows: int, columns: int) -> int:
    """Relative time of the tiles of a block of rows, by the multiprocessors that they fill."""
    tiles = -(-rows // tiling.rows) * -(-columns // tiling.columns)
    waves = -(-tiles // MULTIPROCESSORS)
    return waves * tiling.columns * (_SMALL_TILES if tiling.columns < 256 else 100)


class Operands(NamedTuple):
    """Checked operands of a product, and the arguments of kernels for them."""

    operator: str
    x: torch.Tensor
    weight: torch.Tensor
    rows: int
    columns: int
    inner: int
    transposed: bool
    #: By the bulk tensor copy engine.
    bulk: bool
    #: Of the result.
    dtype: torch.dtype
    #: Of float8.
    scales: Scales | None = None

    @property
    def interpreted(self) -> bool:
        """True for tensors of the CPU."""
        return bool(self.x.device.type == "cpu")

    def tiling(
        self,
        given: Tiling | None,
        rows: int,
        partial_dtype: torch.dtype | None = None,
        *,
        blocks: int = 1,
        apart: bool = False,
    ) -> Tiling:
        """The tiling given, or `default_tiling` for these rows of a destination or source."""
        if given is None:
            return default_tiling(
                rows,
                self.columns,
                self.inner,
                self.x.dtype,
                partial_dtype,
                blocks=blocks,
                apart=apart,
                fast=self.scales is not None and self.scales.fast,
            )
        sizes = given.rows, given.columns, given.inner
        if any(size < 16 or size & (size - 1) for size in sizes):
            raise ConfigurationError(
                f"weft.fused.{self.operator}: tiling of {sizes}: powers of two from 16 on are "
                "needed"
            )
        if self.scales is not None and given.inner < 32:
            raise ConfigurationError(
                f"weft.fused.{self.operator}: tiling of {sizes} for float8: expected inner from 32 "
                "on"
            )
        if min(given.group, given.warps, given.stages, given.programs, given.senders) < 1:
            raise ConfigurationError(
                f"weft.fused.{self.operator}: {given}: group, warps, stages, programs and senders "
                "are at least 1"
            )
        if given.stream_k and given.programs > 1:
            raise ConfigurationError(
                f"weft.fused.{self.operator}: stream_k with {given.programs} programs: all "
                "wait for each other, so 1 for each multiprocessor is needed"
            )
        if given.stream_k and rows * blocks * max(self.columns, self.inner) >= 1 << 31:
            raise ConfigurationError(
                f"weft.fused.{self.operator}: stream_k for {rows * blocks} rows, "
                f"{self.columns} columns, inner {self.inner}: below 2^31 elements are needed"
            )
        return given

    def check_bulk_stores(self, tiling: Tiling) -> None:
        """Refuse bulk stores whose buffer does not fit beside the stages."""
        stages = tiling.stages * (tiling.rows + tiling.columns) * tiling.inner * self.x.itemsize
        used = stages + tiling.rows * tiling.columns * self.dtype.itemsize
        if used > _SHARED_BYTES:
            raise ConfigurationError(
                f"weft.fused.{self.operator}: bulk_stores with {tiling}: {used} bytes of shared "
                f"memory, at most {_SHARED_BYTES} are possible; take fewer stages"
            )

    def matrices(self, tiling: Tiling) -> tuple[Any, Any]:
        """Both operands as kernels take them."""
        left = self.rows_of(self.x, tiling)
        if not self.bulk:
            return left, self.weight
        if self.transposed:
            matrix, block = self.weight.t(), [tiling.inner, tiling.columns]
        else:
            matrix, block = self.weight, [tiling.columns, tiling.inner]
        return left, descriptor(matrix, block)

    def rows_of(self, matrix: torch.Tensor, tiling: Tiling) -> Any:
        """A contiguous [rows, inner] as kernels take it."""
        if not self.bulk:
            return matrix
        return descriptor(matrix, [tiling.rows, tiling.inner])

    def blocks(self, tiling: Tiling) -> dict[str, Any]:
        """Constants of kernels, and scales."""
        return {
            **({} if self.scales is None else self.scales.arguments()),
            "block_rows": tiling.rows,
            "block_columns": tiling.columns,
            "block_inner": tiling.inner,
            "group": tiling.group,
            "transposed": self.transposed,
            "bulk": self.bulk,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }

    def parts(self, tiling: Tiling, programs: int) -> torch.Tensor:
        """Workspace of programs for parts of tiles."""
        elements = programs * 2 * tiling.rows * tiling.columns
        return torch.empty(elements, dtype=torch.float32, device=self.x.device)

    def programs(self, tiling: Tiling, num_sms: int | None) -> int:
        """Number of programs of a kernel."""
        most = programs_of(self.x.device)
        num_sms = most if num_sms is None else num_sms
        if not 1 <= num_sms <= most:
            raise ConfigurationError(
                f"weft.fused.{self.operator}: num_sms is {num_sms}: 1 to {most} are needed"
            )
        programs = num_sms * (1 if self.interpreted else tiling.programs)
        if tiling.stream_k and programs > gemm_stream.MAX_PROGRAMS:
            raise ConfigurationError(
                f"weft.fused.{self.operator}: {programs} programs with stream_k: at most "
                f"{gemm_stream.MAX_PROGRAMS} are possible"
            )
        return programs


def operands(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    use_fast_accum: bool = False,
    gathered: int = 1,
) -> Operands:
    """Check x and weight, and their scales.

    Args:
        operator: name.
        x: [rows, inner].
        weight: [columns, inner].
        scale_x: of float8.
        scale_weight: of float8.
        out_dtype: of the result.
        use_fast_accum: of float8.
        gathered: number of ranks whose rows the product has.

    Raises:
        ConfigurationError: for a dtype or device that the kernels do not support.
        ShapeError: if shapes, dtypes, devices or layouts do not fit.
    """
    name = f"weft.fused.{operator}"
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(
            f"{name}: x is {tuple(x.shape)}, weight is {tuple(weight.shape)}: [rows, inner] and "
            "[columns, inner] are needed"
        )
    is_float8 = x.dtype in FLOAT8 or weight.dtype in FLOAT8
    if (x.dtype != weight.dtype and not is_float8) or x.device != weight.device:
        raise ShapeError(
            f"{name}: x is {x.dtype} on {x.device}, weight is {weight.dtype} on {weight.device}: "
            "equal dtypes and devices are needed"
        )
    if x.dtype not in _DTYPES and not is_float8:
        raise ConfigurationError(
            f"{name}: dtype is {x.dtype}: float16, bfloat16, float32, or float8 with scales is "
            "needed"
        )
    scales = checked_scales(
        name,
        x,
        weight,
        scale_x,
        scale_weight,
        out_dtype,
        rows=x.shape[0] * gathered,
        fast=use_fast_accum,
    )
    dtype = x.dtype if scales is None else out_dtype or torch.bfloat16
    _check_device(name, x, dtype)
    straight = weight.is_contiguous()
    if not x.is_contiguous() or not (straight or weight.t().is_contiguous()):
        raise ShapeError(
            f"{name}: strides of x are {x.stride()}, of weight {weight.stride()}: x and weight, or "
            "x and weight.t(), have to be contiguous"
        )
    (rows, inner), columns = x.shape, weight.shape[0]
    lines = (inner,) if straight else (inner, columns)
    bulk = min(rows, inner, columns) > 0 and all(
        each % 16 == 0
        for each in (
            *(line * x.itemsize for line in lines),
            x.data_ptr(),
            weight.data_ptr(),
        )
    )
    return Operands(operator, x, weight, rows, columns, inner, not straight, bulk, dtype, scales)


def _check_device(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    interpret = bool(triton.knobs.runtime.interpret)
    if x.device.type == "cpu":
        if not interpret:
            raise ConfigurationError(
                f"{name}: x is on the CPU: tensors of a GPU are needed, or TRITON_INTERPRET=1 "
                "before the first import of triton, for tests"
            )
        if dtype == torch.bfloat16:
            raise ConfigurationError(
                f"{name}: Triton's interpreter does not compute bfloat16: float16 or float32 is "
                "needed on the CPU"
            )
    elif x.device.type != "cuda" or interpret:
        raise ConfigurationError(
            f"{name}: x is on {x.device}: tensors of a GPU are needed, without TRITON_INTERPRET"
        )


def output(given: Operands, out: torch.Tensor | None, rows: int) -> torch.Tensor:
    """`out` if it fits, or a new tensor [rows, columns].

    Raises:
        ShapeError: if `out` does not fit.
    """
    shape, dtype = (rows, given.columns), given.dtype
    if out is None:
        return torch.empty(shape, dtype=dtype, device=given.x.device)
    fits = out.shape == shape and out.dtype == dtype and out.device == given.x.device
    if not fits or not out.is_contiguous():
        raise ShapeError(
            f"weft.fused.{given.operator}: out is {tuple(out.shape)} {out.dtype} on {out.device}: "
            f"a contiguous {shape} {dtype} on {given.x.device} is needed"
        )
    return out


def gemm_space(given: Operands, communicator: Communicator | None, data: int) -> Space:
    """The space that all products share: their calls come one after another."""
    group = symmetric.only_open() if communicator is None else communicator
    ranks = group.world_size
    return space(
        "gemm",
        given.x.device,
        group,
        words=ranks * (1 + 2 * MAX_SLICES),
        data=data,
        state=ARRIVALS + (ranks + 1) * MAX_SLICES + gemm_stream.MAX_PROGRAMS,
    )


def symmetric_context(out: torch.Tensor, group: Communicator) -> torch.Tensor | None:
    """Context of an output in symmetric memory; `None` for other memory.

    Raises:
        ConfigurationError: if the memory is of another communicator.
    """
    try:
        owner = symmetric.owner(out)
    except RegionError:
        return None
    if not owner.is_of(group):
        raise ConfigurationError(
            "weft.fused: out is symmetric memory of another communicator: make it with "
            "weft.symmetric_empty(..., communicator=) of the call's one"
        )
    return context(out)


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    out: torch.Tensor | None = None,
    num_sms: int | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Product x @ weight.T by the main loop of the fused operators, without communication.

    Args:
        x: [rows, inner], contiguous; float16, bfloat16, float32, float8_e4m3fn or float8_e5m2, on a
            GPU.
        weight: [columns, inner], of x's dtype; it or its transpose is contiguous. Of float8 either
            dtype, contiguous, and both sizes are multiples of 16.
        scale_x: of float8, float32: [rows, 1], factors of the rows of the product, or of one
            element.
        scale_weight: of float8, float32: [1, columns], factors of the columns of the product, or of
            one element.
        out_dtype: of float8: bfloat16 (default) or float16. The product is scaled in float32.
        use_fast_accum: of float8: sum the whole inner size by the tensor cores, whose sums have
            fewer bits than float32, instead of 128 elements. As of `torch._scaled_mm`. Equal on all
            ranks.
        out: [rows, columns], contiguous; by default a new tensor.
        num_sms: multiprocessors to use; by default all.
        tiling: by default `default_tiling`.

    Returns:
        [rows, columns] in x's dtype or `out_dtype`, accumulated in float32 (float32 without TF32).

    Raises:
        ConfigurationError, ShapeError: if an argument does not fit.
    """
    given = operands(
        "gemm", x, weight, scale_x, scale_weight, out_dtype, use_fast_accum=use_fast_accum
    )
    sizes = given.tiling(tiling, given.rows)
    programs = given.programs(sizes, num_sms)
    result = output(given, out, given.rows)
    if result.numel() == 0:
        return result
    left, right = given.matrices(sizes)
    if sizes.stream_k:
        launch(
            gemm_stream.multiply,
            programs,
            x.device,
            left,
            right,
            result,
            given.parts(sizes, programs),
            _counters(x.device, -(-programs // 32) * 32),
            given.rows,
            given.columns,
            given.inner,
            interpreted=given.interpreted,
            **given.blocks(sizes),
        )
        return result
    lengths = given.rows, given.columns, given.inner
    launch(multiply, programs, x.device, left, right, result, *lengths, **given.blocks(sizes))
    return result


def descriptor(matrix: torch.Tensor, block: list[int]) -> Any:
    """Descriptor of a contiguous matrix; the stride of a single row may be any number."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], block)


#: Counters of arrivals by device and stream: all are zero again at the end of a kernel.
_COUNTERS: Final[dict[tuple[torch.device, int], torch.Tensor]] = {}
#: By device: the counters that captured kernels have not taken yet.
_FREE: Final[dict[torch.device, torch.Tensor]] = {}
_FREE_WORDS: Final = 1 << 19


def _counters(device: torch.device, programs: int) -> torch.Tensor:
    """Counters of the current stream, on which kernels run one after another.

    A captured kernel may run on any stream, and has its own.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            free = _FREE.get(device)
            if free is None or len(free) < programs:
                # Set to zero in each replay.
                return torch.zeros(programs, dtype=torch.int32, device=device)
            _FREE[device] = free[programs:]
            return free[:programs]
        stream = torch.cuda.current_stream(device).cuda_stream
    key = device, stream
    if key not in _COUNTERS:
        size = gemm_stream.MAX_PROGRAMS
        _COUNTERS[key] = torch.zeros(size, dtype=torch.int32, device=device)
        if device.type == "cuda" and device not in _FREE:
            _FREE[device] = torch.zeros(_FREE_WORDS, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()
    return _COUNTERS[key]
