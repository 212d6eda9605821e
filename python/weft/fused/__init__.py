"""Computation fused with the collective after or before it, between GPUs on one host.

One kernel computes a tile, sends it, and computes the next while the first is in flight; tiles that
a peer waits for come first. The idea comes from "Optimizing Distributed ML Communication with Fused
Computation-Collective Operations", https://arxiv.org/abs/2305.06942, which also has pooling with
all-to-all and GEMMs with all-reduce and all-to-all as cases. Kernels are in stock Triton, and use
the device functions in `weft.triton`.

Each operator is a function, for example `weft.fused.gemm_all_reduce(x, weight)`. All ranks in the
communicator make the same calls in the same order, with equal shapes, dtypes and options. A call
puts kernels on torch's current stream and returns; it may be captured into CUDA graphs once the
same call was made eagerly. `weft.check()` raises the errors that kernels recorded: outputs are NaN
from then on.

With `TRITON_INTERPRET=1` (before the first import of triton) the same kernels run on CPU tensors,
one process for each rank.
"""

from weft.fused import operators, scaled_operators, tuning
from weft.fused.counts import Report, report, reset_report
from weft.fused.embedding import operator as embedding_operator
from weft.fused.embedding.all_to_all import EmbeddingAllToAll
from weft.fused.embedding.module import EmbeddingBags, embedding_all_to_all
from weft.fused.embedding.tables import concatenate_bags
from weft.fused.gemm.gemm import Tiling, default_tiling, gemm
from weft.fused.gemm.gemv import GemvTiling, gemv, gemv_all_reduce
from weft.fused.gemm.receive import all_gather_gemm, all_to_all_gemm
from weft.fused.gemm.send import gemm_all_reduce, gemm_all_to_all, gemm_reduce_scatter
from weft.fused.graph.compiler import disable, enable
from weft.fused.groups import communicator_of
from weft.fused.rms_norm import RmsNormTiling, all_reduce_rms_norm
from weft.fused.spaces import set_timeout
from weft.fused.tracing import SPANS, tracing

__all__ = [
    "SPANS",
    "EmbeddingAllToAll",
    "EmbeddingBags",
    "GemvTiling",
    "Report",
    "RmsNormTiling",
    "Tiling",
    "all_gather_gemm",
    "all_reduce_rms_norm",
    "all_to_all_gemm",
    "communicator_of",
    "concatenate_bags",
    "default_tiling",
    "disable",
    "embedding_all_to_all",
    "embedding_operator",
    "enable",
    "gemm",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_reduce_scatter",
    "gemv",
    "gemv_all_reduce",
    "operators",
    "report",
    "reset_report",
    "scaled_operators",
    "set_timeout",
    "tracing",
    "tuning",
]
