"""Ranking model in DLRM's shape: embedding tables on all ranks, networks on each.

"Deep Learning Recommendation Model for Personalization and Recommendation Systems" (Naumov et al.,
2019, https://arxiv.org/abs/1906.00091): a network for dense features, embedding bags, dot products
over all pairs, and a network for their results. A rank has separate tables and a part of the batch.
Tables do not change, and network gradients are not summed over ranks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from training_decode import relative

if TYPE_CHECKING:
    from collections.abc import Callable

    from fused_models_cases import Case
    from harness.context import Context

__all__ = ["Ranking", "RankingSteps"]


class Ranking:
    """This rank's tables, indices and networks, and the results that all sides must have."""

    def __init__(self, context: Context, case: Case) -> None:
        self.context, self.shape = context, case.shape
        shape = case.shape
        self.is_trained = case.kind == "train"
        self.dim, self.batch = shape["dim"], shape["batch"]
        self.local = self.batch // context.ranks
        self.mine = slice(context.rank * self.local, (context.rank + 1) * self.local)
        features = 1 + context.ranks * shape["tables"]
        pairs = torch.tril_indices(features, features, -1, device=context.device.name)
        #: Pair positions in a matrix with all dot products.
        self.pairs = pairs[0] * features + pairs[1]
        source = self.source(-1)
        self.bottom = self.network(shape["bottom"], source)
        self.top = self.network([self.dim + len(self.pairs), *shape["top"]], source)
        self.dense = self.normal((self.batch, shape["bottom"][0]), 1.0, source)
        self.labels = torch.randint(
            2, (self.batch, 1), generator=source, device=context.device.name
        ).float()
        self.expected = self.reference()
        #: [tables * rows, dim]; all sides' gradients are compared, one after the other.
        self.whole = self.table(context.rank).requires_grad_(self.is_trained)
        parts = self.whole.detach().split(shape["rows"])
        self.tables = [part.requires_grad_(self.is_trained) for part in parts]
        drawn = self.drawn(context.rank)
        #: By table, as weft.fused takes them, and by sample, with the tables' numbers added.
        self.indices = drawn.flatten().int()
        ends = range(0, drawn.numel() + 1, shape["pooling"])
        self.offsets = torch.tensor(ends, dtype=torch.int32, device=context.device.name)
        self.by_sample = self.arranged(drawn)

    def source(self, rank: int) -> Any:
        """Generator for a rank's values; -1: for the values that all ranks share."""
        return torch.Generator(self.context.device.name).manual_seed(100 + rank)

    def normal(self, size: tuple[int, ...], scale: float, source: Any) -> Any:
        """Normally distributed values."""
        options = {"dtype": self.context.dtype, "device": self.context.device.name}
        return torch.randn(size, generator=source, **options).mul_(scale)

    def network(self, sizes: list[int], source: Any) -> list[Any]:
        """Layer weights, [columns, inner]."""
        return [
            self.normal((columns, inner), (2 / inner) ** 0.5, source).requires_grad_(
                self.is_trained
            )
            for inner, columns in pairwise(sizes)
        ]

    def table(self, rank: int) -> Any:
        """All tables on a rank, one below the other; bag dot products are about 1."""
        shape = self.shape
        scale = self.dim**-0.25 * shape["pooling"] ** -0.5
        size = (shape["tables"] * shape["rows"], self.dim)
        return self.normal(size, scale, self.source(rank))

    def drawn(self, rank: int) -> Any:
        """Indices for a rank's bags, [tables, batch, pooling]."""
        shape = self.shape
        size = (shape["tables"], self.batch, shape["pooling"])
        source = self.source(1000 + rank)
        return torch.randint(shape["rows"], size, generator=source, device=self.context.device.name)

    def arranged(self, drawn: Any) -> Any:
        """Indices into all tables on a rank, [batch * tables, pooling]."""
        first = torch.arange(len(drawn), device=drawn.device) * self.shape["rows"]
        return (drawn + first[:, None, None]).transpose(0, 1).reshape(-1, drawn.shape[2])

    def pooled(self) -> Any:
        """Bags from this rank's tables, [batch, tables, dim], by torch."""
        rows = functional.embedding_bag(
            self.by_sample, self.whole, mode="sum", sparse=self.is_trained
        )
        return rows.view(self.batch, -1, self.dim)

    def loss(self, rows: list[Any], part: slice) -> tuple[Any, Any]:
        """This part's share of the batch's mean loss, and scores.

        Args:
            rows: the samples' pooled rows, [samples, tables, dim] for some tables each.
            part: samples.
        """
        dense = self.dense[part]
        for weight in self.bottom:
            dense = functional.linear(dense, weight).relu()
        features = torch.cat([dense[:, None], *rows], 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        states = torch.cat([dense, products.index_select(1, self.pairs)], 1)
        for number, weight in enumerate(self.top):
            states = functional.linear(states.relu() if number else states, weight)
        scores = states.float()
        loss = functional.binary_cross_entropy_with_logits(
            scores, self.labels[part], reduction="sum"
        )
        return loss / self.batch, scores

    def reference(self) -> tuple[Any, Any]:
        """Scores for this rank's samples, and the gradient for its first table, only by torch."""
        found = []
        for rank in range(self.context.ranks):
            drawn = self.drawn(rank)
            pooled = functional.embedding_bag(self.arranged(drawn), self.table(rank), mode="sum")
            found.append(pooled.view(self.batch, -1, self.dim))
        rows = torch.cat(found, 1).requires_grad_(self.is_trained)
        loss, scores = self.loss([rows], slice(None))
        own = scores[self.mine].detach().clone()
        if not self.is_trained:
            return own, None
        (grad,) = torch.autograd.grad(loss, rows)
        drawn = self.drawn(self.context.rank)[0]
        first = grad[:, self.context.rank * self.shape["tables"]]
        each = first.repeat_interleave(drawn.shape[1], 0)
        return own, self.summed(drawn.flatten(), each)

    def summed(self, indices: Any, values: Any) -> Any:
        """A table's gradient, [rows, dim], from its rows' gradients."""
        made = torch.zeros(self.shape["rows"], self.dim, device=values.device)
        return made.index_add_(0, indices, values.float())

    def leaves(self) -> list[Any]:
        """All that has gradients."""
        return [self.whole, *self.tables, *self.bottom, *self.top]

    def gradient(self) -> Any:
        """The first table's gradient after a step."""
        grad = self.whole.grad if self.whole.grad is not None else self.tables[0].grad
        if not grad.is_sparse:
            return grad[: self.shape["rows"]].float()
        indices, values = grad._indices()[0], grad._values()
        is_first = indices < self.shape["rows"]
        return self.summed(indices[is_first], values[is_first])


class RankingSteps:
    """A step on one side: a graph with the forward pass, or forward and backward pass."""

    def __init__(self, context: Context, case: Case, side: Any, data: Ranking) -> None:
        self.data = data
        self.scores = torch.empty_like(data.expected[0])
        self.grad_error: float | None = None
        pool = side.pool(data)
        self.step: Callable[[], None] = lambda: self.train(pool)
        if not data.is_trained:
            self.step = context.device.capture(lambda: self.forward(pool))

    def forward(self, pool: Callable[[], list[Any]]) -> None:
        """Scores for this rank's samples."""
        with torch.no_grad():
            self.scores.copy_(self.data.loss(pool(), self.data.mine)[1])

    def train(self, pool: Callable[[], list[Any]]) -> None:
        """Scores, and network and table gradients."""
        for leaf in self.data.leaves():
            leaf.grad = None
        loss, scores = self.data.loss(pool(), self.data.mine)
        loss.backward()
        self.scores.copy_(scores.detach())

    def facts(self) -> dict[str, Any]:
        """Largest error in scores and in the first table's gradient, after one more step."""
        self.step()
        expected, grad = self.data.expected
        errors = [relative(self.scores, expected)]
        if grad is not None:
            errors.append(relative(self.data.gradient(), grad))
            for leaf in self.data.leaves():
                leaf.grad = None
        return {"error": max(errors), "errors": errors}
