"""Position layouts that inference engines take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weft.base.errors import ConfigurationError

if TYPE_CHECKING:
    from weft.moe import AllToAll, Received

__all__ = [
    "batched",
    "check",
    "expert_of_positions",
    "outputs_of",
    "ranks",
    "torch_dtype",
]


def check(all_to_all: AllToAll, engine: str) -> None:
    """Raise unless an all-to-all fits an engine.

    Raises:
        ConfigurationError: if the engine has no format for the layout, or weights would be applied
            twice or never.
    """
    wanted = {"padded": "combine", "contiguous": "expert"}.get(all_to_all.layout)
    if wanted is None:
        raise ConfigurationError(
            f"layout={all_to_all.layout!r}: {engine} takes 'padded' (a batch for each expert, on a "
            "device) or 'contiguous' (a row for each token and expert)"
        )
    if all_to_all._weighting != wanted:
        raise ConfigurationError(
            f"layout={all_to_all.layout!r} with weighting={all_to_all._weighting!r}: pass "
            f"weighting={wanted!r}, since {engine}'s experts "
            + ("leave the weights to combine" if wanted == "combine" else "apply the weights")
        )


def batched(all_to_all: AllToAll) -> bool:
    """True if each expert has separate rows: `[experts, rows, hidden]`."""
    return all_to_all.layout == "padded"


def ranks(all_to_all: AllToAll) -> int:
    """Number of ranks in the group; also on a device without a communicator."""
    here: int | None = getattr(all_to_all, "world_size", None)
    return all_to_all.communicator.world_size if here is None else here


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def expert_of_positions(received: Received, positions: int) -> torch.Tensor:
    """The local expert for each position in the contiguous layout; -1 for padding."""
    known: torch.Tensor | None = getattr(received, "m_indices", None)
    if known is not None:
        return known[:positions].long()
    offsets = torch.as_tensor(received.expert_offsets)
    counts = torch.as_tensor(received.expert_counts)
    at = torch.arange(positions, dtype=offsets.dtype, device=offsets.device)
    expert = torch.searchsorted(offsets[1:].contiguous(), at, right=True)
    # Positions behind the last group have no expert; they are masked later.
    group = expert.clamp(max=max(len(counts) - 1, 0))
    if not len(counts):
        return torch.full_like(expert, -1)
    filled = (at < offsets[-1]) & (at - offsets[group] < counts[group])
    return torch.where(filled, expert, -1)


def outputs_of(all_to_all: AllToAll, received: Received, rows: torch.Tensor) -> torch.Tensor:
    """Expert outputs for combine: a row for each position, in the outputs' dtype."""
    if batched(all_to_all) and rows.ndim == 3:
        return rows.to(torch_dtype(all_to_all.combine_dtype)).contiguous()
    flat = rows.reshape(-1, rows.shape[-1]).to(torch_dtype(all_to_all.combine_dtype))
    if len(flat) == received.positions:
        return flat.contiguous()
    # Positions behind the last expert's group, which were not passed to the engine.
    whole: Any = flat.new_empty((received.positions, flat.shape[-1]))
    whole[: len(flat)] = flat
    return torch.as_tensor(whole)
