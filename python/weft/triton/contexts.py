"""Symmetric tensor contexts: the kernel argument through which a kernel reaches peers."""

from __future__ import annotations

import numpy as np
import torch

from weft.base.timeout import seconds
from weft.gpu import symmetric
from weft.gpu.errors import ON_DEVICES
from weft.triton import layout

__all__ = ["context"]


def context(tensor: torch.Tensor, *, timeout: float = 10.0) -> torch.Tensor:
    """Context for a symmetric tensor, for kernels that use the functions in `weft.triton`.

    It applies to all tensors in the same allocation, such as slices of one tensor. A later call for
    the allocation returns the same context. It is local: the ranks need not call it together.
    `weft.check()` raises errors from expired waits.

    Args:
        tensor: from `weft.symmetric_empty`, on a GPU or a twin. Keep it while kernels run.
        timeout: time limit for a wait in seconds. A domain uses the longest limit among all users,
            and reads it at each check, so that it also applies to captured graphs.

    Returns:
        int64, on the tensor's device.

    Raises:
        RegionError: if the tensor's memory is not symmetric.
    """
    owner = symmetric.owner(tensor)
    owner.native.prepare_waits(seconds(timeout))
    if owner.context is None:
        owner.context = _made(owner)
        ON_DEVICES.add(owner)
    return owner.context


def _made(owner: symmetric.Owner) -> torch.Tensor:
    """A context in the device's memory."""
    words = np.zeros(layout.CONTEXT_BYTES // 8, np.uint64)
    words[layout.CONTEXT_TABLE // 8] = owner.native.table
    halves = words.view(np.uint32)
    halves[layout.CONTEXT_RANK // 4] = owner.rank
    halves[layout.CONTEXT_RANKS // 4] = len(owner.addresses)
    addresses = np.array(owner.addresses, np.uint64)
    first = layout.CONTEXT_SHIFTS // 8
    words[first : first + len(addresses)] = addresses - addresses[owner.rank]
    return torch.from_numpy(words.view(np.int64)).to(owner.device)
