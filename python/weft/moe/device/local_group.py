"""Device all-to-alls for all ranks in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from weft import _native
from weft.base.environment import check_variables
from weft.base.errors import ConfigurationError
from weft.gpu.device import place_of
from weft.moe import gradient
from weft.moe.device import config as configuration
from weft.moe.device.all_to_all import AllToAll
from weft.moe.placement import by_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.moe.device.config import Arguments
    from weft.moe.placement import Placement

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

    For one process that drives several GPUs, and for tests. Kernels on one rank wait for kernels on
    the others: launch every rank's before waiting for any. Ranks on one GPU share one context, in
    which the first kernel use, an allocation and a copy to pageable memory may wait for kernels on
    all ranks: avoid all three between launches that depend on each other. With "twin", whose calls
    work synchronously, make each rank's calls on a separate thread.

    Args:
        world_size: number of ranks.
        devices: device by rank, as `AllToAll` takes them; by default "cuda:0" and on.
        watchdog: as in `AllToAll`; a thread for each rank.
        gradients: as in `AllToAll`.
        placement: as in `AllToAll`; call each rank's `set_placement` separately.
        arguments: as in `AllToAll`.
    """
    check_variables()
    config = configuration.make(**arguments)
    layers = by_layer(placement, config.experts)
    if gradients:
        gradient.refuse(config.wire_dtype, config.layout, placed=bool(layers))
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

        gradient.differentiate(group, arguments, make, config.timeout)
    return group
