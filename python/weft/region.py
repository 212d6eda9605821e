"""Regions: memory that peers can write to, and its names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from weft._arguments import expect
from weft.errors import RegionError, UnknownError, WrongGroupError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from weft import _native

__all__ = ["Page", "Region", "RemoteRegion"]

#: Source region, its offset, the peer's region, its offset, length; count, strides of the slices.
Row: TypeAlias = tuple[int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region that this rank may write to; `Communicator.share` returns them.

    Attributes:
        peer: the rank that granted it.
        key: its number there.
        length: in bytes.
    """

    peer: int
    key: int
    length: int
    #: The communicator that it was shared on.
    _group: _native.Communicator = field(repr=False)


class Page(NamedTuple):
    """A slice of a local region that goes to a slice of equal length of a peer's region (bytes).

    With `count`, that many slices at regular distances, such as one column block of every row of a
    matrix. It counts as `count` pages of `length` bytes: the owner waits for `[length] * count`.

    Attributes:
        source: the local region that is read.
        source_offset: first byte read.
        destination: the peer's region that is written.
        destination_offset: first byte written.
        length: bytes of each slice.
        count: slices, at most 2**20.
        source_stride: bytes from the start of one slice read to the start of the next.
        destination_stride: bytes from the start of one slice written to the start of the next.
    """

    source: Region
    source_offset: int
    destination: RemoteRegion
    destination_offset: int
    length: int
    count: int = 1  # type: ignore[assignment]
    source_stride: int = 0
    destination_stride: int = 0


class Region:
    """Memory of this rank: a source of writes, and a destination once it was shared."""

    def __init__(
        self, native: _native.Region, group: _native.Communicator, device: str | None = None
    ) -> None:
        self._native = native
        #: The communicator that it was made on.
        self._group = group
        self._device = device

    def __len__(self) -> int:
        return len(self._native)

    @property
    def device(self) -> str | None:
        """Device of the memory, such as "cuda:0"; `None` for CPU memory."""
        return self._device

    @property
    def address(self) -> int:
        """Address of its first byte: of the CPU, or of its device."""
        return self._native.address()

    @property
    def writable(self) -> bool:
        """True if it may be a destination; false for a read-only array."""
        return self._native.writable

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The memory itself, `[length]` uint8: what peers write appears here.

        It stays readable while the array lives, also after the region was released or the
        communicator closed; no more writes arrive in it then.

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
        """The memory of a device, with CUDA's array interface: `[length]` uint8.

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
        """Release the region. Requests in flight keep it until they have ended."""
        self._native.release()


def rows(pages: Iterable[Page], peer: int, group: _native.Communicator) -> list[Row]:
    """Pages of a write to `peer`, as the native module takes them.

    Raises:
        WrongGroupError: if a region belongs to another communicator.
        RegionError: if a destination is memory of another rank.
        UnknownError: if there is no such rank.
    """
    taken = []
    for page in pages:
        if type(page) is not Page:
            expect(page, Page, "pages")
        source, offset, destination, destination_offset, length, count, *_ = page
        if type(source) is not Region or type(destination) is not RemoteRegion:
            expect(source, Region, "source of a page")
            expect(destination, RemoteRegion, "destination of a page")
        if (
            source._group is not group
            or destination._group is not group
            or destination.peer != peer
        ):
            refuse(page, peer, group)
        strides = (page.source_stride, page.destination_stride)
        place = (source._native.key(), offset, destination.key, destination_offset)
        taken.append((*place, length, count, *strides))
    return taken


def refuse(page: Page, peer: int, group: _native.Communicator) -> None:
    """Raise what is wrong with a page to `peer`."""
    check_group(page.source._group, group, "the source of a page")
    check_group(page.destination._group, group, "the destination of a page")
    if not 0 <= peer < group.world_size:
        raise UnknownError(f"rank {peer}: ranks 0 to {group.world_size - 1} exist; write to one")
    raise RegionError(
        f"the destination of a page: memory of rank {page.destination.peer}, in a write to rank "
        f"{peer}; pass regions that `share` returned for rank {peer}"
    )


def check_group(its: _native.Communicator, group: _native.Communicator, what: str) -> None:
    """Raise unless `what` belongs to this communicator.

    Raises:
        WrongGroupError: if it belongs to another one, or to the group before `reform`.
    """
    if its is not group:
        raise WrongGroupError(
            f"{what} belongs to another communicator ({described(its)}): one of this communicator "
            f"({described(group)}) is needed; make it on this one"
        )


def described(group: _native.Communicator) -> str:
    """A communicator, for errors."""
    return f"rank {group.rank} of {group.world_size}, generation {group.generation}"
