"""Products whose rows arrive while they are computed: after an all-gather or an all-to-all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, overload

import torch

from weft.cuda import symmetric
from weft.errors import ShapeError
from weft.fused import composed
from weft.fused.choices import choose
from weft.fused.gemm import gemm_space, operands, output
from weft.fused.kernels import gemm_stream
from weft.fused.kernels.gemm import MAX_SLICES
from weft.fused.kernels.gemm_receive import receive_multiply
from weft.fused.spaces import launch
from weft.fused.tracing import current_trace

if TYPE_CHECKING:
    from weft.communicator import Communicator
    from weft.fused.gemm import Operands, Tiling
    from weft.fused.spaces import Space

__all__ = ["all_gather_gemm", "all_to_all_gemm"]

#: Bytes that each warp of a sending program has in flight.
_BYTES_PER_WARP: Final = 4096
#: The same for few rows, which all programs send.
_BYTES_OF_FEW_ROWS: Final = 1024
#: The same for rows without alignment, whose elements are loaded one by one.
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
    """Product of the rows of all ranks and weight.T.

    Args:
        x: [rows, inner], contiguous, as of `gemm`.
        weight: [columns, inner], as of `gemm`.
        return_gathered: return the rows of all ranks too, which are copied after the product.
        scale_x: of float8, [ranks * rows, 1], of the rows of all ranks, or of one element.
        scale_weight: of float8, as of `gemm`.
        out_dtype: of float8, as of `gemm`.
        use_fast_accum: of float8, as of `gemm`.
        out: [ranks * rows, columns], contiguous; by default a new tensor.
        num_sms: multiprocessors that the kernel uses (default: all); given on all ranks or none.
        tiling: by default `default_tiling` for the rows of a rank; equal on all ranks.
        fused: True: by the kernel; False: by torch's product and Weft's collective. None: by the
            kernel if `tiling` or `num_sms` is given, else the one that is expected to be faster,
            equally on all ranks.
        communicator: that of the ranks; by default the only one that is open.

    Returns:
        [ranks * rows, columns] in x's dtype or `out_dtype`, block s of the rows of rank s; with
        `return_gathered` a tuple of it and [ranks * rows, inner].

    Raises:
        ConfigurationError, ShapeError: if an argument does not fit.
        WaitTimeoutError, PeerLostError: of earlier calls.
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
    """Row block r of x goes to rank r; product of the received rows and weight.T.

    Args:
        x: [rows, inner], contiguous, as of `gemm`. The number of ranks divides rows.
        weight: [columns, inner], as of `gemm`.
        scale_x: of float8, [rows, 1], of the received rows, or of one element.
        scale_weight: of float8, as of `gemm`.
        out_dtype: of float8, as of `gemm`.
        use_fast_accum: of float8, as of `gemm`.
        out: [rows, columns], contiguous; by default a new tensor.
        num_sms: multiprocessors that the kernel uses (default: all); given on all ranks or none.
        tiling: by default `default_tiling` for a row block; equal on all ranks.
        fused: True: by the kernel; False: by torch's product and Weft's collective. None: by the
            kernel if `tiling` or `num_sms` is given, else the one that is expected to be faster,
            equally on all ranks.
        communicator: that of the ranks; by default the only one that is open.

    Returns:
        [rows, columns] in x's dtype or `out_dtype`, block s of the rows of rank s.

    Raises:
        ConfigurationError, ShapeError: if an argument does not fit.
        WaitTimeoutError, PeerLostError: of earlier calls.
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
    """Launch the kernel for `rows` rows of each pair; result, and space if it was launched."""
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
    lengths = rows, given.columns, given.inner
    flight = (_BYTES_OF_FEW_ROWS if sizes.stream_k else _BYTES_PER_WARP) if given.bulk else _FEWER
    constants = {
        "scatter": scatter,
        "interpreted": given.interpreted,
        "send_block": sizes.warps * flight // x.itemsize,
        **given.blocks(sizes),
    }
    if sizes.stream_k:
        launch(
            gemm_stream.receive_multiply,
            programs,
            x.device,
            right,
            given.weight,
            received,
            result,
            its.context,
            its.words,
            its.state,
            given.parts(sizes, programs),
            x,
            inbox,
            *lengths,
            1 if given.interpreted else programs,
            **constants,
        )
        return result, its
    # Each tile needs one chunk.
    tile_bytes = sizes.rows * max(given.inner, 1) * x.itemsize
    tiles = max(-(-sizes.slice_bytes // tile_bytes), -(-rows // sizes.rows // MAX_SLICES))
    launch(
        receive_multiply,
        programs,
        x.device,
        left,
        right,
        received,
        result,
        its.context,
        its.words,
        its.state,
        x,
        inbox,
        *lengths,
        sizes.rows * tiles,
        1 if given.interpreted else min(sizes.senders * sizes.programs, programs),
        trace=current_trace(x.device),
        **constants,
    )
    return result, its
