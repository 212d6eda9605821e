"""GEMMs whose rows arrive while they compute: after an all-gather or an all-to-all.

A related design is Flux, https://arxiv.org/abs/2406.06858, which also waits tile by tile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch

from weft.base.errors import ShapeError
from weft.fused.gemm import composed
from weft.fused.gemm.choices import choose
from weft.fused.gemm.gemm import gemm_space, operands, output
from weft.fused.kernels.gemm import stream
from weft.fused.kernels.gemm.gemm import MAX_SLICES, Widths
from weft.fused.kernels.gemm.receive import Counts, Modes, Sources, receive_multiply
from weft.fused.kernels.rounds import Peers
from weft.fused.spaces import launch
from weft.fused.tracing import current_trace
from weft.gpu import symmetric

if TYPE_CHECKING:
    from weft.fused.gemm.gemm import Operands, Tiling
    from weft.fused.spaces import Space
    from weft.group.communicator import Communicator

__all__ = ["all_gather_gemm", "all_to_all_gemm"]

#: Bytes that each warp in a sending program keeps in flight.
_BYTES_PER_WARP: Final = 4096
#: The same for few rows, which all programs send.
_BYTES_OF_FEW_ROWS: Final = 1024
#: The same for unaligned rows, whose elements are loaded one by one.
_FEWER: Final = 512


@overload
def all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    return_gathered: Literal[False] = False,
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    out: torch.Tensor | None = None,
    num_sms: int | None = None,
    tiling: Tiling | None = None,
    fused: bool | None = None,
    communicator: Communicator | None = None,
) -> torch.Tensor: ...
@overload
def all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    return_gathered: Literal[True],
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    out: torch.Tensor | None = None,
    num_sms: int | None = None,
    tiling: Tiling | None = None,
    fused: bool | None = None,
    communicator: Communicator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def all_gather_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    return_gathered: bool = False,
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    out: torch.Tensor | None = None,
    num_sms: int | None = None,
    tiling: Tiling | None = None,
    fused: bool | None = None,
    communicator: Communicator | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """GEMM with the rows from all ranks: all_gather(x) @ weight.T.

    Args:
        x: [rows, inner], contiguous, as in `gemm`.
        weight: [columns, inner], as in `gemm`.
        return_gathered: also return the rows from all ranks, which are copied after the GEMM.
        scale_x: only for float8, [ranks * rows, 1], for the rows from all ranks, or one element.
        scale_weight: only for float8, as in `gemm`.
        out_dtype: only for float8, as in `gemm`.
        use_fast_accum: only for float8, as in `gemm`.
        out: [ranks * rows, columns], contiguous; by default a new tensor.
        num_sms: SMs that the kernel uses (default: all); given on all ranks or none.
        tiling: by default `default_tiling` for a rank's rows; equal on all ranks.
        fused: True: Weft's kernel; False: torch's GEMM and Weft's collective. None: the kernel if
            `tiling` or `num_sms` is given, else the one that is expected to be faster, equally on
            all ranks.
        communicator: group to gather from; by default the only one that is open.

    Returns:
        [ranks * rows, columns] in x's dtype or `out_dtype`, block s from rank s's rows; with
        `return_gathered` a tuple with it and [ranks * rows, inner].

    Raises:
        ConfigurationError, ShapeError: if an argument does not fit.
        WaitTimeoutError, PeerLostError: an earlier call failed.
    """
    group = symmetric.only_open() if communicator is None else communicator
    given = operands(
        "all_gather_gemm",
        x,
        weight,
        scale_x,
        scale_weight,
        out_dtype,
        use_fast_accum=use_fast_accum,
        gathered=group.world_size,
    )
    if return_gathered and given.columns == 0:
        raise ShapeError(
            "weft.fused.all_gather_gemm: return_gathered with a weight of 0 columns: no rows are "
            "gathered; at least 1 is needed"
        )
    choice = choose(given, group, fused, tiling, num_sms=num_sms)
    if not choice.fused:
        return _gathered(given, out, group, return_gathered)
    result, its = _receive(given, given.rows, False, out, num_sms, choice.tiling, group)
    if not return_gathered:
        return result
    rows = torch.empty((group.world_size, *x.shape), dtype=x.dtype, device=x.device)
    if its is not None:
        # Peers store to the inbox again once the next call on this stream has begun.
        rows.copy_(_inbox(its, rows.numel(), x.dtype).view(rows.shape))
        rows[group.rank].copy_(x)
    return result, rows.view(-1, given.inner)


def all_to_all_gemm(
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
    fused: bool | None = None,
    communicator: Communicator | None = None,
) -> torch.Tensor:
    """Row block r in x goes to rank r; GEMM with the received rows and weight.T.

    Args:
        x: [rows, inner], contiguous, as in `gemm`. The number of ranks divides rows.
        weight: [columns, inner], as in `gemm`.
        scale_x: only for float8, [rows, 1], for the received rows, or one element.
        scale_weight: only for float8, as in `gemm`.
        out_dtype: only for float8, as in `gemm`.
        use_fast_accum: only for float8, as in `gemm`.
        out: [rows, columns], contiguous; by default a new tensor.
        num_sms: SMs that the kernel uses (default: all); given on all ranks or none.
        tiling: by default `default_tiling` for a row block; equal on all ranks.
        fused: True: Weft's kernel; False: torch's GEMM and Weft's collective. None: the kernel if
            `tiling` or `num_sms` is given, else the one that is expected to be faster, equally on
            all ranks.
        communicator: group to exchange with; by default the only one that is open.

    Returns:
        [rows, columns] in x's dtype or `out_dtype`, block s from rank s's rows.

    Raises:
        ConfigurationError, ShapeError: if an argument does not fit.
        WaitTimeoutError, PeerLostError: an earlier call failed.
    """
    given = operands(
        "all_to_all_gemm",
        x,
        weight,
        scale_x,
        scale_weight,
        out_dtype,
        use_fast_accum=use_fast_accum,
    )
    group = symmetric.only_open() if communicator is None else communicator
    if given.rows % group.world_size:
        raise ShapeError(
            f"weft.fused.all_to_all_gemm: x has {given.rows} rows: a multiple of the number of "
            f"ranks, {group.world_size}, is needed"
        )
    choice = choose(given, group, fused, tiling, num_sms=num_sms)
    if not choice.fused:
        result = output(given, out, given.rows)
        return composed.receive(given, True, result, group)[0] if result.numel() else result
    rows = given.rows // group.world_size
    return _receive(given, rows, True, out, num_sms, choice.tiling, group)[0]


def _gathered(
    given: Operands, out: torch.Tensor | None, group: Communicator, return_gathered: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The composed `all_gather_gemm`."""
    rows = group.world_size * given.rows
    result = output(given, out, rows)
    received = given.x.new_empty(0, given.inner)
    # Without columns, the kernel gathers no rows either.
    if result.numel():
        result, received = composed.receive(given, False, result, group)
    if not return_gathered:
        return result
    gathered = given.x.new_empty(rows, given.inner)
    return result, gathered.copy_(received) if result.numel() else gathered


