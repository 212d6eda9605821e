"""Kinds of the spans that kernels of the fused operators record."""

import triton.language as tl

__all__ = ["COMPUTE", "FINISH", "SEND", "SPANS", "WAIT"]

#: Names of the kinds, for `weft.triton.timeline`.
SPANS = ("compute", "send", "wait", "finish")
COMPUTE, SEND, WAIT, FINISH = map(tl.constexpr, range(4))
