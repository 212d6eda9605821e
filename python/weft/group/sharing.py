"""Argument checks for `Communicator.share`, on each rank and between ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from weft.base.arguments import expect
from weft.base.errors import AlreadySharedError, ConfigurationMismatchError, RegionError
from weft.group.counter import Counter
from weft.group.region import Region, check_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weft import _native
    from weft.group.group import Group

__all__ = ["check_alike", "check_equal", "check_shared", "described"]

#: Maximum length, in bytes, when a peer's text is shown in an error.
_MAX_SHOWN: Final = 80


def check_shared(
    regions: Sequence[Region], counters: Sequence[Counter], group: _native.Communicator
) -> None:
    """Raise unless these can be shared.

    Raises:
        AlreadySharedError, RegionError, UnknownError, WrongGroupError: as in `Communicator.share`.
    """
    for region in regions:
        expect(region, Region, "regions")
        check_group(region._group, group, "a region")
        if not region.writable:
            raise RegionError(
                "a read-only array cannot be a destination: register one that may be written to, "
                "or use `alloc`"
            )
    for counter in counters:
        expect(counter, Counter, "counters")
        check_group(counter._native, group, "a counter")
        if group.is_shared(counter.number):
            raise AlreadySharedError(
                f"counter {counter.number}: shared before; share each counter once"
            )


def described(
    regions: Sequence[Region], counters: Sequence[Counter], group: _native.Communicator
) -> bytes:
    """`share` arguments for the other ranks: a text that must be equal, then the peers as JSON."""
    text = f"{len(regions)} regions and {len(counters)} counters"
    if any(counter.window != 1 for counter in counters):
        text += f" (windows {', '.join(str(counter.window) for counter in counters)})"
    everyone = group.world_size - 1
    peers = [None if len(each.peers) == everyone else each.peers for each in counters]
    return f"{text}\0{json.dumps(peers)}".encode()


def check_alike(gathered: Sequence[bytes], rank: int) -> None:
    """Raise unless all ranks' arguments to `share` fit together.

    Raises:
        ConfigurationMismatchError: names all ranks, by what they passed; or two ranks, if only one
            has a counter toward the other.
    """
    texts = [each.partition(b"\0")[0] for each in gathered]
    if all(each == texts[rank] for each in texts):
        check_pairs([json.loads(each.partition(b"\0")[2]) for each in gathered])
        return
    by_text: dict[str, list[int]] = {}
    for peer, each in enumerate(texts):
        by_text.setdefault(each[:_MAX_SHOWN].decode(errors="replace"), []).append(peer)
    passed = "; ".join(
        f"{'rank' if len(peers) == 1 else 'ranks'} {', '.join(map(str, peers))} passed {text}"
        for text, peers in by_text.items()
    )
    mismatch = ConfigurationMismatchError(
        f"share: {passed}: expected equal numbers of both on every rank; no region was granted, "
        "pass as many everywhere"
    )
    mismatch.rank = next(peer for peer, each in enumerate(texts) if each != texts[rank])
    raise mismatch


def check_equal(group: Group, settings: Mapping[str, object], timeout: float) -> None:
    """Raise on all ranks if settings differ; every rank calls it.

    Raises:
        ConfigurationMismatchError: names rank 0 and the first rank that differs from it.
    """
    text = ", ".join(f"{name}={value}" for name, value in settings.items())
    given = group.all_gather(text.encode(), timeout=timeout)
    for rank, other in enumerate(given):
        if other != given[0]:
            raise ConfigurationMismatchError(
                f"rank 0 passed {given[0].decode()}, rank {rank} {other.decode()}: expected equal "
                "values"
            )


def check_pairs(peers: Sequence[Sequence[Sequence[int] | None]]) -> None:
    """Raise unless each counter connects both ends alike.

    Args:
        peers: by rank and counter, the ranks that it connects; `None` for all others.
    """
    for position, of_ranks in enumerate(zip(*peers, strict=True)):
        connected = [None if each is None else set(each) for each in of_ranks]
        if all(each is None for each in connected):
            continue
        for one, ours in enumerate(connected):
            for other in range(one):
                theirs = connected[other]
                if (ours is None or other in ours) != (theirs is None or one in theirs):
                    mismatch = ConfigurationMismatchError(
                        f"share: counter {position} in order connects only one of ranks {other} "
                        f"and {one} with the other; no region was granted, name each rank in the "
                        "other's peers"
                    )
                    mismatch.rank = other
                    raise mismatch
