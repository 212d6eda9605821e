"""Arguments of `Communicator.share`, checked on each rank and compared between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from weft.errors import ConfigurationMismatchError, RegionError
from weft.region import check_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft import _native
    from weft.counter import Counter
    from weft.region import Region

__all__ = ["check_alike", "check_shared"]

#: Longest text of a peer that an error repeats, in bytes.
_MAX_SHOWN: Final = 80


def check_shared(
    regions: Sequence[Region], counters: Sequence[Counter], group: _native.Communicator
) -> None:
    """Raise unless these can be shared.

    Raises:
        RegionError, WrongGroupError: as `Communicator.share`.
    """
    for region in regions:
        check_group(region._group, group, "a region")
        if not region.writable:
            raise RegionError(
                "a read-only array cannot be a destination: register one that may be written to, "
                "or use `alloc`"
            )
    for counter in counters:
        check_group(counter._native, group, "a counter")


def check_alike(gathered: Sequence[bytes], rank: int) -> None:
    """Raise unless all ranks passed as many regions and counters to `share` as this one.

    Raises:
        ConfigurationMismatchError: names all ranks, by what they passed.
    """
    if all(each == gathered[rank] for each in gathered):
        return
    by_text: dict[str, list[int]] = {}
    for peer, each in enumerate(gathered):
        by_text.setdefault(each[:_MAX_SHOWN].decode(errors="replace"), []).append(peer)
    passed = "; ".join(
        f"{'rank' if len(peers) == 1 else 'ranks'} {', '.join(map(str, peers))} passed {text}"
        for text, peers in by_text.items()
    )
    mismatch = ConfigurationMismatchError(
        f"share: {passed}: as many of both are needed on every rank; nothing was granted, pass as "
        "many everywhere"
    )
    mismatch.rank = next(peer for peer, each in enumerate(gathered) if each != gathered[rank])
    raise mismatch
