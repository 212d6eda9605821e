"""Symmetric memory as tensors, and the device table that kernels read."""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weft import _native
from weft.base.errors import ConfigurationError, RegionError, UnknownError
from weft.base.timeout import seconds
from weft.gpu.device import place_of
from weft.gpu.memory import memory_at
from weft.group.communicator import Communicator
from weft.group.group import OPEN
from weft.group.region import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "TABLE",
    "Field",
    "Owner",
    "empty",
    "only_open",
    "owner",
    "peer",
    "region",
    "shown",
    "size_of",
    "table",
]


class Field(NamedTuple):
    """Layout of a table field, in bytes."""

    offset: int
    #: Bytes per element, an unsigned integer.
    width: int
    count: int  # type: ignore[assignment]


#: Fields in a domain's table by name, for loads in a Triton kernel.
TABLE: Final = {name: Field(*place) for name, *place in _native.table_fields()}


class Owner:
    """Keeps a block while a tensor shows it."""

    def __init__(
        self,
        native: _native.SymmetricMemory,
        device: torch.device,
        own_rank: int,
        group: Communicator | None,
    ) -> None:
        self.native, self.device, self.rank = native, device, own_rank
        #: `None` for ranks in one process.
        self._group = None if group is None else weakref.ref(group)
        self.addresses = native.addresses
        #: Context from `weft.triton.context`, once it was made.
        self.context: torch.Tensor | None = None

    def is_of(self, group: Communicator) -> bool:
        """True if the communicator has the same ranks."""
        return self._group is not None and self._group() is group

    def check(self) -> None:
        """Raise the error that the device recorded, until the communicator is closed."""
        if self._group is None or self._group() in OPEN:
            self.native.check()


#: By this rank's address. An entry goes with the last tensor.
_OWNERS: Final[weakref.WeakValueDictionary[int, Owner]] = weakref.WeakValueDictionary()

#: Regions of segments, by communicator and address.
_REGIONS: Final[weakref.WeakKeyDictionary[Communicator, dict[int, Region]]] = (
    weakref.WeakKeyDictionary()
)


def empty(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    device: object = "cuda",
    communicator: Communicator | None = None,
    memory: str = "fd",
    timeout: float = 60.0,
) -> torch.Tensor:
    """See `weft.symmetric_empty`."""
    group = only_open() if communicator is None else communicator
    sizes, element = size_of(shape, dtype)
    name, place = place_of(device)
    native = _native.SymmetricMemory(
        group._native,
        device=name,
        memory=memory,
        bytes=prod(sizes) * element.itemsize,
        timeout=seconds(timeout),
    )
    return shown(native, place, group.rank, sizes, element, group)


def size_of(
    shape: int | Sequence[int], dtype: torch.dtype | None
) -> tuple[tuple[int, ...], torch.dtype]:
    """A tensor's shape and dtype.

    Raises:
        ConfigurationError: if a size is negative.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in sizes):
        raise ConfigurationError(f"shape is {sizes}: sizes from 0 on are needed")
    return sizes, torch.get_default_dtype() if dtype is None else dtype


def shown(
    native: _native.SymmetricMemory,
    place: torch.device,
    rank: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    group: Communicator | None = None,
) -> torch.Tensor:
    """This rank's part in symmetric memory as a tensor, which keeps it."""
    its = Owner(native, place, rank, group)
    own = its.addresses[rank]
    _OWNERS[own] = its
    return _show(its, own, prod(sizes), dtype).view(sizes)


def peer(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """See `weft.symmetric_peer`."""
    its = owner(tensor)
    if not 0 <= rank < len(its.addresses):
        raise UnknownError(f"there is no rank {rank} among {len(its.addresses)}")
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = _show(its, its.addresses[rank], elements, tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def region(tensor: torch.Tensor, *, communicator: Communicator | None = None) -> tuple[Region, int]:
    """See `weft.symmetric_region`."""
    its = owner(tensor)
    group = only_open() if communicator is None else communicator
    own, (_, offset) = its.addresses[its.rank], its.native.place
    known = _REGIONS.setdefault(group, {})
    found = known.get(own - offset)
    # A released region does not keep the segment, whose address may be another's since.
    if found is None or found._group is not group._native or found._native.is_released:
        name = f"cuda:{its.device.index or 0}" if its.device.type == "cuda" else None
        found = Region(its.native.region(group._native), group._native, name)
        known[own - offset] = found
    return found, offset + tensor.data_ptr() - own


def owner(tensor: torch.Tensor) -> Owner:
    """Owner of the block that a symmetric tensor shows.

    Raises:
        RegionError: if the tensor's memory is not symmetric.
    """
    found = _OWNERS.get(tensor.untyped_storage().data_ptr())
    if found is None:
        raise RegionError("the tensor's memory is not symmetric: weft.symmetric_empty makes it")
    return found


def table(tensor: torch.Tensor) -> int:
    """Table address for a symmetric tensor's domain; `TABLE` has the fields.

    Raises:
        RegionError: if the tensor's memory is not symmetric.
    """
    return owner(tensor).native.table


def _show(its: Owner, address: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    if elements == 0:
        return torch.empty(0, dtype=dtype, device=its.device)
    row = memory_at(address, (1, elements * dtype.itemsize), its.device, its)
    return row[0].view(dtype)


def only_open() -> Communicator:
    """The default communicator: the only open one.

    Raises:
        ConfigurationError: if not exactly one communicator is open.
    """
    found = [group for group in OPEN if isinstance(group, Communicator) and not group.is_internal]
    if len(found) != 1:
        raise ConfigurationError(
            f"{len(found)} communicators are open in this process: pass communicator="
        )
    return found[0]
