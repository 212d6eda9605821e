"""Memory that peers can write to, and how it is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weft.errors import RegionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weft import _native

__all__ = ["Page", "Region", "RemoteRegion"]


class RemoteRegion(NamedTuple):
    """A peer's region that this rank may write to."""

    peer: int
    key: int
    length: int


class Page(NamedTuple):
    """A slice of a local region that goes to a slice of equal length of a peer's region (bytes)."""

    source: Region
    source_offset: int
    destination: RemoteRegion
    destination_offset: int
    length: int


class Region:
    """Memory of this rank: a source of writes, and a destination once it was shared."""

    def __init__(self, native: _native.Region, device: str | None = None) -> None:
        self._native = native
        self._device = device

    def __len__(self) -> int:
        return len(self._native)

    @property
    def device(self) -> str | None:
        """The device whose memory it is, such as "cuda:0"; `None` for CPU memory."""
        return self._device

    @property
    def address(self) -> int:
        """Where it begins: an address of the CPU's, or of its device's."""
        return self._native.address()

    @property
    def writable(self) -> bool:
        """Whether it may be a destination; not so if it is an array that is read-only."""
        return self._native.writable

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The memory itself, `[length]` uint8: what peers write appears here.

        It stays readable while the array lives, also when the region was released or the
        communicator closed; nothing arrives in it any more then.

        Raises:
            RegionError: if it is memory of a device: see `cuda`.
        """
        if self._device is not None:
            raise RegionError(
                f"this region is memory of {self._device}, which the CPU does not read: "
                "torch.as_tensor(region.cuda) is a tensor there"
            )
        return np.frombuffer(memoryview(self._native.view()), dtype=np.uint8)

    @property
    def cuda(self) -> _native.View:
        """The memory of a device, for what speaks CUDA's array interface: `[length]` uint8.

        `torch.as_tensor(region.cuda)` is a tensor of it, without a copy; `.view(torch.float32)` of
        that has another dtype. It stays valid as `bytes` does. What a kernel is to read must have
        been waited for before the kernel is launched, and what a kernel writes must be there
        (`torch.cuda.synchronize()`, or an event) before it is sent.

        Raises:
            RegionError: if it is CPU memory: see `bytes`.
        """
        if self._device is None:
            raise RegionError("this region is CPU memory: `bytes` is an array of it")
        return self._native.view()

    def release(self) -> None:
        """Forget the region. Requests under way keep it until they have ended."""
        self._native.release()
