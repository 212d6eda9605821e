"""Embedding bags with all-to-all as a function and as a torch module.

Initial values are as in https://docs.pytorch.org/docs/stable/generated/torch.nn.EmbeddingBag.html.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from weft.fused.embedding.all_to_all import EmbeddingAllToAll
from weft.fused.embedding.bags import checked_bags
from weft.gpu import symmetric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.group.communicator import Communicator

__all__ = ["EmbeddingBags", "embedding_all_to_all"]

#: Operators made by the function, by table shapes.
_MADE: Final[weakref.WeakKeyDictionary[Communicator, dict[Any, EmbeddingAllToAll]]] = (
    weakref.WeakKeyDictionary()
)


def embedding_all_to_all(
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    per_sample_weights: torch.Tensor | None = None,
    *,
    modes: str | Sequence[str] = "sum",
    batch: int | None = None,
    out: torch.Tensor | None = None,
    communicator: Communicator | None = None,
    out_dtype: torch.dtype | None = None,
    sparse: bool = False,
    device: torch.device | str | None = None,
    name: str = "",
) -> torch.Tensor:
    """Pool embedding bags and exchange them: see `EmbeddingAllToAll`, which this makes and keeps.

    The first call with tables in these shapes makes the operator, on all ranks together; so ranks
    change their tables' shapes, or which tables have gradients, in the same call. If several
    collections have tables that differ only on some ranks, `name`, equal on all ranks,
    distinguishes them. The output is a separate tensor.

    Returns:
        `[local batch, columns]`.
    """
    group = symmetric.only_open() if communicator is None else communicator
    made = _MADE.setdefault(group, {})
    key = (
        tuple((tuple(each.shape), each.dtype, each.device, each.requires_grad) for each in weights),
        modes if isinstance(modes, str) else tuple(modes),
        *(out_dtype, sparse, str(device), name),
    )
    operator = made.get(key)
    if operator is None:
        operator = EmbeddingAllToAll(
            weights,
            modes,
            communicator=group,
            out_dtype=out_dtype,
            buffers=1,
            sparse=sparse,
            device=device,
        )
        operator.weights = []
        made[key] = operator
    bags = checked_bags(operator.tables, indices, offsets, per_sample_weights, batch)
    return operator.call(weights, bags, out, copy=True)


class EmbeddingBags(torch.nn.Module):  # type: ignore[misc]
    """A module with tables, `weights`, pooled by `EmbeddingAllToAll`; all ranks make it together.

    Args:
        tables: rows and columns for each table on this rank.
        modes: as in `EmbeddingAllToAll`, and so is `options`.
        dtype: table dtype.
        device: by default the current GPU.
    """

    def __init__(
        self,
        tables: Sequence[tuple[int, int]],
        modes: str | Sequence[str] = "sum",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        on: Any = device
        if on is None and torch.cuda.is_available():
            on = torch.device("cuda", torch.cuda.current_device())
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=on)) for shape in tables
        )
        self.reset_parameters()
        options.setdefault("out_dtype", dtype)
        self.operator = EmbeddingAllToAll(list(self.weights), modes, device=on, **options)

    def reset_parameters(self) -> None:
        """Set all tables to normally distributed values, as in `torch.nn.EmbeddingBag`."""
        for weight in self.weights:
            torch.nn.init.normal_(weight)

    def forward(
        self,
        indices: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
        *,
        batch: int | None = None,
    ) -> torch.Tensor:
        """Pooled rows for this rank's samples: see `EmbeddingAllToAll`."""
        operator = self.operator
        bags = checked_bags(operator.tables, indices, offsets, per_sample_weights, batch)
        return operator.call(list(self.weights), bags, None, None)
