"""All-reduce GEMV for a few tokens: a row-parallel linear layer at decode.

For example, 4 tokens with hidden size 8192 on 8 ranks, in Megatron's tensor parallelism
(see https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from triton import cdiv, next_power_of_2

from weft.base.errors import ConfigurationError, ShapeError
from weft.fused import arguments
from weft.fused.kernels.gemv import (
    LOCAL,
    ONE_SHOT,
    TWO_SHOT,
    Exchange,
    Modes,
    Operands,
    Sizes,
    Tiles,
    gemv_kernel,
)
from weft.fused.kernels.norm import norm_kernel
from weft.fused.kernels.packets import MAX_PROGRAMS
from weft.fused.spaces import Agreed, launch, programs_of
from weft.fused.tracing import current_trace

if TYPE_CHECKING:
    from weft.group.communicator import Communicator

__all__ = ["GemvTiling", "default_tiling", "gemv", "gemv_all_reduce"]

#: Maximum tokens in a call.
MAX_TOKENS: Final = 32
#: Weight bytes in a load stage; 3 or 4 of a program's 5 stages are in flight.
_STAGE_BYTES: Final = 16384
#: Maximum tokens whose partial sums are sent in float32.
_FLOAT_TOKENS: Final = 4
#: Maximum tokens whose rows the GEMV kernel norms: with more, it takes longer than a separate norm
#: kernel after it.
_NORMED_TOKENS: Final = 8
#: Maximum row length of the standalone RMS-norm kernel.
_MAX_NORM: Final = 32768
#: Maximum packets with squares that a program reads at a time.
_CHUNK: Final = 2048


class GemvTiling(NamedTuple):
    """GEMV kernel constants.

    Attributes:
        block_n: result columns in a tile, a power of 2.
        block_k: inner elements in a step, a power of 2.
        num_warps: warps in a program, a power of 2.
        num_stages: stages in the weight loads.
        programs: grid size; by default one for each SM, and at most one for each tile. All are
            resident together.
        dot: use tensor cores (multiplications for float32); else only one token.
        halves: ranks send partial sums rounded to x's 16-bit dtype, two in a packet; else float32.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 5
    programs: int | None = None
    dot: bool = True
    halves: bool = False


def default_tiling(
    tokens: int, hidden: int, inner: int, dtype: torch.dtype, weight: torch.dtype, programs: int
) -> GemvTiling:
    """Default tiling for a shape.

    Args:
        tokens: number of tokens.
        hidden: result columns.
        inner: this rank's inner size.
        dtype: input dtype.
        weight: weight dtype.
        programs: number of SMs.
    """
    # Fewest columns for the busiest program; among equals, the widest tile.
    sizes = (64, 32, 16)
    block_n = min(sizes, key=lambda size: (cdiv(cdiv(hidden, size), programs) * size, -size))
    dot = dtype != torch.float32 or tokens > 1
    stage = _STAGE_BYTES // 2 if dtype == torch.float32 and dot else _STAGE_BYTES
    step = stage // (block_n * weight.itemsize)
    if dot:
        # Tokens take at most as many bytes of shared memory in a step.
        step = min(step, stage // (max(8, next_power_of_2(tokens)) * dtype.itemsize))
    block_k = max(32, min(step, next_power_of_2(inner)))
    halves = dtype != torch.float32 and tokens > _FLOAT_TOKENS
    return GemvTiling(block_n, block_k, dot=dot, halves=halves)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tiling: GemvTiling | None = None,
) -> torch.Tensor:
    """X W^T for this rank only, with the `gemv_all_reduce` kernel but without communication.

    Used for comparisons. Arguments and errors are the same; the result is rounded to x's dtype.
    """
    call = _Call("gemv", x, weight, weight_scale, tiling)
    output = call.output("out", out)
    call.launch(LOCAL, output)
    return output


