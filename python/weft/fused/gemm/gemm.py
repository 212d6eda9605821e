"""GEMM with the main loop that the fused operators share; tilings and operands.

For example, `gemm(x, weight)` computes x @ weight.T without communication, to compare with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.base.errors import ConfigurationError, RegionError, ShapeError
from weft.fused.gemm.scales import FLOAT8, checked_scales
from weft.fused.kernels.gemm import stream as gemm_stream
from weft.fused.kernels.gemm.gemm import ARRIVALS, MAX_SLICES, Blocks, multiply
from weft.fused.kernels.gemm.gemm import Scales as KernelScales
from weft.fused.spaces import Space, launch, programs_of, space
from weft.gpu import symmetric
from weft.triton.contexts import context

if TYPE_CHECKING:
    from weft.fused.gemm.scales import Scales
    from weft.group.communicator import Communicator

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
    """GEMM tile sizes and main-loop options, the same on all ranks.

    Attributes:
        rows, columns, inner: elements in a tile and in a main-loop step, powers of two from 16 on.
        group: tile rows in a group; tiles in a group are computed column by column.
        warps: for each program.
        stages: main-loop steps in flight.
        programs: on each SM, all resident at the same time.
        slice_bytes: minimum slice size; a peer is signaled once for each slice.
        senders: SMs that send rows before they compute, for an all-gather or all-to-all before the
            GEMM.
        stream_k: for few rows: the steps in all tiles are divided evenly among programs, tiles span
            the rows from all ranks, and slices are not sent separately. group, slice_bytes,
            senders, bulk_stores and paced_stores have no effect.
        bulk_stores: for an all-to-all after the GEMM, between two ranks. The bulk tensor copy
            engine sends tiles from shared memory while the main loop computes the next tile. It
            needs a tile-sized buffer beside the stages; with 128x256 tiles and 16-bit elements, 3
            stages then fit. Rows and operand and output addresses must be multiples of 16 bytes;
            other calls, and calls with paced stores, ignore this option.
        paced_stores: for GEMMs that send: each tile is kept in local GPU memory, and its 16 parts
            are sent evenly over the next tile's main loop. No effect with fewer than 19 steps in a
            main loop. An all-reduce sends sums this way between two ranks.
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


