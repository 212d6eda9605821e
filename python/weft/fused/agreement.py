"""Agreement in a process group through the group's store: a verdict that is equal on all ranks.

Ranks need not take part: the ranks that come wait a limited time for the others. The first rank
that has a verdict writes it, and all others read that one, so a late rank has it too.

Ranks agree on a set of values, and on each place in a compiled graph.
"""

from __future__ import annotations

import hashlib
import json
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Place", "Verdict", "agree"]

#: Seconds between looks at the store, at first and at most.
_PAUSES: Final = (0.001, 0.05)


class Place(NamedTuple):
    """A place for a fused operator in a rank's graph.

    Attributes:
        position: the collective's number among all collectives that the group has in the graph.
        turn: number of collectives, in all groups, before the fused operator.
        text: operator, shape and dtype.
        reason: why the rank refuses; `None` if it accepts the place.
        detail: what may differ between ranks; distinguishes graphs.
    """

    position: int
    turn: int
    text: str
    reason: str | None
    detail: str = ""


class Verdict(NamedTuple):
    """Comparison result, the same on all ranks that asked.

    Attributes:
        reason: why all places are refused; `None` if all ranks have come with the same values.
        is_late: some ranks had not come in time.
        refusals: reasons why ranks disagree on one place, by position.
        digest: digest over all ranks' places, if they have come.
    """

    reason: str | None
    is_late: bool = False
    refusals: Mapping[int, str] = MappingProxyType({})
    digest: str = ""


def agree(
    store: Any,
    rank: int,
    ranks: int,
    key: str,
    values: Mapping[str, str],
    places: Sequence[Place],
    timeout: float,
) -> Verdict:
    """Compare values and places on all ranks.

    Args:
        store: the group's `torch.distributed.Store`.
        rank: this rank.
        ranks: number of ranks.
        key: names this comparison; used only once in a store.
        values: values to compare, by name; names are equal on all ranks.
        places: places to compare where values are equal, in the order in which the rank would run
            them.
        timeout: seconds to wait for the other ranks.
    """
    prefix = f"weft.fused/{key}"
    names = [f"{prefix}/{each}" for each in range(ranks)]
    store.set(names[rank], json.dumps([dict(values), places]))
    if _come(store, names, timeout):
        every = [json.loads(store.get(name)) for name in names]
        reason = _difference([its for its, _ in every])
        listed = [[Place(*place) for place in its] for _, its in every]
        refusals = {} if reason is not None else _refusals(listed)
        digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()[:16]
        verdict = Verdict(reason, False, refusals, digest)
    else:
        late = [each for each, name in enumerate(names) if not store.check([name])]
        verdict = Verdict(f"{_ranks(late)} did not compile it within {timeout:g} s", True)
    # The first to count writes; `get` waits for it.
    if store.add(f"{prefix}/verdicts", 1) == 1:
        written = (verdict.reason, verdict.is_late, list(verdict.refusals.items()), verdict.digest)
        store.set(f"{prefix}/verdict", json.dumps(written))
    reason, is_late, pairs, digest = json.loads(store.get(f"{prefix}/verdict"))
    return Verdict(reason, is_late, dict(pairs), digest)


def _come(store: Any, names: list[str], timeout: float) -> bool:
    end, pause = time.monotonic() + timeout, _PAUSES[0]
    while not store.check(names):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 2, _PAUSES[1])
    return True


def _difference(found: list[dict[str, str]]) -> str | None:
    for name, first in found[0].items():
        others = [rank for rank, its in enumerate(found) if its.get(name) != first]
        if others:
            return f"{name} of {_ranks(others)}: not equal to rank 0's"
    return None


def _refusals(every: list[list[Place]]) -> dict[int, str]:
    """Reasons against places, by position, from all ranks' places."""
    found = [{place.position: place for place in its} for its in every]
    refusals = {}
    for position in sorted({each for its in found for each in its}):
        reason = _refusal([its.get(position) for its in found])
        if reason is not None:
            refusals[position] = reason
    orders = [[each.position for each in its if each.position not in refusals] for its in every]
    for turn, position in enumerate(orders[0]):
        others = [rank for rank, order in enumerate(orders) if order[turn] != position]
        if others:
            refusals[position] = _other_order(others)
    return refusals


def _refusal(places: list[Place | None]) -> str | None:
    """Reason against a place, from each rank's view of it."""
    missing = [rank for rank, place in enumerate(places) if place is None]
    if missing:
        return f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'} no such place"
    present = [place for place in places if place is not None]
    for rank, place in enumerate(present):
        if place.reason is not None:
            return f"rank {rank} refuses: {place.reason}"
    first = present[0]
    for rank, place in enumerate(present):
        if place.text != first.text:
            return f"rank 0 has {first.text}, rank {rank} {place.text}"
    others = [rank for rank, place in enumerate(present) if place.turn != first.turn]
    return _other_order(others) if others else None


def _other_order(ranks: list[int]) -> str:
    return f"{_ranks(ranks)} would run it in another order than rank 0"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
