"""Differentiable rounds: imports `gradient`, and checks arguments."""

from __future__ import annotations

from typing import Any

from weft.base.array import is_torch
from weft.base.errors import ConfigurationError, ShapeError

__all__ = ["detached", "gradient_module", "refuse_out", "tensor"]


def gradient_module() -> Any:
    """The `gradient` module, which imports torch.

    Raises:
        ConfigurationError: if there is no torch.
    """
    try:
        from weft.moe import gradient
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError(
            "gradients=True needs PyTorch: pip install 'weft[torch]'"
        ) from error
    return gradient


def tensor(outputs: Any) -> Any:
    """A differentiable round's outputs.

    Raises:
        ShapeError: if `outputs` is no torch tensor, and so has no gradient.
    """
    if not is_torch(outputs):
        raise ShapeError(
            f"outputs of a differentiable round is a {type(outputs).__name__}: expected a torch "
            "tensor; pass one, or dispatch under torch.no_grad()"
        )
    return outputs


def detached(value: Any) -> Any:
    """A tensor without history; anything else as it is."""
    return value.detach() if is_torch(value) else value


def refuse_out(out: object) -> None:
    """Raise if `out` is given for a differentiable result.

    Raises:
        ConfigurationError: if `out` was given.
    """
    if out is not None:
        raise ConfigurationError(
            "out= of a differentiable round: the result is a tensor with a history; leave out= "
            "away, or call under torch.no_grad()"
        )
