"""All-reduce with a residual and RMS norm.

RMS norm: Zhang and Sennrich, https://arxiv.org/abs/1910.07467. For example, 64 rows with hidden
size 8192 after a row-parallel linear layer in Llama.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton.language as tl
from triton import cdiv, next_power_of_2

from weft.base.errors import ConfigurationError, ShapeError
from weft.fused import arguments
from weft.fused.kernels.packets import MAX_PROGRAMS
from weft.fused.kernels.rms_norm import (
    MAX_ROWS,
    FlagModes,
    Flags,
    FlagSizes,
    PacketModes,
    Packets,
    PacketSizes,
    Tensors,
    flags_kernel,
    packets_kernel,
)
from weft.fused.spaces import launch, programs_of

if TYPE_CHECKING:
    from weft.group.communicator import Communicator

__all__ = ["RmsNormTiling", "all_reduce_rms_norm", "default_norm_tiling"]

_OPERATOR: Final = "all_reduce_rms_norm"
_KERNEL_DTYPES: Final = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
#: Maximum words in a row: a program keeps them in registers.
_MAX_WORDS: Final = 16384
#: Minimum words in a row part.
_LEAST_BLOCK: Final = 512
#: Bytes that a rank sends while packets are exchanged: 2 us at 360 GB/s.
_EXCHANGE_BYTES: Final = 720_000
#: The same for the extra time that an exchange with flags takes: a release and an acquire.
_FLAG_BYTES: Final = 360_000
_ALGORITHMS: Final = ("one_shot", "two_shot")
_PROTOCOLS: Final = ("packets", "flags")


class RmsNormTiling(NamedTuple):
    """RMS-norm kernel constants.

    Attributes:
        protocol: "packets" (a word and the epoch; twice the bytes) or "flags" (plain stores, and a
            flag for each program's rows).
        block: 32-bit row words in a program, a power of 2: with "flags" at least a whole row, with
            "packets" fewer divide a row among several programs.
        num_warps: warps in a program, a power of 2; at most `block / 32`.
        programs: grid size. With a divided row all are resident together.
    """

    protocol: str
    block: int
    num_warps: int
    programs: int


def default_norm_tiling(
    rows: int, words: int, ranks: int, programs: int, algorithm: str | None = None
) -> tuple[RmsNormTiling, str]:
    """Tiling and algorithm with the least time by a model, which is not measured.

    Args:
        rows: number of rows.
        words: 32-bit words in a row.
        ranks: number of ranks.
        programs: number of SMs.
        algorithm: "one_shot" or "two_shot"; None: either.
    """
    size = rows * words * 4
    one, two = size * (ranks - 1), 2 * size * (ranks - 1) // ranks
    times = {
        ("packets", "one_shot"): 2 * one,
        ("flags", "one_shot"): one + _FLAG_BYTES,
        ("packets", "two_shot"): 2 * two + _EXCHANGE_BYTES,
        ("flags", "two_shot"): two + _EXCHANGE_BYTES + 2 * _FLAG_BYTES,
    }
    wanted = [each for each in times if algorithm in (None, each[1])]
    protocol, chosen = min(wanted, key=lambda each: times[each])
    block = max(128, next_power_of_2(words))
    if protocol == "packets":
        # The smallest parts for which each program has one.
        least = min(block, _LEAST_BLOCK)
        while least < block and rows * cdiv(words, least) > programs:
            least *= 2
        block = least
        count = min(programs, rows * cdiv(words, block))
    else:
        together = 2 if _registers(block, 16, ranks) else 1
        count = min(rows, together * programs)
    return RmsNormTiling(protocol, block, max(4, min(16, block // 256)), max(1, count)), chosen


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    out: torch.Tensor | None = None,
    communicator: Communicator | None = None,
    algorithm: str | None = None,
    tiling: RmsNormTiling | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of x over the ranks, plus a residual; returns the RMS norm, and the sum.

    The sum y is in float32, in rank order, rounded to x's dtype; r = y + residual is rounded again.
    Normed rows are `round(round(r * rsqrt(mean(r * r) + eps)) * norm_weight)`, with the mean and
    both multiplications in float32, as in Llama's RMS norm. All ranks get the same bits.

    Args:
        x: [rows, hidden], contiguous: this rank's partial sums; bfloat16, float16 or float32. 0 to
            1024 rows, meant for up to 512. `hidden` is a multiple of 8 and at most 32768, or 16384
            for float32.
        residual: [rows, hidden], x's dtype, equal on all ranks.
        norm_weight: [hidden], x's dtype, equal on all ranks.
        eps: added to the mean square.
        out: [rows, hidden], x's dtype: the normed rows. It may be x.
        communicator: group to sum over; by default the only one that is open.
        algorithm: "one_shot" (rows to all ranks), "two_shot" (to an owner, which sends the sum to
            all), or None: the faster one by size and ranks.
        tiling: kernel constants, equal on all ranks.

    Returns:
        Normed rows, and the rows before the norm; both [rows, hidden], in x's dtype.

    Raises:
        ShapeError, ConfigurationError: an argument is invalid.
        WaitTimeoutError, GroupPoisonedError: recorded by earlier calls.
    """
    arguments.check_input(_OPERATOR, "x", x, "hidden")
    rows, hidden = x.shape
    words = hidden * x.itemsize // 4
    if words > _MAX_WORDS:
        most = _MAX_WORDS * 4 // x.itemsize
        raise ShapeError(f"{_OPERATOR}: hidden {hidden}: expected at most {most} of {x.dtype}")
    if rows > MAX_ROWS:
        raise ShapeError(f"{_OPERATOR}: {rows} rows: expected at most {MAX_ROWS}")
    arguments.check_tensor(_OPERATOR, "residual", residual, (rows, hidden), x)
    arguments.check_tensor(_OPERATOR, "norm_weight", norm_weight, (hidden,), x)
    output = torch.empty_like(x) if out is None else out
    arguments.check_tensor(_OPERATOR, "out", output, (rows, hidden), x)
    summed = torch.empty_like(x)
    _check_option("algorithm", algorithm, (*_ALGORITHMS, None))
    ranks, multiprocessors = arguments.world_size(communicator), programs_of(x.device)
    default, chosen = default_norm_tiling(rows, words, ranks, multiprocessors, algorithm)
    if tiling is None:
        tiling = default
    else:
        _check_tiling(tiling, words)
        chosen = algorithm or "one_shot"
    if rows:
        tensors = Tensors(*map(_words, (x, residual, norm_weight, output, summed)))
        _launch(tensors, rows, words, eps, communicator, _KERNEL_DTYPES[x.dtype], tiling, chosen)
    return output, summed


def _registers(block: int, num_warps: int, ranks: int) -> int | None:
    """Register limit for a thread with which two programs are resident together, if enough."""
    return 64 if block <= 256 * num_warps and ranks <= 4 else None


def _launch(
    tensors: Tensors,
    rows: int,
    words: int,
    eps: float,
    communicator: Communicator | None,
    dtype: tl.dtype,
    tiling: RmsNormTiling,
    algorithm: str,
) -> None:
    device, block, threads = tensors.x.device, tiling.block, 32 * tiling.num_warps
    programs, two_shot = tiling.programs, algorithm == "two_shot"
    if tiling.protocol == "flags":
        space = arguments.flag_space(f"{_OPERATOR} flags", device, communicator, rows, words)
        inboxes = space.data.view(tensors.x.dtype)
        unit = cdiv(rows, programs)
        launch(
            flags_kernel,
            min(programs, cdiv(rows, unit)),
            device,
            tensors,
            Flags(inboxes, space.words, space.state, space.context),
            FlagSizes(rows, unit, words // 4, inboxes.numel() // 32),
            eps,
            FlagModes(dtype, two_shot, space.ranks, block),
            num_warps=tiling.num_warps,
            maxnreg=_registers(block, tiling.num_warps, space.ranks),
            **space.agreed(
                _arguments(rows, words, eps, dtype, algorithm, f"units of {unit}")
            )._asdict(),
        )
        return
    parts = cdiv(words, block)
    divided = parts > 1
    if divided:
        # Each program waits for squares from others: they are resident together, and run one after
        # another on a CPU.
        programs = 1 if device.type == "cpu" else min(programs, programs_of(device))
    programs = min(programs, rows * parts)
    space = arguments.packet_space(
        _OPERATOR, device, communicator, rows * words, max(MAX_PROGRAMS, rows * parts)
    )
    squares = space.state[MAX_PROGRAMS:].view(torch.int64)
    launch(
        packets_kernel,
        programs,
        device,
        tensors,
        Packets(space.data.view(torch.int64), squares, space.state, space.context),
        PacketSizes(rows, words // 4, arguments.half_by_16(space)),
        eps,
        PacketModes(
            dtype=dtype,
            two_shot=two_shot,
            ranks=space.ranks,
            group=arguments.group_of(block, tiling.num_warps, space.ranks),
            block=block,
            divided=divided,
            single=programs == rows * parts,
            chunk=max(threads, next_power_of_2(parts)),
        ),
        num_warps=tiling.num_warps,
        **space.agreed(
            _arguments(rows, words, eps, dtype, algorithm, f"tiles of {block}")
        )._asdict(),
    )


def _arguments(
    rows: int, words: int, eps: float, dtype: tl.dtype, algorithm: str, parts: str
) -> str:
    hidden = words * 32 // dtype.primitive_bitwidth
    call = f"rows={rows}, hidden={hidden}, dtype={dtype}, eps={eps}, {algorithm}, {parts}"
    return f"weft.fused.{_OPERATOR}({call})"


def _check_option(name: str, value: str | None, options: tuple[str | None, ...]) -> None:
    if value not in options:
        names = " or ".join("None" if each is None else repr(each) for each in options)
        raise ConfigurationError(f"{_OPERATOR}: {name} {value!r}: expected {names}")


def _check_tiling(tiling: RmsNormTiling, words: int) -> None:
    _check_option("tiling.protocol", tiling.protocol, _PROTOCOLS)
    for name in ("block", "num_warps"):
        value = getattr(tiling, name)
        if value < 1 or value & (value - 1):
            raise ConfigurationError(f"{_OPERATOR}: tiling.{name} {value}: expected a power of 2")
    least = 32 * tiling.num_warps
    if tiling.protocol == "flags":
        least = max(least, next_power_of_2(words))
    if tiling.block < least:
        raise ConfigurationError(
            f"{_OPERATOR}: tiling.block {tiling.block}: expected at least {least}"
        )
    if not 1 <= tiling.programs <= MAX_PROGRAMS:
        raise ConfigurationError(
            f"{_OPERATOR}: tiling.programs {tiling.programs}: expected 1 to {MAX_PROGRAMS}"
        )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A 16-bit tensor as int32 words with two elements each."""
    return tensor if tensor.dtype == torch.float32 else tensor.view(torch.int32)
