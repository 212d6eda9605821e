"""Traces for fused operators: memory into which kernels record program spans.

For example, `weft.triton.timeline(trace, weft.fused.SPANS).write_trace("trace.json")` writes a file
for https://ui.perfetto.dev.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from weft.base.errors import ConfigurationError
from weft.fused.kernels.tracing import SPANS
from weft.triton.timelines import check_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["SPANS", "current_trace", "tracing"]

#: Traces in open blocks, the innermost last.
_CURRENT: Final[list[torch.Tensor]] = []


@contextmanager
def tracing(trace: torch.Tensor) -> Iterator[None]:
    """Operators that are called in the block record their kernels' program spans.

    Kernels are compiled again for that. `weft.triton.timeline(trace, weft.fused.SPANS)` has the
    last traced kernel's spans: "compute", "send" (stores and signals; with paced stores, which lie
    within "compute", copies to local memory), "wait" and "finish" (sums over arrived data, and
    copies). GEMMs with `stream_k`, `all_reduce_rms_norm` and embedding-bag gradients are not
    traced. A call that is captured into a CUDA graph in the block records in each replay.

    Args:
        trace: from `weft.triton.trace_empty`, on the operators' device.

    Raises:
        ShapeError: if `trace` is not from `trace_empty`.
        ConfigurationError: raised by calls in the block if `trace` is on another device.
    """
    check_trace(trace)
    _CURRENT.append(trace)
    try:
        yield
    finally:
        _CURRENT.pop()


def current_trace(device: torch.device) -> torch.Tensor | None:
    """The innermost block's trace, or none, for a kernel on a device."""
    if not _CURRENT:
        return None
    trace = _CURRENT[-1]
    if trace.device != device:
        raise ConfigurationError(
            f"weft.fused.tracing: trace on {trace.device}: expected {device}, as the operator"
        )
    return trace
