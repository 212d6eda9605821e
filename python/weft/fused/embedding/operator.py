"""Embedding bags with all-to-all as a torch operator, `weft_fused::embedding_all_to_all`.

Each rank has tables; it pools bags for the global batch, and gets its samples' rows from all ranks.
Where the kernel does not apply on a rank, all ranks run `torch.nn.functional.embedding_bag` and the
process group's all-to-all. The gradient is an all-to-all back, and the gradient of `embedding_bag`.
`site` names a place in a compiled graph, as in `weft.fused.operators`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d
from torch.nn.functional import embedding_bag

from weft.base.errors import ShapeError
from weft.fused import counts
from weft.fused.embedding.module import embedding_all_to_all
from weft.fused.embedding.tables import local_batch
from weft.fused.groups import group_of
from weft.fused.operators import DTYPES, SITE_TIMEOUT, interprets

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EMBEDDING"]

_NAME: Final = "embedding_all_to_all"
_LIBRARY: Final = torch.library.Library("weft_fused", "FRAGMENT")
_MODES: Final = {"sum": "sum", "mean": "mean", "weighted_sum": "sum"}


def _call(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    modes: Sequence[str],
    columns: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    group_name: str,
    site: str = "",
) -> torch.Tensor:
    rank = _check(weights, modes, columns, offsets, batch, group_name)
    tables = [each.detach() for each in weights]
    reason = group_of(group_name).runs(site, SITE_TIMEOUT[0]) if site else None
    if reason is None:
        reason = _refusal(tables, columns, indices, dtype, group_name, site)
    if reason is None:
        counts.add("fused_calls", _NAME)
        bags = (indices, offsets, factors) if tables else (None, None, None)
        with torch.no_grad():
            return embedding_all_to_all(
                tables,
                *bags,
                modes=list(modes),
                batch=batch,
                communicator=group_of(group_name).communicator,
                out_dtype=dtype,
                device=indices.device,
                name=f"{list(columns)} {site}",
            )
    counts.add("unfused_calls", _NAME, reason)
    pooled = _pooled(tables, indices, offsets, factors, modes, batch).to(dtype)
    rows = _rows(batch, len(columns))
    sent = [each * columns[rank] for each in rows]
    taken = [rows[rank] * each for each in columns]
    found = _exchanged(pooled.reshape(-1), taken, sent, group_name)
    parts = found.split(taken)
    shaped = [part.view(rows[rank], width) for part, width in zip(parts, columns, strict=True)]
    return torch.cat(shaped, dim=1)


def _backward(
    grad: torch.Tensor,
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    modes: Sequence[str],
    columns: Sequence[int],
    batch: int,
    group_name: str,
) -> list[torch.Tensor]:
    """Table gradients, dense; sums are in float32."""
    rank = group_of(group_name).rank
    rows = _rows(batch, len(columns))
    parts = [part.reshape(-1) for part in grad.split(list(columns), dim=1)]
    sent = [rows[rank] * each for each in columns]
    taken = [each * columns[rank] for each in rows]
    whole = _exchanged(torch.cat(parts), taken, sent, group_name).view(batch, columns[rank])
    found, first = [], 0
    for place, (weight, mode) in enumerate(zip(weights, modes, strict=True)):
        own, its, scales = _bags(indices, offsets, factors, place, batch)
        # Indices outside the table add zero to the bags.
        is_valid = (own >= 0) & (own < weight.shape[0])
        own = torch.where(is_valid, own, 0)
        lengths = its.diff()
        bags = torch.repeat_interleave(torch.arange(batch, device=own.device), lengths)
        terms = whole[:, first : first + weight.shape[1]].float()[bags] * is_valid[:, None]
        if mode == "weighted_sum" and scales is not None:
            terms = terms * scales.float()[:, None]
        if mode == "mean":
            terms = terms / lengths[bags][:, None]
        sums = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        found.append(sums.index_add_(0, own, terms).to(weight.dtype))
        first += weight.shape[1]
    return found


def _pooled(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    modes: Sequence[str],
    batch: int,
) -> torch.Tensor:
    """Global-batch rows for this rank's tables, [batch, columns], by torch."""
    if not weights:
        return indices.new_zeros((batch, 0), dtype=torch.float32)
    every = []
    for place, (weight, mode) in enumerate(zip(weights, modes, strict=True)):
        own, its, scales = _bags(indices, offsets, factors, place, batch)
        scales = None if mode != "weighted_sum" or scales is None else scales.to(weight.dtype)
        every.append(
            embedding_bag(
                own,
                weight,
                its,
                mode=_MODES[mode],
                per_sample_weights=scales,
                include_last_offset=True,
            )
        )
    return torch.cat(every, dim=1)


