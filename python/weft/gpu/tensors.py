"""Tensor checks, for any purpose."""

from __future__ import annotations

import torch

from weft.base.errors import ShapeError

__all__ = ["is_tensor"]


def is_tensor(value: object, what: str) -> None:
    """Raise if a value is no torch tensor."""
    if not isinstance(value, torch.Tensor):
        raise ShapeError(f"{what} is a {type(value).__name__}, not a torch tensor")
