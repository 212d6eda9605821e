"""Ahead-of-time compilation for collective kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft import _native
from weft.base.errors import ConfigurationError
from weft.base.nvrtc import show_nvrtc
from weft.collectives.device.checks import REDUCTIONS, refuse_op

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["compile_collectives"]


def compile_collectives(
    ranks: int,
    *,
    ops: Iterable[str] = ("sum",),
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float32),
    num_sms: int | None = None,
    arch: str = "sm_90a",
) -> tuple[int, int]:
    """Compile `Collectives` kernels into the cache, for a program that runs later; needs no GPU.

    A reduction's first call compiles its kernels, which takes seconds; here all cores compile. You
    can prepare a container image like this, with `WEFT_CACHE_DIR`. Programs with another
    [NVRTC](https://docs.nvidia.com/cuda/nvrtc/) version compile again.

    Args:
        ranks: rank count.
        ops: reductions, as in `Collectives.all_reduce`.
        dtypes: tensor dtypes, for each of `ops`.
        num_sms: as in the `Collectives` constructor; by default, the one for GPUs that ranks do
            not share and that have as many SMs.
        arch: GPU architecture, for example "sm_90a" for the H100 and H200.

    Returns:
        How many programs were compiled, and how many were in the cache.

    Raises:
        ConfigurationError: if an op does not apply to a dtype, `ranks` is not from 1 to 64, or
            `arch` is unknown.
        ProviderError: without NVRTC.
    """
    if not 1 <= ranks <= 64:
        raise ConfigurationError(f"ranks {ranks}: expected 1 to 64")
    dtypes = list(dtypes)
    pairs: dict[tuple[str, str], None] = {}
    for op in ops:
        for dtype in dtypes:
            element, reduction, _ = REDUCTIONS.get((op, dtype)) or refuse_op(op, dtype)
            pairs[reduction, element] = None
    show_nvrtc()
    return _native.compile_collectives(ranks, num_sms, arch, list(pairs))