def _bags(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    place: int,
    batch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Indices, offsets [batch + 1] from zero, and factors for a table."""
    its = offsets[place * batch : (place + 1) * batch + 1].long()
    first, last = int(its[0]), int(its[-1])
    scales = None if factors is None else factors[first:last]
    return indices[first:last].long(), its - first, scales


def _exchanged(
    tensor: torch.Tensor, taken: list[int], sent: list[int], group_name: str
) -> torch.Tensor:
    call = torch.ops._c10d_functional.all_to_all_single
    found: torch.Tensor = torch.ops._c10d_functional.wait_tensor(
        call(tensor.contiguous(), taken, sent, group_name)
    )
    return found


def _rows(batch: int, ranks: int) -> list[int]:
    """Row count for each rank."""
    return [local_batch(batch, rank, ranks)[1] for rank in range(ranks)]


def _check(
    weights: Sequence[torch.Tensor],
    modes: Sequence[str],
    columns: Sequence[int],
    offsets: torch.Tensor,
    batch: int,
    group_name: str,
) -> int:
    """Checks arguments, and returns this rank.

    Raises:
        ShapeError: if arguments do not fit each other.
    """
    group: Any = c10d._resolve_process_group(group_name)
    rank, ranks = group.rank(), group.size()
    if len(columns) != ranks or columns[rank] != sum(each.shape[1] for each in weights):
        raise ShapeError(
            f"columns is {list(columns)}: expected each rank's sum of table columns for {ranks} "
            f"ranks; rank {rank} has tables of {[each.shape[1] for each in weights]}"
        )
    if len(modes) != len(weights) or not set(modes) <= set(_MODES):
        raise ShapeError(
            f"modes is {list(modes)}: expected one of {', '.join(_MODES)} for each of "
            f"{len(weights)} tables"
        )
    if weights and offsets.shape[0] != len(weights) * batch + 1:
        raise ShapeError(
            f"offsets has {offsets.shape[0]} elements: expected {len(weights)} tables * batch "
            f"{batch} + 1"
        )
    return int(rank)


def _refusal(
    weights: Sequence[torch.Tensor],
    columns: Sequence[int],
    indices: torch.Tensor,
    dtype: torch.dtype,
    group_name: str,
    site: str,
) -> str | None:
    """Reason why the kernel does not apply on a rank; ranks exchange reasons once for each key.

    The key is equal on all ranks: the place in a compiled graph, each rank's columns, and the
    result dtype.
    """
    group = group_of(group_name)
    key = (site, dtype, *columns)
    if key not in group.refusals:
        own = _own_refusal(weights, indices, dtype, group.is_on_one_host)
        every: list[Any] = [None] * group.ranks
        resolved: Any = c10d._resolve_process_group(group_name)
        distributed.all_gather_object(every, own, group=resolved)
        group.refusals[key] = next((reason for reason in every if reason), None)
    return group.refusals[key]


def _own_refusal(
    weights: Sequence[torch.Tensor], indices: torch.Tensor, dtype: torch.dtype, is_on_one_host: bool
) -> str | None:
    if indices.device.type == "cpu" and not interprets():
        return "CPU tensors without TRITON_INTERPRET=1"
    if not is_on_one_host:
        return "ranks on several hosts"
    dtypes = {each.dtype for each in weights}
    if not dtypes <= set(DTYPES) or len(dtypes) > 1 or dtype not in DTYPES:
        return f"dtypes {', '.join(sorted(map(str, dtypes | {dtype})))}"
    widths = [each.shape[1] for each in weights]
    if any(width % 4 or not 0 < width <= 1024 for width in widths):
        return f"tables of {widths} columns"
    if not all(each.is_contiguous() and each.shape[0] for each in weights):
        return "strides of a table"
    if any(each.data_ptr() % 16 for each in weights):
        return "address of a table"
    return None


def _fake(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    offsets: torch.Tensor,
    factors: torch.Tensor | None,
    modes: Sequence[str],
    columns: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    group_name: str,
    site: str = "",
) -> torch.Tensor:
    rank = _check(weights, modes, columns, offsets, batch, group_name)
    return indices.new_empty((_rows(batch, len(columns))[rank], sum(columns)), dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    weights, indices, offsets, factors, modes, columns, batch, _, group_name, *_ = inputs
    ctx.count = len(weights)
    ctx.save_for_backward(*weights, indices, offsets, factors)
    ctx.rest = (modes, columns, batch, group_name)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    *weights, indices, offsets, factors = ctx.saved_tensors
    found = torch.ops.weft_fused.embedding_all_to_all_backward(
        grad, weights, indices, offsets, factors, *ctx.rest
    )
    # One for each call argument; arguments at their defaults are none.
    return found, *[None] * (len(ctx.needs_input_grad) - 1)


def _define() -> Any:
    bags = "Tensor[] weights, Tensor indices, Tensor offsets, Tensor? per_sample_weights"
    sizes = "str[] modes, int[] columns, int batch"
    result = 'ScalarType dtype, str group_name, str site=""'
    backward = f"{_NAME}_backward"
    tags = (torch.Tag.pt2_compliant_tag,)
    for name, schema, call in (
        (_NAME, f"({bags}, {sizes}, {result}) -> Tensor", _call),
        (backward, f"(Tensor grad, {bags}, {sizes}, str group_name) -> Tensor[]", _backward),
    ):
        _LIBRARY.define(f"{name}{schema}", tags=tags)
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, call, device)
    torch.library.register_fake(f"weft_fused::{_NAME}", _fake, lib=_LIBRARY)
    torch.library.register_fake(
        f"weft_fused::{backward}",
        lambda grad, weights, *_: [torch.empty_like(each) for each in weights],
        lib=_LIBRARY,
    )
    torch.library.register_autograd(
        f"weft_fused::{_NAME}", _gradients, setup_context=_keep, lib=_LIBRARY
    )
    return torch.ops.weft_fused.embedding_all_to_all.default


#: The operator.
EMBEDDING: Final = _define()
