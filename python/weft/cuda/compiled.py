"""Compilation of the kernels of collectives ahead of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft import _native
from weft.cuda.collective_checks import REDUCTIONS, refuse_op
from weft.cuda.device import show_nvrtc
from weft.errors import ConfigurationError

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
    """Compile kernels of `Collectives` into the cache, for a program that runs later; needs no GPU.

    The first call of a reduction compiles its kernels, which takes seconds; here all cores compile.
    A container image can so be built with `WEFT_CACHE_DIR`. Programs with another version of NVRTC
    compile again.

    Args:
        ranks: number of ranks of the group.
        ops: reductions, as of `Collectives.all_reduce`.
        dtypes: of tensors, for each of `ops`.
        num_sms: as of the constructor of `Collectives`; by default, its default for GPUs that ranks
            do not share and that have as many.
        arch: architecture of the GPUs.

    Returns:
        Numbers of programs that were compiled, and that were in the cache.

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