def gemv_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    communicator: Communicator | None = None,
    algorithm: str | None = None,
    tiling: GemvTiling | None = None,
    fused: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sum over the ranks of x W^T, optionally with a residual and an RMS norm.

    This is a row-parallel linear layer in tensor parallelism at decode: each rank has part of the
    inner dimension. Multiplications and sums are in float32, and y is rounded once to x's dtype;
    with more than 4 tokens of 16 bits, the ranks' partial sums are rounded too (see
    `GemvTiling.halves`). With `residual`, y + residual is rounded again. With `norm_weight`, each
    resulting row r becomes `round(round(r * rsqrt(mean(r * r) + eps)) * norm_weight)`, with the
    mean and both multiplications in float32, as in Llama's RMS norm. All ranks get the same bits,
    and so does each repetition.

    Args:
        x: [tokens, inner], contiguous, 0 to 32 tokens; bfloat16, float16 or float32. `inner` is a
            multiple of 8.
        weight: [hidden, inner], as in torch.nn.functional.linear, with contiguous rows and a row
            stride that is a multiple of 8 elements; in x's dtype, or float8_e4m3fn. `hidden` is a
            multiple of 8.
        weight_scale: float32, [1] or [hidden]: factor for the weight, or for each weight row.
        residual: [tokens, hidden], x's dtype, equal on all ranks.
        norm_weight: [hidden], x's dtype, equal on all ranks.
        eps: added to the mean square.
        out: [tokens, hidden], x's dtype: the first result.
        communicator: group to sum over; by default the only one that is open.
        algorithm: "one_shot" (partial sums to all ranks), "two_shot" (to an owner, which sends the
            sum to all), or None: the faster one by size.
        tiling: constants of the kernel.
        fused: True: one kernel; False: with `norm_weight` and a hidden size of at most 32768, a
            separate norm kernel with the same sums and roundings. None: the faster one by token
            count; True for CPU tensors.

    Returns:
        [tokens, hidden], x's dtype; with `norm_weight`, normed rows and the rows before the norm.

    Raises:
        ShapeError, ConfigurationError: an argument is invalid.
        WaitTimeoutError, GroupPoisonedError: recorded by earlier calls.
    """
    call = _Call("gemv_all_reduce", x, weight, weight_scale, tiling)
    like = (call.tokens, call.hidden)
    for name, tensor, shape in (
        ("residual", residual, like),
        ("norm_weight", norm_weight, like[1:]),
    ):
        if tensor is not None:
            arguments.check_tensor(call.operator, name, tensor, shape, x)
    output = call.output("out", out)
    summed = None if norm_weight is None else call.output("summed", None)
    two_shot = arguments.is_two_shot(call.operator, algorithm, call.packets, communicator)
    mode = TWO_SHOT if two_shot else ONE_SHOT
    is_fused = call.is_fused(fused, norm_weight is not None)
    if norm_weight is not None and summed is not None and not is_fused:
        call.launch(
            mode, summed, residual=residual, eps=eps, has_norm=True, communicator=communicator
        )
        _norm(summed, norm_weight, eps, output)
        return output, summed
    call.launch(
        mode,
        output,
        summed=summed,
        residual=residual,
        norm_weight=norm_weight,
        eps=eps,
        has_norm=norm_weight is not None,
        communicator=communicator,
    )
    return output if summed is None else (output, summed)


class _Call:
    """A call with checked inputs."""

    def __init__(
        self,
        operator: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        tiling: GemvTiling | None,
    ) -> None:
        self.operator, self.x, self.weight, self.scale = operator, x, weight, scale
        arguments.check_input(operator, "x", x, "inner")
        self.tokens, self.inner = x.shape
        if self.tokens > MAX_TOKENS:
            raise ShapeError(f"{operator}: {self.tokens} tokens: expected at most {MAX_TOKENS}")
        self._check_weight()
        self.hidden = weight.shape[0]
        self._check_scale()
        multiprocessors = programs_of(x.device)
        self.tiling = tiling or default_tiling(
            self.tokens, self.hidden, self.inner, x.dtype, weight.dtype, multiprocessors
        )
        self._check_tiling()
        wanted = multiprocessors if self.tiling.programs is None else self.tiling.programs
        self.tiles = cdiv(self.hidden, self.tiling.block_n)
        self.programs = min(self.tiles, wanted)

    def is_fused(self, fused: bool | None, is_normed: bool) -> bool:
        """True if one kernel does all, by the argument or by token count.

        Raises:
            ConfigurationError: if the call has no norm that a separate kernel can do.
        """
        is_able = is_normed and self.hidden <= _MAX_NORM
        if fused is False and not is_able:
            raise ConfigurationError(
                f"{self.operator}: fused False with hidden {self.hidden}: expected norm_weight and "
                f"hidden of at most {_MAX_NORM}"
            )
        if fused is None:
            on_gpu = self.x.device.type == "cuda"
            fused = not (is_able and on_gpu and self.tokens > _NORMED_TOKENS)
        return fused

    def output(self, name: str, given: torch.Tensor | None) -> torch.Tensor:
        """The given tensor [tokens, hidden], or a new one."""
        if given is None:
            return self.x.new_empty(self.tokens, self.hidden)
        arguments.check_tensor(self.operator, name, given, (self.tokens, self.hidden), self.x)
        return given

    def launch(
        self,
        mode: int,
        output: torch.Tensor,
        *,
        summed: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        has_norm: bool = False,
        communicator: Communicator | None = None,
    ) -> None:
        if not self.tokens:
            return
        x, scale, tiling = self.x, self.scale, self.tiling
        ranks, group, half, programs = 1, 1, 0, self.programs
        # Placeholders that the kernel does not use.
        inboxes = squares = state = context = output
        if mode != LOCAL:
            space = arguments.packet_space(
                self.operator, x.device, communicator, self.packets, MAX_TOKENS * self.tiles
            )
            ranks, half = space.ranks, arguments.half_by_16(space)
            inboxes, context = space.data.view(torch.int64), space.context
            state = space.state
            squares = state[MAX_PROGRAMS:].view(torch.int64)
            block = self._rows * tiling.block_n // (2 if tiling.halves else 1)
            group = arguments.group_of(block, tiling.num_warps, ranks)
        norm = norm_weight is not None
        agreed = Agreed(None, 0)
        if mode != LOCAL:
            agreed = space.agreed(
                f"weft.fused.{self.operator}(tokens={self.tokens}, hidden={self.hidden}, "
                f"dtype={x.dtype}, residual={residual is not None}, "
                f"norm={f'with eps {eps}' if has_norm else None}, "
                + ("one_shot" if mode == ONE_SHOT else f"two_shot in tiles of {tiling.block_n}")
                + (", halves)" if tiling.halves else ")")
            )
        if norm:
            # Each program waits for squares from all: they are resident together, and run one after
            # another on a CPU.
            programs = 1 if x.device.type == "cpu" else min(programs, programs_of(x.device))
        modes = Modes(
            mode=mode,
            ranks=ranks,
            group=group,
            dot=tiling.dot,
            scales=0 if scale is None else 1 if scale.numel() == 1 else 2,
            has_residual=residual is not None,
            has_norm=norm,
            single=programs == self.tiles,
            halves=tiling.halves and mode != LOCAL,
        )
        tiles = Tiles(
            block_t=self._rows,
            block_n=tiling.block_n,
            block_k=tiling.block_k,
            even=self.inner % tiling.block_k == 0,
            chunk=self._chunk,
            stages=tiling.num_stages,
        )
        inputs = (x, self.weight, _or(scale, x), _or(residual, x), _or(norm_weight, x))
        launch(
            gemv_kernel,
            programs,
            x.device,
            Operands(*inputs, output, _or(summed, output)),
            Exchange(inboxes, squares, state, context),
            Sizes(self.tokens, self.hidden // 8, half),
            *(self.inner // 8, self.weight.stride(0) // 8, eps, modes, tiles),
            trace=current_trace(x.device),
            num_warps=tiling.num_warps,
            **agreed._asdict(),
        )

    @property
    def packets(self) -> int:
        """Packets in this rank's part."""
        elements: int = self.tokens * self.hidden
        return elements // 2 if self.tiling.halves else elements

    @property
    def _rows(self) -> int:
        """Tokens in a tile, a power of 2: at least one packet for each thread."""
        packets = self.tiling.block_n // (2 if self.tiling.halves else 1)
        least: int = 32 * self.tiling.num_warps // packets
        tokens: int = 1 << (self.tokens - 1).bit_length()
        return max(8, least, tokens)

    @property
    def _chunk(self) -> int:
        """Tiles whose squares are read at a time: at least one packet for each thread."""
        least = 32 * self.tiling.num_warps // self._rows
        tiles: int = 1 << (self.tiles - 1).bit_length()
        return max(1, least, min(tiles, _CHUNK // self._rows))

    def _check_weight(self) -> None:
        operator, weight, x = self.operator, self.weight, self.x
        if weight.dim() != 2 or weight.shape[1] != self.inner:
            raise ShapeError(
                f"{operator}: weight {list(weight.shape)}: expected [hidden, {self.inner}]"
            )
        hidden = weight.shape[0]
        if hidden % 8 or not hidden:
            raise ShapeError(f"{operator}: hidden {hidden}: expected a multiple of 8")
        if weight.dtype not in (x.dtype, torch.float8_e4m3fn):
            raise ShapeError(
                f"{operator}: weight {weight.dtype}: expected {x.dtype}, as x, or float8_e4m3fn"
            )
        if weight.device != x.device:
            raise ConfigurationError(
                f"{operator}: weight on {weight.device}: expected {x.device}, as x"
            )
        if weight.stride(1) != 1 or weight.stride(0) % 8 or weight.stride(0) < self.inner:
            raise ShapeError(
                f"{operator}: weight with strides {weight.stride()}: expected contiguous rows at a "
                "distance of a multiple of 8 elements"
            )
        if weight.data_ptr() % 16:
            raise ShapeError(f"{operator}: address of weight: expected a multiple of 16 bytes")

    def _check_scale(self) -> None:
        scale = self.scale
        if scale is None:
            return
        if tuple(scale.shape) not in ((1,), (self.hidden,)) or scale.dtype != torch.float32:
            raise ShapeError(
                f"{self.operator}: weight_scale {scale.dtype} {list(scale.shape)}: expected "
                f"float32 [1] or [{self.hidden}]"
            )
        if scale.device != self.x.device or not scale.is_contiguous():
            raise ConfigurationError(
                f"{self.operator}: weight_scale on {scale.device} with strides {scale.stride()}: "
                f"expected a contiguous tensor on {self.x.device}, as x"
            )

    def _check_tiling(self) -> None:
        tiling = self.tiling
        for name in ("block_n", "block_k", "num_warps"):
            least = 1 if name == "num_warps" else 16
            value = getattr(tiling, name)
            if value < least or value & (value - 1):
                raise ConfigurationError(
                    f"{self.operator}: tiling.{name} {value}: expected a power of 2, at least "
                    f"{least}"
                )
        if tiling.num_stages < 1:
            raise ConfigurationError(
                f"{self.operator}: tiling.num_stages {tiling.num_stages}: expected at least 1"
            )
        programs = 1 if tiling.programs is None else tiling.programs
        if not 1 <= programs <= MAX_PROGRAMS:
            raise ConfigurationError(
                f"{self.operator}: tiling.programs {programs}: expected 1 to {MAX_PROGRAMS}"
            )
        if tiling.halves and self.x.dtype == torch.float32:
            raise ConfigurationError(
                f"{self.operator}: tiling.halves True with {self.x.dtype}: expected 16 bits"
            )
        if self.tokens > 1 and not tiling.dot:
            raise ConfigurationError(
                f"{self.operator}: tiling.dot False with {self.tokens} tokens: expected 1 token"
            )


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, output: torch.Tensor) -> None:
    """RMS norm of x's rows, on this GPU."""
    tokens, hidden = x.shape
    block = next_power_of_2(hidden)
    if tokens:
        warps = 8 if block <= 8192 else 16
        values = (x, weight, output, hidden // 8, eps)
        launch(norm_kernel, tokens, x.device, *values, block=block, num_warps=warps)


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> Any:
    """The tensor, or a placeholder that the kernel does not use."""
    return other if tensor is None else tensor
