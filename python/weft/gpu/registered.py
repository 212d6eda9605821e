"""Registered tensors: user memory that all ranks read and write in place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Self

import torch

from weft import _native
from weft.base.errors import ClosedError, ConfigurationError, ShapeError, UnknownError
from weft.base.timeout import seconds
from weft.gpu.device import place_of
from weft.gpu.memory import memory_at
from weft.gpu.symmetric import only_open

if TYPE_CHECKING:
    from weft.group.communicator import Communicator

__all__ = ["Registered", "register"]

#: Tensors whose communicator was closed first: peers may still have the memory mapped, and CUDA
#: leaves access to a mapping of freed memory undefined.
_KEPT: Final[list[torch.Tensor]] = []


class Registered:
    """A tensor on each rank, as all ranks reach it: see `weft.symmetric_register`.

    As a context manager it closes itself at the end of the block.
    """

    def __init__(
        self, tensor: torch.Tensor, native: _native.RegisteredMemory, communicator: Communicator
    ) -> None:
        #: This rank's own.
        self.tensor = tensor.detach()
        self._native, self._communicator = native, communicator
        self._addresses = native.addresses
        self._closed = False

    @property
    def addresses(self) -> list[int]:
        """Address at which each rank's tensor is mapped here, for user kernels."""
        self._open()
        return list(self._addresses)

    def peer(self, rank: int) -> torch.Tensor:
        """A rank's tensor, with this rank's shape and dtype, as it is mapped here.

        Raises:
            UnknownError: if there is no such rank.
            ClosedError: after `close`.
        """
        self._open()
        if not 0 <= rank < len(self._addresses):
            raise UnknownError(f"there is no rank {rank} among {len(self._addresses)}")
        if rank == self._communicator.rank:
            return self.tensor
        length = self.tensor.numel() * self.tensor.itemsize
        # The native object ends a twin's mappings, so views keep it.
        row = memory_at(self._addresses[rank], (1, length), self.tensor.device, self._native)
        return row[0].view(self.tensor.dtype).view(self.tensor.shape)

    def close(self, timeout: float = 60.0) -> None:
        """End it; every rank calls this, when no running kernel uses the memory.

        When it returns, no peer has this rank's memory mapped: the tensor may be freed, and tensors
        that `peer` returned must not be used. A second call has no effect, nor has one in a forked
        child.

        Args:
            timeout: seconds to wait for all ranks to make the same call.
        """
        if self._closed or os.getpid() != self._communicator._process:
            return
        limit = seconds(timeout)
        self._native.withdraw()
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)
        self._closed = True
        try:
            self._native.close(limit)
        except Exception:
            self._keep()
            raise
        self._communicator._registered.discard(self)

    def _abandon(self) -> None:
        """End it only on this rank, as the communicator does when it is closed."""
        if self._closed:
            return
        self._closed = True
        self._native.withdraw()
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)
        self._keep()
        self._native.abandon()

    def _keep(self) -> None:
        """Keep the memory, since peers may still have it mapped."""
        if self.tensor.is_cuda and len(self._addresses) > 1:
            _KEPT.append(self.tensor)

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("the registered tensor was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        # The other ranks may not come where this one failed: the communicator ends it then.
        if error is None:
            self.close()


def register(
    tensor: torch.Tensor, *, communicator: Communicator | None = None, timeout: float = 60.0
) -> Registered:
    """See `weft.symmetric_register`."""
    group = only_open() if communicator is None else communicator
    _check(tensor)
    length = tensor.numel() * tensor.itemsize
    limit = seconds(timeout)
    if tensor.is_cuda:
        name, _ = place_of(tensor.device)
        native = _native.RegisteredMemory(
            group._native,
            device=name,
            address=tensor.data_ptr(),
            bytes=length,
            file=None,
            timeout=limit,
        )
    else:
        native = _twin(group, tensor, length, limit)
    made = Registered(tensor, native, group)
    # Until it is closed, peers may write to the memory, used here or not.
    group._registered.add(made)
    return made


def _twin(
    group: Communicator, tensor: torch.Tensor, length: int, timeout: float
) -> _native.RegisteredMemory:
    """Registers a tensor that torch put into shared memory."""
    storage = tensor.untyped_storage()
    # The descriptor stays torch's.
    descriptor, _ = storage._share_fd_cpu_()
    return _native.RegisteredMemory(
        group._native,
        device="twin",
        address=tensor.data_ptr(),
        bytes=length,
        file=(descriptor, tensor.data_ptr() - storage.data_ptr()),
        timeout=timeout,
    )


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type not in ("cuda", "cpu"):
        raise ConfigurationError(
            f"the tensor is on {tensor.device}: expected a GPU of CUDA, or the CPU (a twin)"
        )
    if not tensor.is_contiguous():
        raise ShapeError("the tensor is not contiguous: pass tensor.contiguous()")
    if tensor.numel() == 0:
        raise ShapeError("the tensor is empty: expected at least one element")
    if tensor.device.type == "cpu" and not tensor.is_shared():
        raise ConfigurationError(
            "the tensor's memory is this process's own: call tensor.share_memory_() before, or pass"
            " a tensor on a GPU"
        )
