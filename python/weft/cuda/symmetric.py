"""Symmetric memory as tensors, and the device table that kernels read."""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from weft import _native
from weft._group import OPEN
from weft._timeout import seconds
from weft.communicator import Communicator
from weft.cuda.device import place_of
from weft.cuda.memory import memory_at
from weft.errors import ConfigurationError, RegionError, UnknownError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TABLE", "Field", "empty", "only_open", "peer", "shown", "size_of", "table"]


class Field(NamedTuple):
    """Layout of a field of the table, in bytes."""

    offset: int
    #: Bytes of an element, an unsigned integer.
    width: int
    count: int  # type: ignore[assignment]


#: Fields of a domain's table by name, for loads of a Triton kernel.
TABLE: Final = {name: Field(*place) for name, *place in _native.table_fields()}


class _Owner:
    """Keeps a block while a tensor shows it."""

    def __init__(self, native: _native.SymmetricMemory, device: torch.device) -> None:
        self.native, self.device = native, device
        self.addresses = native.addresses


#: By the address of this rank's part. An entry goes with the last tensor.
_OWNERS: Final[weakref.WeakValueDictionary[int, _Owner]] = weakref.WeakValueDictionary()


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
    return shown(native, place, group.rank, sizes, element)


def size_of(
    shape: int | Sequence[int], dtype: torch.dtype | None
) -> tuple[tuple[int, ...], torch.dtype]:
    """Sizes and dtype of a tensor.

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
) -> torch.Tensor:
    """This rank's part of symmetric memory as a tensor, which keeps it."""
    owner = _Owner(native, place)
    own = owner.addresses[rank]
    _OWNERS[own] = owner
    return _show(owner, own, prod(sizes), dtype).view(sizes)


def peer(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """See `weft.symmetric_peer`."""
    base = tensor.untyped_storage().data_ptr()
    owner = _OWNERS.get(base)
    if owner is None:
        raise RegionError("the tensor's memory is not symmetric: weft.symmetric_empty makes it")
    if not 0 <= rank < len(owner.addresses):
        raise UnknownError(f"there is no rank {rank} among {len(owner.addresses)}")
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    whole = _show(owner, owner.addresses[rank], elements, tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def table(tensor: torch.Tensor) -> int:
    """The address of the table of the domain that a symmetric tensor is of; `TABLE` has its fields.

    Raises:
        RegionError: if the tensor's memory is not symmetric.
    """
    owner = _OWNERS.get(tensor.untyped_storage().data_ptr())
    if owner is None:
        raise RegionError("the tensor's memory is not symmetric: weft.symmetric_empty makes it")
    return owner.native.table


def _show(owner: _Owner, address: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    if elements == 0:
        return torch.empty(0, dtype=dtype, device=owner.device)
    row = memory_at(address, (1, elements * dtype.itemsize), owner.device, owner)
    return row[0].view(dtype)


def only_open() -> Communicator:
    """The default communicator: the only one that is open.

    Raises:
        ConfigurationError: if there is not one open communicator.
    """
    found = [group for group in OPEN if isinstance(group, Communicator)]
    if len(found) != 1:
        raise ConfigurationError(
            f"{len(found)} communicators are open in this process: pass communicator="
        )
    return found[0]
