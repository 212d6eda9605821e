"""SM carve-out: GEMMs leave SMs free for Weft's kernels."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from weft.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["sm_carveout"]


@contextmanager
def sm_carveout(num_sms: int) -> Iterator[None]:
    """Make torch's GEMMs leave SMs free, inside the block.

    On Hopper, cuBLAS GEMMs have as many blocks as there are SMs, each of which stays until the GEMM
    ends; a Weft kernel on another stream would wait that long. Inside this block, GEMMs launched or
    captured by any thread go through [cuBLASLt](https://docs.nvidia.com/cuda/cublas/), with
    `num_sms` fewer blocks. Captured work keeps the grid. This relies on an experimental torch
    setting (`torch._C._set_sm_carveout_experimental`), which prints a warning when it is first
    used; other libraries have separate settings (`deep_gemm.set_num_sms`, a Triton kernel's grid).

    Args:
        num_sms: SMs to leave free, such as `AllToAll.num_sms`; at least 0 and fewer than the device
            has.

    Raises:
        ConfigurationError: if `num_sms` is out of range, or torch has no such setting.
    """
    most = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    if not 0 <= num_sms < most:
        raise ConfigurationError(f"num_sms {num_sms}: expected 0 to {most - 1}")
    if not hasattr(torch._C, "_set_sm_carveout_experimental"):
        raise ConfigurationError(
            f"torch {torch.__version__} has no setting for this; install 2.8 or later"
        )
    library = torch.backends.cuda.preferred_blas_library()
    before = torch._C._get_sm_carveout_experimental()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(num_sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)
        torch.backends.cuda.preferred_blas_library(library)
