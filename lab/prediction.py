"""Simulator predictions for lab runs, only from network constants.

Link rate and MTU are configured; two ranks measure the message time on the idle network. No
constant is fitted to an all-reduce.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from weft.sim import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.network import Plan

__all__ = ["SEEDS", "Constants", "predicted_seconds", "wire_efficiency"]

#: Seeds for the simulator's hash.
SEEDS: Final = 9
#: Bytes in a full packet that are no payload: IP and TCP with timestamps, and Ethernet.
IP_AND_TCP: Final = 52
ETHERNET: Final = 14

#: Simulator constants that differ from the ideal ones.
Constants = dict[str, float]


def wire_efficiency(mtu: int) -> float:
    """Payload share in full packets."""
    return (mtu - IP_AND_TCP) / (mtu + ETHERNET)


def predicted_seconds(
    plan: Plan,
    program: dict[str, Any],
    places: Sequence[int],
    size: int,
    megabits: float,
    constants: Constants,
) -> list[float]:
    """A schedule's times, one for each hash seed, in ascending order.

    Args:
        plan: the network.
        program: the schedule.
        places: endpoint by rank.
        size: vector bytes.
        megabits: link rate, in Mbit/s.
        constants: simulator constants.

    Returns:
        One time if no path depends on the hash.
    """
    hashed = depends_on_hash(plan, program, places)
    found = []
    for seed in range(1, 1 + (SEEDS if hashed else 1)):
        outcome = simulate(
            {
                "scenario": "collective",
                "cluster": {
                    "topology": plan.spec(megabits),
                    "routing": "ecmp",
                    "seed": seed,
                    "constants": {"set": constants},
                },
                "job": {"program": program, "bytes": size, "placement": {"endpoints": places}},
            }
        )
        found.append(float(outcome["time_s"]))
    return sorted(found)


def depends_on_hash(plan: Plan, program: dict[str, Any], places: Sequence[int]) -> bool:
    """True if a rank pair that exchanges writes has several shortest paths."""
    return any(
        plan.path(plan.hosts[places[rank]], plan.hosts[places[operation["write"]["to"]]]) is None
        for rank, operations in enumerate(program["operations"])
        for operation in operations
        if "write" in operation
    )
