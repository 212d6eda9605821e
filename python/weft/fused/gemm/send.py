"""GEMMs that send tiles as they are computed: all-to-all, reduce-scatter, all-reduce.

Source: https://arxiv.org/abs/2305.06942.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.base.errors import ConfigurationError, ShapeError
from weft.fused.gemm import composed
from weft.fused.gemm.choices import choose
from weft.fused.gemm.gemm import (
    MULTIPROCESSORS,
    Tiling,
    descriptor,
    gemm_space,
    operands,
    output,
    symmetric_context,
)
from weft.fused.kernels.gemm import stream
from weft.fused.kernels.gemm.gemm import MAX_SLICES, Widths
from weft.fused.kernels.gemm.parts import STEPS
from weft.fused.kernels.gemm.send import (
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Counts,
    Destinations,
    Modes,
    multiply_send,
)
from weft.fused.kernels.rounds import Peers
from weft.fused.spaces import launch
from weft.fused.tracing import current_trace
from weft.gpu import symmetric

if TYPE_CHECKING:
    from weft.fused.gemm.gemm import Operands
    from weft.group.communicator import Communicator

__all__ = ["gemm_all_reduce", "gemm_all_to_all", "gemm_reduce_scatter"]

_ALIGNED: Final = 128
#: Steps in all tiles up to which stores are paced, for each SM if all work: 400 us on an H200.
_FEW_STEPS: Final = 600
#: Address and row alignment for bulk stores, in bytes.
_BULK: Final = 16


def gemm_all_to_all(
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
    """GEMM x @ weight.T whose row block r goes to rank r.

    Args:
        x: [rows, inner], contiguous, as in `gemm`. The number of ranks divides rows.
        weight: [columns, inner], as in `gemm`.
        scale_x: only for float8, as in `gemm`.
        scale_weight: only for float8, as in `gemm`.
        out_dtype: only for float8, as in `gemm`.
        use_fast_accum: only for float8, as in `gemm`.
        out: [rows, columns], contiguous; by default a new tensor. If it comes from
            `weft.symmetric_empty`, at the same place in one allocation on all ranks, peers store
            into it without copies. Symmetric on all ranks or on none.
        num_sms: SMs that the kernel uses (default: all); given on all ranks or none.
        tiling: by default `default_tiling` for a row block; equal on all ranks.
        fused: True: Weft's kernel; False: torch's GEMM and Weft's collective. None: the kernel if
            `tiling` or `num_sms` is given, else the one that is expected to be faster, equally on
            all ranks.
        communicator: group to exchange with; by default the only one that is open.

    Returns:
        [rows, columns] in x's dtype or `out_dtype`: block s is row block `rank` from rank s.

    Raises:
        ConfigurationError, ShapeError: if an argument does not fit.
        WaitTimeoutError, PeerLostError: an earlier call failed.
    """
    given = operands(
        "gemm_all_to_all",
        x,
        weight,
        scale_x,
        scale_weight,
        out_dtype,
        use_fast_accum=use_fast_accum,
    )
    return _send(given, ALL_TO_ALL, out, None, num_sms, tiling, fused, communicator)


def gemm_reduce_scatter(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    out: torch.Tensor | None = None,
    partial_dtype: torch.dtype | None = None,
    num_sms: int | None = None,
    tiling: Tiling | None = None,
    fused: bool | None = None,
    communicator: Communicator | None = None,
) -> torch.Tensor:
    """Sum over ranks of row block `rank` in x @ weight.T.

    The sum is in float32: the local partial sum, unrounded, then the other ranks' partial sums in
    rank order, which are sent in `partial_dtype`. With `stream_k`, and unfused, all are in rank
    order and in `partial_dtype`. The same inputs give the same bits, if fused alike.

    Args:
        x: [rows, inner], contiguous, as in `gemm`. The number of ranks divides rows.
        weight: [columns, inner], as in `gemm`.
        scale_x: only for float8, as in `gemm`.
        scale_weight: only for float8, as in `gemm`.
        out_dtype: only for float8, as in `gemm`.
        use_fast_accum: only for float8, as in `gemm`.
        out: [rows / ranks, columns], contiguous; by default a new tensor.
        partial_dtype: the result's dtype (default) or float32; equal on all ranks.
        num_sms: SMs that the kernel uses (default: all); given on all ranks or none.
        tiling: by default `default_tiling` for a row block; equal on all ranks.
        fused: True: Weft's kernel; False: torch's GEMM and Weft's collective. None: the kernel if
            `tiling`, `num_sms` or a wider `partial_dtype` is given, else the one that is expected
            to be faster, equally on all ranks.
        communicator: group to sum over; by default the only one that is open.

    Returns:
        [rows / ranks, columns] in x's dtype or `out_dtype`.

    Raises:
        ConfigurationError, ShapeError: if an argument does not fit.
        WaitTimeoutError, PeerLostError: an earlier call failed.
    """
    given = operands(
        "gemm_reduce_scatter",
        x,
        weight,
        scale_x,
        scale_weight,
        out_dtype,
        use_fast_accum=use_fast_accum,
    )
    return _send(given, REDUCE_SCATTER, out, partial_dtype, num_sms, tiling, fused, communicator)


def gemm_all_reduce(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale_x: torch.Tensor | None = None,
    scale_weight: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    out: torch.Tensor | None = None,
    partial_dtype: torch.dtype | None = None,
    num_sms: int | None = None,
    tiling: Tiling | None = None,
    fused: bool | None = None,
    communicator: Communicator | None = None,
) -> torch.Tensor:
    """Sum over ranks of x @ weight.T, with the same bits on all ranks.

    Each tile has an owner, which adds it as `gemm_reduce_scatter` does and sends the sum to all
    ranks. Tiles, or rows with `stream_k`, are divided among owners in runs, so any number of rows
    works. Unfused, partial results in x's dtype are added in rank order in float32.

    Args:
        x: [rows, inner], contiguous, as in `gemm`.
        weight: [columns, inner], as in `gemm`.
        scale_x: only for float8, as in `gemm`.
        scale_weight: only for float8, as in `gemm`.
        out_dtype: only for float8, as in `gemm`.
        use_fast_accum: only for float8, as in `gemm`.
        out: [rows, columns], as in `gemm_all_to_all`.
        partial_dtype: the result's dtype (default) or float32; equal on all ranks.
        num_sms: SMs that the kernel uses (default: all); given on all ranks or none.
        tiling: by default `default_tiling`; equal on all ranks.
        fused: True: Weft's kernel; False: torch's GEMM and Weft's collective. None: the kernel if
            `tiling`, `num_sms` or a wider `partial_dtype` is given, else the one that is expected
            to be faster, equally on all ranks.
        communicator: group to sum over; by default the only one that is open.

    Returns:
        [rows, columns] in x's dtype or `out_dtype`.

    Raises:
        ConfigurationError, ShapeError: if an argument does not fit.
        WaitTimeoutError, PeerLostError: an earlier call failed.
    """
    given = operands(
        "gemm_all_reduce",
        x,
        weight,
        scale_x,
        scale_weight,
        out_dtype,
        use_fast_accum=use_fast_accum,
    )
    return _send(given, ALL_REDUCE, out, partial_dtype, num_sms, tiling, fused, communicator)


def _send(
    given: Operands,
    operation: int,
    out: torch.Tensor | None,
    partial_dtype: torch.dtype | None,
    num_sms: int | None,
    tiling: Tiling | None,
    fused: bool | None,
    communicator: Communicator | None,
) -> torch.Tensor:
    """Check the call, and launch the kernel, or compose it."""
    group = symmetric.only_open() if communicator is None else communicator
    ranks, x, columns = group.world_size, given.x, given.columns
    name = f"weft.fused.{given.operator}"
    sent = partial_dtype or given.dtype
    if sent not in (given.dtype, torch.float32):
        raise ConfigurationError(
            f"{name}: partial_dtype is {sent}: {given.dtype} or torch.float32 is needed"
        )
    if operation != ALL_REDUCE and given.rows % ranks:
        raise ShapeError(
            f"{name}: x has {given.rows} rows: a multiple of the number of ranks, {ranks}, is "
            "needed"
        )
    each = given.rows if operation == ALL_REDUCE else given.rows // ranks
    blocks = 1 if operation == ALL_REDUCE else ranks
    wider = None if sent == given.dtype else sent
    choice = choose(given, group, fused, tiling, num_sms=num_sms, partial_dtype=wider)
    sizes = given.tiling(choice.tiling, each, sent, blocks=blocks)
    programs = given.programs(sizes, num_sms)
    if choice.tiling is None and given.scales is None:
        tiles = -(-each // sizes.rows) * blocks * -(-columns // sizes.columns)
        sizes = sending(sizes, operation, tiles, -(-given.inner // sizes.inner), ranks)
    if operation != ALL_TO_ALL or ranks != 2 or sizes.stream_k or _is_paced(given, sizes):
        sizes = sizes._replace(bulk_stores=False)
    if sizes.bulk_stores:
        given.check_bulk_stores(sizes)
    result = output(given, out, each if operation == REDUCE_SCATTER else given.rows)
    if given.rows == 0 or columns == 0:
        return result
    landing_context = None
    if out is not None and operation != REDUCE_SCATTER:
        landing_context = symmetric_context(out, group)
    in_place = landing_context is not None
    if not choice.fused:
        return composed.send(given, operation, result, in_place, group)

    tiles = -(-each // sizes.rows) * -(-columns // sizes.columns)
    if operation == ALL_REDUCE:
        tiles = -(-tiles // ranks)
    block = -(-given.rows // ranks)
    size = sizes.rows * sizes.columns
    partials = ranks * sent.itemsize * (block * columns if sizes.stream_k else tiles * size)
    if operation == ALL_TO_ALL:
        partials = 0
    partials = -(-partials // _ALIGNED) * _ALIGNED
    landing = 0 if in_place or operation == REDUCE_SCATTER else result.nbytes
    its = gemm_space(given, group, max(partials + landing, _ALIGNED))
    its.enter()
    left, right = given.matrices(sizes)
    inbox = its.data[partials : partials + landing].view(given.dtype)
    destinations = Destinations(
        result,
        its.data[:partials].view(sent),
        result if in_place else inbox,
        landing_context if in_place else its.context,
    )
    agreement, digest = its.agreed(
        f"{name}(rows={given.rows}, columns={columns}, dtype={given.dtype}, partial_dtype={sent}, "
        f"tiling of {sizes.rows} x {sizes.columns} in groups of {sizes.group}, slices of "
        f"{sizes.slice_bytes} bytes, stream_k={sizes.stream_k}, out is symmetric: {in_place})"
    )
    peers = Peers(its.context, its.words, its.state, agreement)
    groups: dict[str, Any] = {
        "widths": Widths(columns, given.inner),
        "modes": Modes(operation, in_place, given.interpreted),
        **given.blocks(sizes),
    }
    if sizes.stream_k:
        launch(
            stream.multiply_send,
            programs,
            x.device,
            *(left, right, given.weight, given.parts(sizes, programs), destinations, peers),
            counts=stream.SendCounts(given.rows, block, digest),
            **groups,
        )
        return result
    slice_tiles = max(-(-sizes.slice_bytes // (size * sent.itemsize)), -(-tiles // MAX_SLICES))
    stores: dict[str, Any] = {}
    if sizes.bulk_stores:
        stores = _bulk_stores(given, sizes, result if in_place else inbox, result)
    elif _is_paced(given, sizes):
        staging = torch.empty(programs * size, dtype=sent, device=x.device)
        destinations = destinations._replace(staging=staging)
    launch(
        multiply_send,
        programs,
        x.device,
        *(left, right, destinations, peers),
        counts=Counts(given.rows, tiles, slice_tiles, digest),
        trace=current_trace(x.device),
        **stores,
        **groups,
    )
    return result


def sending(tiling: Tiling, operation: int, tiles: int, steps: int, ranks: int) -> Tiling:
    """Default tiling for a GEMM before a collective, with the choice how tiles are sent.

    Measured on two and four H200 (gpu_stores.jsonl): in short GEMMs all programs send at the same
    time and wait for the link, unless stores are paced (0.78 to 0.95 of the ordinary time). Longer
    ones are limited by power, and programs drift apart: only an all-to-all between two ranks gains,
    with bulk stores (0.89).

    Args:
        tiling: default tiling.
        operation: constant from `weft.fused.kernels.gemm.send`.
        tiles: for all destinations.
        steps: main-loop steps for a tile.
        ranks: number of ranks.
    """
    if tiling != Tiling() or ranks == 1:
        return tiling
    # Default tilings of this size have at least STEPS steps.
    if tiles * steps <= _FEW_STEPS * MULTIPROCESSORS:
        return tiling._replace(paced_stores=True)
    if operation == ALL_TO_ALL and ranks == 2:
        return tiling._replace(stages=3, slice_bytes=64 << 10, bulk_stores=True)
    return tiling


def _is_paced(given: Operands, sizes: Tiling) -> bool:
    """True if stores are paced: a main loop has steps for all parts in a tile."""
    return sizes.paced_stores and -(-given.inner // sizes.inner) >= STEPS


def _bulk_stores(
    given: Operands, sizes: Tiling, landing: torch.Tensor, result: torch.Tensor
) -> dict[str, Any]:
    """Descriptors for bulk stores in a two-rank all-to-all; none if they cannot be made.

    `landing`, symmetric, has room like `result` for what the peer sends.
    """
    aligned = (given.columns * result.itemsize | result.data_ptr()) % _BULK == 0
    if not (given.bulk and aligned):
        return {}
    rank = symmetric.owner(landing).rank
    tile, block = [sizes.rows, sizes.columns], (2, -1, given.columns)
    return {
        "peer_tiles": _peer_descriptor(landing.view(block)[rank], tile),
        "own_tiles": descriptor(result.view(block)[rank], tile),
    }


class _Place(NamedTuple):
    """Descriptor base on a peer's GPU; torch would copy memory that it finds on another GPU."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Address in this process."""
        return self.address


def _peer_descriptor(own: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor for the place in a symmetric matrix at the other of two ranks."""
    its = symmetric.owner(own)
    peer = 1 - its.rank
    shift = its.addresses[peer] - its.addresses[its.rank]
    base: Any = _Place(own.data_ptr() + shift, own.dtype)
    if own.device.type == "cpu":
        # The interpreter needs a tensor.
        base = symmetric.peer(own, peer)
    return TensorDescriptor(base, list(own.shape), [own.shape[1], 1], block)
