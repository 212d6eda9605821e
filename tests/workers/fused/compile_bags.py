"""Embedding bags before an all-to-all, compiled with the `weft.fused` pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed, nn
from torch.nn.functional import embedding_bag

import weft.fused
from tests.workers.fused.compile_common import compiled, counted, recorded, renew
from weft.fused import operators

BATCH, ROWS = 6, 20


def bags(rank: int, group: str) -> dict[str, Any]:
    """A ranking model with tables on each rank, several exchange forms, and training."""
    return {
        "model": model(rank, group),
        "loaded": loaded(rank, group),
        "forms": forms(group),
        "training": training(group),
    }


def model(rank: int, group: str) -> list[Any]:
    """A torch-only model with fixed and with changing index counts."""
    torch.manual_seed(9 + rank)
    ranking = Ranking(rank, group).eval()
    close, found = [], []
    weft.fused.enable(timeout=20)
    with torch.no_grad():
        for dynamic in (False, True):
            weft.fused.reset_report()
            run = compiled(ranking)
            for number in range(1 + dynamic):
                given = inputs(rank, number, dynamic)
                close.append(torch.allclose(run(*given), ranking(*given), atol=1e-4))
            found.append(counted())
    weft.fused.disable()
    return [close, *found]


def loaded(rank: int, group: str) -> list[Any]:
    """The model from rank 0's graph cache, compiled without the pass on rank 1."""
    torch.manual_seed(9 + rank)
    ranking = Ranking(rank, group).eval()
    given = inputs(rank, 0, dynamic=False)
    renew(group)
    weft.fused.enable()
    if rank == 1:
        weft.fused.disable()
    before, operators.SITE_TIMEOUT[0] = operators.SITE_TIMEOUT[0], 1.0
    weft.fused.reset_report()
    with torch.no_grad():
        close = torch.allclose(compiled(ranking)(*given), ranking(*given), atol=1e-4)
    operators.SITE_TIMEOUT[0] = before
    weft.fused.disable()
    renew(group)
    return [close, counted()]


def inputs(rank: int, number: int, dynamic: bool) -> tuple[torch.Tensor, list[Any]]:
    """Dense features for this rank's samples, and its tables' indices, offsets and factors."""
    source = torch.Generator(torch.get_default_device()).manual_seed(10 * rank + number)
    made = []
    for dtype, has_end, is_weighted in TABLES[rank % 2]:
        lengths = torch.randint(0, 4, (BATCH,), generator=source)
        # Empty bags among them, and at the ends.
        lengths[rank], lengths[2] = 0, 3 + number
        ends = lengths.cumsum(0)
        offsets = torch.cat((ends.new_zeros(1), ends)).to(dtype)
        count = int(ends[-1])
        indices = torch.randint(0, ROWS, (count,), generator=source).to(dtype)
        factors = torch.rand(count, generator=source) if is_weighted else None
        if dynamic:
            torch._dynamo.mark_dynamic(indices, 0)
            if factors is not None:
                torch._dynamo.mark_dynamic(factors, 0)
        made.append((indices, offsets if has_end else offsets[:-1], factors))
    dense = torch.randn(BATCH // distributed.get_world_size(), 4, generator=source)
    return dense, made


#: For each table on even and on odd ranks: index dtype, last offset is included, is weighted.
TABLES = (
    ((torch.int32, False, True), (torch.int64, True, False)),
    ((torch.int64, True, True),),
)


class Ranking(nn.Module):  # type: ignore[misc]
    """DLRM: tables on all ranks, a network for dense features, and all pairwise dot products."""

    def __init__(self, rank: int, group: str) -> None:
        super().__init__()
        self.group = group
        modes = (("sum", "mean"), ("sum",))[rank % 2]
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, 16 // len(modes), mode=mode, include_last_offset=has_end)
            for mode, (_, has_end, _) in zip(modes, TABLES[rank % 2], strict=True)
        )
        self.bottom, self.top = nn.Linear(4, 8), nn.Linear(18, 1)

    def forward(self, dense: torch.Tensor, given: list[Any]) -> torch.Tensor:
        rows = [table(*own) for table, own in zip(self.tables, given, strict=True)]
        received = functional.all_to_all_single(torch.cat(rows, 1), None, None, self.group)
        local = dense.shape[0]
        tables = received.view(-1, local, 16).transpose(0, 1).reshape(local, -1, 8)
        states = self.bottom(dense).relu()
        features = torch.cat((states[:, None], tables), 1)
        products = (features @ features.transpose(1, 2)).flatten(1)[:, :10]
        return self.top(torch.cat((states, products), 1))


