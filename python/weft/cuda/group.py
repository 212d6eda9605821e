"""Device all-to-alls of all ranks in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from weft import _gradient, _native
from weft._environment import check_variables
from weft._placement import by_layer
from weft.cuda import config as configuration
from weft.cuda.all_to_all import AllToAll
from weft.cuda.device import place_of
from weft.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft._placement import Placement
    from weft.cuda.config import Arguments

__all__ = ["local_group"]


def local_group(
    world_size: int,
    devices: Sequence[object] | None = None,
    *,
    watchdog: bool = False,
    gradients: bool = False,
    placement: Placement | Sequence[Placement] | None = None,
    **arguments: Unpack[Arguments],
) -> list[AllToAll]:
    """All ranks in this process: an `AllToAll` for each, in rank order, without a communicator.

    For one process that drives several GPUs, and for tests. Kernels of one rank wait for those of
    the others: launch every rank's before waiting for any. Ranks on one GPU share its context, in
    which the first use of a kernel, an allocation and a copy to pageable memory may wait for
    kernels of all ranks: between launches that depend on each other there must be none of these.
    With "twin", whose calls do their work at once, each rank's calls are made on a thread of its
    own.

    Args:
        world_size: how many ranks.
        devices: of each rank, as `AllToAll` takes them; by default "cuda:0" and on.
        watchdog: as of `AllToAll`; a thread for each rank.
        gradients: as of `AllToAll`.
        placement: as of `AllToAll`; each rank's `set_placement` is called by itself then.
        arguments: as of `AllToAll`.
    """
    check_variables()
    config = configuration.make(**arguments)
    layers = by_layer(placement, config.experts)
    if gradients:
        _gradient.refuse(config.wire_dtype, config.layout, placed=bool(layers))
    given = [f"cuda:{rank}" for rank in range(world_size)] if devices is None else devices
    if len(given) != world_size:
        raise ConfigurationError(f"{len(given)} devices are given for {world_size} ranks")
    names, places = zip(*map(place_of, given), strict=True)
    natives = _native.DeviceAllToAll.local_group(
        world_size,
        list(names),
        placement=[layer.native for layer in layers],
        **config.native(),
    )
    group = []
    for rank, (native, place) in enumerate(zip(natives, places, strict=True)):
        member = object.__new__(AllToAll)
        member._begin(native, config, place, (rank, world_size), layers, watchdog=watchdog)
        member._place = places[:rank].count(place)
        group.append(member)
    if gradients:

        def make(**more: Any) -> list[AllToAll]:
            return local_group(world_size, given, watchdog=watchdog, **more)

        _gradient.differentiate(group, arguments, make, config.timeout)
    return group
