"""Symmetric memory, without an import of torch before the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from weft.gpu.registered import Registered
    from weft.group.communicator import Communicator
    from weft.group.region import Region

__all__ = ["symmetric_empty", "symmetric_peer", "symmetric_region", "symmetric_register"]


def symmetric_empty(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    device: object = "cuda",
    communicator: Communicator | None = None,
    memory: str = "fd",
    timeout: float = 60.0,
) -> torch.Tensor:
    """Zeroed tensor at the same place in every rank's symmetric heap.

    Every rank makes this call, with the same byte count. When it returns, every rank may write to
    the others' parts: `symmetric_peer` shows one as a tensor. The communicator's all-to-alls on the
    device use the same heap.

    The memory is freed when no tensor shows it any more, and reused once that is so on all ranks;
    kernels that use it must have ended by then. It stays mapped if the communicator is closed
    before.

    Args:
        shape: tensor shape.
        dtype: element dtype; by default torch's default.
        device: "cuda", "cuda:1" or a `torch.device`; "twin" is CPU memory that processes share.
        communicator: the ranks' communicator; by default the only open one.
        memory: how ranks share memory: "fd" or "ipc".
        timeout: seconds to wait for all ranks to make the same call.

    Raises:
        ConfigurationError: if none is given, and not exactly one communicator is open.
        ConfigurationMismatchError: if ranks ask for different byte counts.
        NoRouteError: if ranks are on other hosts, or GPUs cannot reach each other.
        ProviderError: if there is no such device.
    """
    from weft.gpu import symmetric

    return symmetric.empty(
        shape, dtype, device=device, communicator=communicator, memory=memory, timeout=timeout
    )


def symmetric_peer(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Another rank's tensor at the same place: a view on that memory, as mapped here.

    Args:
        tensor: from `symmetric_empty`, or a view on such a tensor.
        rank: rank that owns the memory; this rank is allowed.

    Raises:
        RegionError: if the tensor's memory is not symmetric.
        UnknownError: if there is no such rank.
    """
    from weft.gpu import symmetric

    return symmetric.peer(tensor, rank)


def symmetric_region(
    tensor: torch.Tensor, *, communicator: Communicator | None = None
) -> tuple[Region, int]:
    """Region of the symmetric memory around a tensor, and the tensor's offset in it.

    Only this rank calls it; `Communicator.share` or `Region.descriptor` then grants the region. It
    is this rank's part of a segment, 2 MiB or more, in which other symmetric tensors may lie. All
    tensors in a segment get the same region, so that NICs register it once, until it is released.
    Peers may write to it over every provider that reaches the memory, also over shm and copy; and
    a peer with the grant may write to all of it. `Region.release` ends this for all of these
    tensors. For example, to write `tensor` to the tensor at
    the same place on rank 1::

        region, offset = weft.symmetric_region(tensor)
        remote = communicator.share([region], [counter])[1][0]
        page = weft.Page(region, offset, remote, offset, tensor.nbytes)
        communicator.write(1, counter, [page])

    Other GPUs may read what has arrived (`reader="all"` in `Communicator.register`). The region
    keeps the memory mapped, but not reserved: keep the tensor while peers may write to it.

    Args:
        tensor: from `symmetric_empty`, or a view on such a tensor.
        communicator: any communicator that this rank is in, such as one that spans hosts; by
            default the only open one.

    Raises:
        ConfigurationError: if none is given, and not exactly one communicator is open.
        RegionError: if the tensor's memory is not symmetric, or no provider reaches it.
    """
    from weft.gpu import symmetric

    return symmetric.region(tensor, communicator=communicator)


def symmetric_register(
    tensor: torch.Tensor,
    *,
    communicator: Communicator | None = None,
    timeout: float = 60.0,
) -> Registered:
    """Let all ranks read and write an existing tensor on each rank, where it lies.

    Every rank makes this call, with tensors that have equal byte counts; shapes and places in
    torch's memory may differ. `Registered.peer(rank)` is a rank's tensor, with this rank's shape
    and dtype. Peers open the whole allocation around the tensor by CUDA IPC, so they trust each
    other (https://docs.nvidia.com/cuda/cuda-c-programming-guide/). `weft.cuda.Collectives` on the
    communicator access the tensor, or parts of it, directly.

    The tensor lives until `Registered.close`, which every rank calls. If the communicator is closed
    before, this rank's mappings end, and a GPU tensor stays allocated until the process ends, since
    peers may still have it mapped.

    Args:
        tensor: contiguous, on a GPU and allocated by cudaMalloc, as torch does without expandable
            segments; or on the CPU (a twin) and in shared memory, `tensor.share_memory_()`.
        communicator: the ranks' communicator; by default the only open one.
        timeout: seconds to wait for all ranks to make the same call.

    Raises:
        ConfigurationError: if the memory cannot be shared, such as an expandable segment. If none
            is given, and not exactly one communicator is open.
        ConfigurationMismatchError: if ranks pass different byte counts.
        NoRouteError: if ranks are on other hosts, or GPUs cannot reach each other.
        ShapeError: if the tensor is not contiguous, or empty.
    """
    from weft.gpu import registered

    return registered.register(tensor, communicator=communicator, timeout=timeout)
