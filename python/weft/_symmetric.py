"""Symmetric memory, for those who have not imported torch yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weft.communicator import Communicator

__all__ = ["symmetric_empty", "symmetric_peer"]


def symmetric_empty(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    device: object = "cuda",
    communicator: Communicator | None = None,
    memory: str = "fd",
    timeout: float = 60.0,
) -> torch.Tensor:
    """A tensor at the same place of every rank's symmetric heap, zeroed.

    Every rank makes this call, with as many bytes, and when it returns, every rank may write to the
    others' parts: `symmetric_peer` is one as a tensor. The communicator's all-to-alls on the device
    are in the same heap.

    The memory is freed when no tensor shows it any more, and used again once that is so on all
    ranks; kernels that use it have ended by then. It stays mapped if the communicator is closed
    before.

    Args:
        shape: sizes of the tensor.
        dtype: of the elements; by default torch's default.
        device: "cuda", "cuda:1" or a `torch.device`; "twin" is memory of the CPU that processes
            share.
        communicator: whose ranks; by default the only one that is open.
        memory: how peers' memory is shared: "fd" or "ipc".
        timeout: seconds to wait for all ranks to make the same call.

    Raises:
        ConfigurationError: if there is not one open communicator, and none is given.
        ConfigurationMismatchError: if ranks ask for a different number of bytes.
        NoRouteError: if ranks are on other hosts, or GPUs cannot reach each other.
        ProviderError: if there is no such device.
    """
    from weft.cuda import symmetric

    return symmetric.empty(
        shape, dtype, device=device, communicator=communicator, memory=memory, timeout=timeout
    )


def symmetric_peer(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """What `tensor` is at another rank: a view of that rank's memory, as it is mapped here.

    Args:
        tensor: of `symmetric_empty`, or a view of one.
        rank: whose; this rank's own is as good.

    Raises:
        RegionError: if the tensor's memory is not symmetric.
        UnknownError: if there is no such rank.
    """
    from weft.cuda import symmetric

    return symmetric.peer(tensor, rank)
