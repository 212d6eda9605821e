"""Agreement of the ranks of a process group by its store: a verdict that is equal on all ranks.

Ranks need not take part: those that come wait for the others a limited time. The first rank that
has a verdict writes it, and all others read that one, so a rank that is late has it too.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Verdict", "agree"]

#: Seconds between looks at the store, at first and at most.
_PAUSES: Final = (0.001, 0.05)


class Verdict(NamedTuple):
    """Result of a comparison, the same on all ranks that asked.

    Attributes:
        reason: of a disagreement; `None` if all ranks have come with the same values.
        is_late: some ranks had not come in time.
    """

    reason: str | None
    is_late: bool = False


def agree(
    store: Any, rank: int, ranks: int, key: str, values: Mapping[str, str], timeout: float
) -> Verdict:
    """Compare values of all ranks.

    Args:
        store: a `torch.distributed.Store` of the group.
        rank: this rank.
        ranks: number of ranks.
        key: of this comparison; used once in the life of the store.
        values: to compare, by name; names are equal on all ranks.
        timeout: seconds to wait for the other ranks.
    """
    prefix = f"weft.fused/{key}"
    names = [f"{prefix}/{each}" for each in range(ranks)]
    store.set(names[rank], json.dumps(dict(values)))
    if _come(store, names, timeout):
        verdict = Verdict(_difference(store, names))
    else:
        late = [each for each, name in enumerate(names) if not store.check([name])]
        verdict = Verdict(f"{_ranks(late)} did not compile it within {timeout:g} s", True)
    # The first to count writes; `get` waits for it.
    if store.add(f"{prefix}/verdicts", 1) == 1:
        store.set(f"{prefix}/verdict", json.dumps(verdict))
    return Verdict(*json.loads(store.get(f"{prefix}/verdict")))


def _come(store: Any, names: list[str], timeout: float) -> bool:
    end, pause = time.monotonic() + timeout, _PAUSES[0]
    while not store.check(names):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 2, _PAUSES[1])
    return True


def _difference(store: Any, names: list[str]) -> str | None:
    found = [json.loads(store.get(name)) for name in names]
    for name, first in found[0].items():
        others = [rank for rank, its in enumerate(found) if its.get(name) != first]
        if others:
            return f"{name} of {_ranks(others)}: not equal to rank 0's"
    return None


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
