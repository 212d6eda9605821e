"""Traces of fused operators: memory into which their kernels record spans of programs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from weft.errors import ConfigurationError
from weft.fused.kernels.tracing import SPANS
from weft.triton.timelines import check_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["SPANS", "current_trace", "tracing"]

#: Of the blocks that are open, the innermost last.
_CURRENT: Final[list[torch.Tensor]] = []


@contextmanager
def tracing(trace: torch.Tensor) -> Iterator[None]:
    """Operators that are called in the block record spans of their kernels' programs.

    Kernels are compiled anew for that. `weft.triton.timeline(trace, weft.fused.SPANS)` has the
    spans of the last traced kernel: "compute", "send" (stores and signals; with paced stores, which
    lie within "compute", copies to the own memory), "wait" and "finish" (sums and copies of what
    has arrived). Products with `stream_k`, `all_reduce_rms_norm` and
    gradients of embedding bags are not traced. A call that is captured into a CUDA graph in the
    block records in each replay.

    Args:
        trace: of `weft.triton.trace_empty`, on the operators' device.

    Raises:
        ShapeError: if `trace` is not of `trace_empty`.
        ConfigurationError: of calls in the block, if `trace` is on another device.
    """
    check_trace(trace)
    _CURRENT.append(trace)
    try:
        yield
    finally:
        _CURRENT.pop()


def current_trace(device: torch.device) -> torch.Tensor | None:
    """The trace of the innermost block, or none, for a kernel on a device."""
    if not _CURRENT:
        return None
    trace = _CURRENT[-1]
    if trace.device != device:
        raise ConfigurationError(
            f"weft.fused.tracing: trace on {trace.device}: expected {device}, as the operator"
        )
    return trace
