"""Carve-out of multiprocessors: matrix products leave them to the kernels of Weft."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["sm_carveout"]


@contextmanager
def sm_carveout(num_sms: int) -> Iterator[None]:
    """Matrix products of torch leave multiprocessors free, inside of the block.

    cuBLAS's products on Hopper have as many blocks as there are multiprocessors, each of which
    stays until the product ends; a kernel of Weft on another stream would wait that long. Inside of
    this block products launched or captured by any thread go through cuBLASLt, with `num_sms`
    blocks fewer. What was captured keeps its grid. It stands on an experimental setting of torch
    (`torch._C._set_sm_carveout_experimental`), which prints a warning when it is first used; other
    libraries have their own settings (`deep_gemm.set_num_sms`, the grid of a Triton kernel).

    Args:
        num_sms: multiprocessors to leave, such as `AllToAll.num_sms`; at least 0 and fewer than
            the device has.

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