#: Row limit below which a GEMM is bound by reading the weight.
_FEW_ROWS: Final = 256
#: The same limit with few tiles.
_FEW_ROWS_OF_FEW_TILES: Final = 512
#: Time for one element in a 128x128 tile, relative to a 128x256 tile, in percent.
_SMALL_TILES: Final = 120
#: Shared memory for a program on H100 and H200, excluding what Triton reserves.
_SHARED_BYTES: Final = 226 << 10
#: SM count for default choices: H100 and H200.
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
    """Default tiling for a GEMM of [rows, inner] and [columns, inner].

    Args:
        rows: rows for one destination or source, if rows are divided.
        columns: weight columns.
        inner: inner weight size.
        dtype: both operands' dtype.
        partial_dtype: partial sums on the wire; by default the result's dtype.
        blocks: destinations or sources, each with the same number of rows.
        apart: tiles in one block are computed before the next block, for example for arriving rows.
        fast: `use_fast_accum`, for float8.
    """
    if dtype == torch.float32:
        return Tiling(rows=64, columns=64, inner=16, warps=4, stages=2, programs=2)
    if inner % 8 or columns % 8:
        # Single-element loads take many registers.
        return Tiling(rows=64, columns=64, inner=32, warps=4, stages=2, programs=2)
    if dtype in FLOAT8:
        # As many bytes in a step as with bfloat16, with the same tiles.
        its = default_tiling(
            rows, columns, inner, torch.bfloat16, partial_dtype, blocks=blocks, apart=apart
        )
        if not fast and its.rows * its.columns // its.warps > 64 * 32:
            # Sums over one step take as many registers as sums over all steps.
            its = its._replace(columns=128, warps=8, stages=4, programs=1)
        return its._replace(inner=128)
    few_tiles = not apart and -(-rows * blocks // 128) * -(-columns // 256) <= 80
    if rows * blocks <= (_FEW_ROWS_OF_FEW_TILES if few_tiles else _FEW_ROWS):
        if rows * blocks <= 64:
            return Tiling(rows=64, columns=128, warps=4, stages=6, stream_k=True)
        return Tiling(columns=128, stages=5, stream_k=True)
    # A float32 tile takes twice the shared memory on its way to the peer.
    wide = partial_dtype == torch.float32
    if rows <= 64:
        return Tiling(rows=64, columns=128, warps=4, stages=4, programs=1 if wide else 2)
    if wide:
        return Tiling(columns=128, stages=3)
    # Two programs on an SM: one computes while the other stores a tile.
    small = Tiling(columns=128, warps=4, stages=3, programs=2)
    if inner < 2048 or rows * columns < 33 * 128 * 256:
        return small
    large = Tiling()
    if apart and _time(small, rows, columns) < _time(large, rows, columns):
        return small
    return large


def _time(tiling: Tiling, rows: int, columns: int) -> int:
    """Relative time for the tiles in a row block, by the SMs that they fill."""
    tiles = -(-rows // tiling.rows) * -(-columns // tiling.columns)
    waves = -(-tiles // MULTIPROCESSORS)
    return waves * tiling.columns * (_SMALL_TILES if tiling.columns < 256 else 100)


class Operands(NamedTuple):
    """Checked GEMM operands, and kernel arguments for them."""

    operator: str
    x: torch.Tensor
    weight: torch.Tensor
    rows: int
    columns: int
    inner: int
    transposed: bool
    #: The bulk tensor copy engine loads the operands.
    bulk: bool
    #: Result dtype.
    dtype: torch.dtype
    #: Scales, only for float8.
    scales: Scales | None = None

    @property
    def interpreted(self) -> bool:
        """True for CPU tensors."""
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
        """The given tiling, or `default_tiling` for these rows per destination or source."""
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
                "wait for each other, so 1 for each SM is needed"
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
        """Both operands in kernel form."""
        left = self.rows_of(self.x, tiling)
        if not self.bulk:
            return left, self.weight
        if self.transposed:
            matrix, block = self.weight.t(), [tiling.inner, tiling.columns]
        else:
            matrix, block = self.weight, [tiling.columns, tiling.inner]
        return left, descriptor(matrix, block)

    def rows_of(self, matrix: torch.Tensor, tiling: Tiling) -> Any:
        """A contiguous [rows, inner] in kernel form."""
        if not self.bulk:
            return matrix
        return descriptor(matrix, [tiling.rows, tiling.inner])

    def blocks(self, tiling: Tiling) -> dict[str, Any]:
        """Scales, tile constants and compiler options for a kernel."""
        scales = self.scales
        return {
            "scales": KernelScales() if scales is None else KernelScales(scales.x, scales.weight),
            "blocks": Blocks(
                block_rows=tiling.rows,
                block_columns=tiling.columns,
                block_inner=tiling.inner,
                group=tiling.group,
                transposed=self.transposed,
                bulk=self.bulk,
                scaling=0 if scales is None else scales.scaling,
            ),
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }

    def parts(self, tiling: Tiling, programs: int) -> torch.Tensor:
        """Workspace in which programs keep tile parts."""
        elements = programs * 2 * tiling.rows * tiling.columns
        return torch.empty(elements, dtype=torch.float32, device=self.x.device)

    def programs(self, tiling: Tiling, num_sms: int | None) -> int:
        """Program count for a kernel."""
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
    """Check x, weight and scales.

    Args:
        operator: name.
        x: [rows, inner].
        weight: [columns, inner].
        scale_x: only for float8.
        scale_weight: only for float8.
        out_dtype: result dtype.
        use_fast_accum: only for float8.
        gathered: number of ranks whose rows the GEMM covers.

    Raises:
        ConfigurationError: if the kernels do not support the dtype or device.
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
    """The space that all GEMMs share, since GEMM calls are serialized."""
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
    """Context for an output in symmetric memory; `None` for other memory.

    Raises:
        ConfigurationError: if the memory belongs to another communicator.
    """
    try:
        owner = symmetric.owner(out)
    except RegionError:
        return None
    if not owner.is_of(group):
        raise ConfigurationError(
            "weft.fused: out is in another communicator's symmetric memory: make it with "
            "weft.symmetric_empty(..., communicator=), passing the call's communicator"
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
    """GEMM x @ weight.T with the fused operators' main loop, without communication.

    Args:
        x: [rows, inner], contiguous; float16, bfloat16, float32, float8_e4m3fn or float8_e5m2, on a
            GPU.
        weight: [columns, inner], in x's dtype; it or its transpose is contiguous. With float8
            operands, either float8 dtype, contiguous, and both sizes are multiples of 16.
        scale_x: only for float8: float32 [rows, 1], factors for the result's rows, or one element.
        scale_weight: only for float8: float32 [1, columns], factors for the result's columns, or
            one element.
        out_dtype: only for float8: bfloat16 (default) or float16. The result is scaled in float32.
        use_fast_accum: only for float8, as in `torch._scaled_mm`: the tensor cores sum over the
            whole inner size instead of over 128 elements; these sums have fewer bits than float32.
            Must be equal on all ranks.
        out: [rows, columns], contiguous; by default a new tensor.
        num_sms: SMs to use; by default all.
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
    """Tensor descriptor for a contiguous matrix; a single row may have any stride."""
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], block)


#: Arrival counters by device and stream: all are zero again when a kernel ends.
_COUNTERS: Final[dict[tuple[torch.device, int], torch.Tensor]] = {}
#: By device: counters that captured kernels have not taken yet.
_FREE: Final[dict[torch.device, torch.Tensor]] = {}
_FREE_WORDS: Final = 1 << 19


def _counters(device: torch.device, programs: int) -> torch.Tensor:
    """Counters for the current stream, whose kernels run one after another.

    A captured kernel may run on any stream, and has separate counters.
    """
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            free = _FREE.get(device)
            if free is None or len(free) < programs:
                # Each replay sets them to zero.
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
