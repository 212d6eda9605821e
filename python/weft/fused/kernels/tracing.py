"""Span kinds that the fused operators' kernels record."""

import triton.language as tl

__all__ = ["COMPUTE", "FINISH", "SEND", "SPANS", "WAIT"]

#: Kind names, for `weft.triton.timeline`.
SPANS = ("compute", "send", "wait", "finish")
COMPUTE, SEND, WAIT, FINISH = map(tl.constexpr, range(4))
