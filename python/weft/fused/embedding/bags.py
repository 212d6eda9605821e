"""Checked index bags for an embedding call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.base.errors import ConfigurationError, ShapeError
from weft.fused.embedding.tables import DTYPES

if TYPE_CHECKING:
    from weft.fused.embedding.tables import Tables

__all__ = ["Bags", "checked_bags"]


class Bags(NamedTuple):
    """A call's bags.

    Attributes:
        indices: `[total]`.
        offsets: `[tables * batch + 1]`.
        factors: sample weights, `[total]`, if a table uses them.
        batch: global batch.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    factors: torch.Tensor | None
    batch: int

    def owners(self) -> torch.Tensor:
        """Bag number for each index, int64; -1 or too large outside all bags."""
        places = torch.arange(self.indices.numel(), device=self.indices.device)
        # The last among equal offsets: the earlier ones are empty bags.
        return torch.searchsorted(self.offsets.to(torch.int64), places, right=True) - 1


def checked_bags(
    tables: Tables,
    indices: torch.Tensor | None,
    offsets: torch.Tensor | None,
    factors: torch.Tensor | None,
    batch: int | None,
) -> Bags:
    """Bags from `EmbeddingAllToAll`'s arguments.

    Raises:
        ShapeError: if a tensor has an unsuitable shape, dtype or device.
        ConfigurationError: if `factors` lacks or is not used, or requires a gradient and no table
            does.
    """
    count = len(tables.shapes)
    if count == 0:
        if batch is None:
            raise ShapeError("this rank has no tables: expected batch=, the global batch")
        empty = torch.zeros(1, dtype=torch.int64, device=tables.device)
        return Bags(empty[:0], empty, None, _checked_batch(batch))
    if indices is None or offsets is None:
        raise ShapeError(f"this rank has {count} tables: expected indices and offsets")
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
            raise ShapeError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: expected int32 or "
                "int64 of one dimension"
            )
    found, rest = divmod(offsets.numel() - 1, count)
    if rest or offsets.numel() == 0 or batch not in (None, found):
        expected = f"{count} tables * batch + 1"
        raise ShapeError(
            f"offsets has {offsets.numel()} elements: expected {expected}"
            + ("" if batch is None else f" with a batch of {batch}")
        )
    if (factors is not None) != tables.is_weighted:
        raise ConfigurationError(
            'per_sample_weights is missing: tables have mode "weighted_sum"'
            if tables.is_weighted
            else 'per_sample_weights is given: expected a table with mode "weighted_sum"'
        )
    if factors is not None:
        if factors.shape != indices.shape or str(factors.dtype)[6:] not in DTYPES:
            raise ShapeError(
                f"per_sample_weights is {factors.dtype} of shape {tuple(factors.shape)}: "
                f"expected floats of shape {tuple(indices.shape)}"
            )
        if factors.requires_grad and not tables.layout.is_trained:
            raise ConfigurationError(
                "per_sample_weights requires a gradient, but no table of any rank does: all "
                "ranks make the backward pass only if a table requires it"
            )
        factors = factors.contiguous()
    for tensor in (indices, offsets, factors):
        if tensor is not None and tensor.device != tables.device:
            raise ShapeError(f"a tensor is on {tensor.device}: expected {tables.device}")
    return Bags(indices.contiguous(), offsets.contiguous(), factors, found)


def _checked_batch(batch: int) -> int:
    if batch < 0:
        raise ShapeError(f"batch is {batch}: expected at least 0")
    return batch
