"""Regions: memory that peers can write to, and handles for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from weft.base.arguments import expect, expect_list, expect_number
from weft.base.errors import RegionError, UnknownError, WrongGroupError
from weft.base.timeout import seconds
from weft.group import descriptors

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from weft import _native

__all__ = ["Page", "Region", "RemoteRegion"]

#: Source region and offset, the peer's region and offset, length; slice count and strides.
Row: TypeAlias = tuple[int, int, int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region that this rank may write to, returned by `Communicator.share`.

    Attributes:
        peer: rank that granted it.
        key: number on that rank.
        length: in bytes.
    """

    peer: int
    key: int
    length: int
    #: Communicator on which it was shared.
    _group: _native.Communicator = field(repr=False)


class Page(NamedTuple):
    """Slice from a local region to an equally long slice in a peer's region (bytes).

    With `count`, that many slices at regular distances, such as one column block from every row in
    a matrix. It counts as `count` pages with `length` bytes each: the owner waits for
    `[length] * count`.

    Attributes:
        source: local region to read.
        source_offset: first byte read.
        destination: peer's region to write.
        destination_offset: first byte written.
        length: bytes per slice.
        count: slices, at most 2**20.
        source_stride: bytes between the starts of consecutive slices read.
        destination_stride: bytes between the starts of consecutive slices written.
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
    """Memory on this rank: a source for writes, and a destination once it was shared."""

    def __init__(
        self, native: _native.Region, group: _native.Communicator, device: str | None = None
    ) -> None:
        self._native = native
        #: Communicator on which it was made.
        self._group = group
        self._device = device

    def __len__(self) -> int:
        return len(self._native)

    @property
    def device(self) -> str | None:
        """Device that owns the memory, such as "cuda:0"; `None` for CPU memory."""
        return self._device

    @property
    def address(self) -> int:
        """Address of the first byte, on the CPU or the device."""
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
            RegionError: if it is device memory: see `cuda`.
        """
        if self._device is not None:
            raise RegionError(
                f"this region is memory of {self._device}, which the CPU does not read: "
                "torch.as_tensor(region.cuda) is a tensor there"
            )
        return np.frombuffer(memoryview(self._native.view()), dtype=np.uint8)

    @property
    def cuda(self) -> _native.View:
        """Device memory with CUDA's array interface: `[length]` uint8.

        `torch.as_tensor(region.cuda)` is a tensor on it, without a copy; append
        `.view(torch.float32)` for another dtype. It stays valid as `bytes` does. Wait for a write
        before launching a kernel that reads it, and let a kernel finish
        (`torch.cuda.synchronize()`, or an event) before sending what it writes.

        Raises:
            RegionError: if it is CPU memory: see `bytes`.
        """
        if self._device is None:
            raise RegionError("this region is CPU memory: `bytes` is an array of it")
        return self._native.view()

    def descriptor(
        self, peers: Sequence[int] | None = None, *, timeout: float = 30.0
    ) -> builtins.bytes:
        """Grant the region to peers, as bytes for `Communicator.remote_region` there.

        Only this rank calls it, at any time. The bytes may travel over any channel, such as a
        request to a scheduler; whoever changes them on the way is found out, and they are of no use
        outside of this group. The grant lasts until the region is released.

        Args:
            peers: ranks that may write to it; by default all others.
            timeout: seconds to wait for a peer's link.

        Raises:
            RegionError: if it cannot be a destination: it is read-only, or it was registered and a
                peer is reached over shm.
            UnknownError: if `peers` names a rank outside this group, or this rank, or the region
                was released.
        """
        if not self.writable:
            raise RegionError(
                "a descriptor of a read-only array: register one that may be written to, or use "
                "`alloc`"
            )
        group = self._group
        chosen = range(group.world_size) if peers is None else expect_list(peers, "peers")
        named = [expect_number(peer, "peers") for peer in chosen]
        others = [peer for peer in named if peers is not None or peer != group.rank]
        return descriptors.encode(group, self._native, others, seconds(timeout))

    def release(self) -> None:
        """Release the region. Requests in flight keep it until they end."""
        self._native.release()


def rows(pages: Iterable[Page], peer: int, group: _native.Communicator) -> list[Row]:
    """Pages for a write to `peer`, in the form that the native module takes.

    Raises:
        WrongGroupError: if a region belongs to another communicator.
        RegionError: if a destination is on another rank.
        UnknownError: if there is no such rank.
    """
    taken = []
    try:
        given = iter(pages)
    except TypeError:
        expect(pages, (list, tuple), "pages")
        raise
    for page in given:
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
    """Raise the error for an invalid page in a write to `peer`."""
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
    """Description of a communicator, for errors."""
    return f"rank {group.rank} of {group.world_size}, generation {group.generation}"
