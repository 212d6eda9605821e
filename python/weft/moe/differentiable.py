"""Differentiable rounds: the module of gradients, and checks of what such rounds take."""

from __future__ import annotations

from typing import Any

from weft._array import is_torch
from weft.errors import ConfigurationError, ShapeError

__all__ = ["detached", "gradient_module", "refuse_out", "tensor"]


def gradient_module() -> Any:
    """The module of gradients, which imports torch.

    Raises:
        ConfigurationError: if there is no torch.
    """
    try:
        from weft import _gradient
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigurationError(
            "gradients=True needs PyTorch: pip install 'weft[torch]'"
        ) from error
    return _gradient


def tensor(outputs: Any) -> Any:
    """The outputs of a differentiable round.

    Raises:
        ShapeError: if they are no tensor of torch, and so have no gradient.
    """
    if not is_torch(outputs):
        raise ShapeError(
            f"outputs of a differentiable round is a {type(outputs).__name__}: expected a torch "
            "tensor; pass one, or dispatch under torch.no_grad()"
        )
    return outputs


def detached(value: Any) -> Any:
    """A tensor without its history; anything else as it is."""
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