def forms(group: str) -> dict[str, Any]:
    """All functions in `FORMS` in one graph."""
    rows = torch.arange(BATCH)
    # Separate tables for each, as equal bags become one.
    tables = [torch.randn(2, ROWS, 8) for _ in FORMS]

    def every(tables: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            function(rows, own[0], own[1], group)
            for function, own in zip(FORMS.values(), tables, strict=True)
        ]

    weft.fused.enable(timeout=20)
    weft.fused.reset_report()
    with recorded() as messages, torch.no_grad():
        found = compiled(every)(tables)
    weft.fused.disable()
    with torch.no_grad():
        expected = every(tables)
    close = {
        name: own.shape == its.shape and torch.allclose(own, its, atol=1e-4)
        for name, own, its in zip(FORMS, found, expected, strict=True)
    }
    return {"close": close, "lines": len(messages), **counted()}


def training(group: str) -> list[Any]:
    """A table's gradients, which stay torch's."""
    table = torch.randn(ROWS, 8, requires_grad=True)
    rows = torch.arange(BATCH)

    def function(table: torch.Tensor) -> torch.Tensor:
        made = functional.all_to_all_single_autograd(_sum(rows, table), None, None, group)
        loss: torch.Tensor = (made.sin() * made).sum()
        return loss

    weft.fused.enable(timeout=20)
    weft.fused.reset_report()
    (own,) = torch.autograd.grad(compiled(function)(table), table)
    weft.fused.disable()
    (expected,) = torch.autograd.grad(function(table), table)
    return [torch.allclose(own, expected, atol=1e-4), counted()]


def _sum(rows: Any, table: Any, **options: Any) -> Any:
    return embedding_bag(rows, table, rows, **{"mode": "sum"} | options)


def _sent(x: Any, group: str) -> Any:
    return functional.all_to_all_single(x, None, None, group)


def _columns(rows: Any, v: Any, w: Any, group: str) -> Any:
    """Tables behind each other, joined by chunks."""
    whole = _sent(torch.cat((_sum(rows, v), _sum(rows, w)), 1), group)
    return torch.cat(whole.chunk(distributed.get_world_size()), 1) @ v[:16].T.repeat(4, 1)


def _stacked(rows: Any, v: Any, w: Any, group: str) -> Any:
    """Tables as a separate dimension, used as received."""
    return _sent(torch.stack((_sum(rows, v), _sum(rows, w, sparse=True)), 1), group).sin()


def _by_rank(rows: Any, v: Any, w: Any, group: str) -> Any:
    """A block for each rank, used in two orders."""
    ranks = distributed.get_world_size()
    whole = _sent(_sum(rows, v, mode="mean").view(ranks, -1, 8), group)
    return whole.transpose(0, 1).flatten(1).sum(1) + whole.sum()


def _blocks(rows: Any, v: Any, w: Any, group: str) -> Any:
    """A block for each rank, joined in rank order."""
    ranks = distributed.get_world_size()
    whole = _sent(_sum(rows, w).view(ranks, -1, 8), group)
    return torch.cat(whole.chunk(ranks), 1) @ v[:8]


def _maximum(rows: Any, v: Any, w: Any, group: str) -> Any:
    return _sent(_sum(rows, v, mode="max"), group)


def _padded(rows: Any, v: Any, w: Any, group: str) -> Any:
    return _sent(_sum(rows, v, padding_idx=2), group)


def _two_dtypes(rows: Any, v: Any, w: Any, group: str) -> Any:
    return _sent(torch.cat((_sum(rows, v), _sum(rows, w.half())), 1), group)


def _narrow(rows: Any, v: Any, w: Any, group: str) -> Any:
    return _sent(_sum(rows, v[:, :6].contiguous()), group)


def _used_twice(rows: Any, v: Any, w: Any, group: str) -> Any:
    pooled = _sum(rows, v)
    return _sent(pooled, group) + pooled


def _dense_too(rows: Any, v: Any, w: Any, group: str) -> Any:
    return _sent(torch.cat((_sum(rows, v), w[: rows.shape[0]]), 1), group)


def _turned(rows: Any, v: Any, w: Any, group: str) -> Any:
    return _sent(_sum(rows, v).T.contiguous(), group)


def _uneven(rows: Any, v: Any, w: Any, group: str) -> Any:
    # Rank r receives r + 1 parts from each rank.
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    part = rows.shape[0] // (ranks * (ranks + 1) // 2)
    sent = [part * (each + 1) for each in range(ranks)]
    return functional.all_to_all_single(_sum(rows, v), [sent[rank]] * ranks, sent, group)


FORMS = {
    "columns": _columns,
    "stacked": _stacked,
    "by_rank": _by_rank,
    "blocks": _blocks,
    "maximum": _maximum,
    "padded": _padded,
    "two_dtypes": _two_dtypes,
    "narrow": _narrow,
    "used_twice": _used_twice,
    "dense_too": _dense_too,
    "turned": _turned,
    "uneven": _uneven,
}
