"""`weft-bench-fabric` ranks, one in each of two guests, over the provider verbs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from lab.errors import LabError
from lab.rdma.guests import address

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lab.rdma.guests import Guests

__all__ = ["MEMORY_MIB", "ranks"]

#: Guest memory for a rank's regions, in MiB.
MEMORY_MIB: Final = 1536
#: Rendezvous port for the ranks.
PORT: Final = 7100


def ranks(
    lab: Guests, command: Sequence[str], timeout_s: float, variables: Mapping[str, str]
) -> list[Any]:
    """Run a benchmark with rank 0 in guest 0 and rank 1 in guest 1; returns both JSON values.

    Args:
        lab: two guests with `MEMORY_MIB`.
        command: `weft-bench-fabric` and its arguments.
        timeout_s: seconds for both ranks.
        variables: further environment variables.

    Raises:
        LabError: if a rank fails, takes longer or prints no JSON.
    """
    common = {
        "WEFT_WORLD_SIZE": "2",
        "WEFT_ADDR": address(0),
        "WEFT_PORT": str(PORT),
        "WEFT_SECRET": "of these guests",
    }
    for guest in (0, 1):
        # A rank binds the address on its own guest.
        own = {"WEFT_RANK": str(guest), "WEFT_BIND": address(guest)}
        lab.start({guest: command}, {**common, **own, **variables})
    outcomes = lab.finish((0, 1), timeout_s)
    found = []
    for guest in (0, 1):
        try:
            found.append(json.loads(outcomes[guest].stdout))
        except json.JSONDecodeError as error:
            raise LabError(f"expected a JSON value: {error}\n{outcomes[guest]}") from None
    return found