def _inbox(its: Space, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return its.data[: elements * dtype.itemsize].view(dtype)


def _receive(
    given: Operands,
    rows: int,
    scatter: bool,
    out: torch.Tensor | None,
    num_sms: int | None,
    tiling: Tiling | None,
    group: Communicator,
) -> tuple[torch.Tensor, Space | None]:
    """Launch the kernel for `rows` rows from each pair; result, and space if it was launched."""
    x, ranks = given.x, group.world_size
    sizes = given.tiling(tiling, rows, blocks=ranks, apart=True)
    programs = given.programs(sizes, num_sms)
    result = output(given, out, ranks * rows)
    elements = ranks * rows * given.inner
    if rows == 0 or given.columns == 0:
        return result, None
    its = gemm_space(given, group, max(elements * x.itemsize, 1))
    its.enter()
    left, right = given.matrices(sizes)
    inbox = _inbox(its, elements, x.dtype)
    received = given.rows_of(inbox.view(ranks * rows, given.inner), sizes)
    flight = (_BYTES_OF_FEW_ROWS if sizes.stream_k else _BYTES_PER_WARP) if given.bulk else _FEWER
    agreement, digest = its.agreed(
        f"weft.fused.{given.operator}(rows={given.rows}, inner={given.inner}, dtype={x.dtype}, "
        f"tiling of {sizes.rows} rows, slices of {sizes.slice_bytes} bytes, "
        f"stream_k={sizes.stream_k})"
    )
    groups: dict[str, Any] = {
        "peers": Peers(its.context, its.words, its.state, agreement),
        "sources": Sources(x, inbox),
        "widths": Widths(given.columns, given.inner),
        "modes": Modes(scatter, given.interpreted, sizes.warps * flight // x.itemsize),
        **given.blocks(sizes),
    }
    if sizes.stream_k:
        launch(
            stream.receive_multiply,
            programs,
            x.device,
            *(right, given.weight, received, result, given.parts(sizes, programs)),
            counts=stream.ReceiveCounts(rows, 1 if given.interpreted else programs, digest),
            **groups,
        )
        return result, its
    # Each tile needs one chunk.
    tile_bytes = sizes.rows * max(given.inner, 1) * x.itemsize
    tiles = max(-(-sizes.slice_bytes // tile_bytes), -(-rows // sizes.rows // MAX_SLICES))
    senders = 1 if given.interpreted else min(sizes.senders * sizes.programs, programs)
    launch(
        receive_multiply,
        programs,
        x.device,
        *(left, right, received, result),
        counts=Counts(rows, sizes.rows * tiles, senders, digest),
        trace=current_trace(x.device),
        **groups,
    )
    return result, its
