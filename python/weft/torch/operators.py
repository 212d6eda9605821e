"""Operators that bypass the Python code of `torch.distributed`.

Custom operators, for example `torch.ops.weft.all_reduce_`:
https://docs.pytorch.org/docs/stable/library.html.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from weft.base.errors import ConfigurationError

__all__ = ["all_reduce_", "register_fakes"]


def all_reduce_(tensor: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
    """All-reduce in place, as `torch.distributed.all_reduce`, with less time per call.

    It is the operator `torch.ops.weft.all_reduce_`, which `torch.compile` keeps in the graph. On a
    CPU tensor, a call runs no Python code; on a GPU tensor, the backend takes the GIL and calls
    Python's `DeviceCalls`, which launches the kernel. It has no gradient.

    For example, `weft.torch.all_reduce_(gradients, "avg")`.

    Args:
        tensor: on CPU or GPU, with the same shape and dtype on all ranks; has the result
            afterwards.
        op: reduction: sum, avg, product, min, max, band, bor or bxor.
        group: a process group; `None` for the default one.

    Returns:
        `tensor`, once the result is in it; on a GPU, in order on the current stream.

    Raises:
        ConfigurationError: if this process has no group over `weft`.
        ValueError: for another `op`.
        TypeError: if the backend has no such reduction for this dtype.
        DistBackendError: as in `torch.distributed.all_reduce`.
    """
    group = distributed.group.WORLD if group is None else group
    if group is None or not hasattr(torch.ops.weft, "all_reduce_"):
        raise ConfigurationError(
            "weft.torch.all_reduce_: no process group; expected init_process_group('weft') before"
        )
    torch.ops.weft.all_reduce_(tensor, op, group.group_name)
    return tensor


def register_fakes() -> None:
    """Describe the C++ library's operators to `torch.compile`, once the library is loaded."""
    torch.library.register_fake("weft::all_reduce_", lambda tensor, op, group: None)
