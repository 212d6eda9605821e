"""Symmetric memory, without an import of torch before the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weft.communicator import Communicator
    from weft.cuda.registered import Registered

__all__ = ["symmetric_empty", "symmetric_peer", "symmetric_register"]


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
        communicator: that of the ranks; by default the only one that is open.
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
    """The tensor of another rank at the same place: a view of its memory, as mapped here.

    Args:
        tensor: of `symmetric_empty`, or a view of one.
        rank: of the memory; this rank is allowed.

    Raises:
        RegionError: if the tensor's memory is not symmetric.
        UnknownError: if there is no such rank.
    """
    from weft.cuda import symmetric

    return symmetric.peer(tensor, rank)


def symmetric_register(
    tensor: torch.Tensor,
    *,
    communicator: Communicator | None = None,
    timeout: float = 60.0,
) -> Registered:
    """Let all ranks read and write a tensor that each has already, where it lies.

    Every rank makes this call, with a tensor of as many bytes; shapes and places in torch's memory
    may differ. `Registered.peer(rank)` is a rank's tensor, with this rank's shape and dtype. Peers
    open the whole allocation that the tensor is in, by CUDA IPC, so they trust each other.
    `weft.cuda.Collectives` of the communicator access the tensor, and parts of it, directly.

    The tensor lives until `Registered.close`, which every rank calls. If the communicator is closed
    before, this rank's mappings end, and a tensor on a GPU stays allocated until the process ends,
    since peers may have it mapped still.

    Args:
        tensor: contiguous, on a GPU and made by cudaMalloc, as torch does without expandable
            segments; or on the CPU (a twin) and in shared memory, `tensor.share_memory_()`.
        communicator: that of the ranks; by default the only one that is open.
        timeout: seconds to wait for all ranks to make the same call.

    Raises:
        ConfigurationError: if the memory cannot be shared, such as that of an expandable segment.
            If there is not one open communicator, and none is given.
        ConfigurationMismatchError: if ranks pass a different number of bytes.
        NoRouteError: if ranks are on other hosts, or GPUs cannot reach each other.
        ShapeError: if the tensor is not contiguous, or empty.
    """
    from weft.cuda import registered

    return registered.register(tensor, communicator=communicator, timeout=timeout)
